"""`GET /v1/overview`: what runs, what it costs and what is wrong now, over an hour, a day, a week or a month.

A key sees the figures of its tenant's runs, a key of all tenants those of every run. Parts about what tenants share are
shown to the keys that may read them; `hidden` says of each other part why it is null. Figures are made by a few
statements over the newest runs and calls; a process makes two overviews at a time, and one of each tenant.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final
from weakref import WeakValueDictionary

import orjson
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from app.core.pool.conductor_versions import VersionsInForce, versions_in_force
from app.errors import Overloaded, StoreUnavailable
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations, overview_replies
from app.gateway.runs import stored_overview
from app.gateway.runs.identity import check_tenant
from app.gateway.runs.open_streams import AWAY_SECONDS, OpenStream, OpenStreams
from app.gateway.wire import query

SCHEMAS: Final[operations.Schemas] = {"OverviewEvent": lambda: operations.event_schema(overview_replies.Overview)}
READY_SECONDS: Final = 20.0
"""The longest time until an overview is ready, the wait for those before it included."""
MOST_MADE_AT_ONCE: Final = 2
"""Overviews that a process makes at the same time, each for another tenant."""
REFRESH_SECONDS: Final = 10.0
"""The least time between two makings of an overview that is followed."""
STALE_SECONDS: Final = 60.0
"""The time after which a followed overview is made again though no run has changed: budgets and breakers may have."""
MOST_WAITING: Final = 16
"""Overviews of one tenant that are made or wait; another one is refused."""
SHARED: Final = "All tenants share it: only a key of all tenants sees it."
LACKING: Final = "The key lacks the scope `{}`."
ELSEWHERE: Final = "This process is a gateway, which calls no workers: each engine has breakers, in its metrics."
Json = dict[str, Any]


def routes(context: GatewayContext, keys: Keys) -> APIRouter:
    """Return the route of the overview."""
    router = APIRouter(prefix="/v1/overview", tags=["runs"])
    reader = Annotated[Caller, keys.needs("runs:read")]
    limit, streams = _MakingLimit(), OpenStreams(context, keys)
    shared: WeakValueDictionary[object, _SharedOverview] = WeakValueDictionary()

    @router.get(
        "",
        operation_id="get_overview",
        summary="Sum up what runs, what it costs and what is wrong now.",
        response_model=overview_replies.Overview,
        responses=operations.replies(*operations.READING),
    )
    async def get_overview(filters: Annotated[query.OverviewFilters, Query()], caller: reader) -> Response:
        """Over the runs of the key's tenant; of a key of all tenants, over those of every tenant."""
        check_tenant(caller, filters.tenant)
        async with limit.slot(caller.tenant):
            overview = await _overview(context, filters, caller)
        return json_reply(overview)

    @router.get(
        "/live",
        operation_id="follow_overview",
        summary="Follow an overview.",
        status_code=200,
        response_class=OpenStream,
        responses=operations.replies(*operations.READING, 429, events="OverviewEvent"),
    )
    async def follow_overview(
        filters: Annotated[query.LiveOverviewFilters, Query()], caller: reader, request: Request
    ) -> Response:
        """The overview of the period up to now, and again when runs have changed: ten seconds after the one before at
        the earliest. Streams of the same figures share their making. A stream ends within five seconds of its key's
        revocation."""
        check_tenant(caller, filters.tenant)
        overview_filters = query.OverviewFilters(period=filters.period, tenant=filters.tenant)
        key = (caller.tenant, filters.tenant, filters.period, tuple(_hidden(caller).items()))
        followed = shared.get(key)
        if followed is None:
            followed = shared[key] = _SharedOverview(context, limit, overview_filters, caller)
        number, first = await followed.at(0)
        return streams.begin(request, caller, _follow_overview(context, followed, number, first), filters.seconds)

    return router


