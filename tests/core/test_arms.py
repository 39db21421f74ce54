"""Model ids of arms: what each one means, and that none means more than its tier may."""

import pytest
from msgspec.structs import replace

from app.core.plan.arms import list_arm_ids, steps_needed, tier_for, tier_of
from app.core.pool.catalog import Catalog, ConductorSpec, Evaluation, Limits, Tier, Worker
from app.core.pool.snapshot import restore_catalog, seal_catalog, snapshot

EFFORTS = {"low": Limits(steps=2), "medium": Limits(steps=5, rounds=3)}
ULTRA = Tier("ultra", ("a", "b", "c:d"), ConductorSpec("model", "planner", temperature=0.3), "b", EFFORTS)
MINI = Tier("mini", ("a",), ConductorSpec("fixed"), "a", EFFORTS, effort="low")
WORKERS = {name: Worker(name, "stub", name) for name in ("a", "b", "c:d", "planner", "trained", "other")}
CATALOG = seal_catalog(
    Catalog({}, WORKERS, {"ultra": ULTRA, "mini": MINI}, {"u": "ultra"}, "", Evaluation(True, ("trained",)))
)


def arm(model: str) -> Tier:
    tier = tier_for(CATALOG, model)
    assert tier is not None
    return tier


@pytest.mark.parametrize(
    ("model", "shape", "workers", "width"),
    [
        ("ultra:single:a", "single", ("a",), 1),
        ("u:single:c:d", "single", ("c:d",), 1),
        ("ultra:sc:4", "self_consistency", ("b",), 5),
        ("ultra:sc:2:c:d", "self_consistency", ("c:d",), 3),
        ("ultra:moa:3", "fan_out", ("a", "b", "c:d"), 4),
        ("ultra:moa:2:b+a", "fan_out", ("b", "a"), 3),
        ("ultra:static:pev", "chain", ("a", "b", "c:d"), 3),
        ("ultra:static:pev:a+b+a", "chain", ("a", "b", "a"), 3),
    ],
)
def test_a_fixed_arm_has_its_shape_over_the_workers_that_it_names(
    model: str, shape: str, workers: tuple[str, ...], width: int
) -> None:
    tier = arm(model)
    assert (tier.conductor.shape, tier.conductor.workers, steps_needed(tier.conductor)) == (shape, workers, width)
    assert (tier.name, tier.conductor.whole) == ("ultra", True)
    assert set(tier.pool) == set(workers), "nobody else answers in its name"
    assert tier.fallback in tier.pool
    assert {name: limits.steps for name, limits in tier.efforts.items()} == {"low": 2, "medium": 5}
    assert {limits.rounds for limits in tier.efforts.values()} == {1}


def test_a_conducted_arm_differs_by_the_model_alone() -> None:
    tier = arm("ultra:conductor:trained")
    assert tier == replace(ULTRA, conductor=ConductorSpec("model", "trained", temperature=0.3))
    assert arm("ultra:conductor:planner") == ULTRA
    compact = replace(MINI, name="compact", conductor=ConductorSpec("model", "trained", prompt="compact"))
    served = replace(CATALOG, tiers={**CATALOG.tiers, "compact": compact})
    tier = tier_for(served, "ultra:conductor:trained")
    assert tier == replace(ULTRA, conductor=compact.conductor), "it is asked as the tier that names it asks it"
    assert arm("mini:conductor:trained").conductor == ConductorSpec("model", "trained")
    assert arm("ultra:random").conductor == ConductorSpec("random")
    assert arm("ultra:random").pool == ULTRA.pool


@pytest.mark.parametrize(
    "model",
    [
        *(f"ultra:{arm}" for arm in ("single:other", "single:planner", "single:", "sc:", "sc:0", "sc:05", "sc:17")),
        *(f"ultra:{arm}" for arm in ("sc:\u0663", "sc:" + "1" * 9_999, "moa:2:a+other", "moa:2:a+", "static:vep")),
        *(f"ultra:{arm}" for arm in ("conductor:other", "oracle", "random:", "random:7", "", "best")),
        "nobody:random",
    ],
)
def test_what_names_no_arm_is_no_model(model: str) -> None:
    assert tier_for(CATALOG, model) is None


def test_arms_are_there_only_where_the_operator_wants_them() -> None:
    off = replace(CATALOG, evaluation=Evaluation())
    assert tier_for(off, "ultra:random") is None
    assert list(list_arm_ids(off, ULTRA)) == []
    assert tier_for(off, "u") is ULTRA
    assert snapshot(off) != snapshot(CATALOG)
    assert restore_catalog(snapshot(CATALOG)) == CATALOG


def test_whatever_is_listed_is_served_and_fits() -> None:
    for tier in (ULTRA, MINI):
        names = list(list_arm_ids(CATALOG, tier))
        for model in names:
            assert steps_needed(arm(model).conductor) <= tier.efforts[tier.effort].steps
    assert names == ["mini:single:a", "mini:conductor:trained", "mini:random"]
    chosen = replace(MINI, conductor=ConductorSpec("selector", "planner"))
    served = replace(CATALOG, tiers={"mini": chosen})
    assert "mini:conductor:planner" in list_arm_ids(served, chosen), (
        "the model itself is another arm than who may choose it"
    )
    assert {"ultra:sc:4", "ultra:moa:3", "ultra:conductor:trained"} < set(list_arm_ids(CATALOG, ULTRA))


def test_a_run_keeps_its_arm_as_long_as_there_is_one() -> None:
    assert tier_of(CATALOG, "ultra", "u:sc:2") == arm("ultra:sc:2")
    assert tier_of(CATALOG, "ultra", "ultra:single:gone") is ULTRA
    assert tier_of(CATALOG, "ultra", "mini:random") is ULTRA
    assert tier_of(CATALOG, "gone", "ultra:random") is None
