"""The comparison of two runs of one task: a run and its replay, or a run and its shadow.

`figures` reads one journal, `compare` compares two of them, and `paired` sums up many comparisons. Everything is
derived from events and ratings. Texts are not read here: every run has a salt of its own, so equal texts have different
refs, and a caller that may read them passes a function that says whether two refs stand for equal texts.

Steps are aligned by their places (`core/run/recording.py`), which do not depend on how many proposals were rejected, as
numbers of steps do. Money is in micro-dollars in the records and in dollars in the JSON, durations are in seconds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Literal

from msgspec import Struct

from app.core.message.chat import Usage, sum_usages
from app.core.plan.workflow import Access
from app.core.pool.catalog import MILLION
from app.core.rating.feedback import Feedback, FeedbackKind, latest_scores
from app.core.run.caller_view import bill
from app.core.run.events import CallIntended, Event, PlanStep, facts
from app.core.run.fold import fold
from app.core.run.recipients import EMBEDDING_TEMPLATE, steps_seen_by_recipient
from app.core.run.recording import places
from app.core.run.state import RunState, StepState

USER: Final = "user"
"""The caller's words, in the list of what a recipient saw."""
METRICS: Final = ("usd", "seconds", "input_tokens", "output_tokens", "calls", "score")
"""The figures that are compared pair by pair."""
SCORING_KINDS: Final[tuple[FeedbackKind, ...]] = ("grader", "explicit")
"""The kinds of ratings that have scores, the preferred one first."""

Role = Literal["worker", "conductor", "embedder"]
Same = Callable[[str, str], bool | None]
"""Says whether the texts of a ref of the first run and of one of the second are equal; None if that is not known."""


def compare_unreadable(_first: str, _second: str) -> bool | None:
    """Return the comparison of texts for those who may not read them."""
    return None


# -- one run


class Recipient(Struct, frozen=True):
    """A recipient of words of the run, and what it was shown: the caller's words, or the outputs of steps."""

    recipient: str
    """The worker, the conductor's model or the embedder, by its name in the pool file."""
    role: Role
    place: str
    """The place of the step that it worked on; empty for a conductor and an embedder."""
    saw: tuple[str, ...]
    """`user` and the places of steps, sorted."""

    def to_json(self) -> dict[str, Any]:
        """Return the disclosure in plain JSON values."""
        return {"recipient": self.recipient, "role": self.role, "step": self.place or None, "saw": list(self.saw)}


class StepFigures(Struct, frozen=True):
    """A step of one run: who was to work on it, who did, and what it used."""

    n: int
    """Its number in the run."""
    planned: str
    worker: str
    state: str
    access: tuple[str, ...]
    """`user` and the places of the steps on its access list, sorted."""
    subtask: str
    """Ref of its subtask, or empty."""
    output: str
    """Ref of its output, or empty."""
    attempts: int
    usd: int
    seconds: float
    usage: Usage

    def to_json(self) -> dict[str, Any]:
        """Return the figures in plain JSON values, without refs."""
        return {
            "n": self.n,
            "planned_worker": self.planned,
            "worker": self.worker,
            "state": self.state,
            "access": list(self.access),
            "attempts": self.attempts,
            "cost_usd": self.usd / MILLION,
            "seconds": round(self.seconds, 3),
            "input_tokens": self.usage.input,
            "output_tokens": self.usage.output,
        }


