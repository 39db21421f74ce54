"""The event loop of a command: uvloop, except on Windows."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

if sys.platform != "win32":
    from uvloop import new_event_loop
else:
    from asyncio import new_event_loop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Ctrl-C cancels it and raises `KeyboardInterrupt`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
