"""The table in README.md of what each test breaks, made from the marks of the tests.

`python -m tests.faults.table` prints it, `--write` puts it into README.md; `test_table.py` holds the two together.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

HERE: Final = Path(__file__).parent
README: Final = HERE / "README.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


class Point(Struct, frozen=True):
    """One injection point: the fault's family, what is broken where, what is expected, and the test of it."""

    family: str
    place: str
    expectation: str
    ci: bool
    test: str


class _Collector:
    def __init__(self) -> None:
        self.points: list[Point] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep the marks of what was found."""
        for item in session.items:
            test = f"{item.path.name}::{item.name.partition('[')[0]}"
            for mark in item.iter_markers("point"):
                self.points.append(Point(*mark.args, ci=mark.kwargs["ci"], test=test))


def collect_points() -> list[Point]:
    """Return every point of the suite, in the order of its tests. Call it in a process of its own: pytest runs in
    it."""
    collector = _Collector()
    words = ["--collect-only", "-qq", "--no-summary", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE)]
    status = pytest.main(words, plugins=[collector])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests could not be collected: {status!r}")
    return collector.points


def families(name: str) -> list[str]:
    """`F-01..06` as six names."""
    match = re.fullmatch(r"F-(\d+)(?:\.\.(\d+))?", name)
    if match is None:
        raise ValueError(name)
    first, last = int(match[1]), int(match[2] or match[1])
    return [f"F-{number:02}" for number in range(first, last + 1)]


def table(points: Sequence[Point]) -> str:
    """Return a row for each test of each family, and the number of distinct points."""
    rows = ["| fault | test | points | in CI | expected |", "|---|---|---|---|---|"]
    for family, test in sorted({(point.family, point.test) for point in points}):
        ours = {point.place: point for point in points if (point.family, point.test) == (family, test)}
        expected = "; or: ".join(dict.fromkeys(point.expectation for point in ours.values()))
        ci = sum(point.ci for point in ours.values())
        rows.append(f"| {family} | `{test}` | {len(ours)} | {ci} | {expected} |")
    distinct = len({(point.family, point.place) for point in points})
    return "\n".join([*rows, "", f"{distinct} distinct injection points.", ""])


def read_written_table() -> str:
    """Return the table as README.md has it."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0]


def main(words: Sequence[str]) -> None:
    """Print the table, or write it."""
    table_text = table(collect_points())
    if "--write" in words:
        text = README.read_text()
        README.write_text(text.partition(BEGIN)[0] + BEGIN + table_text + END + text.partition(END)[2])
    sys.stdout.write(table_text)


if __name__ == "__main__":
    main(sys.argv[1:])
