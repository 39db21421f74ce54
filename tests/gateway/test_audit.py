"""The audit routes: pages that lose and repeat nothing, filters, and what a worker saw."""

import base64
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.pool.catalog import Amount
from app.store.protocol import RunRow
from tests.harness.stand_ins import TEXTS, GatewayStandIn, row_of


async def get(gateway: GatewayStandIn, key: str, path: str, status: int = 200) -> dict[str, Any]:
    async with gateway.client(key) as client:
        reply = await client.get(path)
    assert reply.status_code == status, reply.text
    body: dict[str, Any] = reply.json()
    return body


async def test_pages_give_every_run_once(gateway: GatewayStandIn, key: str) -> None:
    gateway.store.rows = [row_of(f"run_{n:02}", "acme", 1e9 + n // 3) for n in range(25)]
    gateway.store.rows += [row_of("run_x", "other")]
    run_ids: list[str] = []
    path = "/v1/runs?limit=7"
    while path:
        page = await get(gateway, key, path)
        assert page["object"] == "list"
        assert page["has_more"] == (page["next"] is not None)
        run_ids += [run["id"] for run in page["data"]]
        gateway.store.rows.append(row_of(f"run_new_{len(run_ids)}", "acme", 2e9))
        path = f"/v1/runs?limit=7&after={page['next']}" if page["has_more"] else ""
    assert run_ids == [f"run_{n:02}" for n in reversed(range(25))]


async def test_a_page_names_its_ends_and_the_last_one_is_a_place_to_go_on_from(
    gateway: GatewayStandIn, key: str
) -> None:
    gateway.store.rows = [row_of(f"run_{n}", "acme", 1e9 + n) for n in range(5)] + [row_of("run_x", "other", 1e9)]
    first = await get(gateway, key, "/v1/runs?limit=2")
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("run_4", "run_3", True)
    for last in ("run_3", "chatcmpl-run_3"):
        second = await get(gateway, key, f"/v1/runs?limit=3&after={last}")
        assert [run["id"] for run in second["data"]] == ["run_2", "run_1", "run_0"]
        assert (second["first_id"], second["last_id"], second["has_more"]) == ("run_2", "run_0", False)
    none = await get(gateway, key, "/v1/runs?after=run_0")
    assert (none["data"], none["first_id"], none["last_id"]) == ([], None, None)
    for unseen in ("run_x", "run_nowhere"):
        assert (await get(gateway, key, f"/v1/runs?after={unseen}", 400))["error"]["param"] == "after"


async def test_filters_reach_the_store(gateway: GatewayStandIn, key: str) -> None:
    since = "2026-09-01T00:00:00Z"
    await get(
        gateway,
        key,
        f"/v1/runs?state=failed&tier=baton-mini&worker=alpha&label=phi&key=k&since={since}&until=1900000000.5"
        "&min_cost_usd=0.0000015&max_cost_usd=0.0000035&degraded=true"
        "&topology=tree&model=fugu&user=ann&metadata=team=a=b&tenant=acme&order=asc",
    )
    [query] = gateway.store.queries
    assert (query.tenant, query.state, query.tier, query.key) == ("acme", "failed", "baton-mini", "k")
    assert (query.since, query.until, query.min_usd, query.degraded) == (1788220800.0, 1900000000.5, 2, True)
    assert query.tags == (("worker", "alpha"), ("label", "phi"), ("metadata", "team=a=b"))
    assert (query.max_usd, query.topology, query.model, query.user) == (3, "tree", "fugu", "ann")
    assert (query.sort, query.ascending, query.limit) == ("time", True, 21)


async def test_only_a_key_of_all_tenants_chooses_a_tenant(gateway: GatewayStandIn, key: str) -> None:
    everywhere = gateway.add_key("every", tenant="ops", scopes=["runs:read"], all_tenants=True)
    assert (await get(gateway, key, "/v1/runs?tenant=other", 400))["error"]["param"] == "tenant"
    await get(gateway, everywhere, "/v1/runs?tenant=other")
    await get(gateway, everywhere, "/v1/runs")
    assert [query.tenant for query in gateway.store.queries] == ["other", None]


async def test_a_page_by_cost_goes_on_behind_a_cost(gateway: GatewayStandIn, key: str) -> None:
    def spent(name: str, usd: int) -> RunRow:
        return replace(row_of(name, "acme", 1e9), spent=Amount(usd, 1), ended_at=2e9)

    gateway.store.rows = [spent("run_1", 700), spent("run_2", 800), replace(spent("run_3", 900), ended_at=None)]
    first = await get(gateway, key, "/v1/runs?sort=cost&limit=1")
    await get(gateway, key, f"/v1/runs?sort=cost&after={first['next']}")
    await get(gateway, key, "/v1/runs?sort=cost&after=run_1")
    assert [query.before for query in gateway.store.queries[1:]] == [(800, "run_2"), (700, "run_1")]
    for wrong in (f"after={first['next']}", "sort=cost&after=run_3"):
        assert (await get(gateway, key, f"/v1/runs?{wrong}", 400))["error"]["param"] == "after"


async def test_an_offset_of_time_is_kept(gateway: GatewayStandIn, key: str) -> None:
    """Also a time as the console and the commands show it, with a space between day and hour, is read."""
    with_offset = ("2026-09-01T02:00:00%2B02:00", "2026-09-01T02:00:00+02:00")
    for written in (*with_offset, "2026-09-01T00:00:00", "2026-09-01 00:00:00"):
        await get(gateway, key, f"/v1/runs?since={written}")
    assert {query.since for query in gateway.store.queries} == {1788220800.0}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=٣", "limit"),
        ("state=canary", "state"),
        ("degraded=maybe", "degraded"),
        ("since=yesterday", "since"),
        ("since=nan", "since"),
        ("since=9&until=1", "until"),
        ("rated=good&rated_since=9&rated_until=1", "rated_until"),
        ("until=1e99", "until"),
        ("min_cost_usd=-1", "min_cost_usd"),
        ("min_cost_usd=NaN", "min_cost_usd"),
        ("max_cost_usd=x", "max_cost_usd"),
        ("topology=canary", "topology"),
        ("sort=canary", "sort"),
        ("order=canary", "order"),
        ("metadata=canary", "metadata"),
        ("metadata==canary", "metadata"),
        ("min_cost_usd=1e9", "min_cost_usd"),
        ("after=canary", "after"),
        ("after=" + base64.urlsafe_b64encode(b'{"a":1}').decode(), "after"),
        ("after=" + base64.urlsafe_b64encode(b'["x","y"]').decode(), "after"),
        ("after=" + base64.urlsafe_b64encode(b'[1,"a b"]').decode(), "after"),
        ("after=" + base64.urlsafe_b64encode(b'[1e300,"run_1"]').decode(), "after"),
        ("after=" + base64.urlsafe_b64encode(b'[-1,"run_1"]').decode(), "after"),
        ("key=a%00b", "key"),
        ("key=" + "a" * 513, "key"),
    ],
)
async def test_a_bad_query_is_a_400_that_names_the_parameter(
    gateway: GatewayStandIn, key: str, query: str, param: str
) -> None:
    error = (await get(gateway, key, f"/v1/runs?{query}", 400))["error"]
    assert error["param"] == param
    assert "canary" not in error["message"]


