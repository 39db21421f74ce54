"""The figures of a report on what runs cost, from the journals of runs that have ended and from their ratings.

A `Report` takes one run after the other, in the order of their admission, and keeps sums: its memory grows with the
number of groups and of distinct features, and by twelve bytes for each run. `deploy/docs/reports.md` defines every
figure; a test compares each of them with a recomputation that shares no code with this module. Money is in
micro-dollars here and in dollars in what `Report.figures` returns.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Usage, usage_from_json
from app.core.pool.catalog import MILLION, Price
from app.core.rating.feedback import Feedback, FeedbackKind, latest_scores, sign
from app.core.run.events import Event, Json
from app.core.run.kinds import DRIVER_LOST, TERMINAL, Kind

Success = Literal["feedback", "graders", "signals"]
RATING_KINDS: Mapping[str, FeedbackKind] = {"feedback": "explicit", "graders": "grader"}
"""The kind of ratings that a success is judged by; `signals` are no ratings."""
DEFINITIONS: Mapping[Success, str] = {
    "feedback": "The mean of the latest score from each source of callers' feedback is at least the threshold; a run "
    "without such a score has no verdict.",
    "graders": "The mean of the latest score from each grader is at least the threshold; a run without such a score "
    "has no verdict.",
    "signals": "The run has an answer, and its caller neither stopped it nor asked the same again (`baton grade "
    "--signs`); a run that ended without an answer for another reason has no verdict.",
}
"""The sentence by which a report defines a success, for each kind of score."""
SPARED_METHOD = (
    "For each call of a step that succeeded: the output tokens, without reasoning, of the earlier steps of the same "
    "plan that were done and are not in its access list; and, where `user` is not in it and the plan is not nested, "
    "the input tokens of the run's first such call whose access list was `user` alone."
)
"""The sentence by which a report defines the tokens that access lists kept out of calls."""
CHEAPEST_METHOD = (
    "For each run: the least that the calls of its steps would have cost at the price of one worker of its pool, with "
    "the tokens that they had, cached ones included, by the pool's snapshot at its admission; planning is left out."
)
"""The sentence by which a report defines the least cost of a run's calls."""
REPORTED_KINDS = frozenset(
    {
        Kind.ADMITTED,
        Kind.PLAN_OPENED,
        Kind.PLAN_STEP,
        Kind.PLAN_ACCEPTED,
        Kind.PLAN_REJECTED,
        Kind.CALL_INTENDED,
        Kind.CALL_FINISHED,
        Kind.STEP_AWAITING,
        Kind.STEP_DONE,
        Kind.STEP_FAILED,
        Kind.CANCEL_ASKED,
        Kind.REFUSED,
        Kind.APPROVAL_EXPIRED,
        *TERMINAL,
    }
)
"""The kinds of events that a report needs."""
OUTCOMES_WITHOUT_FAILURE = ("ok", "cancelled")
"""The outcomes of calls that are no failures."""
GROUPINGS = ("tier", "tenant", "key", "user", "worker", "topology", "week")
"""The names of groupings; those by metadata come on top."""
METADATA = "metadata."
"""The beginning of a grouping by a field of the requests' metadata."""
DEAREST_PERCENT = 20
"""The share of all runs that count as the most expensive."""
MOST_GROUPS = 10_000
"""The most groups of one grouping."""
MOST_CLUSTERS = 1_000
"""The most clusters of failures that are shown."""
EXAMPLES = 3
"""The most runs that are named as examples of a cluster."""
COUNTED_TO = 5
"""The number of steps, rounds or failed calls from which on runs have the same feature."""
Prices = Mapping[str, Price]
"""The prices of a pool's workers by their names."""


class TooManyGroups(Exception):
    """A grouping has more than `MOST_GROUPS` groups; the message is its name."""


