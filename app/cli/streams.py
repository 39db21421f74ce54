"""The standard streams of a command: those that its caller has closed, and output that nobody reads any more."""

import contextlib
import os
import sys
from collections.abc import Iterator

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


def discard_output() -> None:
    """Send what is still printed, and what waits in the buffer, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """Print what explains an exit status, which stays right if the reader leaves before the end, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
