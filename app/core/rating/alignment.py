"""Two runs step by step: those with the same subtask side by side, whatever their places.

`comparison.py` compares two runs of one plan by the places of their steps. Where another plan was made, a step may have
moved; so steps are aligned by the hash of their subtask first, then by worker, then by place, and what is left stands
alone. Every figure is that of `comparison.py`; money is in micro-dollars in the records and in dollars in the JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from app.core.pool.catalog import MILLION
from app.core.rating.comparison import (
    USER,
    RunFigures,
    Same,
    StepFigures,
    compare_answers,
    compare_outputs,
    compare_unreadable,
    differences_to_json,
)

Alignment = Literal["subtask", "worker", "place", "alone"]
"""The way in which two steps were matched."""
Hash = Callable[[str], str]
"""The hash of a text that is given by its ref; empty where the text may not be read, or was erased."""
Key = Callable[[str, StepFigures, Hash], object]
"""A function of a step's place, its figures and the hashes of its run. Steps with equal results are aligned."""
DIGITS: Final = 6
"""Decimal places of seconds."""


def hash_unreadable(_ref: str) -> str:
    """Return the hash of texts for those who may not read them."""
    return ""


class AlignedSteps(Struct, frozen=True):
    """Two steps side by side, each with its place in its run; None where a run has no such step."""

    first: tuple[str, StepFigures] | None
    second: tuple[str, StepFigures] | None
    by: Alignment
    same_output: bool | None
    """None where a text is missing, was erased, or may not be read."""
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    """The grants that only one of the two steps has: `user`, and places of steps in its own run. Aligned steps count as
    one."""

    def differs(self) -> tuple[str, ...]:
        """Return the names of what is different: `worker`, `state`, `access`, `tokens`, `cost`, `output`."""
        if self.first is None or self.second is None:
            return ()
        first, other = self.first[1], self.second[1]
        different = {
            "worker": first.worker != other.worker,
            "state": first.state != other.state,
            "access": bool(self.only_first or self.only_second),
            "tokens": first.usage.total != other.usage.total,
            "cost": first.usd != other.usd,
            "output": self.same_output is False,
        }
        return tuple([name for name, differs in different.items() if differs])

    def to_json(self) -> dict[str, Any]:
        """Return the pair in plain JSON values."""
        return {
            "aligned_by": self.by,
            "first": _step(self.first),
            "second": _step(self.second),
            "differs": list(self.differs()),
            "difference": _difference(self.first[1], self.second[1]) if self.first and self.second else None,
            "access": {"only_first": list(self.only_first), "only_second": list(self.only_second)},
            "same_output": self.same_output,
        }


def _step(step: tuple[str, StepFigures] | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {"place": step[0], **step[1].to_json()}


def _difference(first: StepFigures, other: StepFigures) -> dict[str, float]:
    return {
        "cost_usd": (other.usd - first.usd) / MILLION,
        "seconds": round(other.seconds - first.seconds, DIGITS),
        "input_tokens": other.usage.input - first.usage.input,
        "output_tokens": other.usage.output - first.usage.output,
    }


class SideBySide(Struct, frozen=True):
    """Two runs, the second against the first. Pairs are in the order of the first run; then come the steps that only
    the second one has."""

    first: RunFigures
    second: RunFigures
    same_answer: bool | None
    pairs: tuple[AlignedSteps, ...]

    def to_json(self) -> dict[str, Any]:
        """Return both runs in plain JSON values."""
        return {
            "object": "run.side_by_side",
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "difference": differences_to_json(self.first, self.second),
            "same_answer": self.same_answer,
            "steps": [pair.to_json() for pair in self.pairs],
        }


def side_by_side(
    first: RunFigures,
    second: RunFigures,
    hashes: tuple[Hash, Hash] = (hash_unreadable, hash_unreadable),
    same: Same = compare_unreadable,
) -> SideBySide:
    """Align the steps of two runs. `hashes` gives the hash of a text of each run; `same` says of two refs whether their
    texts are equal."""
    matched = _match_steps(first.steps, second.steps, hashes)
    moved = {there: here for here, (there, _) in matched.items()}
    pairs = []
    for place, step in first.steps.items():
        if place in matched:
            there, by = matched[place]
            pairs.append(_pair((place, step), (there, second.steps[there]), by, moved, same))
        else:
            pairs.append(AlignedSteps((place, step), None, "alone", same_output=None))
    alone = [(place, step) for place, step in second.steps.items() if place not in moved]
    pairs += [AlignedSteps(None, step, "alone", same_output=None) for step in alone]
    return SideBySide(first, second, compare_answers(first, second, same), tuple(pairs))


def _pair(
    first: tuple[str, StepFigures], other: tuple[str, StepFigures], by: Alignment, moved: Mapping[str, str], same: Same
) -> AlignedSteps:
    """Return two aligned steps. `moved` has the places of the second run's steps in the first run."""
    here = {place: place if place == USER else moved.get(place, "") for place in other[1].access}
    lost = tuple(sorted(set(first[1].access) - set(here.values())))
    gained = tuple(sorted([place for place, as_first in here.items() if as_first not in first[1].access]))
    return AlignedSteps(first, other, by, compare_outputs(first[1], other[1], same), lost, gained)


def _match_steps(
    first: Mapping[str, StepFigures], second: Mapping[str, StepFigures], hashes: tuple[Hash, Hash]
) -> Mapping[str, tuple[str, Alignment]]:
    """Return the place in the second run of each step of the first one that is matched, with the way in which it
    was."""
    left, right = dict(first), dict(second)
    found: dict[str, tuple[str, Alignment]] = {}
    rules: Sequence[tuple[Alignment, Key]] = (
        ("subtask", lambda _place, step, hashed: hashed(step.subtask) if step.subtask else ""),
        ("worker", lambda place, step, _: (step.worker, place.count("."), place.split(".")[0])),
        ("place", lambda place, _step, _: place),
    )
    for by, key in rules:
        for here, there in _matches(left, right, key, hashes):
            del left[here], right[there]
            found[here] = there, by
    return found


def _matches(
    left: Mapping[str, StepFigures],
    right: Mapping[str, StepFigures],
    key: Key,
    hashes: tuple[Hash, Hash],
) -> list[tuple[str, str]]:
    """Return the places of steps with the same key, the first of the one run with the first of the other, and so on.
    The empty key matches nothing."""
    open_: dict[object, list[str]] = {}
    for place, step in right.items():
        open_.setdefault(key(place, step, hashes[1]), []).append(place)
    found = []
    for place, step in left.items():
        wanted = key(place, step, hashes[0])
        if wanted and open_.get(wanted):
            found.append((place, open_[wanted].pop(0)))
    return found
