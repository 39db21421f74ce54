"""`baton plan` shows how a question would be routed. The plan is made and journaled, but not executed."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.embedded import engine
from app.cli.runs import run_tree, run_words
from app.core.message.chat import Message, Task
from app.core.message.chat import Text as Said
from app.core.plan.arms import tier_for
from app.core.pool.catalog import MILLION, Catalog, Tier
from app.core.pool.policy import Overrides, unknown_names
from app.engine.delivery.messages import TurnEnd
from app.engine.runs.admission import Order
from app.errors import ConfigInvalid, InvalidRequest
from app.gateway.plans import revisions
from app.gateway.runs import forecasts
from app.process.config import Configuration, configure
from app.process.wiring import Runtime

PREVIEW_KEY = "baton-plan"
"""The key of runs that `baton plan` has journaled, which are planned and not executed."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the plan, the eligible and the excluded workers, and an estimate. Returns 1 if no plan was made."""
    config = configure(environ)
    terminal.log_to_stderr("warning")
    order = order_of(config.catalog, args)
    storage.print_database(config.settings)
    with terminal.stderr().status("planning"):
        end, tree, record = event_loop.run(_preview(config, order))
    if args.json:
        terminal.print_json(record)
    else:
        terminal.stdout().print(tree)
    return int(end.error is not None)


def order_of(catalog: Catalog, args: Arguments) -> Order:
    """Return the order of a preview. Raises `ConfigInvalid` for a tier or an effort that there is not."""
    tier, effort = _tier(catalog, args)
    overrides = Overrides(frozenset(args.allow), frozenset(args.deny), args.pin)
    return Order(
        task=Task((Message("user", (Said(args.question),)),)),
        tier=tier,
        model=args.tier,
        effort=effort,
        limits=tier.efforts[effort],
        tenant="default",
        key=PREVIEW_KEY,
        labels=frozenset(args.label),
        overrides=overrides,
        preview=True,
    )


def _tier(catalog: Catalog, args: Arguments) -> tuple[Tier, str]:
    tier = tier_for(catalog, args.tier)
    if tier is None:
        raise ConfigInvalid([f"--tier: there is no such tier; there are {', '.join(catalog.tiers)}"])
    effort = args.effort or tier.effort
    if effort not in tier.efforts:
        raise ConfigInvalid([f"--effort: {tier.name} has no such level; there are {', '.join(tier.efforts)}"])
    return tier, effort


async def _preview(config: Configuration, order: Order) -> tuple[TurnEnd, Tree, dict[str, Any]]:
    async with storage.existing_database(config.settings), engine.start_engine(config, 1) as runtime:
        end = await run_to_end(runtime, order)
        store = runtime.context.store
        record, question = await run_tree.read_run(store, await store.run(end.state.run))
        tree = run_tree.draw(record, question, full=False)
        if end.error is None and end.state.current_steps:
            tree.add(await _estimate(runtime, end, order))
        return end, tree, record


async def run_to_end(runtime: Runtime, order: Order) -> TurnEnd:
    """Carry out a preview, and return its end. Raises `ConfigInvalid` if an option names an unknown worker."""
    try:
        return await engine.run_to_end(runtime, order)
    except InvalidRequest as refused:
        if refused.param != "baton.pool":
            raise
        unknown = ", ".join(unknown_names(order.tier, order.overrides))
        fault = f"--allow, --deny, --pin: {unknown}: not in the pool of {order.tier.name}"
        raise ConfigInvalid([f"{fault}; there are {', '.join(order.tier.pool)}"]) from None


async def _estimate(runtime: Runtime, end: TurnEnd, order: Order) -> Text:
    store = runtime.context.store.of_tenant(order.tenant)
    steps = await revisions.steps_of(store, revisions.revision_of_state(end.state, order.key))
    history = await forecasts.read_history(store, order.tenant)
    forecast = forecasts.of_plan(runtime.pool.catalog(), order.task, steps, order.limits, history)
    return estimate(forecasts.estimate(forecast), end.bill.usd / MILLION)


def estimate(forecast: Mapping[str, Any] | None, planning_usd: float) -> Text:
    """Return the forecast of a plan, as the API has it, in words; `planning_usd` are the dollars that making the plan
    cost."""
    if forecast is None:
        return Text("estimate: none, because a worker of the plan is not in the pool file, or is the conductor")
    planning = f"Making the plan cost {run_words.cost(planning_usd)}."
    return Text.assemble(("estimate: ", "bold"), f"{run_words.estimate(forecast)}. {planning}")
