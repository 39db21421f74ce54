"""The selector over the real wiring: what it may choose, what the journal keeps of it, and what it learns."""

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from msgspec.structs import replace

from app.cli.runs.run_words import why
from app.core.pool.catalog import SelectorSpec, Tier
from app.core.pool.conductor_versions import Change
from app.core.rating import posterior
from app.core.rating.calibration import Trial
from app.core.rating.features import features, from_json, of_answer
from app.core.rating.posterior import BIAS
from app.core.run.events import Kind
from app.engine.conductors.ratings import CHANGED_WORKER, EXCHANGED_WORKERS, RatingReader, SelectorBeliefs, posterior_of
from app.errors import NotFound
from app.process.wiring import Runtime
from tests.engine.test_reloaded_pool import reload
from tests.harness.in_process import WORKER, client_of, events, plan_text, pool_text, running_service
from tests.stubs import Fail, ProviderStub, Reply

POOL = """
[providers.stub]
format = "openai"
base_url = "{url}"
options = {{ positional = "true" }}

{workers}

[tiers.baton-mini]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "selector", templates = ["answer", "answer-check"], checkers = ["gamma"] }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000 }}

[tiers.baton-twice]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "selector", templates = ["answer"], checkers = ["gamma"], explore = 1.0 }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000, rounds = 2 }}

[tiers.baton-ultra]
pool = ["alpha", "beta"]
conductor = {{ kind = "selector", templates = ["answer"], worker = "planner", explore = 1.0 }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000 }}
"""
QUESTION = "What is 2 + 2?"
ARMS = {f"answer {name}" for name in ("alpha", "beta", "gamma")}
ARMS |= {f"answer-check {name} gamma" for name in ("alpha", "beta", "gamma")}


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    bound = 'region = "eu"\nretention = "none"\nclearance = ["phi"]\n'
    workers = WORKER.format(name="planner")
    workers += "".join(WORKER.format(name=name) + bound for name in ("alpha", "beta", "gamma"))
    async with running_service(tmp_path, POOL.format(url=stub.vllm_url, workers=workers)) as running:
        yield running


async def ask(client: httpx.AsyncClient, text: str = "What is 2 + 2?", model: str = "baton-mini", **baton: Any) -> str:
    request_body = {"model": model, "messages": [{"role": "user", "content": text}], "baton": baton}
    reply = await client.post("/v1/chat/completions", json=request_body)
    assert reply.status_code == 200, reply.text
    return str(reply.headers["x-baton-run"])


async def decision(runtime: Runtime, run: str) -> dict[str, Any]:
    journal = await events(runtime, run)
    decision_body: dict[str, Any] = next(event.body["decision"] for event in journal if event.kind is Kind.PLAN_OPENED)
    return decision_body


async def test_a_decision_is_journaled_whole_before_anything_is_executed(
    runtime: Runtime, client: httpx.AsyncClient
) -> None:
    run = await ask(client)
    choice = await decision(runtime, run)
    assert (choice["layer"], choice["policy"]) == ("selector", "selector-3/baton-mini")
    assert set(choice["candidates"]) == ARMS
    assert sum(choice["candidates"].values()) == pytest.approx(1, abs=1e-12)
    assert choice["propensity"] == choice["candidates"][choice["action"]] > 0
    assert min(choice["candidates"].values()) >= 0.05 / len(ARMS)
    assert next(iter(choice["predicted"])) == choice["action"]
    assert set(choice["predicted"]) <= ARMS
    assert all(0 < prediction["success"] < 1 and prediction["usd"] > 0 for prediction in choice["predicted"].values())
    explained = (await client.get(f"/v1/runs/{run}/explain")).json()["shape"]["choice"]["alternatives"]
    assert len(explained) <= len(ARMS)
    assert [candidate["success"] for candidate in explained if candidate["action"] == choice["action"]] == [
        choice["predicted"][choice["action"]]["success"]
    ]
    journal = await events(runtime, run)
    planned = [event.body["worker"] for event in journal if event.kind is Kind.PLAN_STEP]
    assert planned == choice["action"].split(" ")[1:]
    kinds = [event.kind for event in journal]
    assert kinds.index(Kind.PLAN_OPENED) < kinds.index(Kind.CALL_INTENDED)
    contents = await runtime.context.store.contents(run, [choice["features"]])
    assert from_json(orjson.loads(contents[choice["features"]])) == features("What is 2 + 2?")


