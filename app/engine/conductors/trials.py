"""The evidence for and against a candidate, read from the journal: shadows with their origins, canaries, promotions.

Everybody who decides reads it here: the report over HTTP and on the command line, the gate of a promotion, and the
task that rolls back.
"""

import asyncio
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.arms import is_arm
from app.core.pool.budgets import shadow_budget
from app.core.pool.catalog import Catalog, Tier
from app.core.pool.conductor_versions import (
    HistoryEntry,
    VersionsInForce,
    choose_version,
    history_of,
    latest_change_of_live,
    live_since,
    versions_in_force,
)
from app.core.pool.serving import TIER, definition_of, tier_in
from app.core.pool.snapshot import restore_catalog
from app.core.rating.calibration import add_measurements
from app.core.rating.economics import JournaledRun
from app.core.rating.promotion import (
    NO_EVIDENCE,
    ComparedRun,
    Condition,
    Evidence,
    ShadowedRun,
    compare_different_runs,
    compare_with_shadows,
    conditions,
    is_promotable,
    pairs_needed,
    summarize_run,
)
from app.core.run.approvals import lacks_approval
from app.core.run.events import PlanAccepted, RunAdmitted, facts, read_facts
from app.core.run.kinds import TERMINAL, Kind
from app.core.run.state import CALLER, REPLAY
from app.errors import EventMalformed
from app.store.protocol import ContentReads, RunQuery, RunRow, Store
from app.store.run_pages import run_pages

VERSION_SUBJECT_PREFIX: Final = "conductor "
"""The name of a subject begins with this if the subject is a version of the tier's own conductor."""
PAGE: Final = 50
"""Runs that are read at a time: their figures take some milliseconds, in which nothing else goes on."""
MOST_PAIRS: Final = 2_000
"""The most pairs of a report; the latest ones count."""
MOST_ANSWERS: Final = 500
"""The most pairs whose answers are compared."""
MOST_RUNS: Final = 1_000
"""The most runs of each side of a canary or a promotion; the latest ones count."""
ROWS: Final = 500
"""Rows of runs, without their journals, that are read at a time."""
MOST_ROWS: Final = 20_000
"""The most rows that are read to find those runs: a canary with a share of 5 % has 1,000 among them."""


class Runs(ContentReads, Protocol):
    """The reads that evidence needs: those of a whole store, or of a tenant's."""

    async def journaled_runs(self, query: RunQuery) -> tuple[JournaledRun, ...]:
        """Behave as `Reports.journaled_runs` does."""
        ...


class SubjectShadows(Struct, frozen=True):
    """The shadows of a tier under one subject, such as `tier baton-next` or `conductor mine-1a2b3c`."""

    subject: str
    pairs: tuple[ShadowedRun, ...] = ()
    plans: int = 0
    """Shadows that were only planned; they are in no pair."""
    valid_plans: int = 0
    unfinished: int = 0
    """Shadows that have not ended, or that the budget of shadows has ended, or whose plan nobody approved, or whose run
    another budget has ended."""


async def shadows_of(runs: Runs, tier: str, since: float, until: float, *, answers: bool) -> tuple[SubjectShadows, ...]:
    """Return the shadows of a tier's runs that were admitted in this time, by subject.

    With `answers`, those of pairs without verdicts are read and compared; the texts go nowhere.
    """
    account = shadow_budget(tier, 0).id
    query = RunQuery(origin_kind="shadow", since=since, until=until, limit=PAGE)
    by_subject: dict[str, SubjectShadows] = {}
    pairs = 0
    async for page in _pages(runs, query):
        shadows = [run for run in page if account in _admission(run).budgets]
        origins = await _origins(runs, shadows)
        for shadow in shadows:
            admitted = _admission(shadow)
            subject = _subject(tier, admitted)
            before = by_subject.get(subject, SubjectShadows(subject))
            after = _add_shadow(before, shadow, origins.get(admitted.origin_run))
            by_subject[subject] = after
            pairs += len(after.pairs) - len(before.pairs)
        if pairs >= MOST_PAIRS:
            break
    subjects = []
    for shadows_of_subject in by_subject.values():
        if answers:
            shadows_of_subject = await _compare_answers(runs, shadows_of_subject)
        subjects.append(replace(shadows_of_subject, pairs=shadows_of_subject.pairs[::-1]))
    return tuple(subjects)


