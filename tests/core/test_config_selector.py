"""The pool file of a tier whose conductor is a selector."""

from pathlib import Path

import pytest

from app.config import configure
from app.core.pool import SelectorSpec
from app.core.snapshot import restored, snapshot
from tests.core.test_config import GOOD, faults, written

LEARNS = """
[tiers.learns]
pool = ["small", "large"]

[tiers.learns.conductor]
kind = "selector"
templates = ["answer", "judge"]
checkers = ["large"]
worker = "large"
cost = 0.5
full_usd = "0.01"
"""


def test_a_selector_is_data_of_its_tier(tmp_path: Path) -> None:
    catalog = configure(written(tmp_path, GOOD + LEARNS)).catalog
    conductor = catalog.tiers["learns"].conductor
    assert (conductor.kind, conductor.worker) == ("selector", "large")
    asked = SelectorSpec(templates=("answer", "judge"), checkers=("large",), cost=0.5, full_usd=10_000)
    assert conductor.selector == asked
    assert (asked.explore, asked.decay) == (0.05, 0.995)
    assert catalog.tiers["baton-mini"].conductor.selector is None
    assert restored(snapshot(catalog)) == catalog


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"judge"]', '"judge", "guess"]', "tiers.learns.conductor.templates.2: must be 'answer', "),
        ('"answer", "judge"', '"answer", "answer"', "lists answer more than once"),
        ('checkers = ["large"]', 'planners = ["medium"]', "the selector's planner medium is not in the tier's pool"),
        ("cost = 0.5", "explore = 1.5", "tiers.learns.conductor.explore: must be less than or equal to 1"),
        ("cost = 0.5", 'shape = "single"', 'does not use shape; remove it, or use kind = "fixed"'),
        ('kind = "selector"', 'kind = "model"', 'remove it, or use kind = "selector"'),
        ('full_usd = "0.01"', "[tiers.learns.limits]\nrounds = 2", "is of no use to a selector conductor"),
        ('worker = "large"', 'worker = "gone"', "there is no worker gone"),
    ],
)
def test_what_a_selector_cannot_be(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in LEARNS
    assert told in "\n".join(faults(written(tmp_path, GOOD + LEARNS.replace(old, new))))
