"""Admission of requests by rates, open runs and the size of this process, before anything costs money.

The rates and open runs of keys, tenants and users are counted over all gateways in the shared database, by the rules of
`core/pool/rates.py`. Requests that come while others are being counted are counted together in the next transaction,
so a key that many callers use costs each gateway one transaction at a time, however many requests wait. A request
without limits costs nothing. The requests that this process serves are counted by itself: each that was let
in holds a `Permit` for one slot of this process, which its owner releases in a `finally`. Nobody has to release the
place of an open run, because the journal says when it is over.

`Idempotency-Key`: a POST that carries one is carried out once, however often and wherever it is sent.

A key is 1 to 255 printable ASCII characters and belongs to its caller's tenant. It stands for one request: the SHA-256
of the method, the path with its query, and the body, as JSON in its canonical form (keys sorted, no white space). The
same key with another request is a 409. The key's record is committed together with the run, so of two equal requests
that come to two gateways at once one begins the run, and the other follows it. A request that was refused before
anything was begun leaves no record.

Every POST route under /v1 hands its body to one of two verbs (a test walks the routes):

    begin    for routes that begin a run: the same request follows that run while it goes on, and gets its reply once
             it has ended
    reply    for all other routes: the first reply is stored and sent again
"""

import asyncio
import hashlib
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
from app.core.records import copy_with, record
from app.core.run import caller_view
from app.core.run.caller_view import Position, find_returned_results
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

RECENT_TENANT_SECONDS = 600.0
"""Time after its last request for which a tenant counts as one that may come again."""
MOST_TENANTS = 1_000
"""The most tenants whose last requests are remembered."""
IDEMPOTENCY_KEY = re.compile(r"[ -~]{1,255}")
EVENT_NUMBER = re.compile(r"[0-9]{1,15}")
REPLAYED = (b"idempotent-replayed", b"true")
MOST_COUNTED_TOGETHER: Final = 200
"""The most requests that are counted in one transaction."""
Headers = list[tuple[bytes, bytes]]
OWNERS: Final = {"key": "this key", "tenant": "this tenant", "user": "this user"}
MESSAGES: Final[dict[Reason, str]] = {
    "requests": "Too many requests of {owner} within a minute; wait as long as Retry-After says.",
    "tokens": "Too many tokens for {owner} within a minute; wait as long as Retry-After says.",
    "concurrency": "Too many runs of {owner} are open; wait for one to end.",
}


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request that waits to be counted; another one with the same fields is not the same request."""

    request: RateRequest
    reply: RateReply | None = None


class RateLimiter:
    """The rate limits of one gateway's callers."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._has_default_limits = context.rates.limited
        """True if there are limits for requests whose key has none of its own."""
        self._waiting: list[_WaitingRequest] = []
        self._counting = asyncio.Lock()

    def request(self, key: KeyRow, order: Order | None) -> RateRequest | None:
        """Return the request to be counted, under every limit that holds for it; None if there is none. Without an
        order it begins no run."""
        has_own_limits = key.rpm is not None or key.tpm is not None or key.concurrency is not None
        if not has_own_limits and not self._has_default_limits:
            return None
        limits = self._limits(key, user=order.user if order is not None else "")
        if not limits:
            return None
        if order is None:
            return RateRequest(limits)
        results = find_returned_results(order.task.messages)
        run = self._context.name("run")
        resumes = results.run if results is not None else ""
        return RateRequest(limits, run=run, resumes=resumes, tokens=tokens_to_reserve(order))

    def _limits(self, key: KeyRow, user: str) -> tuple[tuple[str, RateLimits], ...]:
        """Return the limits of a key, of its tenant and of the user whom the request names, each with its window."""
        rates = self._context.rates
        limits = [(f"key:{key.id}", _key_limits(key, rates.key)), (f"tenant:{key.tenant}", rates.tenant)]
        if user:
            digest = hashlib.sha256(f"{key.tenant}\0{user}".encode()).hexdigest()
            limits.append((f"user:{digest}", rates.user))
        return tuple([(window, limit) for window, limit in limits if limit])

    async def count(self, request: RateRequest, headers: Headers) -> None:
        """Count a request; its rates are added to `headers`. Raises `OverQuota` and `StoreUnavailable`."""
        reply = await self._count_with_others(request)
        headers += _headers(reply.figures)
        if reply.refusal is not None:
            raise _over_quota(reply.refusal)

    async def forget(self, request: RateRequest) -> None:
        """Forget the run of a request, because it was not begun. Raises `StoreUnavailable`."""
        if request.run:
            await self._context.store.give_back(request)

    async def _count_with_others(self, request: RateRequest) -> RateReply:
        """Count all requests that wait, unless another one has counted this one meanwhile."""
        waiting = _WaitingRequest(request)
        self._waiting.append(waiting)
        try:
            async with self._counting:
                while waiting.reply is None:
                    await self._count(self._next_batch(waiting))
        except BaseException:
            if waiting in self._waiting:  # its caller has left before it was counted
                self._waiting.remove(waiting)
            raise
        return waiting.reply

    def _next_batch(self, waiting: _WaitingRequest) -> list[_WaitingRequest]:
        """Return the requests that are counted next: the oldest that wait, or this one alone if the count of its batch
        has failed."""
        if waiting not in self._waiting:
            return [waiting]
        batch = self._waiting[:MOST_COUNTED_TOGETHER]
        self._waiting = self._waiting[MOST_COUNTED_TOGETHER:]
        return batch

    async def _count(self, batch: Sequence[_WaitingRequest]) -> None:
        requests = [waiting.request for waiting in batch]
        replies = await self._context.store.count_requests(requests, self._context.now())
        for waiting, reply in zip(batch, replies, strict=True):
            waiting.reply = reply


