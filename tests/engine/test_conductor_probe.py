"""The conductor's pulse: a dead engine is found without traffic, and the fallback serves until it is back."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.pool.breaker import REPORT_SECONDS, UNREACHABLE, Breaker, CallEnd, after_call, after_probe
from app.core.pool.catalog import Catalog, ConductorSpec, Worker
from app.core.run.events import Kind
from app.engine.conductors import probe
from app.engine.conductors.probe import LOOK_SECONDS, conductors
from app.process.wiring import Runtime
from tests.harness.in_process import Outcome, events, finish, limits_with, order, plan_text, pool_text, running_service
from tests.harness.prepared_apps import app_over
from tests.harness.waiting import assert_stays, until
from tests.stubs import Drop, Fail, Hang, ProviderStub, ReceivedRequest, Reply, Stall, Truncate

PLAN = plan_text((0, "Solve it", ["user"]))
PROBE = 1.0
OFTEN = 0.5
"""Instead of `LOOK_SECONDS`, for the tests' sake."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LOOK_SECONDS", OFTEN)


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("planner", Reply(chunks=(PLAN,)))
        yield running


@asynccontextmanager
async def run_watched_service(
    stub: ProviderStub, folder: Path, *, price: float = 0, more: str = ""
) -> AsyncIterator[Runtime]:
    """A service whose conductor costs that much, under watch."""
    text = pool_text(stub).replace('worker = "planner" }', f'worker = "planner", probe = {PROBE}{more} }}')
    before, planner = text.split("[workers.planner]")
    priced = planner.replace("input = 1.00, output = 2.00, cached = 0.50", f"input = {price}, output = {price}", 1)
    stopping = asyncio.Event()
    async with (
        running_service(folder, f"{before}[workers.planner]{priced}") as runtime,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(runtime.conductor_probe.run(stopping))
        try:
            yield runtime
        finally:
            stopping.set()


def probes(stub: ProviderStub) -> list[ReceivedRequest]:
    """Requests for one token."""
    return [request for request in stub.requests_for("planner") if b"Say ok." in request.body]


def is_out(runtime: Runtime) -> bool:
    return runtime.context.health.is_out(runtime.pool.catalog().workers["planner"])


async def run(runtime: Runtime) -> Outcome:
    return await finish(await runtime.runs.start(order(runtime, "baton-ultra")))


async def readiness(runtime: Runtime) -> tuple[int, dict[str, Any]]:
    with app_over(runtime.gateway) as app:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
            reply = await client.get("/readyz")
    return reply.status_code, reply.json()


def test_ten_seconds_are_enough_at_the_default() -> None:
    assert 2 * LOOK_SECONDS + 2 * ConductorSpec("model", "planner").probe <= 10
    probe = ConductorSpec("model", "planner").probe
    assert 2 * LOOK_SECONDS + probe < REPORT_SECONDS, "what was found holds until it is found anew"


@pytest.mark.parametrize(
    "dead", [Hang(), Drop(), Reply(fault=Stall(after=0)), Reply(chunks=(), fault=Truncate(after=0))]
)
@pytest.mark.long
async def test_a_dead_engine_is_found_without_traffic_and_its_return_too(
    stub: ProviderStub, tmp_path: Path, dead: Any
) -> None:
    async with run_watched_service(stub, tmp_path) as runtime:
        await until(lambda: bool(probes(stub)))
        assert (await readiness(runtime))[1]["checks"]["conductor"] == "ok"
        stub.always("planner", dead)
        await until(lambda: is_out(runtime))
        assert await readiness(runtime) == (
            200,
            {"status": "degraded", "checks": {"store": "ok", "queue": "ok", "conductor": "degraded"}},
        )
        count_before = len(stub.requests_for("planner")) - len(probes(stub))
        state = (await run(runtime)).ended.state
        assert len(stub.requests_for("planner")) - len(probes(stub)) == count_before, "nobody waits for it"
        assert [(proposal.mode, proposal.outage, proposal.reasons) for proposal in state.proposals] == [
            ("first", True, ("conductor_out",)),
            ("fallback", False, ()),
        ]
        assert state.degraded
        assert [
            event.body["worker"] for event in await events(runtime, state.run) if event.kind is Kind.CALL_INTENDED
        ] == ["beta"]
        metrics = runtime.context.telemetry.exposition().decode()
        for sample in (
            'baton_plans_total{outcome="outage",tier="baton-ultra"} 1.0',
            'baton_degraded_total{tier="baton-ultra"} 1.0',
            'baton_breaker_state{worker="planner"} 2.0',
            'baton_ejections_total{reason="out",worker="planner"} 1.0',
        ):
            assert sample in metrics
        stub.always("planner", Reply(chunks=(PLAN,)))
        await until(lambda: not is_out(runtime))
        assert not (await run(runtime)).ended.state.degraded
        assert (await readiness(runtime))[1]["status"] == "ready"


@pytest.mark.long
async def test_a_plan_that_waits_for_a_dead_engine_is_given_up(stub: ProviderStub, tmp_path: Path) -> None:
    async with run_watched_service(stub, tmp_path) as runtime:
        stub.always("planner", Hang())
        outcome = await run(runtime)
        assert outcome.ended.answer == "Hello there."
        state = outcome.ended.state
        assert [proposal.reasons for proposal in state.proposals] == [("conductor_out",), ()]
        assert sorted(str(call.outcome) for call in state.calls.values()) == ["cancelled", "ok"]


async def test_who_works_is_not_asked(stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Catalog] = []

    def count_looks(catalog: Catalog) -> Iterator[tuple[Worker, float]]:
        looks.append(catalog)
        return conductors(catalog)

    monkeypatch.setattr(probe, "conductors", count_looks)
    async with run_watched_service(stub, tmp_path) as runtime:
        await until(lambda: bool(probes(stub)), what="at the start nothing is known of it")
        seconds = time.monotonic()
        monkeypatch.setattr(runtime.context.health, "_monotonic", lambda: seconds)
        await run(runtime)
        await until(lambda: not runtime.conductor_probe._being_probed)
        looks_before, probes_before = len(looks), len(probes(stub))
        await until(lambda: len(looks) >= looks_before + 3)
        assert len(probes(stub)) == probes_before, "it has just answered, by a clock that stands still"
        assert not is_out(runtime)
        seconds += OFTEN
        await until(lambda: len(probes(stub)) > probes_before, what="it has been silent")


async def test_who_costs_money_is_asked_only_after_it_failed(stub: ProviderStub, tmp_path: Path) -> None:
    async with run_watched_service(stub, tmp_path, price=1.0) as runtime:
        await run(runtime)
        await assert_stays(lambda: probes(stub) == [], seconds=2 * OFTEN + 0.5)
        stub.always("planner", Fail(status=500))
        await run(runtime)
        await until(lambda: is_out(runtime))
        stub.always("planner", Reply(chunks=(PLAN,)))
        await until(lambda: not is_out(runtime))


async def test_who_costs_money_and_failed_once_is_asked_until_it_answers(stub: ProviderStub, tmp_path: Path) -> None:
    async with run_watched_service(stub, tmp_path, price=1.0) as runtime:
        stub.script("planner", Fail(status=500))
        await run(runtime)
        await until(lambda: len(probes(stub)) == 1)
        await assert_stays(lambda: len(probes(stub)) == 1, seconds=2 * OFTEN + 0.5)


@pytest.mark.parametrize("refusal", [Fail(status=429), Fail(status=400)])
async def test_a_refusal_in_good_form_is_a_sign_of_life(stub: ProviderStub, tmp_path: Path, refusal: Fail) -> None:
    async with run_watched_service(stub, tmp_path) as runtime:
        stub.always("planner", refusal)
        await until(lambda: len(probes(stub)) >= 2)
        assert not is_out(runtime)


async def test_a_slow_conductor_leaves_the_steps_their_time(stub: ProviderStub, tmp_path: Path) -> None:
    stub.always("planner", Reply(chunks=tuple(PLAN), gap=0.2))
    async with run_watched_service(stub, tmp_path, more=", share = 0.05") as runtime:
        limits = limits_with(runtime, "baton-ultra", seconds=20.0)
        followed_run = await runtime.runs.start(order(runtime, "baton-ultra", limits=limits))
        outcome = await finish(followed_run)
        assert (outcome.ended.answer, outcome.ended.state.degraded) == ("Hello there.", True)
        assert outcome.ended.state.proposals[0].reasons == ("worker_timeout",)


def test_a_sign_of_life_excuses_no_failure_and_closes_what_a_probe_opened() -> None:
    failing = Breaker()
    for second in range(5):
        failing = after_call(failing, CallEnd("failing", float(second)), now=float(second), chance=1.0)
    assert failing.state(4.0) == "open"
    assert after_probe(failing, alive=True, now=4.0) == failing
    dead = after_probe(Breaker(), alive=False, now=10.0)
    assert (dead.reason, dead.objection(10.0)) == (UNREACHABLE, UNREACHABLE)
    again = after_probe(dead, alive=False, now=15.0)
    assert (again.since, again.until) == (10.0, 15.0 + REPORT_SECONDS)
    assert after_probe(again, alive=True, now=16.0).state(16.0) == "closed"
    assert after_call(dead, CallEnd("good", 9.0), now=11.0, chance=0.0).state(11.0) == "open", (
        "an old call proves nothing"
    )
