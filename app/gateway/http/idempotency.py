"""`Idempotency-Key`: a POST that carries one is carried out once, however often and wherever it is sent.

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

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping

import orjson
from fastapi import Depends
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from app.core.run import caller_view
from app.core.run.caller_view import Position
from app.engine.delivery.messages import FollowedRun
from app.engine.runs.admission import Order
from app.errors import BatonError, Conflict, InvalidRequest, PlanRejected, RunUndecided
from app.gateway.http import fault
from app.gateway.http.admission import Admission, Permit
from app.gateway.http.callers import Caller
from app.gateway.http.connection import SPAN_KEY, RequestLog, link_run
from app.gateway.http.context import GatewayContext
from app.store.protocol import TAKEN, IdempotencyRecord, TenantStore

IDEMPOTENCY_KEY = re.compile(r"[ -~]{1,255}")
EVENT_NUMBER = re.compile(r"[0-9]{1,15}")
REPLAYED = (b"idempotent-replayed", b"true")


class OpenTurn(Struct, frozen=True):
    """The turn of a run that this request has begun or follows."""

    run: FollowedRun
    permit: Permit
    """It must be released when the reply is over."""
    seconds: float
    """The time that the run has left."""
    log: RequestLog
    after: int | None = None
    """The event after which a stream goes on; None: from its start."""


class TurnToFollow(Struct, frozen=True):
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
        permit = await self._admission.enter(caller.key, request.scope["baton.headers"])
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
        seconds = followed.state.turn.deadline - self._context.now()
        return _open_turn(request, followed, permit, max(seconds, 0.0), after=target.after)

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
        order = replace(order, request_id=headers[0][1].decode(), key_name=caller.key.name, trace=trace)
        if once is not None:
            until = self._context.now() + order.limits.seconds + self._context.remembered
            order = replace(order, once=replace(once, until=until))
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
        return _open_turn(request, followed, permit, order.limits.seconds)

    async def _start(self, order: Order, permit: Permit) -> FollowedRun:
        """Begin the run of an order, under the id under which it was counted. If it is not begun, its count is
        forgotten."""
        if permit.counted is not None:
            order = replace(order, run=permit.counted.run)
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


def _open_turn(
    request: Request, followed: FollowedRun, permit: Permit, seconds: float, *, after: int | None = None
) -> OpenTurn:
    """Name the run in the reply's headers, the log and the trace of a request, and return its turn."""
    request.scope["baton.headers"].append((b"x-baton-run", followed.run.encode()))
    log: RequestLog = request.scope["baton.log"]
    log.follow(followed)
    link_run(request.scope, followed.state)
    return OpenTurn(followed, permit, seconds, log, after)


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
