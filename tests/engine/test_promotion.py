"""The conditions of a promotion: what they refuse, and how a version that breaches them is rolled back by itself."""

import json
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace

from app.core.pool.catalog import PromotionSpec
from app.core.pool.conductor_versions import Change, versions_in_force
from app.core.rating.promotion import (
    ComparedRun,
    Condition,
    Evidence,
    ShadowedRun,
    breaches,
    compare_different_runs,
    compare_with_shadows,
    conditions,
    is_promotable,
    pairs_needed,
)
from app.engine.conductors import watch
from app.engine.conductors.trials import Judgement
from app.engine.conductors.versions import RequestedChange, make_change
from app.engine.conductors.watch import PromotionWatch
from app.process.wiring import Runtime
from app.store.protocol import PROCESS, AdminEventQuery, RunQuery, Store
from tests.harness.in_process import (
    await_ended_row,
    finish,
    order,
    plan_text,
    pool_text,
    running_service,
    script_answers,
)
from tests.stubs import Fail, ProviderStub, Reply

SPEC = PromotionSpec(20, min_success_difference=-0.2, max_cost_increase=0.1, max_latency_increase=0.1, max_degraded=0.3)
PLAN = Reply(chunks=(plan_text((0, "Solve it.", ["user"])),))
STATED = "\n[tiers.baton-ultra.promotion]\nmin_pairs = 2\nmax_degraded = 0.05\n"


def run(name: str, usd: int = 100, seconds: float = 1.0, *, right: bool = True, degraded: bool = False) -> ComparedRun:
    """A run as it is compared."""
    return ComparedRun(
        run=name,
        cluster=name,
        answered=True,
        degraded=degraded,
        usd=usd,
        seconds=seconds,
        verdicts={"graders": right},
        recipients=frozenset({"alpha"}),
    )


def test_a_few_grades_do_not_hide_what_many_callers_say_of_a_canary() -> None:
    sides = []
    for right in (True, False):
        rated = [replace(run(f"{right} {n}"), verdicts={"feedback": right}) for n in range(60)]
        sides.append([*rated, run(f"{right} graded")])
    evidence = compare_different_runs(*sides)
    assert evidence.figures["success"].count == 60
    assert "min_success_difference" in [condition.name for condition in breaches(conditions(SPEC, evidence))]


def pairs(count: int, rise: float) -> list[ShadowedRun]:
    """Pairs whose shadow costs more by this share; prices differ from pair to pair."""
    pairs_of_runs = []
    for number in range(count):
        usd = 1_000 + number % 7 * 100
        live, shadow = run(f"live{number}", usd), run(f"shadow{number}", round(usd * (1 + rise)))
        pairs_of_runs.append(ShadowedRun(live, shadow))
    return pairs_of_runs


def outcomes(evidence: Evidence) -> dict[str, str]:
    """The outcome of each condition."""
    return {condition.name: condition.outcome for condition in conditions(SPEC, evidence)}


def test_without_a_pair_nothing_is_decided() -> None:
    verdict = conditions(SPEC, compare_with_shadows([]))
    assert {condition.outcome for condition in verdict} == {"open"}
    assert (is_promotable(verdict), breaches(verdict), pairs_needed(verdict)) == (False, (), None)


def test_a_condition_holds_or_is_breached_only_beyond_chance() -> None:
    good, dear, near = (compare_with_shadows(pairs(200, rise)) for rise in (0.02, 0.3, 0.0999))
    assert set(outcomes(good).values()) == {"holds"}
    assert outcomes(dear)["max_cost_increase"] == "breached"
    assert outcomes(near)["max_cost_increase"] in ("holds", "open")
    few = conditions(SPEC, compare_with_shadows(pairs(10, 0.3)))
    assert {condition.outcome for condition in few if condition.name != "min_answered_difference"} == {"open"}
    assert (pairs_needed(few) or 0) >= SPEC.min_pairs


def test_wrong_and_degraded_runs_are_breaches_in_pairs_and_apart() -> None:
    worse = [ShadowedRun(run(f"a{n}"), run(f"b{n}", right=False, degraded=True)) for n in range(60)]
    live, candidate = [run.live for run in worse], [run.shadow for run in worse]
    for evidence in (compare_with_shadows(worse), compare_different_runs(live, candidate)):
        verdict = outcomes(evidence)
        assert (verdict["min_success_difference"], verdict["max_degraded"]) == ("breached", "breached")
    alike = outcomes(compare_different_runs(live, [run(f"c{n}") for n in range(60)]))
    assert "breached" not in alike.values()


