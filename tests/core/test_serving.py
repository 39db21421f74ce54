"""The subjects that can serve a tier, and the tier while one of them serves it."""

import pytest
from msgspec.structs import replace

from app.core.plan.arms import tier_of
from app.core.pool.catalog import (
    ApprovalRule,
    Catalog,
    ConductorSpec,
    Limits,
    PromotionSpec,
    ProviderSpec,
    ShadowSpec,
    Tier,
    Worker,
)
from app.core.pool.policy import Overrides, translate_overrides
from app.core.pool.serving import objection, serve_tier, subject_named, tier_in

OWN = Tier(
    "own",
    ("a", "b"),
    ConductorSpec("fixed", workers=("a",)),
    "a",
    {"low": Limits(steps=1, usd=10), "medium": Limits(steps=5, usd=100, rounds=2)},
    description="Their own.",
    shadow=ShadowSpec(0.5, tier="next"),
    promotion=PromotionSpec(),
)
NEXT = Tier("next", ("b", "c"), ConductorSpec("model", worker="c"), "c", {"medium": Limits(steps=3, usd=200)})
POOL = Catalog(
    {"p": ProviderSpec("p", "openai"), "e": ProviderSpec("e", "embeddings")},
    {name: Worker(name, "p", name) for name in ("a", "b", "c", "next")} | {"vectors": Worker("vectors", "e", "v")},
    {"own": OWN, "next": NEXT},
    {},
    "",
)


def test_a_tier_keeps_its_name_and_its_rules_while_another_one_serves_it() -> None:
    tier = serve_tier(POOL, OWN, "tier next")
    assert tier is not None
    assert (tier.pool, tier.conductor, tier.fallback) == (NEXT.pool, NEXT.conductor, NEXT.fallback)
    assert (tier.name, tier.effort, tier.description) == ("own", "medium", "Their own.")
    assert (tier.shadow, tier.promotion, tier.served_by) == (OWN.shadow, OWN.promotion, "tier next")
    assert tier.learns_as == "next"


def test_the_limits_are_the_lower_ones_of_both_at_each_level_of_the_tier() -> None:
    tier = serve_tier(POOL, OWN, "tier next")
    assert tier is not None
    assert set(tier.efforts) == {"low", "medium"}
    assert [(effort.steps, effort.usd, effort.rounds) for effort in tier.efforts.values()] == [(1, 10, 1), (3, 100, 1)]


def test_an_approval_is_the_tiers_own_or_else_the_subjects() -> None:
    asks, other = ApprovalRule(always=True), ApprovalRule(above_usd=5)
    careful = replace(POOL, tiers={"own": OWN, "next": replace(NEXT, approval=other)})
    for own, expected in ((None, other), (asks, asks)):
        tier = serve_tier(careful, replace(OWN, approval=own), "tier next")
        assert tier is not None
        assert tier.approval == expected


@pytest.mark.parametrize("rule", [ApprovalRule(workers=("c",)), ApprovalRule(providers=("p",))])
def test_no_subject_whose_conductor_the_tiers_approval_names(rule: ApprovalRule) -> None:
    """It would read the task before anybody can approve a plan."""
    careful = replace(OWN, approval=rule)
    pool = replace(POOL, tiers={"own": careful, "next": NEXT})
    assert serve_tier(pool, careful, "tier next") is None
    assert objection(pool, "own", "tier next").startswith("c, which reads its tasks before a plan can be approved,")
    assert serve_tier(pool, careful, "worker c") is not None, "its plan is approved before it is called"


def test_a_worker_answers_alone_and_once() -> None:
    tier = serve_tier(POOL, OWN, "worker c")
    assert tier is not None
    assert (tier.pool, tier.fallback, tier.learns_as) == (("c",), "c", "own")
    assert (tier.conductor.kind, tier.conductor.workers) == ("fixed", ("c",))
    assert [effort.rounds for effort in tier.efforts.values()] == [1, 1]


@pytest.mark.parametrize("subject", ["tier gone", "worker gone", "conductor c", "next", ""])
def test_without_the_subject_the_tiers_own_definition_counts(subject: str) -> None:
    assert serve_tier(POOL, OWN, subject) is None
    assert tier_of(POOL, "own", "own", subject) == OWN
    assert tier_of(POOL, "gone", "gone", "tier next") is None


def test_names_alone_are_tiers_or_else_workers() -> None:
    subjects = {name: subject_named(POOL, name) for name in ("next", "a", "gone", "worker next")}
    assert subjects == {"next": "tier next", "a": "worker a", "gone": "tier gone", "worker next": "worker next"}
    assert (tier_in("tier own"), tier_in("planner")) == ("own", "")


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("tier next", ""),
        ("worker c", ""),
        ("tier own", "is the tier itself"),
        ("tier gone", "no tier gone"),
        ("worker vectors", "makes embeddings"),
    ],
)
def test_a_subject_must_be_able_to_answer(subject: str, words: str) -> None:
    reason = objection(POOL, "own", subject)
    assert (words in reason, bool(reason)) == (True, bool(words))


def test_a_choice_of_workers_is_about_the_subject_only_if_it_has_one_of_them() -> None:
    def override(**overrides: object) -> Overrides | None:
        return translate_overrides(OWN, NEXT, Overrides(**overrides))  # type: ignore[arg-type]

    assert override() == Overrides()
    assert override(allow=frozenset("ab")) == Overrides(allow=frozenset("b"))
    assert override(deny=frozenset("ac")) == Overrides(deny=frozenset("c"))
    assert override(pin="c") == Overrides(pin="c")
    assert override(allow=frozenset("a")) is None
    assert override(pin="a") is None
    assert override(deny=frozenset("x")) is None, "a name that nobody knows is a fault of the request"
