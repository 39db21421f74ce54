"""The reply of a worker in one call: gathered piece by piece, bounded, and judged where it calls tools.

An outcome is made of it, a step's answer, or the worker's part of an exchange with the caller's tools.
"""

from collections.abc import Sequence
from dataclasses import replace

import orjson

from app.core.message import tools
from app.core.message.chat import Chosen, End, Keepsake, Message, Piece, Text, ToolCall, ToolDelta, Words, gather
from app.core.message.logprobs import Decoded, decoded, size
from app.core.message.response_format import Flaw, faults
from app.core.message.tools import Gathering
from app.errors import Failure, WorkerMalformed
from app.providers.faults import malformed
from app.providers.protocol import Request

SPARE_TOKENS, DECODED_CHARS = 256, 2_048
"""Bounds of tokens with log-probabilities: so many more than were asked for, and so many characters each."""
TOKEN_CHARS, SPARE_CHARS = 64, 65_536
"""No honest answer has more characters a token than the one, give or take the other: what goes on beyond is cut off."""
TOOL_FAULT, FORM_FAULT = "tool_call_malformed", "answer_off_form"
"""Codes of errors that say nothing bad of the worker's health: the caller's tools or schema may be to blame as well."""


class Reply:
    """One reply as it arrives."""

    def __init__(self, request: Request, max_output: int, *, decodes: bool) -> None:
        """`max_output` is in tokens; `decodes` says whether tokens with log-probabilities are kept."""
        self._toolbox = request.toolbox
        self._form = request.form
        self.flaw: Flaw | None = None
        """The fault of the answer's form, once it was judged."""
        self._who = f"{request.worker.name} at {request.worker.provider}"
        self._texts: list[str] = []
        self._answers = False
        self._gathering = Gathering()
        self._calls: tuple[ToolCall, ...] | None = None
        """The tool calls that it ended with, computed when they are first asked for after the latest piece."""
        self._keepsake: Keepsake | None = None
        self._decodes = decodes
        self._decoded: list[Decoded] = []
        self._decoded_room = (max_output + SPARE_TOKENS) * DECODED_CHARS
        self._room = max_output * TOKEN_CHARS + SPARE_CHARS
        self.end: End | None = None
        """The stream's terminal marker, once it has come."""

    def take(self, pieces: list[Piece]) -> None:
        """Note what one read gave. Raises `WorkerMalformed` for more than the call's tokens can hold, and for a call of
        a tool that is not offered, before it is sent to anybody."""
        self._calls, fault = None, ""
        for piece in pieces:
            if isinstance(piece, Words):
                gather(self._texts, piece.text)
                self._answers = self._answers or not piece.refusal
                self._room -= len(piece.text)
            elif isinstance(piece, ToolDelta):
                fault = fault or self._take_call(piece)
            elif isinstance(piece, Keepsake):
                self._keepsake = piece
            elif isinstance(piece, Chosen) and self._decodes:
                self._decoded.append(decoded(piece))
                self._decoded_room -= size(self._decoded[-1])
            elif isinstance(piece, End):
                self.end = piece
        self._object(fault)
        if self._room < 0 or self._decoded_room < 0:
            raise malformed(self._who, "more text than its tokens can hold")

    def _take_call(self, piece: ToolDelta) -> str:
        """Note a tool call; returns what is wrong with it, or "". A faulty one is noted too: it was written, and is
        billed."""
        self._gathering.take(piece)
        self._room -= len(piece.name) + len(piece.arguments)
        return tools.fault([ToolCall("", piece.name)], self._toolbox) if piece.name else ""

    def judge(self) -> None:
        """Raise `WorkerMalformed` for tool calls that cannot be handed on, for missing ones, and for an answer that has
        not the form that was asked for. A reply that was cut off has no calls that count, and no form."""
        if self.finish in ("stop", "tool_calls"):
            self._object(tools.fault(self.calls, self._toolbox))
        if self._form is not None and self.finish == "stop" and not self.calls and not self._refused:
            found = faults(self._form, self.text)
            if found:
                self.flaw = Flaw(self.text, found)
                message = f"What {self._who} answered does not have the form that was asked for."
                raise WorkerMalformed(message, code=FORM_FAULT, failure=Failure("invalid_answer"))

    @property
    def _refused(self) -> bool:
        return self.end is not None and self.end.refused

    def _object(self, fault: str) -> None:
        if fault:
            message = f"The worker {self._who} made {fault}."
            raise WorkerMalformed(message, code=TOOL_FAULT, failure=Failure("invalid_answer"))

    @property
    def parallel(self) -> bool:
        """True if more than its first tool call counts."""
        return self._toolbox.parallel

    @property
    def began(self) -> bool:
        """True once anything has come that could be sent to a caller."""
        return bool(self._texts) or len(self._gathering) > 0

    @property
    def text(self) -> str:
        """The text that has come so far."""
        return "".join(self._texts)

    @property
    def refuses(self) -> bool:
        """True if all of the text is a refusal, given instead of an answer."""
        return bool(self._texts) and not self._answers

    @property
    def written(self) -> str:
        """All that it has written, tool calls included."""
        return self.text + "".join(call.name + call.arguments for call in self._gathering.calls)

    @property
    def finish(self) -> str:
        """The finish reason, or empty."""
        return self.end.finish if self.end else ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that it ended with."""
        if self._calls is None:
            self._calls = tools.kept(self._gathering.calls, self._toolbox) if self.finish == "tool_calls" else ()
        return self._calls

    def message(self, ids: Sequence[str]) -> Message:
        """The whole reply as a turn of the conversation; a call that has no id of its own gets the caller's."""
        theirs = [call.id for call in self.calls]
        own = all(theirs) and len(set(theirs)) == len(theirs)
        calls = tuple(call if own else replace(call, id=id_) for call, id_ in zip(self.calls, ids, strict=True))
        parts = (Text(self.text),) if self._texts else ()
        return Message("assistant", parts, calls=calls, keepsake=self._keepsake.data if self._keepsake else None)

    def decoded(self, since: int) -> tuple[Decoded, ...]:
        """The tokens with their log-probabilities that have come, from one on."""
        return tuple(self._decoded[since:])

    @property
    def logprobs(self) -> bytes:
        """All of them, as they are stored; empty if there are none."""
        return orjson.dumps(self._decoded) if self._decoded else b""
