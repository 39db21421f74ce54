"""Shadows through the whole service: what is tried a second time, under whose limits, and how nobody notices it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.message.chat import Message, Task, Text, Tool, Toolbox
from app.core.pool.budgets import Budget, shadow_budget
from app.core.pool.policy import Overrides
from app.core.rating.economics import ReportOptions
from app.core.rating.evidence import ARM_KINDS, PolicyState, find_features_ref
from app.core.rating.feedback import Feedback
from app.core.rating.shadows import notes_from_json, policy_of, shadow_id
from app.core.run.kinds import Kind
from app.engine.conductors.versions import RequestedChange, make_change
from app.engine.runs.approvals import Decision
from app.engine.runs.registry import Drivers
from app.engine.runs.shadows import CLAIM_SECONDS, EVERY_SECONDS, MOST_AT_ONCE, Shadows
from app.errors import Overloaded
from app.gateway.openapi.report_replies import ShadowReport
from app.gateway.runs import reports
from app.process.wiring import Runtime
from app.store.protocol import PROCESS, RunQuery, RunRow, SpendQuery
from tests.engine.test_reloaded_pool import reload
from tests.harness.in_process import (
    ANSWERS,
    ask,
    await_ended_row,
    bodies_of,
    client_of,
    events,
    finish,
    order,
    plan_text,
    pool_text,
    running_service,
    script_answers,
    script_plans,
)
from tests.harness.waiting import until
from tests.stubs import Hang, ProviderStub, Reply


def pool_with_shadows(stub: ProviderStub, **shadow: Any) -> str:
    """A pool file in which all runs of `baton-mini` get a shadow."""
    settings = {"share": 1, "worker": "gamma"} | shadow
    if "tier" in shadow or "conductor" in shadow:
        del settings["worker"]
    lines = "".join(f"{name} = {_to_toml(value)}\n" for name, value in settings.items())
    return pool_text(stub) + f"\n[tiers.baton-mini.shadow]\n{lines}"


def _to_toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@asynccontextmanager
async def run_service_with_shadows(folder: Path, pool: str) -> AsyncIterator[tuple[Runtime, Shadows]]:
    """The service, and its task that starts shadows, which has taken its first look."""
    async with running_service(folder, pool) as runtime:
        shadows = Shadows(runtime.context, runtime.drivers)
        await shadows.look()
        yield runtime, shadows


async def answer_one_run(runtime: Runtime, tier: str = "baton-mini", **changes: Any) -> tuple[str, str]:
    """The id of a run, and what its caller was told."""
    tenant = changes.pop("tenant", "tenant")
    followed_run = await runtime.runs.start(replace(order(runtime, tier, **changes), tenant=tenant))
    text = "".join((await finish(followed_run)).texts)
    await await_ended_row(runtime.context.store, followed_run.run)
    return followed_run.run, text


async def shadow_of(runtime: Runtime, run: str) -> RunRow:
    """The row of a run's shadow, once it has ended."""
    return await await_ended_row(runtime.context.store, shadow_id(run))


async def counts(runtime: Runtime, tier: str = "baton-mini") -> dict[str, int]:
    """Return the outcomes of the tier's runs that were drawn for a shadow."""
    notes = await runtime.context.store.find_learned_state(policy_of(tier), 0)
    assert notes is not None
    return dict(notes_from_json(notes.body).since(0.0))


