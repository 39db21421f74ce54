"""Play seeds: one and tell its story, or many over all cores and say what came of them.

    python -m tests.simulation SEED                           the story of one world, and what was wrong with it
    python -m tests.simulation --seeds 10000 [--first N] [--minutes M]

Exit code 1 if a promise was broken, or if 500 seeds or more did not bring every fault, every end and every outcome.
"""

import argparse
import sys

from tests.simulation.crowd import ENOUGH, many
from tests.simulation.play import play


def print_story(seed: int) -> int:
    """One seed's story."""
    report = play(seed, keep_trace=True)
    print(*report.lines, sep="\n")
    print(f"history {report.trace}")
    print(*(report.violations or ["every promise was kept"]), sep="\n")
    return bool(report.violations)


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=24 * 60.0)
    options = parser.parse_args()
    if (options.seed is None) == (not options.seeds):
        parser.error("say one seed, or --seeds and how many")
    if options.seed is not None:
        return print_story(options.seed)
    total = many(options.first, options.seeds, options.minutes)
    missing = list(total.missing_coverage()) if total.seeds >= ENOUGH else []
    print(*total.lines(), *missing, sep="\n")
    return bool(total.failed or missing)


if __name__ == "__main__":
    sys.exit(main())
