"""Admission of requests by rates, concurrency and the size of this process, before anything costs money.

Counters are this process's own. A key has a bucket of requests and one of tokens, each of which holds one minute's
worth and refills evenly. What was let in holds a `Permit`, which its owner gives back in a `finally`. Of a request's
tokens only the input can be guessed beforehand; what its run has used in truth is settled at its end, and may leave a
debt.

`Idempotency-Key`: a POST that carries one is carried out once, however often and wherever it is sent.

A key is 1 to 255 printable ASCII characters and belongs to its caller's tenant. It stands for one request: the SHA-256
of the method, the path and the body, as JSON in its canonical form (keys sorted, no white space). The same key with
another request is a 409. The claim is committed together with what it claims, so of two equal requests that come to two
gateways at once one begins the run, and the other follows it. A request that was refused before anything was begun
claims nothing.

Every POST route under /v1 hands its body to one of two verbs (a test walks the routes):

    begin    for routes that begin a run: the same request follows that run while it goes on, and gets its reply once
             it has ended
    reply    for all other routes: the first reply is stored and sent again
"""

import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import orjson
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from app.core.message.chat import Task
from app.core.pool.budget import input_bound
from app.core.records import changed, record
from app.core.run import position
from app.core.run.position import Position
from app.engine.delivery.messages import Driven
from app.engine.runs.admission import Order
from app.errors import Conflict, InvalidRequest, Overloaded, OverQuota, PlanRejected, RunUndecided
from app.gateway.http import fault, request_span
from app.gateway.http.auth import Caller
from app.gateway.http.context import GatewayContext
from app.gateway.http.request_log import RequestLog
from app.store.protocol import TAKEN, KeyRow, Once, TenantStore

COUNTERS = 10_000
BUSY_RETRY = 1.0
"""Seconds to wait when too many requests run: about what a short run takes."""
BYTES_A_TOKEN = 4
"""Of a text, as a rule."""
Headers = list[tuple[bytes, bytes]]
KEY = re.compile(r"[ -~]{1,255}")
EVENT = re.compile(r"[0-9]{1,15}")
REPLAYED = (b"idempotent-replayed", b"true")


@dataclass(slots=True)
class _Bucket:
    """A token bucket: the units that a key may still use; `most` a minute, None without a limit."""

    unit: str
    most: int | None = None
    level: float = 0.0

    def refill(self, most: int | None, seconds: float) -> None:
        if self.most is None and most is not None:
            self.level = float(most)
        self.most = most
        if most is not None:
            self.level = min(float(most), self.level + seconds * most / 60)

    def wait(self, amount: float) -> float:
        """Seconds until `amount` may be taken; more than the bucket holds may be when it is full."""
        if self.most is None:
            return 0.0
        missing = min(amount, self.most) - self.level
        if missing <= 0 and self.most:
            return 0.0
        return missing * 60 / self.most if self.most else 60.0

    def headers(self) -> Headers:
        if self.most is None:
            return []
        reset = (self.most - self.level) * 60 / self.most if self.most else 60.0
        figures = {"limit": str(self.most), "remaining": str(max(0, int(self.level))), "reset": f"{reset:.3f}s"}
        return [(f"x-ratelimit-{name}-{self.unit}".encode(), value.encode()) for name, value in figures.items()]


@dataclass(slots=True)
class _Counter:
    """One key's present use."""

    at: float
    requests: _Bucket = field(default_factory=lambda: _Bucket("requests"))
    tokens: _Bucket = field(default_factory=lambda: _Bucket("tokens"))
    running: int = 0


class Permit:
    """The right to run. `release` may be called more than once."""

    def __init__(self, admission: "Admission", counter: _Counter, runs: int, expected: int) -> None:
        self._admission: Admission | None = admission
        self._counter = counter
        self._runs = runs
        self._expected = expected

    def used(self, tokens: int) -> None:
        """Replace the expected tokens by those that the run has used; a request that only follows a run uses none."""
        if self._runs:
            self._counter.tokens.level -= tokens - self._expected
            self._expected = tokens

    def release(self) -> None:
        """Give the place back."""
        if self._admission is not None:
            self._admission.leave(self._counter, self._runs)
            self._admission = None


