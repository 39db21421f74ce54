"""`GET /v1/overview`: what runs, what it costs and what is wrong now, over an hour, a day, a week or a month.

A key sees the figures of its tenant's runs, a key of all tenants those of every run. Parts about what tenants share are
shown to the keys that may read them; `hidden` says of each other part why it is null. Figures are made by a few
statements over the newest runs and calls; a process makes two overviews at a time, and one of each tenant.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query
from starlette.responses import Response

from app.core.pool.catalog import MILLION, Price
from app.core.pool.conductor_versions import Standing, standings
from app.core.transparency.notes import NoteInvalid, parse_checkpoint
from app.errors import InvalidRequest, Overloaded
from app.gateway.http.api_keys import Caller
from app.gateway.http.auth import Keys
from app.gateway.http.context import GatewayContext
from app.gateway.openapi import operations, overview_replies
from app.gateway.runs import overview
from app.gateway.wire import query
from app.store.protocol import Period, RunLists, Store

MOST_RUNS: Final = 20_000
"""The newest runs that one overview is about."""
MOST_CALLS: Final = 50_000
"""The newest calls, and ratings, that one overview is about."""
SECONDS: Final = 20.0
"""The longest time until an overview is ready, the wait for those before it included."""
AT_ONCE: Final = 2
"""Overviews that a process makes at the same time, each for another tenant."""
MOST_WAITING: Final = 16
"""Overviews of one tenant that are made or wait; another one is refused."""
BUDGETS: Final = 30
"""The most budgets of an overview: each is looked up by itself."""
QUEUE: Final = 10_000
"""How far the queue is counted."""
PERIODS: Final[Mapping[str, tuple[float, int]]] = {
    "hour": (3_600.0, 12),
    "day": (86_400.0, 24),
    "week": (7 * 86_400.0, 28),
    "month": (30 * 86_400.0, 30),
}
"""The length of each period in seconds, and the number of its buckets."""
SHARED: Final = "All tenants share it: only a key of all tenants sees it."
PROCESS: Final = "Only a process of the service knows it: ask `GET /v1/overview`."
LACKING: Final = "The key lacks the scope `{}`."
Json = dict[str, Any]


def routes(context: GatewayContext, keys: Keys) -> APIRouter:
    """The route of the overview."""
    router = APIRouter(prefix="/v1/overview", tags=["runs"])
    reader = Annotated[Caller, keys.needs("runs:read")]
    turns = _Turns()

    @router.get(
        "",
        operation_id="get_overview",
        summary="Sum up what runs, what it costs and what is wrong now.",
        response_model=overview_replies.Overview,
        responses=operations.replies(*operations.READING),
    )
    async def get_overview(asked: Annotated[query.OverviewFilters, Query()], caller: reader) -> Response:
        """Over the runs of the key's tenant; of a key of all tenants, over those of every tenant."""
        if asked.tenant is not None and not caller.sees(asked.tenant):
            raise InvalidRequest("Only a key of all tenants sees another tenant's runs.", param="tenant")
        async with turns.turn(caller.tenant):
            shown = await _overview(context, asked, caller)
        return Response(orjson.dumps(shown), media_type="application/json")

    return router


