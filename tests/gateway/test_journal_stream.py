"""The journal of a run as a stream: every event once and in order, whatever breaks, until the run has ended."""

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import httpx

from app.gateway.runs.journal_stream import JournalWatch
from tests.harness.in_process import plan, script_answers
from tests.harness.waiting import until
from tests.stubs import Hang, ProviderStub

STEPS = plan(("alpha", "Think about it", ["user"]), ("beta", "Answer it", [0]))


async def follow(client: httpx.AsyncClient, run: str, after: int | None = None) -> list[tuple[int, dict[str, Any]]]:
    """The events of a stream until its end, each with its id."""
    headers = {"last-event-id": str(after)} if after is not None else {}
    reply = await client.get(f"/v1/runs/{run}/events/stream", headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [(int(id_), json.loads(data)) for id_, data in re.findall(r"id: (\d+)\ndata: (.*)\n\n", reply.text)]


async def test_events_are_sent_as_they_are_committed_and_a_reconnect_goes_on_behind_the_last_one(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    script_answers(stub)
    stub.script("beta", Hang())
    order = {"model": "baton-mini", "input": "2 + 2?", "background": True, "baton": {"plan": STEPS}}
    run = (await client.post("/v1/responses", json=order)).json()["id"].removeprefix("resp_")
    await until(lambda: any(request.model == "beta" for request in stub.requests))
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow(client, run))
        await asyncio.sleep(0)
        assert (await client.post(f"/v1/runs/{run}/cancel")).status_code == 200
    whole = (await client.get(f"/v1/runs/{run}/events")).json()["data"]
    assert whole[-1]["kind"] in ("run.cancelled", "call.finished")
    assert [body for _, body in following.result()] == whole
    assert [id_ for id_, _ in following.result()] == [event["seq"] for event in whole]
    for cut in (0, 1, len(whole) // 2, len(whole)):
        assert [id_ for id_, _ in await follow(client, run, cut)] == list(range(cut + 1, len(whole) + 1))


async def test_all_streams_of_a_process_share_one_look_at_the_database() -> None:
    looks: list[list[str]] = []

    class Store:
        async def last_seqs(self, names: list[str]) -> dict[str, int]:
            looks.append(names)
            return dict.fromkeys(names, 5)

    context: Any = SimpleNamespace(store=Store(), tick=lambda: 0.0)
    watch = JournalWatch(context)
    for n in range(50):
        watch.begin(f"run_{n}")
    assert all(await asyncio.gather(*[watch.wait_for_event(f"run_{n}", 4, 1.0) for n in range(50)]))
    assert [len(names) for names in looks] == [50]
