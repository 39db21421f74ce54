"""The findings of a verification of the log."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

MAX_KEPT_FINDINGS = 10_000
"""Findings that are kept in full; further ones are only counted."""
UNSEALED_SECONDS = 120.0
"""The age, before the last sealing, up to which something may be unsealed: clocks differ, and transactions take
time."""
RULES = {
    "checkpoint": "the log's checkpoint is signed by a known key",
    "held": "the log has grown out of each checkpoint that is held outside of it, and lacks nothing of it",
    "entry": "every entry of the log is as it was signed",
    "state": "the state of the log is that of its last entry",
    "tile": "the stored tiles of the log are the hashes of its entries",
    "altered": "what was sealed is stored as it was sealed",
    "missing": "what was sealed is stored, or was pruned",
    "surplus": "whatever is stored was sealed, but for the last moments",
    "hold": "nothing of a run is erased, and no run is pruned, while a legal hold covers it",
    "type": "every value has the type of its column, so that it can be read",
    "content": "the texts of a run have the hashes that its events name, unless they were erased",
}
"""Every kind of a finding, with the statement that holds if there is none."""


class Finding(Struct, frozen=True):
    """One contradiction between the log, the checkpoints that are held, and what is stored. `baton audit verify --json`
    prints the fields under their names."""

    rule: str
    thing: str
    """The run, or another thing by kind and id; or the part of the log."""
    words: str
    place: int | None = None
    """The entry of the log that shows it; None for what was never sealed."""

    def __str__(self) -> str:
        where = f"entry {self.place:,}" if self.place is not None else "not sealed"
        return f"{self.thing} ({where}) {self.rule}: {self.words}"


@dataclass(slots=True)
class Verification:
    """The result of a verification."""

    entries: int = 0
    runs: int = 0
    events: int = 0
    rows: int = 0
    """Rows of other tables than those of runs and events."""
    contents: int = 0
    pruned: int = 0
    erased: int = 0
    """Runs whose content was erased: their events and rows are proved all the same."""
    pending: int = 0
    """Runs, rows and events that are newer than the last sealing."""
    notes: list[str] = field(default_factory=list)
    """Limits of this verification, in words."""
    rules: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Add a finding."""
        self.rules[finding.rule] += 1
        if len(self.findings) < MAX_KEPT_FINDINGS:
            self.findings.append(finding)

    @property
    def is_clean(self) -> bool:
        """Return True if nothing was found."""
        return not self.rules

    @property
    def first(self) -> Finding | None:
        """Return the finding that is the earliest in the log, which is where the alteration begins."""
        return min(self.findings, key=_order, default=None)

    def in_order(self) -> Iterator[Finding]:
        """Yield the findings in the order of the log."""
        yield from sorted(self.findings, key=_order)


def _order(finding: Finding) -> tuple[bool, int]:
    return finding.place is None, finding.place or 0
