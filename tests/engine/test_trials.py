"""Which runs count as evidence about a canary or a promotion, over rows and journals that a store might have."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from app.core.pool.budgets import shadow_budget
from app.core.pool.catalog import (
    Amount,
    CalibrationResult,
    Card,
    Catalog,
    ConductorSpec,
    Limits,
    PromotionSpec,
    ProviderSpec,
    Tier,
    Worker,
)
from app.core.pool.conductor_versions import Change, ChangeKind, VersionsInForce, choose_version, history_of
from app.core.pool.snapshot import seal_catalog, snapshot
from app.core.rating.economics import JournaledRun
from app.core.rating.promotion import Evidence, breaches, conditions, summarize_run
from app.core.run.events import Event, Fact, RunAdmitted, RunCancelled, RunEnd, RunOverBudget, RunSucceeded
from app.engine.conductors import watch
from app.engine.conductors.trials import (
    Candidate,
    PresentDefinitions,
    canary_of,
    compare_versions,
    promotion_of,
    report,
    shadows_of,
)
from app.engine.conductors.versions import RequestedChange, make_change
from app.engine.context import EngineContext
from app.gateway.admin.replies import TierEvidence
from app.store.protocol import PROCESS, Actor, RunQuery, RunRow, Store

SPEC = PromotionSpec(min_pairs=2)
OWN = Tier("own", ("a",), ConductorSpec("model", worker="planner"), "a", {"medium": Limits()}, promotion=SPEC)
CATALOG = Catalog({"p": ProviderSpec("p", "openai")}, {"a": Worker("a", "p", "a")}, {"own": OWN}, {"alias": "own"}, "")
NOW = 1_000_000.0
SUCCEEDED = RunSucceeded(answer="")


class Journal:
    """The verbs of a store that evidence is read with."""

    def __init__(self, changes: Sequence[Change] = (), catalogs: Sequence[Catalog] = ()) -> None:
        self._changes = changes
        self._catalogs = {catalog.digest: snapshot(catalog) for catalog in catalogs}
        self._runs: dict[str, tuple[RunRow, JournaledRun]] = {}

    def add(self, id_: str, at: float, *, end: RunEnd = SUCCEEDED, model: str = "own", **admitted: Any) -> None:
        """Add a run of the tier that has ended."""
        states = {RunSucceeded: "succeeded", RunOverBudget: "over_budget", RunCancelled: "cancelled"}
        state = states[type(end)]
        origin = admitted.get("origin_kind", "")
        facts: list[Fact] = [admission(model=model, **admitted), end]
        events = [Event.of(id_, seq, at, fact) for seq, fact in enumerate(facts, 1)]
        run = JournaledRun(id_, "t", "k", "own", state, "single", False, at, True, tuple(events))
        nothing = Amount()
        row = RunRow(
            *(id_, "t", "k", "own", model, state, at, at, 1, "", at, 2),
            *(nothing, nothing, nothing, "single", False, 1, at, None),
            origin_kind=origin,
        )
        self._runs[id_] = (row, run)

    def damage(self, id_: str) -> None:
        """Make the run's journal one that cannot be read."""
        row, run = self._runs[id_]
        self._runs[id_] = (row, replace(run, events=()))

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        """The rows of a page, the newest first."""
        return tuple([row for row, _ in self._page(query)])

    async def journaled_runs(self, query: RunQuery) -> tuple[JournaledRun, ...]:
        """The journals of a page, the newest first."""
        return tuple([run for _, run in self._page(query)])

    async def changes(self) -> Sequence[Change]:
        """All changes."""
        return self._changes

    async def catalogs(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        """The snapshots that are stored."""
        return {digest: self._catalogs[digest] for digest in digests if digest in self._catalogs}

    async def change(self, change: Change, *, by: Actor) -> None:
        """Store a change; changes are read in the order of their times and ids."""
        self._changes = sorted([*self._changes, change], key=lambda stored: (stored.at, stored.id))

    async def clock(self) -> float:
        """The time."""
        return NOW

    def _page(self, query: RunQuery) -> list[tuple[RunRow, JournaledRun]]:
        chosen = []
        for row, run in sorted(self._runs.values(), key=lambda pair: (pair[0].created_at, pair[0].id), reverse=True):
            is_in_time = (query.since or 0) <= row.created_at < (query.until or NOW + 1)
            is_of_origin = query.origin_kind is None or query.origin_kind == row.origin_kind
            is_named = not query.ids or row.id in query.ids
            is_later_page = query.before is None or (row.created_at, row.id) < query.before
            if is_in_time and is_of_origin and is_named and is_later_page:
                chosen.append((row, run))
        return chosen[: query.limit]


def admission(*, model: str, **more: Any) -> RunAdmitted:
    """The admission of a run of the tier."""
    fields = {"task": "", "tier": "own", "limits": Limits(), "deadline": 0.0, "pool": ("a",), "conductor": "model"}
    return RunAdmitted(**fields | more, preview=False, rehearsal=False, streams=False, model=model)  # type: ignore[arg-type]


def changes_of(*steps: tuple[ChangeKind, str, float], share: float = 0.05) -> list[Change]:
    """Changes of the conductor, one every 1,000 seconds from 0 on unless the time is given."""
    changes = []
    for number, (kind, version, at) in enumerate(steps):
        its_share = share if kind == "canary" else 0.0
        changes.append(Change(f"change_{number}", at, "me", "planner", kind, version, its_share))
    return changes


async def count_compared_runs(journal: Journal, candidate: Candidate | None) -> int:
    """The number of runs of the smaller side, when a candidate is compared."""
    assert candidate is not None
    return (await compare(journal, candidate)).count


async def compare(journal: Journal, candidate: Candidate) -> Evidence:
    """What the tier's runs say of a candidate."""
    store = cast("Store", journal)
    return await compare_versions(store, CATALOG, OWN, candidate, NOW, PresentDefinitions(store, CATALOG))


@pytest.mark.long
async def test_a_canary_with_a_small_share_is_compared_by_all_of_its_runs() -> None:
    """Those of the other side are many more, and must not take its place."""
    history = history_of(changes_of(("loaded", "v1", 0.0), ("canary", "v1", 0.0)), "planner")
    journal, drawn = Journal(), 0
    for number in range(3_000):
        journal.add(f"run_{number}", 1.0 + number)
        drawn += choose_version({"planner": history[-1].versions}, "planner", f"run_{number}") == "v1"
    assert drawn > 100
    assert await count_compared_runs(journal, canary_of(history)) == drawn


async def test_arms_and_what_a_shared_budget_has_ended_say_nothing_of_a_candidate() -> None:
    history = history_of(changes_of(("loaded", "v1", 0.0), ("promoted", "v1", 10.0)), "planner")
    journal = Journal()
    for at in (5.0, 15.0):
        for number in range(3):
            journal.add(f"run_{at}_{number}", at, model="alias")
        for number in range(9):
            journal.add(f"run_{at}_arm_{number}", at, model="own:conductor:other")
            end = RunOverBudget(budget="t/tenant/-/day", budget_until=NOW)
            journal.add(f"run_{at}_spent_{number}", at, end=end)
    assert await count_compared_runs(journal, promotion_of(history)) == 3
    journal.add("run_dear", 16.0, end=RunOverBudget())
    journal.add("run_before", 6.0)
    assert await count_compared_runs(journal, promotion_of(history)) == 4, "its own limit is its own affair"


async def test_a_candidate_whose_callers_do_not_wait_for_it_gives_fewer_answers() -> None:
    history = history_of(changes_of(("loaded", "v1", 0.0), ("canary", "v1", 0.0), share=0.5), "planner")
    candidate, journal = canary_of(history), Journal()
    assert candidate is not None
    for number in range(80):
        is_drawn = choose_version({"planner": history[-1].versions}, "planner", f"run_{number}") == "v1"
        journal.add(f"run_{number}", 1.0 + number, end=RunCancelled() if is_drawn else SUCCEEDED)
    evidence = await compare(journal, candidate)
    assert [condition.name for condition in breaches(conditions(SPEC, evidence))] == ["min_answered_difference"]


async def test_a_promotion_is_watched_beside_a_later_canary_and_after_it() -> None:
    steps: list[tuple[ChangeKind, str, float]] = [("loaded", "v1", 0.0), ("promoted", "v1", 10.0)]
    canary: list[tuple[ChangeKind, str, float]] = [("loaded", "v2", 20.0), ("canary", "v2", 20.0)]
    beside = history_of(changes_of(*steps, *canary, share=0.5), "planner")
    watched = promotion_of(beside)
    assert watched is not None
    assert (watched.version, watched.since) == ("v1", 10.0)
    journal, own = Journal(), 0
    for number in range(40):
        journal.add(f"run_{number}", 30.0)
        journal.add(f"run_before_{number}", 5.0)
        own += choose_version({"planner": beside[-1].versions}, "planner", f"run_{number}") == "v1"
    assert 0 < own < 40
    assert await count_compared_runs(journal, watched) == own, "the canary's runs are the canary's"
    ended = promotion_of(history_of(changes_of(*steps, *canary, ("rolled_back", "v2", 40.0)), "planner"))
    assert ended is not None
    assert (ended.version, ended.since) == ("v1", 10.0)
    assert promotion_of(history_of(changes_of(*steps, ("rolled_back", "v1", 40.0)), "planner")) is None


@pytest.mark.parametrize(("promoted_at", "holds"), [(NOW - 900.0, False), (NOW - 2_000.0, True)])
async def test_a_shadow_of_what_was_live_before_is_no_evidence(promoted_at: float, holds: bool) -> None:
    """It says what the version does better or worse than another one that does not conduct any more."""
    changes = changes_of(("loaded", "v1", 0.0), ("loaded", "v2", 0.0), ("promoted", "v1", promoted_at))
    journal = Journal(changes)
    of_shadow = {"budgets": (shadow_budget("own", 0).id,), "origin_kind": "shadow", "wire": {"conductor": "v2"}}
    for number in range(3):
        journal.add(f"run_{number}", NOW - 1_000.0)
        journal.add(f"shadow_{number}", NOW - 500.0, origin_run=f"run_{number}", **of_shadow)
    wanted = RequestedChange("planner", "promoted", "v2")
    judgements = await watch.gate(cast("Store", journal), CATALOG, wanted)
    assert watch.may_be_promoted(judgements) is holds
    assert [judgement.source for judgement in judgements] == (["shadow"] if holds else ["none"])
    store = cast("Store", journal)
    (reported,) = (await report(store, PresentDefinitions(store, CATALOG), OWN, 0.0, NOW, None))["candidates"]
    assert (reported["pairs"], reported["left_out"], reported["promotable"]) == (3, 0 if holds else 3, holds)


async def test_a_shadow_of_a_run_that_a_canary_conducted_is_no_evidence() -> None:
    """It says what the version does better or worse than another one that is not live."""
    changes = changes_of(("loaded", "v1", 0.0), ("loaded", "v2", 0.0), ("canary", "v1", NOW - 2_000.0), share=0.5)
    journal, drawn = Journal(changes), 0
    of_shadow = {"budgets": (shadow_budget("own", 0).id,), "origin_kind": "shadow", "wire": {"conductor": "v2"}}
    canary = {"planner": history_of(changes, "planner")[-1].versions}
    for number in range(40):
        is_drawn = choose_version(canary, "planner", f"run_{number}") == "v1"
        drawn += is_drawn
        journal.add(f"run_{number}", NOW - 1_000.0, end=RunOverBudget() if is_drawn else SUCCEEDED)
        journal.add(f"shadow_{number}", NOW - 500.0, origin_run=f"run_{number}", **of_shadow)
    assert 0 < drawn < 40
    wanted = RequestedChange("planner", "promoted", "v2")
    (judgement,) = await watch.gate(cast("Store", journal), CATALOG, wanted)
    assert (judgement.evidence.count, judgement.left_out) == (40 - drawn, drawn)
    assert judgement.evidence.figures["answered"].live == 1.0
    store = cast("Store", journal)
    (reported,) = (await report(store, PresentDefinitions(store, CATALOG), OWN, 0.0, NOW, None))["candidates"]
    assert (reported["pairs"], reported["left_out"]) == (40, drawn)


async def test_a_damaged_run_keeps_no_other_one_from_being_evidence() -> None:
    history = history_of(changes_of(("loaded", "v1", 0.0), ("promoted", "v1", 10.0)), "planner")
    journal = Journal()
    for number in range(3):
        journal.add(f"run_before_{number}", 5.0)
        journal.add(f"run_{number}", 15.0)
        shadow = {"budgets": (shadow_budget("own", 0).id,), "origin_kind": "shadow", "origin_run": f"run_{number}"}
        journal.add(f"shadow_{number}", 16.0, **shadow)
    journal.damage("run_2")
    assert await count_compared_runs(journal, promotion_of(history)) == 2
    journal.damage("shadow_1")
    (subject,) = await shadows_of(cast("Store", journal), "own", 0.0, NOW, answers=False)
    assert (len(subject.pairs), subject.unfinished) == (1, 1), "of the last one there is nothing to compare it with"


def test_users_of_the_same_name_in_two_tenants_are_two() -> None:
    journal = Journal()
    journal.add("run", NOW)
    _, run = journal._runs["run"]
    clusters = [
        summarize_run(replace(run, tenant=tenant, users=("7",))).cluster for tenant in ("acme", "acme", "other")
    ]
    assert clusters[0] == clusters[1] != clusters[2]


SUBJECT = Tier("next", ("b",), ConductorSpec("model", worker="planner"), "b", {"medium": Limits()})
POOL = seal_catalog(
    replace(CATALOG, workers=CATALOG.workers | {"b": Worker("b", "p", "b")}, tiers={"own": OWN, "next": SUBJECT})
)
MEASURED = {"b": replace(POOL.workers["b"], card=Card(measured=(CalibrationResult("numbers", 17.0, 18),)))}
OTHER_MODEL = {"b": replace(POOL.workers["b"], model="b-2")}


@pytest.mark.parametrize(
    ("earlier", "counts"),
    [
        pytest.param(POOL, True, id="the same"),
        pytest.param(replace(POOL, aliases={}, workers=POOL.workers | {"c": Worker("c", "p", "c")}), True, id="others"),
        pytest.param(
            replace(POOL, tiers=POOL.tiers | {"own": replace(OWN, promotion=None)}),
            True,
            id="conditions",
        ),
        pytest.param(replace(POOL, workers=POOL.workers | MEASURED), True, id="measured rates"),
        pytest.param(replace(POOL, tiers=POOL.tiers | {"own": replace(OWN, pool=("a", "b"))}), False, id="tier"),
        pytest.param(
            replace(POOL, tiers=POOL.tiers | {"next": replace(SUBJECT, pool=("a",))}),
            False,
            id="subject",
        ),
        pytest.param(replace(POOL, workers=POOL.workers | OTHER_MODEL), False, id="worker of the subject"),
        pytest.param(replace(POOL, tiers={"own": OWN}), False, id="no subject"),
        pytest.param(None, False, id="not stored"),
    ],
)
@pytest.mark.parametrize("source", ["shadow", "canary"])
async def test_what_the_pool_file_has_defined_otherwise_is_no_evidence(
    earlier: Catalog | None, counts: bool, source: str
) -> None:
    """Runs of another tier, worker or alias make no difference, and neither do the conditions themselves."""
    catalogs, digest = [POOL], "unknown"
    if earlier is not None:
        catalogs.append(seal_catalog(earlier))
        digest = catalogs[-1].digest
    changes, share = [], 0.0
    if source == "canary":
        share = 0.5
        changes.append(Change("change_canary", 0.0, "me", "tier own", "canary", "tier next", share))
    journal = Journal(changes, catalogs)
    of_shadow = {"budgets": (shadow_budget("own", 0).id,), "origin_kind": "shadow", "tier": "next", "pool": ("b",)}
    for number in range(20):
        run = f"run_{number}"
        served_by = choose_version({"tier own": VersionsInForce(canary="tier next", share=share)}, "tier own", run)
        journal.add(run, NOW - 1_000.0, catalog=digest, served_by=served_by)
        if source == "shadow":
            shadow: dict[str, Any] = of_shadow | {"origin_run": run, "catalog": digest}
            journal.add(f"shadow_{number}", NOW - 500.0, **shadow)
    wanted = RequestedChange("tier own", "promoted", "tier next")
    (judgement,) = await watch.gate(cast("Store", journal), POOL, wanted)
    assert watch.may_be_promoted([judgement]) is counts
    why = "a canary served the run, or what is live or the pool file has changed what was compared"
    left_out = f"own: 20 comparisons are left out, because {why}"
    assert (left_out in watch.refusals([judgement])) is (source == "shadow" and not counts)
    shown_by_admin = TierEvidence.model_validate(judgement.decision() | {"promotable": counts})
    assert shown_by_admin.left_out == (20 if source == "shadow" and not counts else 0)
    if source == "shadow":
        store = cast("Store", journal)
        shown = await report(store, PresentDefinitions(store, POOL), OWN, 0.0, NOW, None)
        (candidate,) = shown["candidates"]
        pairs, others = (20, 0) if counts else (0, 20)
        assert (candidate["pairs"], candidate["left_out"], candidate["promotable"]) == (20, others, counts)
        assert (candidate["figures"][0]["count"], candidate["conditions"][0]["count"]) == (20, pairs)


@pytest.mark.parametrize(("promoted_at", "holds"), [(NOW - 900.0, False), (NOW - 2_000.0, True)])
async def test_a_shadow_from_before_a_promotion_of_the_model_that_plans_is_no_evidence_for_the_tier(
    promoted_at: float, holds: bool
) -> None:
    """Another version planned for the tier, and for what is to serve it, than does now."""
    journal = Journal(changes_of(("loaded", "v1", 0.0), ("promoted", "v1", promoted_at)), [POOL])
    of_shadow = {"budgets": (shadow_budget("own", 0).id,), "origin_kind": "shadow", "tier": "next", "pool": ("b",)}
    for number in range(3):
        journal.add(f"run_{number}", NOW - 1_000.0, catalog=POOL.digest)
        shadow: dict[str, Any] = of_shadow | {"origin_run": f"run_{number}", "catalog": POOL.digest}
        journal.add(f"shadow_{number}", NOW - 500.0, **shadow)
    store = cast("Store", journal)
    judgements = await watch.gate(store, POOL, RequestedChange("tier own", "promoted", "tier next"))
    assert watch.may_be_promoted(judgements) is holds
    (reported,) = (await report(store, PresentDefinitions(store, POOL), OWN, 0.0, NOW, None))["candidates"]
    assert (reported["left_out"], reported["promotable"]) == (0 if holds else 3, holds)


@pytest.mark.parametrize("is_changed", [False, True], ids=["the same pool file", "another one before"])
async def test_a_promotion_is_not_judged_by_runs_of_another_definition(is_changed: bool) -> None:
    """Nobody waits for an answer since the tier has a weak pool, whatever conducts it."""
    before = seal_catalog(replace(POOL, tiers=POOL.tiers | {"own": replace(OWN, pool=("a", "b"))}))
    changes = changes_of(("loaded", "v1", NOW - 2_000.0), ("promoted", "v1", NOW - 1_000.0))
    journal = Journal(changes, [before, POOL])
    for number in range(80):
        digest = before.digest if is_changed else POOL.digest
        journal.add(f"before_{number}", NOW - 1_500.0, catalog=digest)
        journal.add(f"after_{number}", NOW - 500.0, catalog=POOL.digest, end=RunCancelled())
    store = cast("Store", journal)
    telemetry = SimpleNamespace(count=lambda *_labels: None, log=lambda *_words, **_fields: None)
    context = SimpleNamespace(store=store, now=lambda: NOW, name=lambda _: "", telemetry=telemetry)
    looking = watch.PromotionWatch(cast("EngineContext", context))
    candidate = promotion_of(history_of(changes, "planner"))
    assert candidate is not None
    await looking._judge(POOL, PresentDefinitions(store, POOL), candidate, [OWN])
    assert (await journal.changes())[-1].kind == ("promoted" if is_changed else "rolled_back")


@pytest.mark.parametrize(("kind", "tiers"), [("model", ["own"]), ("selector", ["own"]), ("fixed", [])])
async def test_the_conditions_of_a_tier_are_those_of_its_model_whether_it_plans_alone_or_is_chosen(
    kind: Any, tiers: list[str]
) -> None:
    worker = "planner" if tiers else None
    tier = replace(OWN, conductor=ConductorSpec(kind, worker=worker))
    catalog = replace(CATALOG, tiers={"own": tier})
    assert [found.name for found in watch.tiers_with_conditions(catalog, {}, "planner")] == tiers
    history = history_of(changes_of(("loaded", "v1", 0.0), ("promoted", "v1", 10.0)), "planner")
    journal = Journal()
    for at in (5.0, 15.0):
        journal.add(f"run_{at}", at, conductor=kind)
    assert await count_compared_runs(journal, promotion_of(history)) == len(tiers)


async def test_a_tier_that_another_tier_serves_keeps_its_conditions_when_that_ones_conductor_is_promoted() -> None:
    other = replace(OWN, name="other", promotion=None)
    own = replace(OWN, conductor=ConductorSpec("model", worker="its own"))
    catalog = replace(CATALOG, tiers={"own": own, "other": other})
    served = Change("change_served", 0.0, "me", "tier own", "promoted", "tier other")
    changes = [served, *changes_of(("loaded", "v1", 1.0), ("canary", "v1", 1.0), share=0.5)]
    versions = history_of(changes, "planner")[-1].versions
    wanted = RequestedChange("planner", "promoted", "v1")
    assert await watch.gate(cast("Store", Journal(changes[1:])), catalog, wanted) == ()
    for served_by, holds in (("tier other", True), ("", False)):
        journal, drawn = Journal(changes), 0
        for number in range(40):
            journal.add(f"run_{number}", 2.0 + number, served_by=served_by)
            drawn += choose_version({"planner": versions}, "planner", f"run_{number}") == "v1"
        (judgement,) = await watch.gate(cast("Store", journal), catalog, wanted)
        assert judgement.tier == "own"
        assert judgement.evidence.count == (min(drawn, 40 - drawn) if holds else 0)
        assert watch.may_be_promoted([judgement]) is holds


async def test_a_change_comes_after_all_others_although_the_databases_clock_was_put_back() -> None:
    journal = Journal(changes_of(("loaded", "v1", 0.0), ("promoted", "v1", NOW + 60)))
    for kind, name in (("rolled_back", "z"), ("promoted", "a")):
        request = RequestedChange("planner", cast("ChangeKind", kind), "v1")
        await make_change(cast("Store", journal), request, name=name, by=PROCESS)
        live = history_of(await journal.changes(), "planner")[-1].versions.live
        assert live == ("v1" if kind == "promoted" else "")