def tokens_to_reserve(order: Order) -> int:
    """Return the tokens that are reserved for a run: the input and the most output of each call that it is known to
    make, in tokens, and at most what the run may use.

    The input of a call is bounded by one token for each byte. A fixed shape and a caller's plan make one call for each
    step. A conductor that is a model makes one call itself, and at least one step follows.
    """
    limits, task = order.limits, order.task
    output = limits.output_tokens
    if task.sampling.max_tokens is not None:
        output = min(output, task.sampling.max_tokens)
    tokens_per_call = input_bound(task.messages, tool_bytes(task.toolbox)) + output
    return min(limits.tokens, tokens_per_call * _count_known_calls(order))


def _count_known_calls(order: Order) -> int:
    """Return the number of calls that a run is known to make."""
    steps = order.plan.get("steps") if isinstance(order.plan, dict) else None
    if isinstance(steps, list):
        return max(1, min(len(steps), order.limits.steps))
    spec = order.tier.conductor
    if spec.kind == "model":
        return 2
    return steps_needed(spec)


def _key_limits(key: KeyRow, default: RateLimits) -> RateLimits:
    """Return a key's own limits, and the default ones in place of those that it does not have."""
    return RateLimits(
        rpm=default.rpm if key.rpm is None else key.rpm,
        tpm=default.tpm if key.tpm is None else key.tpm,
        concurrency=default.concurrency if key.concurrency is None else key.concurrency,
    )


def _headers(figures: Sequence[Figures]) -> Headers:
    headers: Headers = []
    for figure in figures:
        values = {"limit": str(figure.limit), "remaining": str(figure.remaining), "reset": f"{figure.reset:.3f}s"}
        for name, value in values.items():
            headers.append((f"x-ratelimit-{name}-{figure.unit}".encode(), value.encode()))
    return headers


def _over_quota(refusal: Refusal) -> OverQuota:
    owner = OWNERS[refusal.window.partition(":")[0]]
    message = MESSAGES[refusal.reason].format(owner=owner)
    return OverQuota(message, limit=refusal.reason, retry_after=refusal.seconds)


