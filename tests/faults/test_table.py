"""The table in README.md says which test breaks what, and is made from the tests; no fault is without one."""

import re
import subprocess
import sys

from tests.faults.table import families, read_written_table
from tests.harness.processes import ROOT

WANTED = [f"F-{number:02}" for number in (*range(1, 13), 14, 15, 16, 19, *range(21, 34), 37)]
POINTS = 60
"""Fewest distinct injection points."""


def test_the_table_is_that_of_the_tests_and_no_fault_is_missing() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.faults.table"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    ).stdout
    table = process[process.index("| fault |") :]
    assert table == read_written_table(), "run `python -m tests.faults.table --write`"
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| F-")]
    covered = set()
    for row in rows:
        covered.update(families(row[1].strip()))
    assert set(WANTED) - covered == set()
    assert all(row[5].strip() for row in rows), "each says what it expects"
    count = re.search(r"^(\d+) distinct injection points", table, re.M)
    assert count is not None
    assert POINTS <= int(count[1]) <= sum(int(row[3]) for row in rows)
