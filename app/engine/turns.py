"""The turns of one kind of work among engines: one engine of the service does it at a time.

An engine claims the work as a request claims its idempotency key (`Once`). The claims of requests have hashes as ids,
so that none has the name of a work.
"""

from app.engine.context import EngineContext
from app.store.protocol import Once


class Turns:
    """The claims of one engine on one kind of work."""

    def __init__(self, context: EngineContext, work: str, seconds: float) -> None:
        """`seconds` is how long a claim lasts. It must be longer than the time between two claims of one engine."""
        self._context = context
        self._work = work
        self._seconds = seconds
        self._mine = context.name("turns").encode()

    async def mine(self) -> bool:
        """Claim the work, or claim it for longer. False if another engine's claim lasts."""
        now = self._context.now()
        claim = Once(self._work, self._mine, now + self._seconds)
        return (await self._context.store.claim_request(claim, now)).fingerprint == self._mine