class RequestSlots:
    """The requests that a gateway serves at one time, and for which tenants.

    The last eighth of the slots is kept from a tenant that has all the others, if another tenant has been served within
    `RECENT_TENANT_SECONDS`. So a flood of one tenant leaves room for the next, and a tenant alone may have all slots.
    """

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._running = 0
        self._by_tenant: Counter[str] = Counter()
        self._last_admissions: OrderedDict[str, float] = OrderedDict()
        """When each tenant was let in last, the latest at the end."""

    @property
    def are_full(self) -> bool:
        """Return True if there is none left for anybody."""
        return self._running >= self._context.rates.running

    def has_used_share(self, tenant: str) -> bool:
        """Return True if the tenant has as many slots as it may have while other tenants are served."""
        most = self._context.rates.running
        if self._by_tenant[tenant] < most - most // 8:
            return False
        since = self._context.tick() - RECENT_TENANT_SECONDS
        return any(at >= since and other != tenant for other, at in self._last_admissions.items())

    def take(self, tenant: str) -> None:
        """Note a request that was let in."""
        self._running += 1
        self._by_tenant[tenant] += 1
        self._last_admissions[tenant] = self._context.tick()
        self._last_admissions.move_to_end(tenant)
        if len(self._last_admissions) > MOST_TENANTS:
            self._last_admissions.popitem(last=False)

    def release(self, tenant: str) -> None:
        """Note that a request is over."""
        self._running -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class Permit:
    """One slot of this process. `release` may be called more than once."""

    def __init__(self, admission: "Admission", tenant: str, counted: RateRequest | None) -> None:
        self._slots: RequestSlots | None = admission.slots
        self._tenant = tenant
        self._limiter = admission.limiter
        self.counted = counted
        """The request as it was counted; None if nothing limits it."""

    async def forget_run(self) -> None:
        """Forget the run that was counted, because it was not begun."""
        counted, self.counted = self.counted, None
        if counted is not None:
            with suppress(StoreUnavailable):  # it is forgotten by itself before long
                await self._limiter.forget(counted)

    def release(self) -> None:
        """Release the slot."""
        if self._slots is not None:
            self._slots.release(self._tenant)
            self._slots = None


class Admission:
    """The slots of one gateway, and the limits of its callers."""

    def __init__(self, context: GatewayContext) -> None:
        self.limiter = RateLimiter(context)
        self.slots = RequestSlots(context)

    async def enter(self, key: KeyRow, headers: Headers, order: Order | None = None) -> Permit:
        """Let a request in, or raise `OverQuota`, `Overloaded` or `StoreUnavailable`. Rate headers are added to
        `headers` in the first two cases.

        A request without an `order` begins no run but follows one: it counts as a request, not as a run.
        """
        await self.capacity()
        if self.slots.has_used_share(key.tenant):
            raise Overloaded()
        permit = Permit(self, key.tenant, self.limiter.request(key, order))
        self.slots.take(key.tenant)
        try:
            if permit.counted is not None:
                await self.limiter.count(permit.counted, headers)
        except BaseException:
            permit.release()
            raise
        return permit

    async def capacity(self) -> None:
        """Raise `Overloaded` if this process has no slot for another request.

        It is the first dependency of routes that begin runs. A request that is refused here has not been read, so it
        costs the requests that are being served as little as possible.
        """
        if self.slots.are_full:
            raise Overloaded()


@record(frozen=True, slots=True)
class OpenTurn:
    """The turn of a run that this request has begun or follows."""

    run: FollowedRun
    permit: Permit
    """It must be released when the reply is over."""
    seconds: float
    """The time that the run has left."""
    log: RequestLog
    after: int | None = None
    """The event after which a stream goes on; None: from its start."""


