"""Tool calls: putting a turn's pieces together, judging them, and the ids under which callers know them.

A minted id is `call_bt` and 33 letters and digits: the run's id in base 62, then 71 random bits. It leads back to its
run without an index, and stays within the 40 characters that OpenAI's own clients and servers allow. It proves nothing
by itself: the run's journal says whether it was issued, and to which caller.
"""

import re
from collections.abc import Iterable

from app.core.message.chat import Toolbox, ToolCall, ToolDelta
from app.core.message.response_format import STRICT

MINTED = re.compile(r"call_bt([0-9A-Za-z]{21})[0-9A-Za-z]{12}")
RUN = re.compile(r"run_([0-9a-f]{31})")
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TOKEN_BYTES = 9
"""Random bytes that `mint` wants."""
MOST_CALLS = 128
"""In one turn; OpenAI's own limit."""


def mint(run: str, token: bytes) -> str:
    """Return an id for a tool call of this run; `token` is `TOKEN_BYTES` of randomness. ValueError for a run id of
    another form."""
    named = RUN.fullmatch(run)
    if named is None:
        raise ValueError("this is no run id")
    return f"call_bt{_spell(int(named[1], 16), 21)}{_spell(int.from_bytes(token) >> 1, 12)}"


def run_of(call_id: str) -> str | None:
    """Return the run that a minted id leads to; None if the id has not the form of ours, and so is somebody else's."""
    minted = MINTED.fullmatch(call_id)
    if minted is None:
        return None
    number = 0
    for digit in minted[1]:
        number = number * 62 + DIGITS.index(digit)
    if number < 16**31:
        return f"run_{number:031x}"
    return None


def _spell(number: int, places: int) -> str:
    digits = ""
    for _ in range(places):
        number, digit = divmod(number, 62)
        digits = DIGITS[digit] + digits
    return digits


class Gathering:
    """A turn's tool calls while they stream in."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def take(self, delta: ToolDelta) -> None:
        """Note one more piece; an adapter promises that a call's index is at most one above the highest so far."""
        if delta.index == len(self._names):
            self._ids.append(delta.id)
            self._names.append(delta.name)
            self._arguments.append([])
        self._arguments[delta.index].append(delta.arguments)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """Return the tool that a call wants."""
        return self._names[index]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls as they are now. Missing arguments become an empty object; nothing that was sent is changed."""
        texts = ["".join(pieces) for pieces in self._arguments]
        return tuple(
            ToolCall(id_, name, text if text.strip() else f"{text}{{}}")
            for id_, name, text in zip(self._ids, self._names, texts, strict=True)
        )


def unsent(calls: Iterable[ToolCall], sent: Iterable[ToolDelta]) -> tuple[ToolDelta, ...]:
    """Return the pieces of these calls that a caller has not received yet, given what it has."""
    chars: dict[int, int] = {}
    for delta in sent:
        chars[delta.index] = chars.get(delta.index, 0) + len(delta.arguments)
    rest = []
    for index, call in enumerate(calls):
        if index not in chars:
            rest.append(ToolDelta(index, call.id, call.name, call.arguments))
        elif len(call.arguments) > chars[index]:
            rest.append(ToolDelta(index, arguments=call.arguments[chars[index] :]))
    return tuple(rest)


def kept(calls: tuple[ToolCall, ...], toolbox: Toolbox) -> tuple[ToolCall, ...]:
    """Return the calls that count: where only one is allowed at a time, a model that made several is asked again
    later."""
    return calls if toolbox.parallel else calls[:1]


def fault(calls: Iterable[ToolCall], toolbox: Toolbox) -> str:
    """Return the reason why these calls cannot be handed to the caller, or an empty string. No call at all is a fault
    where one is demanded."""
    calls = tuple(calls)
    offered = {tool.name for tool in toolbox.tools} if toolbox.choice != "none" else set()
    if len(calls) > MOST_CALLS:
        return "too many tool calls in one turn"
    if toolbox.must and not calls:
        return "no tool call, though one was demanded"
    for call in calls:
        if call.name not in offered:
            return "a call of a tool that was not offered"
        if toolbox.choice == "named" and call.name != toolbox.named:
            return "a call of another tool than the one that was demanded"
        if not _is_object(call.arguments):
            return "arguments of a tool call that are no JSON object"
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(STRICT.decode(text), dict)
    except (ValueError, RecursionError):
        return False