async def _pages(runs: Runs, query: RunQuery) -> AsyncIterator[Sequence[JournaledRun]]:
    """Yield the pages of a query."""
    async for page in run_pages(runs.journaled_runs, query):
        yield _readable(page)
        await asyncio.sleep(0)  # figures are made in the event loop: let other tasks in


async def _origins(runs: Runs, shadows: Sequence[JournaledRun]) -> Mapping[str, JournaledRun]:
    names = tuple([_admission(shadow).origin_run for shadow in shadows])
    if not names:
        return {}
    origins = await runs.journaled_runs(RunQuery(ids=names, limit=len(names)))
    return {run.id: run for run in _readable(origins)}


def _readable(runs: Sequence[JournaledRun]) -> list[JournaledRun]:
    """Leave out runs whose journal is damaged: they are no evidence, and must not keep the others from being it."""
    readable_runs = []
    for run in runs:
        with suppress(EventMalformed):
            read_facts(run.events)
            if run.events and run.events[0].kind is Kind.ADMITTED:
                readable_runs.append(run)
    return readable_runs


def _admission(run: JournaledRun) -> RunAdmitted:
    return next(facts(run.events, RunAdmitted))


def _was_ended_by_a_shared_budget(run: JournaledRun) -> bool:
    """Return True if a budget over several runs had nothing left for this one: that says nothing about what served
    it."""
    return any(event.kind in TERMINAL and event.body.get("budget") for event in run.events)


def _subject(tier: str, admitted: RunAdmitted) -> str:
    if admitted.tier != tier:
        return f"tier {admitted.tier}"
    if admitted.tried_version:
        return f"{VERSION_SUBJECT_PREFIX}{admitted.tried_version}"
    return f"worker {admitted.pool[0]}"


def _add_shadow(shadows: SubjectShadows, shadow: JournaledRun, origin: JournaledRun | None) -> SubjectShadows:
    """Return the shadows with one more. A shadow that ran out of the budget of shadows, or whose plan nobody approved,
    says nothing about the candidate."""
    is_finished = shadow.ended and shadow.state not in ("over_budget", "cancelled")
    is_finished = is_finished and not lacks_approval(shadow.events)
    if not is_finished or origin is None or not origin.ended or _was_ended_by_a_shared_budget(origin):
        return replace(shadows, unfinished=shadows.unfinished + 1)
    if _admission(shadow).preview:
        has_plan = any(facts(shadow.events, PlanAccepted))
        is_valid = shadow.state == "succeeded" and has_plan and not shadow.degraded
        return replace(shadows, plans=shadows.plans + 1, valid_plans=shadows.valid_plans + is_valid)
    return replace(shadows, pairs=(*shadows.pairs, ShadowedRun(summarize_run(origin), summarize_run(shadow))))


async def _compare_answers(runs: Runs, shadows: SubjectShadows) -> SubjectShadows:
    """Compare the answers of pairs without verdicts."""
    pairs = []
    comparisons_left = MOST_ANSWERS
    for pair in shadows.pairs:
        has_answers = bool(pair.live.answer and pair.shadow.answer)
        if pair.verdicts is None and has_answers and comparisons_left:
            comparisons_left -= 1
            pair = replace(pair, same_answer=await _has_same_answers(runs, pair))
        pairs.append(pair)
    return replace(shadows, pairs=tuple(pairs))


