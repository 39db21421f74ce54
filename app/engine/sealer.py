"""The task of an engine that seals what was committed in the transparency log, and signs its checkpoints.

Every engine looks once a second; the database lets one of them seal at a time. Runs do not wait for it: while the
database or an engine is away, nothing is sealed, and what was committed meanwhile is sealed later.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from app.core.transparency.notes import Signer
from app.engine.context import EngineContext
from app.engine.periodic import look_repeatedly
from app.errors import ServiceUnavailable

LOOK_SECONDS = 1.0
"""Time between two looks for what is to be sealed, as long as there is no more than fits into one pass."""


class Sealer:
    """Seals pass by pass: each is a short transaction, so that writers hardly wait."""

    def __init__(self, context: EngineContext, signers: Sequence[Signer]) -> None:
        """Without `signers`, a key signs that is stored in the database."""
        self._context = context
        self._signers = signers
        self._failing = False
        self._replacements: Counter[str] = Counter()
        """The number of times that this engine has put its keys in the place of others, by those other keys."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Seal again and again, until the process stops."""

        async def look() -> None:
            await self.look(stopping)
            self._failing = False

        telemetry = self._context.telemetry
        await look_repeatedly(look, stopping, LOOK_SECONDS, telemetry, "Sealing", on_outage=self._report)

    def _report(self, error: ServiceUnavailable) -> None:
        """Count a failure, and log the first one of several."""
        telemetry = self._context.telemetry
        telemetry.count("baton_log_failures_total")
        if not self._failing:
            telemetry.log(logging.WARNING, "Sealing waits for the database.", error=error.public_code)
        self._failing = True

    async def look(self, stopping: asyncio.Event) -> None:
        """Seal all that can be sealed now, unless another engine does."""
        while not stopping.is_set():
            sealed = await self._context.store.log.seal(self._signers, self._context.salt)
            if sealed is None:
                return
            telemetry = self._context.telemetry
            telemetry.gauge("baton_log_size", sealed.size)
            telemetry.gauge("baton_log_lag_seconds", sealed.lag)
            telemetry.gauge("baton_log_sealed_timestamp_seconds", self._context.now())
            if sealed.replaced_keys:
                self._report_other_keys(sealed.replaced_keys)
            if sealed.leaves:
                telemetry.count("baton_log_entries_total", by=sealed.leaves)
            if not sealed.more:
                return
            await asyncio.sleep(0)

    def _report_other_keys(self, keys: str) -> None:
        """Warn when the same keys have to be replaced for the second time, because another engine has put them back."""
        self._replacements[keys] += 1
        if self._replacements[keys] == 2:
            self._context.telemetry.log(
                logging.WARNING,
                "Engines have different keys of the log, and each adds an entry for its own in turn. Unless they are "
                "being restarted with a new key, give all of them the same BATON_LOG_KEY.",
                key=keys,
            )
