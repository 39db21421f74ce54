"""`baton plan` shows how a question would be routed. The plan is made and journaled, but not executed."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from app.cli import estimate, event_loop, private_engine, run_record, run_tree, run_words, storage, terminal
from app.cli.asked import Asked
from app.cli.runs import PREVIEW_KEY
from app.core.message.chat import Message, Task
from app.core.message.chat import Text as Said
from app.core.plan.arms import tier_for
from app.core.pool.budget import input_bound
from app.core.pool.catalog import Catalog, Limits, Tier
from app.core.pool.policy import Overrides
from app.engine.delivery.messages import Ended
from app.engine.runs.admission import Order
from app.errors import ConfigInvalid
from app.process.config import Loaded, configure
from app.process.wiring import Runtime


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the plan, the eligible and the excluded workers, and an estimate. Returns 1 if no plan was made."""
    loaded = configure(environ)
    terminal.log_to_stderr("warning")
    order = order_of(loaded.catalog, asked)
    storage.announce(loaded.settings)
    with terminal.err().status("planning"):
        ended, drawn, shown = event_loop.run(_preview(loaded, order))
    terminal.print_json(shown) if asked.json else terminal.out().print(drawn)
    return 0 if ended.error is None else 1


def order_of(catalog: Catalog, asked: Asked) -> Order:
    """The order of a preview. Raises `ConfigInvalid` for a tier or an effort that there is not."""
    tier, effort = _tier(catalog, asked)
    overrides = Overrides(frozenset(asked.allow), frozenset(asked.deny), asked.pin)
    return Order(
        task=Task((Message("user", (Said(asked.question),)),)),
        tier=tier,
        model=asked.tier,
        effort=effort,
        limits=tier.efforts[effort],
        tenant="default",
        key=PREVIEW_KEY,
        labels=frozenset(asked.label),
        overrides=overrides,
        preview=True,
    )


def _tier(catalog: Catalog, asked: Asked) -> tuple[Tier, str]:
    tier = tier_for(catalog, asked.tier)
    if tier is None:
        raise ConfigInvalid([f"--tier: there is no such tier; there are {', '.join(catalog.tiers)}"])
    effort = asked.effort or tier.effort
    if effort not in tier.efforts:
        raise ConfigInvalid([f"--effort: {tier.name} has no such level; there are {', '.join(tier.efforts)}"])
    return tier, effort


async def _preview(loaded: Loaded, order: Order) -> tuple[Ended, Tree, dict[str, Any]]:
    async with storage.used(loaded.settings), private_engine.at_work(loaded, 1) as opened:
        ended = await private_engine.carried_out(opened, order)
        return ended, *await _drawn(opened, ended, order.limits)


async def _drawn(opened: Runtime, ended: Ended, limits: Limits) -> tuple[Tree, dict[str, Any]]:
    store = opened.context.store
    shown, question = await run_record.read(store, await store.run(ended.state.run))
    drawn = run_tree.draw(shown, question, full=False)
    if ended.error is None and ended.state.current:
        drawn.add(_estimate(opened.pool.catalog(), ended, question or "", limits))
    return drawn, shown


def _estimate(catalog: Catalog, ended: Ended, question: str, limits: Limits) -> Text:
    tier = catalog.tiers[ended.state.admitted.tier]
    steps = [
        estimate.Planned(
            step.n,
            catalog.workers[(tier.conductor.worker or "") if step.opens else step.worker],
            step.access.user,
            step.access.steps,
        )
        for step in ended.state.current
    ]
    size = input_bound([Message("user", (Said(question),))]) // 4
    likely = estimate.estimate(steps, size, limits)
    return Text.assemble(
        ("estimate: ", "bold"),
        f"{terminal.dollars(likely.usd)} and {run_words.seconds(likely.seconds)} to execute "
        f"({estimate.OUTPUT_TOKENS} tokens a step); at most {terminal.dollars(likely.usd_most)}. "
        f"Making the plan cost {terminal.dollars(ended.bill.usd)}.",
    )
