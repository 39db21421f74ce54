"""Open streams that nobody reads: what a waiting caller costs in memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

from .load import Load, compose


@contextmanager
def hold_streams(load: Load, count: int) -> Iterator[None]:
    """Send that request on `count` connections and hold them until the block ends."""
    url, request = urlsplit(load.url), compose(load)
    with ExitStack() as stack:
        for _ in range(count):
            opened = stack.enter_context(socket.create_connection((url.hostname, url.port or 80), timeout=10))
            opened.sendall(request)
        yield
