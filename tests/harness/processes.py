"""Baton as its operators run it: processes of `python -m app` that see none of this machine's own settings."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
from msgspec import Struct
from openai import DefaultHttpxClient, OpenAI

from tests.harness.fork_server import Child, Launch, start
from tests.harness.servers import free_port
from tests.harness.waiting import PATIENCE_SECONDS, wait_until

ROOT: Final = Path(__file__).resolve().parents[2]
KEY: Final = "bt_bootstrap1_0123456789abcdef0123456789abcdef"
REQUEST_SECONDS: Final = 5.0
"""The deadline of one look at `/readyz` or `/metrics`."""
LOG_TAIL: Final = 4000
"""Characters of a log that an error message quotes."""


class ProcessFailed(RuntimeError):
    """A process ended too early, or did not end in time; the message has the end of its log."""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return a process's environment: a data folder of its own, and none of this machine's providers or proxies."""
    kept = ("HOME", "LANG", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PYTHONPATH": str(ROOT),
        "BATON_HOST": "127.0.0.1",
        "BATON_DATA_DIR": str(folder / "data"),
        "BATON_DRAIN_SECONDS": "0",  # no balancer has to notice anything
        **more,
    }


@dataclass(slots=True)
class Process:
    """One role of the service. `start` may be called again after it has ended: port, folder and log stay the same."""

    verb: str
    folder: Path
    environ: Mapping[str, str]
    port: int = field(default_factory=free_port)
    program: tuple[str, ...] = ("app",)
    """The module that is run, and the words before the verb."""
    forked: bool = True
    """False asks for an interpreter of its own instead of a fork (see `tests/harness/fork_server.py`)."""
    _child: Child | None = None

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._child is not None
        return self._child.pid

    @property
    def alive(self) -> bool:
        """True from its start to its end; a process that a signal has stopped is alive."""
        return self._child is not None and self._child.poll() is None

    @property
    def output(self) -> str:
        """Its standard output since its latest start."""
        return (self.folder / f"{self.verb}-{self.port}.out").read_text()

    @property
    def log(self) -> str:
        """Its standard error since its first start."""
        return (self.folder / f"{self.verb}-{self.port}.log").read_text()

    def start(self, *, wait: bool = True) -> None:
        """Start it; with `wait`, return once it has announced itself."""
        out, log = (self.folder / f"{self.verb}-{self.port}.{kind}" for kind in ("out", "log"))
        out.write_bytes(b"")
        log.touch()
        environ = {**self.environ, "BATON_PORT": str(self.port)}
        launch = Launch((*self.program, self.verb), str(self.folder), environ, str(out), str(log))
        self._child = start(launch, environment(self.folder) if self.forked else None)
        if wait:
            self.wait_until_announced()

    def wait_until_announced(self) -> None:
        """Wait until it has announced itself; raises Unexpected with its log if it ends before."""
        wait_until(self._has_announced_itself, what=f"{self.verb} started")

    def ready(self) -> bool:
        """Say if `/readyz` answers 200."""
        try:
            reply = httpx.get(f"{self.url}/readyz", timeout=REQUEST_SECONDS, trust_env=False)
        except httpx.TransportError:
            return False
        return reply.status_code == httpx.codes.OK

    def metric(self, sample: str) -> float:
        """Return one sample of `/metrics`, such as `baton_swept_total{kind="run"}`; 0 if there is none yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=REQUEST_SECONDS, trust_env=False).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{sample} "))

    def send_sigterm(self) -> None:
        """Send SIGTERM without waiting."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does, without waiting."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)

    def stop(self) -> int:
        """Send SIGTERM, wait for its end and return its exit status."""
        self.send_sigterm()
        return self.wait_for_exit()

    def wait_for_exit(self) -> int:
        """Wait for its end and return its exit status, negative for a signal."""
        if self._child is None:
            return 0
        try:
            status = self._child.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessFailed(
                f"{self.verb} did not stop in {PATIENCE_SECONDS:.0f} s:\n{self.log[-LOG_TAIL:]}"
            ) from None
        self._child = None
        return status

    def kill(self) -> None:
        """Send SIGKILL and wait for its end."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait()
            self._child = None

    def _has_announced_itself(self) -> bool:
        if self._child is not None and (status := self._child.poll()) is not None:
            raise ProcessFailed(f"{self.verb} ended with {status}:\n{self.log[-LOG_TAIL:]}")
        return "\nBaton is " in self.output


@contextmanager
def running_process(
    verb: str, folder: Path, environ: Mapping[str, str], *, wait: bool = True, forked: bool = True
) -> Iterator[Process]:
    """Run one process for the length of the block."""
    process = Process(verb, folder, environ, forked=forked)
    try:
        process.start(wait=wait)
        yield process
    finally:
        process.kill()


def run_command(
    folder: Path, environ: Mapping[str, str], *words: str, within: float = PATIENCE_SECONDS, forked: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, `within` so many seconds, and return its status, `stdout` and `stderr`.

    With `forked` false it has an interpreter of its own, as an operator's has (see `tests/harness/fork_server.py`).
    """
    with TemporaryDirectory() as aside:
        out, err = Path(aside, "out"), Path(aside, "err")
        out.touch()
        err.touch()
        launch = Launch(("app", *words), str(folder), dict(environ), str(out), str(err))
        child = start(launch, environment(folder) if forked else None)
        try:
            status = child.wait(within)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


class Caller(Struct, frozen=True):
    """The official client, and a plain HTTP client for the audit routes, which it does not know."""

    client: OpenAI
    http: httpx.Client

    def ask_whole(self, model: str, question: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """Ask for a whole reply; return its text, and the reply as JSON."""
        reply = self.client.chat.completions.create(model=model, messages=user_message(question), **more)  # type: ignore[call-overload]
        document: dict[str, Any] = reply.model_dump()
        assert document["choices"][0]["finish_reason"] in ("stop", "length")
        return document["choices"][0]["message"]["content"], document

    def ask_streaming(self, model: str, question: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """Ask for a stream; return its text, and `baton`, `usage` and the number of `deltas`."""
        text, document, deltas = "", {}, 0
        options = {"stream_options": {"include_usage": True}, **more}
        with self.client.chat.completions.create(
            model=model, messages=user_message(question), stream=True, **options
        ) as chunks:  # type: ignore[call-overload]
            for chunk in chunks:
                shown = chunk.model_dump()
                document |= {name: shown[name] for name in ("baton", "usage") if shown.get(name)}
                for choice in shown["choices"]:
                    deltas += bool(choice["delta"]["content"])
                    text += choice["delta"]["content"] or ""
        return text, document | {"deltas": deltas}

    def read(self, path: str, **params: Any) -> dict[str, Any]:
        """Return one page of the audit trail."""
        reply = self.http.get(path, params=params)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def run(self, name: str) -> dict[str, Any]:
        """Return a run as the audit trail shows it."""
        return self.read(f"/v1/runs/{name}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a run."""
        found: list[dict[str, Any]] = self.read(f"/v1/runs/{name}/events")["data"]
        return found


def user_message(question: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": question}]


@contextmanager
def open_caller(url: str, key: str = KEY, *, timeout: float = PATIENCE_SECONDS) -> Iterator[Caller]:
    """Open a caller of the service at `url`. It retries nothing."""
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as http,
        OpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=0,
            timeout=timeout,
            http_client=DefaultHttpxClient(trust_env=False, timeout=timeout),
        ) as client,
    ):
        yield Caller(client, http)
