"""The runs that this process drives: admitting them, keeping their leases, and taking over what others left behind.

A run's lease stands in the database for `Means.lease` seconds and is renewed every third of that. A driver whose lease
is gone is stopped; whoever sweeps next takes the run over with a higher epoch, folds its journal and goes on. The
sweeper also rings again for tickets that nobody took.
"""

import asyncio
import logging

import orjson

from app.attempt import Means
from app.conduct import CancelAsked, Driver, projection, tags
from app.conductor.protocol import Conductor, Given
from app.core import drafts
from app.core.chat import task_from_json, task_to_json
from app.core.journal import Draft, Event
from app.core.plan import by_name, read_plan
from app.core.policy import Eligible, eligible, missing_clearance, unknown_names
from app.core.progress import Propose, begin, fold
from app.core.state import FALLBACK, RunState
from app.core.workflow import Step
from app.dispatch import texts_of
from app.errors import BatonError, InvalidRequest, LeaseLost, Overloaded, PlanRejected, StoreUnavailable
from app.mailbox import Mailbox
from app.order import Driven, Order, Told
from app.stepqueue.protocol import Live, Stop, Ticket
from app.store.content import address
from app.store.protocol import Entry, Ledger, NewRun, RunRow
from app.telemetry import SPAN_RUN

LINE = 1_024
"""Messages that a slow reader may be behind; what does not fit comes at the end in one piece."""
SWEEP = 50
"""Runs and tickets taken in one sweep."""


