"""Rounds in the pool file: a limit of a tier and of its effort levels, and who may open one."""

from pathlib import Path

import pytest

from app.process.config import configure
from tests.process.test_config import GOOD, faults, write_pool

AGAIN = """
[tiers.again]
pool = ["small"]
conductor = { kind = "fixed", again = true }
limits = { rounds = 2 }

[tiers.deep]
pool = ["small"]
conductor = { kind = "model", worker = "small" }
efforts.low = { rounds = 1 }
efforts.high = { rounds = 3, depth = 2 }
"""


def test_rounds_are_limits_of_a_tier_and_of_its_effort_levels(tmp_path: Path) -> None:
    catalog = configure(write_pool(tmp_path, GOOD + AGAIN)).catalog
    assert {limits.rounds for limits in catalog.tiers["again"].efforts.values()} == {2}
    assert catalog.tiers["again"].conductor.again
    deep = catalog.tiers["deep"].efforts
    assert (deep["low"].rounds, deep["high"].rounds, deep["max"].rounds) == (1, 3, 3)
    assert (deep["low"].depth, deep["high"].depth, deep["max"].depth) == (0, 2, 2)
    assert {limits.rounds for name in ("baton-mini",) for limits in catalog.tiers[name].efforts.values()} == {1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (", again = true }", " }", "tiers.again.limits.rounds: has no effect with a fixed conductor"),
        (
            'fixed", again = true }\nlimits = { rounds = 2 }',
            'selector" }\nlimits = { rounds = 3 }',
            "tiers.again.limits.rounds: is at most 2 with a selector",
        ),
        ("limits = { rounds = 2 }", "", "tiers.again.conductor.again: needs a second round; set rounds = 2"),
        ("rounds = 2", "rounds = 2, depth = 1", "tiers.again.limits.depth: has no effect with a conductor that names"),
        (
            '"small" }\nefforts',
            '"small", prompt = "compact" }\nefforts',
            "efforts.high.depth: has no effect with a conductor",
        ),
        ("depth = 2", "depth = 5", "tiers.deep.efforts.high.depth: must be less than or equal to 4"),
        ("rounds = 2", "rounds = 9", "tiers.again.limits.rounds: must be less than or equal to 8; correct the value"),
        ('"small" }\nefforts', '"small", again = true }\nefforts', "tiers.deep.conductor: does not use again"),
        (
            '"small" }\nefforts',
            '"small", prompt = "compact" }\nefforts',
            "tiers.deep.efforts.high.rounds: has no effect",
        ),
        ("again = true }", "again = true, reasons = true }", "tiers.again.conductor: does not use reasons"),
        (
            '"small" }\nefforts',
            '"small", prompt = "compact", reasons = true }\nefforts',
            "tiers.deep.conductor: asks for reasons, which only",
        ),
        ("again = true }", 'again = true, prompt = "compact" }', "tiers.again.conductor: does not use prompt"),
    ],
)
def test_rounds_that_nobody_would_open_are_faults(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in AGAIN
    all_faults = "\n".join(faults(write_pool(tmp_path, GOOD + AGAIN.replace(old, new))))
    assert message in all_faults
