"""`Idempotency-Key`: a POST that carries one is carried out once, however often and wherever it is sent.

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
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import orjson
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from app.core.records import record
from app.core.run import position
from app.core.run.position import Position
from app.engine.delivery.messages import Driven
from app.engine.runs.request import Order
from app.errors import Conflict, InvalidRequest, PlanRejected, RunUndecided
from app.gateway.http import fault
from app.gateway.http.admission import Admission, Permit
from app.gateway.http.auth import Caller
from app.gateway.http.context import GatewayContext
from app.store.protocol import TAKEN, Once

KEY = re.compile(r"[ -~]{1,255}")
EVENT = re.compile(r"[0-9]{1,15}")
REPLAYED = (b"idempotent-replayed", b"true")


@record(frozen=True, slots=True)
class Begun:
    """A run that this request has begun or follows. `permit` must be released when the reply is over."""

    driven: Driven
    permit: Permit
    seconds: float
    """The time that the run has left."""
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
        found = await self._context.store.find_request_claim(once.id, self._context.now()) if once is not None else None
        if found is None:
            if after:
                raise position.unknown()
            try:
                return await self._begin(request, caller, order(), once)
            except Conflict as conflict:
                if once is None or conflict.public_code != TAKEN:
                    raise
                found = await self._context.store.find_request_claim(once.id, self._context.now())
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
            driven = await self._context.runs.attach(run, place, turn=turn, once=once)
        except BaseException:
            permit.release()
            raise
        headers.append((b"x-baton-run", run.encode()))
        left = driven.state.deadline - self._context.now()
        return Begun(driven, permit, max(left, 0.0), after)

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
        found = await self._context.store.find_request_claim(once.id, now)
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

    async def _begin(self, request: Request, caller: Caller, order: Order, once: Once | None) -> Begun:
        headers = request.scope["baton.headers"]
        if once is not None:
            until = self._context.now() + order.limits.seconds + self._context.remembered
            order = replace(order, once=replace(once, until=until))
        permit = self._admission.enter(caller.key, headers, order.task)
        try:
            driven = await self._context.runs.start(order)
        except PlanRejected as error:
            permit.release()
            raise fault.of_plan(error) from None
        except RunUndecided as error:
            permit.release()
            headers.append((b"x-baton-run", error.run.encode()))
            raise
        except BaseException:
            permit.release()
            raise
        headers.append((b"x-baton-run", driven.run.encode()))
        return Begun(driven, permit, order.limits.seconds)


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
    return Once(name, hashlib.sha256(asked).digest(), 0.0)


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
