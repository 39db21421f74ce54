"""Approvals over HTTP: what waits, who may decide, and that nothing is executed before."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from pydantic import TypeAdapter

from app.audit.log.findings import Finding
from app.core.pool.budgets import Budget
from app.core.pool.catalog import MILLION
from app.core.pool.snapshot import seal_catalog
from app.core.roles import ROLES
from app.core.run import notices
from app.core.run.events import Kind
from app.gateway.admin.context import AdminContext
from app.gateway.admin.people import SESSION, Access, Grant
from app.gateway.administration import create_admin
from app.gateway.http.api_keys import mint
from app.gateway.openapi.response_replies import ResponseEvent
from app.gateway.wire.query import Cursor, as_cursor
from app.process.wiring import Runtime
from app.store.archive import open_archive
from app.store.protocol import CONTENT_READ, AdminEventQuery
from app.store.sql import SqlStore
from tests.audit import tampers
from tests.harness.administration import PEOPLE
from tests.harness.callers import client_over_socket, open_stream
from tests.harness.in_process import (
    POOL,
    WORKER,
    WORKERS,
    await_ended_row,
    bodies_of,
    client_of,
    events,
    kinds,
    plan_text,
    pool_text,
    running_service,
    script_answers,
    script_plans,
)
from tests.harness.prepared_apps import app_over
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import Fail, Hang, ProviderStub, Reply

APPROVAL = """
[tiers.baton-mini.approval]
{rules}
"""
QUESTION = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


def pool(stub: ProviderStub, rules: str = "always = true") -> str:
    """A pool file whose `baton-mini` needs approvals by these rules."""
    workers = "".join(WORKER.format(name=name) for name in WORKERS)
    return POOL.format(url=stub.vllm_url, workers=workers) + APPROVAL.format(rules=rules)


@asynccontextmanager
async def deciding(runtime: Runtime, *scopes: str, tenant: str = "acme") -> AsyncIterator[httpx.AsyncClient]:
    """A client with a key of its own that has these scopes."""
    key, row = mint(runtime.gateway.pepper, tenant=tenant, name="boss", scopes=scopes, now=0.0)
    assert await runtime.gateway.store.add_key(row)
    headers = {"authorization": f"Bearer {key}"}
    with app_over(runtime.gateway) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", headers=headers, timeout=PATIENCE_SECONDS
        ) as client:
            yield client


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool(stub)) as runtime:
        yield runtime


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(runtime) as client:
        yield client


@pytest.fixture
async def boss(runtime: Runtime, caller: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    async with deciding(runtime, *ROLES["operator"]) as client:
        yield client


async def waiting(caller: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    """The reply to a request whose plan waits for an approval."""
    reply = await caller.post("/v1/chat/completions", json=QUESTION | more)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    assert body["baton"]["state"] == "awaiting_approval"
    return body


async def decide(client: httpx.AsyncClient, run: str, decision: str = "approve", **more: Any) -> httpx.Response:
    """Send a decision on what the run asks for now."""
    digest = (await client.get(f"/v1/approvals/{run}")).json()["digest"]
    return await client.post(f"/v1/approvals/{run}", json={"decision": decision, "digest": digest} | more)


async def test_a_compaction_that_waits_for_an_approval_gives_no_empty_notes(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    """Its caller would send them in the place of the conversation."""
    stub.always("alpha", Reply(chunks=("The notes.",)))

    async def compact() -> httpx.Response:
        body = {"model": "baton-mini", "input": "Hello"}
        return await caller.post("/v1/responses/compact", json=body, headers={"Idempotency-Key": "compact"})

    refused = await compact()
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "awaiting_approval")
    assert refused.headers["x-should-retry"] == "false"
    run = refused.headers["x-baton-run"]
    await decide(boss, run)
    await await_ended_row(runtime.context.store, run)
    compacted = (await compact()).json()
    assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
    assert compacted["baton"]["run"] == run


async def test_a_plan_is_executed_once_it_is_approved_and_not_before(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    stub.always("alpha", Reply(chunks=("It is ", "4.")))
    body = await waiting(caller)
    run, approval = body["baton"]["run"], body["baton"]["approval"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert run in body["choices"][0]["message"]["content"]
    await until(lambda: not len(runtime.drivers))
    row = await runtime.context.store.run(run)
    assert (row.state, row.driver, row.held.usd, stub.requests) == ("awaiting_approval", "", 0, [])
    (listed,) = (await boss.get("/v1/approvals")).json()["data"]
    assert (listed["run"], listed["digest"], listed["status"]) == (run, approval["digest"], "waiting")
    assert listed["discloses"] == {"alpha": ["user"]}
    assert listed["worst_case_usd"] > 0
    decision = (await decide(boss, run, reason="It is cheap.")).json()
    assert (decision["status"], decision["decision"]["reason"]) == ("approved", "It is cheap.")
    assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"
    reply = await caller.get(f"/v1/runs/{run}/stream")
    assert '"It is 4."' in reply.text
    journal = await events(runtime, run)
    order = kinds(journal)
    assert order.index(Kind.AWAITING_APPROVAL) < order.index(Kind.APPROVED) < order.index(Kind.STEP_QUEUED)
    (approved,) = bodies_of(journal, Kind.APPROVED)
    assert approved["by"].startswith("key:")
    assert "It is cheap." not in str(approved)
    assert (await boss.get("/v1/approvals")).json()["data"] == []


@pytest.mark.long
async def test_a_decision_and_its_reason_are_explained_to_those_who_may_read_them(
    caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    run = (await waiting(caller))["baton"]["run"]
    [approval] = (await caller.get(f"/v1/runs/{run}/explain")).json()["approvals"]
    assert (approval["decision"], approval["by"]) == (None, None)
    assert "Nobody has decided yet." in (await caller.get(f"/v1/runs/{run}/explain")).json()["text"]
    await decide(boss, run, "refuse", reason="Not on a Monday.")
    explained = (await caller.get(f"/v1/runs/{run}/explain")).json()
    [decided] = explained["approvals"]
    assert (decided["decision"], decided["reason"]) == ("refused", {"state": "given", "text": "Not on a Monday."})
    assert f"It was refused by {decided['by']}." in explained["text"]
    cancelled = (await waiting(caller))["baton"]["run"]
    await caller.post(f"/v1/runs/{cancelled}/cancel", json={})
    assert "Nobody decided before the run ended." in (await caller.get(f"/v1/runs/{cancelled}/explain")).json()["text"]
    other = (await boss.get(f"/v1/runs/{run}/explain")).json()["approvals"][0]["reason"]["state"]
    assert other == ("given" if "audit:read" in ROLES["operator"] else "not_shown")


@pytest.mark.long
async def test_texts_of_a_plan_are_shown_to_those_who_may_read_them_and_every_reading_is_logged(
    runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    run = (await waiting(caller, baton={"plan": {"steps": [{"worker": "alpha", "subtask": "Add.", "access": []}]}}))[
        "baton"
    ]["run"]
    (listed,) = (await boss.get("/v1/approvals")).json()["data"]
    assert listed["plan"]["steps"][0]["instruction"] == "Add."
    reading = AdminEventQuery(action=CONTENT_READ)
    admin_events = await runtime.context.store.admin_events(reading)
    once = {"what": "approval", "shown": f"{listed['digest']} waiting"}
    assert [(event.target, event.after) for event in admin_events] == [(run, once)]
    for path in ("/v1/approvals", "/v1/approvals", f"/v1/approvals/{run}"):
        assert (await boss.get(path)).status_code == 200
    assert len(await runtime.context.store.admin_events(reading)) == 1, "nothing new was shown"
    await decide(boss, run, "refuse", reason="Not on a Monday.")
    assert len(await runtime.context.store.admin_events(reading)) == 2, "the reason is new"
    async with deciding(runtime, "runs:read") as neighbour:
        body = (await neighbour.get(f"/v1/approvals/{run}")).json()
    assert (body["decision"]["reason"], body["plan"]["steps"][0]["instruction"]) == (None, None)
    assert (await caller.get(f"/v1/approvals/{run}")).json()["decision"]["reason"] == "Not on a Monday."


@pytest.mark.long
async def test_decided_plans_are_listed_page_by_page_and_without_content_if_none_is_wanted(
    runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    adds = {"worker": "alpha", "subtask": "Add.", "access": []}
    plan = {"steps": [adds, {"worker": "beta", "subtask": "Check.", "access": [0]}]}
    first, second, third = [(await waiting(caller, baton={"plan": plan}))["baton"]["run"] for _ in range(3)]
    await decide(boss, first, "refuse", reason="Not today.")
    await decide(boss, third, "refuse", reason="Nor this.")

    async def list_approvals(**query: Any) -> dict[str, Any]:
        body: dict[str, Any] = (await boss.get("/v1/approvals", params=query)).json()
        return body

    assert [approval["run"] for approval in (await list_approvals())["data"]] == [second]
    page = await list_approvals(status="decided", limit=2)
    [newest] = page["data"]
    assert (newest["run"], newest["status"], newest["decision"]["reason"]) == (third, "refused", "Nor this.")
    assert (page["first_id"], page["last_id"], page["has_more"]) == (third, third, True)
    page = await list_approvals(status="decided", limit=2, after=page["next"])
    assert ([approval["run"] for approval in page["data"]], page["has_more"]) == ([first], False)
    for path in ("/v1/approvals", "/v1/plans"):
        for cursor in ("x", as_cursor(Cursor(7, third, "cost"))):
            refused = await boss.get(path, params={"after": cursor})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after"), (path, cursor)
    read_count = await notes(runtime)
    [plain, *_rest] = (await list_approvals(status="all", words=False))["data"]
    assert await notes(runtime) == read_count
    first_step, second_step = plain["plan"]["steps"]
    assert (first_step["instruction"], plain["decision"]["reason"]) == (None, None)
    assert first_step["withheld"] == {"user": True, "steps": [], "by": "caller"}
    assert second_step["withheld"] == {"user": True, "steps": [], "by": "caller"}


async def notes(runtime: Runtime) -> int:
    """The number of readings of content in the log."""
    admin_events = await runtime.context.store.admin_events(AdminEventQuery(limit=100, action=CONTENT_READ))
    return len(admin_events)


async def test_the_reply_to_a_decision_does_not_outlive_an_erasure(
    caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    run = (await waiting(caller))["baton"]["run"]
    digest = (await boss.get(f"/v1/approvals/{run}")).json()["digest"]
    decision = {"decision": "refuse", "digest": digest, "reason": "It names Ada."}
    headers = {"Idempotency-Key": "once"}
    first = await boss.post(f"/v1/approvals/{run}", json=decision, headers=headers)
    assert first.json()["decision"]["reason"] == "It names Ada."
    assert (await caller.delete(f"/v1/runs/{run}")).status_code == 200
    second_reply = await boss.post(f"/v1/approvals/{run}", json=decision, headers=headers)
    assert (second_reply.status_code, second_reply.json()["decision"]["reason"]) == (200, None)


async def test_a_reason_that_comes_after_the_content_was_erased_leaves_no_hash(
    runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    """It would have no salt, so that a short reason could be guessed."""
    run = (await waiting(caller))["baton"]["run"]
    assert await runtime.context.store.erase(run)
    assert (await decide(boss, run, "refuse", reason="No.")).json()["status"] == "refused"
    events = (await runtime.context.store.journal(run)).events
    assert [event.body.get("reason", "") for event in events if event.kind is Kind.REFUSED] == [""]


async def test_a_refused_plan_ends_its_run_and_calls_nobody(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    run = (await waiting(caller))["baton"]["run"]
    assert (await decide(boss, run, "refuse", reason="No.")).json()["status"] == "refused"
    row = await runtime.context.store.run(run)
    assert (row.state, row.error, stub.requests) == ("failed", "approval_refused", [])
    counted = runtime.context.telemetry.exposition().decode()
    assert 'baton_runs_total{outcome="failed",tier="baton-mini"} 1.0' in counted


async def test_whoever_asked_does_not_approve(runtime: Runtime, stub: ProviderStub) -> None:
    async with deciding(runtime, *ROLES["owner"]) as owner, deciding(runtime, "runs:read", "runs:write") as reader:
        run = (await waiting(owner))["baton"]["run"]
        mine = await decide(owner, run)
        assert (mine.status_code, mine.json()["error"]["code"]) == (403, "own_run")
        assert (await decide(reader, run)).status_code == 403
        async with deciding(runtime, *ROLES["owner"], tenant="other") as foreign:
            assert (await foreign.get(f"/v1/approvals/{run}")).status_code == 404
            assert (await foreign.post(f"/v1/approvals/{run}", json=decision("0" * 64))).status_code == 404
            assert (await foreign.get("/v1/approvals")).json()["data"] == []
    assert stub.requests == []


@pytest.mark.long
async def test_whoever_wrote_a_plan_does_not_approve_it_for_a_run_that_somebody_else_began(runtime: Runtime) -> None:
    """Nor whoever wrote an earlier revision of it, for a replay of that run either; everybody else may."""
    roles = [deciding(runtime, *ROLES["owner"]) for _ in range(4)]
    async with roles[0] as author, roles[1] as editor, roles[2] as beginner, roles[3] as boss:
        first = (await author.post("/v1/plans", json=QUESTION)).json()
        edit = {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Add them."}]}
        plan = (await editor.patch(f"/v1/plans/{first['id']}", json=edit)).json()
        execution = await beginner.post(f"/v1/plans/{plan['id']}/run")
        run = execution.json()["baton"]["run"]
        refused = [await decide(person, run) for person in (author, editor, beginner)]
        assert [(reply.status_code, reply.json()["error"]["code"]) for reply in refused] == [(403, "own_run")] * 3
        assert (await decide(boss, run)).json()["status"] == "approved"
        assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"
        replay = (await boss.post(f"/v1/runs/{run}/replay")).json()["id"]
        await await_question(runtime, replay)
        refused = [await decide(person, replay) for person in (author, editor, boss)]
        assert [reply.status_code for reply in refused] == [403] * 3
        assert (await decide(beginner, replay)).json()["status"] == "approved"


async def test_whoever_wrote_a_plan_does_not_approve_a_replay_of_what_made_it(runtime: Runtime) -> None:
    roles = [deciding(runtime, *ROLES["owner"]) for _ in range(4)]
    async with roles[0] as author, roles[1] as editor, roles[2] as beginner, roles[3] as boss:
        first = (await author.post("/v1/plans", json=QUESTION)).json()
        edit = {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Add them."}]}
        plan = (await editor.patch(f"/v1/plans/{first['id']}", json=edit)).json()
        replay = (await beginner.post(f"/v1/runs/{plan['revisions'][1]['run']}/replay")).json()["id"]
        await await_question(runtime, replay)
        refused = [await decide(person, replay) for person in (author, editor, beginner)]
        assert [reply.status_code for reply in refused] == [403] * 3
        assert (await decide(boss, replay)).json()["status"] == "approved"


async def test_a_person_does_not_approve_a_replay_that_they_began(
    runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    run = (await waiting(caller))["baton"]["run"]
    assert (await decide(boss, run, "refuse")).json()["status"] == "refused"
    async with logged_in(runtime, "ann") as ann, logged_in(runtime, "ben") as ben:
        replay = (await ann.post(f"/v1/runs/{run}/replay", json={})).json()["id"]
        await await_question(runtime, replay)
        path = f"/admin/v1/approvals/{replay}"
        approval = decision((await ann.get(path)).json()["digest"])
        refused = await ann.post(path, json=approval)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "own_run")
        assert (await ben.post(path, json=approval)).json()["decision"]["by"] == "oidc:ben"


@asynccontextmanager
async def logged_in(runtime: Runtime, person: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the admin API whose session is that of a person, an owner of the tenant."""
    people = replace(PEOPLE, grants=(Grant("groups", "owners", "owner", "acme"),))
    gateway = runtime.gateway
    context = AdminContext(gateway, read_pool=lambda _: gateway.catalog(), versions=lambda _: (), people=people)
    session = Access(gateway, people).seal("session", {"sub": person, "claims": [("groups", "owners")]}, 600.0)
    transport = httpx.ASGITransport(create_admin(context), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://baton", cookies={SESSION: session}, timeout=PATIENCE_SECONDS
    ) as client:
        client.headers["x-csrf-token"] = (await client.get("/admin/v1/me")).json()["csrf_token"]
        yield client


