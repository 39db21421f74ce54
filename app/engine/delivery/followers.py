"""The runs that the callers of this process follow, whichever engine drives them, and what each caller is sent.

An engine sends a run's events, and the words of its answer, to the gateway that its admission names, from the first
event on. A `Follower` folds them in the order of their numbers, through the same `advance` as the writer, and fills the
run's audience. The journal is what counts: a gap, or words of a call that is not known yet, sends the follower there;
and every `POLL_SECONDS` (`UNHEALTHY_POLL_SECONDS` while the queue is unavailable) one query finds, for all followers of
the process, the journals that have moved without their having received it. A gateway that the admission does not name
asks the run's engine to send to it as well. The engine answers with the latest event that it has sent to others, so
that whatever was committed between the reading of the journal and that request is a gap like any other.

The reply of a turn is sent once to each caller (an `Audience`), in order and without a gap, from wherever that caller
wants to begin; a caller who cannot keep up gets the rest in larger pieces. Text that was sent cannot be taken back. So
a caller who has received text of an attempt that was lost receives nothing of the next one until the answer is known;
if that begins with the same text the stream goes on, else it ends with an error that says where the answer is. A caller
who has not received anything yet follows the new attempt at once.

`RunChanges` wakes those who look at lists of runs, once any run has changed. There is one look at the database a second
for the whole process, and none while nobody waits. Where an engine tells this process of events, the look is made at
once. Whoever is woken reads its own list again, as far as it may see it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from app.core.contents import content_ref
from app.core.message.chat import Decoded, ToolDelta, append_piece, count_tokens_covering, unsent_deltas
from app.core.run import caller_view
from app.core.run.caller_view import Position
from app.core.run.events import Event
from app.core.run.fold import fold_turn
from app.core.run.state import RunState
from app.engine.context import EngineContext
from app.engine.delivery import messages
from app.engine.delivery.messages import PUBLIC_FIELDS, AnswerPart, CallerMessage, Mailbox, StepEvent, TurnEnd
from app.engine.periodic import wait_for_event
from app.errors import (
    BatonError,
    EventMalformed,
    LeaseLost,
    NotFound,
    Overloaded,
    QueueUnavailable,
    RecordDamaged,
    RunEnded,
    RunLost,
    StoreUnavailable,
)
from app.stepqueue.protocol import CommittedEvents, Delta, ListenRequest, Live

POLL_SECONDS = 1.0
"""Time between two looks whether journals have moved, while the step queue is healthy."""
UNHEALTHY_POLL_SECONDS = 0.25
"""Time between two looks while the step queue is unavailable, and no event is sent."""
LISTEN_SECONDS = 6.0
"""Time for which an engine sends a run to a gateway that asked for it; the gateway asks again before that."""
MOST_EARLY_DELTAS = 256
"""Deltas that a follower keeps until it knows their call; what does not fit comes with the end."""
PROCESS_STOPS = (
    "This process had to let go of the run, which goes on elsewhere. Send the request again with the same "
    "Idempotency-Key, or ask GET /v1/runs/{id}/stream; the last event's number as Last-Event-ID continues the stream."
)


@dataclass(slots=True)
class Listener:
    """One caller, and how much it was sent: characters, tokens where they are sent too (None: to be counted), and
    pieces of tool calls.

    `replaced_text` is the text that it was sent of an attempt which was replaced, None where that is not known.
    """

    mailbox: Mailbox[CallerMessage]
    wants_steps: bool
    attempt: int
    chars: int
    tokens: int | None = None
    call_pieces: int = 0
    replaced_text: str | None = None
    has_left: bool = False

    def tokens_sent(self, tokens: Sequence[Decoded]) -> int:
        """The number of the answer's tokens that it was sent."""
        if self.tokens is None:
            return count_tokens_covering(tokens, self.chars)
        return self.tokens