class JournaledRun(Struct, frozen=True):
    """A run as a report reads it. `events` has at least the events of the kinds in `REPORTED_KINDS`, in their order. It
    is empty where one of them is not JSON."""

    id: str
    tenant: str
    key: str
    tier: str
    state: str
    topology: str | None
    degraded: bool
    created_at: float
    ended: bool
    events: tuple[Event, ...]
    ratings: tuple[Feedback, ...] = ()
    users: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()
    """Fields of the request's metadata, each as FIELD=VALUE."""

    @property
    def catalog(self) -> str:
        """Return the digest of the pool's snapshot at the admission; empty where there is none."""
        if not self.events:
            return ""
        return str(self.events[0].body.get("catalog", ""))


class ReportOptions(Struct, frozen=True):
    """The choices of whoever asks for a report."""

    by: tuple[str, ...] = ("tier",)
    """Names in `GROUPINGS`, or `METADATA` and the name of a field."""
    success: Success = "feedback"
    threshold: float = 0.5
    """The least score of a success."""


def is_grouping(name: str) -> bool:
    """Return True for what `ReportOptions.by` may hold."""
    return name in GROUPINGS or (name.startswith(METADATA) and len(name) > len(METADATA))


# -- one run


@dataclass(slots=True)
class _Call:
    """An intended call with its outcome, which is empty for a call whose outcome was never recorded."""

    intent: Json
    outcome: Json = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        number: int | None = self.intent["n"]
        return number

    @property
    def worker(self) -> str:
        return str(self.intent["worker"])

    @property
    def usage(self) -> Usage:
        if self.outcome:
            return usage_from_json(self.outcome["usage"])
        return Usage()

    @property
    def succeeded(self) -> bool:
        return bool(self.outcome) and self.outcome["outcome"] == "ok"