@record(frozen=True, slots=True)
class TurnToFollow:
    """A turn of a run: the one of a number, or the one that an idempotent request began; without either the latest."""

    run: str
    after: int | None = None
    """The event behind which the stream begins; None: at its start."""
    number: int | None = None
    once: str | None = None
    """The id of the record of an `Idempotency-Key`."""
    needs_whole_text: bool = False
    """True if the wire format needs the text from its start, although it sends nothing up to `after` again."""


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
        order: Callable[[], Awaitable[Order]],
        *,
        needs_whole_text: bool = False,
        once: IdempotencyRecord | None = None,
    ) -> OpenTurn:
        """Begin a run, or follow the one that this request began before. `order` is called only in the first case, so
        that a request is answered again although what it read was deleted meanwhile; `needs_whole_text` counts only in
        the second (see `TurnToFollow`).

        The record is that of the request's `Idempotency-Key`, unless the route makes one of its own (`once`).

        Raises what `order`, `Admission.enter` and `RunClient.start` raise, `InvalidRequest` for a malformed key, and
        `Conflict` for a key that was used with another request.
        """
        if once is None:
            once = idempotency_record(request, caller, body)
        after = last_event(request) if body.get("stream") is True else None
        earlier = None
        if once is not None:
            earlier = await self._store(caller).find_idempotency_record(once.id, self._context.now())
        if earlier is None:
            if after:
                raise caller_view.unknown_event_error()
            try:
                return await self._begin(request, caller, await order(), once)
            except Conflict as conflict:
                if once is None or conflict.public_code != TAKEN:
                    raise
                earlier = await self._store(caller).find_idempotency_record(once.id, self._context.now())
        record = require_same_request(once, earlier)
        target = TurnToFollow(record.run, after, once=record.id, needs_whole_text=needs_whole_text)
        turn = await self.follow(request, caller, target)
        request.scope["baton.headers"].append(REPLAYED)
        return turn

    async def follow(self, request: Request, caller: Caller, target: TurnToFollow) -> OpenTurn:
        """Follow a turn of a run that exists."""
        headers = request.scope["baton.headers"]
        permit = await self._admission.enter(caller.key, headers)
        try:
            position = Position()
            if target.after is not None and not target.needs_whole_text:
                position = caller_view.read_position(target.after)
            followed = await self._context.runs.attach(
                target.run, position, turn=target.number, once=target.once, tenant=caller.tenant
            )
        except BaseException:
            permit.release()
            raise
        headers.append((b"x-baton-run", target.run.encode()))
        log: RequestLog = request.scope["baton.log"]
        log.follow(followed)
        link_run(request.scope, followed.state)
        seconds = followed.state.turn.deadline - self._context.now()
        return OpenTurn(followed, permit, max(seconds, 0.0), log, target.after)

    async def reply(
        self,
        request: Request,
        caller: Caller,
        body: Mapping[str, object],
        act: Callable[[], Awaitable[Response]],
        *,
        keeps_reply: bool = True,
    ) -> Response:
        """Return the reply of `act`, or the stored reply of the same request. Without `keeps_reply` it is not stored,
        and for the same request `act` is called again: a reply with content of a run would outlive its erasure, and one
        that says what is in force would say so when it no longer is.

        Equal requests may call `act` at the same time, so it must do no harm when it is called twice. Where it would,
        the entry that it writes carries `idempotency_record(...)` with the reply. An error that it raises is not
        stored.
        """
        once = idempotency_record(request, caller, body)
        if once is None:
            return await act()
        now = self._context.now()
        stored = await self._store(caller).find_idempotency_record(once.id, now)
        if stored is None:
            response = await act()
            content = bytes(response.body) if keeps_reply else b""
            until = now + self._context.remembered
            own = replace(once, until=until, status=response.status_code, reply=content)
            stored = await self._store(caller).add_idempotency_record(own, now)
            if stored == own:
                return response
        record = require_same_request(once, stored)
        request.scope["baton.headers"].append(REPLAYED)
        if not record.reply:
            return await act()
        return Response(record.reply, record.status, media_type="application/json")

    def name(self, prefix: str, request: Request, caller: Caller, body: Mapping[str, object]) -> str:
        """Return the id of what a request adds: a fresh one, or that of this very request under its Idempotency-Key, so
        that whoever carries it out twice adds the same thing. Raises `InvalidRequest` for a malformed key."""
        once = idempotency_record(request, caller, body)
        if once is None:
            return self._context.name(prefix)
        return f"{prefix}_{once.id[:16]}{once.fingerprint.hex()[:16]}"

    def _store(self, caller: Caller) -> TenantStore:
        return self._context.store.of_tenant(caller.tenant)

    async def _begin(self, request: Request, caller: Caller, order: Order, once: IdempotencyRecord | None) -> OpenTurn:
        headers = request.scope["baton.headers"]
        trace = request.scope[SPAN_KEY].trace
        order = copy_with(order, request_id=headers[0][1].decode(), key_name=caller.key.name, trace=trace)
        if once is not None:
            until = self._context.now() + order.limits.seconds + self._context.remembered
            order = copy_with(order, once=replace(once, until=until))
        permit = await self._admission.enter(caller.key, headers, order)
        try:
            followed = await self._start(order, permit)
        except RunUndecided as error:
            permit.release()
            headers.append((b"x-baton-run", error.run.encode()))
            request.scope["baton.log"].run = error.run
            raise
        except BaseException:
            permit.release()
            raise
        headers.append((b"x-baton-run", followed.run.encode()))
        log: RequestLog = request.scope["baton.log"]
        log.follow(followed)
        link_run(request.scope, followed.state)
        return OpenTurn(followed, permit, order.limits.seconds, log)

    async def _start(self, order: Order, permit: Permit) -> FollowedRun:
        """Begin the run of an order, under the id under which it was counted. If it is not begun, its count is
        forgotten."""
        if permit.counted is not None:
            order = copy_with(order, run=permit.counted.run)
        try:
            followed = await self._context.runs.start(order)
        except RunUndecided:  # whether it was begun is not known, so it stays counted
            raise
        except PlanRejected as error:
            await permit.forget_run()
            raise fault.plan_error(error) from None
        except BatonError:
            await permit.forget_run()
            raise
        if followed.replayed:  # another request has begun this turn
            await permit.forget_run()
        return followed