async def test_a_run_is_tried_a_second_time_once_it_has_ended(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            run, text = await answer_one_run(runtime, labels=frozenset())
            assert text == ANSWERS["alpha"]
            await shadows.look()
            row = await shadow_of(runtime, run)
            assert (row.origin_kind, row.origin_run, row.state, row.tenant) == ("shadow", run, "succeeded", "tenant")
            assert stub.requests_for("gamma")[-1].json["messages"] == stub.requests_for("alpha")[-1].json["messages"]
            assert row.spent.usd > 0
            use = await runtime.context.store.budget_use(shadow_budget("baton-mini", 0).id, 1)
            assert use[0].spent == row.spent.usd
            await shadows.look()
            await shadows.look()
            rows = await runtime.context.store.runs(RunQuery(origin_run=run))
            assert [run.id for run in rows] == [row.id]
            assert await counts(runtime) == {"started": 1}


async def test_a_tier_that_has_lost_its_shadow_has_no_figure_of_runs_that_wait(
    tmp_path: Path,
) -> None:
    async with (
        ProviderStub() as stub,
        run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows),
    ):
        assert 'baton_shadows_waiting{tier="baton-mini"} 0.0' in runtime.context.telemetry.exposition().decode()
        reload(runtime, tmp_path, pool_text(stub))
        await shadows.look()
        assert "baton_shadows_waiting{" not in runtime.context.telemetry.exposition().decode()


@pytest.mark.long
async def test_a_shadow_that_hangs_or_fails_changes_nothing_for_callers(tmp_path: Path) -> None:
    """Also while shadows hang in as many slots as they may have, callers are answered by their own worker."""
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("gamma", Hang())
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            first = [await answer_one_run(runtime) for _ in range(MOST_AT_ONCE + 1)]
            await shadows.look()
            await until(lambda: len(stub.requests_for("gamma")) == MOST_AT_ONCE)
            assert [text for _, text in [*first, await answer_one_run(runtime)]] == [ANSWERS["alpha"]] * (
                MOST_AT_ONCE + 2
            )
            await shadows.look()
            assert len(stub.requests_for("gamma")) == MOST_AT_ONCE
            journal = await events(runtime, first[0][0])
            assert not [event for event in journal if "gamma" in str(event.body.get("worker"))]
            assert await counts(runtime) == {"started": MOST_AT_ONCE}
            for run, _ in first[:MOST_AT_ONCE]:
                runtime.runs.cancellations.ask(shadow_id(run), "operator")
                assert (await shadow_of(runtime, run)).state == "cancelled"


@pytest.mark.long
async def test_a_shadow_is_started_only_while_the_engine_is_quiet(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            run, _ = await answer_one_run(runtime)
            stub.always("alpha", Hang())
            busy = [await runtime.runs.start(order(runtime, "baton-mini")) for _ in range(33)]
            await until(lambda: not runtime.drivers.is_quiet)
            await shadows.look()
            assert await counts(runtime) == {}
            for followed_run in busy:
                runtime.runs.cancellations.ask(followed_run.run, "caller")
            for followed_run in busy:
                await finish(followed_run)
            await until(lambda: runtime.drivers.is_quiet)
            await shadows.look()
            assert (await shadow_of(runtime, run)).state == "succeeded"


async def test_a_shadow_waits_until_its_run_has_ended(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("alpha", Hang())
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
            await until(lambda: bool(stub.requests_for("alpha")))
            await shadows.look()
            assert (await counts(runtime), stub.requests_for("gamma")) == ({}, [])
            runtime.runs.cancellations.ask(followed_run.run, "caller")
            await await_ended_row(runtime.context.store, followed_run.run)
            await shadows.look()
            assert await counts(runtime) == {"cancelled": 1}


async def test_a_full_queue_drops_shadows_and_no_run(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub, max_waiting=2)) as (runtime, shadows):
            runs = [await answer_one_run(runtime) for _ in range(3)]
            assert [text for _, text in runs] == [ANSWERS["alpha"]] * 3
            await shadows.look()
            assert await counts(runtime) == {"queue_full": 1, "started": 2}
            assert 'baton_shadows_total{outcome="queue_full",tier="baton-mini"} 1.0' in metrics(runtime)
            for run, _ in runs[:2]:
                await shadow_of(runtime, run)


@pytest.mark.long
async def test_a_spent_budget_drops_shadows_and_no_run(tmp_path: Path) -> None:
    """20 micro-dollars do not pay for a call: the shadow that finds them ends, and once they are spent none begins."""
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub, usd_per_day="0.000020")) as (
            runtime,
            shadows,
        ):
            run, text = await answer_one_run(runtime)
            await shadows.look()
            row = await shadow_of(runtime, run)
            assert (text, row.state, row.spent.usd, stub.requests_for("gamma")) == (
                ANSWERS["alpha"],
                "over_budget",
                0,
                [],
            )
            await runtime.context.store.remove_budget(shadow_budget("baton-mini", 0).id, by=PROCESS)
            run, _ = await answer_one_run(runtime)
            await shadows.look()
            row = await shadow_of(runtime, run)
            assert (row.state, stub.requests_for("gamma")) == ("over_budget", []), "it is set again for the next shadow"
        (tmp_path / "spent").mkdir()
        async with run_service_with_shadows(tmp_path / "spent", pool_with_shadows(stub, usd_per_day=0)) as (
            runtime,
            shadows,
        ):
            run, text = await answer_one_run(runtime)
            await shadows.look()
            assert (text, await counts(runtime)) == (ANSWERS["alpha"], {"budget": 1})
            assert not await runtime.context.store.runs(RunQuery(origin_run=run))