class Drivers:
    """All drivers of this process, between `run` entering and leaving."""

    def __init__(self, means: Means, *, home: str, bound: int) -> None:
        """`home` is this process's address on the queue; at most `bound` runs are driven at once."""
        self._means = means
        self._home = home
        self._bound = bound
        self._drivers: dict[str, Driver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Drive until `stopping` is set; runs that are still going are left to whoever takes their lease over."""
        async with self._means.queue.hear(self._home, self._hear), asyncio.TaskGroup() as group:
            self._group = group
            chores = [group.create_task(self._renew_for_ever()), group.create_task(self._sweep_for_ever())]
            await stopping.wait()
            self._group = None
            for task in (*chores, *self._tasks.values()):
                task.cancel()

    def __len__(self) -> int:
        return len(self._drivers)

    def known(self, run: str) -> tuple[RunState, bytes] | None:
        """State and salt of a run that is driven here."""
        driver = self._drivers.get(run)
        return (driver.state, driver.salt) if driver is not None else None

    async def start(self, order: Order) -> Driven:
        """Admit and drive a run.

        Raises `InvalidRequest` (nobody eligible, or a bad plan), `Overloaded`, `StoreUnavailable`: then nothing was
        started. When it returns, `run.admitted` is committed and the run will reach exactly one terminal state.
        """
        if self._group is None or len(self._drivers) >= self._bound:
            raise Overloaded(retry_after=1.0)
        choice = self._choose(order)
        conductor, kind = self._conductor(order, choice)
        name, salt, now = self._means.name("run"), self._means.salt(), self._means.now()
        body = orjson.dumps(task_to_json(order.task))
        admitted = self._admitted(order, choice, kind, address(salt, body), now)
        line: Mailbox[Told] = Mailbox(LINE)
        driver = Driver(
            self._means,
            home=self._home,
            state=begin(Event(name, 0, admitted.kind, now, admitted.body)),
            task=order.task,
            salt=salt,
            conductor=conductor,
            line=line,
            notes=order.stream_steps,
        )
        self._drivers[name] = driver  # from now on it hears: a dispatcher may be done before `_admit` returns
        try:
            await self._admit(driver, order, admitted, salt, (address(salt, body), body))
            self._drive(driver)
        except BaseException:
            del self._drivers[name]
            raise
        return Driven(name, line)

    def cancel(self, run: str, by: str) -> None:
        """Ask a run of this process to stop; it reaches its terminal state within about two seconds."""
        if run in self._drivers:
            self._drivers[run].inbox.push(CancelAsked(by))

    # -- admission

    def _choose(self, order: Order) -> Eligible:
        unknown = unknown_names(order.tier, order.overrides)
        if unknown:
            known = ", ".join(order.tier.pool)
            raise InvalidRequest(
                f"baton.pool names a worker that is not in the pool; the pool is: {known}", param="baton.pool"
            )
        choice = eligible(self._means.catalog(), order.tier, order.task, order.labels, order.overrides)
        if not choice.workers:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(choice.excluded.items()))
            raise InvalidRequest(
                f"No worker of this tier may take the request. {reasons[:2000]}", code="no_eligible_worker"
            )
        return choice

    def _conductor(self, order: Order, choice: Eligible) -> tuple[Conductor, str]:
        if order.plan is None:
            return self._policy(order, choice)
        try:
            names = [worker.name for worker in choice.workers]
            return Given(read_plan(order.plan, by_name(names), order.limits.steps)), "caller"
        except PlanRejected as rejected:
            message = "; ".join(rejected.reasons)[:3000]
            raise InvalidRequest(f"The plan is not valid: {message}", param="baton.plan", code="invalid_plan") from None

    def _policy(self, order: Order, choice: Eligible) -> tuple[Conductor, str]:
        """The tier's conductor, if it may read the task: it sees all of it, so the task's labels bind it too (D6)."""
        spec = order.tier.conductor
        if spec.worker is None or not missing_clearance(self._means.catalog().workers[spec.worker], order.labels):
            return self._means.conductor(order.tier), spec.kind
        names = [worker.name for worker in choice.workers]
        worker = order.tier.fallback if order.tier.fallback in names else names[0]
        return Given((Step(worker, answers=True),)), FALLBACK

    def _admitted(self, order: Order, choice: Eligible, conductor: str, task: str, now: float) -> Draft:
        catalog = self._means.catalog()
        return drafts.admitted(
            task=task,
            tier=order.tier.name,
            model=order.model,
            effort=order.effort,
            limits=order.limits,
            deadline=now + order.limits.seconds,
            pool=[worker.name for worker in choice.workers],
            excluded=choice.excluded,
            labels=order.labels,
            conductor=conductor,
            catalog=catalog.digest,
            rehearsal=catalog.rehearsal,
            streams=order.streams,
            preview=order.preview,
            ignored=order.ignored,
        )

    async def _admit(
        self, driver: Driver, order: Order, admitted: Draft, salt: bytes, content: tuple[str, bytes]
    ) -> None:
        """Commit the admission with everything that follows from it at once."""
        now = self._means.now()
        first = begin(Event(driver.state.run, 1, admitted.kind, now, admitted.body))
        follows = await driver.consequences(first)
        events = (admitted, *follows.events)
        new = NewRun(
            tenant=order.tenant,
            key=order.key,
            tier=order.tier.name,
            model=order.model,
            salt=salt,
            driver=self._home,
            lease_until=now + self._means.lease,
            deadline=first.admitted.deadline,
            cap=Ledger(order.limits.usd, order.limits.tokens),
            code=self._means.code,
        )
        labels = tuple(("label", label) for label in sorted(order.labels))
        entry = Entry(
            run=first.run,
            at=now,
            events=events,
            new=new,
            epoch=driver.epoch,
            contents=(content, *follows.contents),
            outbox=tuple(follows.outbox),
            row=projection(follows.state, now),
            tags=(*labels, *tags(events)),
        )
        appended = await self._means.store.append(entry)
        await driver.committed(appended.events, follows.state)
        driver.planning = follows.pending if isinstance(follows.pending, Propose) else None
        await driver.ring(follows.outbox)

    # -- driving

    def _drive(self, driver: Driver) -> None:
        if self._group is None:
            raise Overloaded(retry_after=1.0)
        run = driver.state.run
        self._drivers[run] = driver
        self._tasks[run] = self._group.create_task(self._guard(driver))
        self._means.telemetry.gauge("baton_runs_driven", len(self._drivers))

    async def _guard(self, driver: Driver) -> None:
        """Nothing that happens to one run may end the others."""
        run = driver.state.run
        error: BatonError | None = LeaseLost("This process had to let go of the run; GET /v1/runs/{id} follows it.")
        try:
            with self._means.telemetry.span(SPAN_RUN, {"baton.run.id": run, "baton.tier": driver.state.admitted.tier}):
                await driver.drive()
            error = None
        except* BatonError as group:
            error = _first(group)
            self._means.telemetry.log(logging.WARNING, "a run is left to its next driver", run=run, error=error.code)
        except* Exception as group:
            error = BatonError()
            self._means.telemetry.log(logging.ERROR, "a driver broke; the run is left to its next", run=run)
            logging.getLogger("baton").error("driver", exc_info=group)
        finally:
            del self._drivers[run], self._tasks[run]
            self._means.telemetry.gauge("baton_runs_driven", len(self._drivers))
            if error is not None:
                driver.tell_failure(error)

    def _hear(self, message: Live) -> None:
        if not isinstance(message, Stop) and message.run in self._drivers:
            self._drivers[message.run].inbox.put(message)

    async def _renew_for_ever(self) -> None:
        suspects: set[str] = set()
        while self._group is not None:  # as in the dispatcher, no cancellation is relied upon
            await asyncio.sleep(self._means.lease / 3)
            epochs = {run: self._drivers[run].epoch for run in self._tasks}
            if not epochs:
                continue
            try:
                kept = await self._means.store.renew(self._home, epochs, self._means.now() + self._means.lease)
            except StoreUnavailable as error:
                self._means.telemetry.log(logging.WARNING, "leases not renewed", error=error.public_code)
                continue
            # A run that has just ended is not ours to renew either; only what is missing twice was taken over.
            missing = {run for run in set(epochs) - kept if run in self._tasks}
            for run in missing & suspects:
                self._tasks[run].cancel()
            suspects = missing - suspects

    # -- sweeping

    async def _sweep_for_ever(self) -> None:
        while self._group is not None:
            await asyncio.sleep(self._means.lease * (0.5 + self._means.chance()))
            try:
                await self._sweep()
            except BatonError as error:
                self._means.telemetry.log(logging.WARNING, "sweep failed", error=error.public_code)

    async def _sweep(self) -> None:
        """Orphans first: taking them over needs no bell."""
        now = self._means.now()
        room = min(self._bound - len(self._drivers), SWEEP)
        for row in await self._means.store.orphans(self._home, now, now + self._means.lease, room) if room > 0 else ():
            self._means.telemetry.count("baton_swept_total", "run")
            try:
                await self._adopt(row)
            except Exception as error:  # such as a journal of a newer version: it must not keep the others waiting
                self._means.telemetry.log(logging.ERROR, "an orphan could not be taken over", run=row.id)
                logging.getLogger("baton").debug("orphan", exc_info=error)
        # What is looked up counts as rung: while the bell is down it is left to the dispatchers, who look themselves.
        await self._means.queue.ready()
        overdue = await self._means.store.overdue(now, SWEEP)
        if overdue:
            self._means.telemetry.count("baton_swept_total", "ticket", by=len(overdue))
            await self._means.queue.ring(
                [Ticket(due.run, due.step, due.tier, due.driver, due.seq, due.version) for due in overdue]
            )

    async def _adopt(self, row: RunRow) -> None:
        """Fold an orphan's journal and go on where its driver stopped."""
        journal = await self._means.store.journal(row.id)
        state = fold(journal.events)
        tier = self._means.catalog().tiers.get(state.admitted.tier)
        texts = await texts_of(self._means.store, row.id, {state.admitted.task})
        alone = Given((Step(state.admitted.pool[0], answers=True),))
        conductor = self._means.conductor(tier) if tier is not None else alone
        driver = Driver(
            self._means,
            home=self._home,
            state=state,
            task=task_from_json(orjson.loads(texts[state.admitted.task])),
            salt=journal.salt,
            conductor=conductor,
            epoch=row.epoch,
        )
        self._drive(driver)


def _first(group: BaseExceptionGroup[BatonError]) -> BatonError:
    """The first error in a tree of them."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, BatonError) else BatonError()
