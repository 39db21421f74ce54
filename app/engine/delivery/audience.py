"""The callers of this process that follow one run.

The reply of a turn is sent once to each, in order and without a gap, from wherever that caller wants to begin; a
caller who cannot keep up gets the rest in larger pieces. Text that was sent cannot be taken back. So a caller who has
received text of an attempt that was lost receives nothing of the next attempt until the answer is known; if that begins
with the same text the stream goes on, else it ends with an error that says where the answer is. A caller who has not
received anything yet follows the new attempt at once.

A `Follower` fills it from what the run's engine sends, and from the journal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.core.message.chat import ToolDelta, gather
from app.core.message.logprobs import Decoded, spoken
from app.core.message.tools import untold
from app.core.run import position
from app.core.run.events import Event
from app.core.run.position import Position
from app.core.run.state import RunState
from app.engine.delivery.mailbox import Mailbox
from app.engine.delivery.messages import NOTED, Ended, Noted, Said, Told
from app.errors import BatonError, RunEnded
from app.stepqueue.protocol import Delta


@dataclass(slots=True)
class Listener:
    """One caller, and how much it was sent: characters, tokens where they are sent too (None: to be counted), and
    pieces of tool calls.

    `received` is the text that it was sent of an attempt which was replaced, None where that is not known.
    """

    line: Mailbox[Told]
    notes: bool
    attempt: int
    chars: int
    tokens: int | None = None
    called: int = 0
    received: str | None = None
    gone: bool = False

    def tokens_told(self, tokens: Sequence[Decoded]) -> int:
        """The number of the answer's tokens that it was sent."""
        return spoken(tokens, self.chars) if self.tokens is None else self.tokens


