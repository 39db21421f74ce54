"""Idempotency claims: a request with an `Idempotency-Key` is carried out once, and repeated requests get its reply."""

from typing import Protocol

from app.core.records import record

TAKEN = "idempotency_key_in_use"
"""Code of the `Conflict` that refuses an entry because another request's claim on the same id lasts."""


@record(frozen=True, slots=True)
class Once:
    """A claim on the id of a request.

    `fingerprint` tells a different request under the same id. `run` is the run that the request started; in an entry it
    is the entry's own run, whatever stands here. The reply is read from the run's journal, unless `status` and `reply`
    hold it. The claim is forgotten after `until`.
    """

    id: str
    fingerprint: bytes
    until: float
    run: str = ""
    status: int = 0
    reply: bytes = b""
    tenant: str | None = None
    """The tenant of the request. It is part of the id as well."""


class RequestClaims(Protocol):
    """Claims that are not part of an entry. All verbs raise `StoreUnavailable`."""

    async def find_request_claim(self, claim: str, now: float) -> Once | None:
        """The claim on this id, or None if there is none that lasts."""
        ...

    async def claim_request(self, once: Once, now: float) -> Once:
        """Make a claim apart from any entry, for a request whose effect may be repeated.

        Returns the claim that lasts afterwards: this one, or an earlier one.
        """
        ...

    async def forget_request_claims(self, now: float, limit: int) -> int:
        """Delete at most `limit` claims that have run out, the oldest first. Returns the number of deleted claims."""
        ...
