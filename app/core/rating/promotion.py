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

from app.core.pool.catalog import MILLION, PromotionSpec
from app.core.rating import intervals
from app.core.rating.economics import JournaledRun, ReportOptions, Success, verdict
from app.core.rating.intervals import LEVEL, Interval
from app.core.records import record
from app.core.run.events import CallFinished, CallIntended, RunAdmitted, RunEnd, facts

VERDICTS: Final[tuple[Success, ...]] = ("graders", "feedback")
"""The sources of a verdict, the preferred one first. Signs in what a caller did are none: a shadow has no caller."""
Method = Literal["paired", "apart"]
Outcome = Literal["holds", "breached", "open"]


@record(frozen=True, slots=True)
class ComparedRun:
    """One run as it is compared. Money is in micro-dollars, times are in seconds."""

    run: str
    cluster: str
    """The end user whom the request named, or else the run itself."""
    answered: bool
    degraded: bool
    usd: int
    seconds: float
    verdicts: Mapping[Success, bool]
    recipients: frozenset[str]
    """The workers, conductors and embedders that were shown the caller's words."""
    answer: str = ""
    """Ref of the answer."""
    version: str = ""
    """The version of the conductor that planned it; empty for the pool file's own model."""
    served_by: str = ""
    """The subject that served it in place of its tier's own definition; empty where that did."""


@record(frozen=True, slots=True)
class ShadowedRun:
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


def seen(run: JournaledRun) -> ComparedRun:
    """Read a run that has ended."""
    intents = list(facts(run.events, CallIntended))
    end = next((event.fact for event in run.events if isinstance(event.fact, RunEnd)), None)
    ended_at = next((event.at for event in run.events if isinstance(event.fact, RunEnd)), run.created_at)
    found = {source: verdict(run, ReportOptions(success=source)) for source in VERDICTS}
    return ComparedRun(
        run=run.id,
        cluster=run.users[0] if run.users else run.id,
        answered=run.state == "succeeded",
        degraded=run.degraded,
        usd=sum(fact.usd for fact in facts(run.events, CallFinished)),
        seconds=max(ended_at - run.created_at, 0.0),
        verdicts={source: score for source, score in found.items() if score is not None},
        recipients=frozenset(intent.worker for intent in intents if intent.access.user),
        answer=end.answer if end is not None else "",
        served_by=next((fact.served_by for fact in facts(run.events, RunAdmitted)), ""),
        version=next((intent.version for intent in intents if intent.n is None and intent.version), ""),
    )


# -- figures


@record(frozen=True, slots=True)
class Figure:
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
        """The figure in plain JSON values; infinite ends are null."""
        return {
            "name": self.name,
            "count": self.count,
            "users": self.clusters,
            "live": _number(self.live),
            "candidate": _number(self.candidate),
            "difference": _shown(self.difference),
            "relative": _shown(self.relative) if self.relative is not None else None,
        }


def _shown(interval: Interval) -> dict[str, float | None]:
    return {"value": _number(interval.value), "low": _number(interval.low), "high": _number(interval.high)}


def _number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return round(value, 9)


@record(frozen=True, slots=True)
class Evidence:
    """All figures of a candidate against what is live."""

    method: Method
    count: int
    """Pairs, or runs of the smaller side."""
    figures: Mapping[str, Figure]
    """By name: `success`, `agreement`, `answered`, `degraded`, `cost_usd`, `seconds`, `recipients`."""

    def to_json(self) -> dict[str, Any]:
        """The evidence in plain JSON values."""
        shown = [figure.to_json() for figure in self.figures.values()]
        return {"method": self.method, "count": self.count, "figures": shown}


NO_EVIDENCE: Final = Evidence("paired", 0, {})


