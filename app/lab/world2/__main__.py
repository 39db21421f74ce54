"""`python -m app.lab.world2` compares all policies of world 2 and writes one table in Markdown."""

import argparse
import sys
from pathlib import Path

from app.lab.world2.standings import Sizes, report, run


def main() -> int:
    """Run the seeds one after the other and write the report."""
    parser = argparse.ArgumentParser(prog="python -m app.lab.world2", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds, from 0 on (10)")
    parser.add_argument("--pools", type=int, default=Sizes().pools, help="pools of each split")
    parser.add_argument("--tested", type=int, default=Sizes().tested, help="test tasks of each split")
    parser.add_argument("--out", type=Path, help="the file to write; else standard output")
    asked = parser.parse_args()
    sizes = Sizes(pools=asked.pools, tested=asked.tested)
    found = []
    for seed in range(asked.seeds):
        found.append(run(seed, sizes))
        print(f"seed {seed} is done", file=sys.stderr, flush=True)
    text = report(found, sizes)
    if asked.out:
        asked.out.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