class _Turns:
    """Lets two overviews at a time be made, and one of each tenant, so that none waits for many of another."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._one_of_tenant: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._asked: Counter[str | None] = Counter()

    @asynccontextmanager
    async def turn(self, tenant: str | None) -> AsyncIterator[None]:
        """Wait for a turn of the tenant's, and hold it. Raises `Overloaded` after `SECONDS`, or at once if the tenant
        has too many overviews that wait."""
        if self._asked[tenant] >= MOST_WAITING:
            raise Overloaded("Too many overviews of this tenant are being made already.", retry_after=SECONDS)
        self._asked[tenant] += 1
        try:
            async with asyncio.timeout(SECONDS), self._one_of_tenant[tenant], self._places:
                yield
        except TimeoutError:
            message = f"The overview was not ready within {SECONDS:.0f} seconds; choose a shorter period."
            raise Overloaded(message, retry_after=SECONDS) from None
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant], self._one_of_tenant[tenant]


async def _overview(context: GatewayContext, asked: query.OverviewFilters, caller: Caller) -> Json:
    prices = {name: worker.price for name, worker in context.catalog().workers.items() if worker.priced}
    lists = context.store.of_tenant(caller.tenant).lists
    of_caller = asked.model_copy(update={"tenant": caller.tenant or asked.tenant})
    shown = await figures(lists, of_caller, context.now(), prices)
    return shown | await _shared(context, caller, shown["tenant"])


async def figures(lists: RunLists, asked: query.OverviewFilters, now: float, prices: Mapping[str, Price]) -> Json:
    """The part of an overview that is about the runs of a tenant, or of all, and about their calls."""
    until = now if asked.until is None else asked.until
    seconds, buckets = PERIODS[asked.period]
    period = Period(
        tenant=asked.tenant,
        since=until - seconds,
        until=until,
        buckets=buckets,
        most_runs=MOST_RUNS,
        most_calls=MOST_CALLS,
    )
    found = await lists.figures(period)
    return {
        "object": "overview",
        "period": asked.period,
        "since": period.since,
        "until": until,
        "tenant": period.tenant,
        "runs_since": found.since,
        "calls_since": found.calls_since,
        **overview.runs_of(period, found),
        "workers": overview.workers_of(found, prices),
        "open": [{"state": state, "runs": runs, "oldest_since": oldest} for state, runs, oldest in found.open],
    }


async def of_database(store: Store, asked: query.OverviewFilters, now: float) -> Json:
    """The overview as a command shows it, which reads the database alone: `hidden` says what only a process knows."""
    hidden = dict.fromkeys(("breakers", "conductors", "service"), PROCESS)
    return {
        **await figures(store.lists, asked, now, {}),
        **await _budgets(store, now, asked.tenant),
        "queue": await _queue(store, now),
        **dict.fromkeys(hidden),
        "log": await _log(store),
        "hidden": hidden,
    }


async def _shared(context: GatewayContext, caller: Caller, tenant: str | None) -> Json:
    """The parts for which a key needs more than `runs:read`, and why those that are hidden are."""
    is_wide = caller.key.all_tenants
    hidden = {
        "budgets": "" if caller.may("budgets:read") else LACKING.format("budgets:read"),
        "queue": "" if is_wide else SHARED,
        "breakers": "" if caller.may("workers:read") else LACKING.format("workers:read"),
        "conductors": "" if caller.may("conductors:read") else LACKING.format("conductors:read"),
        "log": "" if caller.may("audit:read") else LACKING.format("audit:read"),
        "service": "" if is_wide else SHARED,
    }
    breakers = context.breakers() if not hidden["breakers"] else None
    if breakers is None and not hidden["breakers"]:
        hidden["breakers"] = "This process executes no steps, so it measures no worker; ask an engine's metrics."
    return {
        **(
            await _budgets(context.store, context.now(), tenant)
            if not hidden["budgets"]
            else {"budgets": None, "budgets_total": None}
        ),
        "queue": await _queue(context.store, context.now()) if not hidden["queue"] else None,
        "breakers": [{"worker": worker, "state": state} for worker, state in (breakers or {}).items()] or None,
        "conductors": await _conductors(context) if not hidden["conductors"] else None,
        "log": await _log(context.store) if not hidden["log"] else None,
        "service": _service(context) if not hidden["service"] else None,
        "hidden": {part: reason for part, reason in hidden.items() if reason},
    }


async def _budgets(store: Store, now: float, tenant: str | None) -> Json:
    """The latest window of each budget's dearest account, those with the least left first; and how many there are."""
    shown: list[Json] = []
    budgets = await store.budgets(tenant)
    for one in budgets[:BUDGETS]:
        windows = await store.budget_use(one.id, 1)
        used = sum(window.held + window.spent for window in windows if window.start <= now < window.end)
        shown.append(
            {
                "id": one.id,
                "tenant": one.tenant,
                "scope": one.scope,
                "name": one.name,
                "period": one.period,
                "usd": one.usd / MILLION,
                "used_usd": used / MILLION,
                "left_usd": (one.usd - used) / MILLION,
            }
        )
    shown.sort(key=lambda budget: (budget["left_usd"] / max(budget["usd"], 1 / MILLION), budget["id"]))
    return {"budgets": shown, "budgets_total": len(budgets)}


async def _queue(store: Store, now: float) -> Json:
    backlog = await store.backlog(now, QUEUE)
    since = backlog.oldest_since
    waits = max(now - since, 0.0) if since is not None else None
    return {"waiting": backlog.waiting, "most": QUEUE, "oldest_seconds": waits}


async def _conductors(context: GatewayContext) -> list[Json]:
    """The version in force of each conductor of the pool file, and its canary."""
    known = standings(await context.store.changes())
    conductors = {tier.conductor.worker for tier in context.catalog().tiers.values()} - {None}
    shown = []
    for name in sorted(str(one) for one in conductors):
        standing = known.get(name, Standing())
        version = {"conductor": name, "live": standing.live or None, "canary": standing.canary or None}
        shown.append(version | {"share": standing.share})
    return shown


async def _log(store: Store) -> Json:
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


def _service(context: GatewayContext) -> Json:
    """The state of what this process depends on."""
    conducts = context.conducts()
    return {
        "database": _word(healthy=context.store.healthy),
        "queue": _word(healthy=context.queue.healthy),
        "conductors": None if conducts is None else _word(healthy=conducts),
        "rehearsal": context.catalog().rehearsal,
    }


def _word(*, healthy: bool) -> str:
    return "healthy" if healthy else "unavailable"
