"""Count the code that one streamed one-step request enters, over one gateway and one dispatcher.

    python -m tests.bench.path [--tree PATH] [--verbose]

It prints, for both processes together: the files of `app/`, their functions (comprehensions and lambdas do not count),
the switches (entries of a function, or of a coroutine that goes on, whose file is another than that of the entry
before), and the frames between a step's end and SQL (functions on the stack of the task that appends the step's end,
called after the answer was read, and of the task that writes the batch). The request is streamed and its worker
answers with 40 chunks; servers are a Postgres and a Redis. What runs in the background at the same time is counted as
well, so the request is sent `--rounds` times; the round with the fewest switches is shown, without the files that not
every round has entered. `tracer` counts inside the processes. `--tree` measures another checkout by the same
definition, with its own `.venv/bin/python`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.harness import servers

from .processes import ROOT, DidNotStart, run_to_end, stop, upstream
from .subject import Tree, environment, headers, one_step, pool_text
from .tracer import MARK

ROLES = ("gateway", "dispatcher")
TRACER = ROOT / "tests" / "bench" / "tracer.py"
WORKER = "short"
WARM_UP = 10
"""Requests before those that count, so that caches are filled and connections open."""
AFTERWARDS = 0.1
"""Seconds after the last byte in which what follows a run is still counted: a ticket is removed, a lease ends."""
STARTING = 90.0
"""Seconds within which a request is answered; a traced process imports several times slower than an untraced one."""


class EnteredCode(Struct, frozen=True):
    """The files and functions that one request entered, in both processes together."""

    files: Counter[str]
    """How often each file was switched to."""
    functions: frozenset[str]
    frames: tuple[str, ...]
    """The frames between the step's end and SQL, the outermost first."""

    @property
    def switches(self) -> int:
        """Entries whose file is another than that of the entry before."""
        return self.files.total()


def merge_counts(counts: Sequence[dict[str, Any]]) -> EnteredCode:
    """The counts of several processes as one."""
    files: Counter[str] = Counter()
    functions: set[str] = set()
    frames: tuple[str, ...] = ()
    for count in counts:
        files.update(count["files"])
        functions.update(count["functions"])
        frames = frames or tuple(count["frames"])
    return EnteredCode(files, frozenset(functions), frames)


class TracedProcesses(Struct, frozen=True):
    """Both processes."""

    port: int
    processes: tuple[subprocess.Popen[str], ...]

    def ask(self) -> None:
        """One streamed one-step request, to its end. Raises DidNotStart if it is not answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", one_step(WORKER, stream=True), headers())
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        if reply.status != 200 or b"[DONE]" not in text:
            raise DidNotStart(f"the request was answered with {reply.status}: {text[-500:].decode(errors='replace')}")

    def counted(self) -> EnteredCode:
        """Return what one request enters."""
        for process in self.processes:
            self._command(process, "begin")
        self.ask()
        time.sleep(AFTERWARDS)
        return merge_counts([self._command(process, "end") for process in self.processes])

    @staticmethod
    def _command(process: subprocess.Popen[str], word: str) -> dict[str, Any]:
        """Send a command to the tracer; its answer."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(MARK):
                counts: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return counts
        raise DidNotStart("a traced process has ended")


@contextmanager
def run_traced(tree: Tree) -> Iterator[TracedProcesses]:
    """A gateway and a dispatcher of that tree under the tracer, ready for requests. Raises DidNotStart."""
    with ExitStack() as stack:
        workers = stack.enter_context(upstream())
        database = stack.enter_context(servers.postgres()).url
        redis = stack.enter_context(servers.redis()).url
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-path-")))
        pool, port = folder / "pool.toml", servers.free_port()
        pool.write_text(pool_text(workers.url))
        env = environment(folder, port, pool, database, redis) | tree.environ
        run_to_end(tree.command("app", "migrate"), env=env, folder=tree.root)
        processes = []
        for role in ROLES:
            command = [tree.python, "-P", str(TRACER), str(tree.root), role]
            process = subprocess.Popen(
                command,
                cwd=tree.root,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.callback(stop, process)
            processes.append(process)
        new_trace = TracedProcesses(port, tuple(processes))
        _wait(new_trace)
        for _ in range(WARM_UP):
            new_trace.ask()
        yield new_trace


def _wait(trace: TracedProcesses) -> None:
    """Wait until a request is answered: the gateway listens some seconds before it knows the first key."""
    deadline = time.monotonic() + STARTING
    while True:
        try:
            return trace.ask()
        except (DidNotStart, OSError):
            if time.monotonic() > deadline or any(process.poll() is not None for process in trace.processes):
                raise
        time.sleep(0.2)


def measure_tree(tree: Tree, rounds: int) -> EnteredCode:
    """Return what every round enters."""
    with run_traced(tree) as trace:
        return of_every_round([trace.counted() for _ in range(rounds)])


def of_every_round(rounds: Sequence[EnteredCode]) -> EnteredCode:
    """Return the round with the fewest switches, without the files that only some of the rounds have entered."""
    least = min(rounds, key=lambda entered: entered.switches)
    files = {}
    for path, count in least.files.items():
        if all(path in entered.files for entered in rounds):
            files[path] = count
    functions = [name for name in least.functions if name.partition(":")[0] in files]
    return EnteredCode(Counter(files), frozenset(functions), least.frames)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.path", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout that is measured; this one by default")
    parser.add_argument("--rounds", type=int, default=9, help="how often the request is sent")
    parser.add_argument("--verbose", action="store_true", help="print each file, and each frame before SQL, as well")
    chosen = parser.parse_args()
    measurement = measure_tree(Tree(chosen.tree.resolve()), chosen.rounds)
    print(
        f"files {len(measurement.files)}, functions {len(measurement.functions)}, switches {measurement.switches:,}, ",
        end="",
    )
    print(f"frames between a step's end and SQL {len(measurement.frames)}")
    if chosen.verbose:
        functions = Counter(name.partition(":")[0] for name in measurement.functions)
        for path, count in measurement.files.most_common():
            print(f"{count:6} switches to  {functions[path]:3} functions of  {path}")
        print("\n".join(["from a step's end to SQL:", *measurement.frames]))


if __name__ == "__main__":
    main()