class Audience:
    """The listeners of one run, and as much of its answer as can be sent by now."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._ended: TurnEnd | None = None
        self._listeners: list[Listener] = []
        self._last_noted = 0
        self._attempt = self._earlier_attempts = 0
        self.call = ""
        """The call whose text is sent."""
        self._pieces: list[str] = []
        self._tokens: list[Decoded] = []
        self._calls: list[ToolDelta] = []
        self.chars = 0
        """The number of characters of the answer that have come."""

    def __len__(self) -> int:
        """The number of callers of this process that still listen."""
        return sum(not listener.has_left for listener in self._listeners)

    @property
    def ended(self) -> bool:
        """Return True if the turn is over and its end was sent to every caller here."""
        return self._ended is not None

    @property
    def text(self) -> str:
        """Return the text that can be sent by now."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    # -- callers

    def admit(self, mailbox: Mailbox[CallerMessage], at: Position = Position(), *, wants_steps: bool = False) -> None:
        """Add a caller, who has what is before `at` already. It is sent at once what can be sent."""
        listener = Listener(mailbox, wants_steps, at.attempt, at.chars)
        if self._ended is not None:
            return self._end(listener, self._ended)
        self._listeners.append(listener)
        self._send(listener)

    def remove(self, mailbox: Mailbox[CallerMessage]) -> None:
        """Forget a caller who is gone and holds nothing that is to be given back with the end."""
        self._listeners = [listener for listener in self._listeners if listener.mailbox is not mailbox]

    @property
    def empty(self) -> bool:
        """Return True if nobody here waits for the end, not even on behalf of a caller who is gone."""
        return not self._listeners

    def leave(self, mailbox: Mailbox[CallerMessage]) -> None:
        """Note that a caller is gone. It is still sent the end, because places are given back with it, but no more
        text."""
        for listener in self._listeners:
            listener.has_left = listener.has_left or listener.mailbox is mailbox

    # -- the answer

    def receive(self, state: RunState, delta: Delta) -> bool:
        """Take text and tool calls of the answering step if they go on from what is known; True if they were new.

        Whatever is missed here is sent with the end, or when an engine sends it again.
        """
        if delta.call != self.call:
            attempt = caller_view.attempt_of(state, delta.call)
            if state.answering_step is None or state.answering_step.n != delta.step or attempt <= self._attempt:
                return False
            self._begin(delta.call, attempt)
            self._earlier_attempts = caller_view.count_earlier_attempts(state)
        known_chars, known_calls = self.chars - delta.offset, len(self._calls) - delta.since
        text = delta.text[known_chars:] if known_chars >= 0 else ""
        calls = delta.calls[known_calls:] if min(known_chars, known_calls) >= 0 else ()
        if not text and not calls:
            return False
        tokens: tuple[Decoded, ...] = ()
        if text:
            tokens = delta.logprobs[count_tokens_covering(delta.logprobs, known_chars) :]
            append_piece(self._pieces, text)
        self._tokens += tokens
        self._calls += calls
        self.chars += len(text)
        part = AnswerPart(text, tokens, Position(self._attempt, self.chars).number, calls, self._earlier_attempts)
        for listener in self._listeners:
            self._send(listener, part)
        return True

    def has_missed(self, delta: Delta) -> bool:
        """True if something before this part of the present attempt was missed."""
        return delta.call == self.call and (delta.offset > self.chars or delta.since > len(self._calls))

    def listen_request(self, home: str) -> ListenRequest:
        """The request of the gateway at `home` for what it lacks of the present attempt, and for those to come."""
        return ListenRequest(self._run, home, self.call, self.chars, len(self._calls))

    def lose(self) -> None:
        """Note that the present attempt was lost: whoever comes from now on is sent nothing of it."""
        self._begin("", self._attempt)

    def _begin(self, call: str, attempt: int) -> None:
        """Begin with the text of another attempt, or of no call."""
        for listener in self._listeners:
            if listener.attempt == self._attempt and listener.replaced_text is None and listener.chars <= self.chars:
                listener.replaced_text = self.text[: listener.chars]
        self._attempt, self.call = attempt, call
        self._pieces, self._tokens, self._calls, self.chars = [], [], [], 0

    def _send(self, listener: Listener, part: AnswerPart | None = None) -> None:
        """Send a listener what it lacks: the latest `part`, or more if it is behind."""
        if listener.attempt != self._attempt and not listener.chars and not listener.call_pieces:
            listener.attempt, listener.tokens, listener.replaced_text = self._attempt, None, None
        chars, calls = self.chars - listener.chars, len(self._calls) - listener.call_pieces
        if listener.has_left or listener.attempt != self._attempt or (chars <= 0 and calls <= 0):
            return
        sent = listener.tokens_sent(self._tokens)
        if part is None or (chars, calls) != (len(part.text), len(part.calls)):
            part = AnswerPart(
                self.text[listener.chars :],
                tuple(self._tokens[sent:]),
                Position(self._attempt, self.chars).number,
                tuple(self._calls[listener.call_pieces :]),
                self._earlier_attempts,
            )
        if listener.mailbox.put(part):
            listener.chars, listener.tokens = max(self.chars, listener.chars), sent + len(part.logprobs)
            listener.call_pieces = len(self._calls)

    def note(self, events: Sequence[Event]) -> None:
        """Send folded events to those who asked for steps. One that was sent before is not sent again."""
        new_events = [event for event in events if event.seq > self._last_noted]
        if not new_events:
            return
        self._last_noted = new_events[-1].seq
        listeners = [listener for listener in self._listeners if listener.wants_steps and not listener.has_left]
        if not listeners:
            return
        for event in new_events:
            message = step_event(event)
            if message is not None:
                for listener in listeners:
                    listener.mailbox.push(message)

    # -- the end

    def end(self, ended: TurnEnd) -> None:
        """End the turn: every caller here is sent what is left of the answer, and the end. Done once."""
        if self._ended is None:
            self._ended = ended
            for listener in self._listeners:
                self._end(listener, ended)

    def _end(self, listener: Listener, ended: TurnEnd) -> None:
        at, answer = caller_view.end_position(ended.state), ended.answer
        error = ended.error or self._objection(listener, ended.state, answer)
        tokens = ended.logprobs or ()
        rest = tokens[listener.tokens_sent(tokens) :]
        calls = unsent_deltas(ended.calls, self._calls[: listener.call_pieces])
        if error is None and (len(answer) > listener.chars or rest or calls):
            earlier = caller_view.count_earlier_attempts(ended.state)
            listener.mailbox.push(AnswerPart(answer[listener.chars :], rest, at.number, calls, earlier, ended.refusal))
        if error is not ended.error:
            ended = TurnEnd(ended.state, "", "stop", ended.bill, error)
        listener.mailbox.push(ended)

    def _objection(self, listener: Listener, state: RunState, answer: str) -> BatonError | None:
        """The error of a listener whose text cannot be continued to the answer of a turn that has ended in that state;
        None if it can."""
        at = caller_view.end_position(state)
        if listener.call_pieces and listener.attempt != at.attempt:
            return answer_changed(state)
        if not listener.chars or state.state == "awaiting_approval":  # in such a turn no answer is given yet
            return None
        received = listener.replaced_text
        if received is None and listener.attempt == self._attempt and listener.chars <= self.chars:
            received = self.text[: listener.chars]
        if listener.attempt == at.attempt:
            if listener.chars > len(answer) + caller_view.DONE:
                return caller_view.unknown_event_error()
            if received is None or answer.startswith(received):
                return None
            return answer_changed(state)
        if received is not None and answer.startswith(received):
            return None
        return answer_changed(state)


