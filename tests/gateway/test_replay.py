"""Replays over the real wiring: what is called again and what is kept, what is refused, and how two runs compare. The
auditor reads every journal."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.run.retention_classes import RunClass
from app.engine.runs import replays
from app.errors import Overloaded, StoreUnavailable
from app.gateway.http.api_keys import mint
from app.gateway.runs import cancel
from app.process.wiring import Runtime
from app.store.protocol import CONTENT_READ, AdminEventQuery, ContentQuery
from tests.harness.callers import add_key
from tests.harness.in_process import (
    ANSWERS,
    await_ended_row,
    client_of,
    plan_text,
    pool_text,
    running_service,
    script_answers,
    script_plans,
)
from tests.harness.waiting import until
from tests.stubs import Fail, Hang, ProviderStub, ReceivedRequest, Reply, ToolCall

CHAIN = plan_text((0, "Draft it", ["user"]), (1, "Answer it", [0]))
EMPTY = '{"steps": []}'
MEND = plan_text((2, "Mend it", ["previous"]))
NESTED = plan_text((0, "Draft it", ["user"]), (3, "Take it apart", [0]), (1, "Put it together", ["user", 1]))
INNER = plan_text((1, "Look at it", ["user"]), (2, "Say it", ["user", 0]))
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SECONDS = 20


@pytest.fixture(autouse=True)
def script_all_answers(stub: ProviderStub) -> None:
    script_answers(stub)


async def answer_one_run(client: httpx.AsyncClient, model: str = "baton-ultra", **more: Any) -> str:
    """Return a run that has ended."""
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    reply = await client.post("/v1/chat/completions", json={"model": model, "messages": messages} | more)
    assert reply.status_code == 200, reply.text
    return str(reply.headers["x-baton-run"])


async def replay(client: httpx.AsyncClient, run: str, **changes: Any) -> httpx.Response:
    return await client.post(f"/v1/runs/{run}/replay", json={"wait": SECONDS} | changes)


async def replay_run(client: httpx.AsyncClient, run: str, **changes: Any) -> dict[str, Any]:
    """Return the record of a replay that has succeeded."""
    reply = await replay(client, run, **changes)
    assert reply.status_code == 200, reply.text
    assert reply.json()["state"] == "succeeded", reply.text
    body = (await client.get(f"/v1/runs/{reply.json()['id']}")).json()
    assert body["origin"] == {"kind": "replay", "run": run}
    return dict(body)


async def compare_runs(client: httpx.AsyncClient, first: str, second: str) -> dict[str, Any]:
    reply = await client.get(f"/v1/runs/{first}/compare/{second}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def list_called_models(stub: ProviderStub) -> list[str]:
    return [received.model for received in stub.requests]


def code(reply: httpx.Response) -> tuple[int, str | None]:
    return reply.status_code, reply.json()["error"]["code"]


async def test_without_changes_the_same_workers_see_the_same_and_no_conductor_is_asked(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    script_plans(stub, CHAIN)
    run = await answer_one_run(client)
    before = list_called_models(stub)
    assert len(before) == 3
    stub.requests.clear()
    again = await replay_run(client, run)
    assert list_called_models(stub) == before[1:], "the workers as planned"
    assert again["conductor"] == "replay"
    comparison = await compare_runs(client, run, again["id"])
    assert comparison["same_answer"] is True
    assert [(step["step"], step["same_subtask"], step["same_output"]) for step in comparison["steps"]] == [
        ("1.0", True, True),
        ("1.1", True, True),
    ]
    assert comparison["disclosures"]["both"] == 2
    assert comparison["disclosures"]["only_second"] == []
    assert [recipient["role"] for recipient in comparison["disclosures"]["only_first"]] == ["conductor"]


@pytest.mark.long
async def test_rounds_and_nested_workflows_are_repeated_as_they_were_accepted(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    script_plans(stub, CHAIN, MEND, EMPTY)
    run = await answer_one_run(client, "baton-deep")
    before = [worker for worker in list_called_models(stub) if worker != "planner"]
    stub.requests.clear()
    again = await replay_run(client, run)
    assert list_called_models(stub) == before
    assert again["rounds"] == 2
    assert (await compare_runs(client, run, again["id"]))["disclosures"]["only_second"] == []
    stub.requests.clear()
    script_plans(stub, NESTED, INNER, EMPTY)
    run = await answer_one_run(client, "baton-nested")
    before = [worker for worker in list_called_models(stub) if worker != "planner"]
    assert len(before) == 4
    stub.requests.clear()
    again = await replay_run(client, run)
    assert list_called_models(stub) == before
    comparison = await compare_runs(client, run, again["id"])
    assert [step["step"] for step in comparison["steps"]] == ["1.0", "1.1", "1.1.0", "1.1.1", "1.2"]
    assert comparison["disclosures"]["only_second"] == []


async def test_a_step_of_the_conductors_that_never_had_a_plan_cannot_be_repeated(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    """Nobody is asked for one in a replay, so that it would wait for a plan until its time is over."""
    script_plans(stub, NESTED)
    for name in ANSWERS:
        stub.always(name, Fail(status=404))
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    failed = await client.post("/v1/chat/completions", json={"model": "baton-nested", "messages": messages})
    assert failed.status_code == 502
    script_answers(stub)
    refused = await replay(client, str(failed.headers["x-baton-run"]), wait=1)
    assert code(refused) == (400, "not_replayable")
    assert "before 1.1 had a plan" in refused.json()["error"]["message"]


async def test_from_a_step_on_the_outputs_before_are_kept_and_the_journal_names_their_source(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    script_plans(stub, CHAIN)
    run = await answer_one_run(client)
    [first, *_] = (await client.get(f"/v1/runs/{run}")).json()["steps"]
    source_events = (await client.get(f"/v1/runs/{run}/events")).json()["data"]
    [ref] = [
        event["body"]["output"] for event in source_events if event["kind"] == "step.done" and event["body"]["n"] == 0
    ]
    stub.requests.clear()
    again = await replay_run(client, run, from_step=1, worker="gamma")
    assert list_called_models(stub) == ["gamma"]
    assert ANSWERS[first["worker"]] in json.dumps(stub.requests[0].json), "it reads the output that was kept"
    events = (await client.get(f"/v1/runs/{again['id']}/events")).json()["data"]
    [kept_step] = [event["body"] for event in events if event["kind"] == "step.done" and event["body"]["n"] == 0]
    assert (kept_step["origin_run"], kept_step["origin_step"], kept_step["origin_output"]) == (run, 0, ref)
    assert kept_step["output"] != ref, "every run has its own salt"
    assert again["steps"][0]["attempts"] == []
    assert [step["kept_from"] for step in again["steps"]] == [{"run": run, "step": 0}, None]
    body = (await client.get(f"/v1/runs/{again['id']}/explain")).json()
    assert body["shape"]["decided_by"] == "repeated_plan"
    reply_body = (await client.get(f"/v1/runs/{again['id']}/steps/0")).json()
    assert reply_body["output"] == ANSWERS[first["worker"]]


@pytest.mark.long
async def test_another_plan_a_single_worker_or_another_tier(client: httpx.AsyncClient, stub: ProviderStub) -> None:
    script_plans(stub, CHAIN)
    run = await answer_one_run(client)
    stub.requests.clear()
    steps = [{"worker": "gamma", "subtask": "Say it", "access": ["user"]}]
    await replay_run(client, run, plan={"steps": steps})
    await replay_run(client, run, worker="beta")
    again = await replay_run(client, run, model="baton-mini")
    assert list_called_models(stub) == ["gamma", "beta", "alpha"]
    assert (again["tier"], again["conductor"]) == ("baton-mini", "fixed")


def calls(query: str) -> Reply:
    return Reply(chunks=(), tool_calls=(ToolCall("look", json.dumps({"q": query}), "their-1"),), finish="tool")


async def record_tool_results(client: httpx.AsyncClient, stub: ProviderStub, **first_only: str) -> str:
    """Return a run that has called a tool and was given its result. Its worker would do the same once more. The first
    request has `first_only` in addition."""
    for _ in range(2):
        stub.script("alpha", calls("a"), Reply(chunks=("It is 42.",)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 2?"}]
    request_body = {"model": "baton-mini", "tools": [LOOK]}
    first = await client.post("/v1/chat/completions", json=request_body | {"messages": messages} | first_only)
    message = first.json()["choices"][0]["message"]
    messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "The result."}]
    await client.post("/v1/chat/completions", json=request_body | {"messages": messages})
    stub.requests.clear()
    return str(first.headers["x-baton-run"])


@pytest.mark.parametrize("error", [StoreUnavailable(), Overloaded(), IndexError("a bug")])
async def test_recorded_tool_results_that_cannot_be_given_at_once_are_given_later(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    errors, find_results = [error], replays.results

    async def fail_once(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return await find_results(*arguments)

    monkeypatch.setattr(replays, "results", fail_once)
    settings = {"BATON_LEASE_SECONDS": "0.6"}
    async with running_service(tmp_path, pool_text(stub), settings) as runtime, client_of(runtime) as client:
        run = await record_tool_results(client, stub)
        await replay_run(client, run)
        assert runtime.drivers.is_open
    assert (errors, len(stub.requests)) == ([], 2)


@pytest.mark.long
async def test_a_replay_whose_calls_were_not_recorded_is_looked_at_once_more_and_then_waits_for_its_caller(
    stub: ProviderStub, tmp_path: Path
) -> None:
    settings = {"BATON_LEASE_SECONDS": "0.6"}
    async with running_service(tmp_path, pool_text(stub), settings) as runtime, client_of(runtime) as client:
        run = await record_tool_results(client, stub)
        stub.clear()
        stub.script("alpha", calls("b"))
        waiting = (await client.post(f"/v1/runs/{run}/replay")).json()["id"]

        async def is_left_to_its_caller() -> bool:
            row = await runtime.context.store.run(waiting)
            return row.state == "awaiting_tool" and not row.driver and row.lease_until == row.deadline

        await until(is_left_to_its_caller)
        assert (await client.post(f"/v1/runs/{waiting}/cancel")).json()["state"] == "cancelled"


@pytest.mark.long
async def test_recorded_tool_results_are_given_again_for_equal_calls_only(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    run = await record_tool_results(client, stub)
    again = await replay_run(client, run)
    assert "The result." in json.dumps(stub.requests[-1].json)
    assert (await compare_runs(client, run, again["id"]))["same_answer"] is True
    stub.script("alpha", calls("b"))
    waiting = (await client.post(f"/v1/runs/{run}/replay")).json()["id"]  # no body: no change, and no wait
    await waits(client, waiting)
    assert (await client.post(f"/v1/runs/{waiting}/cancel")).json()["state"] == "cancelled"


@pytest.mark.long
async def test_a_worker_that_repeats_its_call_is_not_given_the_recorded_results_for_ever(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    run = await record_tool_results(client, stub)
    stub.clear()
    stub.always("alpha", calls("a"))
    waiting = (await client.post(f"/v1/runs/{run}/replay")).json()["id"]
    await stub.wait_for(2, "alpha")
    await waits(client, waiting, attempts=2)
    assert len(stub.requests) == 2
    assert (await client.post(f"/v1/runs/{waiting}/cancel")).json()["state"] == "cancelled"


@pytest.mark.long
async def test_a_replay_asks_in_each_turn_for_what_its_run_asked_for(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    """The first request demands a tool call, and the one with the results does not."""

    def call_if_demanded(received: ReceivedRequest) -> Reply:
        return calls("a") if received.json.get("tool_choice") == "required" else Reply(chunks=("It is 42.",))

    stub.always("alpha", call_if_demanded)
    run = await record_tool_results(client, stub, tool_choice="required")
    again = await replay_run(client, run)
    assert again["state"] == "succeeded"
    assert [request.json.get("tool_choice") for request in stub.requests] == ["required", None]


async def waits(client: httpx.AsyncClient, run: str, *, attempts: int = 1) -> None:
    """Wait until a run of one step waits for tool results, after so many attempts."""
    reply: dict[str, Any] = {}
    while reply.get("state") != "awaiting_tool" or len(reply["steps"][0]["attempts"]) < attempts:
        reply = (await client.get(f"/v1/runs/{run}")).json()
        assert reply["end"] == {}


@pytest.mark.long
async def test_what_cannot_be_repeated_is_refused_with_its_reason(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    script_plans(stub, CHAIN)
    run = await answer_one_run(client)
    assert code(await replay(client, run, from_step=9)) == (400, "not_replayable")
    assert code(await replay(client, run, from_step=1, model="baton-mini")) == (400, "not_replayable")
    assert code(await replay(client, run, plan={"steps": []})) == (400, "invalid_plan")
    assert code(await replay(client, run, effort="'type'"))[0] == 400
    assert (await replay(client, run, worker="delta")).json()["error"]["param"] == "worker"
    unknown = (await replay(client, run, pool={"pin": "delta"})).json()["error"]
    assert (unknown["param"], "`pool` names" in unknown["message"]) == ("pool", True)
    for model in ("baton-ultra", "baton-mini"):  # with a conductor that has versions, and without one
        unknown = (await replay(client, run, version="a-dearer-model", model=model)).json()["error"]
        assert (unknown["param"], unknown["message"].endswith("these are: none.")) == ("version", True)
    assert "a-dearer-model" not in list_called_models(stub), "no caller says what the conductor's provider is asked for"
    changed = {"steps": [{"worker": "alpha", "subtask": "Other", "access": ["user"]}] * 2}
    assert code(await replay(client, run, from_step=1, plan=changed)) == (400, "not_replayable")
    refused = await replay(client, run, labels=["phi"])
    assert code(refused) == (400, "not_replayable")
    assert "not cleared for phi" in refused.json()["error"]["message"], "the labels of today are in force"
    assert code(await replay(client, run, pool={"deny": ["alpha", "beta"]})) == (400, "not_replayable")
    await client.delete(f"/v1/runs/{run}")
    assert code(await replay(client, run)) == (409, "content_erased")


@pytest.mark.long
async def test_a_replay_needs_the_right_to_read_the_content(runtime: Runtime, client: httpx.AsyncClient) -> None:
    run = await answer_one_run(client, "baton-mini")
    for tenant, scopes, expected in (
        ("acme", ["runs:write", "runs:read"], 403),
        ("acme", ["runs:read", "audit:read"], 403),
        ("acme", ["runs:write", "runs:read", "audit:read"], 200),
        ("other", ["runs:write", "runs:read", "audit:read"], 404),
    ):
        key, row = mint(runtime.gateway.pepper, tenant=tenant, name="else", scopes=scopes, now=0.0)
        await runtime.gateway.store.add_key(row)
        headers = {"authorization": f"Bearer {key}"}
        reply = await client.post(f"/v1/runs/{run}/replay", json={"wait": SECONDS}, headers=headers)
        assert reply.status_code == expected, reply.text
        both = await client.get(f"/v1/runs/{run}/compare/{run}", headers=headers)
        assert both.status_code == (404 if tenant == "other" else 200)
        if tenant == "acme":
            assert both.json()["same_answer"] is (True if "audit:read" in scopes else None)


async def test_the_name_of_a_key_of_another_tenant_is_not_shown(runtime: Runtime, client: httpx.AsyncClient) -> None:
    """A replay belongs to the tenant of its run, also where a key of all tenants has begun it."""
    run = await answer_one_run(client, "baton-mini")
    root = await add_key(runtime, "ops", ("admin",), all_tenants=True)
    headers = {"authorization": f"Bearer {root}"}
    again = (await client.post(f"/v1/runs/{run}/replay", json={"wait": SECONDS}, headers=headers)).json()["id"]
    for seen_by, name in ((client.headers, None), (headers, "t")):
        [listed] = (await client.get("/v1/runs?include=key_name&limit=1", headers=seen_by)).json()["data"]
        assert (listed["id"], listed["key_name"]) == (again, name)


async def test_a_replay_of_anothers_run_is_logged_as_reading_it(runtime: Runtime, client: httpx.AsyncClient) -> None:
    run = await answer_one_run(client, "baton-mini")
    await replay_run(client, run)
    reading = AdminEventQuery(action=CONTENT_READ)
    assert await runtime.gateway.store.admin_events(reading) == ()
    scopes = ["runs:write", "runs:read", "audit:read"]
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="else", scopes=scopes, now=0.0)
    await runtime.gateway.store.add_key(row)
    headers = {"authorization": f"Bearer {key}"}
    second_reply = await client.post(f"/v1/runs/{run}/replay", json={"wait": SECONDS}, headers=headers)
    await client.get(f"/v1/runs/{second_reply.json()['id']}/compare/{run}", headers=headers)
    admin_events = await runtime.gateway.store.admin_events(reading)
    assert [(event.actor, event.target, event.after) for event in admin_events] == [
        (row.id, run, {"what": "comparison"}),
        (row.id, run, {"what": "replay"}),
    ]


async def test_a_replay_of_a_run_whose_request_asks_for_an_approval_waits_for_one(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    request_body = {
        "model": "baton-mini",
        "messages": [{"role": "user", "content": "Pay."}],
        "baton": {"approval": "required"},
    }
    run = (await client.post("/v1/chat/completions", json=request_body)).headers["x-baton-run"]
    assert (await client.post(f"/v1/runs/{run}/cancel")).json()["state"] == "cancelled"
    again = await replay(client, run, worker="gamma", wait=0)
    await until(lambda: not len(runtime.drivers))
    state = (await client.get(f"/v1/runs/{again.json()['id']}")).json()["state"]
    assert (state, list_called_models(stub)) == ("awaiting_approval", [])


async def test_a_worker_that_the_request_denied_is_shown_nothing_by_a_replay(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    run = await answer_one_run(client, "baton-mini", baton={"pool": {"deny": ["gamma"]}})
    assert code(await replay(client, run, worker="gamma"))[0] == 400
    await replay_run(client, run, worker="beta")
    assert stub.requests_for("gamma") == []


async def test_erasing_a_run_stops_and_erases_all_that_repeats_it(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    run = await answer_one_run(client, "baton-mini")
    second = (await replay_run(client, run))["id"]
    stub.always("beta", Hang())
    third = (await replay(client, second, worker="beta", wait=0)).json()["id"]
    await until(lambda: bool(stub.requests_for("beta")))
    assert (await client.delete(f"/v1/runs/{run}")).status_code == 200
    rows = [await runtime.gateway.store.run(name) for name in (run, second, third)]
    assert [row.erased for row in rows] == [True, True, True]
    assert rows[2].state == "cancelled"


async def test_all_replays_of_a_run_are_found_however_many_there_are(
    runtime: Runtime, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`baton runs erase --run` erases what is found here."""
    monkeypatch.setattr(cancel, "COPIES_PAGE", 2)
    run = await answer_one_run(client, "baton-mini")
    replays_of_run = {(await replay_run(client, run))["id"] for _ in range(3)}
    copies = await cancel.copies(runtime.gateway.store, run)
    assert {copy.id for copy in copies} == replays_of_run


