"""Calibration: intervals that hold for few trials, trials of a worker as it is now, and cards that tell of them."""

import pytest
from msgspec.structs import replace

from app.core.pool.catalog import CalibrationResult, Card, Catalog, Worker
from app.core.pool.snapshot import restore_catalog, seal_catalog, snapshot
from app.core.rating.calibration import (
    Rate,
    Trial,
    add_measurements,
    are_indistinguishable,
    of_worker,
    rates,
)

LUNA = Worker("luna", "openai", "gpt-6-luna", card=Card(strengths=("general",)))
CATALOG = seal_catalog(Catalog({}, {"luna": LUNA, "sol": replace(LUNA, name="sol", model="sol")}, {}, {}, ""))


def trial(task: str, score: float, **changes: object) -> Trial:
    """One of luna's."""
    family = task.partition("-")[0]
    whole = {
        "worker": "luna", "model": "gpt-6-luna", "version": "calibration-1", "task": task, "domain": "numbers",
        "family": family, "level": 0, "question": "?", "run": "run", "at": 5.0, "score": score, "usd": 7,
        "seconds": 1.0,
    }  # fmt: skip
    return Trial(**{**whole, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("passed", "tried", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (9, 18, 0.290, 0.710), (81, 263, 0.255, 0.366)],
)
def test_the_interval_is_wilsons(passed: int, tried: int, low: float, high: float) -> None:
    """The last ones are of Newcombe's table (1998) and of the formula by hand."""
    assert Rate(passed, tried).ends == pytest.approx((low, high), abs=1e-3)


def test_rates_are_counted_by_group() -> None:
    rates_by_group = rates(
        [trial("sum-0-0", 1.0), trial("sort-0-0", 0.0), trial("sum-0-1", 0.5)], lambda trial: trial.family
    )
    assert rates_by_group == {"sum": Rate(1.5, 2), "sort": Rate(0.0, 1)}


def test_trials_of_another_model_or_of_older_tasks_say_nothing_of_a_worker() -> None:
    trials = [
        trial("sum-0-0", 1.0, at=9.0),
        trial("sum-0-1", 1.0, model="gpt-5-luna", at=10.0),
        trial("sum-0-2", 1.0, version="calibration-0", at=3.0),
        trial("sum-0-3", 1.0, worker="sol", model="sol"),
    ]
    assert of_worker(trials, LUNA) == trials[:1]
    assert of_worker([], LUNA) == []


def test_cards_say_what_was_measured_and_nothing_else_changes() -> None:
    trials = [trial("sort-0-0", 0.0, domain="words"), trial("sum-0-0", 1.0), trial("sum-0-1", 0.0)]
    measured_catalog = add_measurements(CATALOG, trials)
    assert measured_catalog.workers["luna"].card.measured == (
        CalibrationResult("numbers", 1.0, 2),
        CalibrationResult("words", 0.0, 1),
    )
    assert measured_catalog.workers["sol"] == CATALOG.workers["sol"]
    assert measured_catalog.digest != CATALOG.digest
    assert add_measurements(measured_catalog, trials) == measured_catalog
    assert add_measurements(measured_catalog, []) == CATALOG
    assert add_measurements(CATALOG, []) is CATALOG
    assert restore_catalog(snapshot(measured_catalog)) == measured_catalog, (
        "an auditor finds the cards as they were shown"
    )


def test_workers_that_were_not_tried_are_not_told_apart_and_are_no_fault() -> None:
    assert not are_indistinguishable({"luna": [], "sol": []})
    assert not are_indistinguishable({"luna": [trial("sum-0-0", 1.0)], "sol": []})
    assert are_indistinguishable({"luna": [trial("sum-0-0", 1.0)], "sol": [trial("sum-0-0", 1.0, worker="sol")]})
