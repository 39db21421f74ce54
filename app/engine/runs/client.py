"""The gateway's side of runs: it admits them, begins their next turns, follows them, and asks for their end.

A gateway writes four things, each fenced: an admission, a next turn, a wish to cancel, and feedback. It holds nothing
that a run needs: whichever engine takes the run sends its events and the words of its answer to the gateway that the
admission names, and the journal has all of it. Where an engine is in the same process and has a free slot, it commits
the admission itself, together with the plan and the first intents.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from weakref import WeakValueDictionary

from msgspec.structs import replace

from app.core.run import caller_view
from app.core.run.caller_view import Position, ReturnedResults, find_returned_results
from app.core.run.events import Event, RunCancelAsked
from app.core.run.fold import apply_fact, state_of_admission
from app.core.run.state import RunState
from app.engine.commit.run_writer import RunSnapshot, offer_run
from app.engine.context import EngineContext, WaitingRuns
from app.engine.delivery import messages
from app.engine.delivery.followers import Audience, Follower, Followers, RunChanges, step_event
from app.engine.delivery.messages import CallerMessage, FollowedRun, Mailbox
from app.engine.periodic import wait_for_event
from app.engine.runs import admission, approvals, cancellation, tool_results
from app.engine.runs.admission import Order, Owner
from app.engine.runs.approvals import Decision, RecordedDecision
from app.engine.runs.registry import Drivers
from app.engine.runs.tool_results import NextTurn, Resumption, WaitingRun
from app.errors import (
    Conflict,
    LeaseLost,
    NotFound,
    Overloaded,
    OverQuota,
    QueueUnavailable,
    RunEnded,
    RunUndecided,
    StoreUnavailable,
)
from app.network.shared_read import SharedRead
from app.stepqueue.protocol import CommittedEvents, Live
from app.store.protocol import MOVED, UNDECIDED, Entry

COUNT_SECONDS = 1.0
"""Time for which a count of the runs that nobody has taken is used."""
TURN_PAUSES = (0.05, 0.1, 0.2, 0.4)
"""Seconds between two tries to begin the next turn of a run to which others write at the same time."""
LOOP_YIELDS_BEFORE_REPLY = 2
"""Turns of the event loop that a step of this process takes from its committed intent to the wire; the call is sent
before anything else is done for its caller."""
MOST_UNREAD_MESSAGES = 1_024
"""Messages that a slow reader may lag behind; what does not fit comes at the end in one piece."""
MOST_WISHES = 4_096
"""Wishes that wait for the database; of any beyond them, the runs are finished instead of cancelled."""
WISH_RETRY_SECONDS = 1.0
"""Time between two tries while the database is unavailable."""


class Cancellations:
    """The wishes of one process to cancel runs, which the run's engine carries out.

    A wish is written at once while the database is there, else as soon as it has returned. Two kinds of
    runs are cancelled this way: those whose caller has left, and those that may or may not have been admitted, because
    the database went away between a COMMIT and its answer (their callers got an error that says so, with the run's id),
    or because the request was cancelled in the middle of its admission's commit.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._wishes: dict[str, str] = {}
        """The name in which each run is cancelled, by run."""
        self._added = asyncio.Event()
        self._refused = False
        """True if the database did not take the latest wish that was tried."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Write wishes until `stopping` is set and those that are known have been tried once more."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_at(stopping))
            while not stopping.is_set():
                await self._wait()
                await self._write_all()
        await self._write_all()

    def ask(self, run: str, by: str) -> None:
        """Cancel a run soon."""
        if len(self._wishes) < MOST_WISHES:
            self._wishes.setdefault(run, by)
            self._added.set()

    def has_wish(self, run: str) -> bool:
        """Return True if a wish to cancel this run is not written yet."""
        return run in self._wishes

    @contextmanager
    def guard_commit(self, run: str, *, cancels: bool) -> Iterator[None]:
        """Around the commit that admits a run, or that begins a later turn of it.

        Raises `RunUndecided` if the commit went unanswered. With `cancels`, the run is then cancelled, should it exist;
        so it is if the request is cancelled meanwhile.
        """
        try:
            yield
        except (StoreUnavailable, asyncio.CancelledError) as error:
            if isinstance(error, StoreUnavailable) and error.public_code != UNDECIDED:
                raise
            if cancels:
                self.ask(run, "client")
            if isinstance(error, StoreUnavailable):
                raise RunUndecided(run) from error
            raise

    async def _wake_at(self, stopping: asyncio.Event) -> None:
        """End the wait for further wishes as soon as `stopping` is set."""
        await stopping.wait()
        self._added.set()

    async def _wait(self) -> None:
        """Wait until there is something to write that can be written, or the process stops."""
        if self._wishes and not self._context.store.healthy:
            await self._context.store.wait_until_healthy(WISH_RETRY_SECONDS)
            return
        if self._wishes and not self._refused:
            return
        await wait_for_event(self._added, WISH_RETRY_SECONDS)
        self._added.clear()

    async def _write_all(self) -> None:
        for run, by in list(self._wishes.items()):
            try:
                await self._write(run, by)
            except StoreUnavailable:
                self._refused = True
                return
            except Exception as bug:
                self._context.telemetry.log(
                    logging.ERROR, "A run could not be cancelled because of a bug; it goes on.", bug, run=run
                )
            self._wishes.pop(run, None)
        self._refused = False

    async def _write(self, run: str, by: str) -> None:
        store, now = self._context.store, self._context.now()
        try:
            await cancellation.ask(store, self._context.queue, await store.run(run), by, now)
        except NotFound:  # its admission may be in the batch that is being written: what is appended comes after it
            with suppress(NotFound, RunEnded):
                await store.append(Entry(run, now, (RunCancelAsked(by),)))


class RunClient:
    """The runs of one gateway's callers."""

    def __init__(
        self, context: EngineContext, *, home: str, bound: int, waiting_bound: int, engine: Drivers | None = None
    ) -> None:
        """`home` is the address of this process; at most `bound` runs are followed at once. While
        `waiting_bound` runs or more wait for an engine, a run is admitted only if its tenant has less than its share of
        them. `engine` is that of this process, if it has one."""
        self._context = context
        self._home = home
        self._bound = bound
        self._waiting_bound = waiting_bound
        self.engine = engine
        self.cancellations = Cancellations(context)
        self._followers = Followers(context, home=home, ended=self._turn_over)
        self.changes = RunChanges(context)
        """Wakes those who look at lists of runs."""
        self._waiting: WaitingRuns[WaitingRun] = WaitingRuns()
        """Runs that wait for tool results of callers of this process."""
        self._owners: dict[str, Owner] = {}
        """The owners of runs that were begun here and are followed, by run."""
        self._turn_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The locks of runs whose next turn is just being begun here, by run."""
        self._untaken = SharedRead(self._count_untaken, COUNT_SECONDS)
        """The number of runs that nobody has taken, by tenant."""
        self._open = False

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def is_open(self) -> bool:
        """Return True while runs can be begun and followed."""
        return self._open

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow runs until `stopping` is set."""
        async with self._context.queue.subscribe(self._home, self._receive), asyncio.TaskGroup() as group:
            self._followers.open(group)
            group.create_task(self.changes.run(stopping))
            group.create_task(self._followers.run(stopping))
            group.create_task(self.cancellations.run(stopping))
            self._open = True
            await stopping.wait()
            self._open = False

    async def start(self, order: Order) -> FollowedRun:
        """Admit a run, or begin the next turn of the one whose tool calls the conversation's end answers.

        Raises `InvalidRequest` (nobody eligible, a bad plan, or tool results that belong nowhere), `Overloaded`,
        `OverQuota`, `StoreUnavailable`: then nothing was started. Raises `RunUndecided` if it is not known whether the
        run was started. When it returns, `run.admitted` (or `run.resumed`) is committed and the run will reach exactly
        one terminal state.
        """
        if not self._open or len(self._followers) >= self._bound:
            raise Overloaded()
        if not self._context.clock_is_set():  # the time of the database is not known yet
            raise StoreUnavailable()
        followed = await self._continue_run(order)
        if followed is None:
            followed = await self._begin(order)
        if self.engine is None:
            return followed
        try:
            for _ in range(LOOP_YIELDS_BEFORE_REPLY):
                await asyncio.sleep(0)
        except BaseException:
            self.leave(followed)
            raise
        return followed

    # -- a new run

    async def _begin(self, order: Order) -> FollowedRun:
        await self._check_untaken(order.tenant)
        messages = tuple(order.task.messages)  # a new run needs all of them: until here they may be made when read
        order = replace(order, task=replace(order.task, messages=messages))
        order = await admission.with_budgets(self._context, order)
        catalog = self._context.catalog()
        order = admission.with_tier_in_force(catalog, order)
        admitted = await admission.decide(self._context, catalog, order)
        order = admitted.order
        await self._context.pin(catalog)
        entry, salt = admission.entry(self._context, catalog, admitted, gateway=self._home if order.followed else "")
        (event,) = entry.events
        state = state_of_admission(entry.run, event, entry.at, 1)
        mailbox, follower = self._follow(order, state, salt)
        try:
            with self.cancellations.guard_commit(entry.run, cancels=state.turn.on_disconnect == "cancel"):
                if self.engine is not None and self._can_take_now:
                    await self.engine.admit(entry, state, salt, order.task, admitted.policy)
                else:
                    await self._context.store.append(entry)
                    await offer_run(self._context, state)
        except BaseException:
            self._forget(follower)
            raise
        follower.is_recorded = True
        return FollowedRun(entry.run, mailbox, follower.state)

    @property
    def _can_take_now(self) -> bool:
        """Return True if the engine of this process may take a new run at once: it has room, and none waits for it."""
        return self.engine is not None and self.engine.has_room and not self._context.queue.crowded

    async def _check_untaken(self, tenant: str) -> None:
        """Raise `OverQuota` while more runs wait for an engine than engines can be expected to take soon. A tenant with
        less than its share of them is let in all the same."""
        if self._can_take_now:
            return
        waiting = await self._untaken.get()
        share = self._waiting_bound // len({*waiting, tenant})
        if sum(waiting.values()) >= self._waiting_bound and waiting.get(tenant, 0) >= share:
            raise OverQuota(
                "More runs wait for an engine than can be begun soon. Send the request again.",
                limit="waiting_runs",
                retry_after=1.0,
            )

    async def _count_untaken(self) -> Mapping[str, int]:
        return await self._context.store.count_untaken_runs(self._context.now())

    # -- the next turn

    async def _continue_run(self, order: Order) -> FollowedRun | None:
        """Begin the turn that the conversation's tool results begin; None if it has none that a run waits for."""
        if order.origin_kind:  # what is repeated is a run of its own
            return None
        results = find_returned_results(order.task.messages)
        if results is None:
            return None
        lock = self._turn_locks.setdefault(results.run, asyncio.Lock())
        for pause in (0.0, *TURN_PAUSES):
            if pause:
                await asyncio.sleep(pause)
            async with lock:  # a request with the same results follows the turn that the first one has begun
                with suppress(LeaseLost):
                    return await self._begin_or_follow_turn(order, results)
        raise Overloaded()

    async def _begin_or_follow_turn(self, order: Order, results: ReturnedResults) -> FollowedRun | None:
        """As `_continue_run`. Raises `LeaseLost` while others write to the run: another process was sent the same
        results, an engine has taken the run over, or its cancellation was asked for and it has not ended yet."""
        resumption = await tool_results.find_resumption(self._context, order, results, self._waiting)
        if resumption is None:  # they are only the history of a new run
            return None
        if resumption.kind != "go_on":
            if resumption.state.cancel_asked or self.cancellations.has_wish(results.run):
                raise LeaseLost  # once it has ended, its results are the history of a new run
            return await self.attach(results.run, turn=resumption.state.turn.number, tenant=order.tenant)
        try:
            return await self._resume(order, resumption)
        except NotFound:  # erased since
            return None
        except Conflict as conflict:
            if conflict.public_code != MOVED:
                raise
            raise LeaseLost from conflict

    async def _resume(self, order: Order, resumption: Resumption) -> FollowedRun:
        """Begin the run's next turn, with the results of its caller, in one entry."""
        run, waiting_run = resumption.state.run, resumption.waiting_run
        next_turn = tool_results.begin_turn(self._context, order, resumption, self._home if order.followed else "")
        state = resumption.state
        for fact in next_turn.entry.events:
            state = apply_fact(state, fact, next_turn.entry.at)
        mailbox, follower = self._follow(order, state, waiting_run.snapshot.salt)
        try:
            await self._context.pin(self._context.catalog())
            with self.cancellations.guard_commit(run, cancels=False):  # its caller sends the results again
                if self.engine is not None and self.engine.has_room:
                    await self.engine.resume(next_turn, resumption)
                else:
                    await self._commit_turn(next_turn, resumption, follower)
        except BaseException:
            self._forget(follower)
            raise
        follower.is_recorded = True
        return FollowedRun(run, mailbox, follower.state)

    async def _commit_turn(self, next_turn: NextTurn, resumption: Resumption, follower: Follower) -> None:
        """Write the turn, and offer it first to the engine that still holds the run's state."""
        appended = await self._context.store.append(next_turn.entry)
        if resumption.waiting_run.engine:
            with suppress(QueueUnavailable):
                message = CommittedEvents(resumption.state.run, appended.events)
                return await self._context.queue.publish(resumption.waiting_run.engine, [message])
        await offer_run(self._context, follower.state)

    # -- following

    async def attach(
        self,
        run: str,
        at: Position = Position(),
        *,
        tenant: str | None,
        turn: int | None = None,
        once: str | None = None,
    ) -> FollowedRun:
        """Follow a run's turn from `at` on, whichever engine drives it and whether or not it is over.

        It is the latest turn, unless `turn` or the claim `once` that began it says which. The run is read as callers of
        the `tenant` may read it (None: of any).

        Raises `NotFound` (no such run, or its answer was erased), `InvalidRequest` and `Conflict` (see
        `caller_view.check_position`), `Overloaded`, `StoreUnavailable`.
        """
        store = self._context.store.of_tenant(tenant)
        for _ in range(2):  # once more where more was sent here while the journal was read
            journal = await store.journal(run)
            wanted = tool_results.turn_of(journal.events, once) if once is not None else turn
            state = messages.fold_until_reply(journal.events, wanted)
            present = self._followers.follower_of(run)
            if present is None or state.replied or present.state.seq <= state.seq:
                break
        if present is not None and (state.replied or present.state.turn.number != state.turn.number):
            present = None  # the reply is known, or the follower is of an earlier turn
        if present is not None:  # it may not have received yet that the attempt was lost whose words it has
            self._followers.fold(present, journal.events)
            state = present.state
        caller_view.check_position(state, at)
        mailbox: Mailbox[CallerMessage] = Mailbox(MOST_UNREAD_MESSAGES)
        wants_steps = bool(state.turn.wire.get("steps"))
        if wants_steps and not at.chars:
            _push_step_events(mailbox, messages.events_of_turn(journal.events, state.turn.number), up_to=state.seq)
        audience = present.audience if present is not None else Audience(run)
        audience.admit(mailbox, at, wants_steps=wants_steps)
        if present is None and state.replied:
            audience.end(await messages.read_turn_end(store, state))
        elif present is None:
            if len(self._followers) >= self._bound:
                raise Overloaded()
            await self._followers.ask(self._followers.follow(state, journal.salt, audience))
        return FollowedRun(run, mailbox, state, replayed=True)

    def leave(self, followed: FollowedRun) -> None:
        """Note that a caller is gone. If it was the last one, the run goes on or stops as its admission says; but not
        where the turn's own caller is at another gateway, or was told before that its plan waits for an approval."""
        follower = self._followers.follower_of(followed.run)
        if followed.replayed:  # it holds no place that is to be kept until the run has ended
            followed.mailbox.push(messages.end_with_error(followed.state, RunEnded()))
        if follower is None:
            return
        follower.audience.leave(followed.mailbox)
        if followed.replayed or not follower.state.turn.gateway:
            follower.audience.remove(followed.mailbox)
        turn = follower.state.turn
        if not len(follower.audience) and turn.on_disconnect == "cancel" and follower.is_new:
            self.cancellations.ask(followed.run, "client")
        if follower.audience.empty:
            self._forget(follower)

    async def decide(self, run: str, tenant: str | None, decision: Decision) -> RecordedDecision:
        """Write a decision on a plan that waits for an approval (see `approvals.write_decision`), and offer the run
        to the engines if it goes on."""
        context, wait = self._context, admission.untaken_seconds(self._context)
        if not context.clock_is_set():  # the time of the database is not known yet
            raise StoreUnavailable()
        decided = await approvals.write_decision(
            context.store, context.catalog(), context.now, run, tenant, decision, wait
        )
        if not decided.repeated:
            outcome = "approved" if decision.verdict == "approve" else "refused"
            context.telemetry.count("baton_approvals_total", decided.state.admitted.tier, outcome)
        if not decided.repeated and decided.state.ended:
            messages.count_run_end(context.telemetry, decided.state)
        elif not decided.repeated:
            await offer_run(context, decided.state)
        return decided

    def _receive(self, message: Live) -> None:
        if isinstance(message, CommittedEvents):
            self.changes.notice()
        self._followers.receive(message)

    def _follow(self, order: Order, state: RunState, salt: bytes) -> tuple[Mailbox[CallerMessage], Follower]:
        """Follow a turn that is about to be begun: an engine may be done with it before its commit has returned."""
        mailbox: Mailbox[CallerMessage] = Mailbox(MOST_UNREAD_MESSAGES)
        audience = Audience(state.run)
        audience.admit(mailbox, wants_steps=order.stream_steps)
        follower = self._followers.follow(state, salt, audience, is_new=True)
        follower.is_recorded = False
        self._owners[state.run] = order.owner
        return mailbox, follower

    def _forget(self, follower: Follower) -> None:
        self._followers.forget(follower)
        self._owners.pop(follower.state.run, None)

    def _turn_over(self, follower: Follower) -> None:
        """Keep the state of a run that waits for its caller, who is likely to come back to this process."""
        state = follower.state
        owner = self._owners.pop(state.run, None)
        if state.state == "awaiting_tool" and owner is not None and follower.epoch:
            waiting_run = WaitingRun(owner, RunSnapshot(state, follower.salt, follower.epoch), follower.engine)
            self._waiting.keep(state.run, waiting_run, state.seq)


def _push_step_events(mailbox: Mailbox[CallerMessage], events: Iterable[Event], *, up_to: int) -> None:
    """Send a caller the public events of a run's steps, up to the event with that number."""
    for event in events:
        message = step_event(event)
        if event.seq <= up_to and message is not None:
            mailbox.push(message)
