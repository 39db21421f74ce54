"""A fork server: an interpreter that has imported the service, and whose forks are the processes that tests start.

To import the service takes more than a second of a core, and the tests start it often. `python -m
tests.harness.fork_server SOCKET MODULES` imports it, and makes no thread and no event loop. For each process of tests
that asks for it, it forks a server: so all workers of a session need one import. That server forks whenever a line on
its own socket asks for it. The fork runs the requested module with the session, folder, environment, files, arguments
and module path that `python -m` would have given it. Its id, signals, exit status and traceback are those of an
interpreter of its own.

The protocol has no race. The server answers a request to start only after the fork has its own session, folder and
files: the fork holds the writing end of a pipe until then, and the server waits for the end of that pipe, which also
comes when the fork dies early. `subprocess.Popen` gives its caller the same guarantee. The id of a fork stays its own
until somebody has asked for its exit status, because only such a request reaps it.

The service of the README's examples is started as a user would, in an interpreter of its own. So is every process
whose environment an import may read (see `may_fork`), and every process on systems other than Linux, whose libraries do
not survive a fork. Forks share one hash seed; `tests/integration/test_operator.py` has two processes that do not share
it and work together.
"""

import atexit
import gc
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from msgspec import Struct
from msgspec.structs import asdict

ROOT: Final = Path(__file__).resolve().parents[2]
READ_LATE: Final = re.compile(r"BATON_\w+|STUB_KEY|OTEL_(BSP|EXPORTER_OTLP)_\w+")
"""Variables that only `app.cli` reads, when it runs, and the exporters, which a process imports once it has started.

Any other variable may matter to the interpreter or an import.
"""
PRELOADED: Final = (
    "alembic.command",
    "app.cli.operations.serve",
    "app.cli.commands",
    "app.cli.runs.one_run",
    "app.stepqueue.redis",
    "pydantic.v1",
    "rich.status",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "uvicorn.lifespan.off",
)
"""Modules that most processes import, if only once they have started."""
LONGEST_POLL_SECONDS: Final = 0.02


class Launch(Struct, frozen=True):
    """One process to start: `python -m WORDS` in a folder. Both files exist already and are appended to."""

    words: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    out: str
    log: str


class Child(Protocol):
    """A process that was started; the part of `subprocess.Popen` that tests use."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended; raises subprocess.TimeoutExpired after `timeout` seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""


def start(launch: Launch, usual: Mapping[str, str] | None) -> Child:
    """Start a process: as a fork if its environment permits it, and as an interpreter of its own otherwise.

    `usual` is the environment of the fork server; None asks for an interpreter of its own.
    """
    if usual is not None and may_fork(launch.environ, usual):
        return _server(json.dumps(read_early(usual))).start(launch)
    with open(launch.out, "ab") as out, open(launch.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *launch.words],
            cwd=launch.folder,
            env=launch.environ,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )


def may_fork(environ: Mapping[str, str], usual: Mapping[str, str]) -> bool:
    """Say if a process with this environment may be a fork of a server that started with the usual one."""
    return sys.platform == "linux" and read_early(environ) == read_early(usual)


def read_early(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may matter while an interpreter starts or imports, such as LD_PRELOAD or PYTHON*.

    Every variable counts as one of these unless it is known to be read later.
    """
    return {name: value for name, value in sorted(environ.items()) if not READ_LATE.fullmatch(name)}


@cache
def start_preloaded(environ: str) -> "TemplateInterpreter":
    """Return the interpreter that has imported the service with an environment. The forks of this process share it."""
    made = TemplateInterpreter(json.loads(environ), PRELOADED)
    atexit.register(made.close)
    return made


def preload(usual: Mapping[str, str]) -> None:
    """Start to import the service now, so that this process and its forks need not wait for it later."""
    start_preloaded(json.dumps(read_early(usual)))


@cache
def _server(environ: str) -> "ForkServer":
    """Return this process's server for an environment. It ends with this process, however that ends."""
    server = ForkServer(start_preloaded(environ))
    atexit.register(server.close)
    return server


class TemplateInterpreter:
    """The interpreter that fork servers are forks of. It ends with the last process that could ask for one."""

    def __init__(self, environ: Mapping[str, str], modules: Sequence[str]) -> None:
        """Start it with this environment; it imports the modules."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.fork_server", str(theirs.fileno()), *modules],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self) -> socket.socket:
        """Fork a server, and return the socket on which it is asked."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"."], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the interpreter. The servers that are its forks go on."""
        self._socket.close()
        self._popen.kill()
        self._popen.wait()