class _RunAccount:
    """The journal of one run, by the names and numbers that its events refer to."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.calls: dict[str, _Call] = {}
        self.steps: dict[int, Json] = {}
        self.done: dict[int, str] = {}
        """The call that gave the output of each step that was done."""
        self.opened: dict[int, Json] = {}
        self.rounds: set[int] = set()
        self.tools = False
        self.preview = False
        self.shadow = self.replay = False
        for event in events:
            self._take(event.kind, event.body)
        self.step_calls = [call for call in self.calls.values() if call.step is not None]
        self.usd: int = sum(int(call.outcome["usd"]) for call in self.calls.values() if call.outcome)
        self.workers = sorted({call.worker for call in self.step_calls})

    def _take(self, kind: Kind, body: Json) -> None:
        if kind is Kind.CALL_INTENDED:
            self.calls[body["call"]] = _Call(body)
        elif kind is Kind.CALL_FINISHED:
            if body["call"] in self.calls:
                self.calls[body["call"]].outcome = body
        elif kind is Kind.PLAN_STEP:
            self.steps[body["n"]] = body
        elif kind is Kind.STEP_DONE:
            self.done[body["n"]] = body["call"]
        else:
            self._take_plan(kind, body)

    def _take_plan(self, kind: Kind, body: Json) -> None:
        if kind is Kind.PLAN_OPENED:
            self.opened[body["proposal"]] = body
        elif kind is Kind.PLAN_ACCEPTED and body["steps"] and body["proposal"] in self.opened:
            self.rounds.add(self.opened[body["proposal"]].get("round", 1))
        elif kind is Kind.STEP_AWAITING:
            self.tools = True
        elif kind is Kind.ADMITTED:
            self.preview = bool(body.get("preview"))
            self.shadow = body.get("origin_kind") == "shadow"
            self.replay = body.get("origin_kind") == "replay"

    def position(self, n: int | None) -> str:
        """Return the place of a step in its plan, from 0; `plan` for a call that plans, empty if the journal does not
        say."""
        if n is None:
            return "plan"
        planned = self.steps.get(n)
        opened = None
        if planned is not None:
            opened = self.opened.get(planned["proposal"])
        if opened is None:
            return ""
        return str(n - opened["base"])

    def worker(self, n: int) -> str:
        """Return the worker that was called last for a step, or the one that it was planned for."""
        called = [call.worker for call in self.step_calls if call.step == n]
        if called:
            return called[-1]
        return str(self.steps.get(n, {}).get("worker", ""))


def verdict(run: JournaledRun, request: ReportOptions) -> bool | None:
    """Return True for a success, False for none, and None if there is no verdict."""
    if request.success == "signals":
        answered = True if run.state == "succeeded" else None
        return False if _signs(run) else answered
    scores = _scores(run, RATING_KINDS[request.success])
    if not scores:
        return None
    return sum(scores.values()) / len(scores) >= request.threshold


def sources(run: JournaledRun, request: ReportOptions) -> Collection[str]:
    """Return the names of the sources that a verdict goes by: those of scores, or the signs in what the caller did."""
    if request.success == "signals":
        return _signs(run)
    return _scores(run, RATING_KINDS[request.success])


def _scores(run: JournaledRun, kind: FeedbackKind) -> Mapping[str, float]:
    """Return the latest score of each source of this kind."""
    return latest_scores(run.ratings).get(kind, {})


def _signs(run: JournaledRun) -> Collection[str]:
    """Return the signs that were noted of the run, and the one in its journal."""
    noted = {rating.source for rating in run.ratings if rating.kind == "implicit"}
    return noted | ({sign(run.events)} - {""})


def _up_to(number: int) -> str:
    if number >= COUNTED_TO:
        return f"{COUNTED_TO} or more"
    return str(number)


def _features(run: JournaledRun, account: _RunAccount) -> tuple[tuple[str, str], ...]:
    failed = [
        call for call in account.step_calls if call.outcome and call.outcome["outcome"] not in OUTCOMES_WITHOUT_FAILURE
    ]
    return (
        ("tier", run.tier),
        ("topology", run.topology or "none"),
        *(("worker", worker) for worker in account.workers),
        ("rounds", _up_to(len(account.rounds))),
        ("steps", _up_to(len({call.step for call in account.step_calls}))),
        ("failed calls", _up_to(len(failed))),
        ("tools", "called" if account.tools else "not called"),
        ("fallback", "yes" if run.degraded else "no"),
    )


# -- sums over runs


@dataclass(slots=True)
class _Sums:
    """The sums of one group of runs."""

    runs: int = 0
    unanswered: int = 0
    usd: int = 0
    judged: int = 0
    successes: int = 0
    judged_usd: int = 0

    def add(self, usd: int, found: bool | None, *, answered: bool) -> None:
        self.runs += 1
        self.usd += usd
        self.unanswered += not answered
        if found is not None:
            self.judged += 1
            self.judged_usd += usd
            self.successes += found

    def to_json(self) -> dict[str, Any]:
        per_success = None
        if self.successes:
            per_success = self.judged_usd / self.successes / MILLION
        return {
            "runs": self.runs,
            "unanswered": self.unanswered,
            "cost_usd": self.usd / MILLION,
            "judged": self.judged,
            "without_verdict": self.runs - self.judged,
            "successes": self.successes,
            "judged_cost_usd": self.judged_usd / MILLION,
            "cost_per_success_usd": round(per_success, 9) if per_success is not None else None,
        }


class _MostExpensiveRuns:
    """The most expensive runs and what they have in common. Keeps the cost and the number of the features of each
    run."""

    def __init__(self) -> None:
        self._costs = array("q")
        self._kinds = array("I")
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}

    def add(self, usd: int, features: tuple[tuple[str, str], ...]) -> None:
        self._costs.append(usd)
        self._kinds.append(self._numbers.setdefault(features, len(self._numbers)))

    def to_json(self) -> dict[str, Any]:
        """Return the figures. Of runs that cost the same the earlier ones count as more expensive."""
        runs = len(self._costs)
        number = -(-runs * DEAREST_PERCENT // 100)
        order = sorted(range(runs), key=self._costs.__getitem__, reverse=True)[:number]
        usd, total = sum(self._costs[place] for place in order), sum(self._costs)
        return {
            "share_of_runs": DEAREST_PERCENT / 100,
            "runs": number,
            "cost_usd": usd / MILLION,
            "share_of_cost": round(usd / total, 6) if total else None,
            "from_cost_usd": self._costs[order[-1]] / MILLION if order else None,
            "features": self._over_represented(order),
        }

    def _over_represented(self, order: Sequence[int]) -> list[dict[str, Any]]:
        of_all, of_dearest = self._count_features(range(len(self._kinds))), self._count_features(order)
        found = []
        for (name, value), count in of_dearest.items():
            everywhere = of_all[name, value]
            lift = count * len(self._kinds) / (len(order) * everywhere)
            if lift > 1:
                shown = {"runs": count, "of_runs": everywhere, "lift": round(lift, 6)}
                found.append({"feature": name, "value": value, **shown})
        return sorted(
            found, key=lambda feature: (-feature["lift"], -feature["runs"], feature["feature"], feature["value"])
        )

    def _count_features(self, places: Iterable[int]) -> dict[tuple[str, str], int]:
        kinds = list(self._numbers)
        times = [0] * len(kinds)
        for place in places:
            times[self._kinds[place]] += 1
        counts: dict[tuple[str, str], int] = {}
        for features, count in zip(kinds, times, strict=True):
            for feature in features if count else ():
                counts[feature] = counts.get(feature, 0) + count
        return counts


class _AccessLists(Struct):
    """Tokens that access lists kept out of calls."""

    calls: int = 0
    input: int = 0
    outputs: int = 0
    conversations: int = 0
    unmeasured: int = 0

    def with_run(self, account: _RunAccount) -> "_AccessLists":
        """Return the sums with those of one more run."""
        sums = replace(self)
        fine = [call for call in account.step_calls if call.succeeded]
        conversation = next((call.usage.input for call in fine if call.intent["access"] == ["user"]), None)
        for call in fine:
            planned = None
            if call.step is not None:
                planned = account.steps.get(call.step)
            if planned is None:
                continue
            sums.calls += 1
            sums.input += call.usage.input
            sums.outputs += sum(_hidden(account, call, planned))
            if "user" in call.intent["access"] or planned.get("parent") is not None:
                continue
            if conversation is None:
                sums.unmeasured += 1
            else:
                sums.conversations += conversation
        return sums

    def to_json(self) -> dict[str, Any]:
        spared = self.outputs + self.conversations
        return {
            "method": SPARED_METHOD,
            "calls": self.calls,
            "input_tokens": self.input,
            "spared_tokens": spared,
            "spared_output_tokens": self.outputs,
            "spared_conversation_tokens": self.conversations,
            "calls_not_measured": self.unmeasured,
            "share_spared": round(spared / (spared + self.input), 6) if spared else 0.0,
        }


def _hidden(account: _RunAccount, call: _Call, planned: Json) -> Iterator[int]:
    """Yield the tokens of each output that a call was not shown, though it is an earlier one of its plan."""
    for n, giver in account.done.items():
        other = account.steps.get(n)
        if other is None or other["proposal"] != planned["proposal"] or n >= planned["n"]:
            continue
        if n not in call.intent["access"] and giver in account.calls:
            usage = account.calls[giver].usage
            yield usage.output - usage.reasoning


class CheapestComparison(Struct, frozen=True):
    """The cost of the calls of a run's steps, and the least that they would have cost (`CHEAPEST_METHOD`), in
    micro-dollars, with the worker at whose price that is."""

    usd: int
    least: int
    worker: str


@dataclass(slots=True)
class _Cheapest:
    """The cost of the calls of steps, and their cost with the cheapest worker of each run's pool."""

    runs: int = 0
    usd: int = 0
    least: int = 0
    unpriced: int = 0
    workers: dict[str, int] = field(default_factory=dict)

    def add(self, found: CheapestComparison | None) -> None:
        if found is None:
            self.unpriced += 1
            return
        self.runs += 1
        self.usd += found.usd
        self.least += found.least
        self.workers[found.worker] = self.workers.get(found.worker, 0) + 1

    def to_json(self) -> dict[str, Any]:
        return {
            "method": CHEAPEST_METHOD,
            "runs": self.runs,
            "runs_without_prices": self.unpriced,
            "cost_usd": self.usd / MILLION,
            "cheapest_cost_usd": self.least / MILLION,
            "difference_usd": (self.usd - self.least) / MILLION,
            "cheapest_workers": dict(sorted(self.workers.items())),
        }


