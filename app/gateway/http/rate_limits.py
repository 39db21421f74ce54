"""The rate limits of keys, tenants and users, as a gateway applies them: `core/pool/rates.py` in the shared database.

Requests that come while others are being counted are counted together in the next transaction, so a key that many
callers use costs each gateway one transaction at a time, however many requests wait. A request without limits costs
nothing.
"""

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.core.plan.arms import steps_needed
from app.core.pool.budget import input_bound, tool_bytes
from app.core.pool.rates import Figures, RateLimits, RateReply, RateRequest, Reason, Refusal
from app.core.run.tool_results import returned
from app.engine.runs.admission import Order
from app.errors import OverQuota
from app.gateway.http.context import GatewayContext
from app.store.protocol import KeyRow

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
        """The request to be counted, under every limit that holds for it; None if there is none. Without an order it
        begins no run."""
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
        """The requests that are counted next: the oldest that wait, or this one again if it was counted in vain."""
        if place not in self._places:
            return [place]
        taken, self._places = self._places[:TOGETHER], self._places[TOGETHER:]
        return taken

    async def _count(self, places: Sequence[_Place]) -> None:
        replies = await self._context.store.count_requests([one.asked for one in places], self._context.now())
        for place, reply in zip(places, replies, strict=True):
            place.reply = reply


def reserved(order: Order) -> int:
    """The tokens that are reserved for a run: the input and the most output of each call that it is known to make, in
    tokens, and at most what the run may use.

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
    """A key's own limits, and the usual ones in place of those that it has not."""
    return RateLimits(
        rpm=usual.rpm if key.rpm is None else key.rpm,
        tpm=usual.tpm if key.tpm is None else key.tpm,
        concurrency=usual.concurrency if key.concurrency is None else key.concurrency,
    )


def _headers(figures: Sequence[Figures]) -> Headers:
    found: Headers = []
    for one in figures:
        shown = {"limit": str(one.limit), "remaining": str(one.remaining), "reset": f"{one.reset:.3f}s"}
        found += [(f"x-ratelimit-{name}-{one.unit}".encode(), value.encode()) for name, value in shown.items()]
    return found


def _refused(refusal: Refusal) -> OverQuota:
    owner = OWNERS[refusal.window.partition(":")[0]]
    message = MESSAGES[refusal.reason].format(owner=owner)
    return OverQuota(message, limit=refusal.reason, retry_after=max(1, math.ceil(refusal.seconds)))
