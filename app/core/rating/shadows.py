"""Shadows: runs that repeat a share of a tier's live runs under another tier, conductor or worker. Pure.

Whether a run gets a shadow, and under which id, follows from its own id alone, so that every process finds the same
after a crash. `ShadowNotes` is what engines keep of a tier: how far they have read its runs, which of those wait for
their shadow, and how many got none, with the reason.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from msgspec import Struct

from app.core.sampling import draw

Reason = str
"""`started`, or one of `REASONS`."""
STARTED: Final = "started"
REASONS: Final = (
    "queue_full",
    "budget",
    "labels",
    "no_worker",
    "opted_out",
    "own_plan",
    "served",
    "cancelled",
    "not_approved",
    "content_erased",
    "failed",
)
"""The reasons why a run that was drawn got no shadow.

queue_full ...... as many runs as `max_waiting` were waiting
budget .......... what may be spent on shadows in a day was spent
labels .......... the shadow's workers, or its conductor, may not read the run's labels
no_worker ....... none of the shadow's workers can take the request for another reason
opted_out ....... the request says `baton.shadow = false`, or its tenant or key is excepted
own_plan ........ the request has a plan of its own, which stays what it is whatever serves the tier
served .......... it was served, or planned, by what the shadow would repeat it under
cancelled ....... the caller did not want the answer
not_approved .... the run's plan was refused, or nobody approved it in time; or the shadow would be planned by a worker
                  that the tier's approval names
content_erased .. the request is no longer stored
failed .......... it could not be started because of a fault, which is logged
"""
DAYS_KEPT = 35
"""Days for which counts are kept."""


def is_sampled(run: str, share: float) -> bool:
    """Return True for this share of all runs. The id of a run decides."""
    return draw(f"sample|{run}") < share


def shadow_id(run: str) -> str:
    """Return the id of the shadow of a run. It sorts as the run's own, and there can be no other one."""
    prefix, _, rest = run.partition("_")
    digest = hashlib.sha256(f"shadow|{run}".encode()).hexdigest()
    return f"{prefix}_{rest[:11]}{digest[:20]}"


class ShadowNotes(Struct, frozen=True):
    """The knowledge of engines about one tier's shadows. Times are seconds since 1970."""

    mark: float = 0.0
    """Runs admitted well before it were looked at."""
    seen: frozenset[str] = frozenset()
    """The latest runs that were drawn: a look begins a little before `mark`, and must not count them again."""
    waiting: tuple[str, ...] = ()
    """Runs that have not ended yet, or wait for an engine with free slots; the oldest first."""
    counts: Mapping[str, Mapping[str, int]] | None = None
    """By day (UTC, `2026-11-23`): how many runs got a shadow (`started`), and how many got none, by reason."""

    def counts_with(self, what: Reason, at: float) -> Mapping[str, Mapping[str, int]]:
        """Return the counts with one more of a kind."""
        day = _day(at)
        counts = {name: dict(of) for name, of in (self.counts or {}).items()}
        of_day = counts.setdefault(day, {})
        of_day[what] = of_day.get(what, 0) + 1
        return {name: counts[name] for name in sorted(counts)[-DAYS_KEPT:]}

    def since(self, at: float) -> Mapping[str, int]:
        """Return the counts of all days from that of a time on."""
        found: dict[str, int] = {}
        for day, counts in (self.counts or {}).items():
            for what, count in counts.items() if day >= _day(at) else ():
                found[what] = found.get(what, 0) + count
        return found

    def to_json(self) -> bytes:
        """Return the notes as they are stored."""
        body = {"mark": self.mark, "seen": sorted(self.seen), "waiting": self.waiting, "counts": self.counts or {}}
        return orjson.dumps(body)


def notes_from_json(body: bytes) -> ShadowNotes:
    """Return the inverse of `ShadowNotes.to_json`."""
    value: dict[str, Any] = orjson.loads(body)
    return ShadowNotes(value["mark"], frozenset(value["seen"]), tuple(value["waiting"]), value["counts"])


def policy_of(tier: str) -> str:
    """Return the name under which the notes of a tier are stored."""
    return f"shadow {tier}"


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
