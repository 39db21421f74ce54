"""Admission of requests by rates, open runs and the size of this process, before anything costs money.

The rates and open runs of keys, tenants and users are counted over all gateways in the shared database, by the rules of
`core/pool/rates.py`. Requests that come while others are being counted are counted together in the next transaction,
so a key that many callers use costs each gateway one transaction at a time, however many requests wait. A request
without limits costs nothing. The requests that this process serves are its own matter: what was let in holds a
`Permit`, which its owner releases in a `finally`, and which stands for the place in this process. Nobody has to give a
run's place back, because the journal says when it is over.

`Idempotency-Key`: a POST that carries one is carried out once, however often and wherever it is sent.

A key is 1 to 255 printable ASCII characters and belongs to its caller's tenant. It stands for one request: the SHA-256
of the method, the path and the body, as JSON in its canonical form (keys sorted, no white space). The same key with
another request is a 409. The key's record is committed together with the run, so of two equal requests that come to two
gateways at once one begins the run, and the other follows it. A request that was refused before anything was begun
leaves no record.

Every POST route under /v1 hands its body to one of two verbs (a test walks the routes):

    begin    for routes that begin a run: the same request follows that run while it goes on, and gets its reply once
             it has ended
    reply    for all other routes: the first reply is stored and sent again
"""

import asyncio
import hashlib
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import orjson
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from app.core.plan.arms import steps_needed
from app.core.pool.policy import input_bound, tool_bytes
from app.core.pool.rates import Figures, RateLimits, RateReply, RateRequest, Reason, Refusal
from app.core.records import changed, record
from app.core.run import caller_view
from app.core.run.caller_view import Position, returned
from app.engine.delivery.messages import FollowedRun
from app.engine.runs.admission import Order
from app.errors import (
    BatonError,
    Conflict,
    InvalidRequest,
    Overloaded,
    OverQuota,
    PlanRejected,
    RunUndecided,
    StoreUnavailable,
)
from app.gateway.http import fault
from app.gateway.http.connection import SPAN_KEY, RequestLog, link_run
from app.gateway.http.context import GatewayContext
from app.gateway.http.ingress import Caller
from app.store.protocol import TAKEN, IdempotencyRecord, KeyRow, TenantStore

BUSY_RETRY = 1.0
"""Seconds to wait when too many requests are served: about what a short one takes."""
OTHERS_SECONDS = 600.0
"""Time after its last request for which a tenant counts as one that may come again."""
TENANTS = 1_000
"""Tenants whose last requests are remembered."""
KEY = re.compile(r"[ -~]{1,255}")
EVENT = re.compile(r"[0-9]{1,15}")
REPLAYED = (b"idempotent-replayed", b"true")

Headers = list[tuple[bytes, bytes]]
TOGETHER: Final = 200
"""Requests that are counted in one transaction at most."""
OWNERS: Final = {"key": "this key", "tenant": "this tenant", "user": "this user"}
MESSAGES: Final[dict[Reason, str]] = {
    "requests": "Too many requests of {owner} within a minute; wait as long as Retry-After says.",
    "tokens": "Too many tokens for {owner} within a minute; wait as long as Retry-After says.",
    "concurrency": "Too many runs of {owner} are open; wait for one to end.",
}


@dataclass(slots=True, eq=False)
class _Place:
    """A request that waits to be counted; another one with the same fields is not the same request."""

    asked: RateRequest
    reply: RateReply | None = None


