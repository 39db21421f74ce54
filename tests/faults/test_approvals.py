"""Plans that wait for approvals while processes are killed, stopped and started again: no step begins without a valid
one, whatever decisions come late, twice or altered.

`APPROVED_RUNS=100 python -m pytest -m faults_suite tests/faults/test_approvals.py` plays fewer runs.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Event as Flag
from typing import Any

import httpx
import pytest

from app.core.run.events import Kind
from tests.faults.accounts import Account, accounts, settle
from tests.faults.fleet import PRESENT, VERBS, Release, fleet, unpack_release
from tests.faults.network_proxy import NetworkProxy
from tests.faults.points import at
from tests.faults.scene import Scene, pool, scene
from tests.harness.processes import KEY, Process
from tests.harness.waiting import wait_until
from tests.stubs.control import StubControl

pytestmark = pytest.mark.timeout(1_200)
RUNS = int(os.environ.get("APPROVED_RUNS", "1000"))
CALLERS = 8
WAIT = 120.0
"""Seconds for which a plan waits."""
SECONDS = 15.0
"""The time of a turn, which most plans wait longer than."""
HEADERS = {"authorization": f"Bearer {KEY}"}
QUESTION = {"model": "baton-mini", "messages": [{"role": "user", "content": "Go on."}]}
PATIENCE = 120.0


def asking(stub: StubControl, to_stub: NetworkProxy) -> str:
    """Return the usual pool file, whose `baton-mini` needs an approval of each plan, also by the key that asked."""
    rules = f"\n[tiers.baton-mini.approval]\nalways = true\nseconds = {WAIT}\nfour_eyes = false\n"
    return pool(stub, to_stub, seconds=SECONDS) + rules


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("approvals"), gateways=2, dispatchers=2, pools=asking) as new_scene:
        yield new_scene


def send(system: Scene, chance: random.Random, verb: str, path: str, body: Any = None) -> httpx.Response:
    """A request to any gateway, sent again while none answers."""

    def find_answer() -> httpx.Response | None:
        gateway = chance.choice(system.gateways)
        try:
            reply = httpx.request(verb, f"{gateway.url}{path}", json=body, headers=HEADERS, timeout=30, trust_env=False)
        except httpx.HTTPError:
            return None
        return reply if reply.status_code < 500 and reply.status_code != 429 else None

    return wait_until(find_answer, within=PATIENCE, what=f"{verb} {path} is answered")


def begin_run(system: Scene, seed: int) -> None:
    """A run whose plan waits; a request whose gateway was killed may have begun one as well."""
    send(system, random.Random(seed), "POST", "/v1/chat/completions", QUESTION)


def decide(system: Scene, place: int, run: str) -> str:
    """Decide on one run: approve it, approve it twice at once, refuse it, or send what must not count. A decision that
    comes after the end of the wait is late, whatever it was to be."""
    chance = random.Random(f"{run}")
    path = f"/v1/approvals/{run}"
    digest = send(system, chance, "GET", path).json()["digest"]
    kind = ("approved", "twice", "refused", "altered", "late")[place % 5]
    body = {"decision": "refuse" if kind == "refused" else "approve", "digest": digest}
    if kind == "altered":
        altered = digest[:-1] + ("0" if digest[-1] != "0" else "1")
        assert send(system, chance, "POST", path, body | {"digest": altered}).status_code == 409
    elif kind in ("approved", "refused") and send(system, chance, "POST", path, body).status_code == 409:
        return "late"
    elif kind == "twice":
        with ThreadPoolExecutor(2) as both:
            replies = list(both.map(lambda n: send(system, random.Random(n), "POST", path, body), range(2)))
        assert len({reply.status_code for reply in replies}) == 1
    return kind


def kill_or_stop_until(system: Scene, over: Flag) -> int:
    """Kill or stop one process after the other until it is over; the number of those that were."""
    chance, count = random.Random(7), 0
    while not over.wait(1.0):
        process: Process = chance.choice(system.processes)
        process.kill() if chance.random() < 0.6 else process.stop()
        system.mend()
        count += 1
    return count


def without_approval(run: Account) -> int:
    """Return the calls of steps that no approval comes before."""
    approved = [event.seq for event in run.events if event.kind is Kind.APPROVED]
    calls = [event for event in run.events if event.kind is Kind.CALL_INTENDED and event.body["n"] is not None]
    return sum(not approved or event.seq < approved[0] for event in calls)


@at("F-31", "processes killed and stopped while plans wait for approvals", "0 steps without a valid approval")
def test_no_step_is_executed_without_a_valid_approval(
    shared_scene: Scene, record_property: Callable[[str, object], None]
) -> None:
    shared_scene.reset()
    over = Flag()
    breaking = shared_scene.aside(kill_or_stop_until, shared_scene, over)
    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(lambda seed: begin_run(shared_scene, seed), range(RUNS)))
        waiting = [
            row[0] for row in shared_scene.rows("SELECT id FROM runs WHERE state = 'awaiting_approval' ORDER BY id")
        ]
        kinds = dict(
            zip(
                waiting,
                callers.map(lambda arguments: decide(shared_scene, *arguments), enumerate(waiting)),
                strict=True,
            )
        )
        over.set()
        restarts = breaking.result(PATIENCE)
        wait_until(lambda: not shared_scene.open_runs(), within=WAIT + PATIENCE, what="every run has ended")
        late = [run for run, kind in kinds.items() if kind == "late"][:50]
        for run in late:
            approval = httpx.get(
                f"{shared_scene.gateway.url}/v1/approvals/{run}", headers=HEADERS, trust_env=False
            ).json()
            body = {"decision": "approve", "digest": approval["digest"]}
            assert send(shared_scene, random.Random(1), "POST", f"/v1/approvals/{run}", body).status_code == 409
    assert settle(shared_scene, 60) == [], "the auditor finds no step without its approval either"
    ours = {run.id: run for run in accounts(shared_scene.database)}
    assert len(ours) >= RUNS
    assert sum(without_approval(run) for run in ours.values()) == 0
    for run, kind in kinds.items():
        called, state = bool(ours[run].bodies(Kind.CALL_INTENDED)), ours[run].row["state"]
        if kind in ("approved", "twice"):
            assert len(ours[run].bodies(Kind.APPROVED)) <= 1, "a decision is written once"
        else:
            assert (called, state) == (False, "failed" if kind == "refused" else "expired"), (run, kind)
    ended = Counter((kind, ours[run].row["state"]) for run, kind in kinds.items())
    record_property("measured", f"{len(ours)} runs, {restarts} restarts, {dict(ended)}")


BEFORE = "6d1c2d0b53e6293b8209b60f3e590daa3397dad0"
"""A commit with approvals, before the present one."""
APPROVED = """
[tiers.approved]
pool = ["beta"]
conductor = { kind = "fixed", shape = "single", workers = ["beta"] }
limits = { seconds = 60 }
[tiers.approved.approval]
always = true
seconds = 900
four_eyes = false
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The code of that commit, under the present version, so that either takes the other's runs."""
    release = unpack_release(BEFORE, version("baton"), tmp_path_factory.mktemp("before"), unknown=())
    if release is None:
        pytest.skip(f"this clone does not have the commit {BEFORE}")
    return release


