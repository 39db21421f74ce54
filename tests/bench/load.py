"""A light load generator: N keep-alive connections, each with one request in flight.

It is a closed loop, or, with a `rate`, as good as an open one while there are more connections than requests in flight;
then each request has a connection of its own, so that none waits for its turn until the server closes it.

`python -m tests.bench.load URL --body FILE --connections N --seconds S` prints one JSON object; `run` does the same
from Python, in a process of its own. Times are milliseconds. The first token is the first non-empty content, not the
first frame. Answers that are not there `patience` seconds after the end are given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

ROOT = Path(__file__).resolve().parents[2]
EVENT = b"data: {"
_TOKEN = re.compile(rb'"content"\s*:\s*"[^"]')
SHOWN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send until `seconds` or `requests` are reached, after `warmup` seconds that do not count.

    `rate` is requests per second over all connections; 0 sends the next as soon as there is an answer. `patience` is
    for answers that are under way at the end.
    """

    url: str
    body: str
    connections: int = 1
    seconds: float = 5.0
    requests: int = 0
    rate: float = 0.0
    warmup: float = 0.0
    patience: float = 15.0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a load. `events` are SSE data frames; `statuses` count all answers, `first_error` is a body."""

    requests: int
    errors: int
    seconds: float
    requests_per_s: float
    events: int
    events_per_s: float
    latency_ms: dict[str, float]
    ttft_ms: dict[str, float]
    refused_ms: dict[str, float]
    statuses: dict[str, int]
    first_error: str


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and max by nearest rank; empty for nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in (50, 95, 99)}
    return {**ranks, "max": ordered[-1]}


class Tally:
    """The shared count of one run."""

    def __init__(self, load: Load) -> None:
        now = time.perf_counter()
        self.counted_from = now + load.warmup
        self.ends = self.counted_from + load.seconds
        self.left = load.requests or sys.maxsize
        self.latencies: list[float] = []
        self.firsts: list[float] = []
        self.refused: list[float] = []
        self._gap = 1 / load.rate if load.rate else 0.0
        self._due = now
        self.statuses: Counter[str] = Counter()
        self.events = 0
        self.last = now
        self.first_error = ""

    def take(self) -> bool:
        """Return whether one more request may be sent."""
        if self.left <= 0 or time.perf_counter() >= self.ends:
            return False
        self.left -= 1
        return True

    @property
    def paced(self) -> bool:
        """Return True if each request has a moment at which it is due."""
        return self._gap > 0

    def wait(self) -> float:
        """Return the seconds until the next request is due."""
        self._due += self._gap
        return max(0.0, self._due - time.perf_counter())

    def report(self) -> Report:
        """Return the figures."""
        seconds = max(self.last - self.counted_from, 1e-9)
        count = len(self.latencies)
        errors = sum(count for status, count in self.statuses.items() if status != "200")
        return Report(
            requests=count,
            errors=errors,
            seconds=seconds,
            requests_per_s=count / seconds,
            events=self.events,
            events_per_s=self.events / seconds,
            latency_ms=percentiles(self.latencies),
            ttft_ms=percentiles(self.firsts),
            refused_ms=percentiles(self.refused),
            statuses=dict(self.statuses),
            first_error=self.first_error,
        )


class Caller(asyncio.Protocol):
    """One connection; `done` is set when it has nothing more to send."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start = self._first = 0.0
        self._tail = self._opening = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._send()

    def connection_lost(self, problem: Exception | None) -> None:
        """An answer that was under way is an error."""
        if not self.done.done():
            self._tally.statuses["connection lost"] += 1
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Count frames, also those split between two reads, and note the first token."""
        data = self._tail + body
        if time.perf_counter() >= self._tally.counted_from:
            self._tally.events += data.count(EVENT)
        self._tail = data[-(len(EVENT) - 1) :]
        if not self._first:
            self._opening += body
            if _TOKEN.search(self._opening):
                self._first = time.perf_counter()
                self._opening = b""

    def on_message_complete(self) -> None:
        """Note the times and go on."""
        now = time.perf_counter()
        status = self._parser.get_status_code()
        self._tally.statuses[str(status)] += 1
        self._tally.last = now
        if status != 200 and not self._tally.first_error:
            self._tally.first_error = self._opening[:SHOWN].decode(errors="replace")
        if status in (429, 503):
            self._tally.refused.append((now - self._start) * 1000)
        if status == 200 and self._start >= self._tally.counted_from:
            self._tally.latencies.append((now - self._start) * 1000)
            if self._first:
                self._tally.firsts.append((self._first - self._start) * 1000)
        if not self._tally.paced and self._tally.take():
            self._send()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _send(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._tail = self._opening = b""
        self._first = 0.0
        self._start = time.perf_counter()
        self._transport.write(self._request)


def compose(load: Load) -> bytes:
    """Return the request as bytes."""
    url = urlsplit(load.url)
    headers = {"Host": url.netloc, "Content-Type": "application/json", **load.headers}
    body = load.body.encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {url.path or '/'} HTTP/1.1\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def generate(load: Load) -> Report:
    """Run that load in this event loop. A connection that is lost is opened again."""
    url = urlsplit(load.url)
    host, port = url.hostname or "127.0.0.1", url.port or 80
    loop = asyncio.get_running_loop()
    request, tally = compose(load), Tally(load)

    async def one() -> None:
        while tally.take():
            if tally.paced:
                await asyncio.sleep(tally.wait())
            _, caller = await loop.create_connection(lambda: Caller(request, tally), host, port)
            patience = tally.ends - time.perf_counter() + load.patience
            if not (await asyncio.wait([caller.done], timeout=patience))[0]:
                tally.statuses["no answer"] += 1
                return

    await asyncio.gather(*(one() for _ in range(load.connections)))
    return tally.report()


def run(load: Load) -> Report:
    """Run the load in a process of its own. Raises CalledProcessError if that fails."""
    settings = json.dumps({**asdict(load), "headers": dict(load.headers)})
    command = [sys.executable, "-m", "tests.bench.load", "-"]
    answer = subprocess.run(command, input=settings, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return Report(**json.loads(answer.stdout))


def _from_arguments() -> Load:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.load", description=__doc__)
    parser.add_argument("url", help="`-` reads the whole load as JSON from stdin")
    parser.add_argument("--body", type=Path, help="file with the request body")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=0, help="0: no limit")
    parser.add_argument("--warmup", type=float, default=0.0)
    parser.add_argument("-H", "--header", action="append", default=[], help="'Name: value'")
    chosen = parser.parse_args()
    if chosen.url == "-":
        settings: dict[str, Any] = json.load(sys.stdin)
        return Load(**settings)
    if chosen.body is None:
        parser.error("--body is required")
    headers = {}
    for line in chosen.header:
        name, _, value = line.partition(":")
        headers[name] = value.strip()
    return Load(
        url=chosen.url,
        body=chosen.body.read_text(),
        connections=chosen.connections,
        seconds=chosen.seconds,
        requests=chosen.requests,
        warmup=chosen.warmup,
        headers=headers,
    )


def main() -> None:
    """The command line."""
    print(json.dumps(asdict(uvloop.run(generate(_from_arguments())))))


if __name__ == "__main__":
    main()
