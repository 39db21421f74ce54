"""The rule about legal holds: while one was in force, no content of a run that it covers was erased, and no such run
was pruned.

Whoever removes something does so before a hold is placed, or sees it (`app/store/rows/holds.py`), and sees it until its
release is committed. So all of these have one order. Their times show it, which are those of the database's clock, but
not within a few seconds: another server may have taken over, whose clock differs. The transparency log shows it
whatever the clocks say: of two changes that were sealed in different passes, the earlier one stands before the other.

What a hold covered is not always known afterwards: the name of a run's user is erased with its content, and its key
goes when it is pruned. An earlier export has them. Without one, removals that may have been under such a hold are
counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.audit.administration import read_fields
from app.store.archive import Record
from app.store.protocol import PrunedRun

CLOCK_SECONDS = 5.0
"""Seconds within which two times do not show which of two changes was the earlier one."""
UNKNOWN_OWNER = "removed during a hold on a user or a key, and not known whose"
UNKNOWN_TIME = "erased without a date, perhaps under a hold"


class Moment(Struct, frozen=True):
    """The moment at which a change was made."""

    at: float
    """By the database's clock, in seconds since 1970."""
    place: int | None = None
    """The place of its entry in the transparency log; None if that is not known."""
    sealed_at: float = 0.0
    """The time of the pass of sealing that made this entry."""

    def precedes(self, other: "Moment") -> bool:
        """Return True if this was certainly the earlier one."""
        if self.place is not None and other.place is not None and self.sealed_at != other.sealed_at:
            return self.place < other.place
        return self.at + CLOCK_SECONDS < other.at


class Removal(Struct, frozen=True):
    """The erasure of a run's content, or the pruning of a run. It was made between two moments."""

    run: str
    tenant: str
    key: str | None
    """None where it is not known any more."""
    words: str
    earliest: Moment
    latest: Moment


def erasure_of(row: Mapping[str, Any], sealed: Moment | None = None) -> Removal | None:
    """Return the erasure of a run's content, by its row; None if its salt is there. Releases up to 0.2 did not note
    when they erased something. `sealed` is the moment of the erasure where its entry in the log is known."""
    if row["salt"] is not None:
        return None
    erased_at = row.get("erased_at")  # exports of earlier releases have no such column
    if erased_at is None:
        earliest, latest = Moment(row["created_at"]), Moment(inf)
    else:
        earliest = latest = sealed or Moment(erased_at)
    words = f"its content was erased (cause: {row.get('erased_by') or 'not known'})"
    return Removal(row["id"], row["tenant"], row["key"], words, earliest, latest)


def pruning_of(run: PrunedRun, sealed: Moment | None = None) -> Removal:
    """Return the pruning of a run."""
    moment = sealed or Moment(run.pruned_at)
    return Removal(run.id, run.tenant, None, "it was pruned", moment, moment)


class Owner(Struct, frozen=True):
    """The key and the users of a run, as an earlier export has them."""

    key: str
    users: frozenset[str] | None
    """The users whom its request names; None if its content was erased by then."""


class HoldTime(Struct, frozen=True):
    """A legal hold with the time for which it was in force, as the log of changes says."""

    id: str
    scope: str
    name: str
    tenant: str
    placed: Moment
    released: Moment | None = None
    """None while it is in force."""

    def covers(self, removal: Removal, owner: Owner | None) -> bool | None:
        """Return True if it covers the run; None if that is not known any more. A key of all tenants begins runs of
        other tenants than its own, so that of a hold on a key does not count."""
        if self.scope == "run":
            return self.name == removal.run
        key, users = removal.key, None
        if owner is not None:
            key, users = owner.key, owner.users
        if self.scope == "key":
            return None if key is None else self.name == key
        if self.tenant not in ("", removal.tenant):
            return False
        if self.scope == "tenant":
            return True
        return None if users is None else self.name in users

    def was_in_force(self, removal: Removal) -> bool:
        """Return True if something was certainly removed while the hold was in force."""
        if not self.placed.precedes(removal.earliest):
            return False
        return self.released is None or removal.latest.precedes(self.released)

    def may_have_been_in_force(self, removal: Removal) -> bool:
        """Return False if something was certainly removed before the hold was placed or after its release."""
        if removal.latest.precedes(self.placed):
            return False
        return self.released is None or not self.released.precedes(removal.earliest)


def read_holds(changes: Sequence[Mapping[str, Any]], sealed: Mapping[int, Moment] | None = None) -> list[HoldTime]:
    """Return the holds of the log of changes, whose other entries are passed over. `sealed` are the moments of entries
    of that log, by their number."""
    holds: dict[str, HoldTime] = {}
    for change in changes:
        moment = (sealed or {}).get(change["seq"], Moment(change["at"]))
        name = change["target"]
        if change["action"] == "hold.placed":
            fields = read_fields(change["after"]) or {}
            scope, of, tenant = [str(fields.get(field)) for field in ("scope", "name", "tenant")]
            holds[name] = HoldTime(name, scope, of, tenant, moment)
        elif change["action"] == "hold.released" and name in holds:
            holds[name] = replace(holds[name], released=moment)
    return list(holds.values())


@dataclass(slots=True)
class HoldCheck:
    """Compares what was removed with the holds of the log of changes."""

    holds: Sequence[HoldTime] = ()
    unverifiable: Counter[str] = field(default_factory=Counter)
    """The numbers of removals of which it is not known whether they were under a hold, by reason."""
    _suspects: list[Removal] = field(default_factory=list)
    _owners: dict[str, Owner] = field(default_factory=dict)
    """The owners of runs, by the ids of the runs."""

    def learn_owner(self, record: Record) -> None:
        """Learn from an earlier export whose a run is, if a hold on a user or a key asks for it."""
        if any(hold.scope in ("user", "key") for hold in self.holds):
            self._owners[str(record.row["id"])] = Owner(str(record.row["key"]), _users_of(record))

    def add(self, removal: Removal | None) -> None:
        """Note a removal."""
        if removal is None:
            return
        reason = ""
        for hold in self.holds:
            covered = hold.covers(removal, self._owners.get(removal.run))
            if covered is False or not hold.may_have_been_in_force(removal):
                continue
            if covered is None:
                reason = UNKNOWN_OWNER
            elif hold.was_in_force(removal):
                self._suspects.append(removal)
                return
            elif removal.latest.at == inf:
                reason = UNKNOWN_TIME
        if reason:
            self.unverifiable[reason] += 1

    def find_broken(self, holds: Sequence[HoldTime]) -> Iterator[tuple[Removal, str]]:
        """Yield what was removed under a hold, with the words for it. `holds` were read after all removals, because one
        may have been released, and runs of it erased, while these were read."""
        for removal in self._suspects:
            for hold in holds:
                if hold.covers(removal, self._owners.get(removal.run)) and hold.was_in_force(removal):
                    yield removal, f"{removal.words} while the legal hold {hold.id} on its {hold.scope} was in force"
                    break


def _users_of(record: Record) -> frozenset[str] | None:
    """Return the users whom the request of a run names; None if its content was erased."""
    try:
        body = record.contents.get(orjson.loads(record.events[0].body)["task"])
        if body is None:
            return None
        task = orjson.loads(body)
        return frozenset({task.get("user"), (task.get("echoed") or {}).get("safety_identifier")} - {None})
    except (AttributeError, IndexError, KeyError, TypeError, orjson.JSONDecodeError):
        return None  # it is damaged, which is a violation elsewhere
