"""The JSON of `GET /v1/overview`, from figures of the store. Pure functions."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final

from app.core.pool.catalog import MILLION, Price
from app.core.run.caller_view import dollars
from app.core.run.kinds import ENDED
from app.store.protocol import CallGroup, Period, RunFigures, RunGroup

PERCENTILES: Final = {"p50": 50, "p95": 95, "p99": 99}
Json = dict[str, Any]


def runs_of(period: Period, figures: RunFigures) -> Json:
    """Return sums over all runs, and by bucket, tier, topology, origin and cause of failure."""
    groups = figures.groups
    all_seconds: list[float] = []
    seconds_by_tier: defaultdict[str, list[float]] = defaultdict(list)
    seconds_by_bucket: defaultdict[int, list[float]] = defaultdict(list)
    for bucket, tier, seconds in figures.seconds:
        all_seconds.append(seconds)
        seconds_by_tier[tier].append(seconds)
        seconds_by_bucket[bucket].append(seconds)
    tiers: list[Json] = []
    for tier, members in _group_by(groups, lambda group: group.tier):
        tiers.append({"tier": tier, **sums(members), "seconds": percentiles(seconds_by_tier[tier])})
    topologies: list[Json] = []
    for topology, members in _group_by(groups, lambda group: group.topology or ""):
        topologies.append({"topology": topology or None, **sums(members)})
    origins: list[Json] = []
    for origin, members in _group_by(groups, lambda group: group.origin):
        origins.append({"origin": origin or "none", **sums(members)})
    return {
        "total": sums(groups),
        "seconds": percentiles(all_seconds),
        "first_token_seconds": percentiles(figures.first_seconds) | {"runs": figures.first_runs},
        "buckets": [_bucket(period, number, groups, seconds_by_bucket[number]) for number in range(period.buckets)],
        "tiers": tiers,
        "topologies": topologies,
        "origins": origins,
        "failures": _failures(groups),
    }


def _bucket(period: Period, number: int, groups: Iterable[RunGroup], seconds: Sequence[float]) -> Json:
    width = (period.until - period.since) / period.buckets
    since = period.since + number * width
    members = [group for group in groups if group.bucket == number]
    return {"since": since, "until": since + width, **sums(members), "seconds": percentiles(seconds)}


def sums(groups: Iterable[RunGroup]) -> Json:
    """Return the sums over groups of runs. `success_rate` is that of the runs that have ended; null without any."""
    runs = ended = succeeded = degraded = micro_usd = tokens = 0
    for group in groups:
        runs += group.runs
        if group.state in ENDED:
            ended += group.runs
        if group.state == "succeeded":
            succeeded += group.runs
        if group.degraded:
            degraded += group.runs
        micro_usd += group.micro_usd
        tokens += group.tokens
    return {
        "runs": runs,
        "ended": ended,
        "succeeded": succeeded,
        "success_rate": _share(succeeded, ended),
        "degraded": degraded,
        "cost_usd": dollars(micro_usd),
        "tokens": tokens,
    }


def _share(part: int, whole: int) -> float | None:
    """Return what share of a whole its part is; None where the whole is nothing."""
    if not whole:
        return None
    return part / whole


def _group_by(groups: Iterable[RunGroup], name: Callable[[RunGroup], str]) -> list[tuple[str, list[RunGroup]]]:
    """Return the groups by name, those of the most runs first."""
    by_name: defaultdict[str, list[RunGroup]] = defaultdict(list)
    for group in groups:
        by_name[name(group)].append(group)
    return sorted(by_name.items(), key=lambda item: (-sum(group.runs for group in item[1]), item[0]))


def _failures(groups: Iterable[RunGroup]) -> list[Json]:
    runs_by_cause: defaultdict[tuple[str, str], int] = defaultdict(int)
    for group in groups:
        if group.state in ENDED and group.state != "succeeded":
            runs_by_cause[group.state, group.error or ""] += group.runs
    ordered = sorted(runs_by_cause.items(), key=lambda item: (-item[1], item[0]))
    return [{"state": state, "error": error or None, "runs": runs} for (state, error), runs in ordered]


def percentiles(values: Sequence[float]) -> Json:
    """Return the nearest-rank percentiles of some values, and how many there are; null without any."""
    ordered = sorted(values)
    values_by_name: Json = {"count": len(ordered)} | dict.fromkeys(PERCENTILES)
    if not ordered:
        return values_by_name
    for name, rank in PERCENTILES.items():
        values_by_name[name] = ordered[ceil(len(ordered) * rank / 100) - 1]
    return values_by_name


def workers_of(figures: RunFigures, prices: Mapping[str, Price]) -> list[Json]:
    """Return each worker's calls with their share, how many went well, and about what they cost at present prices."""
    ratings = {worker: (runs, passed) for worker, runs, passed in figures.ratings}
    by_worker: defaultdict[str, list[CallGroup]] = defaultdict(list)
    for call in figures.calls:
        by_worker[call.recipient].append(call)
    total = sum(call.calls for call in figures.calls)
    ordered = sorted(by_worker.items(), key=lambda item: (-sum(group.calls for group in item[1]), item[0]))
    rows: list[Json] = []
    for name, calls in ordered:
        rows.append(_worker(name, calls, total, ratings.get(name, (0, 0)), prices.get(name)))
    return rows


def _worker(name: str, groups: Sequence[CallGroup], total: int, ratings: tuple[int, int], price: Price | None) -> Json:
    by_outcome: defaultdict[str, int] = defaultdict(int)
    for group in groups:
        by_outcome[group.outcome or "open"] += group.calls
    calls = sum(by_outcome.values())
    finished = calls - by_outcome["open"] - by_outcome["cancelled"]
    input_tokens = sum(group.input_tokens for group in groups)
    output_tokens = sum(group.output_tokens for group in groups)
    rated, passed = ratings
    return {
        "worker": name,
        "calls": calls,
        "share": calls / total,
        "outcomes": {outcome: number for outcome, number in sorted(by_outcome.items()) if number},
        "success_rate": _share(by_outcome["ok"], finished),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "about_usd": _estimate_usd(price, input_tokens, output_tokens),
        "rated_runs": rated,
        "pass_rate": _share(passed, rated),
    }


def _estimate_usd(price: Price | None, input_tokens: int, output_tokens: int) -> float | None:
    """Return dollars at present prices, without what caches save; None for a worker without a price."""
    if price is None:
        return None
    return (input_tokens * price.input + output_tokens * price.output) / MILLION / MILLION