class RateLimiter:
    """The rate limits of one gateway's callers."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._are_usual = context.rates.limited
        """True if there are limits for requests whose key has none of its own."""
        self._places: list[_Place] = []
        self._alone = asyncio.Lock()

    def request(self, key: KeyRow, order: Order | None) -> RateRequest | None:
        """Return the request to be counted, under every limit that holds for it; None if there is none. Without an
        order it begins no run."""
        rates = self._context.rates
        user = order.user if order is not None else ""
        if key.rpm is None and key.tpm is None and key.concurrency is None and not self._are_usual:
            return None
        held = [(f"key:{key.id}", _of_key(key, rates.key)), (f"tenant:{key.tenant}", rates.tenant)]
        if user:
            named = hashlib.sha256(f"{key.tenant}\0{user}".encode()).hexdigest()
            held.append((f"user:{named}", rates.user))
        limits = tuple([(name, limit) for name, limit in held if limit])
        if not limits:
            return None
        if order is None:
            return RateRequest(limits)
        came = returned(order.task.messages)
        run = self._context.name("run")
        return RateRequest(limits, run=run, resumes=came.run if came is not None else "", tokens=reserved(order))

    async def count(self, asked: RateRequest, headers: Headers) -> None:
        """Count a request; its rates are added to `headers`. Raises `OverQuota` and `StoreUnavailable`."""
        reply = await self._counted(asked)
        headers += _headers(reply.figures)
        if reply.refusal is not None:
            raise _refused(reply.refusal)

    async def give_back(self, asked: RateRequest) -> None:
        """Forget the run of a request, because it was not begun. Raises `StoreUnavailable`."""
        if asked.run:
            await self._context.store.give_back(asked)

    async def _counted(self, asked: RateRequest) -> RateReply:
        """Count all requests that wait, unless somebody has counted this one meanwhile."""
        place = _Place(asked)
        self._places.append(place)
        try:
            async with self._alone:
                while place.reply is None:
                    await self._count(self._taken(place))
        except BaseException:
            if place in self._places:  # its caller has left before it was counted
                self._places.remove(place)
            raise
        return place.reply

    def _taken(self, place: _Place) -> list[_Place]:
        """Return the requests that are counted next: the oldest that wait, or this one again if it was counted in
        vain."""
        if place not in self._places:
            return [place]
        taken, self._places = self._places[:TOGETHER], self._places[TOGETHER:]
        return taken

    async def _count(self, places: Sequence[_Place]) -> None:
        replies = await self._context.store.count_requests([place.asked for place in places], self._context.now())
        for place, reply in zip(places, replies, strict=True):
            place.reply = reply


def reserved(order: Order) -> int:
    """Return the tokens that are reserved for a run: the input and the most output of each call that it is known to
    make, in tokens, and at most what the run may use.

    One token a byte bounds the input. A fixed shape makes one call for each of its steps, a caller's plan too, a model
    that conducts one and a step's.
    """
    limits, task = order.limits, order.task
    output = limits.output_tokens
    if task.sampling.max_tokens is not None:
        output = min(output, task.sampling.max_tokens)
    of_a_call = input_bound(task.messages, tool_bytes(task.toolbox)) + output
    return min(limits.tokens, of_a_call * _calls(order))


def _calls(order: Order) -> int:
    if isinstance(order.plan, dict) and isinstance(steps := order.plan.get("steps"), list):
        return max(1, min(len(steps), order.limits.steps))
    spec = order.tier.conductor
    if spec.kind == "model":
        return 2
    return steps_needed(spec)


def _of_key(key: KeyRow, usual: RateLimits) -> RateLimits:
    """Return a key's own limits, and the usual ones in place of those that it has not."""
    return RateLimits(
        rpm=usual.rpm if key.rpm is None else key.rpm,
        tpm=usual.tpm if key.tpm is None else key.tpm,
        concurrency=usual.concurrency if key.concurrency is None else key.concurrency,
    )


def _headers(figures: Sequence[Figures]) -> Headers:
    found: Headers = []
    for figure in figures:
        shown = {"limit": str(figure.limit), "remaining": str(figure.remaining), "reset": f"{figure.reset:.3f}s"}
        found += [(f"x-ratelimit-{name}-{figure.unit}".encode(), value.encode()) for name, value in shown.items()]
    return found


def _refused(refusal: Refusal) -> OverQuota:
    owner = OWNERS[refusal.window.partition(":")[0]]
    message = MESSAGES[refusal.reason].format(owner=owner)
    return OverQuota(message, limit=refusal.reason, retry_after=max(1, math.ceil(refusal.seconds)))


class Places:
    """The requests that a gateway serves, and by whom.

    The last eighth of the places is for others than the tenant that has all the rest, if another one has been served
    within `OTHERS_SECONDS`: so a flood of one tenant leaves room for the next, and a tenant alone has all places.
    """

    def __init__(self, context: GatewayContext) -> None:
        self.running = 0
        self._context = context
        self._held: Counter[str] = Counter()
        self._served: OrderedDict[str, float] = OrderedDict()
        """When each tenant was let in last, the latest at the end."""

    @property
    def full(self) -> bool:
        """Return True if there is none left for anybody."""
        return self.running >= self._context.rates.running

    def has_share(self, tenant: str) -> bool:
        """True if the tenant has all places that it may have while others have some."""
        most = self._context.rates.running
        if self._held[tenant] < most - most // 8:
            return False
        since = self._context.tick() - OTHERS_SECONDS
        return any(at >= since and other != tenant for other, at in self._served.items())

    def take(self, tenant: str) -> None:
        """Note a request that was let in."""
        self.running += 1
        self._held[tenant] += 1
        self._served[tenant] = self._context.tick()
        self._served.move_to_end(tenant)
        if len(self._served) > TENANTS:
            self._served.popitem(last=False)

    def give(self, tenant: str) -> None:
        """Note that a request is over."""
        self.running -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]