async def await_question(runtime: Runtime, run: str) -> None:
    """Return once the run waits for an approval."""

    async def waits() -> bool:
        return (await runtime.context.store.run(run)).state == "awaiting_approval"

    await until(waits)


def decision(digest: str) -> dict[str, str]:
    """An approval of that digest."""
    return {"decision": "approve", "digest": digest}


@pytest.mark.long
async def test_double_altered_and_late_decisions_are_told_apart(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    stub.always("alpha", Reply(chunks=("4.",)))
    run = (await waiting(caller))["baton"]["run"]
    wrong = await boss.post(f"/v1/approvals/{run}", json=decision("0" * 64))
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "approval_digest_mismatch")
    assert stub.requests == []
    first, again = await decide(boss, run), await decide(boss, run)
    assert first.json()["decision"] == again.json()["decision"]
    other = await decide(boss, run, "refuse")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "approval_decided")
    cancelled = (await waiting(caller))["baton"]["run"]
    await caller.post(f"/v1/runs/{cancelled}/cancel")
    await await_ended_row(runtime.context.store, cancelled)
    late = await decide(boss, cancelled)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "approval_late")
    assert len(stub.requests) == 1


async def test_only_approved_workers_take_over_and_the_price_is_a_limit(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    stub.always("alpha", Fail(status=400))
    stub.always("gamma", Reply(chunks=("4.",)))
    run = (await waiting(caller))["baton"]["run"]
    await decide(boss, run, replacements=["gamma"])
    assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"
    assert [request.json["model"] for request in stub.requests][-1] == "gamma"
    assert not stub.requests_for("beta"), "nobody has approved beta, which comes before gamma"
    poor = (await waiting(caller))["baton"]["run"]
    assert (await decide(boss, poor, max_usd=1e9)).status_code == 400
    await decide(boss, poor, max_usd=0.000001)
    row = await await_ended_row(runtime.context.store, poor)
    assert (row.state, row.cap.usd, row.spent.usd) == ("over_budget", 1, 0)


async def test_a_worker_within_the_price_answers_when_nobody_has_approved_a_plan_above_it(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """An answer of beta, the tier's fallback, may cost more than what needs no approval; one of gamma may not."""
    stub.always("gamma", Reply(chunks=("4.",)))
    text = pool(stub, 'above_usd = 0.02\nseconds = 0.05\non_expiry = "fallback-plan"')
    for name in ("alpha", "beta"):
        worker = WORKER.format(name=name)
        text = text.replace(worker, worker.replace("output = 2.00", "output = 100.00"))
    async with running_service(tmp_path, text) as runtime, client_of(runtime) as caller:
        run = (await waiting(caller))["baton"]["run"]
        row = await await_ended_row(runtime.context.store, run)
        assert (row.state, row.error) == ("succeeded", None)
        assert [request.json["model"] for request in stub.requests] == ["gamma"]


async def test_a_plan_that_nobody_approved_in_time_is_called_so_whatever_becomes_of_its_run(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """Not cancelled with the run later; and where another plan needs an approval as well, none was used."""
    stub.always("*", Hang())
    gamma = {"plan": {"steps": [{"worker": "gamma", "subtask": "", "access": ["user"]}]}}
    rules = 'workers = ["gamma"]\nseconds = 0.05\non_expiry = "fallback-plan"'
    async with running_service(tmp_path, pool(stub, rules)) as runtime, client_of(runtime) as caller:
        run = (await waiting(caller, baton=gamma))["baton"]["run"]
        await until(lambda: bool(stub.requests))
        assert (await caller.post(f"/v1/runs/{run}/cancel")).json()["state"] == "cancelled"
        assert (await caller.get(f"/v1/approvals/{run}")).json()["status"] == "expired"
        words = (await caller.get(f"/v1/runs/{run}/explain")).json()["text"]
        assert "Nobody decided in time, so the plan was not used." in words
    (tmp_path / "other").mkdir()
    rules = 'above_usd = 0\nseconds = 0.05\non_expiry = "fallback-plan"'
    async with running_service(tmp_path / "other", pool(stub, rules)) as runtime, client_of(runtime) as caller:
        run = (await waiting(caller, baton=gamma))["baton"]["run"]
        assert (await await_ended_row(runtime.context.store, run)).error == "approval_expired"
        words = (await caller.get(f"/v1/runs/{run}/explain")).json()["text"]
        assert "another plan was used" not in words


async def test_a_worker_of_unknown_price_is_called_only_under_an_approval_without_a_price(
    stub: ProviderStub, tmp_path: Path
) -> None:
    price = "price = { input = 1.00, output = 2.00, cached = 0.50 }\n"
    gamma = WORKER.format(name="gamma")
    text = pool(stub, "above_usd = 0.02\nfour_eyes = false").replace(gamma, gamma.replace(price, ""))
    plan = {"steps": [{"worker": "gamma", "subtask": "", "access": ["user"]}]}
    async with (
        running_service(tmp_path, text) as runtime,
        client_of(runtime) as caller,
        deciding(runtime, *ROLES["operator"]) as boss,
    ):
        for bad in ("alpha", "beta"):
            stub.always(bad, Fail(status=400))
        reply = await caller.post("/v1/chat/completions", json=QUESTION)
        assert reply.status_code == 400, "gamma does not take over: nobody has approved it"
        run = (await waiting(caller, baton={"plan": plan}))["baton"]["run"]
        body = (await boss.get(f"/v1/approvals/{run}")).json()
        assert (body["reasons"], body["worst_case_usd"]) == (["price"], None)
        assert not stub.requests_for("gamma")
        refused = await decide(boss, run, max_usd=0.01)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_usd")
        assert (await decide(boss, run)).status_code == 200
        assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"
        alone = {"steps": [{"worker": "alpha", "subtask": "", "access": ["user"]}]}
        priced = (await waiting(caller, baton={"plan": alone, "approval": "required"}))["baton"]["run"]
        refused = await decide(boss, priced, replacements=["gamma"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "replacements")


@pytest.mark.long
async def test_the_plan_of_a_further_round_is_made_for_what_is_left_of_the_approved_price(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """The conductor's usual call may cost $0.0082."""
    script_answers(stub)
    script_plans(stub, plan_text((0, "Draft it", ["user"])), plan_text((1, "Mend it", ["user", "previous"])))
    text = pool_text(stub) + "\n[tiers.baton-deep.approval]\nalways = true\n"
    async with (
        running_service(tmp_path, text) as runtime,
        client_of(runtime) as caller,
        deciding(runtime, *ROLES["operator"]) as boss,
    ):
        run = (await waiting(caller, model="baton-deep"))["baton"]["run"]
        assert (await decide(boss, run, max_usd=0.008)).status_code == 200

        async def asks_again() -> bool:
            return kinds(await events(runtime, run)).count(Kind.AWAITING_APPROVAL) == 2

        await until(asks_again)


async def test_streams_end_with_the_state_and_go_on_behind_the_same_event(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    stub.always("alpha", Reply(chunks=("It is ", "4.")))
    first = (await caller.post("/v1/chat/completions", json=QUESTION | {"stream": True})).text
    assert "awaiting_approval" in first
    assert first.endswith("data: [DONE]\n\n")
    assert [line for line in first.splitlines() if line.startswith("id:")] == ["id: 0"]
    (row,) = (await boss.get("/v1/approvals")).json()["data"]
    await decide(boss, row["run"])
    rest = await caller.get(f"/v1/runs/{row['run']}/stream", headers={"last-event-id": "0"})
    assert "It is " in rest.text
    anthropic = {"model": "baton-mini", "max_tokens": 99, "messages": QUESTION["messages"]}
    message = (await caller.post("/v1/messages", json=anthropic)).json()
    assert (message["stop_reason"], message["baton"]["state"]) == ("end_turn", "awaiting_approval")
    response = (await caller.post("/v1/responses", json={"model": "baton-mini", "input": "?", "stream": True})).text
    last = response.rstrip().splitlines()[-1].removeprefix("data: ")
    assert json.loads(last)["type"] == "response.queued"
    TypeAdapter(ResponseEvent).validate_json(last)  # it is as described


async def test_who_looks_on_at_an_approved_run_ends_nothing_by_leaving(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    """Its caller has had the reply that it goes on by itself."""
    stub.always("alpha", Reply(chunks=("It is ", "4."), header_delay=1.0))
    run = (await waiting(caller))["baton"]["run"]
    await decide(boss, run)
    async with client_over_socket(runtime, caller.headers["authorization"].removeprefix("Bearer ")) as viewer:
        async with open_stream(viewer, "GET", f"/v1/runs/{run}/stream") as (_, received):
            await anext(received)
        assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"


async def test_the_usage_of_a_plan_that_waits_is_streamed_too_if_asked_for(caller: httpx.AsyncClient) -> None:
    whole = await waiting(caller)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = (await caller.post("/v1/chat/completions", json=QUESTION | options)).text
    *_, finish, usage, end = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert (json.loads(finish)["usage"], json.loads(finish)["baton"]["state"]) == (None, "awaiting_approval")
    assert (json.loads(usage)["choices"], json.loads(usage)["usage"], end) == ([], whole["usage"], "[DONE]")


async def test_a_response_is_queued_until_it_is_approved(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    stub.always("alpha", Reply(chunks=("It is 4.",)))
    request_body = {"model": "baton-mini", "input": "What is 2 + 2?", "background": True}
    name = (await caller.post("/v1/responses", json=request_body)).json()["id"]
    run = name.removeprefix("resp_")
    await await_question(runtime, run)
    polled = (await caller.get(f"/v1/responses/{name}")).json()
    assert (polled["status"], polled["output"], polled["baton"]["state"]) == ("queued", [], "awaiting_approval")
    await decide(boss, run)
    await await_ended_row(runtime.context.store, run)
    body = (await caller.get(f"/v1/responses/{name}")).json()
    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", "It is 4.")


async def test_a_webhook_asks_and_is_kept_until_it_was_accepted(stub: ProviderStub, tmp_path: Path) -> None:
    secret = "whsec_" + base64.b64encode(b"s" * 32).decode()
    nowhere = {"BATON_WEBHOOK_URL": "http://127.0.0.1:9/hook", "BATON_WEBHOOK_SECRET": secret}
    async with running_service(tmp_path, pool(stub), nowhere) as runtime, client_of(runtime) as caller:
        baton = (await waiting(caller))["baton"]
        store, later = runtime.context.store, runtime.context.now() + 10_000.0
        (notice,) = await until(lambda: store.take_notices(later, later + 1.0, 5))
        notice_body = json.loads(notices.payload(notice))
    assert notice_body["type"] == "approval.requested"
    assert (notice_body["data"]["run"], notice_body["data"]["digest"]) == (baton["run"], baton["approval"]["digest"])
    assert notice_body["data"]["discloses"] == {"alpha": ["user"]}


async def test_an_approval_is_void_for_a_worker_that_has_changed(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient
) -> None:
    """The pool file gives alpha another model between the question and the decision; another worker may take over."""
    run = (await waiting(caller))["baton"]["run"]
    configuration = runtime.pool.configuration
    workers = configuration.catalog.workers
    moved = replace(configuration.catalog, workers={**workers, "alpha": replace(workers["alpha"], model="other")})
    runtime.pool.install(replace(configuration, catalog=seal_catalog(moved)))
    outdated = await decide(boss, run)
    assert (outdated.status_code, outdated.json()["error"]["code"]) == (409, "approval_outdated")
    changed = await decide(boss, run, replacements=["alpha"])
    assert changed.json()["error"]["code"] == "approval_outdated"
    assert stub.requests == []
    stub.always("gamma", Reply(chunks=("4.",)))
    assert (await decide(boss, run, replacements=["gamma"])).json()["decision"]["workers"] == ["gamma"]
    assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"
    assert [request.json["model"] for request in stub.requests] == ["gamma"]


async def test_a_replay_is_approved_although_the_worker_of_an_output_that_it_keeps_has_changed(
    stub: ProviderStub, tmp_path: Path
) -> None:
    script_answers(stub)
    steps = [
        {"worker": "alpha", "subtask": "Draft it.", "access": ["user"]},
        {"worker": "beta", "subtask": "Answer it.", "access": [0]},
    ]
    async with (
        running_service(tmp_path, pool(stub, 'workers = ["gamma"]')) as runtime,
        client_of(runtime) as caller,
        deciding(runtime, *ROLES["operator"]) as boss,
    ):
        first = await caller.post("/v1/chat/completions", json=QUESTION | {"baton": {"plan": {"steps": steps}}})
        kept = first.headers["x-baton-run"]
        again = await caller.post(f"/v1/runs/{kept}/replay", json={"from_step": 1, "worker": "gamma"})
        assert again.status_code == 200, again.text
        run = again.json()["id"]
        await until(lambda: not len(runtime.drivers))
        configuration = runtime.pool.configuration
        workers = configuration.catalog.workers
        moved = replace(configuration.catalog, workers={**workers, "alpha": replace(workers["alpha"], model="other")})
        runtime.pool.install(replace(configuration, catalog=seal_catalog(moved)))
        decided = await decide(boss, run)
        assert decided.status_code == 200, decided.text
        assert decided.json()["decision"]["workers"] == ["gamma"]
        assert (await await_ended_row(runtime.context.store, run)).state == "succeeded"


async def test_a_replay_whose_plan_nobody_approves_goes_on_with_a_fallback_beside_the_outputs_that_it_has_kept(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """The auditor finds nothing wrong with it."""
    script_answers(stub)
    steps = [
        {"worker": "alpha", "subtask": "Draft it.", "access": ["user"]},
        {"worker": "beta", "subtask": "Answer it.", "access": [0]},
    ]
    text = pool(stub, 'workers = ["gamma"]\nseconds = 0.05\non_expiry = "fallback-plan"')
    async with running_service(tmp_path, text) as runtime, client_of(runtime) as caller:
        first = await caller.post("/v1/chat/completions", json=QUESTION | {"baton": {"plan": {"steps": steps}}})
        path = f"/v1/runs/{first.headers['x-baton-run']}/replay"
        run = (await caller.post(path, json={"from_step": 1, "worker": "gamma"})).json()["id"]
        row = await await_ended_row(runtime.context.store, run)
        assert (row.state, row.degraded, stub.requests_for("gamma")) == ("succeeded", True, [])


async def test_a_replay_that_nobody_approves_gives_no_answer_though_it_has_kept_one_that_could_stand_in(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """Outputs stand in where money or time is short. The auditor finds nothing wrong with it."""
    script_answers(stub)
    steps = [
        {"worker": "alpha", "subtask": "Give the final answer.", "access": ["user"]},
        {"worker": "beta", "subtask": "Check it.", "access": ["user", 0]},
    ]
    async with (
        running_service(tmp_path, pool(stub, 'workers = ["gamma"]\nseconds = 0.05')) as runtime,
        client_of(runtime) as caller,
    ):
        first = await caller.post("/v1/chat/completions", json=QUESTION | {"baton": {"plan": {"steps": steps}}})
        path = f"/v1/runs/{first.headers['x-baton-run']}/replay"
        run = (await caller.post(path, json={"from_step": 1, "worker": "gamma"})).json()["id"]
        runtime.drivers.sweep_soon()
        row = await await_ended_row(runtime.context.store, run)
        assert (row.state, row.error, stub.requests_for("gamma")) == ("expired", "approval_expired", [])


async def test_the_question_of_a_replay_names_no_worker_whose_output_is_kept(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """It is shown nothing."""
    script_answers(stub)
    steps = [
        {"worker": "alpha", "subtask": "Draft it.", "access": ["user"]},
        {"worker": "beta", "subtask": "Answer.", "access": [0]},
    ]
    async with (
        running_service(tmp_path, pool(stub, 'workers = ["gamma"]')) as runtime,
        client_of(runtime) as caller,
        deciding(runtime, *ROLES["operator"]) as boss,
    ):
        first = await caller.post("/v1/chat/completions", json=QUESTION | {"baton": {"plan": {"steps": steps}}})
        path = f"/v1/runs/{first.headers['x-baton-run']}/replay"
        run = (await caller.post(path, json={"from_step": 1, "worker": "gamma"})).json()["id"]
        await await_question(runtime, run)
        assert (await boss.get(f"/v1/approvals/{run}")).json()["discloses"] == {"gamma": [0]}


@pytest.mark.long
async def test_an_approval_that_lowers_the_price_is_no_falsification(
    stub: ProviderStub, runtime: Runtime, caller: httpx.AsyncClient, boss: httpx.AsyncClient, tmp_path: Path
) -> None:
    stub.always("alpha", Reply(chunks=("4.",)))
    store = runtime.context.store
    assert isinstance(store, SqlStore)
    await store.set_budget(Budget("acme", "tenant", "", "day", MILLION), by=tampers.OWNER)

    async def verify_and_audit(*, settled: bool) -> tuple[list[Finding], int]:
        async with open_archive(f"sqlite:///{tmp_path}/baton.db") as archive:
            report = await archive.snapshot(lambda conn, opened: tampers.verify(conn, (), opened, settled=settled))
        return list(report.in_order()), report.runs

    run = (await waiting(caller))["baton"]["run"]
    await tampers.seal(store)
    assert (await decide(boss, run, max_usd=0.5)).status_code == 200
    row = await await_ended_row(store, run)
    assert (row.cap.usd, row.spent.usd > 0) == (500_000, True)
    await tampers.seal(store)
    assert await verify_and_audit(settled=True) == ([], 1)
    unsealed = (await waiting(caller))["baton"]["run"]
    await decide(boss, unsealed)
    await await_ended_row(store, unsealed)
    assert await verify_and_audit(settled=False) == ([], 2), "a run that is not sealed yet has spent of its budget, too"


async def test_the_legacy_route_says_the_same_whole_and_streamed(caller: httpx.AsyncClient) -> None:
    asked = {"model": "baton-mini", "prompt": "What is 2 + 2?"}
    whole = (await caller.post("/v1/completions", json=asked)).json()
    frames = (await caller.post("/v1/completions", json=asked | {"stream": True})).text.split("\n\n")
    assert frames[-2] == "data: [DONE]"
    chunks = [json.loads(frame.partition("data: ")[2]) for frame in frames[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    run = chunks[-1]["baton"]["run"]
    assert text == whole["choices"][0]["text"].replace(whole["baton"]["run"], run)
    assert f"GET /v1/runs/{run}/stream" in text
