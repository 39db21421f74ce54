"""The runs that an engine drives: how it takes them, keeps their leases, and hands them back.

An engine takes a run that nobody drives when it has a free slot for a step: because it took the run's ticket from the
queue, because a gateway in the same process asks it to, because it still holds the state of a run whose caller came
back with tool results, or because it found the run in the database (`recovery.py`). The entry that takes the lease
carries all that follows, and only one engine's entry fits the run's epoch.

A lease lasts `EngineContext.lease` seconds and is renewed every third of that. A driver whose lease is gone is stopped;
the engine that finds the run takes it over with a higher epoch, folds its journal and goes on. The renewal also returns
which journals have moved, so that a driver that missed a message reads its journal again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import orjson
from msgspec.structs import replace

from app.conductor.protocol import FixedPlanConductor, Policy
from app.conductor.recorded import RecordedConductor
from app.core.message.chat import Task
from app.core.plan.proposals import by_name, read_plan
from app.core.plan.workflow import Step
from app.core.run.events import Event, Kind
from app.core.run.fold import apply_facts, fold
from app.core.run.state import CALLER, FALLBACK, REPLAY, RunState, StepState
from app.engine.calls.step_request import bodies_of, task_of
from app.engine.commit.colocation import StepStarter
from app.engine.commit.run_writer import RunSnapshot, run_ticket
from app.engine.context import EngineContext, WaitingRuns
from app.engine.periodic import wait_for_event
from app.engine.renewal import renew_regularly
from app.engine.runs import replays, tool_results
from app.engine.runs.driver import Driver, JournalAdvance
from app.engine.runs.planning import PlannerMessage
from app.engine.runs.recovery import Recovery, hand_back, has_begun
from app.engine.runs.tool_results import NextTurn, Resumption
from app.errors import (
    BatonError,
    ConfigInvalid,
    Conflict,
    LeaseLost,
    NotFound,
    Overloaded,
    PlanRejected,
    QueueUnavailable,
    RunEnded,
    StoreUnavailable,
    WorkerUnavailable,
)
from app.network.tracing import Span, end_run_span, start_run_span
from app.stepqueue.protocol import (
    AGAIN,
    DISPATCHERS,
    CommittedEvents,
    Delta,
    EngineChange,
    ListenRequest,
    Live,
    Stop,
)
from app.store.protocol import MOVED, Entry, Lease, Outbox

E = TypeVar("E", bound=Exception)
LEASES_NOT_RENEWED = "The leases of runs could not be renewed; this is tried again until they lapse."
WATCH_SECONDS = 0.25
"""Time between two looks for journals that have moved, while the step queue is unavailable."""
SWEEP_SECONDS = 0.5
"""Mean time between two looks for runs that nobody drives."""


class Drivers:
    """All drivers of this process, between `run` entering and leaving."""

    def __init__(self, context: EngineContext, *, home: str, bound: int, spread: bool = False) -> None:
        """`home` is this process's address on the queue; at most `bound` runs are driven at once. With `spread` every
        step goes through the queue to any engine, instead of being begun here while there is a slot for it."""
        self._context = context
        self._home = home
        self._bound = bound
        self.spread = spread
        self.dispatcher: StepStarter | None = None
        """The dispatcher of this process; None where steps are not executed."""
        self.recovers = True
        """True if runs that nobody drives are looked for and taken; commands, which have runs of their own, set it to
        False."""
        self._drivers: dict[str, Driver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._being_taken: set[str] = set()
        """Runs that are just being taken; each holds one of the slots."""
        self._waiting: WaitingRuns[RunSnapshot] = WaitingRuns()
        """States of runs that were driven here and wait for their callers."""
        self._group: asyncio.TaskGroup | None = None
        self._recovery = Recovery(context, home=home, take=self._take_over)
        self._adopted: list[str] = []
        """Runs whose former engine may just have been sent messages that are meant for this one."""
        self._sweep_now = asyncio.Event()
        self._renewing = asyncio.Lock()
        context.telemetry.watch("baton_runs_driven", lambda: len(self._drivers))

    async def run(self, stopping: asyncio.Event) -> None:
        """Drive until `stopping` is set; runs that are still going are handed back for others to take."""
        async with self._context.queue.subscribe(self._home, self.receive), asyncio.TaskGroup() as group:
            self._group = group
            renewal = renew_regularly(
                self._context, self._renew, self._lose, is_over=lambda: not self.is_open, failed=LEASES_NOT_RENEWED
            )
            loops = (renewal, self._watch_for_ever(), self._sweep_for_ever())
            loop_tasks = [group.create_task(loop) for loop in loops]
            try:
                await stopping.wait()
            finally:
                self._group = None
                unfinished = dict(self._drivers)
                for task in (*loop_tasks, *self._tasks.values()):
                    task.cancel()
        await hand_back(self._context, self._home, unfinished)

    def __len__(self) -> int:
        return len(self._drivers)

    def driver_of(self, run: str) -> Driver | None:
        """Return the driver of a run; None if it is not driven here."""
        return self._drivers.get(run)

    @property
    def is_open(self) -> bool:
        """Return True while runs can be driven."""
        return self._group is not None

    @property
    def free_places(self) -> int:
        """Return how many more runs may be driven here, be there slots for their steps or not."""
        if self._group is None or not self._context.clock_is_set():
            return 0
        about_to_be_driven = sum(run not in self._drivers for run in self._being_taken)
        return self._bound - len(self._drivers) - about_to_be_driven

    @property
    def room(self) -> int:
        """Return the number of runs that may be taken now."""
        if self.dispatcher is not None:
            return min(self.free_places, self.dispatcher.free_slots)
        return self.free_places

    @property
    def has_room(self) -> bool:
        """Return True if a run can be taken at once."""
        return self.room > 0

    @property
    def is_quiet(self) -> bool:
        """Return True while more than half of this engine's slots are free: work for which nobody waits then delays
        nobody."""
        slots = self._bound if self.dispatcher is None else min(self._bound, self.dispatcher.slots)
        return 2 * self.room > slots

    # -- taking runs

    async def admit(self, entry: Entry, state: RunState, salt: bytes, task: Task, conductor: Policy) -> None:
        """Commit the admission of a run and drive it from there; raises what `Store.append` raises."""
        if entry.new is None:
            raise ValueError("only an admission makes a new run")
        until = self._context.now() + self._context.lease
        entry = replace(entry, new=replace(entry.new, driver=self._home, lease_until=until))
        run = RunSnapshot(replace(state, seq=0), salt, epoch=1)
        span = start_run_span(self._context.tracing, state, taken_over=False)
        await self._begin(self._driver(run, task, conductor, span), entry)

    async def resume(self, next_turn: NextTurn, resumption: Resumption) -> None:
        """Commit a run's next turn and drive it from there; raises what `Store.append` raises."""
        run = resumption.waiting_run.snapshot
        task, policy = await _read_task_and_policy(self._context, run)
        lease = Lease(self._home, self._context.now() + self._context.lease, next_turn.deadline)
        tier = run.state.admitted.tier
        rows = tuple(Outbox(step, tier, self._home, next_turn.turn) for step in next_turn.steps)
        turn = apply_facts(run.state, next_turn.entry.events)
        span = start_run_span(self._context.tracing, turn, taken_over=False)
        entry = replace(next_turn.entry, lease=lease, outbox=rows)
        await self._begin(self._driver(run, task, policy, span), entry)

    async def take(self, run: str, events: tuple[Event, ...] = ()) -> bool:
        """Take a run that nobody drives, if that is still so. False if this process takes no runs now, so that the
        run's ticket must be kept for another one.

        `events` are those that follow the state that is kept here, if one is.
        """
        if run in self._drivers or run in self._being_taken:
            return True
        if self.free_places <= 0:
            return False
        self._being_taken.add(run)
        try:
            await self._take_now(run, events)
        except (LeaseLost, Conflict, RunEnded, NotFound):
            pass  # another engine was faster, or the run is over: neither is a fault
        except BatonError as error:
            self._context.telemetry.log(
                logging.WARNING, "A run could not be taken; an engine takes it later.", run=run, error=error.code
            )
        except Exception as bug:
            self._context.telemetry.log(
                logging.ERROR, "A run could not be taken because of a bug; an engine tries it again.", bug, run=run
            )
        finally:
            self._being_taken.discard(run)
            if self.dispatcher is not None:
                self.dispatcher.slot_freed()
        return True

    @property
    def runs_being_taken(self) -> int:
        """Return the number of runs that are being taken."""
        return len(self._being_taken)

    @property
    def plans_in_progress(self) -> int:
        """Return how many runs have a plan in the making."""
        return sum(driver.state.open_proposal is not None for driver in self._drivers.values())

    def receive(self, message: Live) -> None:
        """Take a message to this process about one of its runs, or about one whose caller has come back."""
        driver = self._drivers.get(message.run)
        if isinstance(message, ListenRequest):
            self._start_beside(message.run, partial(self._listen, message))
        elif driver is not None:
            if not isinstance(message, Delta | Stop | EngineChange):
                driver.inbox.put(message)
        elif isinstance(message, CommittedEvents):
            is_resumed = any(event.kind is Kind.RESUMED for event in message.events)
            if is_resumed:
                self._start_beside(message.run, partial(self._take_resumed, message))

    def _start_beside(self, run: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start work for one run beside the drivers; no error of it may end them."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as bug:
                self._context.telemetry.log(
                    logging.ERROR, "Work for a run failed because of a bug; other runs go on.", bug, run=run
                )

        if self._group is not None:
            self._group.create_task(guarded())

    async def _listen(self, message: ListenRequest) -> None:
        """Let a gateway follow a run. If it is not driven here, because it has ended or another engine has it, the
        gateway is asked to look at the journal."""
        driver = self._drivers.get(message.run)
        if driver is not None:
            return await driver.listen(message)
        with suppress(QueueUnavailable):
            await self._context.queue.publish(message.address, [CommittedEvents(message.run, ())])

    async def _take_resumed(self, message: CommittedEvents) -> None:
        """Take a run whose caller has come back to a gateway that knew this process as its engine."""
        if self.has_room:
            await self.take(message.run, message.events)

    async def _take_now(self, run: str, events: tuple[Event, ...]) -> None:
        held_run = self._waiting.take(run)
        if held_run is not None and events and events[0].seq == held_run.state.seq + 1:
            snapshot = RunSnapshot(fold(events, held_run.state), held_run.salt, held_run.epoch + 1)
        else:
            known_state, known_seq = None, 0
            if held_run is not None:
                known_state, known_seq = held_run.state, held_run.state.seq
            stored = await self._context.store.step_input(run, known_seq)
            if held_run is not None and stored.epoch > held_run.epoch + 1:
                # It was driven elsewhere, or the database has moved.
                known_state, stored = None, await self._context.store.step_input(run)
            snapshot = RunSnapshot(fold(stored.events, known_state), stored.salt, stored.epoch, stored.contents)
            # Only the sweep takes a run from another engine: it ends the claims of that one as well, and has the
            # tickets report to the new one. After a failover no run names its driver, but a step shows that it had one.
            if stored.driver or _was_interrupted(snapshot.state):
                return self.sweep_soon()
        if snapshot.state.replied or run in self._drivers:
            return  # its caller has the reply, or it was taken here meanwhile
        await self._lease(snapshot)

    async def _lease(self, run: RunSnapshot) -> Driver:
        """Take the lease of a run that exists already, in one entry with all that follows from its state. Returns the
        driver that goes on with the run."""
        task, policy = await _read_task_and_policy(self._context, run)
        now, state = self._context.now(), run.state
        lease = Lease(self._home, now + self._context.lease, state.turn.until if state.replied else state.turn.deadline)
        rows = _tickets_of_resumed_steps(state, self._home)
        was_begun = has_begun(state)
        span = start_run_span(self._context.tracing, state, taken_over=was_begun)
        driver = self._driver(run, task, policy, span)
        await self._begin(driver, Entry(state.run, now, epoch=run.epoch, lease=lease, seq=state.seq, outbox=rows))
        if not was_begun:
            self._context.tracing.record_wait(span.trace, state.turn.at, now, {"baton.run": state.run})
        return driver

    async def _take_over(self, run: RunSnapshot) -> None:
        """Go on with a run whose engine is gone: its row is ours already, and the claims of that engine have lapsed.

        While others write to the run it is tried again for as long as the row is sure to be ours; then the next sweep
        of any engine finds the run.
        """
        lapses = self._context.monotonic() + self._context.lease
        while True:
            try:
                driver = await self._lease(run)
                break
            except Conflict as conflict:
                if conflict.public_code != MOVED or self._context.monotonic() >= lapses:
                    raise
            # Another process has written meanwhile, for example a wish to cancel the run.
            journal = await self._context.store.journal(run.state.run, after=run.state.seq)
            run = replace(run, state=fold(journal.events, run.state))
            if run.state.ended:
                return
        steps = _interrupted_steps(run.state)
        self._adopted.append(run.state.run)
        with suppress(QueueUnavailable):
            await self._context.queue.publish(DISPATCHERS, [EngineChange(run.state.run, self._home)])
            of_run = replace(run_ticket(driver.state), driver=self._home, version=AGAIN, trace=driver.trace)
            await self._context.queue.enqueue([replace(of_run, step=n) for n in steps])

    def _driver(self, run: RunSnapshot, task: Task, policy: Policy, span: Span) -> Driver:
        steps = None if self.spread else self.dispatcher
        return Driver(self._context, home=self._home, run=run, task=task, conductor=policy, steps=steps, span=span)

    async def _begin(self, driver: Driver, entry: Entry) -> None:
        """Commit the entry that takes the run's lease, and drive the run."""
        if not self.is_open:
            raise Overloaded()
        run = entry.run
        stale = self._drivers.get(run)
        self._drivers[run] = driver  # it is sent messages from now on: a step may be done before the commit returns
        try:
            await driver.begin(entry)
        except BaseException:
            if self._drivers.get(run) is driver:
                if stale is not None and run in self._tasks:
                    self._drivers[run] = stale
                else:
                    del self._drivers[run]
            raise
        # If the commit took longer than the lease, the sweep of this process may have made a new driver for the run.
        if self._drivers.get(run) is not driver:
            return
        if self._group is None:  # this process has stopped to drive meanwhile, but the run is begun
            del self._drivers[run]
            return await hand_back(self._context, self._home, {run: driver})
        former = self._tasks.get(run)
        if former is not None:  # another engine had it meanwhile, and this one has taken it again
            former.cancel()
        self._tasks[run] = self._group.create_task(self._guard(driver))

    def give_up_plans(self, conductor: str) -> None:
        """Reject plans that are being made by this worker, which does not generate."""
        for driver in self._drivers.values():
            proposal = driver.state.open_proposal
            if proposal is not None and any(call.worker == conductor for call in driver.state.open_planning_calls):
                driver.inbox.push(PlannerMessage(proposal.number, error=WorkerUnavailable(code="conductor_out")))

    async def _guard(self, driver: Driver) -> None:
        """Drive one run; no error of it may end the others."""
        run, error_code = driver.state.run, ""
        telemetry = self._context.telemetry
        try:
            await asyncio.sleep(0)  # a step that was just begun sends its call first
            await driver.drive()
            if driver.state.state == "awaiting_tool":
                held = RunSnapshot(driver.state, driver.salt, driver.writer.row_epoch)
                self._waiting.keep(run, held, driver.state.seq)
                if held.state.is_recorded_replay:
                    self._start_beside(run, partial(self._give_recorded_results, held))
        except* BatonError as group:
            error = _first(group)
            error_code = error.public_code or "lost"
            telemetry.log(
                logging.WARNING,
                "This engine cannot go on with a run; the run is left to the next engine.",
                run=run,
                error=error.code,
            )
        except* Exception as group:
            error_code = "bug"
            telemetry.log(
                logging.ERROR,
                "A driver failed because of a bug; the run is left to the next engine.",
                _first(group),
                run=run,
            )
        finally:
            end_run_span(driver.span, driver.state, error_code)
            if self._drivers.get(run) is driver:  # else this process goes on with it: a new turn, or a takeover
                del self._drivers[run]
            if self._tasks.get(run) is asyncio.current_task():
                del self._tasks[run]

    async def _give_recorded_results(self, held: RunSnapshot) -> None:
        """Begin the next turn of a replay with the tool results of the run that it repeats, if these have any."""
        try:
            recorded = await replays.results(self._context, held)
            if recorded is not None:
                order, resumption = recorded
                next_turn = tool_results.begin_turn(self._context, order, resumption, "")
                await self._context.pin(self._context.catalog())
                await self.resume(next_turn, resumption)
        except (LeaseLost, Conflict, RunEnded, NotFound):
            pass  # others have gone on with it, or it is over
        except BatonError as error:
            self._context.telemetry.log(
                logging.WARNING,
                "A replay could not be given its recorded tool results; an engine tries it once more.",
                run=held.state.run,
                error=error.code,
            )

    # -- keeping leases

    def _lose(self, held: tuple[str, int]) -> None:
        """Stop the driver of a run that another engine has taken over, by run and epoch."""
        run, epoch = held
        driver = self._drivers.get(run)
        if driver is not None and driver.writer.epoch == epoch and run in self._tasks:
            self._tasks[run].cancel()

    async def _renew(self) -> set[tuple[str, int]]:
        """Prolong every lease; returns those that this process does not hold, as run and epoch."""
        async with self._renewing:
            epochs = {run: driver.writer.epoch for run, driver in self._drivers.items()}
            if not epochs:
                return set()
            until = self._context.now() + self._context.lease
            kept = await self._context.store.renew_leases(self._home, epochs, until)
        self._wake(kept)
        return {(run, epochs[run]) for run in epochs.keys() - kept.keys() if run in self._tasks}

    async def _watch_for_ever(self) -> None:
        """While the queue is unavailable no messages are sent: one query finds all drivers whose journal has moved. A
        run that was taken over is looked at once more, in case a message was sent to its former engine."""
        before: list[str] = []
        while self._group is not None:
            await asyncio.sleep(WATCH_SECONDS)
            healthy = self._context.queue.healthy
            self._context.telemetry.gauge("baton_queue_sound", healthy)
            watched = [*before, *self._adopted] if healthy else list(self._tasks)
            before, self._adopted = self._adopted, []
            if watched:
                with suppress(StoreUnavailable):
                    self._wake(await self._context.store.last_seqs(watched))

    def _wake(self, seqs: Mapping[str, int]) -> None:
        """Let those drivers read the journal whose run has moved on without their receiving it."""
        for run, seq in seqs.items():
            driver = self._drivers.get(run)
            if driver is not None and seq > driver.state.seq:
                driver.inbox.put(JournalAdvance(seq))

    # -- finding runs that nobody drives

    def sweep_soon(self) -> None:
        """Look for runs that nobody drives without waiting for the next sweep: a caller waits for one."""
        self._sweep_now.set()

    def _pause(self) -> float:
        if self._context.queue.healthy:
            return SWEEP_SECONDS
        return WATCH_SECONDS

    async def _sweep_for_ever(self) -> None:
        while self._group is not None:
            await wait_for_event(self._sweep_now, self._pause() * (0.5 + self._context.random()))
            self._sweep_now.clear()
            if not (self.recovers and self._context.clock_is_set()):
                continue
            try:
                if await self._recovery.sweep(self.room, self._renew):
                    self._sweep_now.set()
            except BatonError as error:
                self._context.telemetry.log(
                    logging.WARNING,
                    "The search for runs that nobody drives failed; it is repeated.",
                    error=error.public_code,
                )
            except Exception as bug:  # it must end neither this engine nor the runs that it drives
                self._context.telemetry.log(
                    logging.ERROR,
                    "The search for runs that nobody drives failed because of a bug; it is repeated.",
                    bug,
                )


# -- runs that exist already


async def _read_task_and_policy(context: EngineContext, run: RunSnapshot) -> tuple[Task, Policy]:
    """Return the task of a run that exists already, and the policy that plans it. `NotFound` if its contents were
    erased, `ConfigInvalid` if the pool file lacks its tier."""
    state, contents = run.state, run.contents
    task = await task_of(context.store, state.run, state.admitted.task, contents)
    policy = await _policy(context, state, contents)
    tier = context.tier_of(state.admitted)  # only now: the pool file may have been read again meanwhile
    if tier is None:
        raise ConfigInvalid([f"the pool file has no tier {state.admitted.tier}"])
    return task, policy or context.conductor(tier)


async def _policy(context: EngineContext, state: RunState, contents: Mapping[str, bytes]) -> Policy | None:
    """Return the policy of a run that the tier's conductor does not plan; None if it does."""
    admitted, workers = state.admitted, context.catalog().workers
    names = [name for name in admitted.pool if name in workers]
    if admitted.conductor == FALLBACK:
        names = names or list(admitted.pool)  # one that has left the pool file fails, and says so
        tier = context.tier_of(admitted)
        worker = tier.fallback if tier is not None and tier.fallback in names else names[0]
        return FixedPlanConductor((Step(worker, answers=True),))
    if admitted.conductor == REPLAY:
        return RecordedConductor(await replays.recording_of(context.store, state, contents))
    if admitted.conductor != CALLER or not admitted.plan or state.has_workflow:
        return None
    body = (await bodies_of(context.store, state.run, [admitted.plan], contents))[admitted.plan]
    with suppress(PlanRejected):  # it was valid for the pool then; without one of its workers the fallback decides
        return FixedPlanConductor(read_plan(orjson.loads(body), by_name(names), admitted.limits.steps))
    return FixedPlanConductor(())


def _tickets_of_resumed_steps(state: RunState, home: str) -> tuple[Outbox, ...]:
    """Return the tickets of steps that go on with what their caller has brought, and have not been begun in this
    turn."""
    turn = state.turn.number
    begun_steps = {call.step for call in state.calls.values() if call.turn == turn}
    tickets = []
    for step in state.active_steps:
        if _has_results(step, turn - 1) and step.n not in begun_steps:
            tickets.append(Outbox(step.n, state.admitted.tier, home, turn))
    return tuple(tickets)


def _has_results(step: StepState, turn: int) -> bool:
    last = step.exchanges[-1] if step.exchanges else None
    return step.state == "running" and last is not None and bool(last.results) and last.turn == turn


def _interrupted_steps(state: RunState) -> Sequence[int]:
    """Return the steps that were executed, or queued, when the run's engine was lost."""
    return [step.n for step in state.active_steps if step.state in ("queued", "running") and not step.opens_workflow]


def _was_interrupted(state: RunState) -> bool:
    """Return True if an engine has driven the run in this turn, and steps or calls of it were under way."""
    return has_begun(state) and bool(state.open_calls or _interrupted_steps(state))


def _first(group: ExceptionGroup[E]) -> E:
    """The first error in a tree of them."""
    error: E | ExceptionGroup[E] = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