def idempotency_record(request: Request, caller: Caller, body: Mapping[str, object]) -> IdempotencyRecord | None:
    """Return the record of a request, without an end; None if the request has no key. Raises `InvalidRequest` for a
    malformed key."""
    keys = [value.decode("latin-1") for name, value in request.scope["headers"] if name == b"idempotency-key"]
    if not keys:
        return None
    if len(keys) > 1 or not IDEMPOTENCY_KEY.fullmatch(keys[0]):
        raise InvalidRequest(
            "Send one Idempotency-Key of 1 to 255 printable ASCII characters.",
            param="Idempotency-Key",
            code="invalid_idempotency_key",
        )
    name = hashlib.sha256(f"{caller.key.tenant}\0{keys[0]}".encode()).hexdigest()
    address = request.scope["path"].encode()
    if request.scope["query_string"]:
        address += b"?" + request.scope["query_string"]
    canonical_body = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    fingerprint = hashlib.sha256(b"%s\n%s\n%s" % (request.method.encode(), address, canonical_body)).digest()
    return IdempotencyRecord(name, fingerprint, 0.0, tenant=caller.key.tenant)


def last_event(request: Request, starting_after: int | None = None) -> int | None:
    """Return the number in a `Last-Event-ID` header; without one that of the parameter `starting_after`. Raises
    `InvalidRequest`."""
    number = request.headers.get("last-event-id", "")
    if not number:
        return starting_after
    if not EVENT_NUMBER.fullmatch(number):
        raise caller_view.unknown_event_error()
    return int(number)


def require_same_request(once: IdempotencyRecord | None, stored: IdempotencyRecord | None) -> IdempotencyRecord:
    """Return the stored record, if it is that of the same request; raises `Conflict` if it is not."""
    if once is None or stored is None:  # it expired between two reads
        raise Conflict("The Idempotency-Key has just expired; send the request again.", code=TAKEN)
    if once.fingerprint != stored.fingerprint:
        raise Conflict(
            "This Idempotency-Key was used with another request; use a new key, or send the same method, path, query "
            "and body as before.",
            param="Idempotency-Key",
            code="idempotency_key_reuse",
        )
    return stored