def paired(pairs: Sequence[ShadowedRun]) -> Evidence:
    """Compare runs with their shadows."""
    judged = [(pair, pair.verdicts) for pair in pairs]
    verdicts = [(pair, value) for pair, value in judged if value is not None]
    known = [(pair, pair.same_answer) for pair in pairs if pair.same_answer is not None]
    found = {
        "success": _bounded("success", [(pair, (float(a), float(b))) for pair, (a, b) in verdicts]),
        "agreement": _bounded("agreement", [(pair, (0.0, float(same))) for pair, same in known]),
        "answered": _bounded("answered", _both(pairs, lambda run: float(run.answered))),
        "degraded": _bounded("degraded", _both(pairs, lambda run: float(run.degraded))),
        "cost_usd": _unbounded("cost_usd", _both(pairs, lambda run: run.usd / MILLION)),
        "seconds": _unbounded("seconds", _both(pairs, lambda run: run.seconds)),
        "recipients": _unbounded("recipients", _both(pairs, lambda run: float(len(run.recipients)))),
    }
    return Evidence("paired", len(pairs), {name: figure for name, figure in found.items() if figure is not None})


Values = Sequence[tuple[ShadowedRun, tuple[float, float]]]


def _both(pairs: Sequence[ShadowedRun], of: Callable[[ComparedRun], float]) -> Values:
    return [(pair, (of(pair.live), of(pair.shadow))) for pair in pairs]


def _bounded(name: str, values: Values) -> Figure | None:
    """A figure between 0 and 1 of each run. `agreement` has no figure of the live side, and is no difference."""
    if not values:
        return None
    before = intervals.by_cluster([(pair.live.cluster, a) for pair, (a, _) in values])
    after = intervals.by_cluster([(pair.live.cluster, b) for pair, (_, b) in values])
    apart = [b - a for a, b in zip(before, after, strict=True)]
    least = 0.0 if name == "agreement" else -1.0
    difference = intervals.bounded(apart, least, 1.0)
    alone = intervals.bounded(after, 0.0, 1.0)
    figures = (len(values), len(before), fmean(before), alone.value, difference)
    return Figure(name, *figures, alone=alone, spread=_spread(apart))


def _unbounded(name: str, values: Values) -> Figure | None:
    if not values:
        return None
    before = intervals.by_cluster([(pair.live.cluster, a) for pair, (a, _) in values])
    after = intervals.by_cluster([(pair.live.cluster, b) for pair, (_, b) in values])
    apart = [b - a for a, b in zip(before, after, strict=True)]
    base, relative = fmean(before), intervals.ratio(before, after)
    rise = fmean(after) / base if base > 0 else 0.0
    spread = _spread([(b - rise * a) / base for a, b in zip(before, after, strict=True)]) if base > 0 else 0.0
    figures = (len(values), len(before), base, fmean(after), intervals.mean(apart))
    return Figure(name, *figures, relative=relative, spread=spread)


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.inf


def apart(live: Sequence[ComparedRun], candidate: Sequence[ComparedRun]) -> Evidence:
    """Compare two sets of different runs."""
    found = {
        "success": _shares("success", _judged(live, candidate), _judged(candidate, live)),
        "answered": _shares("answered", _of(live, lambda run: run.answered), _of(candidate, lambda run: run.answered)),
        "degraded": _shares("degraded", _of(live, lambda run: run.degraded), _of(candidate, lambda run: run.degraded)),
        "cost_usd": _amounts("cost_usd", live, candidate, lambda run: run.usd / MILLION),
        "seconds": _amounts("seconds", live, candidate, lambda run: run.seconds),
    }
    count = min(len(live), len(candidate))
    return Evidence("apart", count, {name: figure for name, figure in found.items() if figure is not None})


def _judged(these: Sequence[ComparedRun], others: Sequence[ComparedRun]) -> list[tuple[str, float]]:
    """The verdicts of these runs, from the first source that has judged runs of both sides."""
    for source in VERDICTS:
        mine = [(run.cluster, float(run.verdicts[source])) for run in these if source in run.verdicts]
        if mine and any(source in run.verdicts for run in others):
            return mine
    return []


def _of(these: Sequence[ComparedRun], of: Callable[[ComparedRun], float]) -> list[tuple[str, float]]:
    return [(run.cluster, float(of(run))) for run in these]


