"""The text of one attempt on its way to the gateways that follow its run."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from app.core.message.chat import Piece, ToolDelta, Words
from app.core.message.logprobs import spoken
from app.engine.calls.attempt import Reply
from app.stepqueue.protocol import Delta, Listen


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
        self._held = False
        self.heard = False
        """True once text of the attempt may have been sent to a caller, so that no other attempt may follow."""

    def lacking(self, listener: Listen) -> Delta | None:
        """The part of what was sent of the answer that a listener lacks; None if that is nothing."""
        chars, calls = (listener.chars, listener.calls) if listener.call == self._call else (0, 0)
        if chars >= self._chars and calls >= self._sent:
            return None
        self.heard = True
        tokens = self._reply.decoded(0)[: self._tokens]
        return Delta(
            *self._place,
            chars,
            self._reply.text[chars : self._chars],
            tokens[spoken(tokens, chars) :],
            calls,
            tuple(self._calls[calls : self._sent]),
        )

    def delta(self, pieces: Sequence[Piece]) -> Delta | None:
        """The message that these pieces make; None if there is nothing to send of them.

        A refusal is sent with the end, when it is known to be one.
        """
        text = "".join(piece.text for piece in pieces if isinstance(piece, Words))
        self._calls += [self._named(piece) for piece in pieces if isinstance(piece, ToolDelta) and self._counts(piece)]
        if self._reply.refuses:
            text, self._held = "", True
        elif self._held:
            text, self._held = self._reply.text[self._chars :], False
        decoded = self._reply.decoded(self._tokens) if text else ()
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

    def _named(self, piece: ToolDelta) -> ToolDelta:
        return replace(piece, id=self._id_of(piece.index) if piece.name else "")