async def test_labels_bind_a_shadow_as_they_bind_a_run(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        pool = pool_with_shadows(stub).replace('model = "alpha"\n', 'model = "alpha"\nclearance = ["secret"]\n')
        async with run_service_with_shadows(tmp_path, pool) as (runtime, shadows):
            await answer_one_run(runtime, labels=frozenset({"secret"}))
            await shadows.look()
            assert (await counts(runtime), stub.requests_for("gamma")) == ({"labels": 1}, [])


async def test_a_worker_that_the_request_denies_is_none_of_its_shadow(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            await answer_one_run(runtime, overrides=Overrides(deny=frozenset({"gamma"})))
            await answer_one_run(runtime, overrides=Overrides(allow=frozenset({"alpha"})))
            await answer_one_run(runtime, overrides=Overrides(pin="alpha"))
            await answer_one_run(runtime, shadow=False)
            await shadows.look()
            assert (await counts(runtime), stub.requests_for("gamma")) == ({"no_worker": 3, "opted_out": 1}, [])


async def test_a_request_with_a_plan_of_its_own_gets_no_shadow(tmp_path: Path) -> None:
    """Whatever serves the tier, its plan stays what it is: so do those of `baton calibrate`."""
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            await answer_one_run(runtime, plan={"steps": [{"worker": "alpha", "subtask": "", "access": ["user"]}]})
            await shadows.look()
            assert (await counts(runtime), stub.requests_for("gamma")) == ({"own_plan": 1}, [])


async def test_what_nobody_has_approved_is_shown_to_no_shadow(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            runs = []
            for verdict in ("refuse", "approve"):
                followed_run = await runtime.runs.start(order(runtime, "baton-mini", approval=True))
                runs.append(followed_run.run)
                await until(lambda: not len(runtime.drivers))
                approval = bodies_of(await events(runtime, followed_run.run), Kind.AWAITING_APPROVAL)[0]
                decision = Decision(verdict=verdict, digest=approval["digest"], by="key:boss", key="")  # type: ignore[arg-type]
                await runtime.runs.decide(followed_run.run, None, decision)
                await await_ended_row(runtime.context.store, followed_run.run)
            await shadows.look()
            assert await counts(runtime) == {"not_approved": 1, "started": 1}
            await until(lambda: not len(runtime.drivers))
            row = await runtime.context.store.run(shadow_id(runs[1]))
            assert (row.state, stub.requests_for("gamma")) == ("awaiting_approval", [])


async def test_a_worker_that_the_tiers_approval_names_does_not_plan_its_shadows(tmp_path: Path) -> None:
    """It would read the task before there is a plan that somebody could approve."""
    rule = '[tiers.baton-mini.approval]\nworkers = ["gamma"]\n'
    async with ProviderStub() as stub:
        script_answers(stub)
        pool = pool_with_shadows(stub, tier="baton-ultra") + rule
        pool = pool.replace('worker = "planner"', 'worker = "gamma"')
        async with run_service_with_shadows(tmp_path, pool) as (runtime, shadows):
            await answer_one_run(runtime)
            await shadows.look()
            assert (await counts(runtime), stub.requests_for("gamma")) == ({"not_approved": 1}, [])


async def test_a_run_that_a_fallback_answered_since_nobody_approved_its_plan_gets_no_shadow(tmp_path: Path) -> None:
    rule = '[tiers.baton-mini.approval]\nworkers = ["alpha"]\nseconds = 0.01\non_expiry = "fallback-plan"\n'
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub) + rule) as (runtime, shadows):
            run, _ = await answer_one_run(runtime)
            row = await runtime.context.store.run(run)
            assert (row.state, row.error) == ("succeeded", None), "beta has answered"
            await shadows.look()
            assert (await counts(runtime), stub.requests_for("gamma")) == ({"not_approved": 1}, [])


async def test_a_request_with_tools_is_only_planned_a_second_time(tmp_path: Path) -> None:
    """Nobody would answer the calls of the shadow's workers."""
    async with ProviderStub() as stub:
        script_answers(stub)
        script_plans(stub, plan_text((2, "Solve it.", ["user"])))
        tool = Tool("clock", "Tells the time.", {"type": "object", "properties": {}})
        task = Task((Message("user", (Text("What time is it?"),)),), toolbox=Toolbox((tool,)))
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub, tier="baton-ultra")) as (
            runtime,
            shadows,
        ):
            run, _ = await answer_one_run(runtime, task=task)
            before = len(stub.requests)
            await shadows.look()
            row = await shadow_of(runtime, run)
            assert [request.json["model"] for request in stub.requests[before:]] == ["planner"]
            (admitted,) = bodies_of(await events(runtime, row.id), Kind.ADMITTED)
            assert (row.state, row.tier, admitted["preview"]) == ("succeeded", "baton-ultra", True)


