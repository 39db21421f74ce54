"""A fork of the fork server looks, to its tests and to itself, as if `python -m` had started it."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from tests.harness.fork_server import ForkServer, Launch, TemplateInterpreter, may_fork, read_early
from tests.harness.processes import Process, environment
from tests.harness.waiting import wait_until

PROBE = """
import gc, json, os, signal, sys, threading
from pathlib import Path
def stream(number):
    return os.readlink(f"/proc/self/fd/{number}") if sys.platform == "linux" else ""
what = sys.argv[1]
if what == "describe":
    description = {
        "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(), "path": sys.path,
        "folder": os.getcwd(), "environ": dict(os.environ), "files": sorted(os.listdir("/dev/fd"))[:-1],
        "leads_its_session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "streams": [stream(number) for number in range(3)],
        "handlers": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "wakes": signal.set_wakeup_fd(-1), "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "collects": gc.isenabled(), "counts": gc.get_threshold(), "debug": gc.get_debug(),
        "threads": threading.active_count(), "flags": str(sys.flags), "umask": os.umask(0o22),
    }
    print(json.dumps(description))
if what == "exporters":
    print(*(name for name in sys.modules if name.startswith(("opentelemetry.exporter", "opentelemetry.sdk.trace"))))
print("\\nBaton is here", flush=True)
if what == "exit":
    sys.exit(3)
if what == "exit with a message":
    sys.exit("the message")
if what == "raise":
    {}["absent"]
if what == "stay":
    signal.pause()
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module `probe`, which only a process that starts there can import."""
    made = tmp_path_factory.mktemp("probed")
    (made / "probe.py").write_text(PROBE)
    return made


@pytest.fixture
def probe(folder: Path) -> Iterator[Callable[..., Process]]:
    """A function that starts a process of the module `probe` without waiting for it."""
    started: list[Process] = []

    def start(what: str, *, forked: bool = True, **more: str) -> Process:
        process = Process(what, folder, environment(folder, **more), program=("probe",), forked=forked)
        started.append(process)
        process.start(wait=False)
        return process

    yield start
    for process in started:
        process.kill()


def description(process: Process) -> dict[str, Any]:
    """Return what a process found out about itself, without what differs from process to process."""
    assert process.wait_for_exit() == 0, process.log
    found: dict[str, Any] = json.loads(process.output.splitlines()[0])
    found["streams"] = [path.replace(f"-{process.port}.", ".") for path in found["streams"]]
    assert found["environ"].pop("BATON_PORT") == str(process.port)
    return found


@linux
def test_it_sees_what_an_interpreter_of_its_own_sees(probe: Callable[..., Process]) -> None:
    fork = probe("describe", forked=True, BATON_LOG_LEVEL="debug")
    own = probe("describe", forked=False, BATON_LOG_LEVEL="debug")
    assert description(fork) == description(own)


@pytest.mark.parametrize("forked", [True, False])
def test_it_ends_as_an_interpreter_of_its_own_does(probe: Callable[..., Process], forked: bool) -> None:
    exits, speaks, raises, returns = (
        probe(what, forked=forked) for what in ("exit", "exit with a message", "raise", "return")
    )
    assert (exits.wait_for_exit(), speaks.wait_for_exit(), raises.wait_for_exit(), returns.wait_for_exit()) == (
        3,
        1,
        1,
        0,
    )
    assert speaks.log == "the message\n"
    assert raises.log.startswith("Traceback")
    assert raises.log.endswith("KeyError: 'absent'\n")


@pytest.mark.parametrize("forked", [True, False])
def test_its_signals_are_its_own(probe: Callable[..., Process], forked: bool) -> None:
    terminated, killed, stopped = (probe("stay", forked=forked) for _ in range(3))
    for process in (terminated, killed, stopped):
        process.wait_until_announced()
    assert terminated.stop() == -signal.SIGTERM
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait_for_exit() == -signal.SIGKILL
    os.kill(stopped.pid, signal.SIGSTOP)
    assert stopped.alive
    stopped.kill()
    assert not stopped.alive


@pytest.mark.parametrize("forked", [True, False])
def test_its_id_is_nobody_elses_until_its_exit_status_is_known(probe: Callable[..., Process], forked: bool) -> None:
    process = probe("exit", forked=forked)
    wait_until(lambda: has_ended(process.pid), what="the process is a zombie")
    os.kill(process.pid, 0)
    assert process.wait_for_exit() == 3


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    """A fork server that has imported nothing."""
    empty = TemplateInterpreter(read_early(environment(folder)), ())
    started = ForkServer(empty)
    yield started
    started.close()
    empty.close()


def launch(folder: Path, what: str) -> Launch:
    """Return the launch of a `probe` whose files are empty."""
    out, log = folder / f"{what}.out", folder / f"{what}.log"
    out.write_bytes(b"")
    log.write_bytes(b"")
    return Launch(("probe", what), str(folder), read_early(environment(folder)), str(out), str(log))


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@linux
def test_a_started_fork_has_its_own_session_folder_and_files(server: ForkServer, folder: Path) -> None:
    wanted = launch(folder, "stay")
    for _ in range(50):
        child = server.start(wanted)
        assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
        assert os.readlink(f"/proc/{child.pid}/cwd") == wanted.folder
        assert os.readlink(f"/proc/{child.pid}/fd/2") == wanted.log
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


@linux
def test_a_fork_that_cannot_start_is_one_that_has_failed(server: ForkServer, folder: Path, tmp_path: Path) -> None:
    wanted = launch(folder, "return")
    assert server.start(replace(wanted, folder=str(tmp_path / "absent"))).wait() == 1
    assert server.start(wanted).wait() == 0


@linux
def test_forks_end_with_their_server(server: ForkServer, folder: Path) -> None:
    child = server.start(launch(folder, "stay"))
    wait_until(lambda: "Baton is here" in (folder / "stay.out").read_text())
    os.kill(child.pid, signal.SIGSTOP)
    server.close()
    wait_until(lambda: has_ended(child.pid))


@linux
def test_an_answer_that_nobody_stayed_for_is_skipped(server: ForkServer, folder: Path) -> None:
    failed, succeeded = (server.start(launch(folder, what)) for what in ("exit", "return"))
    wait_until(lambda: has_ended(failed.pid) and has_ended(succeeded.pid))
    server.send("poll", failed.pid)
    assert succeeded.poll() == 0
    assert failed.poll() == 3
    assert failed.wait() == 3


@pytest.mark.parametrize(
    "more",
    [
        {"LD_PRELOAD": "a.so"},
        {"PYTHONHASHSEED": "0"},
        {"PYTHONPATH": "elsewhere"},
        {"OTEL_PROPAGATORS": "baggage"},
        {"HTTPS_PROXY": "http://127.0.0.1:1"},
        {"TZ": "Asia/Tokyo"},
    ],
)
def test_a_variable_that_an_import_may_read_forbids_a_fork(folder: Path, more: dict[str, str]) -> None:
    usual = environment(folder)
    assert not may_fork(usual | more, usual)
    assert not may_fork({name: value for name, value in usual.items() if name != "PATH"}, usual)


def test_a_variable_that_is_read_late_permits_a_fork(folder: Path) -> None:
    usual = environment(folder)
    late = environment(folder / "other", BATON_PORT="1", STUB_KEY="x", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert may_fork(late, usual) == (sys.platform == "linux")


def test_a_fork_has_not_imported_what_reads_the_variables_of_exporters(probe: Callable[..., Process]) -> None:
    process = probe("exporters")
    assert process.wait_for_exit() == 0, process.log
    assert process.output.splitlines()[0] == ""
