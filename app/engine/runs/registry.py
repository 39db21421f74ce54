"""The runs of this process: those that it drives, from the admission or from a turn on, and those that its callers hear
from others.

A run's lease stands in the database for `Means.lease` seconds and is renewed every third of that. A driver whose lease
is gone is stopped; whoever sweeps next (`recovery.py`) takes the run over with a higher epoch, folds its journal and
goes on. The renewal also tells which journals have moved, so that a driver that missed a message looks again.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from weakref import WeakValueDictionary

from app.core.run import position
from app.core.run.commands import Finish, Propose
from app.core.run.position import Position
from app.core.run.progress import admit
from app.core.run.tool_results import Returned, returned
from app.engine.commit.colocation import DispatcherBeside
from app.engine.commit.transition import tentative
from app.engine.commit.waiting_runs import Waiting
from app.engine.context import Means
from app.engine.delivery import turn_result
from app.engine.delivery.audience import Audience, public
from app.engine.delivery.mailbox import Mailbox
from app.engine.delivery.messages import Driven, Told
from app.engine.delivery.remote_run import LET_GO, Followers
from app.engine.runs import admission, tool_results
from app.engine.runs.driver import Driver
from app.engine.runs.planning import Planned
from app.engine.runs.recovery import GIVEN_UP, Orphans, driver_for, hand_back
from app.engine.runs.request import CancelAsked, Moved, Order
from app.engine.runs.tool_results import Found, Known
from app.engine.runs.uncertain_commits import Undecided
from app.errors import (
    BatonError,
    Conflict,
    LeaseLost,
    NotFound,
    Overloaded,
    RunEnded,
    StoreUnavailable,
    WorkerUnavailable,
)
from app.stepqueue.protocol import Committed, Live, Stop
from app.store.protocol import MOVED, Entry, Outbox
from app.telemetry import SPAN_RUN

WATCH = 0.25
"""Seconds between two looks for journals that have moved, while nobody can tell of it, or for runs that lie about."""
SPREAD = 0.05
"""Seconds within which those who are called for a run look for it, so that not all of them do at once."""
HANDED = 1.0
"""Seconds that a gateway gives dispatchers to take up what was handed to them."""
RACES = 3
"""Tries to go on with a run that others go on with at the same time."""
WAY = 2
"""Turns of the loop that a step takes from its committed intent to the wire: the caller is told of it after that."""
LINE = 1_024
"""Messages that a slow reader may be behind; what does not fit comes at the end in one piece."""


class Drivers:
    """All drivers of this process, between `run` entering and leaving."""

    def __init__(self, means: Means, *, home: str, bound: int) -> None:
        """`home` is this process's address on the queue; at most `bound` runs are driven at once."""
        self._means = means
        self._home = home
        self._bound = bound
        self.beside: DispatcherBeside | None = None
        """The dispatcher of this process, if it has one."""
        self.hands_over = False
        """Whether background runs are for other processes to drive: this one has callers, and takes no tickets."""
        self._drivers: dict[str, Driver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting: Waiting[Known] = Waiting()
        self._turning: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Runs whose next turn is just being begun here."""
        self._followers = Followers(means, home=home, bound=bound)
        self._group: asyncio.TaskGroup | None = None
        self._orphans = Orphans(means, home=home, drive=self._take_up, audience=self._audience)
        self._taken_up: list[str] = []
        """Runs whose former driver may just have been told what is meant for us."""
        self._undecided = Undecided(means)
        self._sweep_now = asyncio.Event()
        self._renewing = asyncio.Lock()
        self._lying = -inf, 0
        """When the runs were counted that nobody drives, which goes through all that are open; and how many there were,
        with those that were handed over since."""
        means.telemetry.watch("baton_runs_driven", lambda: len(self._drivers))

    async def run(self, stopping: asyncio.Event) -> None:
        """Drive until `stopping` is set; runs that are still going are handed to whoever takes them up."""
        async with self._means.queue.hear(self._home, self._hear), asyncio.TaskGroup() as group:
            self._group = group
            self._followers.open(group)
            jobs = (self._renew_for_ever(), self._watch_for_ever(), self._sweep_for_ever())
            chores = [group.create_task(job) for job in jobs]
            try:
                await stopping.wait()
            finally:
                self._group, left = None, self._epochs()
                self._followers.close()
                for task in (*chores, *self._tasks.values()):
                    task.cancel()
        await hand_back(self._means, self._home, left)

    def __len__(self) -> int:
        return len(self._drivers)

    def known(self, run: str) -> Driver | None:
        """The driver of a run that is driven here."""
        return self._drivers.get(run)

    async def start(self, order: Order) -> Driven:
        """Admit and drive a run, or drive the next turn of the one whose tool calls the conversation's end answers.

        Raises `InvalidRequest` (nobody eligible, a bad plan, or tool results that belong nowhere), `Overloaded`,
        `StoreUnavailable`: then nothing was started. `RunUndecided`: nobody knows; see `uncertain_commits.py`. When it
        returns, `run.admitted` (or `run.resumed`) is committed and the run will reach exactly one terminal state.
        """
        if self._group is None or len(self._drivers) >= self._bound:
            raise Overloaded(retry_after=1.0)
        if not self._means.timed():  # which nobody knows before the database has been there
            raise StoreUnavailable(retry_after=1.0)
        came, handed = returned(order.task.messages), await self._hands_over(order)
        driven = await self._go_on(order, came, handed=handed) if came is not None else None
        driven = driven or await self._begin(order, handed=handed)
        try:
            for _ in range(WAY):
                await asyncio.sleep(0)
        except BaseException:
            self.leave(driven)
            raise
        return driven

    async def _begin(self, order: Order, *, handed: bool) -> Driven:
        catalog, choice = self._means.catalog(), admission.choose(self._means, order)
        conductor, kind = admission.conducted(self._means, order, choice)
        await self._means.pin(catalog)
        entry, salt = admission.entry(self._means, catalog, order, choice, kind, self._home)
        name, (admitted,) = entry.run, entry.events
        line: Mailbox[Told] = Mailbox(LINE)
        audience = Audience(name)
        audience.admit(line, notes=order.stream_steps)
        driver = Driver(
            self._means,
            home=self._home,
            owner=order.owner,
            state=admit(name, admitted, entry.at, 0),
            task=order.task,
            salt=salt,
            conductor=conductor,
            audience=audience,
        )
        driver.beside = self.beside
        self._drivers[name] = driver  # from now on it hears: a dispatcher may be done before `_admit` returns
        try:
            with self._undecided.told(name, driver.state.turn):
                await self._admit(driver, entry, handed=handed)
            if handed:
                return await self._pass_on(driver, line)
            self._drive_unless_relieved(driver)
        except BaseException:
            if self._drivers.get(name) is driver:
                del self._drivers[name]
            raise
        return Driven(name, line, driver.state)

    async def _go_on(self, order: Order, came: Returned, *, handed: bool) -> Driven | None:
        """The turn that begins with these results; None if they are but the history of a new run."""
        alone = self._turning.setdefault(came.run, asyncio.Lock())
        for _ in range(RACES):
            async with alone:  # who brings the same at the same time hears the turn that the first one has begun
                found = await tool_results.find(self._means, order, came, self._waiting)
                if found is not None and found.standing == "go_on":
                    try:
                        return await self._resume(order, found, handed=handed)
                    except NotFound:  # erased since
                        return None
                    except LeaseLost:  # somebody else brought the same to another process, or its wait is over
                        continue
                    except Conflict as conflict:
                        if conflict.public_code != MOVED:
                            raise
                        continue  # somebody wants it to end
            return await self.attach(came.run, turn=found.state.turn.number) if found is not None else None
        raise Overloaded(retry_after=1.0)

    async def _resume(self, order: Order, found: Found, *, handed: bool) -> Driven:
        """Take a run that waits into this process, with what its caller brought, in one entry."""
        run, known = found.state.run, found.known
        driver = await driver_for(self._means, self._home, known.owner, known.state, known.salt, known.epoch + 1)
        line: Mailbox[Told] = Mailbox(LINE)
        driver.audience.admit(line, notes=order.stream_steps)
        driver.fresh, driver.beside = True, self.beside
        stale = self._drivers.get(run)
        self._drivers[run] = driver  # from now on it hears, as in `_begin`
        try:
            await self._means.pin(self._means.catalog())
            with self._undecided.told(run):
                await self._commit_turn(driver, order, found)
            if handed:
                return await self._pass_on(driver, line)
            self._drive_unless_relieved(driver)
        except BaseException:
            if self._drivers.get(run) is not driver:
                raise
            if stale is not None and run in self._tasks:
                self._drivers[run] = stale
            else:
                del self._drivers[run]
            raise
        return Driven(run, line, driver.state)

    async def _commit_turn(self, driver: Driver, order: Order, found: Found) -> None:
        begun, tier = tool_results.begin(self._means, order, found, self._home), found.state.admitted.tier
        follows = await driver.consequences(tentative(found.state, begun.entry.events))
        if not isinstance(follows.pending, Finish):  # which was asked for while the run waited
            follows.outbox = [*(Outbox(n, tier, self._home, begun.turn) for n in begun.steps), *follows.outbox]
        await driver.write(begun.entry, follows)
        await driver.ring(follows.outbox)

    async def attach(
        self, run: str, at: Position = Position(), *, turn: int | None = None, once: str | None = None
    ) -> Driven:
        """Hear a run's turn from `at` on, whoever drives it and whether or not it is over.

        It is the latest turn, unless `turn` or the claim `once` that began it says which.

        Raises `NotFound` (no such run, or its answer was erased), `InvalidRequest` and `Conflict` (see
        `position.check`), `Overloaded`, `StoreUnavailable`.
        """
        journal = await self._means.store.journal(run)
        while (driver := self._drivers.get(run)) is not None and journal.events[-1].seq < driver.state.seq:
            journal = await self._means.store.journal(run)
        wanted = tool_results.turn_of(journal.events, once) if once is not None else turn
        state = turn_result.until_end(journal.events, wanted)
        present = driver or self._followers.of(run)
        # One of ours that stood still may yet tell of an attempt that is lost, while the reply is known.
        if present is not None and (state.replied or present.state.turn.number != state.turn.number):
            present = None
        state = present.state if present is not None else state
        position.check(state, at)
        line: Mailbox[Told] = Mailbox(LINE)
        notes = bool(state.turn.wire.get("steps"))
        for event in turn_result.of_turn(journal.events, state.turn.number) if notes and not at.chars else ():
            if event.seq <= state.seq and (noted := public(event)) is not None:
                line.push(noted)
        audience = present.audience if present is not None else Audience(run)
        audience.admit(line, at, notes=notes)
        if present is None and state.replied:
            audience.end(await turn_result.read(self._means.store, state))
        elif present is None:
            self._followers.follow(state, audience)
        return Driven(run, line, state, replayed=True)

    def leave(self, driven: Driven) -> None:
        """A caller is gone. If it was the last one, the run goes on or stops as its admission says."""
        driver = self._drivers.get(driven.run)
        present = driver or self._followers.of(driven.run)
        if present is not None:
            present.audience.leave(driven.line)
        if driven.replayed:  # it holds no place that is to be kept until the run has ended
            driven.line.push(turn_result.without(driven.state, RunEnded()))
        if driver is not None and driver.state.turn.on_disconnect == "cancel":
            self._cancel_unheard(driver)

    def give_up_plans(self, conductor: str) -> None:
        """Nobody is alive behind this worker: plans that wait for it will not come."""
        for driver in self._drivers.values():
            proposal = driver.state.unmade
            if proposal is not None and any(call.worker == conductor for call in driver.state.planning):
                driver.inbox.push(Planned(proposal.number, error=WorkerUnavailable(code="conductor_out")))

    def _cancel_unheard(self, driver: Driver) -> None:
        if not driver.audience.heard_by_anyone(self._means.tick()):
            self.cancel(driver.state.run, "client")

    def cancel(self, run: str, by: str) -> None:
        """Ask a run of this process to stop; it reaches its terminal state within about two seconds."""
        if run in self._drivers:
            self._drivers[run].inbox.push(CancelAsked(by))

    # -- admission

    async def _admit(self, driver: Driver, entry: Entry, *, handed: bool) -> None:
        """Commit the admission with everything that follows from it at once; of a run that is handed over, its plan, if
        that needs no model."""
        (admitted,) = entry.events
        first = admit(entry.run, admitted, entry.at, 1)
        follows = await driver.consequences(first, plans=not handed)
        follows = follows.unqueued(first) if handed else follows
        await driver.write(entry, follows)
        driver.planning = follows.pending if isinstance(follows.pending, Propose) else None
        await driver.ring(follows.outbox)

    async def _hands_over(self, order: Order) -> bool:
        """Whether dispatchers are to drive it: not while they could not be called, or leave as many runs lying."""
        if not (self.hands_over and order.background and self._means.queue.sound):
            return False
        counted, lying = self._lying
        if not 0.0 <= self._means.tick() - counted < WATCH:
            lying = sum(kind.runs for kind in await self._means.store.lapsed(self._means.now()))
            counted = self._means.tick()
        hands = lying < self._bound
        self._lying = counted, lying + hands
        return hands

    async def _pass_on(self, driver: Driver, line: Mailbox[Told]) -> Driven:
        """Hand a run over whose turn has just begun; its caller hears it as one that goes on elsewhere."""
        state = driver.state
        if self._drivers.get(state.run) is driver:
            del self._drivers[state.run]
        self._followers.follow(state, driver.audience)
        async with self._renewing:  # one that had begun before would prolong what is given up
            pass
        await hand_back(self._means, self._home, {state.run: driver.epoch})
        return Driven(state.run, line, state, replayed=True)

    # -- driving

    def _drive_unless_relieved(self, driver: Driver) -> None:
        """If word of its commit took longer than its lease, our own sweep has a new driver for it, and its callers."""
        if self._drivers.get(driver.state.run) is driver:
            self._drive(driver)

    def _drive(self, driver: Driver) -> None:
        """Begin to drive; not if the run is one of ours that we let lapse and have just taken over from ourselves: its
        old driver must be gone first, and the next sweep finds the run again."""
        if self._group is None:
            raise Overloaded(retry_after=1.0)
        run, driver.beside = driver.state.run, self.beside
        if run in self._tasks:  # it was somebody else's meanwhile and is ours again: the fresh fold goes on
            self._tasks[run].cancel()
        self._drivers[run] = driver
        self._tasks[run] = self._group.create_task(self._guard(driver))

    def _take_up(self, driver: Driver) -> None:
        self._drive(driver)
        self._taken_up.append(driver.state.run)

    async def _guard(self, driver: Driver) -> None:
        """Nothing that happens to one run may end the others."""
        run = driver.state.run
        error: BatonError | None = LeaseLost(LET_GO)
        try:
            await asyncio.sleep(0)  # the worker's time is the caller's: a step that was just begun goes first
            with self._means.telemetry.span(SPAN_RUN, {"baton.run.id": run, "baton.tier": driver.state.admitted.tier}):
                await driver.drive()
            error = None
            if driver.state.state == "awaiting_tool":
                known = Known(driver.owner, driver.salt, driver.state, driver.epoch + 1)
                self._waiting.keep(run, known, driver.state.seq)
        except* BatonError as group:
            error = _first(group)
            self._means.telemetry.log(logging.WARNING, "a run is left to its next driver", run=run, error=error.code)
        except* Exception as group:
            error = BatonError()
            self._means.telemetry.log(logging.ERROR, "a driver broke; the run is left to its next", run=run)
            logging.getLogger("baton").error("driver", exc_info=group)
        finally:
            if self._drivers.get(run) is driver:  # else this very process goes on with it: a new turn, or a takeover
                del self._drivers[run]
            if self._tasks.get(run) is asyncio.current_task():  # a turn that fails to begin gives the place to no dead
                del self._tasks[run]
            if error is not None:
                self._hand_over(driver, error)

    def _hand_over(self, driver: Driver, error: BatonError) -> None:
        """Callers of a run that somebody else will drive on go on hearing it, unless this process is about to end."""
        if isinstance(error, LeaseLost | StoreUnavailable) and self._group is not None and len(driver.audience):
            self._followers.follow(driver.state, driver.audience)
        else:
            driver.tell_failure(error)

    def _hear(self, message: Live) -> None:
        if isinstance(message, Committed):
            self._means.store.accept_rows(message.run, message.rows)
        if message.run not in self._drivers:
            self._followers.hear(message)
        elif not isinstance(message, Stop):
            self._drivers[message.run].inbox.put(message)

    async def _renew_for_ever(self) -> None:
        suspects: set[tuple[str, int]] = set()
        pause = self._means.lease / 3
        while self._group is not None:  # as in the dispatcher, no cancellation is relied upon
            await asyncio.sleep(pause)
            pause = self._means.lease / 3
            try:
                missing = await self._renew()
            except StoreUnavailable as error:
                self._means.telemetry.log(logging.WARNING, "leases not renewed", error=error.public_code)
                if not self._means.store.healthy and await self._means.store.wait_until_healthy(pause):
                    pause = 0.0  # whoever comes back first keeps what is theirs
                continue
            # A run that has just ended is not ours to renew either; only what is missing twice was taken over.
            for run, epoch in missing & suspects:
                if self._drivers[run].epoch == epoch:  # not a new driver of ours, which may not even have begun
                    self._tasks[run].cancel()
            suspects = missing - suspects

    async def _renew(self) -> set[tuple[str, int]]:
        """Prolong every lease, also of runs that are just being admitted; returns those that are not ours, as run and
        epoch."""
        async with self._renewing:
            epochs = self._epochs()
            if not epochs:
                return set()
            kept = await self._means.store.renew_leases(self._home, epochs, self._means.now() + self._means.lease)
        self._wake(kept)
        return {(run, epochs[run]) for run in epochs.keys() - kept.keys() if run in self._tasks}

    def _epochs(self) -> dict[str, int]:
        return {run: driver.epoch for run, driver in self._drivers.items()}

    async def _watch_for_ever(self) -> None:
        """While the queue is not sound nobody hears of anything: one query tells for all drivers who has to look. What
        was taken up from others is looked at twice, until dispatchers have heard of us."""
        before: list[str] = []
        while self._group is not None:
            await asyncio.sleep(WATCH)
            sound = self._means.queue.sound
            self._means.telemetry.gauge("baton_queue_sound", sound)
            watched = [*before, *self._taken_up] if sound else list(self._tasks)
            before, self._taken_up = self._taken_up, []
            if watched:
                with suppress(StoreUnavailable):
                    self._wake(await self._means.store.last_seqs(watched))

    def _wake(self, seqs: Mapping[str, int]) -> None:
        """Send those drivers to the journal whose run has moved on without their hearing of it."""
        for run, seq in seqs.items():
            driver = self._drivers.get(run)
            if driver is not None and seq > driver.state.seq:
                driver.inbox.put(Moved(seq))

    # -- sweeping

    def sweep_soon(self) -> None:
        """There is a run that nobody drives, and a caller who waits for its end."""
        self._sweep_now.set()

    async def _sweep_for_ever(self) -> None:
        while self._group is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._means.lease * (0.5 + self._means.chance())):
                    await self._sweep_now.wait()
                    await asyncio.sleep(SPREAD * self._means.chance())
            self._sweep_now.clear()
            if not self._means.timed():
                continue
            try:
                await self._renew()  # a process that stood still must not take over what it drives itself
                await self._undecided.call_off()
                room, patience = self._bound - len(self._drivers), GIVEN_UP + HANDED if self.hands_over else 0.0
                if await self._orphans.sweep(room, patience):
                    self._sweep_now.set()
            except BatonError as error:
                self._means.telemetry.log(logging.WARNING, "sweep failed", error=error.public_code)

    def _audience(self, run: str) -> Audience:
        """Who hears a run in this process by now, for its new driver."""
        stale = self._drivers.get(run)
        if stale is None:
            return self._followers.relieve(run)
        audience, stale.audience = stale.audience, Audience(run)
        if run in self._tasks:  # else its commit has yet to be answered: see `_drive_unless_relieved`
            self._tasks[run].cancel()
        return audience


def _first(group: BaseExceptionGroup[BatonError]) -> BatonError:
    """The first error in a tree of them."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, BatonError) else BatonError()
