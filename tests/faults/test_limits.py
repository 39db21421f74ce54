"""F-07: the limits of a key over several gateways hold when a gateway is killed and when Redis is emptied."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.faults.fleet import PRESENT, Fleet, fleet
from tests.faults.points import at
from tests.harness.processes import KEY
from tests.harness.waiting import wait_until
from tests.stubs import Reply

pytestmark = pytest.mark.timeout(300)
OPEN_RUNS = 5
REQUESTS = 8
"""Requests a minute: two more than the first half of the test makes, and fewer than may be open again after it."""
BODY = {"model": "baton-mini", "input": "Hi", "background": True}


def post(url: str, path: str = "/v1/responses", body: dict[str, Any] | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{url}{path}", json=body or BODY, headers=headers, timeout=30, trust_env=False)


def burst(scene: Fleet, each: int) -> list[httpx.Response]:
    """So many requests at each gateway, at the same time."""
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(post, scene.urls * each))


@at("F-07", "a gateway killed and Redis emptied", "no more open runs, and no more requests a minute, than the limits")
def test_limits_hold_without_a_gateway_and_without_redis(tmp_path: Path) -> None:
    with fleet(tmp_path) as scene:
        scene.environ = {**scene.environ, "BATON_KEY_LIMITS": f"rpm={REQUESTS}, concurrency={OPEN_RUNS}"}
        scene.stub.always("alpha", Reply(header_delay=600.0))
        PRESENT.migrate(tmp_path, scene.environ)
        scene.add(PRESENT, "gateway", 3)
        scene.add(PRESENT, "dispatcher", 1)
        scene.wait()
        began = time.monotonic()
        admitted = [reply for reply in burst(scene, 4) if reply.status_code == 200]
        assert len(admitted) == OPEN_RUNS
        killed, *_ = scene.processes["gateway"]
        killed.kill()
        with redis.Redis.from_url(scene.environ["BATON_REDIS_URL"]) as server:
            server.flushall()
        other = scene.urls[1]
        refused = post(other)
        assert (refused.status_code, "open" in refused.json()["error"]["message"]) == (429, True)
        first, *others = [reply.headers["x-baton-run"] for reply in admitted]
        cancel(other, first)
        assert post(other).status_code == 200, "its place came back with its end"
        for run in others:
            cancel(other, run)
        killed.start()
        scene.wait()
        passed = [reply for reply in burst(scene, 4) if reply.status_code == 200]
        assert len(passed) == REQUESTS - OPEN_RUNS - 1 or time.monotonic() - began > 60.0


def cancel(url: str, run: str) -> None:
    """End a run, and wait until it has ended."""
    headers = {"authorization": f"Bearer {KEY}"}
    assert post(url, f"/v1/runs/{run}/cancel", {}).status_code < 300

    def has_ended() -> bool:
        row = httpx.get(f"{url}/v1/runs/{run}", headers=headers, timeout=30, trust_env=False).json()
        return row["ended_at"] is not None

    wait_until(has_ended, what="the run ends")
