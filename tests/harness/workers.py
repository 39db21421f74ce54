"""`pytest --workers N` collects the tests once and runs them in N forks of the process that has collected them.

pytest-xdist has each of its workers import and collect everything: 8 of the 80 seconds of CPU that each of five took,
and its first process took another 10 to read what they reported. A fork has all that from the start, so that there can
be as many of them as the waiting of the tests needs.

The forks take whole files, one after the other, in the order of the collection: a file's tests run in one process, and
so do the tests that share a fixture of a module. Everything that a worker reports goes through pytest's own hooks in
the first process, which prints it, counts it, and fails each test that no worker has brought to its end. The servers
and directories of a session belong to each worker alone.

Only a process with one thread may fork, so nothing that is imported for a test may start another. On systems other
than Linux, whose libraries do not survive a fork, the tests run one after the other in the first process.
"""

import os
import pickle
import selectors
import signal
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import pytest
from _pytest.config import create_terminal_writer
from _pytest.nodes import Node

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""numpy's linear algebra, which some tests import, would start a thread for each core as soon as it is loaded."""
LENGTH: Final = struct.Struct("!I")
"""The length of a message, which comes before it."""
FILE_NUMBER: Final = struct.Struct("!H")
"""What a worker takes from the queue of files: a pipe, of which each read of so few bytes gets one number whole."""
LONGEST_READ_BYTES: Final = 1 << 20