class RunFigures(Struct, frozen=True):
    """One run as a comparison sees it."""

    run: str
    tier: str
    conductor: str
    state: str
    topology: str
    rounds: int
    degraded: bool
    error: str
    answer: str
    """Ref of the answer; empty if there is none."""
    usd: int
    seconds: float
    """From the admission to the latest reply."""
    usage: Usage
    calls: int
    scores: Mapping[FeedbackKind, float]
    """The mean of the latest score from each source, by kind of rating."""
    steps: Mapping[str, StepFigures]
    """By place."""
    disclosures: frozenset[Recipient]

    @property
    def score(self) -> float | None:
        """Return the score of graders and judges, or else that of callers; None if nobody has rated the run."""
        return self.scores.get("grader", self.scores.get("explicit"))

    @property
    def refs(self) -> Sequence[str]:
        """Return the refs of the texts that a comparison reads: the answer, the subtasks and the outputs."""
        steps = [ref for step in self.steps.values() for ref in (step.subtask, step.output)]
        return sorted({self.answer, *steps} - {""})

    def metric(self, name: str) -> float:
        """Return the figure of one of `METRICS`, which is not the score."""
        if name in ("usd", "seconds", "calls"):
            return float(getattr(self, name))
        return float(self.usage.input if name == "input_tokens" else self.usage.output)

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the whole run in plain JSON values."""
        return {
            "run": self.run,
            "tier": self.tier,
            "conductor": self.conductor,
            "state": self.state,
            "topology": self.topology or None,
            "rounds": self.rounds,
            "degraded": self.degraded,
            "error": self.error or None,
            "cost_usd": self.usd / MILLION,
            "seconds": round(self.seconds, 3),
            "input_tokens": self.usage.input,
            "output_tokens": self.usage.output,
            "calls": self.calls,
            "score": self.score,
        }


def figures(events: Sequence[Event], ratings: Iterable[Feedback] = ()) -> RunFigures:
    """Return the figures of the run of this journal, which must begin with its admission."""
    state = fold(tuple(events))
    split, end = bill(state), state.end
    at = places(state)
    return RunFigures(
        run=state.run,
        tier=state.admitted.tier,
        conductor=state.admitted.conductor,
        state=state.state,
        topology=state.topology,
        rounds=state.round_count,
        degraded=state.degraded,
        error=end.error if end is not None else "",
        answer=end.answer if end is not None else "",
        usd=split.usd,
        seconds=max(state.replied_at - events[0].at, 0.0) if state.replied_at else 0.0,
        usage=split.total,
        calls=len(state.calls),
        scores={kind: fmean(by_source.values()) for kind, by_source in latest_scores(ratings).items()},
        steps=_steps(state, events, at),
        disclosures=frozenset([_disclosure(intent, at) for intent in facts(events, CallIntended)]),
    )


def _steps(state: RunState, events: Sequence[Event], at: Mapping[int, str]) -> Mapping[str, StepFigures]:
    planned = {fact.n: fact.worker for fact in facts(events, PlanStep)}
    return {at[step.n]: _step(state, step, planned[step.n], at) for step in state.planned_steps}


def _step(state: RunState, step: StepState, planned: str, at: Mapping[int, str]) -> StepFigures:
    calls = [call for call in state.calls.values() if call.step == step.n]
    return StepFigures(
        n=step.n,
        planned=planned,
        worker=step.worker,
        state=step.state,
        access=_saw(step.access, at),
        subtask=step.subtask,
        output=step.output,
        attempts=len(calls),
        usd=sum(call.usd for call in calls),
        seconds=sum(call.seconds for call in calls),
        usage=sum_usages(call.usage for call in calls),
    )


def _disclosure(intent: CallIntended, at: Mapping[int, str]) -> Recipient:
    saw = _saw(Access(intent.access.user, steps_seen_by_recipient(intent)), at)
    if intent.n is not None:
        return Recipient(intent.worker, "worker", at[intent.n], saw)
    role: Role = "embedder" if intent.template == EMBEDDING_TEMPLATE else "conductor"
    return Recipient(intent.worker, role, "", saw)


def _saw(access: Access, at: Mapping[int, str]) -> tuple[str, ...]:
    return (*((USER,) if access.user else ()), *sorted(at[n] for n in access.steps))


# -- two runs


class AlignedStep(Struct, frozen=True):
    """The steps of two runs at one place; None where a run has none there."""

    place: str
    first: StepFigures | None
    second: StepFigures | None
    same_subtask: bool | None
    same_output: bool | None
    """None where a text is missing, was erased, or may not be read."""

    def to_json(self) -> dict[str, Any]:
        """Return the pair in plain JSON values."""
        return {
            "step": self.place,
            "first": self.first.to_json() if self.first is not None else None,
            "second": self.second.to_json() if self.second is not None else None,
            "same_subtask": self.same_subtask,
            "same_output": self.same_output,
        }


class Comparison(Struct, frozen=True):
    """Two runs of one task, the second against the first."""

    first: RunFigures
    second: RunFigures
    same_answer: bool | None
    """None where an answer is missing, was erased, or may not be read."""
    steps: tuple[AlignedStep, ...]

    @property
    def only_first(self) -> tuple[Recipient, ...]:
        """Return the disclosures of the first run that the second one has not."""
        return _sort_recipients(self.first.disclosures - self.second.disclosures)

    @property
    def only_second(self) -> tuple[Recipient, ...]:
        """Return the disclosures of the second run that the first one has not."""
        return _sort_recipients(self.second.disclosures - self.first.disclosures)

    def difference(self, metric: str) -> float | None:
        """Return the second run's figure less the first one's; None if one of them is not known."""
        return difference(self.first, self.second, metric)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison in plain JSON values."""
        return {
            "object": "run.comparison",
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "difference": differences_to_json(self.first, self.second),
            "same_answer": self.same_answer,
            "steps": [step.to_json() for step in self.steps],
            "disclosures": {
                "both": len(self.first.disclosures & self.second.disclosures),
                "only_first": [disclosure.to_json() for disclosure in self.only_first],
                "only_second": [disclosure.to_json() for disclosure in self.only_second],
            },
        }


