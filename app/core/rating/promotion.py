"""The comparison of a candidate with what is live, and the decision on its promotion and its rollback. Pure.

The evidence is either *paired* (each run of a candidate is the shadow of a live run) or *apart* (a canary's runs beside
the other runs of the same time, or the runs since a promotion beside those before it). Each figure has an interval that
may be looked at at any time (`intervals.py`). A condition holds if the unfavourable end of its interval satisfies it,
is breached if even the favourable end does not, and is open in between; so that a candidate is neither promoted nor
rolled back by chance.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.pool.catalog import MILLION, PromotionSpec
from app.core.rating import intervals
from app.core.rating.economics import JournaledRun, ReportOptions, Success, verdict
from app.core.rating.intervals import LEVEL, Interval
from app.core.run.events import CallFinished, CallIntended, RunAdmitted, RunEnd, facts

VERDICTS: Final[tuple[Success, ...]] = ("graders", "feedback")
"""The sources of a verdict, the preferred one first. Signs in what a caller did are none: a shadow has no caller."""
Method = Literal["paired", "apart"]
Outcome = Literal["holds", "breached", "open"]


class ComparedRun(Struct, frozen=True):
    """One run as it is compared. Money is in micro-dollars, times are in seconds."""

    run: str
    cluster: str
    """The end user of its tenant whom the request named, or else the run itself."""
    answered: bool
    degraded: bool
    usd: int
    seconds: float
    verdicts: Mapping[Success, bool]
    recipients: frozenset[str]
    """The workers, conductors and embedders that were shown the caller's words."""
    answer: str = ""
    """Ref of the answer."""
    admitted_at: float = 0.0
    catalog: str = ""
    """The digest of the pool file at its admission."""
    served_by: str = ""
    """The subject that served it in place of the tier's own definition; empty where the tier's own did."""


class ShadowedRun(Struct, frozen=True):
    """A live run and its shadow. `same_answer` is None where that is not known."""

    live: ComparedRun
    shadow: ComparedRun
    same_answer: bool | None = None

    @property
    def verdicts(self) -> tuple[bool, bool] | None:
        """Return the verdicts of both from the first source that has judged both; None if none has."""
        for source in VERDICTS:
            live, shadow = self.live.verdicts.get(source), self.shadow.verdicts.get(source)
            if live is not None and shadow is not None:
                return live, shadow
        return None


def summarize_run(run: JournaledRun) -> ComparedRun:
    """Return what is compared of a run that has ended."""
    admitted = next(facts(run.events, RunAdmitted))
    intents = list(facts(run.events, CallIntended))
    answer, ended_at = "", run.created_at
    for event in run.events:
        if isinstance(event.fact, RunEnd):
            answer, ended_at = event.fact.answer, event.at
            break
    verdicts: dict[Success, bool] = {}
    for source in VERDICTS:
        is_success = verdict(run, ReportOptions(success=source))
        if is_success is not None:
            verdicts[source] = is_success
    return ComparedRun(
        run=run.id,
        cluster=f"{run.tenant} {run.users[0]}" if run.users else run.id,
        answered=run.state == "succeeded",
        degraded=run.degraded,
        usd=sum(fact.usd for fact in facts(run.events, CallFinished)),
        seconds=max(ended_at - run.created_at, 0.0),
        verdicts=verdicts,
        recipients=frozenset(intent.worker for intent in intents if intent.access.user),
        answer=answer,
        admitted_at=run.created_at,
        catalog=admitted.catalog,
        served_by=admitted.served_by,
    )


# -- figures


class Figure(Struct, frozen=True):
    """One figure of both sides. `difference` is absolute, `relative` a share of the live mean; None: not defined."""

    name: str
    count: int
    """Pairs, or runs of the smaller side."""
    clusters: int
    """Users among them, who count once each."""
    live: float
    candidate: float
    difference: Interval
    relative: Interval | None = None
    alone: Interval | None = None
    """The candidate's own mean, of figures between 0 and 1."""
    spread: float = 0.0
    """The standard deviation of one user's difference; of a relative figure, as a share of the live mean."""

    def to_json(self) -> dict[str, Any]:
        """Return the figure in plain JSON values; infinite ends are null."""
        return {
            "name": self.name,
            "count": self.count,
            "users": self.clusters,
            "live": _number(self.live),
            "candidate": _number(self.candidate),
            "difference": _interval_to_json(self.difference),
            "relative": _interval_to_json(self.relative) if self.relative is not None else None,
        }


