"""The pool file of a tier that is compared with a shadow, and the conditions of its promotion."""

from pathlib import Path

import pytest

from app.core.pool.catalog import PromotionSpec, ShadowSpec
from app.core.pool.snapshot import restore_catalog, snapshot
from app.process.config import configure
from tests.process.test_config import GOOD, faults, write_pool

TRIED = """
[tiers.tried]
pool = ["small", "large"]
conductor = { kind = "model", worker = "large" }

[tiers.tried.shadow]
tier = "baton-mini"
share = 0.1
mode = "plan"
usd_per_day = "2.50"
max_waiting = 7

[tiers.tried.promotion]
min_pairs = 50
max_cost_increase = 0.1
min_success_difference = -0.02
"""


def test_a_shadow_and_its_conditions_are_data_of_the_tier(tmp_path: Path) -> None:
    catalog = configure(write_pool(tmp_path, GOOD + TRIED)).catalog
    tier = catalog.tiers["tried"]
    assert tier.shadow == ShadowSpec(0.1, tier="baton-mini", mode="plan", usd_per_day=2_500_000, max_waiting=7)
    assert tier.shadow.subject == "tier baton-mini"
    assert tier.promotion == PromotionSpec(50, min_success_difference=-0.02, max_cost_increase=0.1)
    assert catalog.tiers["baton-mini"].shadow is None
    assert restore_catalog(snapshot(catalog)) == catalog


def test_a_name_alone_is_that_of_a_tier_or_else_of_a_worker(tmp_path: Path) -> None:
    short = '\n[tiers.tried]\npool = ["small"]\nshadow = "{}"\n'
    shadow = configure(write_pool(tmp_path, GOOD + short.format("baton-mini"))).catalog.tiers["tried"].shadow
    assert shadow == ShadowSpec(0.05, tier="baton-mini")
    alone = configure(write_pool(tmp_path, GOOD + short.format("large"))).catalog.tiers["tried"].shadow
    assert alone == ShadowSpec(0.05, worker="large")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('tier = "baton-mini"', 'tier = "tried"', "tiers.tried.shadow.tier: is the tier itself"),
        ('tier = "baton-mini"', 'tier = "gone"', "there is no tier gone"),
        ('tier = "baton-mini"', 'worker = "gone"', "there is no worker gone"),
        ('tier = "baton-mini"', 'worker = "large"', "tiers.tried.shadow.mode: has no effect with a worker"),
        ('tier = "baton-mini"', "", "must name one of tier, conductor and worker"),
        ('tier = "baton-mini"', 'tier = "baton-mini"\nworker = "large"', "must name one of tier, conductor and worker"),
        ("share = 0.1", "share = 0", "tiers.tried.shadow.share: must be greater than 0"),
        ("min_pairs = 50", "min_pairs = 1", "tiers.tried.promotion.min_pairs: must be greater than or equal to 2"),
    ],
)
def test_what_a_shadow_cannot_be(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TRIED
    assert message in "\n".join(faults(write_pool(tmp_path, GOOD + TRIED.replace(old, new))))


def test_only_a_model_has_versions_to_try(tmp_path: Path) -> None:
    text = '\n[tiers.tried]\npool = ["small"]\nshadow = { conductor = "v2" }\n'
    assert "no model conducts this tier" in "\n".join(faults(write_pool(tmp_path, GOOD + text)))
