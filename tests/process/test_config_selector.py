"""The pool file of a tier whose conductor is a selector."""

from pathlib import Path

import pytest

from app.core.pool.catalog import SelectorSpec
from app.core.pool.snapshot import restore_catalog, snapshot
from app.process.config import configure
from tests.process.test_config import GOOD, faults, write_pool

LEARNS = """
[tiers.learns]
pool = ["small", "large"]

[tiers.learns.conductor]
kind = "selector"
templates = ["answer", "judge"]
checkers = ["large"]
worker = "large"
cost = 0.5
trusted = ["ops"]
raters = { robot = 0.25 }
daily = 100
full_usd = "0.01"
"""


def test_a_selector_is_data_of_its_tier(tmp_path: Path) -> None:
    catalog = configure(write_pool(tmp_path, GOOD + LEARNS)).catalog
    conductor = catalog.tiers["learns"].conductor
    assert (conductor.kind, conductor.worker) == ("selector", "large")
    expected = SelectorSpec(
        templates=("answer", "judge"),
        checkers=("large",),
        cost=0.5,
        full_usd=10_000,
        trusted=("ops",),
        raters=(("robot", 0.25),),
        daily=100,
    )
    assert conductor.selector == expected
    assert (expected.explore, expected.decay) == (0.05, 0.995)
    assert catalog.tiers["baton-mini"].conductor.selector is None
    assert restore_catalog(snapshot(catalog)) == catalog


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"judge"]', '"judge", "guess"]', "tiers.learns.conductor.templates.2: must be 'answer', "),
        ('"answer", "judge"', '"answer", "answer"', "lists answer more than once"),
        ('checkers = ["large"]', 'planners = ["medium"]', "the selector's planner medium is not in the tier's pool"),
        ("cost = 0.5", "explore = 1.5", "tiers.learns.conductor.explore: must be less than or equal to 1"),
        ("daily = 100", "peers = 1.5", "tiers.learns.conductor.peers: must be less than or equal to 1"),
        ("robot = 0.25", "robot = 2", "tiers.learns.conductor.raters.robot: must be less than or equal to 1"),
        ("cost = 0.5", 'shape = "single"', 'does not use shape; remove it, or use kind = "fixed"'),
        ('kind = "selector"', 'kind = "model"', 'remove it, or use kind = "selector"'),
        ('full_usd = "0.01"', "[tiers.learns.limits]\nrounds = 3", "is at most 2 with a selector"),
        ('worker = "large"', 'worker = "gone"', "there is no worker gone"),
    ],
)
def test_what_a_selector_cannot_be(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LEARNS
    assert message in "\n".join(faults(write_pool(tmp_path, GOOD + LEARNS.replace(old, new))))


def test_arms_are_counted_with_their_planners_and_checkers(tmp_path: Path) -> None:
    """Each of the workers answers, beside each of them that may plan, and each that may check."""

    def pool_file(count: int, planners: str = "") -> dict[str, str]:
        text = GOOD.replace('"all"', '["small", "large"]')
        for place in range(count):
            text += (
                f'[workers.w{place}]\nprovider = "openai"\nmodel = "m{place}"\nprice = {{ input = 1, output = 1 }}\n'
            )
            text += 'strengths = ["planning", "checking"]\n'
        pool = [f"w{place}" for place in range(count)]
        text += f'[tiers.many]\npool = {pool}\nconductor = {{ kind = "selector", worker = "w0"{planners} }}\n'
        return write_pool(tmp_path, text)

    assert len(configure(pool_file(11)).catalog.tiers["many"].pool) == 11
    (fault,) = faults(pool_file(12))
    assert "tiers.many.conductor.templates: make 301 arms with this pool" in fault
    assert len(configure(pool_file(12, ', planners = ["w0"]')).catalog.tiers["many"].pool) == 12


LOOKS = """
[providers.vectors]
format = "embeddings"
base_url = "http://127.0.0.1:9/v1"
options = { dimensions = 384 }

[workers.eye]
provider = "vectors"
model = "eye-1"
pooled = false

[tiers.looks]
pool = ["small", "large"]
conductor = { kind = "selector", embedder = "eye", patience = 0.5 }
"""


def test_a_selector_may_look_at_embeddings(tmp_path: Path) -> None:
    catalog = configure(write_pool(tmp_path, GOOD + LOOKS)).catalog
    spec = catalog.tiers["looks"].conductor.selector
    assert spec == SelectorSpec(embedder="eye", patience=0.5)
    assert restore_catalog(snapshot(catalog)) == catalog


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("options = { dimensions = 384 }\n", "", "providers.vectors.options: must say how many"),
        ("dimensions = 384", "dimensions = 0", "providers.vectors.options: must say how many"),
        ("dimensions = 384", f"dimensions = '{'9' * 5000}'", "providers.vectors.options: must say how many"),
        ('embedder = "eye"', 'embedder = "ear"', "looks.conductor.embedder: there is no worker ear"),
        ('embedder = "eye"', 'embedder = "small"', "the worker small makes no embeddings"),
        ('embedder = "eye"', 'worker = "eye"', "looks.conductor.worker: the worker eye makes embeddings"),
        ('["small", "large"]', '["small", "eye"]', "looks.pool: the worker eye makes embeddings and cannot answer"),
        ("patience = 0.5", "patience = 0", "looks.conductor.patience: must be greater than 0"),
        ('kind = "selector", ', 'kind = "fixed", ', "does not use embedder, patience"),
    ],
)
def test_who_makes_embeddings_does_nothing_else(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LOOKS
    assert message in "\n".join(faults(write_pool(tmp_path, GOOD + LOOKS.replace(old, new))))


def test_who_makes_embeddings_does_not_plan_for_an_evaluation(tmp_path: Path) -> None:
    text = GOOD + LOOKS + '[evaluation]\narms = true\nconductors = ["eye"]\n'
    assert "evaluation.conductors: the worker eye makes embeddings" in "\n".join(faults(write_pool(tmp_path, text)))