def _interval_to_json(interval: Interval) -> dict[str, float | None]:
    return {"value": _number(interval.value), "low": _number(interval.low), "high": _number(interval.high)}


def _number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return round(value, 9)


class Evidence(Struct, frozen=True):
    """All figures of a candidate against what is live."""

    method: Method
    count: int
    """Pairs, or runs of the smaller side."""
    figures: Mapping[str, Figure]
    """By name: `success`, `agreement`, `answered`, `degraded`, `cost_usd`, `seconds`, `recipients`."""

    def to_json(self) -> dict[str, Any]:
        """Return the evidence in plain JSON values."""
        shown = [figure.to_json() for figure in self.figures.values()]
        return {"method": self.method, "count": self.count, "figures": shown}


NO_EVIDENCE: Final = Evidence("paired", 0, {})


def compare_with_shadows(pairs: Sequence[ShadowedRun]) -> Evidence:
    """Compare runs with their shadows."""
    figures = [
        _estimate_bounded_figure("success", _verdicts_of_both(pairs)),
        _estimate_bounded_figure("agreement", _agreements(pairs)),
        _estimate_bounded_figure("answered", _values_of_both(pairs, lambda run: float(run.answered))),
        _estimate_bounded_figure("degraded", _values_of_both(pairs, lambda run: float(run.degraded))),
        _estimate_unbounded_figure("cost_usd", _values_of_both(pairs, lambda run: run.usd / MILLION)),
        _estimate_unbounded_figure("seconds", _values_of_both(pairs, lambda run: run.seconds)),
        _estimate_unbounded_figure("recipients", _values_of_both(pairs, lambda run: float(len(run.recipients)))),
    ]
    return Evidence("paired", len(pairs), _by_name(figures))


def _by_name(figures: Sequence[Figure | None]) -> dict[str, Figure]:
    """Return the figures that there are, by name."""
    return {figure.name: figure for figure in figures if figure is not None}


class PairedValue(Struct, frozen=True):
    """One value of a live run and of its shadow."""

    cluster: str
    live: float
    shadow: float


def _verdicts_of_both(pairs: Sequence[ShadowedRun]) -> list[PairedValue]:
    values = []
    for pair in pairs:
        verdicts = pair.verdicts
        if verdicts is not None:
            live, shadow = verdicts
            values.append(PairedValue(pair.live.cluster, float(live), float(shadow)))
    return values


def _agreements(pairs: Sequence[ShadowedRun]) -> list[PairedValue]:
    """Return 1 for each shadow with the answer of its live run, 0 for another answer. The live run has no value."""
    values = []
    for pair in pairs:
        if pair.same_answer is not None:
            values.append(PairedValue(pair.live.cluster, 0.0, float(pair.same_answer)))
    return values


def _values_of_both(pairs: Sequence[ShadowedRun], value_of: Callable[[ComparedRun], float]) -> list[PairedValue]:
    return [PairedValue(pair.live.cluster, value_of(pair.live), value_of(pair.shadow)) for pair in pairs]


def _means_by_cluster(values: Sequence[PairedValue]) -> tuple[list[float], list[float]]:
    """Return the mean of each cluster's live runs, and of their shadows, in the same order."""
    live = intervals.by_cluster([(value.cluster, value.live) for value in values])
    shadow = intervals.by_cluster([(value.cluster, value.shadow) for value in values])
    return live, shadow


def _estimate_bounded_figure(name: str, values: Sequence[PairedValue]) -> Figure | None:
    """Return a figure between 0 and 1 of each run. `agreement` has no figure of the live side, and is no difference."""
    if not values:
        return None
    live, shadow = _means_by_cluster(values)
    differences = [after - before for before, after in zip(live, shadow, strict=True)]
    least = 0.0 if name == "agreement" else -1.0
    alone = intervals.mean_of_bounded(shadow, 0.0, 1.0)
    return Figure(
        name=name,
        count=len(values),
        clusters=len(live),
        live=fmean(live),
        candidate=alone.value,
        difference=intervals.mean_of_bounded(differences, least, 1.0),
        alone=alone,
        spread=_spread(differences),
    )


