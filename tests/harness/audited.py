"""Runs the independent auditor over a test's own database, at the end of a test that has run real services.

    assert await audited(url) == []

It waits until no call of an ended run is in flight any more, then reports every contradiction that the journal shows.
"""

import asyncio
import time

from app.audit.check import Auditor
from app.audit.report import Report, Violation
from app.providers.formats import adapter
from app.store.archive import open_archive

SETTLE_SECONDS = 10.0
LOOK_PAUSE_SECONDS = 0.05
"""Seconds between two looks at calls that are in flight."""


async def violations_in(
    database_url: str, *, settle: float = SETTLE_SECONDS, run: str | None = None
) -> list[Violation]:
    """Return every violation in this database, or of this run.

    Runs that have not ended yet are checked as they stand. `settle` is how many seconds outcomes of calls in flight get
    to be written; what is missing then is a violation.
    """
    return (await audit_report(database_url, settle=settle, run=run)).violations


async def audit_report(database_url: str, *, settle: float = SETTLE_SECONDS, run: str | None = None) -> Report:
    """Return the auditor's whole report, once no call of an ended run is in flight any more."""
    until = time.monotonic() + settle
    while True:
        report = await audit_once(database_url, run=run, patient=time.monotonic() < until)
        if not report.pending:
            return report
        await asyncio.sleep(LOOK_PAUSE_SECONDS)


async def audit_once(database_url: str, *, run: str | None = None, patient: bool = True) -> Report:
    """Audit once; with `patient`, calls that are in flight are no violations."""
    async with open_archive(database_url) as archive:
        return await Auditor(time.time(), adapter, patient).audit(archive, run=run)
