"""The command line: `baton COMMAND`, or `python -m app COMMAND`.

Exit status: 0 fine, 1 it could not be done, 2 the command or the configuration is wrong or the output cannot be
written, 130 interrupted. What is expected to go wrong is said in words; a traceback is a bug.
"""

import errno
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pkgutil import resolve_name
from typing import TextIO

from app.cli import streams
from app.cli.arguments import Arguments
from app.cli.commands import parse
from app.errors import BatonError, ConfigInvalid, EventMalformed

UNWRITABLE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of the operating system upon which nothing more can be written."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run one command, and return the exit status."""
    if argv is None:
        streams.open_closed_streams()
        streams.escape_unencodable_characters()
    with redirect_stderr(streams.Output(sys.stderr)):
        return _main(argv, environ)


def _main(argv: Sequence[str] | None, environ: Mapping[str, str]) -> int:
    try:
        args = parse(argv)
        output: TextIO | streams.Output = sys.stdout
        if not args.ends_with_reader:
            output = streams.Output(sys.stdout)
        with redirect_stdout(output):
            status = _command(args.module, alone=argv is None)(args, {**environ, **args.settings}, time.time)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        streams.discard(sys.stdout)
        return 0
    except (BatonError, EventMalformed, OSError, ExceptionGroup) as error:
        return _complain(error)


def _command(module: str, *, alone: bool) -> Callable[[Arguments, Mapping[str, str], Callable[[], float]], int]:
    """Import the function that runs a command, by name: a command pays for what it uses, and not for the whole service.

    What is imported is never garbage. Where the process is this command's `alone`, the collector never looks through
    it, now or later: that took a third of the time of a short command.
    """
    gc.disable()
    try:
        return resolve_name(f"app.cli.{module}:run")  # type: ignore[no-any-return]
    finally:
        if alone:
            gc.freeze()
        gc.enable()


def _complain(error: BatonError | EventMalformed | OSError | ExceptionGroup[Exception]) -> int:
    """Say what went wrong; of a group its first expected error, and the group is raised if it has none."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        cause = _first_expected(cause.exceptions)
    if isinstance(cause, ConfigInvalid):
        for fault in cause.faults:
            print(fault, file=sys.stderr)
        return 2
    if isinstance(cause, BatonError):
        print(f"baton: {cause.message}", file=sys.stderr)
        return 1
    if isinstance(cause, EventMalformed):
        print(f"baton: {cause}", file=sys.stderr)
        return 1
    if isinstance(cause, OSError) and cause.filename is not None:
        print(f"{cause.filename}: cannot be used: {cause.strerror}", file=sys.stderr)
        return 2
    if isinstance(cause, OSError) and cause.errno in UNWRITABLE_ERRORS:
        print(f"baton: The output cannot be written: {cause.strerror}.", file=sys.stderr)
        streams.discard(sys.stdout)
        return 2
    raise error


def _first_expected(exceptions: Sequence[BaseException]) -> BaseException:
    """Return the first error that Baton raises itself; the first one if there is none."""
    for exception in exceptions:
        if isinstance(exception, (BatonError, EventMalformed)):
            return exception
    return exceptions[0]


if __name__ == "__main__":
    sys.exit(main())