class Permit:
    """A place in this process. `release` may be called more than once."""

    def __init__(self, admission: "Admission", tenant: str, counted: RateRequest | None) -> None:
        self._places: Places | None = admission.places
        self._tenant = tenant
        self._limiter = admission.limiter
        self.counted = counted
        """The request as it was counted; None if nothing limits it."""

    async def give_back(self) -> None:
        """Forget the run that was counted: it was not begun."""
        counted, self.counted = self.counted, None
        if counted is not None:
            with suppress(StoreUnavailable):  # it is forgotten by itself before long
                await self._limiter.give_back(counted)

    def release(self) -> None:
        """Give the place back."""
        if self._places is not None:
            self._places.give(self._tenant)
            self._places = None


class Admission:
    """The places of one gateway, and the limits of its callers."""

    def __init__(self, context: GatewayContext) -> None:
        self.limiter = RateLimiter(context)
        self.places = Places(context)

    async def enter(self, key: KeyRow, headers: Headers, order: Order | None = None) -> Permit:
        """Let a request in, or raise `OverQuota`, `Overloaded` or `StoreUnavailable`. Rate headers are added to
        `headers` in the first two cases.

        A request without an `order` begins no run but follows one: it counts as a request, not as a run.
        """
        await self.capacity()
        if self.places.has_share(key.tenant):
            raise Overloaded(retry_after=BUSY_RETRY)
        permit = Permit(self, key.tenant, self.limiter.request(key, order))
        self.places.take(key.tenant)
        try:
            if permit.counted is not None:
                await self.limiter.count(permit.counted, headers)
        except BaseException:
            permit.release()
            raise
        return permit

    async def capacity(self) -> None:
        """Raise `Overloaded` if this process has no place for another run.

        A dependency of routes that begin runs, which comes first: a request that is refused here was not read, and
        costs the requests that are being served as little as possible."""
        if self.places.full:
            raise Overloaded(retry_after=BUSY_RETRY)


@record(frozen=True, slots=True)
class Begun:
    """A run that this request has begun or follows. `permit` must be released when the reply is over."""

    driven: FollowedRun
    permit: Permit
    seconds: float
    """The time that the run has left."""
    log: RequestLog
    after: int | None = None
    """The event after which a stream goes on; None: from its start."""


