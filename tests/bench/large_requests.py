"""The memory that is left in a gateway and an engine by runs whose conversation is long.

`python -m tests.bench.large_requests` prints the resident memory of both processes before the first run and after each
round of runs of one step, a third of them streamed. It should not grow from one round to the next.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

from tests.harness import servers

from .load import Load, run
from .processes import upstream
from .subject import Target, Tree, baton, one_step

CONNECTIONS = 8
SECONDS = 300.0


def _body(kilobytes: int, *, stream: bool) -> str:
    body = json.loads(one_step("fast", stream))
    body["messages"] = [{"role": "user", "content": "What is a queue? " * (kilobytes * 1000 // 17)}]
    return json.dumps(body)


def _mebibytes(target: Target) -> str:
    return "  ".join([f"{process.rss_bytes() / 2**20:8.0f}" for process in target.processes])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.large_requests", description=__doc__)
    parser.add_argument("--kilobytes", type=int, default=200, help="of each conversation")
    parser.add_argument("--runs", type=int, default=400, help="in each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tree", type=Path, help="another checkout that is measured in place of this one")
    chosen = parser.parse_args()
    with ExitStack() as stack:
        workers = stack.enter_context(upstream())
        running = baton(
            workers.url,
            name="large requests",
            roles=("gateway", "dispatcher"),
            database=stack.enter_context(servers.postgres()).url,
            redis=stack.enter_context(servers.redis()).url,
            tree=Tree(chosen.tree.resolve()) if chosen.tree else None,
        )
        target = stack.enter_context(running)
        print("    runs   gateway    engine (MiB)")
        _send(target, chosen.kilobytes, CONNECTIONS, stream=False)  # until then a process may still be starting
        print(f"{0:8}  {_mebibytes(target)}", flush=True)
        for number in range(chosen.rounds):
            streams = chosen.runs // 3
            _send(target, chosen.kilobytes, chosen.runs - streams, stream=False)
            _send(target, chosen.kilobytes, streams, stream=True)
            print(f"{(number + 1) * chosen.runs:8}  {_mebibytes(target)}", flush=True)


def _send(target: Target, kilobytes: int, runs: int, *, stream: bool) -> None:
    load = Load(
        url=target.address("fast"),
        body=_body(kilobytes, stream=stream),
        headers=target.headers,
        connections=CONNECTIONS,
        seconds=SECONDS,
        requests=runs,
    )
    report = run(load)
    if report.errors:
        raise SystemExit(f"{report.errors} runs failed: {report.first_error}")


if __name__ == "__main__":
    main()
