"""The part of a tenant's ratings in the posterior that all tenants share, and its use by other tenants."""

import math

import pytest
from msgspec.structs import replace

from app.conductor.protocol import Brief, RequestEmbedding
from app.conductor.selector import Selector
from app.core.message.chat import Message, Task, Text
from app.core.plan.templates import arm_of_workers, arms
from app.core.pool.catalog import Card, Limits, Price, SelectorSpec, Worker
from app.core.rating.features import features
from app.core.rating.posterior import PossibleChange, Posterior, Rating, estimates, from_json, update_posterior
from app.core.rating.published_posterior import OWN_RATINGS, Beliefs, PublishedPosterior
from app.core.rating.tenancy import join_posteriors, update_own_part

DAY = 86_400.0
POOL = tuple(Worker(name, "provider", name, Price(1_000_000, 1_000_000), Card()) for name in ("ant", "bee"))
SPEC = SelectorSpec(templates=("answer",), cost=0.0)
EMBEDDING = RequestEmbedding()
QUESTIONS = ("Sum 2 and 3", "Write a poem", "Name the day after 3 May 2024", "Sort these words")


def ratings(count: int, good: str, at: float = DAY, step: float = 60.0) -> list[Rating]:
    """Ratings of both workers in turn: one of them is always right."""
    all_ratings = []
    for n in range(count):
        name = POOL[n % 2].name
        seen = features(QUESTIONS[n // 2 % len(QUESTIONS)])
        all_ratings.append(Rating(arm_of_workers("answer", [name]), seen, float(name == good), 100, at + step * n))
    return all_ratings


def means(posterior: Posterior, question: str = "Sum 4 and 7") -> list[float]:
    all_estimates = estimates(posterior, SPEC, arms(SPEC, POOL, 1), POOL, features(question))
    return [round(estimate.mean, 9) for estimate in all_estimates] + [
        round(estimate.deviation, 9) for estimate in all_estimates
    ]


@pytest.mark.parametrize("step", [60.0, 7_000.0])
def test_a_tenants_own_part_and_the_shared_posterior_are_what_was_learned_from_both(step: float) -> None:
    shared = Posterior()
    for rating in ratings(10, "ant"):
        shared = update_posterior(shared, SPEC, POOL, rating)
    own = Posterior()
    own_ratings = ratings(20, "bee", at=shared.at, step=step)
    for first in range(0, len(own_ratings), 7):
        own = update_own_part(shared, own, SPEC, POOL, own_ratings[first : first + 7])
    whole = shared
    for given_rating in own_ratings:
        whole = update_posterior(whole, SPEC, POOL, given_rating)
    close = 1e-9 if step < 3_600 else 0.02
    assert means(join_posteriors(shared, own)) == pytest.approx(means(whole), abs=close)
    assert (own.ratings, join_posteriors(shared, own).ratings) == (20, 30)
    assert from_json(own.to_json()) == own


def test_a_change_that_a_tenant_has_ruled_out_is_not_suspected_again_from_the_shared_evidence() -> None:
    shared = Posterior()
    for rating in ratings(10, "ant"):
        shared = update_posterior(shared, SPEC, POOL, rating)
    shared = replace(shared, possible=PossibleChange(evidence={"main:ant=ant": 0.01}, ratings=5.0))
    assert join_posteriors(shared, Posterior()).possible == shared.possible
    own = update_own_part(shared, Posterior(), SPEC, POOL, ratings(1, "ant", at=shared.at))
    assert own.possible == PossibleChange()
    assert join_posteriors(shared, own).possible == PossibleChange()
    assert from_json(own.to_json()) == own


def test_an_own_part_fades_back_to_the_shared_posterior() -> None:
    own = update_own_part(Posterior(), Posterior(), SPEC, POOL, ratings(30, "bee"))
    late = ratings(1, "bee", at=DAY * 4_000)
    faded = update_own_part(Posterior(), own, SPEC, POOL, late)
    alone = update_own_part(Posterior(), Posterior(), SPEC, POOL, late)
    assert means(join_posteriors(Posterior(), faded)) == pytest.approx(
        means(join_posteriors(Posterior(), alone)), abs=1e-3
    )


def standing(good: str) -> PublishedPosterior:
    part = update_own_part(Posterior(), Posterior(), SPEC, POOL, ratings(60, good))
    return PublishedPosterior(join_posteriors(Posterior(), part), 1, good)


@pytest.mark.parametrize("count", [1, 3, 49, 50, 51, 300])
def test_each_other_tenant_decides_at_most_its_share_however_many_there_are(count: int) -> None:
    peers = (standing("ant"),) * count
    fresh, experienced = (Beliefs(PublishedPosterior(), ratings, peers) for ratings in (0, OWN_RATINGS))
    assert fresh.lent(0.02) / count <= 0.02 + 1e-12
    assert fresh.lent(0.02) <= 1
    assert experienced.lent(0.02) == fresh.lent(0.02) / 2, "who has rated enough needs the others less"
    assert Beliefs().lent(0.02) == 0


def brief(tenant: str) -> Brief:
    limits = Limits(steps=1, usd=10**9, output_tokens=100)
    return Brief(Task((Message("user", (Text("Sum 4 and 7"),)),)), POOL, limits, 10**9, tenant=tenant)


def choose_often(beliefs: Beliefs, spec: SelectorSpec, count: int, *, explores: bool = True) -> tuple[float, set[str]]:
    """The share of choices of `answer bee`, and the posteriors that decided."""
    selector = Selector("tier", spec, lambda _: beliefs)
    decisions = [
        selector.choose(brief("acme"), f"{n}", explores=explores, asks=False, embedding=EMBEDDING) for n in range(count)
    ]
    bees = sum(decision.choice.action == "answer bee" for decision in decisions)
    return bees / count, {decision.version for decision in decisions}


def test_inverted_ratings_of_another_tenant_move_the_choices_by_no_more_than_its_share() -> None:
    """One tenant has learned that the bee is right; another one says the opposite of everything."""
    honest, inverted = standing("bee"), standing("ant")
    spec = replace(SPEC, explore=0.0, peers=0.25)
    alone, _ = choose_often(Beliefs(honest, 0), spec, 400)
    poisoned, versions = choose_often(Beliefs(honest, 0, (inverted,)), spec, 400)
    noise = 4 * math.sqrt(0.25 * 0.75 / 400)
    assert 0.1 < alone - poisoned < 0.25 + noise
    assert len(versions) == 2, "the decision names the posterior that decided"
    assert choose_often(Beliefs(honest, 0, (inverted,)), spec, 50, explores=False) == (1.0, {honest.version})
    assert choose_often(Beliefs(honest, 0, (inverted,)), replace(spec, peers=0.0), 50)[1] == {honest.version}


def test_a_weighted_choice_is_repeated_from_its_seed() -> None:
    beliefs = Beliefs(standing("bee"), 0, (standing("ant"),))
    selector = Selector("tier", replace(SPEC, peers=0.5), lambda _: beliefs)
    twice = [selector.choose(brief("acme"), "seed", explores=True, asks=False, embedding=EMBEDDING) for _ in range(2)]
    assert twice[0].version == twice[1].version
    assert twice[0].choice == twice[1].choice
