"""What other processes left behind: runs without a driver and tickets without an answer, found once a lease or so, and
at once where the driver gave its lease up and said so (`hand_back`).

A run whose driver let its lease lapse is taken over with a higher epoch, its journal folded, and driven on. Some cannot
be driven here: one of a tier that this process does not know, or that newer code has admitted, is left to a process
that can and is reported; one whose content was erased fails. Once a run is past its deadline anybody ends it, even
without understanding its journal.
"""

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from app.core.message.chat import Usage
from app.core.plan.arms import tier_of
from app.core.run.commands import Finish
from app.core.run.events import Draft, Kind, RunExpired
from app.core.run.progress import fold, give_up
from app.core.run.state import RunState
from app.engine.calls.step_request import task_of
from app.engine.commit.lost_calls import given_up
from app.engine.commit.transition import ending, projection, tentative
from app.engine.context import Means
from app.engine.delivery.audience import Audience
from app.engine.delivery.turn_result import outcome
from app.engine.runs.driver import Driver
from app.engine.runs.request import Owner
from app.engine.steps.claim import rung_again
from app.errors import NotFound, QueueUnavailable, StoreUnavailable
from app.stepqueue.protocol import DISPATCHERS, Listen
from app.store.protocol import Entry, Lapsed, Ledger, Projection, RunRow

SWEEP = 50
"""Runs and tickets taken in one sweep."""
GIVEN_UP = 0.5
"""Seconds for which a lease that is given up has lapsed already: more than the clocks of two processes differ."""
COUNTED = 10_000
"""Waiting runs that are counted at most."""
FORGET = 500
"""Claims deleted in one sweep: some ten milliseconds, and more a day than any gateway makes."""


class Orphans:
    """The sweeper of one process."""

    def __init__(
        self, means: Means, *, home: str, drive: Callable[[Driver], None], audience: Callable[[str], Audience]
    ) -> None:
        """`home` is this process's address on the queue; `drive` begins to drive a run that was taken over, and
        `audience` gives up who has heard it here until then."""
        self._means = means
        self._home = home
        self._drive = drive
        self._audience = audience
        self._stranded = 0

    async def sweep(self, room: int, patience: float = 0.0) -> bool:
        """Take over at most `room` runs, forget some claims that have run out, then ring again for tickets: the bell is
        needed for the last alone. Returns whether there may be more to take over.

        Runs are left to others for `patience` seconds after their lease has lapsed. After an outage of the database
        every lease has; those who hold them get the length of one to come back.
        """
        more = False
        if room > 0 and self._means.store.seconds_since_recovery >= self._means.lease:
            more = await self._take_over(room, self._means.now() - patience)
        await self._means.store.forget_request_claims(self._means.now(), FORGET)
        self._means.telemetry.gauge("baton_runs_waiting", await self._means.store.waiting(COUNTED))
        if not self._means.queue.sound:  # what is looked up counts as rung, so it is left to dispatchers, who look too
            return more
        overdue = await self._means.store.overdue(self._means.now(), SWEEP)
        if overdue:
            self._means.telemetry.count("baton_swept_total", "ticket", by=len(overdue))
            await self._means.queue.ring([rung_again(due) for due in overdue])
        return more

    async def _take_over(self, room: int, now: float) -> bool:
        lapsed = await self._means.store.lapsed(now)
        ours = [(kind.tier, kind.code) for kind in lapsed if self._can_drive(kind)]
        self._report([kind for kind in lapsed if not self._can_drive(kind) and kind.runs > kind.expired])
        if not ours and not any(kind.expired for kind in lapsed):
            return False
        until, most = self._means.now() + self._means.lease, min(room, SWEEP)
        rows = await self._means.store.take_over(self._home, now, until, most, ours)
        for row in rows:
            try:
                await self._adopt(row)
            except Exception as error:  # one that cannot be read must not keep the others waiting
                self._means.telemetry.log(logging.ERROR, "an orphan could not be taken over", run=row.id)
                logging.getLogger("baton").debug("orphan", exc_info=error)
        wanted = min(room, sum(kind.runs for kind in lapsed if self._can_drive(kind)))
        return len(rows) < wanted  # a run is passed over while anybody writes to it

    def _can_drive(self, kind: Lapsed | RunRow) -> bool:
        return kind.tier in self._means.catalog().tiers and not is_newer(kind.code, self._means.code)

    def _report(self, kinds: list[Lapsed]) -> None:
        stranded = sum(kind.runs - kind.expired for kind in kinds)
        self._means.telemetry.gauge("baton_orphans_stranded", stranded)
        if stranded > self._stranded:
            for kind in kinds:
                self._means.telemetry.log(
                    logging.ERROR,
                    "orphans wait for a process that knows their tier and is as new as the one that admitted them",
                    tier=kind.tier,
                    count=kind.runs - kind.expired,
                )
        self._stranded = stranded

    async def _adopt(self, row: RunRow) -> None:
        """Fold an orphan's journal and go on where its driver stopped."""
        late = row.deadline <= self._means.now()
        try:
            journal = await self._means.store.journal(row.id)
            state = fold(journal.events)
        except (KeyError, ValueError):
            self._means.telemetry.count("baton_swept_total", "run")
            if not late:
                raise
            return await self._expire(row)
        if state.ended:  # somebody went on with it while it was read, and is done
            return
        self._means.telemetry.count("baton_swept_total", "handed" if _is_handed(state) else "run")
        if late and not self._can_drive(row):
            return await self._end(state, row, give_up(state, Kind.EXPIRED, "run_expired"))
        try:
            driver = await driver_for(
                self._means, self._home, Owner(row.tenant, row.key), state, journal.salt, row.epoch
            )
        except NotFound:
            return await self._end(state, row, _without_content(late))
        driver.audience = self._audience(row.id)
        self._drive(driver)

    async def _end(self, state: RunState, row: RunRow, command: Finish) -> None:
        """End a run that can be read but not driven; its planning calls are `unknown`, those of steps have tickets."""
        outcomes, held = given_up(state.planning)
        closed = tentative(state, outcomes)
        last = ending(closed, command)
        shown = projection(tentative(closed, last))
        await self._write(row, (*outcomes, *last), shown, held, state.seq)

    async def _expire(self, row: RunRow) -> None:
        """End a run whose journal is in words that this process does not know."""
        expired = RunExpired(
            usd=row.spent.usd,
            usage=Usage(input=row.spent.tokens, estimated=True),
            degraded=row.degraded,
            error="run_expired",
            unread=True,
        )
        shown = Projection("expired", error="run_expired")
        await self._write(row, (expired,), shown, Ledger())

    async def _write(
        self,
        row: RunRow,
        events: tuple[Draft, ...],
        shown: Projection,
        held: Ledger,
        seq: int | None = None,
    ) -> None:
        now = self._means.now()
        entry = Entry(row.id, now, events, epoch=row.epoch, release=held, spent=held, row=shown, seq=seq)
        await self._means.store.append(entry)
        self._means.telemetry.count("baton_runs_total", row.tier, outcome(str(shown.state), shown.error))
        self._means.telemetry.log(logging.WARNING, "an orphan was ended", run=row.id, error=shown.error)


