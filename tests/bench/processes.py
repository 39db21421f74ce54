"""Processes under measurement: start one, wait for its port, read its CPU seconds and its memory from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from tests.harness.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
TAIL = 4000
FINISHED = 300.0
"""Seconds within which a command that measures something ends."""


class DidNotStart(RuntimeError):
    """The process ended or never listened; the message has the end of its log."""


class RunningProcess(Struct, frozen=True):
    """A started process."""

    pid: int
    url: str

    def cpu_seconds(self) -> float:
        """User and system time of all threads, and of all living children; the kernel counts in 10 ms."""
        times = [process.cpu_times() for process in _family(self.pid)]
        return sum(spent.user + spent.system for spent in times)

    def rss_bytes(self) -> int:
        """Resident memory of the process and its children."""
        return sum(process.memory_info().rss for process in _family(self.pid))


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def cpu_seconds(running: Sequence[RunningProcess]) -> float:
    """Return the sum over several processes."""
    return sum(process.cpu_seconds() for process in running)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run_to_end(command: Sequence[str], *, env: Mapping[str, str], folder: Path = ROOT) -> str:
    """Run that command to its end; its standard output. Raises DidNotStart with the end of its log if it fails."""
    process = subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=FINISHED, check=False
    )
    if process.returncode:
        raise DidNotStart(f"{' '.join(command)}\n{process.stdout[-TAIL:]}{process.stderr[-TAIL:]}")
    return process.stdout


@contextmanager
def start_process(
    command: Sequence[str],
    *,
    port: int | None,
    env: Mapping[str, str] | None = None,
    within: float = 30.0,
    folder: Path = ROOT,
) -> Iterator[RunningProcess]:
    """Run that command in `folder` until the block ends. `port` None: it listens nowhere."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + within
            while port is not None and not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise DidNotStart(f"{' '.join(command)}\n{log.read()[-TAIL:].decode(errors='replace')}")
                time.sleep(0.05)
            yield RunningProcess(process.pid, f"http://127.0.0.1:{port}")
        finally:
            stop(process)


def stop(process: subprocess.Popen[Any]) -> None:
    """Ask it to end; after ten seconds, kill it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def upstream() -> Iterator[RunningProcess]:
    """The fast upstream as a process."""
    port = free_port()
    with start_process([sys.executable, "-m", "tests.bench.upstream", "--port", str(port)], port=port) as running:
        yield running


@contextmanager
def bare(upstream_url: str) -> Iterator[RunningProcess]:
    """The bare pass-through as a process."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.bare", "--port", str(port), "--upstream", upstream_url]
    with start_process(command, port=port) as running:
        yield running