async def _has_same_answers(runs: Runs, pair: ShadowedRun) -> bool | None:
    """Return True if both answers are the same text but for case, spaces and the last full stop; None if one was
    erased."""
    texts = []
    for run in (pair.live, pair.shadow):
        body = (await runs.contents(run.run, [run.answer])).get(run.answer)
        if body is None:
            return None
        text = unicodedata.normalize("NFKC", body.decode(errors="replace")).casefold()
        texts.append(" ".join(text.split()).rstrip("."))
    return texts[0] == texts[1]


# -- versions of a conductor, and what serves a tier


class Candidate(Struct, frozen=True):
    """A version of a conductor that is to take over, or has taken over, the runs of its tiers; or a subject that is to
    serve a tier, or does."""

    conductor: str
    """The conductor's worker, or `tier NAME`."""
    version: str
    since: float
    """The time from which on it conducts runs, some or all of them."""
    promoted: bool
    """True if it is live; False if it is a canary."""
    history: tuple[HistoryEntry, ...]
    """All changes of this conductor or tier. They tell which version was chosen for a run when it was admitted."""

    @property
    def subject(self) -> str:
        """Return the name under which a shadow tries it."""
        return subject_of(self.conductor, self.version)

    def could_conduct(self, catalog: Catalog, run: JournaledRun) -> bool:
        """Return True for a run that has ended and that the candidate could have conducted. A version could conduct the
        runs that its model conducts in the definition that served them, or that a selector there may have it conduct; a
        subject any run whose request does not say what is to plan. Those that their callers have given up are among
        them, as runs without an answer, because callers do not wait for a candidate that is too slow. Those whose plan
        nobody approved are not: that somebody has refused it, or has not decided, is no failure."""
        admitted = _admission(run)
        if not run.ended or admitted.preview or _was_ended_by_a_shared_budget(run) or lacks_approval(run.events):
            return False
        if tier_in(self.conductor):
            return admitted.conductor not in (CALLER, REPLAY)
        served = definition_of(catalog, admitted.tier, admitted.served_by)
        is_own = served is not None and served.conductor.worker == self.conductor
        return is_own and admitted.conductor in ("model", "selector")

    def was_to_conduct(self, row: RunRow) -> bool:
        """Return True if the candidate was chosen for this run when it was admitted, whether or not it could be
        asked."""
        in_force = _in_force_at(self.history, row.created_at)
        return choose_version({self.conductor: in_force}, self.conductor, row.id) == self.version

    def was_not_to_conduct(self, row: RunRow) -> bool:
        """Return True if something else was chosen for this run."""
        return not self.was_to_conduct(row)


def _in_force_at(history: Sequence[HistoryEntry], at: float) -> VersionsInForce:
    """Return the versions that were in force at a time."""
    in_force = VersionsInForce()
    for entry in history:
        if entry.change.at <= at:
            in_force = entry.versions
    return in_force


def subject_of(conductor: str, version: str) -> str:
    """Return the name under which shadows try a version, or what is to serve a tier."""
    if tier_in(conductor):
        return version
    return f"{VERSION_SUBJECT_PREFIX}{version}"


def canary_of(history: tuple[HistoryEntry, ...]) -> Candidate | None:
    """Return the present canary; None if there is none."""
    if not history or not history[-1].versions.canary:
        return None
    version = history[-1].versions.canary
    latest = [entry.change for entry in history if entry.change.kind == "canary"][-1]
    since = latest.at
    live = latest_change_of_live(history)
    if live is not None:  # a rollback of what was live beside it has changed what it is compared with
        since = max(since, live.change.at)
    return Candidate(latest.conductor, version, since, promoted=False, history=history)


def promotion_of(history: tuple[HistoryEntry, ...]) -> Candidate | None:
    """Return the version that is live because it was promoted; None if there is none. A canary beside it makes no
    difference."""
    latest = latest_change_of_live(history)
    if latest is None or latest.change.kind != "promoted":
        return None
    change = latest.change
    return Candidate(change.conductor, latest.versions.live, change.at, promoted=True, history=history)


