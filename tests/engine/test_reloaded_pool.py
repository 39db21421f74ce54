"""The pool file is read again while a request is being admitted, or between two calls of a run."""

import logging
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from app.core.run.events import Fact, Kind
from app.engine.calls.step_request import Candidates
from app.engine.commit.run_writer import Consequences
from app.engine.runs.approvals import Decision
from app.engine.runs.planning import Planner
from app.errors import Conflict, NotFound
from app.process.config import configure
from app.process.wiring import Runtime
from app.store.protocol import RunRow
from app.store.sql import SqlStore
from tests.harness.in_process import (
    await_ended_row,
    bodies_of,
    events,
    finish,
    limits_with,
    order,
    plan_text,
    pool_text,
    running_service,
    script_answers,
    script_plans,
)
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Reply

LEAVING = """
[providers.leaving]
format = "openai"
base_url = "{url}"
"""
ASKS = """
[tiers.baton-mini.approval]
always = true
four_eyes = false

"""


def reload(runtime: Runtime, folder: Path, text: str) -> None:
    """Have the process read this pool file."""
    (folder / "pool.toml").write_text(text)
    environ = {"BATON_POOL": str(folder / "pool.toml"), "BATON_DATA_DIR": str(folder), "BATON_PEPPER": "p" * 32}
    runtime.install(configure(environ))


