"""Recovery: runs that nobody drives, and tickets that nobody has taken, are found by polling the database.

The queue delivers both at once as a rule. Those that it has lost are found here: a run that no engine has taken; a run
whose engine let its lease lapse, because it died, stood still, or could not reach the database; a ticket whose delivery
went unanswered. Such a run is taken over with a higher epoch, and the claims of its former engine lapse with it, so
that its steps go on at once. Some runs cannot be driven here: one of a tier that this process does not know, or that
newer code has admitted, is left to a process that can and is reported; one whose content was erased fails. To cancel a
run nobody needs to know its tier. Once a run is past its deadline any engine ends it, even without understanding its
journal or being able to take it.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from app.core.message.chat import Usage
from app.core.run.events import Kind, RunExpired
from app.core.run.fold import apply_facts, fold
from app.core.run.progress import EXPIRED, Finish, decide_end_again, give_up
from app.core.run.state import Call, RunState
from app.engine.calls.attempt import outcomes_of_lost_calls, read_open_calls
from app.engine.commit.run_writer import RunSnapshot, ending, projection, run_ticket, ticket_of_row
from app.engine.context import EngineContext
from app.engine.delivery.messages import outcome_label
from app.engine.runs.driver import Driver
from app.errors import (
    BatonError,
    ConfigInvalid,
    Conflict,
    EventMalformed,
    NotFound,
    QueueUnavailable,
    ServiceUnavailable,
    StoreUnavailable,
)
from app.store.protocol import Entry, LapsedRuns, Projection, RunRow, Store

RESTORED = "restored"
"""The error of a run that was open when the database was restored from a back-up."""
MOST_IN_SWEEP = 50
"""Runs and tickets that are taken in one sweep, at the most."""
GIVEN_UP_SECONDS = 0.5
"""Seconds since which a lease that is given up has lapsed: more than the clocks of two processes differ."""
MOST_COUNTED = 10_000
"""Waiting runs that are counted, at the most."""
FORGET = 500
"""Idempotency records, and rate windows, deleted in one sweep: some ten milliseconds, and more a day than any gateway
makes."""
NOT_TAKEN_OVER = "A run whose engine is gone could not be taken over; an engine tries again."

Take = Callable[[RunSnapshot], Awaitable[None]]
"""Takes a run whose row is this engine's already. Raises `NotFound` if its content was erased."""