async def test_what_is_not_eligible_is_no_arm(runtime: Runtime, client: httpx.AsyncClient) -> None:
    pinned = await decision(runtime, await ask(client, pool={"pin": "beta"}))
    assert set(pinned["candidates"]) == {"answer beta", "answer-check beta beta"}
    denied = await decision(runtime, await ask(client, pool={"deny": ["gamma"]}))
    assert not any("gamma" in arm for arm in denied["candidates"])
    short = await decision(runtime, await ask(client, budget={"steps": 1}))
    assert set(short["candidates"]) == {f"answer {name}" for name in ("alpha", "beta", "gamma")}


async def test_who_forbids_to_explore_gets_the_best_with_certainty(runtime: Runtime, client: httpx.AsyncClient) -> None:
    choices = [await decision(runtime, await ask(client, explore=False)) for _ in range(3)]
    assert {decision["propensity"] for decision in choices} == {1.0}
    assert {(decision["explore"], decision["explored"]) for decision in choices} == {(0.0, False)}
    assert len({decision["action"] for decision in choices}) == 1


@pytest.mark.long
async def test_the_propensities_are_those_of_the_dice(runtime: Runtime, client: httpx.AsyncClient) -> None:
    choices = [await decision(runtime, await ask(client, model="baton-ultra", pool={"deny": []})) for _ in range(30)]
    assert {decision["explore"] for decision in choices} == {1.0}
    assert all(set(decision["candidates"].values()) == {1 / 3} for decision in choices)
    assert len(Counter(decision["action"] for decision in choices)) == 3, (
        "the chance that one is missing is 1 in 60,000"
    )


@pytest.mark.long
async def test_ratings_move_the_choice_and_survive_a_restart(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub, tmp_path: Path
) -> None:
    tier = runtime.pool.catalog().tiers["baton-mini"]
    for _ in range(30):
        run = await ask(client)
        action = (await decision(runtime, run))["action"]
        good = action == "answer beta"
        assert (await client.post(f"/v1/runs/{run}/feedback", json={"score": float(good)})).status_code == 200
        await runtime.ratings.learn(tier, spec_of(tier))
    choice = await decision(runtime, run := await ask(client))
    assert max(choice["candidates"], key=choice["candidates"].get) == "answer beta"
    assert choice["version"].partition("-")[0] == "30"
    body = (await client.get(f"/v1/runs/{run}")).json()
    assert body["proposals"][0]["decision"] == choice
    text = (tmp_path / "pool.toml").read_text()
    async with running_service(tmp_path, text) as again, client_of(again) as other:
        await again.ratings.learn(tier, spec_of(tier))
        anew = await decision(again, await ask(other))
        assert anew["version"] == choice["version"]


