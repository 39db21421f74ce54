"""`GET /v1/reports`: whose runs it is about, in which form, and within which bounds. The figures are held by
tests/cli/test_report.py."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.gateway.openapi.report_replies import Report
from app.gateway.runs import report_route, reports
from app.process.wiring import Runtime
from tests.harness.in_process import ask, client_of, finish, order, pool_text, running_service, script_answers
from tests.harness.stand_ins import GatewayStandIn
from tests.stubs import ProviderStub


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub)) as running:
        script_answers(stub)
        yield running


async def got(client: httpx.AsyncClient, query: str, status: int = 200) -> httpx.Response:
    reply = await client.get(f"/v1/reports?{query}")
    assert reply.status_code == status, reply.text
    return reply


@pytest.mark.long
async def test_a_report_is_about_the_runs_of_the_keys_tenant(runtime: Runtime) -> None:
    await finish(await runtime.runs.start(order(runtime, "baton-ultra")))  # another tenant's
    async with client_of(runtime) as client:
        run = (await ask(client, user="ann", metadata={"team": "search"})).json()["baton"]["run"]
        await client.post(f"/v1/runs/{run}/feedback", json={"thumbs": "up"})
        report = Report.model_validate((await got(client, "by=user&by=metadata.team&by=tier")).json())
        table = (await got(client, "format=csv")).text.splitlines()
        file = (await got(client, "format=parquet&part=summary")).content
        old = (await got(client, "until=2000000")).json()
    assert (report.total.runs, report.total.successes, report.total.without_verdict) == (1, 1, 0)
    assert report.total.cost_per_success_usd == report.total.cost_usd > 0
    groups = {(group.by, group.group) for group in report.groups}
    assert groups == {("user", "ann"), ("metadata.team", "search"), ("tier", "baton-mini")}
    assert [line.split(",")[:3] for line in table] == [["by", "group", "runs"], ["tier", "baton-mini", "1"]]
    assert file.startswith(b"PAR1")
    assert (old["total"]["runs"], old["until"] - old["since"]) == (0, 7 * 86_400)


async def test_a_report_that_would_be_too_large_says_what_helps(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(runtime) as client:
        await ask(client)
        monkeypatch.setattr(report_route, "MOST_RUNS", 0)
        error = (await got(client, "", 400)).json()["error"]
        assert (error["code"], error["param"]) == ("report_too_large", "since")
        assert "a shorter period or a filter" in error["message"]
        monkeypatch.setattr(reports, "REPORT_SECONDS", 0.0)
        assert (await got(client, "", 503)).json()["error"]["code"] == "overloaded"


async def test_filters_reach_the_store(gateway: GatewayStandIn, key: str) -> None:
    filters = "tier=mini&key=k&worker=w&label=phi&topology=tree&model=fugu&user=ann&metadata=team=a&since=1&until=9"
    async with gateway.client(key) as client:
        await got(client, filters)
    [query] = gateway.store.queries
    assert (query.tenant, query.tier, query.key, query.topology, query.model) == ("acme", "mini", "k", "tree", "fugu")
    assert (query.user, query.since, query.until, query.ascending) == ("ann", 1.0, 9.0, True)
    assert query.tags == (("worker", "w"), ("label", "phi"), ("metadata", "team=a"))


async def test_only_a_key_of_all_tenants_chooses_a_tenant(gateway: GatewayStandIn, key: str) -> None:
    everywhere = gateway.add_key("every", tenant="ops", scopes=["runs:read"], all_tenants=True)
    async with gateway.client(everywhere) as client:
        await got(client, "tenant=other")
    async with gateway.client(key) as client:
        await got(client, "")
        assert (await got(client, "tenant=other", 400)).json()["error"]["param"] == "tenant"
    assert [query.tenant for query in gateway.store.queries] == ["other", "acme"]


async def test_words_of_callers_need_the_scope_for_content(gateway: GatewayStandIn) -> None:
    reader = gateway.add_key("reader", tenant="acme", scopes=["runs:read"])
    async with gateway.client(reader) as client:
        await got(client, "by=tier&by=key")
        for grouping in ("user", "metadata.team"):
            await got(client, f"by=tier&by={grouping}", 403)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("by=canary", "by"),
        ("by=metadata.", "by"),
        ("success=canary", "success"),
        ("threshold=2", "threshold"),
        ("threshold=canary", "threshold"),
        ("threshold=nan", "threshold"),
        ("time_zone=canary", "time_zone"),
        ("time_zone=../etc", "time_zone"),
        ("format=canary", "format"),
        ("part=canary", "part"),
        ("since=canary", "since"),
        ("since=9&until=1", "until"),
        ("since=99999999999", "since"),
    ],
)
async def test_a_bad_query_is_a_400_that_names_the_parameter(
    gateway: GatewayStandIn, key: str, query: str, param: str
) -> None:
    async with gateway.client(key) as client:
        error: dict[str, Any] = (await got(client, query, 400)).json()["error"]
    assert error["param"] == param
    assert "must" in error["message"]
    assert "canary" not in error["message"]