class PresentDefinitions:
    """Tells the runs that were served by what the pool file in force still defines in the same way: the pool with its
    workers, the conductor, the fallback and the limits. A run of another definition says nothing of the present one."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._known: dict[tuple[str, str, str], bool] = {}

    async def live_since(self, tier: Tier, subject: str) -> float:
        """Return when that which serves a tier, or a version that plans there or for the subject, last became another
        one. What was compared before it speaks neither for nor against the subject."""
        changes = await self._store.changes()
        service = f"{TIER}{tier.name}"
        names = {service}
        for served_by in ("", versions_in_force(changes).get(service, VersionsInForce()).live, subject):
            definition = definition_of(self._catalog, tier.name, served_by)
            if definition is not None and definition.conductor.worker is not None:
                names.add(definition.conductor.worker)
        return max([live_since(changes, name) for name in names])

    async def served(self, tier: str, run: ComparedRun, subject: str = "") -> bool:
        """Return True if the run was served so. `subject` is what it tried as a shadow of the tier. False also where
        the pool file of that time is not stored, or not one that this release can read."""
        if run.catalog == self._catalog.digest:
            return True
        key = (tier, subject or run.served_by, run.catalog)
        if key not in self._known:
            self._known[key] = await self._is_unchanged(*key)
        return self._known[key]

    async def unchanged_pairs(self, tier: str, subject: str, pairs: Sequence[ShadowedRun]) -> list[ShadowedRun]:
        """Return the pairs of a tier's runs and their shadows with the subject of which both runs were served so, and
        the tier's run by what was live: a canary says nothing of that."""
        own = self._catalog.tiers[tier]
        history = history_of(await self._store.changes(), _conductor_of(own, subject))
        unchanged = []
        for pair in pairs:
            in_force = _in_force_at(history, pair.live.admitted_at)
            if choose_version({subject: in_force}, subject, pair.live.run) != in_force.live:
                continue
            is_live_unchanged = await self.served(tier, pair.live)
            if is_live_unchanged and await self.served(tier, pair.shadow, subject):
                unchanged.append(pair)
        return unchanged

    async def _is_unchanged(self, tier: str, subject: str, digest: str) -> bool:
        snapshot = (await self._store.catalogs([digest])).get(digest)
        if snapshot is None:
            return False
        try:
            then = restore_catalog(snapshot)
        except ValueError:
            return False
        return _definition(then, tier, subject) == _definition(self._catalog, tier, subject)


def _definition(catalog: Catalog, tier: str, subject: str) -> tuple[object, ...] | None:
    """Return what decides how a tier's runs are served by a subject, or by a version of its conductor; None if the pool
    file does not have it. The rates that were measured are not of the pool file, and commands do not have them."""
    own = catalog.tiers.get(tier)
    served = definition_of(catalog, tier, "" if subject.startswith(VERSION_SUBJECT_PREFIX) else subject)
    if own is None or served is None:
        return None
    names = {*served.pool, served.fallback, *served.conductor.workers}
    if served.conductor.worker is not None:
        names.add(served.conductor.worker)
    workers = {name: worker for name, worker in add_measurements(catalog, ()).workers.items() if name in names}
    return served.pool, served.conductor, served.fallback, served.efforts, own.efforts, workers


async def compare_versions(
    store: Store,
    catalog: Catalog,
    tier: Tier,
    candidate: Candidate,
    now: float,
    definitions: PresentDefinitions,
) -> Evidence:
    """Compare a tier's runs that a version was to conduct with those of the version before: of the same time while it
    is a canary, of the time before once it was promoted. A run that a fallback planned because the version could not be
    asked counts as the version's, too. Only runs count that were served as the pool file still says."""
    query = RunQuery(tier=tier.name, since=candidate.since, until=now)
    query_of_others = query
    if candidate.promoted and tier.promotion is not None:
        seconds = tier.promotion.watch_hours * 3_600
        query_of_others = replace(query, since=candidate.since - seconds, until=candidate.since)
    own = await _latest_runs(store, catalog, query, candidate.was_to_conduct)
    others = await _latest_runs(store, catalog, query_of_others, candidate.was_not_to_conduct)
    sides = []
    for ids in (others, own):
        side = await _comparable_runs(store, catalog, ids, candidate)
        sides.append([run for run in side if await definitions.served(tier.name, run)])
    return compare_different_runs(*sides)