def test_what_fails_is_neither_promoted_nor_kept_although_it_is_cheap_and_quick() -> None:
    """Nobody rates it, and no fallback decides it, so that no other condition notices."""
    live = [run(f"a{n}") for n in range(60)]
    failed = [replace(run(f"b{n}", usd=0, seconds=0.1), answered=False, verdicts={}) for n in range(60)]
    pairs_of_runs = [ShadowedRun(*pair) for pair in zip(live, failed, strict=True)]
    for evidence in (compare_with_shadows(pairs_of_runs), compare_different_runs(live, failed)):
        verdict = conditions(PromotionSpec(20, max_cost_increase=0.1, max_degraded=0.3), evidence)
        assert [condition.name for condition in breaches(verdict)] == ["min_answered_difference"]
        assert not is_promotable(verdict)
    few = conditions(PromotionSpec(2), compare_different_runs(live[:3], [*failed[:1], *live[3:5]]))
    assert is_promotable(few), "it asks for no evidence of its own"


def test_a_refusal_says_what_was_found_and_how_much_more_is_needed() -> None:
    def refuse(evidence: Evidence, **limits: float) -> list[str]:
        spec = PromotionSpec(2, **limits)  # type: ignore[arg-type]
        return watch.refusals([Judgement("own", "shadow", evidence, conditions(spec, evidence))])

    assert refuse(compare_with_shadows(pairs(60, 0.0)), min_success_difference=-0.05) == [
        "own: min_success_difference is -0.05, and 0.0000 was found, between -0.2459 and 0.2459; "
        "about 296 comparisons decide"
    ]
    (few,) = refuse(compare_with_shadows(pairs(10, 0.3)), max_cost_increase=0.1)
    assert few.startswith("own: max_cost_increase is 0.1, and 0.3000 was found, of too few users to say more; about ")
    (breached,) = refuse(compare_with_shadows(pairs(200, 0.3)), max_cost_increase=0.1)
    assert breached.endswith("and 0.3000 was found, between 0.3000 and 0.3000")
    free = compare_different_runs([run(f"a{n}", usd=0) for n in range(30)], [run(f"b{n}") for n in range(30)])
    assert refuse(free, max_cost_increase=0.1) == ["own: max_cost_increase is 0.1, and what is live costs nothing"]


def test_a_share_of_degraded_runs_is_judged_without_anything_to_compare_it_with() -> None:
    degraded = compare_different_runs([], [run(f"a{n}", degraded=True) for n in range(40)])
    verdict = conditions(SPEC, degraded)
    assert [condition.name for condition in breaches(verdict)] == ["max_degraded"]
    assert orjson.loads(orjson.dumps(degraded.to_json()))["figures"][0]["live"] is None
    assert not breaches(conditions(SPEC, compare_different_runs([], [run(f"a{n}") for n in range(40)])))
    assert not is_promotable(conditions(PromotionSpec(2), degraded)), "nothing was compared"


def test_what_is_free_is_no_dearer_than_what_is_free_and_anything_else_is() -> None:
    free = [run(f"a{n}", usd=0) for n in range(30)]
    also_free = [run(f"b{n}", usd=0) for n in range(30)]
    dear = [run(f"c{n}", usd=100 + n % 3) for n in range(30)]
    for candidate, outcome in ((also_free, "holds"), (dear, "breached")):
        paired = compare_with_shadows([ShadowedRun(*pair) for pair in zip(free, candidate, strict=True)])
        for evidence in (paired, compare_different_runs(free, candidate)):
            assert outcomes(evidence)["max_cost_increase"] == outcome
            assert orjson.loads(orjson.dumps(evidence.to_json()))["count"] == 30
    assert outcomes(compare_different_runs(free[:5], dear[:5]))["max_cost_increase"] == "open"


def test_the_pairs_that_a_share_needs_are_counted_also_where_all_runs_are_alike() -> None:
    """They decide, about: their interval stays wider for longer than that of costs without any spread."""
    spec = PromotionSpec(20, min_success_difference=-0.05)

    def judge(count: int) -> Condition:
        (verdict,) = [
            condition
            for condition in conditions(spec, compare_with_shadows(pairs(count, 0.0)))
            if condition.name == "min_success_difference"
        ]
        return verdict

    few = judge(60)
    assert few.outcome == "open"
    assert few.needed is not None
    assert judge(round(few.needed * 0.9)).outcome == "open"
    assert judge(round(few.needed * 1.1)).outcome == "holds"


async def load_and_change(runtime: Runtime, *kinds_and_shares: tuple[str, float]) -> None:
    """Load the version `planner@1`, and make changes of it."""
    for number, (kind, share) in enumerate((("loaded", 0.0), *kinds_and_shares)):
        at = runtime.context.now()
        change = Change(f"change_{number}", at, "me", "planner", kind, "planner@1", share)  # type: ignore[arg-type]
        await runtime.context.store.change(change)
    await runtime.versions.look()


