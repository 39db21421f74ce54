"""A warm interpreter: it has imported the service once, and the processes that tests start are forks of it.

To import the service takes a second of a core, and the tests start it a hundred times. `python -m
tests.harness.warm_interpreter` imports it, makes no thread and no event loop, and forks whenever its standard input
asks: the fork leaves the loop of requests and runs the asked module from the top of the stack, with the session,
folder, environment, files, words and module path that `python -m` would have given it. So its ids, signals, exit
statuses and tracebacks are those of an own interpreter.

What a user types is started as the user would: commands, the README and the first start are interpreters of their own.
So is whatever `shared` says no to, and everything where there is no Linux: other systems' libraries outlive no fork.
Forks share one seed of hashes; processes that do not, and work together, are in `tests/integration/test_operator.py`.
"""

import atexit
import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

ROOT: Final = Path(__file__).resolve().parents[2]
LATE: Final = re.compile(r"BATON_\w+|STUB_KEY")
"""What only `app.cli` reads, once it runs. Any other variable may matter to the interpreter or to an import."""
IMPORTED: Final = (
    "app.cli.process",
    "app.cli.parser",
    "pydantic.v1",
    "rich.status",
    "sqlalchemy.dialects.postgresql.asyncpg",
)


@dataclass(frozen=True, slots=True)
class Birth:
    """What is asked of the warm interpreter: `python -m WORDS` in a folder; both files exist and are written behind
    their ends."""

    words: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    out: str
    log: str


class Child(Protocol):
    """What is asked of a process that was started; a `subprocess.Popen` answers the same."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""


def started(birth: Birth, usual: Mapping[str, str] | None) -> Child:
    """Start it: as a fork if its environment is the `usual` one, but for what is read late; with None, never."""
    if usual is not None and shared(birth.environ, usual):
        return _warm(json.dumps(early(usual))).child(birth)
    with open(birth.out, "ab") as out, open(birth.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *birth.words],
            cwd=birth.folder,
            env=birth.environ,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )


def shared(environ: Mapping[str, str], usual: Mapping[str, str]) -> bool:
    """The rule: whether a process with this environment may be a fork of an interpreter that began with the usual."""
    return sys.platform == "linux" and early(environ) == early(usual)


def early(environ: Mapping[str, str]) -> dict[str, str]:
    """What may matter when an interpreter starts or imports: LD_PRELOAD, PYTHON*, OTEL_*, and all that we do not know
    to be read late."""
    return {name: value for name, value in sorted(environ.items()) if not LATE.fullmatch(name)}


@cache
def _warm(environ: str) -> "Warm":
    """One for each process of pytest. It ends with it, whatever that dies of."""
    made = Warm(json.loads(environ), IMPORTED)
    atexit.register(made.close)
    return made


class Warm:
    """The warm interpreter, seen from outside. Any thread may ask; one is answered at a time."""

    def __init__(self, environ: Mapping[str, str], imported: Sequence[str]) -> None:
        """`imported` are the modules that it imports; its own environment is `environ`."""
        self.lock = threading.RLock()
        self._numbers = count()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.warm_interpreter", *imported],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def child(self, birth: Birth) -> "Fork":
        """A new process."""
        return Fork(self, self.ask("birth", asdict(birth)))

    def ask(self, verb: str, of: Any) -> Any:
        """One request. An answer that nobody stayed for, because a test ran out of time, is passed over."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with self.lock:
            number = next(self._numbers)
            self._popen.stdin.write(json.dumps([number, verb, of]).encode() + b"\n")
            self._popen.stdin.flush()
            for line in self._popen.stdout:
                answered, what = json.loads(line)
                if answered == number:
                    return what
        raise RuntimeError("the warm interpreter has ended")

    def close(self) -> None:
        """End it, and with it what it has forked."""
        self._popen.communicate()


@dataclass(slots=True)
class Fork:
    """One process that was forked. It stays a zombie, and its id its own, until its end was asked for."""

    warm: Warm
    pid: int
    _status: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with self.warm.lock:
            if self._status is None:
                self._status = self.warm.ask("poll", self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        with self.warm.lock:
            if self.poll() is None:
                os.kill(self.pid, sig)


# Inside the warm interpreter.


def _import(names: Sequence[str]) -> None:
    """Import as `app.__main__` does, with the collector at rest."""
    gc.disable()
    for name in names:
        import_module(name)
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == threading.active_count() == 1, "a fork has one thread: whoever imports may have no more"


def _born(asked: BinaryIO, answers: BinaryIO) -> Birth | None:
    """Answer requests until nobody can ask any more: None then. In each fork, what it was made for."""
    ends: dict[int, int | None] = {}
    for line in asked:
        number, verb, of = json.loads(line)
        told: int | None
        if verb == "birth":
            told = os.fork()
            if told == 0:
                return Birth(**of)
            ends[told] = None
        else:
            told = ends[of] = ends[of] if ends[of] is not None else _end(of)
        answers.write(json.dumps([number, told]).encode() + b"\n")
    for pid in [pid for pid, status in ends.items() if status is None]:
        os.kill(pid, signal.SIGKILL)
    return None


def _end(pid: int) -> int | None:
    gone, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if gone else None


def _settle(birth: Birth) -> None:
    """Be where, and see what, an interpreter of its own would. What is not late in its environment is there already."""
    os.setsid()
    os.chdir(birth.folder)
    os.environ.update(birth.environ)
    for place, path, how in ((0, os.devnull, os.O_RDONLY), (1, birth.out, os.O_WRONLY), (2, birth.log, os.O_WRONLY)):
        opened = os.open(path, how | os.O_APPEND)
        os.dup2(opened, place)
        os.close(opened)
    sys.argv[1:] = birth.words[1:]
    sys.path[0] = os.getcwd()


def main() -> None:
    """Serve requests over the standard streams; return only in the end of this process or of a fork."""
    with os.fdopen(os.dup(0), "rb") as asked, os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        _import(sys.argv[1:])
        birth = _born(asked, answers)
    if birth is not None:
        _settle(birth)
        runpy.run_module(birth.words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