def compare(first: RunFigures, second: RunFigures, same: Same = compare_unreadable) -> Comparison:
    """Compare two runs; `same` says of two refs whether their texts are equal."""
    all_places = sorted(first.steps.keys() | second.steps.keys(), key=_numbers)
    aligned = tuple([_align_step(place, first.steps.get(place), second.steps.get(place), same) for place in all_places])
    return Comparison(first, second, compare_answers(first, second, same), aligned)


def compare_answers(first: RunFigures, second: RunFigures, same: Same) -> bool | None:
    """Return whether two runs have the same answer; None where one of them has none, or where that is not known."""
    if first.answer and second.answer:
        return same(first.answer, second.answer)
    return None


def difference(first: RunFigures, second: RunFigures, metric: str) -> float | None:
    """Return the second run's figure less the first one's; None if one of them is not known."""
    values = _values(first, second, metric)
    if values is None:
        return None
    return values[1] - values[0]


def _values(first: RunFigures, second: RunFigures, metric: str) -> tuple[float, float] | None:
    """Return a metric of both runs; None if one of them is not known. Scores are compared with those of the same kind,
    of graders and judges, or else of callers."""
    if metric != "score":
        return first.metric(metric), second.metric(metric)
    for kind in SCORING_KINDS:
        if kind in first.scores and kind in second.scores:
            return first.scores[kind], second.scores[kind]
    return None


def differences_to_json(first: RunFigures, second: RunFigures) -> dict[str, float | None]:
    """Return the difference of each metric by its name in JSON."""
    return {metric_json_name(name): in_unit(name, difference(first, second, name)) for name in METRICS}


def _align_step(place: str, before: StepFigures | None, after: StepFigures | None, same: Same) -> AlignedStep:
    if before is None or after is None:
        return AlignedStep(place, before, after, same_subtask=None, same_output=None)
    subtasks = same_text(before.subtask, after.subtask, same)
    return AlignedStep(place, before, after, subtasks, compare_outputs(before, after, same))


def compare_outputs(first: StepFigures, second: StepFigures, same: Same) -> bool | None:
    """Return whether two steps have the same output; None where one of them has none, or where that is not known."""
    if first.state == second.state == "done":
        return same_text(first.output, second.output, same)
    return None


def same_text(first: str, second: str, same: Same) -> bool | None:
    """Return True if two refs stand for equal texts, None if that is not known. The empty text has no ref."""
    if first and second:
        return same(first, second)
    return first == second


def _numbers(place: str) -> tuple[tuple[int, str], ...]:
    return tuple([(int(part), "") if part.isdecimal() else (-1, part) for part in place.split(".")])


def _sort_recipients(these: Iterable[Recipient]) -> tuple[Recipient, ...]:
    return tuple(
        sorted(these, key=lambda disclosure: (disclosure.role, disclosure.place, disclosure.recipient, disclosure.saw))
    )


def metric_json_name(metric: str) -> str:
    """Return the name of a metric in JSON."""
    return "cost_usd" if metric == "usd" else metric


def in_unit(metric: str, value: float | None) -> float | None:
    """Return the value of a metric as JSON has it: money in dollars."""
    if value is None:
        return None
    if metric == "usd":
        return round(value / MILLION, 9)
    return round(value, 6)


# -- many pairs


class PairedDifference(Struct, frozen=True):
    """One metric over the pairs in which both runs have it. Means are in the unit of the metric."""

    metric: str
    pairs: int
    first: float
    second: float
    difference: float
    lower: int
    """The pairs in which the second run's figure is lower."""
    higher: int
    differences: tuple[float, ...]
    """The second run's figure less the first one's, pair by pair, for intervals."""

    def to_json(self) -> dict[str, Any]:
        """Return the means and counts in plain JSON values."""
        return {
            "metric": metric_json_name(self.metric),
            "pairs": self.pairs,
            "first": in_unit(self.metric, self.first),
            "second": in_unit(self.metric, self.second),
            "difference": in_unit(self.metric, self.difference),
            "lower": self.lower,
            "higher": self.higher,
        }


def pair_differences(comparisons: Sequence[Comparison]) -> tuple[PairedDifference, ...]:
    """Return the paired differences of each metric that at least one pair has."""
    found = []
    for metric in METRICS:
        pairs = [_values(comparison.first, comparison.second, metric) for comparison in comparisons]
        known = [values for values in pairs if values is not None]
        if known:
            found.append(_pair_difference(metric, known))
    return tuple(found)


def _pair_difference(metric: str, pairs: Sequence[tuple[float, float]]) -> PairedDifference:
    before, after = [first for first, _ in pairs], [second for _, second in pairs]
    differences = tuple([new - old for old, new in zip(before, after, strict=True)])
    return PairedDifference(
        metric=metric,
        pairs=len(pairs),
        first=fmean(before),
        second=fmean(after),
        difference=fmean(differences),
        lower=sum(difference < 0 for difference in differences),
        higher=sum(difference > 0 for difference in differences),
        differences=differences,
    )