def _estimate_unbounded_figure(name: str, values: Sequence[PairedValue]) -> Figure | None:
    if not values:
        return None
    live, shadow = _means_by_cluster(values)
    differences = [after - before for before, after in zip(live, shadow, strict=True)]
    return Figure(
        name=name,
        count=len(values),
        clusters=len(live),
        live=fmean(live),
        candidate=fmean(shadow),
        difference=intervals.mean(differences),
        relative=intervals.ratio(live, shadow),
        spread=_relative_spread(live, shadow),
    )


def _relative_spread(live: Sequence[float], shadow: Sequence[float]) -> float:
    """Return the standard deviation of what a cluster's figure differs from the usual rise, as a share of the live
    mean; 0 where that is 0."""
    mean = fmean(live)
    if mean <= 0:
        return 0.0
    rise = fmean(shadow) / mean
    return _spread([(after - rise * before) / mean for before, after in zip(live, shadow, strict=True)])


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.inf
    return stdev(values)


def compare_different_runs(live: Sequence[ComparedRun], candidate: Sequence[ComparedRun]) -> Evidence:
    """Compare two sets of different runs."""
    source = _find_common_source(live, candidate)
    figures = [
        _shares("success", _verdicts(live, source), _verdicts(candidate, source)),
        _shares(
            "answered",
            _values(live, lambda run: run.answered),
            _values(candidate, lambda run: run.answered),
        ),
        _estimate_degraded_share(_values(live, lambda run: run.degraded), _values(candidate, lambda run: run.degraded)),
        _amounts("cost_usd", live, candidate, lambda run: run.usd / MILLION),
        _amounts("seconds", live, candidate, lambda run: run.seconds),
    ]
    return Evidence("apart", min(len(live), len(candidate)), _by_name(figures))


Values = list[tuple[str, float]]
"""A value of each run, with the run's cluster before it."""


def _find_common_source(live: Sequence[ComparedRun], candidate: Sequence[ComparedRun]) -> Success:
    """Return the source that has judged the most runs of the side of which it has judged fewer; of equal ones the
    first."""
    return max(VERDICTS, key=lambda source: min(len(_verdicts(live, source)), len(_verdicts(candidate, source))))


def _verdicts(runs: Sequence[ComparedRun], source: Success) -> Values:
    return [(run.cluster, float(run.verdicts[source])) for run in runs if source in run.verdicts]


def _values(runs: Sequence[ComparedRun], value_of: Callable[[ComparedRun], float]) -> Values:
    return [(run.cluster, float(value_of(run))) for run in runs]


def _shares(name: str, live: Values, candidate: Values) -> Figure | None:
    if not live or not candidate:
        return None
    before, after = intervals.by_cluster(live), intervals.by_cluster(candidate)
    base = intervals.mean_of_bounded(before, 0.0, 1.0, LEVEL / 2)
    alone = intervals.mean_of_bounded(after, 0.0, 1.0, LEVEL / 2)
    return Figure(
        name=name,
        count=min(len(live), len(candidate)),
        clusters=min(len(before), len(after)),
        live=base.value,
        candidate=alone.value,
        difference=alone.minus(base),
        alone=alone,
        spread=math.hypot(_spread(before), _spread(after)),
    )


def _estimate_degraded_share(live: Values, candidate: Values) -> Figure | None:
    """Return the figure of the share of degraded runs. The candidate's own share can be judged even if the tier had no
    runs before the promotion with which it could be compared."""
    if live or not candidate:
        return _shares("degraded", live, candidate)
    after = intervals.by_cluster(candidate)
    alone = intervals.mean_of_bounded(after, 0.0, 1.0, LEVEL / 2)
    return Figure(
        name="degraded",
        count=len(candidate),
        clusters=len(after),
        live=math.nan,
        candidate=alone.value,
        difference=Interval(math.nan),
        alone=alone,
        spread=_spread(after),
    )


def _amounts(
    name: str, live: Sequence[ComparedRun], candidate: Sequence[ComparedRun], value_of: Callable[[ComparedRun], float]
) -> Figure | None:
    if not live or not candidate:
        return None
    before, after = intervals.by_cluster(_values(live, value_of)), intervals.by_cluster(_values(candidate, value_of))
    base, alone = intervals.mean(before, LEVEL / 2), intervals.mean(after, LEVEL / 2)
    spread = 0.0
    if base.value > 0:
        spread = math.hypot(_spread(before), _spread(after)) / base.value
    return Figure(
        name=name,
        count=min(len(live), len(candidate)),
        clusters=min(len(before), len(after)),
        live=base.value,
        candidate=alone.value,
        difference=alone.minus(base),
        relative=intervals.ratio_apart(before, after),
        spread=spread,
    )