def reload_after_a_failure(runtime: Runtime, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process read this pool file as soon as a call has failed."""
    note_failure = Candidates.note_failure

    def note_and_reload(candidates: Candidates, *failed: Any, **more: Any) -> None:
        note_failure(candidates, *failed, **more)
        reload(runtime, folder, text)

    monkeypatch.setattr(Candidates, "note_failure", note_and_reload)


async def test_a_worker_that_has_left_it_is_not_tried_again(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub.script("alpha", Fail(status=503))
    usual = pool_text(stub)
    before = LEAVING.format(url=stub.vllm_url) + usual.replace(
        '[workers.alpha]\nprovider = "stub"', '[workers.alpha]\nprovider = "leaving"'
    )
    async with running_service(tmp_path, before) as runtime:
        reload_after_a_failure(runtime, tmp_path, usual.replace("alpha", "delta"), monkeypatch)
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        assert (await finish(followed_run)).ended.error is None
        called = bodies_of(await events(runtime, followed_run.run), Kind.CALL_INTENDED)
    assert [call["worker"] for call in called] == ["alpha", "beta"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_worker_that_has_changed_is_called_as_it_is_now(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.script("alpha", Fail(status=503))
    usual = pool_text(stub)
    async with running_service(tmp_path, usual) as runtime:
        reload_after_a_failure(runtime, tmp_path, usual.replace('model = "alpha"', 'model = "delta"'), monkeypatch)
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        assert (await finish(followed_run)).ended.error is None
        called = bodies_of(await events(runtime, followed_run.run), Kind.CALL_INTENDED)
    assert [(call["worker"], call["model"]) for call in called] == [("alpha", "alpha"), ("alpha", "delta")]


@pytest.mark.parametrize(
    ("before", "after", "pool"),
    [
        ("alpha", "delta", ["delta", "beta", "gamma"]),
        ("planner", "conductor", ["alpha", "beta", "gamma"]),
        ('pool = ["alpha", "beta", "gamma"]', 'pool = ["gamma", "beta", "alpha"]', ["gamma", "beta", "alpha"]),
    ],
    ids=["worker", "conductor", "pool"],
)
async def test_a_request_that_came_before_is_carried_out_under_its_tier_as_it_is_now(
    stub: ProviderStub, tmp_path: Path, before: str, after: str, pool: list[str]
) -> None:
    usual = pool_text(stub)
    async with running_service(tmp_path, usual) as runtime:
        early_order = order(runtime, "baton-ultra")
        reload(runtime, tmp_path, usual.replace(before, after))
        followed_run = await runtime.runs.start(early_order)
        assert (await finish(followed_run)).ended.error is None
        admitted = bodies_of(await events(runtime, followed_run.run), Kind.ADMITTED)
    assert [admission["pool"] for admission in admitted] == [pool]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('model = "alpha"', 'model = "delta"'),
        ("cached = 0.50 }", "cached = 0.50, long = { above = 10, input = 1.10, output = 2.10 } }"),
    ],
)
async def test_an_approval_of_a_worker_does_not_hold_for_what_the_worker_is_by_then(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    stub.script("alpha", Fail(status=503))
    usual = pool_text(stub).replace("[tiers.baton-ultra]", ASKS + "[tiers.baton-ultra]")
    async with running_service(tmp_path, usual) as runtime:
        reload_after_a_failure(runtime, tmp_path, usual.replace(old, new), monkeypatch)
        run = (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.state
        assert run.approval_question is not None
        decision = Decision("approve", run.approval_question.digest, "somebody", "")
        await runtime.runs.decide(run.run, None, decision)
        assert (await await_ended_row(runtime.context.store, run.run)).state == "failed"
        called = bodies_of(await events(runtime, run.run), Kind.CALL_INTENDED)
    assert [(call["worker"], call["model"]) for call in called] == [("alpha", "alpha")]


async def test_a_plan_cannot_be_approved_whose_worker_had_left_it_when_the_approval_was_asked_for(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = pool_text(stub).replace("[tiers.baton-ultra]", ASKS + "[tiers.baton-ultra]")
    plan = {"steps": [{"worker": "gamma", "subtask": "Answer.", "access": ["user"]}]}
    question = Consequences.await_approval
    async with running_service(tmp_path, usual) as runtime:

        def reload_and_ask(*arguments: Any, **more: Any) -> Fact:
            reload(runtime, tmp_path, usual.replace("gamma", "delta"))
            return question(arguments[0], *arguments[1:3], runtime.pool.catalog(), **more)

        monkeypatch.setattr(Consequences, "await_approval", reload_and_ask)
        run = (await finish(await runtime.runs.start(order(runtime, "baton-mini", plan=plan)))).ended.state
        assert run.approval_question is not None
        with pytest.raises(Conflict) as refusal:
            await runtime.runs.decide(run.run, None, Decision("approve", run.approval_question.digest, "somebody", ""))
    assert refusal.value.public_code == "approval_outdated"


async def test_a_run_fails_whose_fallback_may_not_read_it_any_more_when_nobody_has_approved_its_plan(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """The auditor finds the row of the run as it should be."""
    cleared = pool_text(stub)
    for name in ("alpha", "beta", "gamma"):
        cleared = cleared.replace(f"[workers.{name}]", f'[workers.{name}]\nclearance = ["phi"]')
    rule = '[tiers.baton-mini.approval]\nworkers = ["alpha"]\nseconds = 1\non_expiry = "fallback-plan"\n\n'
    cleared = cleared.replace("[tiers.baton-ultra]", rule + "[tiers.baton-ultra]")
    async with running_service(tmp_path, cleared) as runtime:
        asking = await finish(await runtime.runs.start(order(runtime, "baton-mini", labels=frozenset({"phi"}))))
        assert asking.ended.state.state == "awaiting_approval"
        uncleared = cleared.replace('[workers.beta]\nclearance = ["phi"]', "[workers.beta]")
        reload(runtime, tmp_path, uncleared.replace('[workers.gamma]\nclearance = ["phi"]', "[workers.gamma]"))
        assert (await await_ended_row(runtime.context.store, asking.ended.state.run)).state == "failed"


async def test_a_request_that_came_before_its_tier_left_it_is_refused(stub: ProviderStub, tmp_path: Path) -> None:
    usual = pool_text(stub)
    async with running_service(tmp_path, usual) as runtime:
        before = order(runtime, "baton-mini")
        reload(runtime, tmp_path, usual.replace("[tiers.baton-mini]", "[tiers.other]"))
        with pytest.raises(NotFound) as refusal:
            await runtime.runs.start(before)
    assert refusal.value.public_code == "model_not_found"


async def test_a_run_whose_tier_leaves_it_while_the_run_is_taken_over_is_left_to_others_at_once(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = pool_text(stub)
    async with running_service(tmp_path, usual, drives=False) as gateway:
        run = (await gateway.runs.start(order(gateway, "baton-mini", followed=False))).run
    async with running_service(tmp_path, usual, {"BATON_LEASE_SECONDS": "60"}) as runtime:
        take_over, without_tier = SqlStore.take_over, usual.replace("[tiers.baton-mini]", "[tiers.other]")

        async def take_over_and_reload(*arguments: Any) -> tuple[RunRow, ...]:
            rows = await take_over(*arguments)
            reload(runtime, tmp_path, without_tier)
            return rows

        with monkeypatch.context() as patch:
            patch.setattr(SqlStore, "take_over", take_over_and_reload)
            await until(lambda: "Runs wait for an engine that knows their tier" in caplog.text)
        reload(runtime, tmp_path, usual)
        assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_the_fallback_answers_where_a_worker_of_the_callers_plan_has_left_it(
    stub: ProviderStub, tmp_path: Path
) -> None:
    usual = pool_text(stub)
    plan = {"steps": [{"worker": "gamma", "subtask": "Answer.", "access": ["user"]}]}
    async with running_service(tmp_path, usual, drives=False) as gateway:
        run = (await gateway.runs.start(order(gateway, "baton-mini", plan=plan, followed=False))).run
    async with running_service(tmp_path, usual.replace("gamma", "delta")) as engine:
        row = await await_ended_row(engine.context.store, run)
        rejected = bodies_of(await events(engine, run), Kind.PLAN_REJECTED)
    assert (row.state, row.degraded) == ("succeeded", True)
    assert {reason for plan in rejected for reason in plan["reasons"]} == {
        "a worker of the plan has left the pool file"
    }


async def test_a_model_that_conducts_no_more_is_asked_for_no_further_plan(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The auditor finds no call of a model that is not the tier's conductor in the pool file of that call."""
    script_plans(stub, "I would rather not.")
    usual, start = pool_text(stub), Planner.start
    async with running_service(tmp_path, usual) as runtime:
        replaced = usual.replace('worker = "planner"', 'worker = "gamma"')

        def reload_before_the_repair(planner: Planner, *arguments: Any) -> None:
            if arguments[2].mode == "repair":
                reload(runtime, tmp_path, replaced)
            start(planner, *arguments)

        monkeypatch.setattr(Planner, "start", reload_before_the_repair)
        followed_run = await runtime.runs.start(order(runtime, "baton-ultra"))
        assert (await finish(followed_run)).ended.error is None
        rejected = bodies_of(await events(runtime, followed_run.run), Kind.PLAN_REJECTED)
    assert rejected[1]["reasons"] == ["conductor_replaced"]
    assert len(stub.requests_for("planner")) == 1


async def test_no_step_is_left_out_of_a_plan_because_its_worker_lost_its_clearance_for_a_moment(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later steps would take its place, and their access lists would name others than the conductor meant."""
    script_answers(stub)
    stub.always("planner", Reply(chunks=(plan_text((0, "Draft.", ["user"]), (1, "Answer.", ["user", 0])),)))
    cleared = pool_text(stub)
    for name in ("alpha", "beta", "gamma", "planner"):
        cleared = cleared.replace(f"[workers.{name}]", f'[workers.{name}]\nclearance = ["phi"]')
    uncleared = cleared
    for name in ("alpha", "beta", "gamma"):
        uncleared = uncleared.replace(f'[workers.{name}]\nclearance = ["phi"]', f"[workers.{name}]")
    check = Planner._find_refusals
    async with running_service(tmp_path, cleared) as runtime:

        def check_without_clearance(*arguments: Any) -> list[str]:
            drafted = arguments[-1]
            if not drafted:
                reload(runtime, tmp_path, uncleared)
            refused = check(*arguments)
            reload(runtime, tmp_path, cleared)
            return refused

        monkeypatch.setattr(Planner, "_find_refusals", check_without_clearance)
        limits = limits_with(runtime, "baton-ultra", rounds=1)
        phi = order(runtime, "baton-ultra", labels=frozenset({"phi"}), limits=limits)
        followed_run = await runtime.runs.start(phi)
        assert (await finish(followed_run)).ended.error is None
        planned = bodies_of(await events(runtime, followed_run.run), Kind.PLAN_STEP)
    assert [step["access"] for step in planned] == [["user"], ["user", 0]]


async def test_a_model_that_did_not_conduct_when_its_plan_was_opened_is_not_asked_for_it(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool file makes it the conductor once more before it is asked."""
    script_plans(stub, "I would rather not.")
    usual, start, propose = pool_text(stub), Planner.start, Planner.open
    async with running_service(tmp_path, usual) as runtime:

        async def reload_and_open(planner: Planner, *arguments: Any) -> Any:
            if arguments[1].mode == "repair":
                reload(runtime, tmp_path, usual.replace('worker = "planner"', 'worker = "gamma"'))
            return await propose(planner, *arguments)

        def reload_and_start(planner: Planner, *arguments: Any) -> None:
            reload(runtime, tmp_path, usual)
            start(planner, *arguments)

        monkeypatch.setattr(Planner, "open", reload_and_open)
        monkeypatch.setattr(Planner, "start", reload_and_start)
        followed_run = await runtime.runs.start(order(runtime, "baton-ultra"))
        assert (await finish(followed_run)).ended.error is None
    assert len(stub.requests_for("planner")) == 1


@pytest.mark.parametrize("tier", ["baton-ultra", "baton-deep"])
async def test_a_plan_names_the_workers_in_the_order_in_which_it_was_opened(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The pool file loses one of them, or gets one, after the opening is written and before the conductor is asked; the
    auditor would find that the plan is not what the conductor said."""
    script_answers(stub)
    stub.always("planner", Reply(chunks=(plan_text((0, "Draft.", ["user"]), (1, "Answer.", ["user", 0])),)))
    texts, start = cycle([pool_text(stub).replace("alpha", "delta"), pool_text(stub)]), Planner.start
    async with running_service(tmp_path, pool_text(stub)) as runtime:

        def reload_first(planner: Planner, *arguments: Any) -> None:
            reload(runtime, tmp_path, next(texts))
            start(planner, *arguments)

        monkeypatch.setattr(Planner, "start", reload_first)
        followed_run = await runtime.runs.start(order(runtime, tier))
        assert (await finish(followed_run)).ended.error is None
        assert bodies_of(await events(runtime, followed_run.run), Kind.PLAN_REJECTED) == []
