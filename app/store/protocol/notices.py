"""Notices: ends of turns that are to be delivered to a caller's webhook. Entries write them (`Entry.notify`)."""

from collections.abc import Sequence
from typing import Protocol

from app.core.run.notices import FailedNotice, Notice


class Notices(Protocol):
    """Delivery of notices, at least once. All verbs raise `StoreUnavailable`."""

    async def take_notices(self, now: float, until: float, limit: int) -> tuple[Notice, ...]:
        """Return at most `limit` notices that are due, each counted as one more try. Nobody else gets them before
        `until`."""
        ...

    async def close_notice(self, notice: Notice) -> bool:
        """Delete a notice that was delivered, whoever has taken it by now. False if it is gone already."""
        ...

    async def fail_notice(self, notice: Notice, at: float, reason: str) -> bool:
        """Give a notice up: it is not taken any more, and is kept for `KEPT_FAILED_SECONDS`. False if it is gone."""
        ...

    async def failed_notices(self, limit: int) -> tuple[FailedNotice, ...]:
        """Return the notices that were given up, the latest first."""
        ...

    async def resend_notices(self, given_up: Sequence[Notice], now: float) -> int:
        """Have notices that were given up tried again at once. Returns the number of those that still exist."""
        ...

    async def put_off_notice(self, notice: Notice, due: float) -> bool:
        """Have a notice tried again from `due` on. False if it is gone, or somebody else has taken it meanwhile."""
        ...

    async def count_pending_notices(self, most: int) -> int:
        """Return the number of notices that are not delivered yet, counted up to `most`."""
        ...

    async def forget_notices(self, before: float, limit: int) -> int:
        """Delete at most `limit` notices of turns that ended before then and that are due since. Returns their
        number."""
        ...
