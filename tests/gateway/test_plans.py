"""Plans over HTTP: made, shown, edited, executed as they stand, and deleted."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.message.chat import Task, mint_call_id
from app.core.plan.digest import plan_digest
from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import Limits
from app.core.rating.forecast import History
from app.errors import StoreUnavailable
from app.gateway.http.api_keys import mint
from app.gateway.http.idempotency import Idempotency
from app.gateway.plans import route
from app.gateway.runs import cancel
from app.gateway.runs.forecasts import of_plan
from app.process.config import configure
from app.process.wiring import Runtime
from app.store.protocol import CONTENT_READ, AdminEventQuery, Hold, RunQuery
from tests.audit.tampers import seal, verify
from tests.harness.in_process import await_ended_row, plan, plan_text, script_answers, script_plans
from tests.harness.stand_ins import CATALOG
from tests.stubs import Hang, ProviderStub

ASK: dict[str, Any] = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
CHAIN = plan(("alpha", "Think.", ["user"]), ("beta", "Answer.", ["user", 0]))


async def make_plan(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    """A plan of two steps, which the caller sent itself."""
    reply = await client.post("/v1/plans", json=ASK | {"baton": {"plan": CHAIN}} | more)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


@pytest.mark.long
async def test_a_plan_is_made_and_nothing_of_it_is_executed(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_plans(stub, plan_text((0, "Think.", ["user"]), (1, "Answer.", ["user", 0])))
    body = (await client.post("/v1/plans", json=ASK)).json()
    assert [len(stub.requests_for(worker)) for worker in ("planner", "alpha", "beta", "gamma")] == [1, 0, 0, 0]
    assert (body["object"], body["revision"], body["topology"]) == ("plan", 1, "chain")
    assert [step["subtask"] for step in body["plan"]["steps"]] == ["Think.", "Answer."]
    assert [step["access"] for step in body["plan"]["steps"]] == [["user"], ["user", 0]]
    assert body["planning_cost_usd"] > 0
    second_body = (await client.get(f"/v1/plans/{body['id']}")).json()
    assert {name: second_body[name] for name in ("plan", "digest", "revision")} == {
        name: body[name] for name in ("plan", "digest", "revision")
    }
    assert [plan["id"] for plan in (await client.get("/v1/plans")).json()["data"]] == [body["id"]]


async def test_plans_are_listed_page_by_page(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    made = [(await make_plan(client))["id"] for _ in range(3)]
    first = (await client.get("/v1/plans", params={"limit": 2})).json()
    second = (await client.get("/v1/plans", params={"limit": 2, "after": first["next"]})).json()
    assert [plan["id"] for page in (first, second) for plan in page["data"]] == made[::-1]
    assert (first["has_more"], second["has_more"], second["next"]) == (True, False, None)


@pytest.mark.long
async def test_what_runs_is_what_was_shown(stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime) -> None:
    script_answers(stub)
    plan_body = await make_plan(client)
    run = await client.post(f"/v1/plans/{plan_body['id']}/run", json={"digest": plan_body["digest"]})
    assert run.json()["choices"][0]["message"]["content"] == "The first answer."
    whole = (await client.get(f"/v1/runs/{run.json()['baton']['run']}")).json()
    assert (whole["origin"], whole["preview"]) == ({"kind": "plan", "run": plan_body["run"]}, False)
    assert (await client.get(f"/v1/runs/{plan_body['run']}")).json()["preview"] is True
    for execute, names in (("true", [plan_body["run"]]), ("false", [whole["id"]])):
        listed = (await client.get("/v1/runs", params={"preview": execute, "include": "preview"})).json()["data"]
        assert [(plan["id"], plan["preview"]) for plan in listed] == [(name, execute == "true") for name in names]
    for outcome, count in (("ok", 1), ("error", 0), ("open", 0)):
        listed = (await client.get("/v1/runs", params={"worker": "beta", "outcome": outcome})).json()["data"]
        assert len(listed) == count
    state = await runtime.gateway.store.journal(whole["id"])
    steps = [
        Step(step["worker"], text, Access("user" in step["access"], tuple(step["access"][1:])), answers=bool(step["n"]))
        for step, text in zip(whole["steps"], ("Think.", "Answer."), strict=True)
    ]
    assert plan_digest(steps, state.events[0].fact.limits) == plan_body["digest"]  # type: ignore[attr-defined]


async def test_an_executed_plan_streams_and_is_carried_out_once_for_a_key(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    plan_body = await make_plan(client)
    request = {"json": {"stream": True}, "headers": {"Idempotency-Key": "once"}}
    first, again = [await client.post(f"/v1/plans/{plan_body['id']}/run", **request) for _ in range(2)]  # type: ignore[arg-type]
    assert first.text.endswith("data: [DONE]\n\n")
    assert again.headers["x-baton-run"] == first.headers["x-baton-run"]
    assert len(stub.requests_for("beta")) == 1


@pytest.mark.long
async def test_an_edit_makes_a_revision_that_is_executed(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    plan_body = await make_plan(client)
    edits = [
        {"op": "change", "step": 1, "worker": "gamma", "subtask": "Decide."},
        {"op": "add", "step": 0, "worker": "alpha", "subtask": "Guess.", "access": ["user"]},
    ]
    path = f"/v1/plans/{plan_body['id']}"
    second = (await client.patch(path, json={"revision": 1, "edits": edits})).json()
    assert second["revision"] == 2
    assert [step["worker"] for step in second["plan"]["steps"]] == ["alpha", "alpha", "gamma"]
    assert second["plan"]["steps"][2]["access"] == ["user", 1]
    assert [revision["conductor"] for revision in second["revisions"]] == ["caller", "caller"]
    body = (await client.post(f"{path}/run")).json()
    assert body["choices"][0]["message"]["content"] == "The better answer."
    assert [step["worker"] for step in body["baton"]["steps"]] == ["alpha", "alpha", "gamma"]
    first = (await client.get(path, params={"revision": 1})).json()
    assert first["digest"] == plan_body["digest"] != second["digest"]
    body = (await client.post(f"{path}/run", json={"revision": 1})).json()
    assert [step["worker"] for step in body["baton"]["steps"]] == ["alpha", "beta"]


@pytest.mark.long
async def test_of_two_authors_who_have_seen_the_same_revision_one_is_refused(client: httpx.AsyncClient) -> None:
    plan_body = await make_plan(client)
    path, edit = f"/v1/plans/{plan_body['id']}", [{"op": "change", "step": 0, "subtask": "Think twice."}]
    assert (await client.patch(path, json={"revision": 1, "edits": edit})).status_code == 200
    late = await client.patch(path, json={"revision": 1, "edits": [{"op": "remove", "step": 0}]})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "revision_conflict")
    edits = [{"op": "change", "step": 0, "subtask": f"Think {n} times."} for n in range(3)]
    at_once = await asyncio.gather(*[client.patch(path, json={"revision": 2, "edits": [edit]}) for edit in edits])
    assert sorted(reply.status_code for reply in at_once) == [200, 409, 409]
    assert len((await client.get(path)).json()["revisions"]) == 3


async def test_a_step_is_moved_and_one_that_reads_it_cannot_come_before_it(client: httpx.AsyncClient) -> None:
    plan_body = await make_plan(client)
    path = f"/v1/plans/{plan_body['id']}"
    free = {"op": "change", "step": 1, "access": ["user"]}
    move = {"op": "move", "step": 1, "to": 0}
    refused = await client.patch(path, json={"revision": 1, "edits": [move]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "plan.steps[0].access")
    second = (await client.patch(path, json={"revision": 1, "edits": [free, move]})).json()
    assert [step["subtask"] for step in second["plan"]["steps"]] == ["Answer.", "Think."]


async def test_an_executed_plan_streams_its_steps_where_that_is_asked_for(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    path = f"/v1/plans/{(await make_plan(client))['id']}/run"
    assert '"event":"step.done"' in (await client.post(path, json={"stream": True, "stream_steps": True})).text
    assert '"event"' not in (await client.post(path, json={"stream": True})).text


BAD_EDITS: list[tuple[dict[str, Any], str, str]] = [
    ({"op": "change", "step": 1, "worker": "nobody"}, "plan.steps[1].worker", "not an eligible worker"),
    ({"op": "change", "step": 0, "access": ["user", 1]}, "plan.steps[0].access", "earlier"),
    ({"op": "change", "step": 7, "subtask": "Think."}, "edits[0].step", "2 steps"),
    ({"op": "add", "step": 1, "subtask": "Think."}, "plan.steps[1].access", "worker is missing"),
    ({"op": "turn", "step": 1}, "edits[0].op", "must be"),
    ({"op": "move", "step": 0, "to": 2}, "edits[0].to", "2 counted from 0"),
]
"""Edits that make no plan, with the field that is at fault and a word of the message."""


async def test_an_edit_that_makes_no_plan_is_refused_by_its_field(client: httpx.AsyncClient) -> None:
    plan_body = await make_plan(client)
    for edit, param, message in BAD_EDITS:
        refused = await client.patch(f"/v1/plans/{plan_body['id']}", json={"revision": 1, "edits": [edit]})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert message in error["message"]
    assert (await client.get(f"/v1/plans/{plan_body['id']}")).json()["revision"] == 1


def facts_of(disclosure: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of one disclosure that a plan announces and that the ledger has."""
    names = ("step", "recipient", "recipient_kind", "provider", "model", "region", "labels", "saw")
    return {name: disclosure[name] for name in names} | {"withheld": disclosure["why"]["withheld"]}


