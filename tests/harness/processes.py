"""Baton as its operators run it: processes of `python -m app`, told nothing of this machine's own settings."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from openai import DefaultHttpxClient, OpenAI

from tests.harness.servers import free_port
from tests.harness.warm_interpreter import Birth, Child, started

ROOT: Final = Path(__file__).resolve().parents[2]
KEY: Final = "bt_bootstrap1_0123456789abcdef0123456789abcdef"
START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 30.0
TAIL: Final = 4000


class Unexpected(RuntimeError):
    """A process ended, or did not do in time what it was waited for; the message has the end of its log."""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What a process sees: a data folder of its own, and nothing of this machine's providers, proxies or settings."""
    kept = ("HOME", "LANG", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PYTHONPATH": str(ROOT),
        "BATON_HOST": "127.0.0.1",
        "BATON_DATA_DIR": str(folder / "data"),
        **more,
    }


def within(seconds: float, found: Callable[[], Any], what: str = "") -> Any:
    """The first true answer of `found`; raises Unexpected when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        if time.monotonic() > deadline:
            raise Unexpected(f"not within {seconds} s: {what or found}")
        time.sleep(0.02)
    return answer


@dataclass(slots=True)
class Process:
    """One role of the service. `start` may be called again after its end: port, folder and log stay the same."""

    verb: str
    folder: Path
    environ: Mapping[str, str]
    port: int = field(default_factory=free_port)
    program: tuple[str, ...] = ("app",)
    """The module that is run, and words that stand before the verb."""
    warm: bool = True
    """Whether a fork of a warm interpreter will do (see `tests/harness/warm_interpreter.py`)."""
    _child: Child | None = None

    @property
    def url(self) -> str:
        """Where it listens, if it does."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The running process's."""
        assert self._child is not None
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended; a process that is stopped by a signal is alive."""
        return self._child is not None and self._child.poll() is None

    @property
    def said(self) -> str:
        """What it has printed since its latest start."""
        return (self.folder / f"{self.verb}-{self.port}.out").read_text()

    @property
    def logged(self) -> str:
        """All of its log lines."""
        return (self.folder / f"{self.verb}-{self.port}.log").read_text()

    def start(self, *, wait: bool = True) -> None:
        """Start, and wait until it says that it is there."""
        out, log = (self.folder / f"{self.verb}-{self.port}.{kind}" for kind in ("out", "log"))
        out.write_bytes(b"")
        log.touch()
        environ = {**self.environ, "BATON_PORT": str(self.port)}
        birth = Birth((*self.program, self.verb), str(self.folder), environ, str(out), str(log))
        self._child = started(birth, environment(self.folder) if self.warm else None)
        if wait:
            self.wait_until_there()

    def wait_until_there(self) -> None:
        """Until it has announced itself; raises Unexpected with its log if it ends before."""
        within(START_SECONDS, self._is_there, f"{self.verb} started")

    def ready(self) -> bool:
        """Whether `/readyz` says so."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5, trust_env=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def metric(self, sample: str) -> float:
        """One sample of `/metrics`, such as `baton_swept_total{kind="run"}`; 0 if there is none yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=5, trust_env=False).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{sample} "))

    def tell_to_stop(self) -> None:
        """SIGTERM, without waiting."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.tell_to_stop()
        return self.ended()

    def ended(self) -> int:
        """Wait for its end: the exit status, negative for a signal."""
        if self._child is None:
            return 0
        try:
            status = self._child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Unexpected(f"{self.verb} did not stop in {STOP_SECONDS:.0f} s:\n{self.logged[-TAIL:]}") from None
        self._child = None
        return status

    def kill(self) -> None:
        """SIGKILL: it gets to write nothing more."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait()
            self._child = None

    def _is_there(self) -> bool:
        if self._child is not None and (status := self._child.poll()) is not None:
            raise Unexpected(f"{self.verb} ended with {status}:\n{self.logged[-TAIL:]}")
        return "\nBaton is " in self.said


@contextmanager
def running(
    verb: str, folder: Path, environ: Mapping[str, str], *, wait: bool = True, warm: bool = True
) -> Iterator[Process]:
    """One process for the length of the block."""
    process = Process(verb, folder, environ, warm=warm)
    try:
        process.start(wait=wait)
        yield process
    finally:
        process.kill()


def command(folder: Path, environ: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """One command to its end, with its status, `stdout` and `stderr`."""
    argv = [sys.executable, "-m", "app", *words]
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@dataclass(frozen=True, slots=True)
class Caller:
    """The official client, and the audit routes that it does not know."""

    client: OpenAI
    http: httpx.Client

    def whole(self, model: str, question: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """The answer, and the reply as JSON."""
        reply = self.client.chat.completions.create(model=model, messages=asking(question), **more)  # type: ignore[call-overload]
        document: dict[str, Any] = reply.model_dump()
        assert document["choices"][0]["finish_reason"] in ("stop", "length")
        return document["choices"][0]["message"]["content"], document

    def streamed(self, model: str, question: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """The collected answer, and what the last chunks say: `baton`, `usage`, and how many `deltas` there were."""
        text, document, deltas = "", {}, 0
        options = {"stream_options": {"include_usage": True}, **more}
        with self.client.chat.completions.create(
            model=model, messages=asking(question), stream=True, **options
        ) as chunks:  # type: ignore[call-overload]
            for chunk in chunks:
                shown = chunk.model_dump()
                document |= {name: shown[name] for name in ("baton", "usage") if shown.get(name)}
                for choice in shown["choices"]:
                    deltas += bool(choice["delta"]["content"])
                    text += choice["delta"]["content"] or ""
        return text, document | {"deltas": deltas}

    def read(self, path: str, **params: Any) -> dict[str, Any]:
        """One page of the audit trail."""
        reply = self.http.get(path, params=params)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def run(self, name: str) -> dict[str, Any]:
        """A run as the audit trail has it."""
        return self.read(f"/v1/runs/{name}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its journal."""
        found: list[dict[str, Any]] = self.read(f"/v1/runs/{name}/events")["data"]
        return found


def asking(question: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": question}]


@contextmanager
def calling(url: str, key: str = KEY, *, timeout: float = 30.0) -> Iterator[Caller]:
    """A caller of the service at `url`. It retries nothing."""
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
