"""Tool calls as they stream, for the wire formats that write one call after the other."""

from collections.abc import Iterable

from app.core.message.chat import ToolDelta, is_json_object


class CallSequence:
    """Puts the pieces of a reply's tool calls in sequence: those of a call wait until the arguments of the call before
    it are whole. Workers may mix the calls, and one without any arguments gets its empty object at the end."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[ToolDelta]] = {}
        """The pieces that wait, by the index of their call."""
        self._index = 0
        """The call whose pieces do not wait."""
        self._arguments: list[str] = []
        """Its arguments so far, without blank pieces."""

    def take(self, deltas: Iterable[ToolDelta]) -> list[ToolDelta]:
        """Return the pieces that come next in the sequence, of these and of those that have waited."""
        for delta in deltas:
            if delta.index >= self._index:  # else white space behind arguments that are whole
                self._waiting.setdefault(delta.index, []).append(delta)
        ready = self._take_current()
        while self._waiting and self._is_whole():
            self._index += 1
            self._arguments = []
            ready += self._take_current()
        return ready

    def _take_current(self) -> list[ToolDelta]:
        current = self._waiting.pop(self._index, [])
        self._arguments += [delta.arguments for delta in current if delta.arguments.strip()]
        return current

    def _is_whole(self) -> bool:
        """Return True if the arguments are whole; most are not parsed, because they do not end as an object does."""
        ends = bool(self._arguments) and self._arguments[-1].rstrip().endswith("}")
        return ends and is_json_object("".join(self._arguments))