def compare_with_cheapest(
    pool: Sequence[str], events: Sequence[Event], prices: Prices | None
) -> CheapestComparison | None:
    """Compare the calls of one run's steps with the cheapest worker of its pool; None where none of them has ended, or
    where no price is known."""
    return _compare_account_with_cheapest(pool, _RunAccount(events), prices)


def _compare_account_with_cheapest(
    pool: Sequence[str], account: _RunAccount, prices: Prices | None
) -> CheapestComparison | None:
    """Of workers that cost the same the first one of the pool counts as the cheapest."""
    calls = [call for call in account.step_calls if call.outcome]
    priced = [worker for worker in pool if prices and worker in prices]
    if not calls or not prices or not priced:
        return None
    usages = [call.usage for call in calls]
    costs = {worker: sum(map(prices[worker].cost, usages)) for worker in priced}
    cheapest = min(costs, key=costs.__getitem__)
    return CheapestComparison(sum(int(call.outcome["usd"]) for call in calls), costs[cheapest], cheapest)


class _Failure(Struct, frozen=True):
    """The cause and the shape of failures of one cluster."""

    level: str
    """`call`, `plan`, `step` or `run`."""
    cause: str
    reason: str
    topology: str
    position: str
    worker: str


@dataclass(slots=True)
class _Cluster:
    count: int
    first_at: float
    last_at: float
    examples: list[str]