async def runs(runtime: Runtime, first: int, count: int) -> None:
    """Let callers ask `baton-ultra` so often. The ids of the runs, which decide who conducts them, are always the
    same."""
    orders = [order(runtime, "baton-ultra", run=f"run_{number:031x}") for number in range(first, first + count)]
    for followed_run in [await runtime.runs.start(new_order) for new_order in orders]:
        await finish(followed_run)
        await await_ended_row(runtime.context.store, followed_run.run)


async def live(runtime: Runtime) -> tuple[str, str]:
    """The version in force, and the canary."""
    now = versions_in_force(await runtime.context.store.changes())["planner"]
    return now.live, now.canary


async def test_no_version_is_promoted_without_evidence(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        async with running_service(tmp_path, pool_text(stub) + STATED) as runtime:
            await load_and_change(runtime)
            request = RequestedChange("planner", "promoted", "planner@1")
            context = runtime.context
            gate = await watch.gate(context.store, context.catalog(), request)
            assert not watch.may_be_promoted(gate)
            assert watch.refusals(gate) == [
                "baton-ultra: min_pairs is 2, and there are 0",
                "baton-ultra: max_degraded is 0.05, and nothing is known of it",
            ]
            assert json.loads(watch.evidence_note(gate, forced="why"))["forced"] == "why"
        async with running_service(tmp_path, pool_text(stub)) as runtime:
            context = runtime.context
            gate = await watch.gate(context.store, context.catalog(), request)
            assert watch.may_be_promoted(gate)
            assert watch.evidence_note(gate, forced=None) == ""


@pytest.mark.parametrize("kind", ["canary", "promoted"])
@pytest.mark.long
async def test_a_version_that_degrades_runs_is_rolled_back_by_itself(tmp_path: Path, kind: str) -> None:
    """It is left alone while it does well, and undone once, with the evidence, when it does not."""
    share = 0.8 if kind == "canary" else 0.0
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("planner", PLAN)
        stub.always("planner@1", PLAN)
        async with running_service(tmp_path, pool_text(stub) + STATED) as runtime:
            await runs(runtime, 0, 4)
            await load_and_change(runtime, (kind, share))
            watching = PromotionWatch(runtime.context)
            await runs(runtime, 4, 4)
            await watching.look()
            assert "planner@1" in await live(runtime)
            stub.always("planner@1", Fail(status=404))
            await runs(runtime, 8, 24)
            await watching.look()
            assert await live(runtime) == ("", "")
            (*_, last) = await runtime.context.store.changes()
            assert (last.kind, last.who, last.version) == ("rolled_back", "baton", "planner@1")
            assert json.loads(last.note)["breached"] == ["max_degraded"]
            assert 'baton_rollbacks_total{condition="max_degraded",conductor="planner"} 1.0' in metrics(runtime)
            before = len(await runtime.context.store.changes())
            await watching.look()
            assert len(await runtime.context.store.changes()) == before
            events = await runtime.context.store.admin_events(AdminEventQuery())
            assert any(event.action == "conductor.rolled_back" and event.via == "process" for event in events)


@pytest.mark.long
async def test_plans_that_nobody_approves_are_no_failures_of_a_version(tmp_path: Path) -> None:
    rule = '[tiers.baton-ultra.approval]\nworkers = ["alpha"]\nseconds = 0.01\non_expiry = "fallback-plan"\n'
    steps = [(ordinal, "Solve it.", ["user"]) for ordinal in range(3)]
    async with ProviderStub() as stub:
        script_answers(stub)
        for model in ("planner", "planner@1"):
            stub.always(model, Reply(chunks=(plan_text(*steps),)))
        async with running_service(tmp_path, pool_text(stub) + STATED + rule) as runtime:
            await load_and_change(runtime, ("canary", 0.8))
            await runs(runtime, 0, 24)
            assert {row.degraded for row in await runtime.context.store.runs(RunQuery())} == {True}
            await PromotionWatch(runtime.context).look()
            assert await live(runtime) == ("", "planner@1")


async def test_what_is_promoted_while_the_watch_judges_the_canary_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence spoke against a canary; whoever promoted it meanwhile, by force, has decided about all runs."""

    async def compare_and_promote(store: Store, *_judged: object) -> Evidence:
        await make_change(store, RequestedChange("planner", "promoted", "planner@1"), name="forced", by=PROCESS)
        return compare_different_runs([], [run(f"a{n}", degraded=True) for n in range(40)])

    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub) + STATED) as runtime:
        await load_and_change(runtime, ("canary", 0.5))
        monkeypatch.setattr(watch, "compare_versions", compare_and_promote)
        await PromotionWatch(runtime.context).look()
        assert await live(runtime) == ("planner@1", "")


def metrics(runtime: Runtime) -> str:
    """The metrics of the process."""
    return runtime.context.telemetry.exposition().decode()