def ask_gateway(url: str, verb: str, path: str, body: Any = None) -> Any:
    reply = httpx.request(verb, f"{url}{path}", json=body, headers=HEADERS, timeout=30, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


@at("F-31", "every process replaced by a later one while plans wait for approvals", "they go on as they were decided")
def test_plans_that_wait_for_an_approval_outlive_an_upgrade(tmp_path: Path, earlier: Release) -> None:
    """Some are decided before, some while gateways are of the earlier code and engines of the present one, and the rest
    when nothing of the earlier one runs any more."""
    with fleet(tmp_path) as system:
        with (tmp_path / "pool.toml").open("a") as file:
            file.write(APPROVED)
        earlier.migrate(tmp_path, system.environ)
        for verb in VERBS:
            system.add(earlier, verb, 1)
        system.wait()
        (url,) = system.urls
        question = QUESTION | {"model": "approved"}
        runs = [ask_gateway(url, "POST", "/v1/chat/completions", question)["baton"]["run"] for _ in range(6)]

        def decide(run: str, decision: str) -> None:
            digest = ask_gateway(url, "GET", f"/v1/approvals/{run}")["digest"]
            ask_gateway(url, "POST", f"/v1/approvals/{run}", {"decision": decision, "digest": digest})

        decide(runs[0], "approve")
        decide(runs[1], "refuse")
        PRESENT.migrate(tmp_path, system.environ)
        system.replace(PRESENT, "dispatcher", 0)
        decide(runs[2], "approve")
        decide(runs[3], "refuse")
        system.replace(PRESENT, "gateway", 0)
        waiting = ask_gateway(url, "GET", "/v1/approvals")["data"]
        assert {approval["run"] for approval in waiting} == set(runs[4:])
        decide(runs[4], "approve")
        decide(runs[5], "refuse")
        states = {run["id"]: (run["state"], run["error"]) for run in system.runs()}
        expected = [("succeeded", None), ("failed", "approval_refused")] * 3
        assert [states[run] for run in runs] == expected
        assert system.violations() == []
        assert len(system.stub.requests("beta")) == 3, "each approved step was executed once, no other one"