class Recovery:
    """The sweeps of one engine."""

    def __init__(self, context: EngineContext, *, home: str, take: Take) -> None:
        """`home` is this process's address on the queue; `take` drives a run that was taken over."""
        self._context = context
        self._home = home
        self._take = take
        self._stranded = 0
        self._maintained_at = 0.0

    async def sweep(self, room: int, renew: Callable[[], Awaitable[object]]) -> bool:
        """Take over at most `room` runs, or, without any, those that are overdue or to be cancelled: their end needs no
        step slot. Returns whether there may be more.

        `renew` prolongs this engine's own leases, since one that stood still must not take over what it drives itself.
        After an outage of the database every lease has lapsed; those who hold them get the length of one to come back.
        """
        more = False
        if self._context.may_judge_leases():
            more = await self._take_over(room, renew)
        if self._context.monotonic() - self._maintained_at >= self._context.lease:
            self._maintained_at = self._context.monotonic()
            await self._maintain()
        return more

    async def _maintain(self) -> None:
        """Once a lease: forget idempotency records and rate windows that have run out, count what waits, notify of
        overdue tickets."""
        await self._context.store.forget_idempotency_records(self._context.now(), FORGET)
        await self._context.store.forget_windows(self._context.now(), FORGET)
        self._context.telemetry.gauge("baton_runs_waiting", await self._context.store.count_waiting_runs(MOST_COUNTED))
        now = self._context.now()
        backlog = await self._context.store.backlog(now, MOST_COUNTED)
        self._context.telemetry.gauge("baton_tickets_waiting", backlog.waiting)
        age = now - backlog.oldest_since if backlog.oldest_since is not None else 0.0
        self._context.telemetry.gauge("baton_tickets_oldest_seconds", max(0.0, age))
        if not self._context.queue.healthy:  # dispatchers poll the outbox themselves meanwhile
            return
        overdue = await self._context.store.announce_overdue_tickets(self._context.now(), MOST_IN_SWEEP)
        if overdue:
            self._context.telemetry.count("baton_swept_total", "ticket", by=len(overdue))
            await self._context.queue.enqueue([ticket_of_row(due) for due in overdue])

    async def _take_over(self, room: int, renew: Callable[[], Awaitable[object]]) -> bool:
        now = self._context.now()
        lapsed = await self._context.store.count_lapsed_runs(now)
        wanted = sum([kind.expired for kind in lapsed])
        driven, cancelled = [], []
        for kind in lapsed:
            if room > 0 and self._can_drive(kind):
                driven.append((kind.tier, kind.code))
                wanted += kind.runs - kind.expired
            elif not is_newer(kind.code, self._context.code):
                cancelled.append((kind.tier, kind.code))
                wanted += kind.cancelled
        self._report(lapsed)
        if not wanted:
            return False
        most = MOST_IN_SWEEP
        if room > 0:
            most = min(room, MOST_IN_SWEEP)
        await renew()
        until = self._context.now() + self._context.lease
        rows = await self._context.store.take_over(self._home, now, until, most, driven, cancelled)
        for row in rows:
            try:
                await self._go_on(row)
            except (ServiceUnavailable, Conflict) as error:
                self._context.telemetry.log(logging.WARNING, NOT_TAKEN_OVER, run=row.id, error=error.code)
            except Exception as bug:  # a run that cannot be read must not keep the others waiting
                self._context.telemetry.log(logging.ERROR, NOT_TAKEN_OVER, bug, run=row.id)
        return len(rows) < min(most, wanted)  # a run is passed over while another process writes to it

    def _can_drive(self, kind: LapsedRuns | RunRow) -> bool:
        return kind.tier in self._context.catalog().tiers and not is_newer(kind.code, self._context.code)

    def _report(self, lapsed: Sequence[LapsedRuns]) -> None:
        counts = [(kind.tier, self._count_stranded(kind)) for kind in lapsed]
        stranded = sum([count for _, count in counts])
        self._context.telemetry.gauge("baton_orphans_stranded", stranded)
        if stranded > self._stranded:
            for tier, count in counts:
                if count:
                    self._context.telemetry.log(
                        logging.ERROR,
                        "Runs wait for an engine that knows their tier and is as new as the process that admitted "
                        "them; start one, or correct the pool file.",
                        tier=tier,
                        count=count,
                    )
        self._stranded = stranded

    def _count_stranded(self, kind: LapsedRuns) -> int:
        """Return how many runs of a kind this engine can neither drive nor end."""
        if self._can_drive(kind):
            return 0
        if is_newer(kind.code, self._context.code):
            return kind.runs - kind.expired
        return kind.runs - kind.expired - kind.cancelled

    async def _go_on(self, row: RunRow) -> None:
        """Fold the run's journal and go on where its engine stopped."""
        late = row.deadline <= self._context.now()
        try:
            journal = await self._context.store.journal(row.id)
            state = fold(journal.events)
        except EventMalformed:
            self._context.telemetry.count("baton_swept_total", "run")
            if not late:
                raise
            return await self._expire(row)
        if state.ended:  # another engine went on with it while it was read, and has finished
            return
        self._context.telemetry.count("baton_swept_total", "run" if has_begun(state) else "handed")
        if (late or state.cancel_asked) and not self._can_drive(row):
            return await self._end(state, row, self._overdue_end(state))
        try:
            await self._take(RunSnapshot(state, journal.salt, row.epoch))
        except NotFound:
            await self._end(state, row, _without_content(late))
        except ConfigInvalid:  # the pool file has lost its tier since the run was chosen: others may take it at once
            lapsed = self._context.now() - GIVEN_UP_SECONDS
            await self._context.store.renew_leases(self._home, {row.id: row.epoch}, lapsed)
        except BatonError:
            raise
        except Exception as bug:
            if not late:
                raise
            self._context.telemetry.log(
                logging.ERROR,
                "A run past its deadline is ended, because a bug keeps it from an engine.",
                bug,
                run=row.id,
            )
            await self._end(state, row, self._overdue_end(state))

    def _overdue_end(self, state: RunState) -> Finish:
        """Return the end that a driver would decide on: the run may be asked to end, or its caller has left it."""
        return decide_end_again(give_up(state, Kind.EXPIRED, EXPIRED), state, self._context.now())

    async def _end(self, state: RunState, row: RunRow, command: Finish) -> None:
        """End a run that can be read but not driven; its planning calls are `unknown`, those of steps have tickets."""
        await self._write(row, _last_entry(row, state, state.open_planning_calls, command, self._context.now()))

    async def _expire(self, row: RunRow) -> None:
        """End a run whose journal has events that this process does not know. Its planning calls are `unknown` as in
        `_end`, so that no budget keeps what was held for them."""
        open_calls = read_open_calls(await self._context.store.call_events(row.id), step=None)
        outcomes, held = outcomes_of_lost_calls(open_calls)
        spent = row.spent + held
        expired = RunExpired(
            usd=spent.usd,
            usage=Usage(input=spent.tokens, estimated=True),
            degraded=row.degraded,
            error=EXPIRED,
            unread=True,
        )
        columns = Projection("expired", error=EXPIRED)
        events, now = (*outcomes, expired), self._context.now()
        await self._write(row, Entry(row.id, now, events, epoch=row.epoch, release=held, spent=held, row=columns))

    async def _write(self, row: RunRow, entry: Entry) -> None:
        await self._context.store.append(entry)
        state, error = str(entry.row.state), entry.row.error
        self._context.telemetry.count("baton_runs_total", row.tier, outcome_label(state, error))
        self._context.telemetry.log(
            logging.WARNING, "A run that no engine could drive was ended.", run=row.id, error=error
        )