class Admission:
    """The counters of one gateway."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._counters: dict[str, _Counter] = {}
        self.running = 0

    def enter(self, key: KeyRow, headers: Headers, task: Task | None = None) -> Permit:
        """Let a request in, or raise `OverQuota` or `Overloaded`. Rate headers are added to `headers` in each case.

        A request without a `task` begins no run but follows one: it counts as a request of its key, not as a run.
        """
        counter = self._counter(key)
        runs, tokens = int(task is not None), 0
        if task is not None and counter.tokens.most is not None:
            tokens = input_bound(task.messages) // BYTES_A_TOKEN
        try:
            self._check(key, counter, runs, tokens)
        finally:
            headers += counter.requests.headers() + counter.tokens.headers()
        counter.running += runs
        self.running += 1
        return Permit(self, counter, runs, tokens)

    async def capacity(self) -> None:
        """Raise `Overloaded` if this process has no place for another run.

        A dependency of routes that begin runs, which comes first: a request that is refused here was not read, and
        costs the requests that are being served as little as possible."""
        if self.running >= self._context.rates.running:
            raise Overloaded(retry_after=BUSY_RETRY)

    def leave(self, counter: _Counter, runs: int) -> None:
        """Free the place of a permit."""
        counter.running -= runs
        self.running -= 1

    def _counter(self, key: KeyRow) -> _Counter:
        now, rates = self._context.tick(), self._context.rates
        counter = self._counters.get(key.id)
        if counter is None:
            self._forget()
            counter = self._counters[key.id] = _Counter(now)
        counter.requests.refill(rates.rpm if key.rpm is None else key.rpm, now - counter.at)
        counter.tokens.refill(rates.tpm if key.tpm is None else key.tpm, now - counter.at)
        counter.at = now
        return counter

    def _check(self, key: KeyRow, counter: _Counter, runs: int, tokens: int) -> None:
        rates = self._context.rates
        most = rates.concurrency if key.concurrency is None else key.concurrency
        if self.running >= rates.running:
            raise Overloaded(retry_after=BUSY_RETRY)
        if runs and most is not None and counter.running >= most:
            message = "Too many requests of this key are running; wait for one to end."
            raise OverQuota(message, limit="concurrency", retry_after=BUSY_RETRY)
        if wait := counter.requests.wait(1):
            raise OverQuota(limit="requests", retry_after=max(1, math.ceil(wait)))
        if runs and (wait := counter.tokens.wait(max(tokens, 1))):
            message = "Too many tokens for this key; wait as long as Retry-After says."
            raise OverQuota(message, limit="tokens", retry_after=max(1, math.ceil(wait)))
        counter.requests.level -= 1
        counter.tokens.level -= tokens

    def _forget(self) -> None:
        """Make room by dropping the oldest counter that nobody uses."""
        if len(self._counters) >= COUNTERS:
            idle = next((key for key, counter in self._counters.items() if not counter.running), None)
            if idle is not None:
                del self._counters[idle]


@record(frozen=True, slots=True)
class Begun:
    """A run that this request has begun or follows. `permit` must be released when the reply is over."""

    driven: Driven
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
        at: Callable[[int], Position] = position.read,
    ) -> Begun:
        """Begin a run, or follow the one that this request began before. `order` is called only in the first case, and
        `at` only in the second: it gives the position of a stream that goes on behind an event of that number.

        Raises what `order`, `Admission.enter` and `Drivers.start` raise, `InvalidRequest` for a key that is none, and
        `Conflict` for one that was used with another request.
        """
        once = claim(request, caller, body)
        after = last_event(request) if body.get("stream") is True else None
        found = await self._store(caller).find_request_claim(once.id, self._context.now()) if once is not None else None
        if found is None:
            if after:
                raise position.unknown()
            try:
                return await self._begin(request, caller, order(), once)
            except Conflict as conflict:
                if once is None or conflict.public_code != TAKEN:
                    raise
                found = await self._store(caller).find_request_claim(once.id, self._context.now())
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
        at: Callable[[int], Position] = position.read,
    ) -> Begun:
        """Follow a run that exists, from behind the event `after`: the given turn, the one that a claim began, or the
        latest one."""
        headers = request.scope["baton.headers"]
        permit = self._admission.enter(caller.key, headers)
        try:
            place = at(after) if after is not None else Position()
            driven = await self._context.runs.attach(run, place, turn=turn, once=once, tenant=caller.tenant)
        except BaseException:
            permit.release()
            raise
        headers.append((b"x-baton-run", run.encode()))
        log: RequestLog = request.scope["baton.log"]
        log.follow(driven)
        request_span.belongs_to(request.scope, driven.state)
        left = driven.state.deadline - self._context.now()
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
        entry carries `claim(...)` with the reply.
        An error that it raises is not stored.
        """
        once = claim(request, caller, body)
        if once is None:
            return await act()
        now = self._context.now()
        found = await self._store(caller).find_request_claim(once.id, now)
        if found is None:
            done = await act()
            kept_reply = b"" if has_content else bytes(done.body)
            mine = replace(once, until=now + self._context.remembered, status=done.status_code, reply=kept_reply)
            found = await self._context.store.claim_request(mine, now)
            if found == mine:
                return done
        kept = _same(once, found)
        request.scope["baton.headers"].append(REPLAYED)
        if not kept.reply:
            return await act()
        return Response(kept.reply, kept.status, media_type="application/json")

    def _store(self, caller: Caller) -> TenantStore:
        return self._context.store.of_tenant(caller.tenant)

    async def _begin(self, request: Request, caller: Caller, order: Order, once: Once | None) -> Begun:
        headers = request.scope["baton.headers"]
        trace = request.scope[request_span.KEY].trace
        order = changed(order, request_id=headers[0][1].decode(), key_name=caller.key.name, trace=trace)
        if once is not None:
            until = self._context.now() + order.limits.seconds + self._context.remembered
            order = changed(order, once=replace(once, until=until))
        permit = self._admission.enter(caller.key, headers, order.task)
        try:
            driven = await self._context.runs.start(order)
        except PlanRejected as error:
            permit.release()
            raise fault.of_plan(error) from None
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
        request_span.belongs_to(request.scope, driven.state)
        return Begun(driven, permit, order.limits.seconds, log)


def claim(request: Request, caller: Caller, body: Mapping[str, object]) -> Once | None:
    """The claim of a request, without an end; None if it has no key. Raises `InvalidRequest` for a malformed key."""
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
    return Once(name, hashlib.sha256(asked).digest(), 0.0, tenant=caller.key.tenant)


def last_event(request: Request) -> int | None:
    """The number in a `Last-Event-ID` header; None without one. Raises `InvalidRequest`."""
    given = request.headers.get("last-event-id", "")
    if not given:
        return None
    if not EVENT.fullmatch(given):
        raise position.unknown()
    return int(given)


def _same(once: Once | None, found: Once | None) -> Once:
    """The claim that was found, if this request made it; raises `Conflict` otherwise."""
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
