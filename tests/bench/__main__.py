"""`python -m tests.bench`: the table of DESIGN.md, section 10, for this machine, with a verdict for each budget.

The set-ups are measured one after another, never two at once; `figures` lists them. `--bare` measures the pass-through
reference with the same tools instead, which needs no Baton.

`--against PATH` measures another checkout as well, in alternating rounds: this tree, the other, this tree, and so on.
Its processes run with its own `.venv/bin/python`, over servers of their own. Each figure then has two medians, the
median of the ratios of the rounds, and a verdict: WORSE if this tree is worse by more than 10 %.

How to get a ratio that can be trusted on a machine that others use at the same time:

* Never compare figures of two runs of this command. Only rounds that alternate see the same neighbours.
* Take the median of the rounds' ratios, not the ratio of two medians: a slow minute then slows both of its parts.
* Prefer many short rounds to few long ones (`--rounds 9 --seconds 2`): a disturbance spoils one round, not a third.
* CPU per request and commits per run are steady; believe them first. p50 is next, and p99 needs 9 rounds or more.
* Compare a tree with itself once (`--against .`): what differs there is the noise, and smaller differences say nothing.
* There is no waiting for a quiet machine: the load average lags by a minute, and is a poor reason to trust a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import asdict

from tests.harness import servers

from .figures import SETUPS, Figure, Subject, measure_subjects, of_setup
from .processes import DidNotStart, bare, upstream
from .scenarios import Effort
from .subject import SATURATED_SLOTS, Target, Tree, baton
from .table import Comparison, Row, compare_rows, render_table

SLOTS = {"BATON_CONCURRENT_STEPS": str(SATURATED_SLOTS)}


def _subject(stack: ExitStack, setup: str, upstream_url: str, tree: Tree) -> Subject:
    """Start one tree in that set-up, over servers of its own."""
    distributed = setup in ("distributed", "saturated")
    database = redis = None
    journal = ""
    if setup != "embedded":
        database = stack.enter_context(servers.postgres(fsync=True)).url
    if setup == "postgres":
        journal = stack.enter_context(servers.postgres(fsync=True)).url
    if distributed:
        redis = stack.enter_context(servers.redis()).url
    running = baton(
        upstream_url,
        name=f"{setup} in {tree.root.name}",
        roles=("gateway", "dispatcher") if distributed else ("serve",),
        database=database,
        redis=redis,
        more=SLOTS if setup == "saturated" else None,
        tree=tree,
    )
    return Subject(tree, stack.enter_context(running), redis or "", journal)


def _measure(setup: str, trees: Sequence[Tree], effort: Effort, only: str) -> list[list[Row]]:
    """The rows of one set-up, one for each tree. The upstream and the bare reference run at the same time, so that
    differences and ratios are of the same minute."""
    with ExitStack() as stack:
        workers = stack.enter_context(upstream())
        running = stack.enter_context(bare(workers.url))
        direct, reference = Target("direct", workers.url, (workers,)), Target("bare", running.url, (running,))
        if setup == "bare":
            subjects = [Subject(Tree(), reference)]
        else:
            subjects = [_subject(stack, setup, workers.url, tree) for tree in trees]
        figures: list[Figure] = [figure for figure in of_setup(setup, direct, reference) if only in figure.what]
        return [measure_subjects(figure, subjects, effort) for figure in figures]


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", choices=SETUPS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only figures whose name contains this text")
    parser.add_argument("--bare", action="store_true", help="measure the reference instead of Baton")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, measured in alternating rounds")
    parser.add_argument("--seconds", type=float, default=5.0, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="rows as JSON, too")
    return parser.parse_args()


def _print_rows(rows: Sequence[Sequence[Row]], *, as_json: bool) -> bool:
    """Print the table of a set-up; whether a budget is missed, or a figure is worse than that of the other tree."""
    comparisons = [Comparison(*row) for row in rows if len(row) > 1]
    ours = [row[0] for row in rows]
    print(compare_rows(comparisons) if comparisons else render_table(ours))
    if as_json:
        sides = []
        for row in rows:
            sides.append([asdict(side) for side in row])
        print(json.dumps(sides))
    if comparisons:
        return any(comparison.verdict == "WORSE" for comparison in comparisons)
    return any(row.verdict == "MISSED" for row in ours)


def main() -> None:
    """The command line; exits with 1 when a budget is missed or, with `--against`, when a figure is worse."""
    chosen = _parse_options()
    effort = Effort(chosen.seconds, chosen.rounds)
    trees = [Tree()] + ([Tree(chosen.against.resolve())] if chosen.against else [])
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {sys.version} at {sys.base_prefix}")
    failed = False
    for setup in ("bare",) if chosen.bare else chosen.setup or SETUPS:
        try:
            rows = _measure(setup, trees, effort, chosen.only)
        except DidNotStart as problem:
            print(f"\n## {setup}: did not start\n{problem}")
            failed = True
            continue
        print(f"\n## {setup}\n", flush=True)
        failed = _print_rows(rows, as_json=chosen.json) or failed
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
