"""An answer on its way from the worker to the run's driver: what one read gave becomes one message.

Tool calls get the ids under which the caller knows them as they begin; the worker's own stay inside.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from app.core.message.chat import Piece, ToolDelta, Words
from app.engine.calls.response import Reply
from app.stepqueue.protocol import Delta


class Relay:
    """One attempt of the answering step."""

    def __init__(self, run: str, step: int, call: str, reply: Reply, id_of: Callable[[int], str]) -> None:
        """`id_of` gives the caller's id of a tool call, by its number."""
        self._place = (run, step, call)
        self._reply = reply
        self._id_of = id_of
        self._chars = self._tokens = 0
        self._calls: list[ToolDelta] = []
        self._sent = 0
        self._held = False

    def delta(self, pieces: Sequence[Piece], *, behind: bool = False) -> Delta | None:
        """What is to be told of these pieces, if anything; with `behind`, everything from the beginning.

        A refusal is told with the end, when it is known to be one.
        """
        if behind:
            self._chars = self._tokens = self._sent = 0
        text = "".join(piece.text for piece in pieces if isinstance(piece, Words))
        self._calls += [self._named(piece) for piece in pieces if isinstance(piece, ToolDelta) and self._counts(piece)]
        if self._reply.refuses:
            text, self._held = "", True
        elif behind or self._held:
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