def step_event(event: Event) -> StepEvent | None:
    """An event as it is sent to callers who asked for steps; None if it is not public."""
    if event.kind not in PUBLIC_FIELDS:
        return None
    public = {}
    for name in PUBLIC_FIELDS[event.kind]:
        value = event.body.get(name)
        if value is not None:
            public[name] = value
    return StepEvent(event.kind.value, public)


def answer_changed(state: RunState) -> RunEnded:
    """The error of a caller whose stream cannot be completed, of a turn that has ended in that state."""
    run, outcome = state.run, "has succeeded"
    if state.state == "awaiting_tool":
        outcome = "waits for the results of the tool calls of that one"
    return RunEnded(
        "The answer changed while it was streamed: the attempt that was streamed was lost, and another one gave the "
        f"answer. Run {run} {outcome}; its answer is at GET /v1/runs/{run}/stream, from the start, and comes to a "
        "caller that sends the request again with its Idempotency-Key.",
        code="answer_changed",
    )


class Follower:
    """One run, as the callers of this process follow it until its turn is over."""

    def __init__(
        self, context: EngineContext, *, state: RunState, salt: bytes, audience: Audience, is_new: bool = False
    ) -> None:
        """`salt` is the run's: contents that are sent are believed if they have the addresses that it gives them.
        `is_new` says that the turn is being begun by this process."""
        self._context = context
        self.state = state
        self.salt = salt
        self.audience = audience
        self.is_new = is_new
        self.engine = ""
        """The address of the engine that drives the run, as far as is known."""
        self.epoch = 0
        """The epoch of the run's row, as that engine knows it; 0 if it has not sent anything yet."""
        self.engine_answers = False
        """True if an engine has sent something since it was last asked to."""
        self.has_missed_text = False
        """True if text was missed that an engine can send again."""
        self.is_recorded = True
        """False while the entry that begins the turn is not committed yet."""
        self._events_after_gap: dict[int, Event] = {}
        """Events that were received before those which precede them, by number."""
        self._early_deltas: list[Delta] = []
        """Deltas of a call whose intent is not folded yet."""
        self._contents: dict[str, bytes] = {}
        """Contents that were sent with events, by ref."""
        self._admitted_at: float | None = context.monotonic() if is_new else None
        """The monotonic time of the admission, until the first delta has come; None where another process admitted
        the run."""

    def receive(self, message: CommittedEvents | Delta) -> bool:
        """Take what an engine has sent; False if the journal has to be read before it can be used.

        `CommittedEvents` without events answers a request to listen by an engine that knows no event to answer with; if
        it does not name the engine either, the sender does not drive the run.
        """
        if isinstance(message, CommittedEvents) and not message.events and not message.engine:
            return False
        self.engine_answers = True
        if isinstance(message, CommittedEvents):
            if message.engine:
                self.engine, self.epoch = message.engine, message.epoch
            self._accept(message.contents)
            self.fold(message.events)
            return bool(message.events) and not self._events_after_gap and not self._early_deltas
        call = self.state.calls.get(message.call)
        if call is None:
            if len(self._early_deltas) < MOST_EARLY_DELTAS:
                self._early_deltas.append(message)
            return False
        # An engine that has lost the step may not know that yet, and text of an earlier turn may be late.
        if not call.failed and call.turn == self.state.turn.number:
            self._pass_on(message)
        return True

    def _accept(self, contents: Sequence[tuple[str, str]]) -> None:
        for ref, text in contents:
            body = text.encode()
            if content_ref(self.salt, body) == ref:
                self._contents[ref] = body

    def fold(self, events: Sequence[Event]) -> None:
        """Fold events of the run's journal; those that are known already are ignored."""
        for event in events:
            if event.seq > self.state.seq:
                self._events_after_gap[event.seq] = event
        self._fold_in_order()
        streamed = self.state.calls.get(self.audience.call)
        if streamed is not None and streamed.failed:
            self.audience.lose()
        if self._early_deltas:
            deltas, self._early_deltas = self._early_deltas, []
            for delta in deltas:
                self.receive(delta)

    def _fold_in_order(self) -> None:
        """Fold the events that follow the state without a gap, up to the end of the turn; what came early waits."""
        in_order: list[Event] = []
        while (event := self._events_after_gap.pop(self.state.seq + 1 + len(in_order), None)) is not None:
            in_order.append(event)
        self.state = fold_turn(self.state, in_order)
        self.audience.note([event for event in in_order if event.seq <= self.state.seq])
        if self.state.replied:
            self._events_after_gap.clear()

    def _pass_on(self, delta: Delta) -> None:
        is_new_text = self.audience.receive(self.state, delta)
        if is_new_text and self._admitted_at is not None:
            seconds, self._admitted_at = self._context.monotonic() - self._admitted_at, None
            self._context.telemetry.observe("baton_first_delta_seconds", seconds, self.state.admitted.tier)
        self.has_missed_text = self.audience.has_missed(delta)

    def finish(self) -> bool:
        """End the audience's turn with what has been received; False if the reply has to be read first."""
        try:
            self.audience.end(messages.turn_end(self.state, self._contents))
        except NotFound:
            return False
        return True

    async def rewind(self) -> None:
        """Read the run as the database has it now, which may lack what this process has received. Raises `RunLost` if
        the run, or the turn, is not there; `StoreUnavailable`."""
        try:
            journal = await self._context.store.journal(self.state.run)
        except NotFound:
            raise RunLost from None
        state = messages.fold_until_reply(journal.events, self.state.turn.number)
        if state.turn.number != self.state.turn.number:
            raise RunLost
        self.state = state
        self._events_after_gap.clear()
        self._early_deltas.clear()
        streamed = state.calls.get(self.audience.call)
        if streamed is None or streamed.failed:
            self.audience.lose()

    async def catch_up(self) -> None:
        """Fold what the journal has beyond the state, and read the reply if the turn is over. Raises `NotFound` if the
        answer was erased, `StoreUnavailable`."""
        if not self.state.replied:
            journal = await self._context.store.journal(self.state.run, after=self.state.seq)
            self.fold(journal.events)
        if self.state.replied and not self.finish():
            self.audience.end(await messages.read_turn_end(self._context.store, self.state))