async def test_a_selector_that_serves_another_tier_learns_from_the_runs_of_that(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    store, tiers = runtime.context.store, runtime.pool.catalog().tiers
    at = runtime.context.now()
    await store.change(Change("change_1", at, "me", "tier baton-mini", "promoted", "tier baton-ultra"))
    await runtime.versions.look()
    stub.always("planner", Reply(chunks=(plan_text((0, "Answer", ["user"])),)))
    run = await ask(client)
    choice = await decision(runtime, run)
    assert (choice["policy"], "model" in choice["candidates"]) == ("selector-3/baton-ultra", True)
    assert (await client.post(f"/v1/runs/{run}/feedback", json={"score": 1.0})).status_code == 200
    for name in ("baton-mini", "baton-ultra"):
        await runtime.ratings.learn(tiers[name], spec_of(tiers[name]))
    ratings = [(await posterior_of(store, name, "acme")).ratings for name in ("baton-mini", "baton-ultra")]
    assert ratings == [0, 1]


@pytest.mark.long
async def test_what_a_tenant_rates_stays_with_it_over_restarts(
    runtime: Runtime, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Another tenant says the opposite of everything: the choices of the first stay as they were."""
    tier = runtime.pool.catalog().tiers["baton-mini"]
    async with client_of(runtime, "other", "other") as other:
        for caller, liked in ((client, "answer beta"), (other, "answer alpha")):
            for _ in range(12):
                run = await ask(caller)
                good = (await decision(runtime, run))["action"] == liked
                assert (await caller.post(f"/v1/runs/{run}/feedback", json={"score": float(good)})).is_success
            await runtime.ratings.learn(tier, spec_of(tier))
            if caller is client:
                before = await decision(runtime, await ask(client, explore=False))
        after = await decision(runtime, await ask(client, explore=False))
        theirs = await decision(runtime, await ask(other, explore=False))
    names = ("action", "version", "predicted")
    assert [after[name] for name in names] == [before[name] for name in names]
    assert theirs["version"] != after["version"]
    assert theirs["predicted"] != after["predicted"]
    exposition = runtime.context.telemetry.exposition().decode()
    assert 'baton_selector_ratings{tier="baton-mini"} 24.0' in exposition
    async with running_service(tmp_path, (tmp_path / "pool.toml").read_text()) as again, client_of(again) as caller:
        await again.ratings.learn(tier, spec_of(tier))
        anew = await decision(again, await ask(caller, explore=False))
        assert [anew[name] for name in names] == [before[name] for name in names]


@pytest.mark.long
async def test_all_tenants_learn_from_a_trusted_one_and_sources_and_keys_count_as_the_pool_file_says(
    runtime: Runtime, client: httpx.AsyncClient
) -> None:
    tier = runtime.pool.catalog().tiers["baton-mini"]
    spec = replace(spec_of(tier), trusted=("acme",), raters=(("robot", 0.0),), daily=3)
    for n in range(5):
        run = await ask(client)
        for source in ("robot", "human"):
            body = {"score": 0.0, "source": source}
            await client.post(f"/v1/runs/{run}/feedback", json=body)
        await runtime.ratings.learn(tier, spec)
        ratings = runtime.ratings._beliefs.of(tier.name, "other").published.posterior.ratings
        assert ratings == min(n + 1, 1), "of each pair one counts, and of one key three ratings a day"


@pytest.mark.long
async def test_what_was_learned_fades_without_new_ratings(runtime: Runtime, client: httpx.AsyncClient) -> None:
    tier = runtime.pool.catalog().tiers["baton-mini"]
    for _ in range(6):
        await client.post(f"/v1/runs/{await ask(client)}/feedback", json={"score": 0})
    clocks = [partial(later, runtime, days) for days in (0, 30)]
    readers = [RatingReader(replace(runtime.context, now=clock), SelectorBeliefs()) for clock in clocks]
    await readers[0].learn(tier, spec_of(tier))
    before = readers[0]._beliefs.of(tier.name, "acme").published.posterior.weights["base"][BIAS]
    for reader in (readers[1], readers[0]):
        await reader.learn(tier, spec_of(tier))
    for reader in readers:
        assert reader._beliefs.of(tier.name, "acme").ratings == 6
    bias = [reader._beliefs.of(tier.name, "acme").published.posterior.weights["base"][BIAS] for reader in readers]
    assert bias[0] == bias[1] != before, "both processes know the faded one"
    fresh = RatingReader(runtime.context, SelectorBeliefs())
    await fresh.learn(tier, spec_of(tier))
    assert fresh._beliefs.of(tier.name, "acme").published.posterior.weights["base"][BIAS] == bias[0]


def later(runtime: Runtime, days: float) -> float:
    """The time in so many days."""
    return runtime.context.now() + days * 86_400


@pytest.mark.long
async def test_processes_that_learn_at_once_come_to_the_same(runtime: Runtime, client: httpx.AsyncClient) -> None:
    tier = runtime.pool.catalog().tiers["baton-mini"]
    beliefs = [SelectorBeliefs() for _ in range(3)]
    learners = [RatingReader(runtime.context, belief) for belief in beliefs]
    for _ in range(3):
        for _ in range(2):
            await client.post(f"/v1/runs/{await ask(client)}/feedback", json={"thumbs": "up"})
        await asyncio.gather(*(learner.learn(tier, spec_of(tier)) for learner in learners))
    await asyncio.gather(*(learner.learn(tier, spec_of(tier)) for learner in learners))
    ratings = [belief.of(tier.name, "acme") for belief in beliefs]
    assert len({learner.published.version for learner in ratings}) == 1
    assert {learner.published.posterior.ratings for learner in ratings} == {6}, "each rating was learned once"


@pytest.mark.long
async def test_ratings_are_learned_once_and_signs_and_labels_never(runtime: Runtime, client: httpx.AsyncClient) -> None:
    tier = runtime.pool.catalog().tiers["baton-mini"]
    run = await ask(client)
    for body in ({"label": "odd"}, {"score": 0.2}, {"score": 0.2}, {"score": 0.8}, {"score": 1, "source": "other"}):
        await client.post(f"/v1/runs/{run}/feedback", json=body)
        await runtime.ratings.learn(tier, spec_of(tier))
    version = (await decision(runtime, await ask(client)))["version"]
    await runtime.ratings.learn(tier, spec_of(tier))
    assert (await decision(runtime, await ask(client)))["version"] == version
    assert runtime.context.telemetry.exposition().decode().count('baton_selector_ratings{tier="baton-mini"} 1.0') == 1


async def test_a_plan_that_was_not_carried_out_is_no_answer_to_learn_from(
    runtime: Runtime, client: httpx.AsyncClient
) -> None:
    tier = runtime.pool.catalog().tiers["baton-mini"]
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": QUESTION}]}
    plan = (await client.post("/v1/plans", json=body)).json()["id"]
    assert (await client.post(f"/v1/runs/{plan}/feedback", json={"score": 0})).is_success
    await runtime.ratings.learn(tier, spec_of(tier))
    assert 'baton_selector_ratings{tier="baton-mini"} 1.0' not in runtime.context.telemetry.exposition().decode()


async def test_a_rating_is_learned_of_the_worker_whose_output_it_is(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    """Of alpha, whose answer is empty, and not of beta, which is asked after it and is out."""
    tier = runtime.pool.catalog().tiers["baton-mini"]
    stub.always("alpha", Reply(chunks=()))
    stub.always("beta", Fail(status=400))
    action = ""
    while action != "answer alpha":
        run = await ask(client, pool={"deny": ["gamma"]}, budget={"steps": 1})
        action = (await decision(runtime, run))["action"]
    assert [request.json["model"] for request in stub.requests][-2:] == ["alpha", "beta"]
    assert (await client.post(f"/v1/runs/{run}/feedback", json={"score": 0})).is_success
    await runtime.ratings.learn(tier, spec_of(tier))
    learned = (await posterior_of(runtime.context.store, tier.name, "acme")).weights
    assert [part for part in learned if part.startswith("main:")] == ["main:alpha=alpha"]


@pytest.mark.parametrize("damage", ["body = 'no json'", "body = '{}'"])
async def test_a_rated_run_that_is_damaged_keeps_nobody_from_learning(
    stub: ProviderStub, tmp_path: Path, damage: str
) -> None:
    workers = "".join([WORKER.format(name=name) for name in ("planner", "alpha", "beta", "gamma")])
    text = POOL.format(url=stub.vllm_url, workers=workers)
    async with running_service(tmp_path, text, audits=False) as runtime, client_of(runtime) as client:
        tier = runtime.pool.catalog().tiers["baton-mini"]
        damaged, whole = await ask(client), await ask(client)
        for run in (damaged, whole):
            await client.post(f"/v1/runs/{run}/feedback", json={"score": 1})
        with closing(sqlite3.connect(tmp_path / "baton.db", timeout=30)) as database, database:
            database.execute(f"UPDATE events SET {damage} WHERE run = '{damaged}' AND kind = 'plan.opened'")
        await runtime.ratings.learn(tier, spec_of(tier))
        assert 'baton_selector_ratings{tier="baton-mini"} 1.0' in runtime.context.telemetry.exposition().decode()


async def test_a_tier_that_has_lost_its_selector_has_no_figure_of_ratings(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub, tmp_path: Path
) -> None:
    figure = 'baton_selector_ratings{tier="baton-mini"} 1.0'
    text = (tmp_path / "pool.toml").read_text()
    assert (await client.post(f"/v1/runs/{await ask(client)}/feedback", json={"score": 1})).is_success
    for pool, is_shown in ((text, True), (pool_text(stub), False), (text, True)):
        reload(runtime, tmp_path, pool)
        await runtime.ratings.look()
        assert (figure in runtime.context.telemetry.exposition().decode()) == is_shown


async def test_the_trials_of_a_calibration_are_what_it_begins_with(runtime: Runtime, client: httpx.AsyncClient) -> None:
    tier = runtime.pool.catalog().tiers["baton-mini"]
    for worker in tier.pool:
        for n in range(12):
            at = runtime.context.now() - 60 + n
            trial = Trial(worker, worker, "tasks-1", f"{n}", "numbers", "sum", 0, QUESTION, "run", at, 0, 0, 0)
            await runtime.context.store.note_trial(replace(trial, score=float(worker == "beta")))
    await runtime.ratings.learn(tier, spec_of(tier))
    choice = await decision(runtime, await ask(client, explore=False))
    assert choice["action"].split()[:2] in (["answer", "beta"], ["answer-check", "beta"])
    await runtime.ratings.learn(tier, spec_of(tier))
    assert (await decision(runtime, await ask(client)))["version"] == choice["version"], "no trial counts twice"


async def test_a_worker_that_joins_a_tier_begins_with_its_trials_of_before(
    runtime: Runtime, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    text = (tmp_path / "pool.toml").read_text()
    for place, worker in enumerate(("beta", "alpha", "gamma")):
        for n in range(12):
            at = runtime.context.now() - 60 + 12 * place + n
            trial = Trial(worker, worker, "tasks-1", f"{n}", "numbers", "sum", 0, QUESTION, "run", at, 0, 0, 0)
            await runtime.context.store.note_trial(replace(trial, score=float(worker == "beta")))
    for pool in (text.replace('pool = ["alpha", "beta", "gamma"]', 'pool = ["alpha", "gamma"]', 1), text, text):
        reload(runtime, tmp_path, pool)
        await runtime.ratings.look()
    choice = await decision(runtime, await ask(client, explore=False))
    assert choice["action"].split()[:2] in (["answer", "beta"], ["answer-check", "beta"])
    assert 'baton_selector_ratings{tier="baton-mini"} 36.0' in runtime.context.telemetry.exposition().decode()


async def test_a_change_that_all_tenants_learn_of_is_in_the_log(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(posterior, "RATINGS_UNTIL_SETTLED", 20.0)
    tier = runtime.pool.catalog().tiers["baton-mini"]
    for n in range(60):
        at = runtime.context.now() - 600 + n
        trial = Trial("beta", "beta", "tasks-1", f"{n}", "numbers", "sum", 0, QUESTION, "run", at, float(n < 40), 0, 0)
        await runtime.context.store.note_trial(trial)
    await runtime.ratings.learn(tier, spec_of(tier))
    (warning,) = [record for record in caplog.records if record.message == CHANGED_WORKER]
    assert warning.fields == {"tier": "baton-mini"}  # type: ignore[attr-defined]


async def test_an_exchange_of_two_workers_is_in_the_log_with_their_names(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(posterior, "FIRST_RATINGS", 40)
    tier = runtime.pool.catalog().tiers["baton-mini"]
    for n in range(100):
        worker, at = ("alpha", "beta")[n % 2], runtime.context.now() - 600 + n
        right = (worker == "alpha") == (n < 60)
        trial = Trial(worker, worker, "tasks-1", f"{n}", "numbers", "sum", 0, QUESTION, "run", at, float(right), 0, 0)
        await runtime.context.store.note_trial(trial)
    await runtime.ratings.learn(tier, spec_of(tier))
    (warning,) = [record for record in caplog.records if record.message == EXCHANGED_WORKERS]
    assert warning.fields == {"tier": "baton-mini", "worker": "alpha, beta"}  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if record.message == CHANGED_WORKER]


async def test_the_models_own_plan_is_no_arm_where_the_model_may_not_read_the_task(
    client: httpx.AsyncClient, runtime: Runtime, stub: ProviderStub
) -> None:
    for label in ("region:eu", "retention:none", "phi"):
        choice = await decision(runtime, await ask(client, model="baton-ultra", labels=[label]))
        assert sorted(choice["candidates"]) == ["answer alpha", "answer beta"]
    assert stub.requests_for("planner") == []


async def test_a_model_whose_ejection_is_over_is_asked_for_a_plan_again(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ejected two hours ago, and no time passes while the arms are drawn."""
    health, now = runtime.context.health, time.monotonic()
    monkeypatch.setattr(health, "_monotonic", lambda: now - 7_200.0)
    health.note_own_call("call_1", runtime.pool.catalog().workers["planner"], "misconfigured", now - 7_200.0, None)
    monkeypatch.setattr(health, "_monotonic", lambda: now)
    for _ in range(40):
        choice = await decision(runtime, await ask(client, model="baton-ultra"))
        if choice["action"] == "model":
            break
    assert choice["action"] == "model"
    assert stub.requests_for("planner")


async def test_the_models_own_plan_is_an_arm_where_it_may_be_asked(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    for _ in range(40):
        stub.script("planner", Reply(chunks=(plan_text((0, "Think", ["user"]), (1, "Answer", ["user", 0])),)))
        run = await ask(client, model="baton-ultra")
        stub.clear()
        choice = await decision(runtime, run)
        if choice["action"] == "model":
            break
    assert choice["action"] == "model"
    journal = await events(runtime, run)
    assert [event.body["subtask"] != "" for event in journal if event.kind is Kind.PLAN_STEP] == [True, True]
    kinds = [event.kind for event in journal]
    assert kinds.index(Kind.PLAN_OPENED) < kinds.index(Kind.CALL_INTENDED) < kinds.index(Kind.PLAN_STEP)
    rated = await client.post(f"/v1/runs/{run}/feedback", json={"score": 1})
    assert rated.status_code == 200
    tier = runtime.pool.catalog().tiers["baton-ultra"]
    await runtime.ratings.learn(tier, spec_of(tier))
    explanation = "\n".join(why((await client.get(f"/v1/runs/{run}")).json()))
    assert "the selector chose by what it has learned from ratings" in explanation
    assert "model, with probability 0.333 among 3 arms" in explanation
    assert "worker cards alone, before any rating" in explanation


def spec_of(tier: Tier) -> SelectorSpec:
    assert tier.conductor.selector is not None
    return tier.conductor.selector


async def decisions(runtime: Runtime, run: str) -> list[dict[str, Any]]:
    """The decisions of all rounds of a run."""
    journal = await events(runtime, run)
    return [event.body["decision"] for event in journal if event.kind is Kind.PLAN_OPENED]


@pytest.mark.long
async def test_what_becomes_of_an_answer_is_a_decision_of_its_own(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    """Accepted, checked by somebody who is shown it, or given anew by somebody who is not; each with its propensity,
    and each learned as what it was."""
    for name in ("alpha", "beta", "gamma"):
        stub.always(name, Reply(chunks=(f"Here {name} speaks.",)))
    tier = runtime.pool.catalog().tiers["baton-twice"]
    by_action: dict[str, list[dict[str, Any]]] = {}
    while len(by_action) < 3:
        request_body = {"model": "baton-twice", "messages": [{"role": "user", "content": QUESTION}]}
        reply = await client.post("/v1/chat/completions", json=request_body)
        run = reply.headers["x-baton-run"]
        first, second = await decisions(runtime, run)
        answering = first["action"].split()[1]
        others = {"alpha", "beta", "gamma"} - {answering}
        assert set(second["candidates"]) == {"accept", "recheck gamma", *(f"redo {name}" for name in others)}
        assert second["propensity"] == second["candidates"][second["action"]] == 0.25
        assert second["seed"] != first["seed"]
        contents = await runtime.context.store.contents(run, [second["features"]])
        looked_at = from_json(orjson.loads(contents[second["features"]]))
        assert looked_at == replace(features(QUESTION), answer=of_answer(f"Here {answering} speaks."))
        action, _, worker = second["action"].partition(" ")
        if action not in by_action:
            prompt = [str(request.json["messages"]) for request in stub.requests_for(worker or answering)][-1]
            assert (f"Here {answering} speaks." in prompt) is (action == "recheck")
            answer = reply.json()["choices"][0]["message"]["content"]
            assert answer == f"Here {worker or answering} speaks."
            await client.post(f"/v1/runs/{run}/feedback", json={"score": 1.0})
            await runtime.ratings.learn(tier, spec_of(tier))
            by_action[action] = [first, second]
    learned = (await posterior_of(runtime.context.store, "baton-twice", "acme")).weights
    assert "answered" in learned
    assert any(part.startswith("check:gamma") for part in learned)
    assert "template:recheck" in learned
    certain = await decisions(runtime, await ask(client, model="baton-twice", explore=False))
    assert [decision["propensity"] for decision in certain] == [1.0, 1.0]


async def test_an_answer_that_cannot_be_read_any_more_is_accepted(
    runtime: Runtime, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_not_found(*_: Any) -> Any:
        raise NotFound

    monkeypatch.setattr("app.engine.runs.planning.with_inputs", raise_not_found)
    choices = await decisions(runtime, await ask(client, model="baton-twice"))
    assert (choices[1]["action"], choices[1]["candidates"]) == ("accept", {"accept": 1.0})
