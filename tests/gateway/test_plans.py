"""Plans over HTTP: made, shown, edited, executed as they stand, and deleted."""

from typing import Any

import httpx
import pytest

from app.core.plan.digest import plan_digest
from app.core.plan.workflow import Access, Step
from app.process.wiring import Runtime
from app.store.protocol import RunQuery
from tests.harness.in_process import plan, plan_text, plans, speak
from tests.stubs import ProviderStub

ASK: dict[str, Any] = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
CHAIN = plan(("alpha", "Think.", ["user"]), ("beta", "Answer.", ["user", 0]))


async def made(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    """A plan of two steps, which the caller sent itself."""
    reply = await client.post("/v1/plans", json=ASK | {"baton": {"plan": CHAIN}} | more)
    assert reply.status_code == 200, reply.text
    shown: dict[str, Any] = reply.json()
    return shown


async def test_a_plan_is_made_and_nothing_of_it_is_executed(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    plans(stub, plan_text((0, "Think.", ["user"]), (1, "Answer.", ["user", 0])))
    shown = (await client.post("/v1/plans", json=ASK)).json()
    assert [len(stub.of(worker)) for worker in ("planner", "alpha", "beta", "gamma")] == [1, 0, 0, 0]
    assert (shown["object"], shown["revision"], shown["topology"]) == ("plan", 1, "chain")
    assert [one["subtask"] for one in shown["plan"]["steps"]] == ["Think.", "Answer."]
    assert [one["access"] for one in shown["plan"]["steps"]] == [["user"], ["user", 0]]
    assert shown["planning_cost_usd"] > 0
    again = (await client.get(f"/v1/plans/{shown['id']}")).json()
    assert {name: again[name] for name in ("plan", "digest", "revision")} == {
        name: shown[name] for name in ("plan", "digest", "revision")
    }
    assert [one["id"] for one in (await client.get("/v1/plans")).json()["data"]] == [shown["id"]]


async def test_what_runs_is_what_was_shown(stub: ProviderStub, client: httpx.AsyncClient, opened: Runtime) -> None:
    speak(stub)
    shown = await made(client)
    run = await client.post(f"/v1/plans/{shown['id']}/run", json={"digest": shown["digest"]})
    assert run.json()["choices"][0]["message"]["content"] == "The first answer."
    whole = (await client.get(f"/v1/runs/{run.json()['baton']['run']}")).json()
    assert whole["origin"] == {"kind": "plan", "run": shown["run"]}
    state = await opened.gateway.store.journal(whole["id"])
    steps = [
        Step(one["worker"], text, Access("user" in one["access"], tuple(one["access"][1:])), answers=bool(one["n"]))
        for one, text in zip(whole["steps"], ("Think.", "Answer."), strict=True)
    ]
    assert plan_digest(steps, state.events[0].fact.limits) == shown["digest"]  # type: ignore[attr-defined]


async def test_an_executed_plan_streams_and_is_carried_out_once_for_a_key(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    speak(stub)
    shown = await made(client)
    sent = {"json": {"stream": True}, "headers": {"Idempotency-Key": "once"}}
    first, again = [await client.post(f"/v1/plans/{shown['id']}/run", **sent) for _ in range(2)]  # type: ignore[arg-type]
    assert first.text.endswith("data: [DONE]\n\n")
    assert again.headers["x-baton-run"] == first.headers["x-baton-run"]
    assert len(stub.of("beta")) == 1


async def test_an_edit_makes_a_revision_that_is_executed(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    speak(stub)
    shown = await made(client)
    edits = [
        {"op": "change", "step": 1, "worker": "gamma", "subtask": "Decide."},
        {"op": "add", "step": 0, "worker": "alpha", "subtask": "Guess.", "access": ["user"]},
    ]
    path = f"/v1/plans/{shown['id']}"
    second = (await client.patch(path, json={"revision": 1, "edits": edits})).json()
    assert second["revision"] == 2
    assert [one["worker"] for one in second["plan"]["steps"]] == ["alpha", "alpha", "gamma"]
    assert second["plan"]["steps"][2]["access"] == ["user", 1]
    assert [one["conductor"] for one in second["revisions"]] == ["caller", "caller"]
    answered = (await client.post(f"{path}/run")).json()
    assert answered["choices"][0]["message"]["content"] == "The better answer."
    assert [one["worker"] for one in answered["baton"]["steps"]] == ["alpha", "alpha", "gamma"]
    first = (await client.get(path, params={"revision": 1})).json()
    assert first["digest"] == shown["digest"] != second["digest"]
    answered = (await client.post(f"{path}/run", json={"revision": 1})).json()
    assert [one["worker"] for one in answered["baton"]["steps"]] == ["alpha", "beta"]


async def test_of_two_authors_who_have_seen_the_same_revision_one_is_refused(client: httpx.AsyncClient) -> None:
    shown = await made(client)
    path, edit = f"/v1/plans/{shown['id']}", [{"op": "change", "step": 0, "subtask": "Think twice."}]
    assert (await client.patch(path, json={"revision": 1, "edits": edit})).status_code == 200
    late = await client.patch(path, json={"revision": 1, "edits": [{"op": "remove", "step": 0}]})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "revision_conflict")


@pytest.mark.parametrize(
    ("edit", "param", "said"),
    [
        ({"op": "change", "step": 1, "worker": "nobody"}, "plan.steps[1].worker", "not an eligible worker"),
        ({"op": "change", "step": 0, "access": ["user", 1]}, "plan.steps[0].access", "earlier"),
        ({"op": "change", "step": 7, "subtask": "Think."}, "edits[0].step", "2 steps"),
        ({"op": "add", "step": 1, "subtask": "Think."}, "plan.steps[1].access", "worker is missing"),
        ({"op": "turn", "step": 1}, "edits[0].op", "must be"),
    ],
)
async def test_an_edit_that_makes_no_plan_is_refused_by_its_field(
    client: httpx.AsyncClient, edit: dict[str, Any], param: str, said: str
) -> None:
    shown = await made(client)
    refused = await client.patch(f"/v1/plans/{shown['id']}", json={"revision": 1, "edits": [edit]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_the_published_three_lists_are_read_and_written(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    speak(stub)
    lists = {
        "model_id": [0, "beta", 2],
        "subtasks": ["Think.", "Think too.", "Answer."],
        "access_list": [[], [], ["all"]],
    }
    asked = ASK | {"baton": {"plan": lists}}
    answered = (await client.post("/v1/chat/completions", json=asked)).json()
    assert answered["choices"][0]["message"]["content"] == "The better answer."
    assert [one["access"] for one in answered["baton"]["steps"]] == [["user"], ["user"], ["user", 0, 1]]
    shown = (await client.post("/v1/plans", json=asked, params={"format": "lists"})).json()
    assert shown["plan"] == lists | {"model_id": [0, 1, 2], "models": ["alpha", "beta", "gamma"]}
    path = f"/v1/plans/{shown['id']}"
    assert (await client.patch(path, json={"revision": 1, "plan": shown["plan"]})).json()["digest"] == shown["digest"]
    hidden = plan(("alpha", "Think.", ["user"]), ("beta", "Answer.", [0]))
    assert (await client.patch(path, json={"revision": 2, "plan": hidden})).status_code == 200
    refused = await client.get(path, params={"format": "lists"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "plan_not_expressible")
    wrong = await client.post("/v1/chat/completions", json=ASK | {"baton": {"plan": lists | {"model_id": [9, 0, 0]}}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "baton.plan")


async def test_a_deleted_plan_has_no_text_left(client: httpx.AsyncClient, opened: Runtime) -> None:
    shown = await made(client)
    path = f"/v1/plans/{shown['id']}"
    edit = [{"op": "change", "step": 0, "subtask": "Think twice."}]
    await client.patch(path, json={"revision": 1, "edits": edit})
    assert (await client.delete(path)).json() == {"id": shown["id"], "object": "plan", "deleted": True}
    for sent in (client.get(path), client.post(f"{path}/run")):
        refused = await sent
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "plan_deleted")
    assert (await client.get("/v1/plans")).json()["data"] == []
    assert [row.erased for row in await opened.gateway.store.runs(RunQuery())] == [True, True]
