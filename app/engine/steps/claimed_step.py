"""A ticket that this process is working on: its step's basis, its answer on the way to the followers, its log line.

Outcomes of calls that could not be written yet are kept while the database is away. The outcome of a call exists only
here, so it is kept: bounded, written in the order in which it came, and without a slot, so that other steps can use it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Piece, TextDelta, ToolDelta, count_tokens_covering
from app.core.pool.catalog import MILLION
from app.core.run.events import CallFinished, CallIntended, Fact, PassedOver, StepAwaitingTool, StepDone, StepFailed
from app.core.run.state import RunState, StepState
from app.engine.calls.attempt import Reply
from app.engine.calls.step_request import Candidates, View
from app.engine.context import EngineContext
from app.errors import RunOverBudget, StoreUnavailable
from app.stepqueue.protocol import Delta, ListenRequest, Ticket
from app.store.protocol import Entry, Store
from app.telemetry import Telemetry


class Relay:
    """The answer of one attempt on its way to the run's followers: what one read gave becomes one message.

    Tool calls get the ids under which the caller knows them as they begin; the worker's own stay inside.
    """

    def __init__(self, run: str, step: int, call: str, reply: Reply, id_of: Callable[[int], str]) -> None:
        """`id_of` gives the caller's id of a tool call, by its number."""
        self._place = (run, step, call)
        self._call = call
        self._reply = reply
        self._id_of = id_of
        self._chars = self._tokens = 0
        self._calls: list[ToolDelta] = []
        self._sent = 0
        self._is_held_back = False
        """True while the text looks like a refusal, which is not sent before it is known to be one."""
        self.was_sent = False
        """True once text of the attempt may have been sent to a caller, so that no other attempt may follow."""

    def missing_part(self, listener: ListenRequest) -> Delta | None:
        """Return the part of the answer that was sent to others and that a listener lacks; None if it has all."""
        chars, calls = (listener.chars, listener.calls) if listener.call == self._call else (0, 0)
        if chars >= self._chars and calls >= self._sent:
            return None
        self.was_sent = True
        tokens = self._reply.tokens_since(0)[: self._tokens]
        return Delta(
            *self._place,
            chars,
            self._reply.text[chars : self._chars],
            tokens[count_tokens_covering(tokens, chars) :],
            calls,
            tuple(self._calls[calls : self._sent]),
        )

    def delta(self, pieces: Sequence[Piece]) -> Delta | None:
        """Return the message that these pieces make; None if there is nothing to send of them.

        A refusal is sent with the end, when it is known to be one.
        """
        text = ""
        for piece in pieces:
            if isinstance(piece, TextDelta):
                text += piece.text
            elif isinstance(piece, ToolDelta) and self._counts(piece):
                self._calls.append(self._with_our_id(piece))
        if self._reply.refuses:
            text, self._is_held_back = "", True
        elif self._is_held_back:
            text, self._is_held_back = self._reply.text[self._chars :], False
        decoded = self._reply.tokens_since(self._tokens) if text else ()
        calls = tuple(self._calls[self._sent :])
        if not text and not calls:
            return None
        delta = Delta(*self._place, self._chars, text, decoded, self._sent, calls)
        self._chars += len(text)
        self._tokens += len(decoded)
        self._sent = len(self._calls)
        return delta

    def _counts(self, piece: ToolDelta) -> bool:
        return self._reply.parallel or piece.index == 0

    def _with_our_id(self, piece: ToolDelta) -> ToolDelta:
        """Return the piece with the caller's id if the tool call begins with it, else without any."""
        if not piece.name:
            return replace(piece, id="")
        return replace(piece, id=self._id_of(piece.index))


class StepBasis(Struct, frozen=True):
    """The basis of a step: the state that it began from, what it may see, and the workers that it may call."""

    state: RunState
    view: View
    candidates: Candidates
    excluded: PassedOver
    """The workers of the run that may not read what it sees, each with the reason."""
    refusal: RunOverBudget | None = None
    """The refusal to reserve for the latest attempt, if there was one."""

    @property
    def step(self) -> StepState:
        """Return the step as it was in that state."""
        return self.view.step


