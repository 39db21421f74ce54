"""Rate limits over all gateways: one row for each key, tenant or user that has limits, changed under its lock."""

from collections.abc import Sequence
from typing import Protocol

from app.core.pool.rates import RateReply, RateRequest


class RateWindows(Protocol):
    """All verbs raise `StoreUnavailable`. A commit without an answer may be repeated: a request then counts twice, and
    a run once."""

    async def count_requests(self, requests: Sequence[RateRequest], now: float) -> tuple[RateReply, ...]:
        """Count requests in their windows, in this order, as far as the limits allow; in one transaction."""
        ...

    async def give_back(self, request: RateRequest) -> None:
        """Forget the run of a request that was counted, because it was not begun."""
        ...

    async def forget_windows(self, now: float, limit: int) -> int:
        """Delete at most `limit` windows in which nothing counts any more. Returns how many there were."""
        ...