@pytest.mark.long
async def test_a_version_conducts_the_shadow_and_no_live_run(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        for model in ("planner", "planner@1"):
            stub.always(model, Reply(chunks=(plan_text((0, "Solve it.", ["user"])),)))
        pool = pool_text(stub) + '\n[tiers.baton-ultra.shadow]\nconductor = "planner@1"\nshare = 1\nmode = "plan"\n'
        async with run_service_with_shadows(tmp_path, pool) as (runtime, shadows):
            run, _ = await answer_one_run(runtime, "baton-ultra")
            await shadows.look()
            row = await shadow_of(runtime, run)
            (intent,) = bodies_of(await events(runtime, row.id), Kind.CALL_INTENDED)
            assert (intent["worker"], intent["version"], row.state) == ("planner", "planner@1", "succeeded")
            assert "version" not in bodies_of(await events(runtime, run), Kind.CALL_INTENDED)[0]


async def test_a_run_that_a_version_has_planned_gets_no_shadow_under_that_version(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        for model in ("planner", "planner@1"):
            stub.always(model, Reply(chunks=(plan_text((0, "Solve it.", ["user"])),)))
        pool = pool_text(stub) + '\n[tiers.baton-ultra.shadow]\nconductor = "planner@1"\nshare = 1\n'
        async with run_service_with_shadows(tmp_path, pool) as (runtime, shadows):
            for kind in ("loaded", "promoted"):
                change = RequestedChange("planner", kind, "planner@1")  # type: ignore[arg-type]
                await make_change(runtime.context.store, change, name=kind, by=PROCESS)
            await runtime.versions.look()
            await answer_one_run(runtime, "baton-ultra")
            await shadows.look()
            assert await counts(runtime, "baton-ultra") == {"served": 1}


async def test_an_engine_that_was_killed_leaves_one_shadow_at_most(tmp_path: Path) -> None:
    """It was killed between the admission of the shadow and the note of it: what waits is found again, and claimed
    already. A shadow that was admitted is taken over like any run."""
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            runs = [(await answer_one_run(runtime))[0] for _ in range(2)]
            store = runtime.context.store
            unnoted = await store.find_learned_state(policy_of("baton-mini"), 0)
            await shadows.look()
            for run in runs:
                await shadow_of(runtime, run)
            noted = await store.find_learned_state(policy_of("baton-mini"), 0)
            assert unnoted is not None
            assert noted is not None
            again = PolicyState(noted.number + 1, unnoted.body)
            assert await store.learn(policy_of("baton-mini"), again, runtime.context.now())
            await shadows.look()
            assert (len(stub.requests_for("gamma")), await counts(runtime)) == (2, {"started": 2})
            assert len(await store.runs(RunQuery(origin_kind="shadow"))) == 2


async def test_a_shadow_that_an_engine_begins_as_it_stops_is_left_to_another(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_answers(stub)

    async def refuse(*_: object) -> None:
        raise Overloaded

    async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
        run, _ = await answer_one_run(runtime)
        with monkeypatch.context() as patch:
            patch.setattr(runtime.drivers, "admit", refuse)
            await shadows.look()
        await shadows.look()
        assert (await shadow_of(runtime, run)).state == "succeeded"
        assert await counts(runtime) == {"started": 1}


@pytest.mark.parametrize("is_quiet", [True, False])
async def test_an_engine_without_room_for_shadows_lets_another_one_start_them(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_quiet: bool
) -> None:
    async with running_service(tmp_path, pool_with_shadows(stub)) as runtime:
        began = now = runtime.context.now()
        context = replace(runtime.context, now=lambda: now)
        one, other = Shadows(context, runtime.drivers), Shadows(context, runtime.drivers)
        with monkeypatch.context() as patch:
            patch.setattr(Drivers, "is_quiet", is_quiet)
            for seconds in (0.0, EVERY_SECONDS, CLAIM_SECONDS - 0.1):
                now = began + seconds
                await one.look()
        now = began + CLAIM_SECONDS
        assert await other._leadership.acquire() is not is_quiet


async def test_nobody_is_billed_for_a_shadow_and_nothing_is_learned_from_it(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows):
            store = runtime.context.store
            await store.set_budget(Budget("tenant", "tenant", "", "day", 1_000_000))
            run, _ = await answer_one_run(runtime)
            live = (await store.run(run)).spent.usd
            await shadows.look()
            row = await shadow_of(runtime, run)
            rating = Feedback("rating", row.id, "tenant", "key", 1.0, "grader", "exact", "1", 1.0)
            assert await store.find_rated_runs([rating], ARM_KINDS, find_features_ref) == ()
            (use,) = await store.budget_use("tenant/tenant/-/day", 1)
            (spent,) = await store.spending(SpendQuery(since=0.0, until=row.created_at + 1, tenant="tenant"))
            assert (use.spent, spent.usd, spent.runs) == (live, live, 1)
            assert f'baton_tenant_cost_micro_usd_total{{tenant="tenant"}} {float(live)}' in metrics(runtime)
            report = await reports.make(store, store, RunQuery(), ReportOptions(), UTC)
            assert (report["total"]["runs"], report["left_out"]["shadows"]) == (1, 1)


def metrics(runtime: Runtime) -> str:
    """The metrics of the process."""
    return runtime.context.telemetry.exposition().decode()


async def test_an_erasure_of_a_run_reaches_its_shadow(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with (
            run_service_with_shadows(tmp_path, pool_with_shadows(stub)) as (runtime, shadows),
            client_of(runtime) as client,
        ):
            run, _ = await answer_one_run(runtime, tenant="acme")
            other, _ = await answer_one_run(runtime, tenant="acme")
            await shadows.look()
            for shadow_run in (run, other):
                assert not (await shadow_of(runtime, shadow_run)).erased
            assert (await client.delete(f"/v1/runs/{run}")).status_code == 200
            store = runtime.context.store
            assert [(await store.run(shadow_id(name))).erased for name in (run, other)] == [True, False]


async def read_report(client: httpx.AsyncClient) -> dict[str, Any]:
    """The report on the shadows of `baton-mini`."""
    reply = await client.get("/v1/shadows/report?tier=baton-mini")
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    assert ShadowReport.model_validate(body).tier == "baton-mini"
    return body


@pytest.mark.long
async def test_a_shadow_whose_plan_nobody_approves_says_nothing_about_the_candidate(tmp_path: Path) -> None:
    rule = "[tiers.baton-again.approval]\nalways = true\nseconds = 0.01\n"
    async with ProviderStub() as stub:
        script_answers(stub)
        text = pool_with_shadows(stub, tier="baton-again") + rule
        async with (
            run_service_with_shadows(tmp_path, text) as (runtime, shadows),
            client_of(runtime) as client,
        ):
            run, _ = await answer_one_run(runtime, tenant="acme")
            await shadows.look()
            assert (await shadow_of(runtime, run)).error == "approval_expired"
            (candidate,) = (await read_report(client))["candidates"]
            assert (candidate["pairs"], candidate["unfinished"]) == (0, 1)


async def test_the_report_compares_runs_with_their_shadows(tmp_path: Path) -> None:
    """Two of three answers agree, and graders have judged one pair: a user who asked twice counts once."""
    pool_end = "\n[tiers.baton-mini.promotion]\nmin_pairs = 2\nmax_cost_increase = 0.5\nmin_success_difference = -0.1\n"
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("gamma", Reply(chunks=(" the  DRAFT",)))
        async with (
            run_service_with_shadows(tmp_path, pool_with_shadows(stub) + pool_end) as (runtime, shadows),
            client_of(runtime) as client,
        ):
            empty = await read_report(client)
            (candidate,) = empty["candidates"]
            assert (candidate["subject"], candidate["pairs"], candidate["figures"]) == ("worker gamma", 0, [])
            assert (candidate["promotable"], [of["outcome"] for of in candidate["conditions"]]) == (False, ["open"] * 3)
            runs = []
            for user in ("ann", "ann", "bob"):
                task = Task((Message("user", (Text("What is 2 + 2?"),)),), user=user)
                runs.append((await answer_one_run(runtime, task=task, tenant="acme"))[0])
            await answer_one_run(runtime, tenant="other")
            await ask(client, baton={"shadow": False})
            await shadows.look()
            assert await counts(runtime) == {"started": 4, "opted_out": 1}
            rows = [await shadow_of(runtime, run) for run in runs]
            for number, (run, score) in enumerate(((runs[2], 1.0), (rows[2].id, 0.0))):
                rating = Feedback(f"rating_{number}", run, "acme", "", 1.0, "grader", "exact", "1", score)
                await runtime.context.store.rate(rating)
            report = await read_report(client)
            (candidate,) = report["candidates"]
            assert (report["drawn"], candidate["pairs"], candidate["unfinished"]) == (None, 3, 0)
            figures = {of["name"]: of for of in candidate["figures"]}
            assert figures["agreement"]["candidate"] == 1.0
            assert (figures["agreement"]["count"], figures["agreement"]["users"]) == (2, 1)
            success = figures["success"]
            assert (success["count"], success["live"], success["candidate"]) == (1, 1.0, 0.0)
            assert success["difference"] == {"value": -1.0, "low": -1.0, "high": 1.0}
            assert figures["cost_usd"]["relative"]["high"] is None
            assert figures["recipients"]["difference"]["value"] == 0
            assert candidate["new_recipients"] == {"gamma": 3}
            outcomes = {of["name"]: of["outcome"] for of in candidate["conditions"]}
            assert outcomes.pop("min_answered_difference") == "holds"
            assert outcomes == {"min_pairs": "holds", "min_success_difference": "open", "max_cost_increase": "open"}
            assert candidate["promotable"] is False
            assert (await client.get("/v1/shadows/report?tier=gone")).status_code == 404
