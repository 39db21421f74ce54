"""Budgets over several runs, as a caller meets them: what is held for a run, and how one that cannot be paid ends."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.message.chat import Message, Task, Text
from app.core.pool.budgets import Budget
from app.core.run.events import Kind
from app.errors import BudgetExhausted, InvalidRequest
from app.gateway.http.api_keys import mint
from app.gateway.http.fault import describe, headers_of
from app.process.wiring import Runtime
from tests.harness.audited import audit_once
from tests.harness.in_process import (
    WORKER,
    bodies_of,
    client_of,
    events,
    finish,
    latest_request,
    order,
    plan_text,
    pool_text,
    running_service,
    script_plans,
)
from tests.stubs import Hang, ProviderStub

POOR = Budget("tenant", "tenant", "", "day", 100)
"""A budget below the worst case of any call."""
RICH = Budget("tenant", "user", "*", "month", 1_000_000)


@pytest.mark.long
async def test_a_call_is_held_and_settled_in_the_budgets_of_its_run(stub: ProviderStub, runtime: Runtime) -> None:
    store = runtime.context.store
    await store.set_budget(RICH)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    journal = await events(runtime, outcome.ended.state.run)
    (intent,) = bodies_of(journal, Kind.CALL_INTENDED)
    (use,) = await store.budget_use(RICH.id, 10)
    assert (use.held, use.spent) == (0, outcome.ended.bill.usd)
    assert intent["budgets"] == [use.account] == bodies_of(journal, Kind.ADMITTED)[0]["budgets"]


@pytest.mark.parametrize("tier", ["baton-mini", "baton-ultra"])
@pytest.mark.long
async def test_a_run_that_a_budget_cannot_pay_names_it_and_calls_nobody(
    stub: ProviderStub, runtime: Runtime, tier: str
) -> None:
    await runtime.context.store.set_budget(POOR)
    script_plans(stub, plan_text((0, "Solve it", ["user"])))
    ended = (await finish(await runtime.runs.start(order(runtime, tier)))).ended
    assert ended.state.state == "over_budget"
    assert stub.requests == []
    assert isinstance(ended.error, BudgetExhausted)
    (use,) = await runtime.context.store.budget_use(POOR.id, 10)
    assert (ended.error.budget, ended.error.until, use.held) == (POOR.id, use.end, 0)
    rejected = bodies_of(await events(runtime, ended.state.run), Kind.PLAN_REJECTED)
    assert {rejection["budget"] for rejection in rejected} <= {POOR.id}
    assert all(rejection["budget_until"] == use.end and POOR.id in rejection["reasons"][1] for rejection in rejected)
    assert bool(rejected) == (tier == "baton-ultra")
    error = describe(ended.error)["error"]
    assert (ended.error.status, error["type"], error["code"]) == (429, "insufficient_quota", "insufficient_quota")
    assert POOR.id in error["message"]
    assert headers_of(ended.error)["x-should-retry"] == "false"
    assert 'baton_budget_refusals_total{scope="tenant"} 1.0' in runtime.context.telemetry.exposition().decode()


async def test_the_rest_of_a_budget_pays_for_a_shorter_answer(stub: ProviderStub, runtime: Runtime) -> None:
    """A call at the floor fits, so no run is refused for the length that it might have had."""
    floor = 300
    await runtime.context.store.set_budget(Budget("tenant", "tenant", "", "day", 200 + 2 * floor))
    wide = Budget("tenant", "user", "*", "month", 5_000)
    await runtime.context.store.set_budget(wide)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    (intent,) = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_INTENDED)
    assert outcome.ended.state.state == "succeeded"
    assert intent["usd_held"] <= 200 + 2 * floor
    assert floor <= intent["max_tokens"] < intent["wanted_tokens"]
    assert latest_request(stub, "alpha")["max_tokens"] == intent["max_tokens"]
    (use,) = await runtime.context.store.budget_use(wide.id, 10)
    assert (use.held, use.spent) == (0, outcome.ended.bill.usd)


async def test_the_team_and_the_user_of_the_metadata_are_those_that_pay(runtime: Runtime) -> None:
    search, ann = Budget("tenant", "team", "search", "day", 10**6), Budget("tenant", "user", "ann", "day", 10**6)
    for budget in (search, ann):
        await runtime.context.store.set_budget(budget)
    task_of_ann = Task((Message("user", (Text("Hello"),)),), metadata={"team": "search", "user_id": "ann"})
    for task in (task_of_ann, replace(task_of_ann, metadata={}), replace(task_of_ann, user="bob")):
        await finish(await runtime.runs.start(order(runtime, "baton-mini", task=task)))
    for budget, spent in ((search, 52), (ann, 26)):
        (use,) = await runtime.context.store.budget_use(budget.id, 10)
        assert use.spent == spent, "a request's `user` comes before that of its metadata"


async def test_a_worker_of_unknown_price_is_not_called_where_a_budget_applies(
    stub: ProviderStub, tmp_path: Path
) -> None:
    text = pool_text(stub).replace("price = { input = 1.00, output = 2.00, cached = 0.50 }\n", "")
    async with running_service(tmp_path, text) as runtime:
        assert (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.error is None
        await runtime.context.store.set_budget(RICH)
        with pytest.raises(InvalidRequest, match="its price is not known, and a budget applies"):
            await runtime.runs.start(order(runtime, "baton-mini"))


async def test_a_worker_that_is_free_by_its_price_is_called_though_the_budget_is_spent(
    stub: ProviderStub, tmp_path: Path
) -> None:
    text = pool_text(stub).replace("input = 1.00, output = 2.00, cached = 0.50", "input = 0, output = 0")
    async with running_service(tmp_path, text) as runtime:
        await runtime.context.store.set_budget(Budget("tenant", "tenant", "", "day", 0))
        assert (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.error is None


async def test_a_cancelled_stream_costs_what_it_used_and_not_its_bound(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Hang())
    await runtime.context.store.set_budget(RICH)
    text = "Tell me a long story. " * 40
    followed_run = await runtime.runs.start(order(runtime, "baton-mini", text, streams=True))
    await stub.wait_for(1)
    runtime.runs.cancellations.ask(followed_run.run, "client")
    await finish(followed_run)
    (finished,) = bodies_of(await events(runtime, followed_run.run), Kind.CALL_FINISHED)
    assert finished["outcome"] == "cancelled"
    assert len(text) / 4 <= finished["usage"]["input"] <= len(text) / 4 + 16
    (use,) = await runtime.context.store.budget_use(RICH.id, 10)
    assert (use.held, use.spent) == (0, finished["usd"])


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE budget_windows SET spent = spent - 1", "is spent, the journal has"),
        ("UPDATE budget_windows SET spent = spent + 1", "is spent, the journal has"),
        ("UPDATE budget_windows SET held = 5", "5 is held, its calls hold 0"),
        ("DELETE FROM budget_windows", "0 is spent, the journal has"),
        (
            "UPDATE events SET body = CAST(replace(CAST(body AS TEXT), '\"budgets\":', '\"other\":') AS BLOB)",
            "is not held in",
        ),
    ],
)
async def test_an_account_that_is_not_what_the_journal_says_is_found(
    stub: ProviderStub, tmp_path: Path, statement: str, message: str
) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        await runtime.context.store.set_budget(RICH)
        await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    with closing(sqlite3.connect(tmp_path / "baton.db")) as database, database:
        if "events" in statement:
            statement += " WHERE kind = 'call.intended'"
        database.execute(statement)
    violations = (await audit_once(f"sqlite:///{tmp_path}/baton.db")).violations
    assert any(violation.rule == "budget-wrong" and message in str(violation) for violation in violations), violations


@pytest.mark.long
async def test_a_worker_of_unknown_price_is_not_called_for_a_run_that_says_what_it_may_cost(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """Neither for a request's budget nor for a key's cap, and not where the run is planned first, or replayed."""
    unpriced = WORKER.format(name="alpha").replace("price = { input = 1.00, output = 2.00, cached = 0.50 }\n", "")
    text = pool_text(stub).replace(WORKER.format(name="alpha"), unpriced)
    planner = WORKER.format(name="planner")
    text = text.replace(planner, planner.replace("price = { input = 1.00, output = 2.00, cached = 0.50 }\n", ""))
    request_body = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hello"}]}
    capped = request_body | {"baton": {"budget": {"usd": 0.05}}}
    async with running_service(tmp_path, text) as runtime, client_of(runtime) as client:
        key, row = mint(runtime.gateway.pepper, tenant="acme", name="poor", scopes=["admin"], now=0.0)
        assert await runtime.gateway.store.add_key(replace(row, max_usd=50_000))
        poor = {"authorization": f"Bearer {key}"}
        assert [step["worker"] for step in (await answer(client, request_body))["steps"]] == ["alpha"]
        body = (await client.post("/v1/plans", json=capped)).json()
        ultra = capped | {"model": "baton-ultra"}
        replies = [
            await answer(client, capped),
            await answer(client, request_body, headers=poor),
            await answer(client, {}, path=f"/v1/plans/{body['id']}/run"),
            await answer(client, ultra),
        ]
        second_reply = await client.post(
            f"/v1/runs/{replies[0]['run']}/replay", json={"model": "baton-mini", "wait": 20}
        )
        assert second_reply.json()["state"] == "succeeded", second_reply.text
        runs = [run["run"] for run in replies] + [second_reply.json()["id"]]
        for run in runs:
            journal = await events(runtime, run)
            assert bodies_of(journal, Kind.ADMITTED)[0]["capped"] is True
            assert {call["worker"] for call in bodies_of(journal, Kind.CALL_INTENDED)} <= {"beta", "gamma"}, run
            assert "its price is not known" in bodies_of(journal, Kind.ADMITTED)[0]["excluded"]["alpha"]


async def answer(
    client: httpx.AsyncClient, body: Any, *, path: str = "/v1/chat/completions", **options: Any
) -> dict[str, Any]:
    """Return `baton` of the reply to a run that was answered."""
    reply = await client.post(path, json=body, **options)
    assert reply.status_code == 200, reply.text
    baton: dict[str, Any] = reply.json()["baton"]
    return baton