class ForkServer:
    """The fork server, seen by its client. Requests of several threads are answered one after the other."""

    def __init__(self, preloaded: TemplateInterpreter) -> None:
        """Start a server with the imports and the environment of that interpreter."""
        self.lock = threading.RLock()
        self._numbers = count()
        self._socket = preloaded.fork()
        self._requests, self._answers = self._socket.makefile("wb"), self._socket.makefile("rb")

    def start(self, launch: Launch) -> "Fork":
        """Start a process and return once it is in its own session and writes to its own files."""
        return Fork(self, self.request("start", asdict(launch)))

    def request(self, verb: str, argument: Any) -> Any:
        """Send one request and return its answer.

        Answers to earlier requests are skipped: a test that ran out of time did not stay for its own.
        """
        with self.lock:
            number = self.send(verb, argument)
            for line in self._answers:
                answered, answer = json.loads(line)
                if answered == number:
                    return answer
        raise RuntimeError("the fork server has ended")

    def send(self, verb: str, argument: Any) -> int:
        """Send one request without waiting for its answer, and return its number."""
        with self.lock:
            number = next(self._numbers)
            self._requests.write(json.dumps([number, verb, argument]).encode() + b"\n")
            self._requests.flush()
        return number

    def close(self) -> None:
        """End the server and all of its forks."""
        if self._answers.closed:
            return
        self._socket.shutdown(socket.SHUT_WR)
        self._answers.read()
        for each in (self._requests, self._answers, self._socket):
            each.close()


@dataclass(slots=True)
class Fork:
    """One process that was forked. It stays a zombie, and its id its own, until its exit status was asked for."""

    server: ForkServer
    pid: int
    _status: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it runs."""
        with self.server.lock:
            if self._status is None:
                self._status = self.server.request("poll", self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended; raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        with self.server.lock:
            if self.poll() is None:
                os.kill(self.pid, sig)


# From here on: inside the fork server and its forks.


class ForkArguments(Struct, frozen=True):
    """Everything that a fork needs to become the requested process."""

    launch: Launch
    until_ready: int
    """The writing end of the pipe whose end tells the server that this process is ready."""


def _preload(names: Sequence[str]) -> None:
    """Import modules with the garbage collector off, and keep it from visiting what was imported."""
    gc.disable()
    for name in names:
        import_module(name)
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == threading.active_count() == 1, "only one thread survives a fork: no import may start another"


def _fork_servers(clients: socket.socket) -> socket.socket | None:
    """Fork a server for each client that sends the socket on which it will ask, until there can be no more clients.

    Each server returns from here with its socket, and this process returns None.
    """
    while True:
        _, (*received,), _, _ = socket.recv_fds(clients, 1, 1)
        if not received:
            return None
        own = socket.socket(fileno=received[0])
        if os.fork() == 0:
            clients.close()
            return own
        own.close()


def _serve(requests: BinaryIO, answers: BinaryIO) -> ForkArguments | None:
    """Answer requests until nobody can send any more, then kill the forks that still run and return None.

    Each fork returns from here with what it was made for, so that it runs from the top of the stack.
    """
    statuses: dict[int, int | None] = {}
    for line in requests:
        number, verb, argument = json.loads(line)
        answer: int | None
        if verb == "start":
            readable, writable = os.pipe()
            answer = os.fork()
            if answer == 0:
                os.close(readable)
                return ForkArguments(Launch(**argument), writable)
            _wait_for_end(readable, writable)
            statuses[answer] = None
        else:
            if statuses[argument] is None:
                statuses[argument] = _exit_status(argument)
            answer = statuses[argument]
        answers.write(json.dumps([number, answer]).encode() + b"\n")
    running = [pid for pid, status in statuses.items() if status is None]
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return None


def _wait_for_end(readable: int, writable: int) -> None:
    """Wait until the fork has closed its writing end of the pipe, by being ready or by ending."""
    os.close(writable)
    os.read(readable, 1)
    os.close(readable)


def _exit_status(pid: int) -> int | None:
    gone, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if gone else None


def _become(forked: ForkArguments) -> None:
    """Take over the session, folder, environment, files and arguments, then report that this process is ready.

    The environment has the variables that are read early already: they are the same for the server and its forks.
    """
    launch = forked.launch
    os.setsid()
    os.chdir(launch.folder)
    os.environ.update(launch.environ)
    files = ((0, os.devnull, os.O_RDONLY), (1, launch.out, os.O_WRONLY), (2, launch.log, os.O_WRONLY))
    for number, path, mode in files:
        opened = os.open(path, mode | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv[1:] = launch.words[1:]
    sys.path[0] = os.getcwd()
    os.close(forked.until_ready)


def main() -> None:
    """Serve on the socket that was passed; return only at the end of this process or of a fork."""
    number, *modules = sys.argv[1:]
    clients = socket.socket(fileno=int(number))
    _preload(modules)
    own = _fork_servers(clients)
    if own is None:
        return
    with own, own.makefile("rb") as requests, own.makefile("wb", buffering=0) as answers:
        forked = _serve(requests, answers)
    if forked is not None:
        _become(forked)
        runpy.run_module(forked.launch.words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