class Audience:
    """The listeners of one run, and as much of its answer as can be sent by now."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._ended: Ended | None = None
        self._listeners: list[Listener] = []
        self._noted = 0
        self._attempt = 0
        self.call = ""
        """The call whose text is sent."""
        self._pieces: list[str] = []
        self._tokens: list[Decoded] = []
        self._calls: list[ToolDelta] = []
        self.chars = 0
        """The number of characters of the answer that have come."""

    def __len__(self) -> int:
        """The number of callers of this process that still listen."""
        return sum(not listener.gone for listener in self._listeners)

    @property
    def ended(self) -> bool:
        """True if the turn is over and its end was sent to every caller here."""
        return self._ended is not None

    @property
    def text(self) -> str:
        """The text that can be sent by now."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    # -- callers

    def admit(self, line: Mailbox[Told], at: Position = Position(), *, notes: bool = False) -> None:
        """Add a caller, who has what is before `at` already. It is sent at once what can be sent."""
        listener = Listener(line, notes, at.attempt, at.chars)
        if self._ended is not None:
            return self._end(listener, self._ended)
        self._listeners.append(listener)
        self._tell(listener)

    def remove(self, line: Mailbox[Told]) -> None:
        """Forget a caller who is gone and holds nothing that is to be given back with the end."""
        self._listeners = [listener for listener in self._listeners if listener.line is not line]

    @property
    def empty(self) -> bool:
        """True if nobody here waits for the end, not even on behalf of a caller who is gone."""
        return not self._listeners

    def leave(self, line: Mailbox[Told]) -> None:
        """Note that a caller is gone. It is still sent the end, because places are given back with it, but no more
        text."""
        for listener in self._listeners:
            listener.gone = listener.gone or listener.line is line

    # -- the answer

    def receive(self, state: RunState, delta: Delta) -> bool:
        """Take text and tool calls of the answering step if they go on from what is known; True if they were new.

        Whatever is missed here is sent with the end, or when an engine sends it again.
        """
        if delta.call != self.call:
            attempt = position.attempt_of(state, delta.call)
            if state.answering is None or state.answering.n != delta.step or attempt <= self._attempt:
                return False
            self._begin(delta, attempt)
        known, called = self.chars - delta.offset, len(self._calls) - delta.since
        fresh = delta.text[known:] if known >= 0 else ""
        calls = delta.calls[called:] if min(known, called) >= 0 else ()
        if not fresh and not calls:
            return False
        tokens = delta.logprobs[spoken(delta.logprobs, known) :] if fresh else ()
        if fresh:
            gather(self._pieces, fresh)
        self._tokens += tokens
        self._calls += calls
        self.chars += len(fresh)
        for listener in self._listeners:
            self._tell(listener, Said(fresh, tokens, Position(self._attempt, self.chars).number, calls))
        return True

    def lacks(self, delta: Delta) -> bool:
        """True if something before this part of the present attempt was missed."""
        return delta.call == self.call and (delta.offset > self.chars or delta.since > len(self._calls))

    def lose(self) -> None:
        """Note that the present attempt was lost: whoever comes from now on is sent nothing of it."""
        self._clear("", self._attempt)

    def _begin(self, delta: Delta, attempt: int) -> None:
        """Begin with the text of another attempt."""
        self._clear(delta.call, attempt)

    def _clear(self, call: str, attempt: int) -> None:
        for listener in self._listeners:
            if listener.attempt == self._attempt and listener.received is None and listener.chars <= self.chars:
                listener.received = self.text[: listener.chars]
        self._attempt, self.call = attempt, call
        self._pieces, self._tokens, self._calls, self.chars = [], [], [], 0

    def _tell(self, listener: Listener, said: Said | None = None) -> None:
        """Send a listener what it lacks: what was `said` last, or more if it is behind."""
        if listener.attempt != self._attempt and not listener.chars and not listener.called:
            listener.attempt, listener.tokens, listener.received = self._attempt, None, None
        chars, calls = self.chars - listener.chars, len(self._calls) - listener.called
        if listener.gone or listener.attempt != self._attempt or (chars <= 0 and calls <= 0):
            return
        told = listener.tokens_told(self._tokens)
        if said is None or (chars, calls) != (len(said.text), len(said.calls)):
            words = (self.text[listener.chars :], tuple(self._tokens[told:]))
            said = Said(*words, Position(self._attempt, self.chars).number, tuple(self._calls[listener.called :]))
        if listener.line.put(said):
            listener.chars, listener.tokens = max(self.chars, listener.chars), told + len(said.logprobs)
            listener.called = len(self._calls)

    def note(self, event: Event) -> None:
        """Send a folded event to those who asked for steps. One that was sent before is not sent again."""
        if event.seq <= self._noted:
            return
        self._noted = event.seq
        listeners = [listener for listener in self._listeners if listener.notes and not listener.gone]
        if listeners and (noted := public(event)) is not None:
            for listener in listeners:
                listener.line.put(noted)

    # -- the end

    def end(self, ended: Ended) -> None:
        """End the turn: every caller here is sent what is left of the answer, and the end. Done once."""
        if self._ended is None:
            self._ended = ended
            for listener in self._listeners:
                self._end(listener, ended)

    def _end(self, listener: Listener, ended: Ended) -> None:
        at, answer = position.end_of(ended.state), ended.answer
        error = ended.error or self._objection(listener, at, answer)
        tokens = ended.logprobs or ()
        rest = tokens[listener.tokens_told(tokens) :]
        calls = untold(ended.calls, self._calls[: listener.called])
        if error is None and (len(answer) > listener.chars or rest or calls):
            listener.line.push(Said(answer[listener.chars :], rest, at.number, calls, ended.refusal))
        listener.line.push(ended if error is ended.error else Ended(ended.state, "", "stop", ended.bill, error))

    def _objection(self, listener: Listener, at: Position, answer: str) -> BatonError | None:
        """The error of a listener whose text cannot be continued to the answer; None if it can."""
        if listener.called and listener.attempt != at.attempt:
            return changed(self._run)
        if not listener.chars:
            return None
        received = listener.received
        if received is None and listener.attempt == self._attempt and listener.chars <= self.chars:
            received = self.text[: listener.chars]
        if listener.attempt == at.attempt:
            if listener.chars > len(answer) + position.DONE:
                return position.unknown()
            return None if received is None or answer.startswith(received) else changed(self._run)
        return None if received is not None and answer.startswith(received) else changed(self._run)


def public(event: Event) -> Noted | None:
    """An event as it is sent to callers who asked for steps; None if it is not public."""
    if event.kind not in NOTED:
        return None
    shown = {name: event.body[name] for name in NOTED[event.kind] if event.body.get(name) is not None}
    return Noted(event.kind.value, shown)


def changed(run: str) -> RunEnded:
    """The error of a caller whose stream cannot be completed."""
    return RunEnded(
        "The answer changed while it was streamed: the attempt that was streamed was lost, and another one gave the "
        f"answer. Run {run} has succeeded; its answer is at GET /v1/runs/{run}/stream, from the start, and comes to "
        "a caller that sends the request again with its Idempotency-Key.",
        code="answer_changed",
    )