async def test_it_says_who_would_see_what_and_why(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_plans(stub, plan_text((0, "Think.", ["user"]), (1, "Check.", ["user"]), (2, "Answer.", [1])))
    reply = await client.post("/v1/plans", json=ASK | {"baton": {"pool": {"allow": ["alpha", "beta", "gamma"]}}})
    body = reply.json()
    assert [(disclosure["recipient"], disclosure["recipient_kind"]) for disclosure in body["disclosed"]] == [
        ("planner", "conductor")
    ]
    last = body["disclosures"][2]
    assert last["saw"] == {"user": False, "steps": [1], "tool_results": False}
    assert last["why"]["granted"] == ["step:1"]
    assert [part["what"] for part in last["why"]["withheld"]] == ["user", "step:0"]
    assert set(last["replacements"]) == {"alpha", "beta", "gamma"} - {last["recipient"]}
    run = (await client.post(f"/v1/plans/{body['id']}/run")).headers["x-baton-run"]
    ledger = (await client.get("/v1/disclosures", params={"run": run, "order": "asc"})).json()["data"]
    facts = [facts_of(disclosure) for disclosure in body["disclosures"]]
    assert sorted(map(facts_of, ledger), key=str) == sorted(facts, key=str), "what was announced is what was disclosed"


async def test_estimates_rest_on_prices_until_there_is_a_history(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    estimate = (await make_plan(client))["estimate"]
    assert (estimate["basis"], estimate["runs"]) == ("prices", 0)
    for figures in (estimate, *estimate["steps"]):
        cost = figures["cost_usd"]
        assert 0 < cost["p10"] <= cost["p50"] <= cost["p90"] <= cost["worst"]
    history = History([])
    assert of_plan(CATALOG, Task(()), (Step("gone", "Think."),), Limits(), history) is None


async def install(runtime: Runtime, changes: Mapping[str, str]) -> None:
    """Take the pool file into force with some of its words changed."""
    path = Path(runtime.pool.configuration.settings.data_dir) / "pool.toml"
    text = path.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    changed = path.with_name("changed.toml")
    changed.write_text(text)
    environ = {"BATON_POOL": str(changed), "BATON_DATA_DIR": str(path.parent), "BATON_PEPPER": "p" * 32}
    runtime.pool.install(configure(environ))


RULE = '\n[rules.no-letters-to-beta]\nlabels = ["letter"]\ndeny = { worker = ["beta"] }\n'
ULTRA = """pool = ["alpha", "beta", "gamma"]
conductor = { kind = "model", worker = "planner" }
fallback = "beta"
limits = { steps = 5"""
WITHOUT_BETA = ULTRA.replace('"beta", ', "").replace('"beta"', '"alpha"')


CHANGES: list[tuple[dict[str, str], str]] = [
    ({ULTRA: WITHOUT_BETA}, "step 1: worker is not an eligible worker"),
    ({"[tiers.baton-mini]": RULE + "[tiers.baton-mini]"}, "no-letters-to-beta"),
    ({"limits = { steps = 5,": "limits = { usd = 1, steps = 5,"}, "lower limits: usd"),
]
"""Changes of the pool file: a worker leaves, a rule comes, a limit is lowered. And what is said of a plan then."""


@pytest.mark.long
async def test_what_has_changed_since_is_a_refusal_that_says_so(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime
) -> None:
    letter = {"role": "user", "content": "Dear Ann.", "baton": {"labels": ["letter"]}}
    cleared = {f'model = "{name}"': f'model = "{name}"\nclearance = ["letter"]' for name in ("alpha", "beta", "gamma")}
    await install(runtime, cleared)
    plan_body = await make_plan(client, messages=[letter])
    for changes, message in CHANGES:
        await install(runtime, cleared | changes)
        refused = await client.post(f"/v1/plans/{plan_body['id']}/run")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "plan_outdated"), error
        assert message in error["message"]
        assert (await client.get(f"/v1/plans/{plan_body['id']}")).status_code == 200
    assert stub.requests == []


async def test_what_would_not_be_what_was_shown_is_refused(client: httpx.AsyncClient, runtime: Runtime) -> None:
    plan_body = await make_plan(client)
    path = f"/v1/plans/{plan_body['id']}/run"
    refused = await client.post(path, json={"digest": "0" * 64})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "digest_mismatch")
    keys = []
    for name, scopes in (("poor", ["runs:write", "audit:read"]), ("sibling", ["runs:write"])):
        key, row = mint(runtime.gateway.pepper, tenant="acme", name=name, scopes=scopes, now=0.0)
        assert await runtime.gateway.store.add_key(replace(row, max_usd=1_000))
        keys.append({"authorization": f"Bearer {key}"})
    for headers, expected in zip(keys, [(409, "plan_outdated"), (403, "insufficient_scope")], strict=True):
        refused = await client.post(path, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == expected
    minted = mint_call_id("run_1a20a33c6053a3985b4acf8748fe802", bytes(9))
    call = {"id": minted, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": minted, "content": "Found."},
    ]
    refused = await client.post("/v1/plans", json=ASK | {"messages": [*ASK["messages"], *turns]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_the_plan_of_a_fixed_shape_runs_as_it_was_shown(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    body = (await client.post("/v1/plans", json=ASK | {"model": "baton-again"})).json()
    assert (body["conductor"], len(body["plan"]["steps"])) == ("fixed", 1)
    reply_body = (await client.post(f"/v1/plans/{body['id']}/run", json={"digest": body["digest"]})).json()
    assert reply_body["choices"][0]["message"]["content"] == "The draft."
    assert reply_body["baton"]["rounds"] == 1


@pytest.mark.long
async def test_the_published_three_lists_are_read_and_written(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    lists = {
        "model_id": [0, "beta", 2],
        "subtasks": ["Think.", "Think too.", "Answer."],
        "access_list": [[], [], ["all"]],
    }
    request_body = ASK | {"baton": {"plan": lists}}
    reply_body = (await client.post("/v1/chat/completions", json=request_body)).json()
    assert reply_body["choices"][0]["message"]["content"] == "The better answer."
    assert [step["access"] for step in reply_body["baton"]["steps"]] == [["user"], ["user"], ["user", 0, 1]]
    body = (await client.post("/v1/plans", json=request_body, params={"format": "lists"})).json()
    assert body["plan"] == lists | {"model_id": [0, 1, 2], "models": ["alpha", "beta", "gamma"]}
    path = f"/v1/plans/{body['id']}"
    assert (await client.patch(path, json={"revision": 1, "plan": body["plan"]})).json()["digest"] == body["digest"]
    hidden = plan(("alpha", "Think.", ["user"]), ("beta", "Answer.", [0]))
    assert (await client.patch(path, json={"revision": 2, "plan": hidden})).status_code == 200
    refused = await client.get(path, params={"format": "lists"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "plan_not_expressible")
    wrong = await client.post("/v1/chat/completions", json=ASK | {"baton": {"plan": lists | {"model_id": [9, 0, 0]}}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "baton.plan")


async def test_a_plan_that_needs_an_approval_waits_for_it_when_it_is_executed(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    plan_body = await make_plan(client, baton={"plan": CHAIN, "approval": "required"})
    assert plan_body["approval_needed"] == ["requested"]
    path = f"/v1/plans/{plan_body['id']}"
    edit = [{"op": "change", "step": 0, "subtask": "Think twice."}]
    assert (await client.patch(path, json={"revision": 1, "edits": edit})).json()["approval_needed"] == ["requested"]
    waiting = await client.post(f"{path}/run")
    run = (await client.get(f"/v1/runs/{waiting.headers['x-baton-run']}")).json()
    assert (run["state"], run["origin"]["kind"]) == ("awaiting_approval", "plan"), waiting.text
    assert stub.requests == [], "nothing was sent to anybody"


async def test_a_plan_for_anthropics_format_is_answered_in_it(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    request_body = ASK | {"max_tokens": 64, "stop_sequences": ["."], "baton": {"plan": CHAIN}}
    reply_body = (await client.post("/v1/plans", json=request_body, params={"api": "messages"})).json()
    path = f"/v1/plans/{reply_body['id']}/run"
    body = (await client.post(path)).json()
    assert (body["type"], body["content"][0]["text"]) == ("message", "The first answer.")
    assert "event: message_stop" in (await client.post(path, json={"stream": True})).text
    assert stub.requests_for("beta")[-1].json["stop"] == ["."]


@pytest.mark.long
async def test_a_plan_for_a_response_is_answered_as_one(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    request_body = {
        "model": "baton-ultra",
        "input": "What is 2 + 2?",
        "instructions": "Be brief.",
        "baton": {"plan": CHAIN},
    }
    reply_body = (await client.post("/v1/plans", json=request_body, params={"api": "responses"})).json()
    path = f"/v1/plans/{reply_body['id']}/run"
    body = (await client.post(path)).json()
    assert (body["object"], body["output"][0]["content"][0]["text"]) == ("response", "The first answer.")
    assert (await client.get(f"/v1/responses/{body['id']}")).json() == body
    headers = {"Idempotency-Key": "one"}
    assert "event: response.completed" in (await client.post(path, json={"stream": True}, headers=headers)).text
    rest = await client.post(path, json={"stream": True}, headers=headers | {"Last-Event-ID": "6"})
    assert '"delta":" first answer."' in rest.text, "three events come before the text"


async def test_one_idempotency_key_plans_for_one_format(client: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {
        "json": ASK | {"max_tokens": 64, "baton": {"plan": CHAIN}},
        "headers": {"Idempotency-Key": "one"},
    }
    first, again, other = [
        await client.post("/v1/plans", params=params, **request) for params in ({}, {}, {"api": "messages"})
    ]
    assert (first.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reuse")


async def test_a_deleted_plan_has_no_text_left(client: httpx.AsyncClient, runtime: Runtime) -> None:
    plan_body = await make_plan(client)
    path = f"/v1/plans/{plan_body['id']}"
    edit = [{"op": "change", "step": 0, "subtask": "Think twice."}]
    await client.patch(path, json={"revision": 1, "edits": edit})
    store = runtime.gateway.store
    await store.place_hold(Hold("hold_1", "tenant", "acme", "", "case 12", 1.0, ""))
    refused = await client.delete(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "legal_hold")
    assert [row.erased for row in await store.runs(RunQuery())] == [False, False]
    await store.release_hold("hold_1", 2.0)
    await store.place_hold(Hold("hold_2", "run", plan_body["run"], "", "case 13", 1.0, ""))
    refused = await client.delete(path)
    assert "The legal hold hold_2 is in force" in refused.json()["error"]["message"]
    assert [row.erased for row in await store.runs(RunQuery())] == [False, False], "the later revision is kept as well"
    await store.release_hold("hold_2", 2.0)
    assert (await client.delete(path)).json() == {"id": plan_body["id"], "object": "plan", "deleted": True}
    for request in (client.get(path), client.post(f"{path}/run")):
        refused = await request
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "plan_deleted")
    assert (await client.get("/v1/plans")).json()["data"] == []
    assert [row.erased for row in await store.runs(RunQuery())] == [True, True]


@pytest.mark.parametrize(
    ("waiting", "step", "name"), [("deletion", cancel, "stop_with_copies"), ("edit", Idempotency, "begin")]
)
async def test_an_edit_at_the_moment_of_a_deletion_leaves_no_text(
    client: httpx.AsyncClient, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, waiting: str, step: object, name: str
) -> None:
    """One of the two has read the plan, and waits before this step until the other one is done."""
    path = f"/v1/plans/{(await make_plan(client))['id']}"
    change = {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Think twice."}]}
    requests = {"edit": partial(client.patch, path, json=change), "deletion": partial(client.delete, path)}
    reached, go_on, original = asyncio.Event(), asyncio.Event(), getattr(step, name)

    async def wait_and_begin(*arguments: Any, **more: Any) -> Any:
        reached.set()
        await go_on.wait()
        return await original(*arguments, **more)

    monkeypatch.setattr(step, name, wait_and_begin)
    late = asyncio.create_task(requests.pop(waiting)())
    await reached.wait()
    monkeypatch.undo()
    (other,) = requests.values()
    assert (await other()).status_code == 200
    go_on.set()
    reply = await late
    rows = await runtime.gateway.store.runs(RunQuery())
    assert all(row.erased for row in rows)
    if waiting == "edit":
        assert (reply.status_code, len(rows)) == (404, 1)
    else:
        assert (reply.status_code, len(rows)) == (200, 2)


async def test_the_erasure_of_a_plans_first_run_erases_its_revisions(
    client: httpx.AsyncClient, runtime: Runtime
) -> None:
    plan_body = await make_plan(client)
    change = {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Think twice."}]}
    await client.patch(f"/v1/plans/{plan_body['id']}", json=change)
    executed = await client.post(f"/v1/plans/{plan_body['id']}/run")
    assert (await client.delete(f"/v1/runs/{plan_body['run']}")).status_code == 200
    erased = {row.id: row.erased for row in await runtime.gateway.store.runs(RunQuery())}
    assert erased.pop(executed.json()["baton"]["run"]) is False
    assert list(erased.values()) == [True, True]


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_an_execution_is_answered_again_though_its_plan_was_deleted(
    stub: ProviderStub, client: httpx.AsyncClient, api: str
) -> None:
    script_answers(stub)
    body = {"model": "baton-ultra", "max_tokens": 64, "messages": ASK["messages"], "baton": {"plan": CHAIN}}
    if api == "responses":
        body = {"model": "baton-ultra", "input": "What is 2 + 2?", "baton": {"plan": CHAIN}}
    path = f"/v1/plans/{(await client.post('/v1/plans', json=body, params={'api': api})).json()['id']}"
    first = await client.post(f"{path}/run", headers={"Idempotency-Key": "one"})
    assert (await client.delete(path)).status_code == 200
    again = await client.post(f"{path}/run", headers={"Idempotency-Key": "one"})
    assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    assert again.content == first.content
    other = await client.post(f"{path}/run", headers={"Idempotency-Key": "two"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "plan_deleted")


async def test_an_execution_whose_caller_gets_an_error_is_cancelled(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is away when the stop sequences of its request are read."""
    stub.always("alpha", Hang())
    stub.always("beta", Hang())
    body = {"model": "baton-ultra", "max_tokens": 64, "messages": ASK["messages"], "baton": {"plan": CHAIN}}
    path = f"/v1/plans/{(await client.post('/v1/plans', json=body, params={'api': 'messages'})).json()['id']}"
    runs: list[str] = []

    read_task = route.task_of

    async def read_task_of_plan(store: Any, run: str, ref: str) -> Task:
        runs.append(run)
        if len(runs) > 1:
            raise StoreUnavailable
        return await read_task(store, run, ref)

    monkeypatch.setattr(route, "task_of", read_task_of_plan)
    assert (await client.post(f"{path}/run")).status_code == 503
    assert (await await_ended_row(runtime.context.store, runs[-1])).state == "cancelled"


async def other_key(runtime: Runtime, *labels: str) -> tuple[str, dict[str, str]]:
    """The id and the headers of another key of the tenant, which may read content and puts labels on its requests."""
    scopes = ["runs:write", "runs:read", "audit:read"]
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="other", scopes=scopes, now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, labels=frozenset(labels)))
    return row.id, {"authorization": f"Bearer {key}"}


async def test_whoever_reads_a_plan_of_another_key_is_logged(client: httpx.AsyncClient, runtime: Runtime) -> None:
    plan_body = await make_plan(client)
    assert (await client.get(f"/v1/plans/{plan_body['id']}")).status_code == 200
    reading = AdminEventQuery(action=CONTENT_READ)
    assert await runtime.gateway.store.admin_events(reading) == ()
    reader, headers = await other_key(runtime)
    assert (await client.get(f"/v1/plans/{plan_body['id']}", headers=headers)).status_code == 200
    admin_events = await runtime.gateway.store.admin_events(reading)
    assert [(event.actor, event.target, event.after) for event in admin_events] == [
        (reader, plan_body["run"], {"what": "plan"})
    ]


@pytest.mark.long
async def test_the_labels_of_an_edits_author_stay_on_what_is_executed(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime
) -> None:
    script_answers(stub)
    names = ("alpha", "beta", "gamma")
    await install(runtime, {f'model = "{name}"': f'model = "{name}"\nclearance = ["secret"]' for name in names})
    plan_body = await make_plan(client)
    _, headers = await other_key(runtime, "secret")
    path, edit = f"/v1/plans/{plan_body['id']}", [{"op": "change", "step": 0, "subtask": "Ask for the code."}]
    edited = await client.patch(path, json={"revision": 1, "edits": edit}, headers=headers)
    assert edited.json()["labels"] == ["secret"]
    second_reply = await client.patch(
        path, json={"revision": 2, "edits": [{"op": "change", "step": 1, "subtask": "Say it."}]}
    )
    assert second_reply.json()["labels"] == ["secret"]
    run = (await client.post(f"{path}/run")).json()["baton"]["run"]
    assert (await client.get(f"/v1/runs/{run}")).json()["labels"] == ["secret"]
    first = (await client.post(f"{path}/run", json={"revision": 1})).json()["baton"]["run"]
    assert (await client.get(f"/v1/runs/{first}")).json()["labels"] == []


@pytest.mark.long
async def test_an_edit_by_a_key_that_may_spend_less_runs_within_its_limit(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime
) -> None:
    script_answers(stub)
    plan_body = await make_plan(client)
    scopes = ["runs:write", "audit:read"]
    editor, row = mint(runtime.gateway.pepper, tenant="acme", name="frugal", scopes=scopes, now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, max_usd=500_000))
    edit = {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Think well."}]}
    path = f"/v1/plans/{plan_body['id']}"
    revised = await client.patch(path, json=edit, headers={"authorization": f"Bearer {editor}"})
    assert (revised.json()["limits"]["usd"], plan_body["limits"]["usd"]) == (0.5, 2.0)
    run = await client.post(f"{path}/run", json={"digest": revised.json()["digest"]})
    assert run.status_code == 200, run.text
    executed = (await client.get(f"/v1/runs/{run.headers['x-baton-run']}")).json()
    assert executed["limits"]["usd"] == 0.5
    edit = {"revision": 2, "edits": [{"op": "change", "step": 0, "subtask": "Think better."}]}
    assert (await client.patch(path, json=edit)).json()["limits"]["usd"] == 2.0


async def test_the_tags_of_plans_are_no_tampering(client: httpx.AsyncClient, runtime: Runtime) -> None:
    plan_body = await make_plan(client)
    edit = [{"op": "change", "step": 0, "subtask": "Think twice."}]
    assert (await client.patch(f"/v1/plans/{plan_body['id']}", json={"revision": 1, "edits": edit})).status_code == 200
    store = runtime.gateway.store
    await seal(store)
    report = await store._read(lambda conn: verify(conn, ()))  # type: ignore[attr-defined]
    assert [finding.rule for finding in report.in_order()] == []