class Followers:
    """All followers of one process."""

    def __init__(self, context: EngineContext, *, home: str, ended: Callable[[Follower], None]) -> None:
        """`home` is the address of this process; `ended` is called with the follower of a run's latest turn once its
        callers have been sent the end."""
        self._context = context
        self._home = home
        self._ended = ended
        self._followers: dict[str, Follower] = {}
        self._former: set[Follower] = set()
        """Followers of turns that are over, whose callers are not sent the reply yet while a later turn is followed."""
        self._catching_up: set[Follower] = set()
        """Followers that read their journal just now."""
        self._read_again: set[Follower] = set()
        """Followers that read their journal once more after that, because there was news of it meanwhile."""
        self._behind: dict[str, int] = {}
        """By run, how far those followers had come that were behind their journal at the latest look."""
        self._server_changes = 0
        self._group: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._followers)

    def open(self, group: asyncio.TaskGroup) -> None:
        """Begin to follow runs; journals are read in tasks of the group."""
        self._group = group

    async def run(self, stopping: asyncio.Event) -> None:
        """Keep all followers up to date until `stopping` is set; then end their streams with the address where each
        goes on."""
        while not stopping.is_set():
            healthy = self._context.queue.healthy
            self._context.telemetry.gauge("baton_queue_sound", healthy)
            await wait_for_event(stopping, POLL_SECONDS if healthy else UNHEALTHY_POLL_SECONDS)
            if not stopping.is_set():
                await self._look(healthy=healthy)
        self._group = None
        for follower in [*self._followers.values(), *self._former]:
            self._drop(follower, LeaseLost(PROCESS_STOPS))

    def follower_of(self, run: str) -> Follower | None:
        """The follower of a run."""
        return self._followers.get(run)

    def follow(self, state: RunState, salt: bytes, audience: Audience, *, is_new: bool = False) -> Follower:
        """Follow a run from this state on; `is_new` says that its turn is being begun. If an earlier turn of the run is
        followed, that turn is over, and its callers are sent the reply as soon as it is read. Raises `Overloaded` while
        the process is stopping."""
        if self._group is None:
            raise Overloaded()
        former = self._followers.get(state.run)
        if former is not None:
            self._former.add(former)
            self.catch_up(former)
        follower = Follower(self._context, state=state, salt=salt, audience=audience, is_new=is_new)
        self._followers[state.run] = follower
        return follower

    def forget(self, follower: Follower) -> None:
        """Stop following a run."""
        self._former.discard(follower)
        if self._followers.get(follower.state.run) is follower:
            del self._followers[follower.state.run]

    def receive(self, message: Live) -> None:
        """Take a message that an engine has sent to this process."""
        follower = self._followers.get(message.run)
        if follower is None or not isinstance(message, CommittedEvents | Delta):
            return
        understood = follower.receive(message)
        if follower.state.replied:
            self._end(follower)
        elif not understood:
            self.catch_up(follower)

    def fold(self, follower: Follower, events: Sequence[Event]) -> None:
        """Fold events that were read of the run's journal, and end the turn if it is over by now."""
        follower.fold(events)
        if follower.state.replied:
            self._end(follower)

    async def ask(self, follower: Follower) -> None:
        """Ask the run's engine to send to this process what it sends to the gateway that the run's admission names.

        An engine from which nothing has come since it was last asked may not be the run's engine any more. The run's
        row says then which one is, and whether the journal has moved; and that engine is asked for the whole answer, in
        the form that those of older releases know as well.
        """
        run, engine = follower.state.run, ""
        request = ListenRequest(run, self._home)
        if follower.engine_answers and follower.engine:
            engine = follower.engine
            request = follower.audience.listen_request(self._home)
        follower.engine_answers = False
        with suppress(QueueUnavailable, StoreUnavailable, NotFound):
            if not engine:
                row = await self._context.store.run(run)
                engine = row.driver
                if row.seq > follower.state.seq:
                    self.catch_up(follower)
            if engine:
                await self._context.queue.publish(engine, [request])

    def catch_up(self, follower: Follower) -> None:
        """Read the run's journal soon."""
        if follower in self._catching_up:
            self._read_again.add(follower)
        elif self._group is not None:
            self._catching_up.add(follower)
            self._group.create_task(self._catch_up(follower))

    def _end(self, follower: Follower) -> None:
        """End the turn: at once if the reply was sent with the events, else as soon as it is read."""
        if follower.finish():
            self._stop_following(follower)
        else:
            self.catch_up(follower)

    def _stop_following(self, follower: Follower) -> None:
        """Stop following a run whose callers here have been sent an end."""
        is_latest = self._followers.get(follower.state.run) is follower
        self.forget(follower)
        if is_latest:
            self._ended(follower)

    async def _catch_up(self, follower: Follower) -> None:
        try:
            await follower.catch_up()
        except StoreUnavailable:
            self._context.telemetry.log(
                logging.WARNING,
                "The database is unavailable, so that a run cannot be followed; its journal is read again.",
                run=follower.state.run,
            )
        except BatonError as error:
            self._drop(follower, error)
        except Exception as failure:
            self._drop_because_of(failure, follower)
        finally:
            is_again = follower in self._read_again
            self._read_again.discard(follower)
            self._catching_up.discard(follower)
        if follower.audience.ended:
            self._stop_following(follower)
        elif is_again:
            self.catch_up(follower)

    def _drop_because_of(self, failure: Exception, follower: Follower) -> None:
        """Stop following a run that cannot be read here: because of a bug, or of an event that is damaged or newer."""
        self._context.telemetry.log(
            logging.ERROR,
            "A run cannot be followed; its callers get an error, and it goes on.",
            failure,
            run=follower.state.run,
        )
        self._drop(follower, RecordDamaged() if isinstance(failure, EventMalformed) else BatonError())

    def _drop(self, follower: Follower, error: BatonError) -> None:
        follower.audience.end(messages.end_with_error(follower.state, error))
        self._stop_following(follower)

    async def _look(self, *, healthy: bool) -> None:
        """Find out in one query which journals have moved, and ask engines again for what was not sent here."""
        for former in self._former:
            self.catch_up(former)
        if not self._followers:
            return
        try:
            moved = await self._context.store.last_seqs(list(self._followers))
            if self._server_changes != self._context.store.server_changes:
                return await self._rewind()
        except StoreUnavailable:
            return
        self._read(moved, healthy=healthy)
        if healthy:
            for follower in list(self._followers.values()):
                if follower.has_missed_text or follower.state.turn.gateway != self._home:
                    await self.ask(follower)

    async def _rewind(self) -> None:
        """Read all runs again: the database has moved to a server that may lack what was received of them."""
        changes = self._context.store.server_changes
        recorded = [follower for follower in self._followers.values() if follower.is_recorded]
        for follower in recorded:
            try:
                await follower.rewind()
            except RunLost as error:
                self._drop(follower, error)
            except StoreUnavailable:
                raise
            except Exception as failure:
                self._drop_because_of(failure, follower)
            else:
                self.catch_up(follower)
        self._server_changes = changes

    def _read(self, moved: Mapping[str, int], *, healthy: bool) -> None:
        """Read those journals that have moved; while events are sent, those that had moved at the look before too."""
        behind: dict[str, int] = {}
        for run, seq in moved.items():
            follower = self._followers.get(run)
            if follower is None or (seq <= follower.state.seq and not follower.state.replied):
                continue
            behind[run] = follower.state.seq
            was_behind_before = self._behind.get(run) == follower.state.seq
            if was_behind_before or not healthy:  # otherwise its events may still be on their way
                self.catch_up(follower)
        self._behind = behind