async def test_a_run_explains_itself(gateway: GatewayStandIn, key: str) -> None:
    run = await get(gateway, key, "/v1/runs/run_mine")
    assert (run["id"], run["state"], run["topology"]) == ("run_mine", "succeeded", "chain")
    assert run["labels"] == ["phi"]
    assert run["excluded"] == {"gamma": "not cleared for phi"}
    assert run["limits"]["usd"] == 2.0
    [proposal] = run["proposals"]
    assert (proposal["state"], proposal["steps"], proposal["probabilities"]) == (
        "accepted",
        [0, 1],
        {"0": 0.5, "1": 0.5},
    )
    first, last = run["steps"]
    assert (first["access"], last["access"]) == (["user"], ["user", 0])
    [attempt] = last["attempts"]
    assert (attempt["worker"], attempt["outcome"], attempt["cost_usd"]) == ("alpha", "ok", 0.00005)
    assert attempt["usage"]["output"] == 7
    assert run["usage"]["total_tokens"] == 17
    assert run["cost_usd"] == 0.0001
    assert not any(text in str(run) for text in TEXTS.values())


async def test_the_id_of_a_completion_names_its_run(gateway: GatewayStandIn, key: str) -> None:
    assert (await get(gateway, key, "/v1/runs/chatcmpl-run_mine"))["id"] == "run_mine"


async def test_events_come_in_pages(gateway: GatewayStandIn, key: str) -> None:
    event_numbers: list[int] = []
    path = "/v1/runs/run_mine/events?limit=5"
    while path:
        page = await get(gateway, key, path)
        event_numbers += [event["seq"] for event in page["data"]]
        assert (page["first_id"], page["last_id"]) == (str(page["data"][0]["seq"]), str(event_numbers[-1]))
        path = f"/v1/runs/run_mine/events?limit=5&after={page['next']}" if page["has_more"] else ""
    assert event_numbers == list(range(1, 15))
    every = await get(gateway, key, "/v1/runs/run_mine/events")
    assert every["data"][0]["kind"] == "run.admitted"
    assert every["data"][-1]["kind"] == "run.succeeded"


async def test_a_step_shows_what_its_worker_saw(gateway: GatewayStandIn, key: str) -> None:
    first = await get(gateway, key, "/v1/runs/run_mine/steps/0")
    question = {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}
    assert first["messages"][0] == question
    assert "Think." in first["messages"][1]["content"][0]["text"]
    assert first["output"] == "Two twos."
    assert first["attempts"][0]["output"] == "Two twos."
    assert first["erased"] is False
    last = await get(gateway, key, "/v1/runs/run_mine/steps/1")
    assert "Two twos." in last["messages"][1]["content"][0]["text"]
    assert (last["subtask"], last["output"]) == ("Answer.", "Four.")


async def test_erased_content_is_said_to_be_erased(gateway: GatewayStandIn, key: str) -> None:
    gateway.store.stored_contents = {}
    step = await get(gateway, key, "/v1/runs/run_mine/steps/1")
    assert step["erased"] is True
    assert step["messages"] is step["output"] is step["subtask"] is None
    assert step["usage"]["output"] == 7


@pytest.mark.parametrize("n", ["2", "-1", "x", "0.5", "٣", "1" * 50])
async def test_a_step_that_is_none(gateway: GatewayStandIn, key: str, n: str) -> None:
    await get(gateway, key, f"/v1/runs/run_mine/steps/{n}", 404)