@dataclass(slots=True)
class ClaimedStep:
    """A ticket that this process is working on. While `claim` is 0, its step is still to be claimed."""

    ticket: Ticket
    task: asyncio.Task[None] | None = None
    claim: int = 0
    interrupted: bool = False
    stopped: bool = False
    """The run's driver asked for the end, as opposed to this process shutting down."""
    interruptible: bool = False
    """It waits for a worker. It is never interrupted while it writes to the journal."""
    engine: str = ""
    """The address of the run's new engine, if it has changed since the ticket was written."""
    listening: tuple[str, ...] = ()
    """Further gateways that asked for the answer, of a run that is driven elsewhere."""
    relay: Relay | None = None
    """The answer on its way to the followers, while it streams."""
    is_last_delivery: bool = False
    """The step is given up if this engine stops while it executes it; see `Execution._is_postponed`."""

    def interrupt(self, *, stopped: bool) -> None:
        """End the wait for the worker, now or as soon as there is one; its outcome is written all the same."""
        self.interrupted = True
        self.stopped = self.stopped or stopped
        if self.interruptible and self.task is not None:
            self.interruptible = False
            self.task.cancel()

    def allow_interruption(self) -> None:
        """Note that it waits for a worker, and may be interrupted; raises `CancelledError` if it was to be already."""
        if self.interrupted:
            raise asyncio.CancelledError
        self.interruptible = True


class StepLog:
    """The line that a step leaves in the log when this engine is done with it.

    It is made of the facts that were committed, so a step that another engine has taken over leaves none here. A step
    that waits for tool results leaves one line for each turn. A step that is a workflow of its own is executed by no
    engine: its inner steps leave lines.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._began = context.monotonic()
        self._state: RunState | None = None
        self._step = 0
        self._worker = ""
        self._attempt = self._tokens = self._usd = 0
        self._reason = ""
        self._is_written = False

    def begin(self, state: RunState, n: int) -> None:
        """Note the step `n` as it is in the journal: the calls of other engines in this turn belong to its costs."""
        self._state, self._step, self._worker = state, n, state.steps[n].worker
        calls = [call for call in state.calls.values() if call.step == n and call.turn == state.turn.number]
        self._attempt = len(calls)
        self._tokens = sum(call.usage.total for call in calls)
        self._usd = sum(call.usd for call in calls)

    def call(self, worker: str) -> None:
        """Note a call whose intent is committed."""
        self._worker, self._attempt = worker, self._attempt + 1

    def note_committed(self, facts: Iterable[Fact]) -> None:
        """Note what was committed; the step's end is written."""
        for fact in facts:
            if isinstance(fact, CallIntended):
                self.call(fact.worker)
            elif isinstance(fact, CallFinished):
                self._tokens += fact.usage.total
                self._usd += fact.usd
                self._reason = fact.reason
            elif isinstance(fact, StepDone):
                self.write("done")
            elif isinstance(fact, StepAwaitingTool):
                self.write("awaiting_tool")
            elif isinstance(fact, StepFailed):
                self.write("failed", error=fact.error)

    def write(self, outcome: str, *, error: str = "") -> None:
        """Write the line, once; `outcome` is `done`, `failed`, `awaiting_tool`, or `cancelled` with its run."""
        state = self._state
        if state is None or self._is_written:
            return
        self._is_written = True
        admitted = state.admitted
        fields: dict[str, object] = {
            "run": state.run,
            "step": self._step,
            "worker": self._worker,
            "attempt": self._attempt,
            "outcome": outcome,
            "tokens": self._tokens,
            "ms": round((self._context.monotonic() - self._began) * 1000, 3),
            "cost_usd": self._usd / MILLION,
            "tier": admitted.tier,
        }
        optional = {
            "request": state.turn.request_id,
            "key": admitted.key_name,
            "tenant": admitted.tenant,
            "reason": self._reason,
            "error": error,
        }
        self._context.telemetry.log_step(fields | {name: value for name, value in optional.items() if value})


