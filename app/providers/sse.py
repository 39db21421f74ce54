"""An incremental parser of server-sent events.

Source: WHATWG HTML, "Server-sent events". Only the `data` lines are parsed, because the wire formats need no
other: the event's name, where there is one, is repeated inside the data. A lone carriage return, which none of them
sends, does not end a line here. An event that the stream breaks off before its blank line is dropped, as the
standard demands.
"""

from app.providers.faults import malformed

EVENT_BYTES = 8 << 20
"""Most bytes of one event, and of a reply that is not streamed."""
STREAM_BYTES = 64 << 20
"""Most bytes of a stream."""
_MARK = b"\xef\xbb\xbf"


class EventReader:
    """Takes the bytes of each read, cut anywhere, and returns the data of the events that they complete."""

    __slots__ = ("_data", "_rest", "_size", "_total", "_who")

    def __init__(self, who: str) -> None:
        """`who` is named in errors."""
        self._who = who
        self._rest: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0
        """Bytes of the event that is not complete yet."""
        self._total = 0

    def feed(self, read: bytes) -> list[bytes]:
        """Return the data of each completed event, in order; raises WorkerMalformed beyond the bounds above."""
        if not self._total:
            read = read.removeprefix(_MARK)
        self._total += len(read)
        if self._total > STREAM_BYTES:
            raise malformed(self._who, f"a stream of more than {STREAM_BYTES >> 20} MiB")
        if b"\n" not in read:
            self._hold(read)
            return []
        lines = (b"".join((*self._rest, read)) if self._rest else read).split(b"\n")
        self._rest = []
        rest = lines.pop()
        events = self._take(lines)
        self._size = sum(map(len, self._data))
        self._hold(rest)
        return events

    def _hold(self, rest: bytes) -> None:
        self._size += len(rest)
        if self._size > EVENT_BYTES:
            raise malformed(self._who, f"an event of more than {EVENT_BYTES >> 20} MiB")
        if rest:
            self._rest.append(rest)

    def _take(self, lines: list[bytes]) -> list[bytes]:
        events: list[bytes] = []
        data = self._data
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and data:
                events.append(data[0] if len(data) == 1 else b"\n".join(data))
                data.clear()
        if events and max(map(len, events)) > EVENT_BYTES:
            raise malformed(self._who, f"an event of more than {EVENT_BYTES >> 20} MiB")
        return events
