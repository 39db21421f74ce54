"""`baton budgets set|ls|show|rm` manages budgets over several runs."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from app.cli import event_loop, storage, terminal
from app.cli.administration.keys import find_key
from app.cli.arguments import Arguments
from app.core.pool import budgets
from app.core.pool.budgets import EVERYBODY, Budget, Scope
from app.core.pool.catalog import MILLION
from app.errors import ConfigInvalid, NotFound
from app.process.config import Settings
from app.store.protocol import BudgetUse, Store

MOST_ACCOUNTS = 10_000
"""Windows of one budget that are read for the sums of `baton budgets ls`."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = storage.read_settings(environ)
    verbs = {"set": _set, "ls": _list, "show": _show, "rm": _remove}
    event_loop.run(verbs[args.verb](settings, args, now()))
    return 0


# -- set and rm


async def _set(settings: Settings, args: Arguments, now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        scope, name = await _choose_scope(store, args, now)
        budget = Budget(
            tenant=args.tenant,
            scope=scope,
            name=name,
            period=args.per,
            usd=args.usd,
            zone=args.zone,
            soft=args.soft,
            created_at=now,
            slices=args.slices,
        )
        faults = budgets.faults(budget)
        if faults:
            raise ConfigInvalid(faults)
        if not await store.tenants(budget.tenant):
            words = f"No key has the tenant {budget.tenant} yet: `baton tenants ls` lists those that there are."
            terminal.stderr().print(words, soft_wrap=True)
        await store.set_budget(budget, by=storage.operator())
    if args.json:
        terminal.print_json(budget_record(budget, ()))
        return
    words = f"{budget.id}: {terminal.dollars(budget.usd)} for each {budget.period} ({budget.zone})."
    terminal.stdout().print(words, soft_wrap=True)


async def _choose_scope(store: Store, args: Arguments, now: float) -> tuple[Scope, str]:
    """Return the scope and the name that the command names. Raises `ConfigInvalid` if it names several."""
    options: list[tuple[Scope, str | None]] = [("key", args.key), ("user", args.user), ("team", args.team)]
    scopes = [(scope, name) for scope, name in options if name is not None]
    if len(scopes) > 1:
        raise ConfigInvalid(["name one of --key, --user and --team"])
    if not scopes:
        return "tenant", ""
    scope, name = scopes[0]
    if scope != "key" or name == EVERYBODY:
        return scope, name
    keys_of_tenant = [row for row in await store.keys() if row.tenant == args.tenant]
    return scope, find_key(keys_of_tenant, name, now).id


async def _remove(settings: Settings, args: Arguments, _now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        budget = await _find_budget(store, args.budget)
        await store.remove_budget(budget.id, by=storage.operator())
    if args.json:
        terminal.print_json(budget_record(budget, ()))
        return
    terminal.stdout().print(f"The budget {budget.id} is removed.", soft_wrap=True)


async def _find_budget(store: Store, budget_id: str) -> Budget:
    budget = await store.budget(budget_id)
    if budget is None:
        raise NotFound("There is no budget with this id; `baton budgets ls` lists them.")
    return budget


# -- ls and show


async def _list(settings: Settings, args: Arguments, _now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        clock = await store.clock()
        rows = []
        for budget in await store.budgets(args.tenant):
            rows.append((budget, await _current_windows(store, budget, clock)))
    if args.json:
        terminal.print_json([budget_record(budget, uses) for budget, uses in rows])
        return
    table = terminal.table()
    for column in ("id", "limit", "spent", "held", "accounts", "warns at", "window ends"):
        table.add_column(column, overflow="fold")
    for budget, uses in rows:
        terminal.add_row(table, _cells(budget, uses, clock))
    terminal.print_table(table, "There are no budgets; `baton budgets set USD` makes one.")


async def _current_windows(store: Store, budget: Budget, clock: float) -> list[BudgetUse]:
    """Return the present windows of a budget's accounts."""
    uses = await store.budget_use(budget.id, MOST_ACCOUNTS)
    return [use for use in uses if use.end > clock]


def _cells(budget: Budget, uses: Sequence[BudgetUse], clock: float) -> tuple[str, ...]:
    """Return the row of a budget with the present windows of its accounts. These end as they did when they began, also
    after another time zone was set; so accounts may differ."""
    ends = {use.end for use in uses} or {budgets.window(budget.period, budget.zone, clock).end}
    limit, soft = terminal.dollars(budget.usd), "-"
    if budget.name == EVERYBODY:
        limit += " each"
    if budget.soft is not None:
        soft = f"{budget.soft:.0%}"
    total_spent = sum([use.spent for use in uses])
    total_held = sum([use.held for use in uses])
    return (
        budget.id,
        limit,
        terminal.dollars(total_spent),
        terminal.dollars(total_held),
        str(len(uses)),
        soft,
        ", ".join([_local_minute(end, budget.zone) for end in sorted(ends)]),
    )


async def _show(settings: Settings, args: Arguments, _now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        budget = await _find_budget(store, args.budget)
        account = None
        if args.of is not None:
            account = budgets.account(budget, args.of)
        uses = await store.budget_use(budget.id, args.windows, account)
    if args.json:
        terminal.print_json(budget_record(budget, uses))
        return
    words = f"{budget.id}: {terminal.dollars(budget.usd)}"
    if budget.soft is not None:
        words += f", warns at {budget.soft:.0%}"
    if budget.slices is not None:
        words += f", in {budget.slices} slices"
    terminal.stdout().print(words, soft_wrap=True)
    table = terminal.table()
    for column in ("account", "window", "spent", "held", "overrun", "warned"):
        table.add_column(column, overflow="fold")
    for use in uses:
        terminal.add_row(table, _window_cells(budget, use))
    terminal.print_table(table, "Nothing was spent.")


def _window_cells(budget: Budget, use: BudgetUse) -> tuple[str, ...]:
    overrun, warning = "-", "-"
    if use.overrun:
        overrun = terminal.dollars(use.overrun)
    if use.warned_at is not None:
        warning = _local_minute(use.warned_at, budget.zone)
    return (
        use.account.removeprefix(budget.id) or "-",
        _local_minute(use.start, budget.zone),
        terminal.dollars(use.spent),
        terminal.dollars(use.held),
        overrun,
        warning,
    )


def _local_minute(at: float, zone: str) -> str:
    """Return a point in time in seconds since 1970 to the minute, in a time zone that it names."""
    return f"{datetime.fromtimestamp(at, UTC).astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M} {zone}"


def budget_record(budget: Budget, uses: Sequence[BudgetUse]) -> dict[str, Any]:
    """Return a budget with windows of its accounts. Times are seconds since 1970, amounts are dollars."""
    return {
        "id": budget.id,
        "tenant": budget.tenant,
        "scope": budget.scope,
        "name": budget.name,
        "per": budget.period,
        "usd": budget.usd / MILLION,
        "zone": budget.zone,
        "soft": budget.soft,
        "slices": budget.slices,
        "created_at": budget.created_at,
        "windows": [_window_record(use) for use in uses],
    }


def _window_record(use: BudgetUse) -> dict[str, Any]:
    return {
        "account": use.account,
        "start": use.start,
        "end": use.end,
        "spent_usd": use.spent / MILLION,
        "held_usd": use.held / MILLION,
        "overrun_usd": use.overrun / MILLION,
        "warned_at": use.warned_at,
    }