OUTCOME_WAIT_SECONDS = 90.0
"""Time for which an outcome is kept."""
MOST_ENTRIES, MOST_BYTES = 1_024, 64 * 2**20
"""The bounds of what one process keeps: entries, and bytes of content in them."""
ENTRY_BYTES = 2_048
"""The size of an entry without its content, roughly, in bytes."""
RETRY_PAUSE_SECONDS = 0.05
"""Time between two tries of all entries that wait."""
HEALTH_WAIT_SECONDS = 1.0
"""Longest time between two looks whether the database is there."""


class PendingOutcomes:
    """The last entries of a dispatcher's steps, while they cannot be written."""

    def __init__(
        self,
        store: Store,
        telemetry: Telemetry,
        *,
        monotonic: Callable[[], float],
        freed: Callable[[], None],
        entries: int = MOST_ENTRIES,
        size: int = MOST_BYTES,
    ) -> None:
        """`freed` is called whenever a step gives up its slot or there is room again."""
        self._store = store
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._freed = freed
        self._most, self._most_bytes = entries, size
        self._sizes: dict[int, int] = {}
        """The size in bytes of each entry that is kept without a slot, by its number."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """The entries that wait to be tried again, by their numbers."""
        self._has_waiting = asyncio.Event()
        self._closed = False
        self._last_number = 0

    def __len__(self) -> int:
        """The number of steps that are kept without a slot."""
        return len(self._sizes)

    @property
    def full(self) -> bool:
        """Return True if no step may be begun, because there would be no room for its outcome."""
        return len(self._sizes) >= self._most or sum(self._sizes.values()) >= self._most_bytes

    async def write_later(self, entry: Entry, append: Callable[[], Awaitable[None]]) -> None:
        """Keep an entry that the database did not take, and call `append` in its turn until that has taken it.

        Raises `StoreUnavailable` when that took too long.
        """
        number = self._add(ENTRY_BYTES + sum(len(body) for _, body in entry.contents))
        give_up_at = self._monotonic() + OUTCOME_WAIT_SECONDS
        try:
            while not self._closed and (seconds_left := give_up_at - self._monotonic()) > 0:
                if await self._wait_for_turn(number, seconds_left):
                    with suppress(StoreUnavailable):
                        return await append()
            raise StoreUnavailable
        finally:
            self._remove(number)

    def _add(self, size: int) -> int:
        """Keep an entry without its slot if there is room; returns its number, by which entries take turns."""
        self._last_number += 1
        if not self.full:
            self._sizes[self._last_number] = size
            self._report_size()
        return self._last_number

    def _remove(self, number: int) -> None:
        if self._sizes.pop(number, None) is not None:
            self._report_size()

    def _report_size(self) -> None:
        """Set the gauges, and say that a slot may be free or that there is room again."""
        self._telemetry.gauge("baton_outcomes_waiting", len(self._sizes))
        self._telemetry.gauge("baton_outcomes_waiting_bytes", sum(self._sizes.values()))
        self._freed()

    async def _wait_for_turn(self, number: int, seconds: float) -> bool:
        """Wait until it is this entry's turn; False if its time is over."""
        self._waiting[number] = turn = asyncio.get_running_loop().create_future()
        self._has_waiting.set()
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            return False
        return True

    async def keep(self) -> None:
        """Let the entries that wait be written, in their order, whenever the database is there; until closed."""
        while not self._closed:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while self._waiting and not self._closed:
                if await self._store.wait_until_healthy(HEALTH_WAIT_SECONDS):
                    self._wake_all()
                    await asyncio.sleep(RETRY_PAUSE_SECONDS)

    def _wake_all(self) -> None:
        """Let all that wait try again, in the order in which they came."""
        waiting, self._waiting = self._waiting, {}
        for _, turn in sorted(waiting.items()):
            if not turn.done():
                turn.set_result(None)

    def close(self) -> None:
        """Give up what still waits: this process ends, and others will find these calls without an outcome."""
        self._closed = True
        self._has_waiting.set()
        self._wake_all()
