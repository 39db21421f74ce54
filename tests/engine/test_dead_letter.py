"""A step over which one dispatcher after the other falls silent is given up; its run ends, and no other run notices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.core.pool.catalog import Amount
from app.core.run.events import Kind
from app.engine.delivery.messages import FollowedRun
from app.engine.steps.execution import MOST_DELIVERIES, Execution
from app.errors import NotFound
from app.process.wiring import Runtime
from app.store.protocol import Entry, TicketMove
from tests.harness.ends import end_of
from tests.harness.in_process import events, finish, kinds, limits_with, order, plan, pool_text, running_service
from tests.harness.raw_facts import fact_from_json
from tests.harness.waiting import until
from tests.stubs import ProviderStub, Reply, Stall

PATIENT = {"BATON_LEASE_SECONDS": "0.6"}


@asynccontextmanager
async def silent_house(stub: ProviderStub, folder: Path) -> AsyncIterator[Runtime]:
    """A house whose dispatcher does not work until it is told to (`runtime.dispatcher.run`)."""
    async with running_service(folder, pool_text(stub), PATIENT, dispatches=False, audits=False) as runtime:
        yield runtime


async def die(runtime: Runtime, run: str, times: int, *, with_intent: bool = False, step: int = 0) -> None:
    """Claim a step, begin with it and disappear, as a dispatcher that dies."""
    store, now = runtime.context.store, runtime.context.now()
    due = await store.find_ticket(run, step)
    assert due is not None
    for n in range(times):
        body = {"call": f"call_{n}", "n": step, "worker": "alpha", "access": ["user"], "usd_held": 5, "tokens_held": 7}
        intent = (fact_from_json(Kind.CALL_INTENDED, body),) if with_intent else ()
        move = TicketMove(step, "take", version=due.version + n, holder=f"dead-{n}", until=now - 1)
        await store.append(Entry(run, now, intent, move=move, hold=Amount(5, 7) if with_intent else Amount()))


async def dispatch_to_end(runtime: Runtime, followed_run: FollowedRun) -> str:
    """Let the dispatcher work; the state in which the run ends, and why."""
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(runtime.dispatcher.run(stopping))
        outcome = (await finish(followed_run)).ended
        stopping.set()
    return f"{outcome.state.state} {end_of(outcome.state).error}".strip()


async def test_a_step_that_silences_its_dispatchers_is_given_up(stub: ProviderStub, tmp_path: Path) -> None:
    async with silent_house(stub, tmp_path) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await die(runtime, followed_run.run, MOST_DELIVERIES - 1)
        await die(runtime, followed_run.run, 1, with_intent=True)
        assert await dispatch_to_end(runtime, followed_run) == "failed dead_letter"
        assert stub.requests == []
        journal = await events(runtime, followed_run.run)
        tail = [(event.kind, event.body) for event in journal if event.kind in (Kind.CALL_FINISHED, Kind.STEP_FAILED)]
        assert [kind for kind, _ in tail] == [Kind.CALL_FINISHED, Kind.STEP_FAILED]
        assert (tail[0][1]["call"], tail[0][1]["outcome"], tail[0][1]["usd"]) == ("call_0", "unknown", 5)
        assert tail[1][1] == {"n": 0, "error": "dead_letter", "deliveries": MOST_DELIVERIES}
        row = await runtime.context.store.run(followed_run.run)
        assert (row.held, row.spent) == (Amount(), Amount(5, 7))
        assert await runtime.context.store.find_ticket(followed_run.run, 0) is None
        assert b'baton_dead_letters_total{tier="baton-mini"} 1.0' in runtime.context.telemetry.exposition()


async def test_one_dispatcher_less_and_the_step_is_tried_again(stub: ProviderStub, tmp_path: Path) -> None:
    async with silent_house(stub, tmp_path) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await die(runtime, followed_run.run, MOST_DELIVERIES - 1)
        assert await dispatch_to_end(runtime, followed_run) == "succeeded"


async def test_other_runs_and_steps_go_on(stub: ProviderStub, tmp_path: Path) -> None:
    async with silent_house(stub, tmp_path) as runtime:
        brave = plan(("alpha", "Die.", ["user"]), ("beta", "Answer.", ["user", 0]))
        poisoned = await runtime.runs.start(order(runtime, "baton-mini", plan=brave))
        other = await runtime.runs.start(order(runtime, "baton-mini"))
        await die(runtime, poisoned.run, MOST_DELIVERIES)
        assert await dispatch_to_end(runtime, other) == "succeeded"
        assert await dispatch_to_end(runtime, poisoned) == "succeeded"
        assert Kind.STEP_FAILED in kinds(await events(runtime, poisoned.run))
        assert (await runtime.context.store.run(poisoned.run)).degraded


async def test_steps_that_were_lost_together_are_executed_one_by_one_before_one_is_given_up(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing shows which of them was the cause: executed together they would all be given up."""
    perform, let_go = Execution.perform, asyncio.Event()
    returned: list[int] = []
    workers = ["alpha", "beta"]

    async def perform_and_note(execution: Execution) -> None:
        await perform(execution)
        returned.append(execution._ticket.step)

    monkeypatch.setattr(Execution, "perform", perform_and_note)
    for worker in workers:
        stub.always(worker, Reply(fault=Stall(seconds=let_go)))
    async with silent_house(stub, tmp_path) as runtime:
        pair = plan(("alpha", "Live.", ["user"]), ("beta", "Die.", ["user"]))
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", plan=pair))
        for step in (0, 1):
            await die(runtime, followed_run.run, MOST_DELIVERIES - 1, step=step)
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(dispatch_to_end(runtime, followed_run))
            await until(lambda: stub.requests and (returned or len(stub.requests) > 1))
            assert (len(returned), len(stub.requests)) == (1, 1)
            postponed = await runtime.context.store.find_ticket(followed_run.run, returned[0])
            assert postponed is not None
            assert postponed.holder == f"dead-{MOST_DELIVERIES - 2}", "nobody has claimed it"
            let_go.set()
        assert ending.result() == "succeeded"
        assert sorted(request.model for request in stub.requests) == workers


@pytest.mark.long
async def test_the_claim_comes_before_what_could_kill_again(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose text alone is fatal leaves no intent: only a claim that was taken before shows that it happened."""

    async def fatal(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("app.engine.steps.execution.view_of_step", fatal)
    async with silent_house(stub, tmp_path) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", limits=limits_with(runtime, "baton-mini")))
        assert await dispatch_to_end(runtime, followed_run) == "failed dead_letter"


async def test_erased_content_fails_the_step_at_once(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_not_found(*_: object) -> None:
        raise NotFound

    monkeypatch.setattr("app.engine.steps.execution.view_of_step", raise_not_found)
    async with silent_house(stub, tmp_path) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        assert await dispatch_to_end(runtime, followed_run) == "failed content_erased"
