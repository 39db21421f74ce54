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


def runs_of(period: Period, found: RunFigures) -> Json:
    """Sums over all runs, by bucket, tier, topology, origin and cause of failure."""
    groups = found.groups
    lengths: defaultdict[str, list[float]] = defaultdict(list)
    by_bucket: defaultdict[int, list[float]] = defaultdict(list)
    for bucket, tier, seconds in found.seconds:
        lengths[tier].append(seconds)
        by_bucket[bucket].append(seconds)
    return {
        "total": sums(groups),
        "seconds": percentiles([seconds for _, _, seconds in found.seconds]),
        "first_token_seconds": percentiles(found.first_seconds) | {"runs": found.first_runs},
        "buckets": [_bucket(period, number, groups, by_bucket[number]) for number in range(period.buckets)],
        "tiers": [
            {"tier": name, **sums(some), "seconds": percentiles(lengths[name])}
            for name, some in _grouped(groups, lambda group: group.tier)
        ],
        "topologies": [
            {"topology": name or None, **sums(some)}
            for name, some in _grouped(groups, lambda group: group.topology or "")
        ],
        "origins": [
            {"origin": name or "none", **sums(some)} for name, some in _grouped(groups, lambda group: group.origin)
        ],
        "failures": _failures(groups),
    }


def _bucket(period: Period, number: int, groups: Iterable[RunGroup], seconds: Sequence[float]) -> Json:
    width = (period.until - period.since) / period.buckets
    since = period.since + number * width
    some = [group for group in groups if group.bucket == number]
    return {"since": since, "until": since + width, **sums(some), "seconds": percentiles(seconds)}


def sums(groups: Iterable[RunGroup]) -> Json:
    """Return the sums over groups of runs. `success_rate` is that of the runs that have ended; null without any."""
    some = list(groups)
    ended = sum(group.runs for group in some if group.state in ENDED)
    succeeded = sum(group.runs for group in some if group.state == "succeeded")
    return {
        "runs": sum(group.runs for group in some),
        "ended": ended,
        "succeeded": succeeded,
        "success_rate": succeeded / ended if ended else None,
        "degraded": sum(group.runs for group in some if group.degraded),
        "cost_usd": dollars(sum(group.micro_usd for group in some)),
        "tokens": sum(group.tokens for group in some),
    }


def _grouped(groups: Iterable[RunGroup], name: Callable[[RunGroup], str]) -> list[tuple[str, list[RunGroup]]]:
    """Return the groups by name, those of the most runs first."""
    found: defaultdict[str, list[RunGroup]] = defaultdict(list)
    for group in groups:
        found[name(group)].append(group)
    return sorted(found.items(), key=lambda item: (-sum(group.runs for group in item[1]), item[0]))


def _failures(groups: Iterable[RunGroup]) -> list[Json]:
    found: defaultdict[tuple[str, str], int] = defaultdict(int)
    for group in groups:
        if group.state in ENDED and group.state != "succeeded":
            found[group.state, group.error or ""] += group.runs
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [{"state": state, "error": error or None, "runs": runs} for (state, error), runs in ordered]


def percentiles(values: Sequence[float]) -> Json:
    """Return the nearest-rank percentiles of some values, and how many there are; null without any."""
    ordered = sorted(values)
    found: Json = {"count": len(ordered)}
    for name, rank in PERCENTILES.items():
        found[name] = ordered[ceil(len(ordered) * rank / 100) - 1] if ordered else None
    return found


def workers_of(found: RunFigures, prices: Mapping[str, Price]) -> list[Json]:
    """Return each worker's calls with their share, how many went well, and about what they cost at present prices."""
    ratings = {worker: (runs, passed) for worker, runs, passed in found.ratings}
    by_worker: defaultdict[str, list[CallGroup]] = defaultdict(list)
    for call in found.calls:
        by_worker[call.recipient].append(call)
    total = sum(call.calls for call in found.calls)
    ordered = sorted(by_worker.items(), key=lambda item: (-sum(group.calls for group in item[1]), item[0]))
    return [_worker(name, some, total, ratings.get(name, (0, 0)), prices.get(name)) for name, some in ordered]


def _worker(name: str, groups: Sequence[CallGroup], total: int, ratings: tuple[int, int], price: Price | None) -> Json:
    by_outcome: defaultdict[str, int] = defaultdict(int)
    for group in groups:
        by_outcome[group.outcome or "open"] += group.calls
    calls = sum(by_outcome.values())
    known = calls - by_outcome["open"] - by_outcome["cancelled"]
    tokens = sum(group.input_tokens for group in groups), sum(group.output_tokens for group in groups)
    rated, passed = ratings
    return {
        "worker": name,
        "calls": calls,
        "share": calls / total,
        "outcomes": {outcome: number for outcome, number in sorted(by_outcome.items()) if number},
        "success_rate": by_outcome["ok"] / known if known else None,
        "input_tokens": tokens[0],
        "output_tokens": tokens[1],
        "about_usd": _about(price, *tokens),
        "rated_runs": rated,
        "pass_rate": passed / rated if rated else None,
    }


def _about(price: Price | None, read: int, written: int) -> float | None:
    """Dollars at present prices, without what caches save; None for a worker without a price."""
    if price is None:
        return None
    return (read * price.input + written * price.output) / MILLION / MILLION