async def driver_for(means: Means, home: str, owner: Owner, state: RunState, salt: bytes, epoch: int) -> Driver:
    """A driver for a run that exists already; `NotFound` if its content was erased."""
    tier = tier_of(means.catalog(), state.admitted.tier, state.admitted.model)
    if tier is None:
        raise KeyError(state.admitted.tier)
    return Driver(
        means,
        home=home,
        owner=owner,
        state=state,
        task=await task_of(means.store, state.run, state.admitted.task),
        salt=salt,
        conductor=means.conductor(tier),
        audience=Audience(state.run),
        epoch=epoch,
    )


async def hand_back(means: Means, home: str, epochs: Mapping[str, int]) -> None:
    """Give up the leases of these runs of ours, which nobody drives any more, and call those who can drive them on.

    Whoever is not reached finds them with the next sweep, and, while the database is away, when they have lapsed."""
    with suppress(StoreUnavailable, QueueUnavailable):
        given = await means.store.renew_leases(home, epochs, means.now() - GIVEN_UP) if epochs else ()
        await means.queue.tell(DISPATCHERS, [Listen(run, "") for run in given], at_once=True)


def _is_handed(state: RunState) -> bool:
    """Whether it is a background run of which nothing was done yet in this turn: no loss, but the way they go."""
    begun = any(call.turn == state.turn.number for call in state.calls.values())
    return bool(state.turn.wire.get("background")) and not begun


def _without_content(late: bool) -> Finish:
    if late:
        return Finish(Kind.EXPIRED, error="run_expired")
    return Finish(Kind.FAILED, error="content_erased")


def is_newer(code: str, than: str) -> bool:
    """Whether a version is above another one; what is no version counts as newer unless it is the same."""
    if code == than:
        return False
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:3]] for text in (code, than)]
    return not numbers[0] or numbers[0] > numbers[1]