def _shares(name: str, live: Sequence[tuple[str, float]], candidate: Sequence[tuple[str, float]]) -> Figure | None:
    if not live or not candidate:
        return None
    before, after = intervals.by_cluster(live), intervals.by_cluster(candidate)
    base, other = (intervals.bounded(values, 0.0, 1.0, LEVEL / 2) for values in (before, after))
    figures = (min(len(live), len(candidate)), min(len(before), len(after)), base.value, other.value)
    spread = math.hypot(_spread(before), _spread(after))
    return Figure(name, *figures, other.minus(base), alone=other, spread=spread)


def _amounts(
    name: str, live: Sequence[ComparedRun], candidate: Sequence[ComparedRun], of: Callable[[ComparedRun], float]
) -> Figure | None:
    if not live or not candidate:
        return None
    before, after = intervals.by_cluster(_of(live, of)), intervals.by_cluster(_of(candidate, of))
    base, other = intervals.mean(before, LEVEL / 2), intervals.mean(after, LEVEL / 2)
    spread = math.hypot(_spread(before), _spread(after)) / base.value if base.value > 0 else 0.0
    figures = (min(len(live), len(candidate)), min(len(before), len(after)), base.value, other.value)
    relative = intervals.ratio_apart(before, after)
    return Figure(name, *figures, other.minus(base), relative=relative, spread=spread)


# -- conditions


@record(frozen=True, slots=True)
class Condition:
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
        """The condition in plain JSON values."""
        return {
            "name": self.name,
            "limit": self.limit,
            "outcome": self.outcome,
            "count": self.count,
            "found": _shown(self.found) if self.found is not None else None,
            "needed": self.needed,
        }


def conditions(spec: PromotionSpec, evidence: Evidence) -> tuple[Condition, ...]:
    """Judge each condition by the evidence."""
    enough: Outcome = "holds" if evidence.count >= spec.min_pairs else "open"
    found = [Condition("min_pairs", spec.min_pairs, enough, evidence.count, needed=spec.min_pairs)]
    of = evidence.figures.get
    if spec.min_success_difference is not None:
        found.append(_at_least("min_success_difference", spec.min_success_difference, of("success")))
    if spec.max_cost_increase is not None:
        found.append(_at_most("max_cost_increase", spec.max_cost_increase, of("cost_usd"), _relative))
    if spec.max_latency_increase is not None:
        found.append(_at_most("max_latency_increase", spec.max_latency_increase, of("seconds"), _relative))
    if spec.max_degraded is not None:
        found.append(_at_most("max_degraded", spec.max_degraded, of("degraded"), _alone))
    return tuple(found)


def _relative(figure: Figure) -> Interval | None:
    return figure.relative


def _alone(figure: Figure) -> Interval | None:
    return figure.alone


def _at_least(name: str, limit: float, figure: Figure | None) -> Condition:
    if figure is None:
        return Condition(name, limit, "open", 0)
    found = figure.difference
    outcome: Outcome = "holds" if found.low >= limit else "open"
    outcome = "breached" if found.high < limit else outcome
    return Condition(name, limit, outcome, figure.count, found, _needed(figure, found.value - limit))


def _at_most(name: str, limit: float, figure: Figure | None, of: Callable[[Figure], Interval | None]) -> Condition:
    found = of(figure) if figure is not None else None
    if figure is None or found is None:
        return Condition(name, limit, "open", figure.count if figure is not None else 0)
    outcome: Outcome = "holds" if found.high <= limit else "open"
    outcome = "breached" if found.low > limit else outcome
    return Condition(name, limit, outcome, figure.count, found, _needed(figure, limit - found.value))


def _needed(figure: Figure, margin: float) -> int | None:
    """Pairs until the interval no longer holds the limit, at this margin and spread."""
    users = intervals.needed(figure.spread, abs(margin))
    if users is None:
        return None
    return math.ceil(users * figure.count / figure.clusters)


def promotable(found: Sequence[Condition]) -> bool:
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
