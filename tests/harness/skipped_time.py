"""An event loop that does not wait: whenever nothing can run, its clock is set to the next timer at once.

What depends on seconds then comes out alike on a quick and on a busy machine, and takes no longer than the processor
needs. It suits a service whose workers are simulated in this process; sockets of others would have no time to answer.
Work for threads is done in the loop itself.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")

BEGINNING_SECONDS = 1_000.0
"""The monotonic time at which a loop begins."""


class _Selector(selectors.DefaultSelector):
    """A selector that reports what is ready, and otherwise lets the loop's clock go on by the time it is to wait."""

    loop: "SkippingLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self.loop.seconds += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """See the module docstring."""

    def __init__(self) -> None:
        self.seconds = BEGINNING_SECONDS
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the seconds of this loop's clock."""
        return self.seconds

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Call the function now, instead of in a thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_skipping(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in such a loop, whose clock `time.monotonic` shows meanwhile."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        loop = runner.get_loop()
        with patch("time.monotonic", loop.time):
            return runner.run(work)