class _Failures:
    """Failures by cause and shape."""

    def __init__(self) -> None:
        self._clusters: dict[_Failure, _Cluster] = {}

    def add(self, failure: _Failure, at: float, run: str) -> None:
        cluster = self._clusters.get(failure)
        if cluster is None:
            self._clusters[failure] = _Cluster(1, at, at, [run])
            return
        cluster.count += 1
        cluster.first_at, cluster.last_at = min(cluster.first_at, at), max(cluster.last_at, at)
        if len(cluster.examples) < EXAMPLES and run not in cluster.examples:
            cluster.examples.append(run)

    def list_largest(self) -> tuple[list[dict[str, Any]], int]:
        """Return the clusters, the largest first, and the number of those that are left out."""
        names = ("level", "cause", "reason", "topology", "position", "worker")
        rows = []
        for failure, cluster in self._clusters.items():
            shape = {name: getattr(failure, name) for name in names}
            times = {"count": cluster.count, "first_at": cluster.first_at, "last_at": cluster.last_at}
            rows.append({**shape, **times, "examples": cluster.examples})
        rows.sort(key=lambda row: (-row["count"], *(row[name] for name in names)))
        return rows[:MOST_CLUSTERS], max(len(rows) - MOST_CLUSTERS, 0)


def _failures(run: JournaledRun, account: _RunAccount) -> list[tuple[_Failure, float]]:
    """Return the failures of a run, each with its time."""
    found = []
    for event in run.events:
        failure = _failure(run, account, event.kind, event.body)
        if failure is not None:
            found.append((failure, event.at))
    return found


def _failure(run: JournaledRun, account: _RunAccount, kind: Kind, body: Json) -> _Failure | None:
    """Return the failure that an event stands for, if it does for one. A call that was cancelled is none."""
    topology = run.topology or "none"
    if kind is Kind.CALL_FINISHED and body["outcome"] not in OUTCOMES_WITHOUT_FAILURE:
        call = account.calls.get(body["call"])
        cause = str(body.get("error") or body["outcome"])
        shape = (topology, account.position(body["n"]), call.worker if call is not None else "")
        return _Failure("call", cause, str(body.get("reason", "")), *shape)
    if kind is Kind.PLAN_REJECTED:
        cause = "conductor_failed" if body["outage"] else "plan_rejected"
        if body["reasons"] == [DRIVER_LOST]:
            cause = "engine_lost"
        return _Failure("plan", cause, "", topology, "plan", "")
    if kind is Kind.STEP_FAILED:
        n = body["n"]
        return _Failure("step", str(body["error"]), "", topology, account.position(n), account.worker(n))
    if kind in TERMINAL and kind is not Kind.SUCCEEDED:
        return _Failure("run", str(body.get("error") or run.state), run.state, topology, "", "")
    return None


# -- the report


