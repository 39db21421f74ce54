"""The times for which runs are kept, by tenant, tier and label."""

from collections.abc import Sequence
from math import inf

from msgspec import Struct


class RunClass(Struct, frozen=True):
    """A class of runs: those of a tenant, of a tier and with a label, as far as each is named."""

    tenant: str | None = None
    tier: str | None = None
    label: str | None = None


class RetentionClass(Struct, frozen=True):
    """The times for which the runs of a class are kept, in seconds: None says nothing, infinity is for ever."""

    of: RunClass
    content: float | None = None
    events: float | None = None


class Selection(Struct, frozen=True):
    """Runs that are kept for as many seconds: those of the class `within` (None: all), and of none of the others."""

    seconds: float
    within: RunClass | None = None
    without: tuple[RunClass, ...] = ()


def content_selections(seconds: float | None, classes: Sequence[RetentionClass]) -> list[Selection]:
    """Select the runs by how long their content is kept: the shortest time of their classes counts, else `seconds`.

    Content is personal data: it goes as soon as one of the reasons demands it. A legal hold keeps it longer.
    """
    stating = [run_class for run_class in classes if run_class.content is not None]
    chosen = [
        Selection(run_class.content, run_class.of)
        for run_class in stating
        if run_class.content is not None and run_class.content < inf
    ]
    if seconds is not None:
        chosen.append(Selection(seconds, without=tuple([run_class.of for run_class in stating])))
    return chosen


def event_selections(seconds: float | None, classes: Sequence[RetentionClass]) -> list[Selection]:
    """Select the runs by how long they are kept as a whole: the longest time of their classes counts, else `seconds`.

    Journals are records, hold no words of callers, and cannot be brought back: they go when no reason keeps them.
    """
    stating = [(run_class.of, run_class.events) for run_class in classes if run_class.events is not None]
    chosen = []
    for of, duration in stating:
        longer = tuple([other for other, other_duration in stating if other_duration > duration])
        if duration < inf:
            chosen.append(Selection(duration, of, longer))
    if seconds is not None:
        chosen.append(Selection(seconds, without=tuple([of for of, _ in stating])))
    return chosen