# -- lists of runs


LISTS_POLL_SECONDS: Final = 1.0
"""Time between two looks at the database."""
GATHERING_SECONDS: Final = 0.25
"""Time for which changes are gathered before anybody is woken."""


class RunChanges:
    """Counts changes of runs, whichever process makes them. `run` is to be called for as long as somebody may wait."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self.number = 0
        """Grows with each change. The number may grow without one, never the other way round."""
        self._waiting = 0
        self._is_awaited = asyncio.Event()
        self._noticed = asyncio.Event()
        self._changed = asyncio.Event()
        self._mark: tuple[object, ...] | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Look for changes until `stopping` is set."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look())
            await stopping.wait()
            looking.cancel()

    def notice(self) -> None:
        """Note that a run has changed."""
        if self._waiting:
            self._noticed.set()

    async def after(self, number: int, seconds: float) -> int:
        """Return the number of changes once it is not `number` any more, or after so many seconds."""
        self._waiting += 1
        self._is_awaited.set()
        try:
            async with asyncio.timeout(seconds):
                while self.number == number:
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._is_awaited.clear()
        return self.number

    async def _look(self) -> None:
        while True:
            await self._is_awaited.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(LISTS_POLL_SECONDS):
                    await self._noticed.wait()
                    await asyncio.sleep(GATHERING_SECONDS)
            is_noticed = self._noticed.is_set()
            self._noticed.clear()
            if await self._has_changed() or is_noticed:
                self.number += 1
                self._changed.set()
                self._changed.clear()

    async def _has_changed(self) -> bool:
        try:
            mark = await self._context.store.lists.mark()
        except StoreUnavailable:
            return False
        before, self._mark = self._mark, mark
        return mark != before
