"""Measure how long all other callers wait while one caller sends the bodies of `tests/harness/bad_bodies.py`.

One connection asks for `/healthz` again and again while another sends a body; the slowest of the first one's answers is
how long the event loop stood still. Of three tries the best counts, since the others belong to whoever shares the
machine, and of all bodies the worst.
"""

from __future__ import annotations

import http.client
import threading
import time
from urllib.parse import urlsplit

from tests.harness.bad_bodies import RAW

from .subject import Target

TRIES = 3
LARGEST_ERROR = 4_096


def longest_stall(target: Target) -> tuple[float, str]:
    """Return milliseconds, and the body that caused them. Raises RuntimeError if an answer is no small 4xx."""
    stalls = []
    for name, body in RAW.items():
        stalls.append((min(_stall(target, body) for _ in range(TRIES)), name))
    return max(stalls)


def _stall(target: Target, body: bytes) -> float:
    slowest = [0.0]
    warm, stop = threading.Event(), threading.Event()
    prober = threading.Thread(target=_probe, args=(target, slowest, warm, stop))
    prober.start()
    warm.wait()
    try:
        _is_refused(target, body)
    finally:
        stop.set()
        prober.join()
    return slowest[0] * 1000


def _probe(target: Target, slowest: list[float], warm: threading.Event, stop: threading.Event) -> None:
    connection = _connection(target)
    while not stop.is_set():
        began = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        if warm.is_set():
            slowest[0] = max(slowest[0], time.perf_counter() - began)
        warm.set()
    connection.close()


def _is_refused(target: Target, body: bytes) -> None:
    connection = _connection(target)
    headers = target.headers | {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body=body, headers=headers)
    reply = connection.getresponse()
    reply_body = reply.read()
    connection.close()
    if not 400 <= reply.status < 500 or len(reply_body) > LARGEST_ERROR:
        raise RuntimeError(f"{reply.status}, {len(reply_body)} bytes")


def _connection(target: Target) -> http.client.HTTPConnection:
    url = urlsplit(target.url)
    return http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=30)
