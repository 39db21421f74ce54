"""`python -m app.lab.world2` compares all policies of world 2 and writes one table in Markdown."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from app.lab.world2.baselines import Policy, Setting
from app.lab.world2.bounds import OptimumAsRead, OptimumByCards
from app.lab.world2.learning import READ_TASKS, learned
from app.lab.world2.provider import SPLITS, pool_file, task_set
from app.lab.world2.rehearsal import TESTED
from app.lab.world2.rehearsal import report as rehearsal_report
from app.lab.world2.shipped import write
from app.lab.world2.standings import Found, Sizes, keep, kept, report, run


def main() -> int:
    """Compare all policies over several seeds, or print what a service needs to pose tasks of this world."""
    parser = argparse.ArgumentParser(prog="python -m app.lab.world2", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds (10)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--pools", type=int, default=Sizes().pools, help="pools of each split")
    parser.add_argument("--tested", type=int, default=Sizes().tested, help="test tasks of each split")
    parser.add_argument("--out", type=Path, help="the file, written after each seed; else standard output")
    parser.add_argument("--training", type=int, default=Sizes().training, help="training tasks of each seed")
    parser.add_argument("--learn", type=int, default=0, help="most verdicts that a learned policy gets (0: none)")
    parser.add_argument("--keep", type=Path, help="the folder of seeds that are done, which are not run again")
    parser.add_argument("--pool-file", type=int, help="print the pool file of this number, and nothing else")
    parser.add_argument("--unseen", action="store_true", help="with workers that training never meets")
    parser.add_argument("--tasks", choices=SPLITS, help="print the task set of a split, and nothing else")
    parser.add_argument("--conductor", type=Path, help="learn the policy of the rehearsal conductor into this file")
    parser.add_argument(
        "--rehearsal", action="store_true", help="compare the rehearsal conductor with tuned fixed plans"
    )
    asked = parser.parse_args()
    if asked.rehearsal:
        print(rehearsal_report(TESTED))
        return 0
    if asked.conductor is not None:
        write(asked.conductor)
        return 0
    if asked.pool_file is not None:
        print(pool_file(asked.pool_file, unseen=asked.unseen))
        return 0
    if asked.tasks is not None:
        print("\n".join(task_set(asked.tasks)))
        return 0
    return _compare(asked)


def _compare(asked: argparse.Namespace) -> int:
    """Run the seeds one after the other and write the report."""
    sizes = Sizes(asked.pools, asked.training, asked.training // 2, asked.tested)

    def further(seen: Sequence[Setting], seed: int) -> Sequence[Policy]:
        bounds: list[Policy] = [OptimumByCards(), OptimumAsRead(seed, READ_TASKS)]
        return [*learned(seen, seed, asked.learn), *bounds]

    found: list[Found] = []
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
    for seed in range(asked.first, asked.first + asked.seeds):
        place = asked.keep / f"seed-{seed}.npz" if asked.keep else None
        if place is not None and place.exists():
            found.append(kept(seed, place))
            continue
        found.append(run(seed, sizes, further))
        if place is not None:
            keep(found[-1], place)
        print(f"seed {seed} is done", file=sys.stderr, flush=True)
        if asked.out:
            asked.out.write_text(report(found, sizes))
    if asked.out:
        asked.out.write_text(report(found, sizes))
    else:
        print(report(found, sizes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
