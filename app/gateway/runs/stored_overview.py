"""The parts of an overview that are read from the database; `overview.py` makes JSON of figures.

`baton top` reads them without the web framework. Figures are made by a few statements over the newest runs and calls.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import asdict

from app.core.pool.catalog import MILLION, Price
from app.core.transparency.notes import NoteInvalid, parse_checkpoint
from app.gateway.runs import overview
from app.gateway.wire import query
from app.store.protocol import Budgets, Period, RunLists, Store

MOST_RUNS: Final = 20_000
"""The newest runs that one overview is about."""
MOST_CALLS: Final = 50_000
"""The newest calls, and ratings, that one overview is about."""
MOST_BUDGETS: Final = 30
"""The most budgets of an overview: each is looked up by itself."""
MOST_QUEUED: Final = 10_000
"""The highest count of waiting tickets."""
PERIODS: Final[Mapping[str, tuple[float, int]]] = {
    "hour": (3_600.0, 12),
    "day": (86_400.0, 24),
    "week": (7 * 86_400.0, 28),
    "month": (30 * 86_400.0, 30),
}
"""The length of each period in seconds, and the number of its buckets."""
PROCESS: Final = "Only a process of the service knows it: ask `GET /v1/overview`."
Json = dict[str, Any]


async def figures(lists: RunLists, filters: query.OverviewFilters, now: float, prices: Mapping[str, Price]) -> Json:
    """Return the part of an overview that is about the runs of a tenant, or of all, and about their calls."""
    until = filters.until
    if until is None:
        until = now
    seconds, buckets = PERIODS[filters.period]
    period = Period(
        tenant=filters.tenant,
        since=until - seconds,
        until=until,
        buckets=buckets,
        most_runs=MOST_RUNS,
        most_calls=MOST_CALLS,
    )
    run_figures = await lists.figures(period)
    return {
        "object": "overview",
        "period": filters.period,
        "since": period.since,
        "until": until,
        "tenant": period.tenant,
        "runs_since": run_figures.since,
        "calls_since": run_figures.calls_since,
        **overview.runs_of(period, run_figures),
        "workers": overview.workers_of(run_figures, prices),
        "ejected": [asdict(ejected) for ejected in run_figures.ejected],
        "open": [{"state": state, "runs": runs, "oldest_since": oldest} for state, runs, oldest in run_figures.open],
    }


async def read_overview(store: Store, filters: query.OverviewFilters, now: float) -> Json:
    """Return the overview as a command shows it, which reads the database alone: `hidden` says what only a process
    knows."""
    hidden = dict.fromkeys(("breakers", "conductors", "service"), PROCESS)
    return {
        **await figures(store.lists, filters, now, {}),
        **await budgets(store, now, filters.tenant),
        "queue": await queue(store, now),
        **dict.fromkeys(hidden),
        "log": await log(store),
        "hidden": hidden,
    }


async def budgets(store: Budgets, now: float, tenant: str | None) -> Json:
    """Return the latest window of the account that has spent most of each budget, those with the least left first; and
    how many there are."""
    rows: list[Json] = []
    all_budgets = await store.budgets(tenant)
    for budget in all_budgets[:MOST_BUDGETS]:
        windows = await store.budget_use(budget.id, 1)
        present = [window for window in windows if window.start <= now < window.end]
        since = None
        if present:
            since = present[0].start
        used = sum(window.held + window.spent for window in present)
        rows.append(
            {
                "id": budget.id,
                "tenant": budget.tenant,
                "scope": budget.scope,
                "name": budget.name,
                "period": budget.period,
                "since": since,
                "usd": budget.usd / MILLION,
                "used_usd": used / MILLION,
                "left_usd": (budget.usd - used) / MILLION,
            }
        )
    rows.sort(key=lambda row: (row["left_usd"] / max(row["usd"], 1 / MILLION), row["id"]))
    return {"budgets": rows, "budgets_total": len(all_budgets)}


async def queue(store: Store, now: float) -> Json:
    """Return the number of tickets and runs that no engine has taken, and how long the oldest has waited."""
    backlog = await store.backlog(now, MOST_QUEUED)
    since = backlog.oldest_since
    waits = None
    if since is not None:
        waits = max(now - since, 0.0)
    return {"waiting": backlog.waiting, "most": MOST_QUEUED, "oldest_seconds": waits}


async def log(store: Store) -> Json:
    """Return the state of the transparency log; the root is null before the first checkpoint, and for one that cannot
    be read."""
    state = await store.log.state()
    root = None
    if state.checkpoint is not None:
        try:
            root = parse_checkpoint(state.checkpoint.partition("\n\n")[0] + "\n").root.hex()
        except NoteInvalid:
            root = None
    return {
        "size": state.size,
        "root": root,
        "sealed_at": state.sealed_at,
        "waiting": state.waiting,
        "lag_seconds": state.lag,
        "catching_up": state.catching_up,
    }
