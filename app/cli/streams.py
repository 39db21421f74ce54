"""The standard streams of a command: those that its caller has closed, characters that the terminal's encoding lacks,
and output that nobody reads any more."""

import io
import os
import sys
from typing import Any, TextIO

STANDARD_STREAMS = (0, 1, 2)


def open_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed, as with `>&-`.

    Otherwise the next file or socket that is opened would get its number, and be taken for the terminal.
    """
    for number in STANDARD_STREAMS:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


class Output:
    """A standard stream without an error when its reader leaves, as `head` does: what is printed from then on goes to
    the null device, so that the command is carried out to its end, and its exit status is right."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, as the stream itself does."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        """Write what waits in the buffer."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escape_unencodable_characters() -> None:
    """Print a character that the encoding of standard output lacks, such as a dash in Latin-1, as an escape. Standard
    error does so already."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Send what is still printed on a stream, and what waits in its buffer, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