# -- conditions


class Condition(Struct, frozen=True):
    """One condition of a promotion with its evidence."""

    name: str
    limit: float
    outcome: Outcome
    count: int
    found: Interval | None = None
    """None: nothing is known."""
    needed: int | None = None
    """About how many pairs decide it, if the difference stays what it is; None where that is not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the condition in plain JSON values."""
        return {
            "name": self.name,
            "limit": self.limit,
            "outcome": self.outcome,
            "count": self.count,
            "found": _interval_to_json(self.found) if self.found is not None else None,
            "needed": self.needed,
        }


def conditions(spec: PromotionSpec, evidence: Evidence) -> tuple[Condition, ...]:
    """Judge each condition by the evidence.

    A candidate whose runs fail is cheap and quick, and nobody rates it, so that no condition of the pool file might
    notice. Therefore one applies in any case, to whatever there is to compare: that fewer of its runs have an answer
    is a breach beyond chance. Until then it holds, so that it asks for no more pairs than the others do.
    """
    enough: Outcome = "holds" if evidence.count >= spec.min_pairs else "open"
    found = [Condition("min_pairs", spec.min_pairs, enough, evidence.count, needed=spec.min_pairs)]
    figure = evidence.figures.get
    if spec.min_success_difference is not None:
        found.append(_at_least("min_success_difference", spec.min_success_difference, figure("success")))
    if spec.max_cost_increase is not None:
        found.append(_at_most("max_cost_increase", spec.max_cost_increase, figure("cost_usd"), _relative))
    if spec.max_latency_increase is not None:
        found.append(_at_most("max_latency_increase", spec.max_latency_increase, figure("seconds"), _relative))
    if spec.max_degraded is not None:
        found.append(_at_most("max_degraded", spec.max_degraded, figure("degraded"), _alone))
    answered = figure("answered")
    if answered is not None:
        condition = _at_least("min_answered_difference", spec.min_answered_difference, answered)
        if condition.outcome == "open":
            condition = replace(condition, outcome="holds")
        found.append(condition)
    return tuple(found)


def _relative(figure: Figure) -> Interval | None:
    return figure.relative


def _alone(figure: Figure) -> Interval | None:
    return figure.alone


def _at_least(name: str, limit: float, figure: Figure | None) -> Condition:
    if figure is None:
        return Condition(name, limit, "open", 0)
    found = figure.difference
    outcome: Outcome = "open"
    if found.high < limit:
        outcome = "breached"
    elif found.low >= limit:
        outcome = "holds"
    needed = _count_pairs_needed(figure, found.value - limit, width=2.0)  # from -1 to 1
    return Condition(name, limit, outcome, figure.count, found, needed)


def _at_most(
    name: str, limit: float, figure: Figure | None, interval_of: Callable[[Figure], Interval | None]
) -> Condition:
    if figure is None:
        return Condition(name, limit, "open", 0)
    found = interval_of(figure)
    if found is None:
        return Condition(name, limit, "open", figure.count)
    outcome: Outcome = "open"
    if found.low > limit:
        outcome = "breached"
    elif found.high <= limit:
        outcome = "holds"
    width = 0.0
    if figure.alone is not None:  # a share
        width = 1.0
    return Condition(name, limit, outcome, figure.count, found, _count_pairs_needed(figure, limit - found.value, width))


def _count_pairs_needed(figure: Figure, margin: float, width: float) -> int | None:
    """Return about how many pairs it takes until the interval no longer holds the limit, at this margin and spread.
    `width` is that of the range of a share, 0 for an amount."""
    users = intervals.sample_size(figure.spread, abs(margin), width)
    if users is None:
        return None
    return math.ceil(users * figure.count / figure.clusters)


def is_promotable(found: Sequence[Condition]) -> bool:
    """Return True if every condition holds."""
    return all(condition.outcome == "holds" for condition in found)


def breaches(found: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the conditions that are breached beyond chance."""
    return tuple([condition for condition in found if condition.outcome == "breached"])


def pairs_needed(found: Sequence[Condition]) -> int | None:
    """Return about how many pairs decide every condition; None where that is not known."""
    needed = [condition.needed for condition in found if condition.outcome == "open"]
    if needed and None not in needed:
        return max([number or 0 for number in needed])
    return None