async def test_a_replay_is_listed_as_one_and_begun_once_for_each_idempotency_key(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    run = await answer_one_run(client, "baton-mini")
    headers = {"idempotency-key": "again"}
    first, second = [
        await client.post(f"/v1/runs/{run}/replay", json={"wait": SECONDS}, headers=headers) for _ in range(2)
    ]
    assert first.json()["id"] == second.json()["id"]
    listed = (await client.get("/v1/runs?origin_kind=replay")).json()["data"]
    assert [(entry["id"], entry["origin"]["run"]) for entry in listed] == [(first.json()["id"], run)]


async def test_labels_stay_on_what_is_kept_and_on_what_a_model_wrote(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub)
    for worker in ("alpha", "gamma", "planner"):
        pool = pool.replace(f"[workers.{worker}]\n", f'[workers.{worker}]\nclearance = ["phi"]\n')
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        script_plans(stub, plan_text((0, "Draft it", ["user"]), (1, "Answer it", [])))
        run = await answer_one_run(client, baton={"labels": ["phi"]})
        stub.requests.clear()
        refused = await replay(client, run, from_step=1, worker="beta")
        assert code(refused) == (400, "not_replayable")
        assert "step 1: its worker may not read what the step reads: not cleared for phi" in refused.text
        again = await replay_run(client, run, from_step=1, worker="alpha")
        assert list_called_models(stub) == ["alpha"]
        assert [step["labels"] for step in again["steps"]] == [["phi"], ["phi"]], "the subtask was a model's"
        events = (await client.get(f"/v1/runs/{again['id']}/events")).json()["data"]
        [kept_step] = [
            event["body"] for event in events if event["body"].get("origin_run") and event["kind"] == "step.done"
        ]
        assert kept_step["labels"] == ["phi"]


@pytest.mark.long
async def test_an_engine_that_has_the_journal_alone_carries_a_replay_out(stub: ProviderStub, tmp_path: Path) -> None:
    """The recorded plans, both rounds of them, and the outputs that are kept are read from the replay's own content."""
    pool = pool_text(stub)
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        script_plans(stub, CHAIN, MEND, EMPTY)
        run = await answer_one_run(client, "baton-deep")
        second, third = [worker for worker in list_called_models(stub) if worker != "planner"][1:]
    async with running_service(tmp_path, pool, drives=False) as gateway, client_of(gateway, name="again") as client:
        stub.requests.clear()
        reply = await client.post(f"/v1/runs/{run}/replay", json={"from_step": 1})
        again = reply.json()["id"]
        assert reply.json()["state"] == "admitted"
        async with running_service(tmp_path, pool) as engine:
            assert (await await_ended_row(engine.context.store, again)).state == "succeeded"
        assert list_called_models(stub) == [second, third], "the second step of the first round, and the second round"


async def test_outputs_are_kept_whose_workers_the_replay_may_not_call(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    """Here the caller denies the worker; it may also have left the pool, or the tier may lack the depth."""
    script_plans(stub, CHAIN, NESTED, INNER, EMPTY)
    chain = await answer_one_run(client)
    first, second = [step["worker"] for step in (await client.get(f"/v1/runs/{chain}")).json()["steps"]]
    again = await replay_run(client, chain, from_step=1, pool={"deny": [first]})
    assert [step["worker"] for step in again["steps"]] == [first, second]
    nested = await answer_one_run(client, "baton-nested")
    again = await replay_run(client, nested, model="baton-deep", worker="gamma", from_step=2)
    assert [step["worker"] for step in again["steps"][1:]] == ["@conductor", "gamma"]


async def test_labels_of_a_tools_result_stay_on_an_output_that_is_kept(stub: ProviderStub, tmp_path: Path) -> None:
    """The replay has no other labels; the auditor derives them for its calls all the same, and texts with the label
    are kept for the time that is stated for it."""
    stub.script("alpha", Reply(tool_calls=(ToolCall("look", "{}", "theirs"),), finish="tool"))
    steps = [
        {"worker": "alpha", "subtask": "Look", "access": ["user"], "tools": True},
        {"worker": "beta", "subtask": "Answer", "access": ["user", 0]},
    ]
    pool = pool_text(stub)
    for worker in ("alpha", "beta"):
        pool = pool.replace(f"[workers.{worker}]\n", f'[workers.{worker}]\nclearance = ["phi"]\n')
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        question = {"model": "baton-ultra", "tools": [LOOK], "baton": {"plan": {"steps": steps}}}
        messages: list[Any] = [{"role": "user", "content": "What is it?"}]
        asked = await client.post("/v1/chat/completions", json=question | {"messages": messages})
        said = asked.json()["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": said["tool_calls"][0]["id"],
            "content": "A",
            "baton": {"labels": ["phi"]},
        }
        await client.post("/v1/chat/completions", json=question | {"messages": [*messages, said, result]})
        run = str(asked.headers["x-baton-run"])
        kept = await replay_run(client, run, from_step=1)
        assert kept["steps"][1]["labels"] == ["phi"]
        whole = await replay_run(client, run, model="baton-ultra", worker="gamma")
        assert [step["worker"] for step in whole["steps"]] == ["gamma"], "it calls no tool"
        retention = ContentQuery(within=RunClass(label="phi"))
        with_label = await runtime.context.store.runs_with_content(retention)
        assert {row.id for row in with_label.runs} == {run, kept["id"], whole["id"]}, "each has a copy of the result"