async def _latest_runs(
    store: Store, catalog: Catalog, query: RunQuery, is_wanted: Callable[[RunRow], bool]
) -> Sequence[str]:
    """Return the latest runs of a query that are wanted and have ended, without those of arms; the newest first.

    Their rows alone are read, many at a time: beside a canary with a small share, the runs of the others are many.
    """
    latest: list[str] = []
    rows_read = 0
    query = replace(query, origin_kind="", preview=False, limit=ROWS)
    async for rows in run_pages(store.runs, query):
        for row in rows:
            if row.ended_at is not None and is_wanted(row) and not is_arm(catalog, row.model):
                latest.append(row.id)
        rows_read += len(rows)
        if rows_read >= MOST_ROWS or len(latest) >= MOST_RUNS:
            break
    return latest[:MOST_RUNS]


async def _comparable_runs(
    store: Store, catalog: Catalog, ids: Sequence[str], candidate: Candidate
) -> list[ComparedRun]:
    """Return those of these runs that the candidate could have conducted; the oldest first. The ids begin with the
    newest."""
    comparable: list[ComparedRun] = []
    for first in range(0, len(ids), PAGE):
        page = tuple(ids[first : first + PAGE])
        for run in _readable(await store.journaled_runs(RunQuery(ids=page, limit=PAGE))):
            if candidate.could_conduct(catalog, run):
                comparable.append(summarize_run(run))
        await asyncio.sleep(0)  # figures are made in the event loop: let other tasks in
    return comparable[::-1]


class Judgement(Struct, frozen=True):
    """The conditions of one tier with their evidence."""

    tier: str
    source: str
    """The kind of trial that gave the evidence: `shadow`, `canary` or `promotion`; `none` without any."""
    evidence: Evidence
    conditions: tuple[Condition, ...]
    left_out: int = 0
    """Shadows that are no evidence, because a canary has served their runs, or what served one of both has changed."""

    def decision(self) -> dict[str, Any]:
        """The conditions with what was found, in plain JSON values."""
        shown = [condition.to_json() for condition in self.conditions]
        return {"tier": self.tier, "source": self.source, "conditions": shown, "left_out": self.left_out}

    def to_json(self) -> dict[str, Any]:
        """The decision with all figures, in plain JSON values."""
        return self.decision() | {"evidence": self.evidence.to_json()}


async def judge(
    store: Store, catalog: Catalog, tier: Tier, subject: str, canary: Candidate | None, since: float, now: float
) -> Judgement | None:
    """Judge a candidate by the conditions of a tier; None where there are none. `subject` is its name among shadows.
    Only runs that were admitted from `since` on are evidence, and that were served as they are now.

    Shadows are the better evidence, since they are paired; a canary's runs count where there are more of them.
    """
    if tier.promotion is None:
        return None
    source, evidence, left_out = "none", NO_EVIDENCE, 0
    definitions = PresentDefinitions(store, catalog)
    since = max(since, await definitions.live_since(tier, subject))
    for shadow in await shadows_of(store, tier.name, since, now, answers=False):
        if shadow.subject != subject:
            continue
        recent = [pair for pair in shadow.pairs if pair.live.admitted_at >= since]
        pairs = await definitions.unchanged_pairs(tier.name, subject, recent)
        left_out += len(recent) - len(pairs)
        if pairs:
            source, evidence = "shadow", compare_with_shadows(pairs)
    if canary is not None and canary.subject == subject and evidence.count < tier.promotion.min_pairs:
        of_versions = await compare_versions(store, catalog, tier, canary, now, definitions)
        if of_versions.count > evidence.count:
            source, evidence = "canary", of_versions
    return Judgement(tier.name, source, evidence, conditions(tier.promotion, evidence), left_out)