class _MakingLimit:
    """Lets two overviews at a time be made, and one of each tenant, so that none waits for many of another."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MOST_MADE_AT_ONCE)
        self._tenant_locks: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: Counter[str | None] = Counter()

    @asynccontextmanager
    async def slot(self, tenant: str | None) -> AsyncIterator[None]:
        """Wait until an overview of the tenant may be made, and hold the slot.

        Raises `Overloaded` after `READY_SECONDS`, or at once if the tenant has too many overviews that wait."""
        if self._waiting[tenant] >= MOST_WAITING:
            raise Overloaded("Too many overviews of this tenant are being made already.", retry_after=READY_SECONDS)
        self._waiting[tenant] += 1
        try:
            async with asyncio.timeout(READY_SECONDS), self._tenant_locks[tenant], self._slots:
                yield
        except TimeoutError:
            message = f"The overview was not ready within {READY_SECONDS:.0f} seconds; choose a shorter period."
            raise Overloaded(message, retry_after=READY_SECONDS) from None
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._tenant_locks[tenant]


class _SharedOverview:
    """An overview that some streams follow. It is made once for all of them, every `REFRESH_SECONDS` at most."""

    def __init__(
        self, context: GatewayContext, limit: _MakingLimit, filters: query.OverviewFilters, caller: Caller
    ) -> None:
        self._context = context
        self._limit = limit
        self._filters = filters
        self._caller = caller
        self._making = asyncio.Lock()
        self._number = -1
        self._overview: dict[str, Any] = {}
        self._read_at = -REFRESH_SECONDS

    async def at(self, number: int) -> tuple[int, Json]:
        """Return the overview after this change of runs or a later one, and the number of that. Raises `Overloaded` and
        `StoreUnavailable`."""
        if not self._has(number):
            try:
                async with asyncio.timeout(REFRESH_SECONDS + READY_SECONDS), self._making:
                    if not self._has(number):  # nobody else has made it in the meantime
                        await self._make()
            except TimeoutError:
                raise Overloaded("Too many others wait for this overview.", retry_after=READY_SECONDS) from None
        return self._number, self._overview

    def _has(self, number: int) -> bool:
        is_old = self._context.tick() - self._read_at >= STALE_SECONDS
        return self._number >= number and not is_old

    async def _make(self) -> None:
        await asyncio.sleep(max(self._read_at + REFRESH_SECONDS - self._context.tick(), 0.0))
        latest = self._context.runs.changes.number
        async with self._limit.slot(self._caller.tenant):
            self._overview = await _overview(self._context, self._filters, self._caller)
        self._number, self._read_at = latest, self._context.tick()


async def _follow_overview(
    context: GatewayContext, shared: _SharedOverview, number: int, last: Json
) -> AsyncGenerator[bytes]:
    """Yield the frames of a stream: at first the overview `last`, made after change `number`, then each later one."""
    yield b"event: overview\ndata: %b\n\n" % orjson.dumps(last)
    while True:
        latest = await context.runs.changes.after(number, context.ping)
        try:
            number, now = await shared.at(latest)
        except (Overloaded, StoreUnavailable):
            await asyncio.sleep(AWAY_SECONDS)
            now = last
        if now is last:
            yield b": ping\n"
        else:
            last = now
            yield b"event: overview\ndata: %b\n\n" % orjson.dumps(last)


async def _overview(context: GatewayContext, filters: query.OverviewFilters, caller: Caller) -> Json:
    prices = {name: worker.price for name, worker in context.catalog().workers.items() if worker.priced}
    lists = context.store.of_tenant(caller.tenant).lists
    of_caller = filters.model_copy(update={"tenant": caller.tenant or filters.tenant})
    overview = await stored_overview.figures(lists, of_caller, context.now(), prices)
    return overview | await _read_shared_parts(context, caller, overview["tenant"])


async def _read_shared_parts(context: GatewayContext, caller: Caller, tenant: str | None) -> Json:
    """Return the parts for which a key needs more than `runs:read`, and why those that are hidden are."""
    hidden = _hidden(caller)
    parts: Json = dict.fromkeys(("budgets", "budgets_total", "queue", "breakers", "conductors", "log", "service"), None)
    if not hidden["budgets"]:
        administration = context.store.administration_of(caller.tenant)
        parts |= await stored_overview.budgets(administration, context.now(), tenant)
    if not hidden["queue"]:
        parts["queue"] = await stored_overview.queue(context.store, context.now())
    if not hidden["breakers"]:
        breakers = context.breakers()
        if breakers is None:
            hidden["breakers"] = ELSEWHERE
        elif breakers:
            parts["breakers"] = [{"worker": worker, "state": state} for worker, state in breakers.items()]
    if not hidden["conductors"]:
        parts["conductors"] = await _conductors(context)
    if not hidden["log"]:
        parts["log"] = await stored_overview.log(context.store)
    if not hidden["service"]:
        parts["service"] = _service(context)
    parts["hidden"] = {part: reason for part, reason in hidden.items() if reason}
    return parts


def _hidden(caller: Caller) -> dict[str, str]:
    """Return the reason for which each part is not shown to a caller; empty for those that are."""
    needed = {
        "budgets": "budgets:read",
        "breakers": "workers:read",
        "conductors": "conductors:read",
        "log": "audit:read",
    }
    reasons = dict.fromkeys((*needed, "queue", "service"), "")
    for part, scope in needed.items():
        if not caller.may(scope):
            reasons[part] = LACKING.format(scope)
    if not caller.key.all_tenants:
        reasons |= {"queue": SHARED, "service": SHARED}
    return reasons


async def _conductors(context: GatewayContext) -> list[Json]:
    """Return the version in force of each conductor of the pool file, and its canary."""
    changes = versions_in_force(await context.store.changes())
    conductors = {tier.conductor.worker for tier in context.catalog().tiers.values()} - {None}
    rows = []
    for name in sorted(str(conductor) for conductor in conductors):
        in_force = changes.get(name, VersionsInForce())
        version = {"conductor": name, "live": in_force.live or None, "canary": in_force.canary or None}
        rows.append(version | {"share": in_force.share})
    return rows


def _service(context: GatewayContext) -> Json:
    """Return the state of what this process depends on."""
    conducts = context.conducts()
    conductors = None
    if conducts is not None:
        conductors = _word(healthy=conducts)
    return {
        "database": _word(healthy=context.store.healthy),
        "queue": _word(healthy=context.queue.healthy),
        "conductors": conductors,
        "rehearsal": context.catalog().rehearsal,
    }


def _word(*, healthy: bool) -> str:
    if healthy:
        return "healthy"
    return "unavailable"
