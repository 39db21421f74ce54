"""Idempotency records: a request with an `Idempotency-Key` is carried out once, and repeated requests get its reply."""

from typing import Protocol

from msgspec import Struct

TAKEN = "idempotency_key_in_use"
"""Code of the `Conflict` that refuses an entry because the record of another request with the same id lasts."""


class IdempotencyRecord(Struct, frozen=True):
    """A request that is carried out once, by its id.

    `fingerprint` tells a different request under the same id. `run` is the run that the request started; in an entry it
    is the entry's own run, whatever stands here. The reply is read from the run's journal, unless `status` and `reply`
    hold it. The record is forgotten after `until`.
    """

    id: str
    fingerprint: bytes
    until: float
    run: str = ""
    status: int = 0
    reply: bytes = b""
    tenant: str | None = None
    """The tenant of the request. It is part of the id as well."""


class IdempotencyRecords(Protocol):
    """Records that are not part of an entry. All verbs raise `StoreUnavailable`."""

    async def find_idempotency_record(self, name: str, now: float) -> IdempotencyRecord | None:
        """Return the record with this id, or None if there is none that lasts."""
        ...

    async def add_idempotency_record(self, once: IdempotencyRecord, now: float) -> IdempotencyRecord:
        """Add a record apart from any entry, for a request whose effect may be repeated.

        Returns the record that lasts afterwards: this one, or an earlier one.
        """
        ...

    async def acquire_leadership(self, leader: IdempotencyRecord, now: float) -> bool:
        """Add a record apart from any entry, or prolong the one of the same fingerprint until the same time as this
        one. Returns False, and changes nothing, while a record of another fingerprint lasts.

        Its id is the name of the work that is led; those of requests are hashes.
        """
        ...

    async def forget_idempotency_records(self, now: float, limit: int) -> int:
        """Delete at most `limit` records that have run out, the oldest first. Returns the number of deleted records."""
        ...