# -- the report

DEFINITIONS: Final[Mapping[str, str]] = {
    "success": "The share of runs whose mean score by graders, or else by callers' feedback, is at least 0.5; only "
    "pairs in which the same kind of source has scored both runs.",
    "agreement": "The share of pairs with the same answer but for case, spaces and the last full stop, among those "
    "without such scores. It says that the answers differ, not which one is right.",
    "recipients": "Workers, conductors and embedders that were shown the caller's words.",
    "interval": "Each holds with a probability of 0.95, however often it is looked at; users count once, and figures "
    "are means over users.",
}


async def report(
    runs: Runs,
    definitions: PresentDefinitions,
    tier: Tier,
    since: float,
    until: float,
    drawn: Mapping[str, int] | None,
) -> dict[str, Any]:
    """The report on a tier's shadows as JSON values. `drawn` counts what became of the runs that were drawn.

    Figures are of all pairs; conditions are judged by those that the gate of a promotion would count, too.
    """
    by_subject = {shadow.subject: shadow for shadow in await shadows_of(runs, tier.name, since, until, answers=True)}
    subject: str | None = None
    if tier.shadow is not None:
        subject = tier.shadow.subject
        by_subject.setdefault(subject, SubjectShadows(subject))
    counts: dict[str, int] | None = None
    if drawn is not None:
        counts = dict(sorted(drawn.items()))
    candidates = []
    for name in sorted(by_subject):
        evidence = await definitions.unchanged_pairs(tier.name, name, by_subject[name].pairs)
        since_change = await definitions.live_since(tier, name)
        evidence = [pair for pair in evidence if pair.live.admitted_at >= since_change]
        candidates.append(_report_on_candidate(tier, by_subject[name], evidence))
    return {
        "object": "shadow_report",
        "tier": tier.name,
        "since": since,
        "until": until,
        "shadow": subject,
        "drawn": counts,
        "definitions": dict(DEFINITIONS),
        "candidates": candidates,
    }


def _conductor_of(tier: Tier, subject: str) -> str:
    """Return what a promotion of the subject would change: the tier's conductor, or what serves the tier."""
    if subject.startswith(VERSION_SUBJECT_PREFIX):
        return tier.conductor.worker or ""
    return f"{TIER}{tier.name}"


def _report_on_candidate(tier: Tier, shadows: SubjectShadows, evidence: Sequence[ShadowedRun]) -> dict[str, Any]:
    judged: tuple[Condition, ...] = ()
    if tier.promotion is not None:
        judged = conditions(tier.promotion, compare_with_shadows(evidence))
    return {
        "subject": shadows.subject,
        "pairs": len(shadows.pairs),
        "left_out": len(shadows.pairs) - len(evidence),
        "plans": shadows.plans,
        "valid_plans": shadows.valid_plans,
        "unfinished": shadows.unfinished,
        "figures": compare_with_shadows(shadows.pairs).to_json()["figures"],
        "new_recipients": _new_recipients(shadows.pairs),
        "conditions": [condition.to_json() for condition in judged],
        "promotable": is_promotable(judged) if judged else None,
        "pairs_needed": pairs_needed(judged),
    }


def _new_recipients(pairs: Sequence[ShadowedRun]) -> dict[str, int]:
    """The recipients of the caller's words in a shadow and not in its run, each with the number of such pairs."""
    counts: Counter[str] = Counter()
    for pair in pairs:
        counts.update(pair.shadow.recipients - pair.live.recipients)
    return dict(sorted(counts.items()))
