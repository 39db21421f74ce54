"""A fork of the warm interpreter is to its tests, and to itself, what `python -m` would have started."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.processes import Process, environment, within
from tests.harness.warm_interpreter import Birth, Warm, early, shared

PROBE = """
import gc, json, os, signal, sys, threading
from pathlib import Path
def stream(number):
    return os.readlink(f"/proc/self/fd/{number}") if sys.platform == "linux" else ""
what = sys.argv[1]
if what == "tell":
    telling = {
        "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(), "path": sys.path,
        "folder": os.getcwd(), "environ": dict(os.environ), "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        "files": sorted(os.listdir("/dev/fd"))[:-1], "streams": [stream(number) for number in range(3)],
        "handlers": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "wakes": signal.set_wakeup_fd(-1), "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "collects": gc.isenabled(), "counts": gc.get_threshold(), "debug": gc.get_debug(),
        "threads": threading.active_count(), "flags": str(sys.flags), "umask": os.umask(0o22),
    }
    print(json.dumps(telling))
print("\\nBaton is here", flush=True)
if what == "leave":
    sys.exit(3)
if what == "say":
    sys.exit("so it ends")
if what == "raise":
    {}["absent"]
if what == "stay":
    signal.pause()
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has a module `probe` that only a process which starts there can find."""
    made = tmp_path_factory.mktemp("probed")
    (made / "probe.py").write_text(PROBE)
    return made


@pytest.fixture
def probe(folder: Path) -> Iterator[Callable[..., Process]]:
    """A process that does as its word says, started and not waited for."""
    made: list[Process] = []

    def start(what: str, *, warm: bool = True, **more: str) -> Process:
        process = Process(what, folder, environment(folder, **more), program=("probe",), warm=warm)
        made.append(process)
        process.start(wait=False)
        return process

    yield start
    for process in made:
        process.kill()


def told(process: Process) -> dict[str, Any]:
    assert process.ended() == 0, process.logged
    found: dict[str, Any] = json.loads(process.said.splitlines()[0])
    found["streams"] = [path.replace(f"-{process.port}.", ".") for path in found["streams"]]
    assert found["environ"].pop("BATON_PORT") == str(process.port)
    return found


@linux
def test_it_sees_what_an_interpreter_of_its_own_sees(probe: Callable[..., Process]) -> None:
    fork, own = (probe("tell", warm=warm, BATON_LOG_LEVEL="debug") for warm in (True, False))
    assert os.getsid(fork.pid) == fork.pid
    assert told(fork) == told(own)


@pytest.mark.parametrize("warm", [True, False])
def test_it_ends_as_an_interpreter_of_its_own_does(probe: Callable[..., Process], warm: bool) -> None:
    ends = {what: probe(what, warm=warm) for what in ("leave", "say", "raise", "nothing")}
    assert {what: process.ended() for what, process in ends.items()} == {
        "leave": 3,
        "say": 1,
        "raise": 1,
        "nothing": 0,
    }
    assert ends["say"].logged == "so it ends\n"
    assert ends["raise"].logged.startswith("Traceback")
    assert ends["raise"].logged.endswith("KeyError: 'absent'\n")


@pytest.mark.parametrize("warm", [True, False])
def test_its_signals_are_its_own(probe: Callable[..., Process], warm: bool) -> None:
    told_to, killed, stopped = (probe("stay", warm=warm) for _ in range(3))
    for process in (told_to, killed, stopped):
        process.wait_until_there()
    assert told_to.stop() == -signal.SIGTERM
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.ended() == -signal.SIGKILL
    os.kill(stopped.pid, signal.SIGSTOP)
    assert stopped.alive
    stopped.kill()
    assert not stopped.alive


@pytest.mark.parametrize("warm", [True, False])
def test_its_id_is_nobody_elses_until_its_end_is_known(probe: Callable[..., Process], warm: bool) -> None:
    process = probe("leave", warm=warm)
    within(10, lambda: "Baton is here" in process.said)
    for _ in range(100):
        os.kill(process.pid, 0)
    assert process.ended() == 3


@pytest.fixture
def warm(folder: Path) -> Iterator[Warm]:
    """One that has imported nothing."""
    made = Warm(early(environment(folder)), ())
    yield made
    made.close()


def birth(folder: Path, what: str) -> Birth:
    for kind in ("out", "log"):
        (folder / f"{what}.{kind}").write_bytes(b"")
    out, log = (str(folder / f"{what}.{kind}") for kind in ("out", "log"))
    return Birth(("probe", what), str(folder), early(environment(folder)), out, log)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@linux
def test_what_lives_ends_with_the_warm_interpreter(warm: Warm, folder: Path) -> None:
    child = warm.child(birth(folder, "stay"))
    within(10, lambda: "Baton is here" in (folder / "stay.out").read_text())
    os.kill(child.pid, signal.SIGSTOP)
    warm.close()
    within(10, lambda: gone(child.pid))


@linux
def test_an_answer_that_nobody_stayed_for_is_no_other_ones(warm: Warm, folder: Path) -> None:
    left, over = (warm.child(birth(folder, what)) for what in ("leave", "nothing"))
    within(10, lambda: gone(left.pid) and gone(over.pid))
    assert warm._popen.stdin is not None
    warm._popen.stdin.write(json.dumps([-1, "poll", left.pid]).encode() + b"\n")
    assert over.poll() == 0
    assert left.poll() == 3
    assert left.wait() == 3


@pytest.mark.parametrize(
    "more",
    [
        {"LD_PRELOAD": "a.so"},
        {"PYTHONHASHSEED": "0"},
        {"PYTHONPATH": "elsewhere"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"HTTPS_PROXY": "http://127.0.0.1:1"},
        {"TZ": "Asia/Tokyo"},
    ],
)
def test_what_an_import_may_read_asks_for_an_interpreter_of_its_own(folder: Path, more: dict[str, str]) -> None:
    usual = environment(folder)
    assert not shared(usual | more, usual)
    assert not shared({name: value for name, value in usual.items() if name != "PATH"}, usual)


def test_what_the_service_reads_late_does_not(folder: Path) -> None:
    usual = environment(folder)
    late = environment(folder / "other", BATON_PORT="1", STUB_KEY="x")
    assert shared(late, usual) == (sys.platform == "linux")