Files = Sequence[Sequence[pytest.Item]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--workers`."""
    described = "run the tests in so many forks of this process"
    parser.addoption("--workers", type=int, default=0, metavar="N", help=described)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run what was collected in workers, if there are to be any; pytest itself says what is wrong with a collection."""
    workers = session.config.getoption("--workers")
    if not workers or session.testsfailed or session.config.option.collectonly or sys.platform != "linux":
        return None
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.verbosity <= 0:
        reporter.showfspath = False  # one dot after the other: the files alternate
    files = by_file(session.items)
    with open_queue(len(files)) as queue:
        pool = Pool(session, files, queue.fileno())
        try:
            pool.run(min(workers, len(files)))
        finally:
            pool.kill()
    return True


def by_file(items: Sequence[pytest.Item]) -> Files:
    """Return the tests of each file together, the files in the order of their first tests."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return list(files.values())


def open_queue(length: int) -> BinaryIO:
    """Return a pipe that holds the numbers of all files, and ends after the last one."""
    readable, writable = os.pipe()
    with open(writable, "wb", buffering=0) as numbers:
        numbers.write(b"".join(map(FILE_NUMBER.pack, range(length))))
    return open(readable, "rb", buffering=0)


# In the first process.


@dataclass
class Worker:
    """A fork, as the first process sees it."""

    pid: int
    messages: BinaryIO
    received: bytearray = field(default_factory=bytearray)
    running: str | None = None
    """The id of the test that it has begun and not finished."""
    done: bool = False
    """It has said that no file is left for it."""

    def read(self) -> Iterator[tuple[str, Any]]:
        """Return the messages that have arrived whole. Raises EOFError if there can be no more."""
        arrived = self.messages.read(LONGEST_READ_BYTES)
        if not arrived:
            raise EOFError
        self.received += arrived
        while len(self.received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.received)
            end = LENGTH.size + length
            if len(self.received) < end:
                return
            message = bytes(self.received[LENGTH.size : end])
            del self.received[:end]
            yield pickle.loads(message)


class Pool:
    """All workers, and what is known of the tests."""

    def __init__(self, session: pytest.Session, files: Files, queue: int) -> None:
        """Know the files, and the queue that their numbers are in."""
        self._session, self._files, self._queue = session, files, queue
        self._hooks = session.config.hook
        self._workers: dict[int, Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._unfinished = {item.nodeid: item for item in session.items}
        self._folder = _temporary_folder(session.config)

    def run(self, count: int) -> None:
        """Start so many workers and report everything that they do, until all have ended."""
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads run, and a fork has one: what was imported has started the others"
        for number in range(count):
            self._start(number)
        while self._workers:
            for key, _ in self._selector.select():
                self._report_messages(key.data)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        for nodeid in list(self._unfinished):
            self._fail(nodeid, "The worker that was to run this test has ended before.")

    def kill(self) -> None:
        """Kill the workers that have not ended. The servers that they have started end with them."""
        for worker in list(self._workers.values()):
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            self._reap(worker)
        self._selector.close()

    def _start(self, number: int) -> None:
        readable, writable = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for other in self._workers.values():
                other.messages.close()
            os.close(readable)
            _work_and_exit(self._session.config, self._files, self._queue, writable, self._folder / f"worker-{number}")
        os.close(writable)
        worker = self._workers[pid] = Worker(pid, os.fdopen(readable, "rb", buffering=0))
        self._selector.register(readable, selectors.EVENT_READ, worker)

    def _report_messages(self, worker: Worker) -> None:
        """Report what a worker has sent."""
        try:
            for name, argument in worker.read():
                self._report(worker, name, argument)
        except EOFError:
            status = self._reap(worker)
            if worker.running is not None:
                self._fail(worker.running, f"The worker has ended with status {status} in the middle of this test.")
            elif not worker.done:
                self._session.shouldfail = f"a worker has ended with status {status} outside of all tests"

    def _report(self, worker: Worker, name: str, argument: Any) -> None:
        if name == "done":
            worker.done = True
        elif name == "report":
            report = self._hooks.pytest_report_from_serializable(config=self._session.config, data=argument)
            self._hooks.pytest_runtest_logreport(report=report)
        elif name == "start":
            worker.running = argument[0]
            self._hooks.pytest_runtest_logstart(nodeid=argument[0], location=argument[1])
        else:
            worker.running = None
            del self._unfinished[argument[0]]
            self._hooks.pytest_runtest_logfinish(nodeid=argument[0], location=argument[1])

    def _fail(self, nodeid: str, why: str) -> None:
        """Report that a test has failed which did not come to its end."""
        location = self._unfinished.pop(nodeid).location
        report = pytest.TestReport(nodeid, location, {}, "failed", why, "call")
        self._hooks.pytest_runtest_logreport(report=report)
        self._hooks.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _reap(self, worker: Worker) -> int:
        """Return the exit status of a worker that has ended or was killed."""
        self._selector.unregister(worker.messages)
        worker.messages.close()
        del self._workers[worker.pid]
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def _temporary_folder(config: pytest.Config) -> Path:
    """Make the folder for all temporary files of these tests; pytest removes those of earlier times."""
    made: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return made


# In the workers.


class Messages:
    """Sends what pytest reports of a test to the first process."""

    def __init__(self, config: pytest.Config, writable: int) -> None:
        """Send through this pipe."""
        self._config, self._pipe = config, writable

    def send(self, name: str, argument: Any = None) -> None:
        """Send one message; waits while the pipe is full."""
        message = pickle.dumps((name, argument))
        rest = memoryview(LENGTH.pack(len(message)) + message)
        while rest:
            rest = rest[os.write(self._pipe, rest) :]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Say that a test begins."""
        self.send("start", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the result of one phase of a test."""
        self.send("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Say that a test has ended."""
        self.send("finish", (nodeid, location))


class SilentReporter:
    """Stands in for the reporter of a worker, whose words would be among those of the first process.

    What is written about a test that runs out of time belongs to the output of that test.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Write to the standard error output, which is the test's."""
        self._tw = create_terminal_writer(config, sys.stderr)


def _work_and_exit(config: pytest.Config, files: Files, queue: int, writable: int, folder: Path) -> None:
    """Run files from the queue until it is empty; never returns.

    It ends at once: what the interpreter does before its end belongs to the first process, and waits for threads.
    """
    status = 1
    try:
        messages = Messages(config, writable)
        _become_worker(config, messages, folder)
        _run_files(files, queue)
        messages.send("done")
        status = 0
    except KeyboardInterrupt:  # the first process got it, too
        pass
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _become_worker(config: pytest.Config, messages: Messages, folder: Path) -> None:
    """Have output, temporary directories and reports of its own."""
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    plugins.register(SilentReporter(config), "terminalreporter")
    plugins.register(messages)


class FirstOfNextFile:
    """Stands for the test after the last one of a file, which nobody has taken from the queue yet.

    Pytest asks for its collectors when it takes down fixtures: those that it shares stay. Only then is it known which
    file this worker has next, so that no file waits for the end of a long test while another worker is free.
    """

    def __init__(self, files: Files, queue: int) -> None:
        """Take from this queue once it is asked for."""
        self._files, self._queue = files, queue

    @cached_property
    def file(self) -> Sequence[pytest.Item]:
        """The tests of the file; empty if no file is left."""
        number = os.read(self._queue, FILE_NUMBER.size)
        return self._files[FILE_NUMBER.unpack(number)[0]] if number else ()

    def listchain(self) -> list[Node]:
        """Return the collectors of the first test, from the session on; empty if no test is left."""
        return self.file[0].listchain() if self.file else []


def _run_files(files: Files, queue: int) -> None:
    following = FirstOfNextFile(files, queue)
    while items := following.file:
        following = FirstOfNextFile(files, queue)
        for item, after in pairwise((*items, following)):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