class Idempotency:
    """The two verbs, over one gateway's store, runs and admission."""

    def __init__(self, context: GatewayContext, admission: Admission) -> None:
        self._context = context
        self._admission = admission
        self.capacity = Depends(admission.capacity)
        """The dependency of routes that begin runs: see `Admission.capacity`."""

    async def begin(
        self,
        request: Request,
        caller: Caller,
        body: Mapping[str, object],
        order: Callable[[], Order],
        *,
        at: Callable[[int], Position] = caller_view.read_position,
        once: IdempotencyRecord | None = None,
    ) -> Begun:
        """Begin a run, or follow the one that this request began before. `order` is called only in the first case, and
        `at` only in the second: it gives the position of a stream that goes on behind an event of that number.

        The record is that of the request's `Idempotency-Key`, unless the route makes one of its own (`once`).

        Raises what `order`, `Admission.enter` and `Drivers.start` raise, `InvalidRequest` for a key that is none, and
        `Conflict` for one that was used with another request.
        """
        once = once or idempotency_record(request, caller, body)
        after = last_event(request) if body.get("stream") is True else None
        found = None
        if once is not None:
            found = await self._store(caller).find_idempotency_record(once.id, self._context.now())
        if found is None:
            if after:
                raise caller_view.unknown_event()
            try:
                return await self._begin(request, caller, order(), once)
            except Conflict as conflict:
                if once is None or conflict.public_code != TAKEN:
                    raise
                found = await self._store(caller).find_idempotency_record(once.id, self._context.now())
        held = _same(once, found)
        begun = await self.follow(request, caller, held.run, after, once=held.id, at=at)
        request.scope["baton.headers"].append(REPLAYED)
        return begun

    async def follow(
        self,
        request: Request,
        caller: Caller,
        run: str,
        after: int | None,
        *,
        turn: int | None = None,
        once: str | None = None,
        at: Callable[[int], Position] = caller_view.read_position,
    ) -> Begun:
        """Follow a run that exists, from behind the event `after`: the given turn, the one that an idempotent request
        began, or the latest one."""
        headers = request.scope["baton.headers"]
        permit = await self._admission.enter(caller.key, headers)
        try:
            place = at(after) if after is not None else Position()
            driven = await self._context.runs.attach(run, place, turn=turn, once=once, tenant=caller.tenant)
        except BaseException:
            permit.release()
            raise
        headers.append((b"x-baton-run", run.encode()))
        log: RequestLog = request.scope["baton.log"]
        log.follow(driven)
        link_run(request.scope, driven.state)
        left = driven.state.turn.deadline - self._context.now()
        return Begun(driven, permit, max(left, 0.0), log, after)

    async def reply(
        self,
        request: Request,
        caller: Caller,
        body: Mapping[str, object],
        act: Callable[[], Awaitable[Response]],
        *,
        has_content: bool = False,
    ) -> Response:
        """The reply of `act`, or the stored reply of the same request. A reply that `has_content` of a run's is not
        stored, because it would outlive the content's erasure: the same request then has `act` done again.

        Equal requests may run `act` at the same time, so it must do no harm when it is done twice. Where it would, its
        entry carries `idempotency_record(...)` with the reply.
        An error that it raises is not stored.
        """
        once = idempotency_record(request, caller, body)
        if once is None:
            return await act()
        now = self._context.now()
        found = await self._store(caller).find_idempotency_record(once.id, now)
        if found is None:
            done = await act()
            kept_reply = b"" if has_content else bytes(done.body)
            mine = replace(once, until=now + self._context.remembered, status=done.status_code, reply=kept_reply)
            found = await self._store(caller).add_idempotency_record(mine, now)
            if found == mine:
                return done
        kept = _same(once, found)
        request.scope["baton.headers"].append(REPLAYED)
        if not kept.reply:
            return await act()
        return Response(kept.reply, kept.status, media_type="application/json")

    def _store(self, caller: Caller) -> TenantStore:
        return self._context.store.of_tenant(caller.tenant)

    async def _begin(self, request: Request, caller: Caller, order: Order, once: IdempotencyRecord | None) -> Begun:
        headers = request.scope["baton.headers"]
        trace = request.scope[SPAN_KEY].trace
        order = changed(order, request_id=headers[0][1].decode(), key_name=caller.key.name, trace=trace)
        if once is not None:
            until = self._context.now() + order.limits.seconds + self._context.remembered
            order = changed(order, once=replace(once, until=until))
        permit = await self._admission.enter(caller.key, headers, order)
        try:
            driven = await self._start(order, permit)
        except RunUndecided as error:
            permit.release()
            headers.append((b"x-baton-run", error.run.encode()))
            request.scope["baton.log"].run = error.run
            raise
        except BaseException:
            permit.release()
            raise
        headers.append((b"x-baton-run", driven.run.encode()))
        log: RequestLog = request.scope["baton.log"]
        log.follow(driven)
        link_run(request.scope, driven.state)
        return Begun(driven, permit, order.limits.seconds, log)

    async def _start(self, order: Order, permit: Permit) -> FollowedRun:
        """Begin the run of an order, under the id under which it was counted; what was not begun is given back."""
        if permit.counted is not None:
            order = changed(order, run=permit.counted.run)
        try:
            driven = await self._context.runs.start(order)
        except RunUndecided:  # the journal will say
            raise
        except PlanRejected as error:
            await permit.give_back()
            raise fault.of_plan(error) from None
        except BatonError:
            await permit.give_back()
            raise
        if driven.replayed:  # another request has begun this turn
            await permit.give_back()
        return driven


def idempotency_record(request: Request, caller: Caller, body: Mapping[str, object]) -> IdempotencyRecord | None:
    """The record of a request, without an end; None if it has no key. Raises `InvalidRequest` for a malformed key."""
    given = [value.decode("latin-1") for name, value in request.scope["headers"] if name == b"idempotency-key"]
    if not given:
        return None
    if len(given) > 1 or not KEY.fullmatch(given[0]):
        raise InvalidRequest(
            "Send one Idempotency-Key of 1 to 255 printable ASCII characters.",
            param="Idempotency-Key",
            code="invalid_idempotency_key",
        )
    name = hashlib.sha256(f"{caller.key.tenant}\0{given[0]}".encode()).hexdigest()
    asked = f"{request.method}\n{request.scope['path']}\n".encode() + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return IdempotencyRecord(name, hashlib.sha256(asked).digest(), 0.0, tenant=caller.key.tenant)


def last_event(request: Request) -> int | None:
    """The number in a `Last-Event-ID` header; None without one. Raises `InvalidRequest`."""
    given = request.headers.get("last-event-id", "")
    if not given:
        return None
    if not EVENT.fullmatch(given):
        raise caller_view.unknown_event()
    return int(given)


def _same(once: IdempotencyRecord | None, found: IdempotencyRecord | None) -> IdempotencyRecord:
    """The record that was found, if this request made it; raises `Conflict` otherwise."""
    if once is None or found is None:  # it ran out between two looks
        raise Conflict("The Idempotency-Key has just expired; send the request again.", code=TAKEN)
    if once.fingerprint != found.fingerprint:
        raise Conflict(
            "This Idempotency-Key was used with another request; use a new key, or send the same method, path and "
            "body as before.",
            param="Idempotency-Key",
            code="idempotency_key_reuse",
        )
    return found