async def end_restored(store: Store, row: RunRow, now: float) -> None:
    """End a run that was open in a restored database, and give its open calls the outcome `unknown`.

    It may have gone on after the restore point, so that nothing of it may be done again.
    """
    state = fold((await store.journal(row.id)).events)
    await store.append(_last_entry(row, state, state.open_calls, Finish(Kind.FAILED, error=RESTORED), now))


def _last_entry(row: RunRow, state: RunState, lost_calls: Sequence[Call], command: Finish, now: float) -> Entry:
    """Return the entry that ends a run in this state and gives these calls of it the outcome `unknown`."""
    outcomes, held = outcomes_of_lost_calls(lost_calls)
    closed = apply_facts(state, outcomes)
    end = ending(closed, command)
    columns = projection(apply_facts(closed, end))
    return Entry(row.id, now, (*outcomes, *end), epoch=row.epoch, release=held, spent=held, row=columns, seq=state.seq)


def has_begun(state: RunState) -> bool:
    """Return True if the run has begun in this turn, so that an engine was lost; else it was merely not taken yet."""
    return any(call.turn == state.turn.number for call in state.calls.values())


async def hand_back(context: EngineContext, home: str, drivers: Mapping[str, Driver]) -> None:
    """Give up the leases of these runs, which are not driven here any more, and offer the runs to other engines.

    An engine that is not reached finds them with its next sweep, and, while the database is away, when they have
    lapsed.
    """
    epochs = {run: driver.writer.epoch for run, driver in drivers.items()}
    with suppress(StoreUnavailable, QueueUnavailable):
        if epochs:
            given_up = await context.store.renew_leases(home, epochs, context.now() - GIVEN_UP_SECONDS)
            await context.queue.enqueue([run_ticket(drivers[run].state) for run in given_up])


def _without_content(late: bool) -> Finish:
    if late:
        return Finish(Kind.EXPIRED, error=EXPIRED)
    return Finish(Kind.FAILED, error="content_erased")


def is_newer(code: str, than: str) -> bool:
    """True if a version is above another one; a text that is no version counts as newer unless both are the same."""
    if code == than:
        return False
    numbers = _numbers(code)
    return not numbers or numbers > _numbers(than)


def _numbers(version: str) -> list[int]:
    """The first three numbers in a version."""
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
