"""Admission of requests by rates, open runs and the size of this process, before anything costs money.

The rates and open runs of keys, tenants and users are counted over all gateways in the shared database, by the rules of
`core/pool/rates.py`. Requests that come while others are being counted are counted together in the next transaction,
so a key that many callers use costs each gateway one transaction at a time, however many requests wait. A request
without limits costs nothing. The requests that this process serves are counted by itself: each that was let
in holds a `Permit` for one slot of this process, which its owner releases in a `finally`. Nobody has to release the
place of an open run, because the journal says when it is over.
"""

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from app.core.plan.arms import steps_needed
from app.core.pool.policy import input_bound, tool_bytes
from app.core.pool.rates import Figures, RateLimits, RateReply, RateRequest, Reason, Refusal
from app.core.run.caller_view import find_returned_results
from app.engine.runs.admission import Order
from app.errors import Overloaded, OverQuota, StoreUnavailable
from app.gateway.http.context import GatewayContext
from app.store.protocol import KeyRow

RECENT_TENANT_SECONDS = 600.0
"""Time after its last request for which a tenant counts as one that may come again."""
MOST_TENANTS = 1_000
"""The most tenants whose last requests are remembered."""
MOST_COUNTED_TOGETHER: Final = 200
"""The most requests that are counted in one transaction."""
RATE_HEADERS: Final = b"x-ratelimit-"
"""The beginning of the names of the headers that say what is left of a rate."""
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
        """Count a request; its rates are added to `headers`, in the place of those of an earlier count: a request that
        was to begin a run may come to follow another one's. Raises `OverQuota` and `StoreUnavailable`."""
        reply = await self._count_with_others(request)
        headers[:] = [header for header in headers if not header[0].startswith(RATE_HEADERS)]
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
            headers.append((RATE_HEADERS + f"{name}-{figure.unit}".encode(), value.encode()))
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
