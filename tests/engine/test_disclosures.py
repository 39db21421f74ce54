"""The ledger of disclosures: who was sent what, equal to what a provider received, and readable over HTTP."""

import csv
import io
import json

import httpx
import pytest

from app.core.run.visibility import complete_disclosures
from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from app.store.protocol import CONTENT_READ, AdminEventQuery, DisclosureQuery, RunQuery
from app.store.rows import disclosures
from tests.engine.recorded_disclosures import play
from tests.harness.in_process import ask, client_of, finish, order, plan_text, script_answers, script_plans
from tests.stubs import Fail, ProviderStub

CHAIN = plan_text((0, "Draft it", ["user"]), (1, "Check it", [0]), (2, "Answer it", ["user", 1]))


async def rows(client: httpx.AsyncClient, **filters: object) -> list[dict[str, object]]:
    reply = await client.get("/v1/disclosures", params=filters)
    assert reply.status_code == 200, reply.text
    data: list[dict[str, object]] = reply.json()["data"]
    return data


@pytest.mark.long
async def test_the_ledger_is_what_a_provider_received(runtime: Runtime, stub: ProviderStub) -> None:
    assert await play(runtime, stub, runs=30, seed=7) == []


async def test_one_request_says_who_saw_the_callers_words_or_a_steps_output_and_why(
    runtime: Runtime, stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    script_plans(stub, CHAIN)
    run = (await ask(client, model="baton-ultra")).headers["x-baton-run"]
    draft, check, answer = sorted(await rows(client, run=run, recipient_kind="worker"), key=lambda row: row["step"])
    assert [row["saw"] for row in (draft, check, answer)] == [
        {"user": True, "steps": [], "tool_results": False},
        {"user": False, "steps": [0], "tool_results": False},
        {"user": True, "steps": [1], "tool_results": False},
    ]
    assert check["why"] == {
        "planned_by": "model",
        "attempt": 1,
        "passed_over": [],
        "withheld": [{"what": "user", "reason": "not_listed"}],
    }
    assert answer["why"]["withheld"] == [{"what": "step:0", "reason": "not_listed"}]
    assert {row["outcome"] for row in (draft, check, answer)} == {"ok"}
    assert (draft["tenant"], draft["provider"], draft["bytes"] > 0, draft["input_tokens"] > 0) == (
        *("acme", "stub"),
        *(True, True),
    )
    [planned] = await rows(client, run=run, recipient="planner")
    assert (planned["recipient_kind"], planned["saw"]["user"], planned["why"]["planned_by"]) == (
        *("conductor", True),
        "tier",
    )
    any_of = await rows(client, run=run, recipient=draft["recipient"], saw=["user", "step:1"])
    assert [row["call"] for row in any_of] == [draft["call"]]
    saw = await rows(client, run=run, saw=["step:0", "step:1"])
    assert {row["call"] for row in saw} == {check["call"], answer["call"]}


async def test_a_replacement_has_a_row_of_its_own_with_the_reason(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    stub.script("alpha", Fail(status=500), Fail(status=500))
    run = (await ask(client)).headers["x-baton-run"]
    *failed, last = await rows(client, run=run, order="asc")
    assert {(row["recipient"], row["outcome"]) for row in failed} == {("alpha", "error")}
    assert (last["recipient"] != "alpha", last["outcome"], last["why"]["attempt"]) == (True, "ok", len(failed) + 1)
    assert len(await rows(client, run=run, recipient=["alpha", last["recipient"]])) == len(failed) + 1


async def test_pages_lines_and_csv_have_the_same_rows(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    script_answers(stub)
    for _ in range(3):
        await ask(client, user="ann", safety_identifier="zoe")
    first = (await client.get("/v1/disclosures", params={"limit": 2})).json()
    rest = (await client.get("/v1/disclosures", params={"limit": 2, "after": first["next"]})).json()
    same = (await client.get("/v1/disclosures", params={"limit": 2, "after": first["last_id"]})).json()
    assert (first["has_more"], rest["has_more"], rest) == (True, False, same)
    every = [*first["data"], *rest["data"]]
    assert [row["user"] for row in every] == ["ann"] * 3
    assert [row.pop("key_name") for row in every] == ["caller"] * 3  # only pages name keys
    lines = await client.get("/v1/disclosures", headers={"accept": "application/x-ndjson"})
    assert [json.loads(line) for line in lines.text.splitlines()] == every
    table = await client.get("/v1/disclosures", params={"format": "csv", "limit": 2})
    assert 'rel="next"' in table.headers["link"]
    assert [row["call"] for row in csv.DictReader(io.StringIO(table.text))] == [row["call"] for row in first["data"]]
    assert await rows(client, user="bob") == []
    assert len(await rows(client, user=["bob", "ann"])) == len(await rows(client, user="zoe")) == 3


async def test_an_erasure_takes_the_users_name_and_leaves_the_row(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = (await ask(client, user="ann")).headers["x-baton-run"]
    assert (await client.delete(f"/v1/runs/{run}")).status_code == 200
    [row] = await rows(client, run=run)
    assert (row["user"], row["saw"]["user"]) == (None, True)
    assert await rows(client, user="ann") == []


@pytest.mark.long
async def test_runs_from_before_the_ledger_are_derived_and_doing_it_again_adds_nothing(
    runtime: Runtime, stub: ProviderStub
) -> None:
    store = runtime.context.store
    assert await play(runtime, stub, runs=6, seed=3) == []
    before = await store.disclosures(DisclosureQuery(limit=1_000))
    await store._write(lambda conn: conn.exec_driver_sql("DELETE FROM disclosures"))  # type: ignore[attr-defined]
    first = await store.rebuild_disclosures(None, 100, complete_disclosures)
    again = await store.rebuild_disclosures(None, 100, complete_disclosures)
    assert (first.added, again.added) == (len(before), 0)
    assert await store.disclosures(DisclosureQuery(limit=1_000)) == before


@pytest.mark.long
async def test_a_rebuild_commits_what_it_has_derived_in_time_and_goes_on_behind_it(
    runtime: Runtime, stub: ProviderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction whose time is over would commit nothing, and the rebuild would never get on."""
    store = runtime.context.store
    assert await play(runtime, stub, runs=4, seed=3) == []
    before = await store.disclosures(DisclosureQuery(limit=1_000))
    await store._write(lambda conn: conn.exec_driver_sql("DELETE FROM disclosures"))  # type: ignore[attr-defined]
    monkeypatch.setattr(disclosures, "REBUILD_SECONDS", 0.0)
    first = await store.rebuild_disclosures(None, 100, complete_disclosures)
    assert first.runs == 1
    assert len(await store.disclosures(DisclosureQuery(limit=1_000))) == first.added
    place, run_count, added = first.following, first.runs, first.added
    while place is not None:
        batch = await store.rebuild_disclosures(place, 100, complete_disclosures)
        place, run_count, added = batch.following, run_count + batch.runs, added + batch.added
    assert (run_count, added) == (len(await store.runs(RunQuery(limit=100))), len(before))
    assert await store.disclosures(DisclosureQuery(limit=1_000)) == before


async def test_a_key_without_the_scope_and_another_tenant_see_nothing(runtime: Runtime, stub: ProviderStub) -> None:
    script_answers(stub)
    async with client_of(runtime) as client:
        await ask(client)
        refused = await client.get("/v1/disclosures", params={"tenant": "other"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenant")
        for faulty in ("saw=everything", "saw=step:x", "after=nothing", "since=soon", "recipient_kind=human"):
            assert (await client.get(f"/v1/disclosures?{faulty}")).status_code == 400


async def list_runs(client: httpx.AsyncClient, worker: str) -> list[str]:
    reply = await client.get("/v1/runs", params={"worker": worker})
    return [run["id"] for run in reply.json()["data"]]


@pytest.mark.long
async def test_runs_of_a_worker_are_those_in_which_it_was_sent_something(
    runtime: Runtime, stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    script_plans(stub, CHAIN)
    planned = (await ask(client, model="baton-ultra")).headers["x-baton-run"]
    assert await list_runs(client, "planner") == [planned]
    stub.always("alpha", Fail(status=500))
    replaced = (await ask(client)).headers["x-baton-run"]
    [instead] = {row["recipient"] for row in await rows(client, run=replaced)} - {"alpha"}
    assert (await list_runs(client, instead))[0] == replaced
    assert replaced in await list_runs(client, "alpha")
    await finish(await runtime.runs.start(order(runtime, "baton-mini", preview=True)))
    assert await runtime.context.store.runs(RunQuery(tenant="tenant", tags=(("worker", "alpha"),))) == ()


async def test_runs_from_before_the_ledger_are_listed_by_the_workers_of_their_plans(
    runtime: Runtime, stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = (await ask(client)).headers["x-baton-run"]
    await runtime.context.store._write(  # type: ignore[attr-defined]
        lambda conn: conn.exec_driver_sql("DELETE FROM disclosures")
    )
    assert await list_runs(client, "alpha") == [run]
    await runtime.context.store.rebuild_disclosures(None, 100, complete_disclosures)


async def test_reading_the_content_of_others_is_logged_and_polling_ones_own_is_not(
    runtime: Runtime, stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    store = runtime.gateway.store
    response_id = (await client.post("/v1/responses", json={"model": "baton-mini", "input": "Hello?"})).json()["id"]
    run = response_id.removeprefix("resp_")
    assert (await client.get(f"/v1/responses/{response_id}")).status_code == 200
    reading = AdminEventQuery(action=CONTENT_READ)
    assert await store.admin_events(reading) == ()
    scopes = ["runs:read", "audit:read"]
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="auditor", scopes=scopes, now=0.0)
    assert await store.add_key(row)
    theirs = {"authorization": f"Bearer {key}"}
    assert (await client.get(f"/v1/responses/{response_id}", headers=theirs)).status_code == 200
    assert (await client.get(f"/v1/runs/{run}/steps/0", headers=theirs)).status_code == 200
    assert (await client.get(f"/v1/runs/{run}", headers=theirs)).status_code == 200
    admin_events = await store.admin_events(reading)
    assert [(event.actor, event.via, event.target, event.tenant, event.after) for event in admin_events] == [
        (row.id, "key", run, "acme", {"what": "step:0"}),
        (row.id, "key", run, "acme", {"what": "response"}),
    ]
    assert [event.action for event in await store.admin_events(AdminEventQuery())] == ["key.added", "key.added"]