class Report:
    """The figures over runs that are added one after the other, in the order of their admission and ids."""

    def __init__(self, wanted: ReportOptions, zone: tzinfo) -> None:
        """Weeks begin and end in the time zone."""
        self._wanted = wanted
        self._zone = zone
        self._total = _Sums()
        self._groups: dict[str, dict[str | None, _Sums]] = {name: {} for name in wanted.by}
        self._dearest = _MostExpensiveRuns()
        self._access_lists = _AccessLists()
        self._cheapest = _Cheapest()
        self._failures = _Failures()
        self._sources: dict[str, int] = {}
        self._open = 0
        self._previews = 0
        self._shadows = self._replays = 0
        self._damaged = 0

    def add(self, run: JournaledRun, prices: Prices | None) -> None:
        """Add a run, with the prices in its pool's snapshot; None where there is no such snapshot. One whose journal is
        damaged is left out and counted. Raises `TooManyGroups`."""
        try:
            self._add(run, prices)
        except (AttributeError, LookupError, TypeError, ValueError):
            self._damaged += 1

    def _add(self, run: JournaledRun, prices: Prices | None) -> None:
        account = _RunAccount(run.events)
        if account.shadow or account.replay:
            self._shadows += account.shadow
            self._replays += account.replay
            return
        if account.preview or not run.ended:
            self._previews += account.preview
            self._open += not account.preview
            return
        pool = run.events[0].body["pool"]
        found, names_of_sources = verdict(run, self._wanted), sources(run, self._wanted)
        features, failures = _features(run, account), _failures(run, account)
        access_lists = self._access_lists.with_run(account)
        cheapest = _compare_account_with_cheapest(pool, account, prices)
        # From here on nothing of the journal is read: a run counts as a whole or not at all.
        for name in names_of_sources:
            self._sources[name] = self._sources.get(name, 0) + 1
        answered = run.state == "succeeded"
        self._total.add(account.usd, found, answered=answered)
        for name, groups in self._groups.items():
            for value in self._values(name, run, account):
                if value not in groups and len(groups) >= MOST_GROUPS:
                    raise TooManyGroups(name)
                groups.setdefault(value, _Sums()).add(account.usd, found, answered=answered)
        self._dearest.add(account.usd, features)
        self._access_lists = access_lists
        if any(call.outcome for call in account.step_calls):
            self._cheapest.add(cheapest)
        for failure, at in failures:
            self._failures.add(failure, at, run.id)

    def figures(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        failures, left_out = self._failures.list_largest()
        return {
            "success": self._wanted.success,
            "threshold": self._wanted.threshold if self._wanted.success in RATING_KINDS else None,
            "definition": DEFINITIONS[self._wanted.success],
            "sources": dict(sorted(self._sources.items())),
            "left_out": {
                "open": self._open,
                "previews": self._previews,
                "shadows": self._shadows,
                "replays": self._replays,
                "damaged": self._damaged,
            },
            "total": self._total.to_json(),
            "groups": self._list_groups(),
            "dearest": self._dearest.to_json(),
            "access_lists": self._access_lists.to_json(),
            "cheapest": self._cheapest.to_json(),
            "failures": failures,
            "failures_left_out": left_out,
        }

    def _list_groups(self) -> list[dict[str, Any]]:
        rows = []
        for name, groups in self._groups.items():
            ordered = sorted(groups.items(), key=lambda item: (item[0] is None, item[0] or ""))
            rows += [{"by": name, "group": value, **sums.to_json()} for value, sums in ordered]
        return rows

    def _values(self, name: str, run: JournaledRun, account: _RunAccount) -> Sequence[str | None]:
        """Return the groups that a run belongs to. One that has none of them belongs to the group None."""
        if name.startswith(METADATA):
            beginning = name.removeprefix(METADATA) + "="
            return [key.removeprefix(beginning) for key in run.metadata if key.startswith(beginning)] or [None]
        if name == "user":
            return run.users or [None]
        if name == "worker":
            return account.workers or [None]
        if name == "week":
            year, week, _ = datetime.fromtimestamp(run.created_at, self._zone).isocalendar()
            return [f"{year}-W{week:02}"]
        value: str | None = getattr(run, name)
        return [value or None]
