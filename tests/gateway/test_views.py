"""The graph, the timeline and the state of real runs, at any instant, and two runs aligned. The auditor reads along."""

from random import Random
from typing import Any

import httpx
import pytest

from app.process.wiring import Runtime
from app.store.protocol import CONTENT_READ, AdminEventQuery, Journal
from tests.core.play import Play
from tests.harness.in_process import client_of, plan, script_answers
from tests.harness.stand_ins import GatewayStandIn, row_of, store_contents
from tests.stubs import Fail, ProviderStub

ASK = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
STEPS = plan(("alpha", "Think about it", ["user"]), ("beta", "Draft it", ["user"]), ("gamma", "Answer it", [1]))


async def execute(client: httpx.AsyncClient, steps: Any) -> str:
    reply = await client.post("/v1/chat/completions", json=ASK | {"baton": {"plan": steps}})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["baton"]["run"])


async def read(client: httpx.AsyncClient, run: str, view: str, **options: Any) -> dict[str, Any]:
    reply = await client.get(f"/v1/runs/{run}/{view}", params=options)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def test_a_run_is_drawn_with_what_its_workers_saw_and_what_was_withheld(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    stub.script("alpha", Fail(status=401))
    run = await execute(client, STEPS)
    whole = (await client.get(f"/v1/runs/{run}")).json()
    graph = await read(client, run, "graph")
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert list(nodes) == ["caller", "plan:0", "step:0", "step:1", "step:2"]
    first, last = nodes["step:0"], nodes["step:2"]
    assert (first["planned_worker"], [attempt["outcome"] for attempt in first["attempts"]]) == (
        "alpha",
        ["error", "ok"],
    )
    assert first["worker"] == first["attempts"][1]["worker"] != "alpha"
    assert last["subtask"] == {"state": "given", "text": "Answer it"}
    assert last["answers"]
    assert sum(node["cost_usd"] for node in graph["nodes"]) == pytest.approx(whole["cost_usd"])
    withheld = {
        (edge["source"], edge["by"]) for edge in graph["edges"] if edge["target"] == "step:2" and edge["reason"]
    }
    assert withheld == {("caller", "caller"), ("step:0", "caller")}
    shown_texts = {
        (edge["source"], edge["what"]) for edge in graph["edges"] if edge["target"] == "step:2" and edge["sent"]
    }
    assert shown_texts == {("plan:0", "subtask"), ("step:1", "output")}

    spans = (await read(client, run, "timeline"))["spans"]
    money = [span["cost_usd"] for span in spans if span["kind"] == "attempt"]
    assert sum(money) == pytest.approx(whole["cost_usd"])
    assert {span["kind"] for span in spans} >= {"run", "queue", "planning", "step", "attempt", "first_word", "stream"}


@pytest.mark.long
async def test_every_view_shows_the_run_as_it_was_at_an_event(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    run = await execute(client, STEPS)
    events = (await client.get(f"/v1/runs/{run}/events")).json()["data"]
    ended = [event["seq"] for event in events if event["kind"] == "step.done" and event["body"]["n"] == 1]
    for at in ({"at": ended[0]}, {"t": events[ended[0] - 1]["at"] - events[0]["at"]}):
        state = await read(client, run, "state", **at)
        steps = {step["n"]: step["state"] for step in state["steps"]}
        assert steps[1] == "done"
        assert steps[2] in ("waiting", "queued", "running"), "by the time `t` the same commit has begun the next step"
        assert state["answer_step"] is None
        graph = await read(client, run, "graph", **at)
        assert {node["id"]: node["state"] for node in graph["nodes"]}["step:1"] == "done"
        assert (await read(client, run, "timeline", **at))["spans"][0]["end"] is None
        view = await read(client, run, "views", **at, step=1)
        views = {name: await read(client, run, name, **at) for name in ("state", "graph", "timeline")}
        assert {name: view[name] for name in views} == views
        assert view["run"] == (await client.get(f"/v1/runs/{run}")).json()
        assert view["step"] == await read(client, run, "steps/1")
        assert view["explanation"] == await read(client, run, "explain")
        assert (await read(client, run, "views", at=1, step=1))["step"] is None, "there was no such step then"
    before = await read(client, run, "graph", at=ended[0])
    assert not any(edge["sent"] for edge in before["edges"] if edge["target"] == "step:2")
    assert (await read(client, run, "state"))["answer_step"] == 2
    for wrong in ({"at": 10_000}, {"at": 0}, {"at": 1, "t": 1}, {"t": "nan"}, {"t": -1}):
        assert (await client.get(f"/v1/runs/{run}/state", params=wrong)).status_code == 400


@pytest.mark.long
async def test_first_words_are_shown_to_who_may_read_the_run_and_the_reading_is_logged(
    runtime: Runtime, stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = await execute(client, STEPS)
    async with client_of(runtime, "auditor") as auditor:
        await read(auditor, run, "graph", words="false")
        await read(auditor, run, "timeline")
        await read(auditor, run, "state")
        await read(auditor, run, "views", words="false")
        logged = AdminEventQuery(limit=10, target=run, action=CONTENT_READ)
        assert await runtime.gateway.store.admin_events(logged) == (), "these have no content"
        assert "Answer it" in str(await read(auditor, run, "graph"))
        assert "The better answer." in str(await read(auditor, run, "views", words="false", step=2))
    entries = await runtime.gateway.store.admin_events(logged)
    assert [(entry.after or {})["what"] for entry in reversed(entries)] == ["graph", "step:2", "reasons"]
    assert (await client.delete(f"/v1/runs/{run}")).status_code == 200
    states = {node["subtask"]["state"] for node in (await read(client, run, "graph"))["nodes"] if "subtask" in node}
    assert states == {"erased"}


async def test_a_key_without_the_scope_sees_no_words_and_another_tenant_sees_no_run(
    gateway: GatewayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_contents(gateway.store)
    gateway.store.rows = [row_of("run_mine", "acme", key="owner")]
    play = Play(Random(3))
    play.play()

    async def journal(_run: str) -> Journal:
        return Journal(b"salt", tuple(play.events))

    monkeypatch.setattr(gateway.store, "journal", journal)
    async with gateway.client(gateway.add_key("other", scopes=["runs:read"])) as client:
        graph = await read(client, "run_mine", "graph")
        assert {node["subtask"]["state"] for node in graph["nodes"] if node["kind"] == "step"} <= {"not_shown", "none"}
    async with gateway.client(gateway.add_key("foreign", scopes=["runs:read"], tenant="globex")) as client:
        for view in ("graph", "timeline", "state"):
            assert (await client.get(f"/v1/runs/run_mine/{view}")).status_code == 404
        assert (await client.get("/v1/runs/compare?a=run_mine&b=run_mine")).status_code == 404
        error = (await client.get("/v1/runs/compare?a=run_mine")).json()["error"]
        assert (error["message"], error["code"]) == ("Missing required parameter: 'b'.", "missing_required_parameter")


async def test_steps_of_two_runs_are_aligned_by_their_subtasks_wherever_they_stand(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    first_run = await execute(client, STEPS)
    moved = plan(
        ("gamma", "Draft it", ["user"]),
        ("alpha", "Think about it", ["user"]),
        ("beta", "Look it up", []),
        ("gamma", "Answer it", ["user", 0]),
    )
    other = await execute(client, moved)
    body = (await client.get("/v1/runs/compare", params={"a": first_run, "b": other})).json()
    pairs = [
        (
            pair["first"] and pair["first"]["place"],
            pair["second"] and pair["second"]["place"],
            pair["aligned_by"],
            pair["differs"],
        )
        for pair in body["steps"]
    ]
    assert pairs[0][:3] == ("1.0", "1.1", "subtask")
    assert (pairs[1][:3], "worker" in pairs[1][3], "access" in pairs[1][3]) == (("1.1", "1.0", "subtask"), True, False)
    assert pairs[2][:3] == ("1.2", "1.3", "subtask")
    assert body["steps"][2]["access"] == {"only_first": [], "only_second": ["user"]}
    assert pairs[3][:3] == (None, "1.2", "alone")
    assert body["difference"]["calls"] == 1
