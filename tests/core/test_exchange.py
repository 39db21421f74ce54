"""Workers that exchange what answers behind their names."""

import json
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from app.core.plan.templates import arm_named, arm_of_workers
from app.core.pool.catalog import Card, Price, SelectorSpec, Worker
from app.core.rating import exchange
from app.core.rating.exchange import Exchanges
from app.core.rating.features import features
from app.core.rating.posterior import PossibleChange, Posterior, Rating, estimates, fade_posterior, from_json
from app.core.rating.posterior import update_posterior as update
from app.core.rating.tenancy import join_posteriors, update_own_part

DAY = 86_400.0
ANT = Worker("ant", "provider", "small", Price(1_000_000, 1_000_000), Card(strengths=("poems",)))
BEE = Worker("bee", "provider", "large", Price(8_000_000, 8_000_000), Card(strengths=("sums",)))
CAT = Worker("cat", "provider", "small", Price(1_000_000, 1_000_000), Card())
POOL = (ANT, BEE, CAT)
SPEC = SelectorSpec(cost=0.0)
SUM, POEM = "What is the sum of 2 and 3?", "Write a poem on the sea"
GOOD, BAD = 0.9, 0.3
Skills = Mapping[str, tuple[float, float]]
"""By worker: the chance of a right sum, and of a good poem."""
SKILLS: Skills = {"ant": (BAD, GOOD), "bee": (GOOD, BAD), "cat": (BAD, BAD)}
EXCHANGED: Skills = {**SKILLS, "ant": SKILLS["bee"], "bee": SKILLS["ant"]}
NAMES = {"ant=small": "bee=large", "bee=large": "ant=small"}


def play(count: int, skills: Skills, seed: int, at: float = DAY) -> list[Rating]:
    """Ratings of all workers in turn."""
    random, ratings = Random(seed), []
    for n in range(count):
        name, kind = POOL[n % 3].name, random.randrange(2)
        score = float(random.random() < skills[name][kind])
        ratings.append(Rating(arm_of_workers("answer", [name]), features((SUM, POEM)[kind]), score, 100, at + n))
    return ratings


def learn(posterior: Posterior, ratings: list[Rating]) -> Posterior:
    for rating in ratings:
        posterior = update(posterior, SPEC, POOL, rating)
    return posterior


@cache
def known() -> Posterior:
    """Return what is believed of the workers before any exchange."""
    posterior = learn(Posterior(), play(900, SKILLS, seed=1))
    return learn(posterior, [Rating(arm_named("plan-reason ant cat"), features(SUM), 0.0, 100, DAY)] * 9)


def mean(posterior: Posterior, arm: str, question: str = SUM) -> tuple[float, float]:
    (estimate,) = estimates(posterior, SPEC, [arm_named(arm)], POOL, features(question))
    return estimate.mean, estimate.deviation


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_exchange_are_known_again_without_learning_anew(seed: int) -> None:
    before = replace(known(), possible=None)
    after = learn(before, play(120, EXCHANGED, seed))
    assert after.exchanges.names == NAMES
    assert (after.changes, before.changes) == (before.changes + 1, before.changes)
    for question in (SUM, POEM):
        assert mean(after, "answer ant", question)[0] == pytest.approx(mean(before, "answer bee", question)[0], abs=0.6)
    back = learn(after, play(120, SKILLS, seed + 10))
    assert {name: back.exchanges.name(name) for name in NAMES} == {name: name for name in NAMES}
    assert back.exchanges.exchanged_since(after.exchanges) == ["ant", "bee"]


def test_all_that_is_known_of_a_worker_changes_places_and_its_card_with_it() -> None:
    before, after = known(), replace(known(), exchanges=Exchanges(NAMES))
    for question in (SUM, POEM, "Something else entirely, long and never seen before by anybody here"):
        for arm, other in (("answer ant", "answer bee"), ("plan-reason ant cat", "plan-reason bee cat")):
            assert mean(after, arm, question) == mean(before, other, question)
            assert mean(after, other, question) == mean(before, arm, question)
            assert mean(before, arm, question) != mean(before, other, question)
    assert mean(after, "answer cat") == mean(before, "answer cat")
    rated = update(after, SPEC, POOL, Rating(arm_named("answer ant"), features(SUM), 0.0, 100, DAY))
    assert rated.weights["main:ant=small"] == before.weights["main:ant=small"], "what the ant was is the bee's now"
    assert rated.weights["main:bee=large"] != before.weights["main:bee=large"]


def with_exchanges(names: Mapping[str, str], evidence: Mapping[str, float]) -> Posterior:
    return replace(known(), exchanges=Exchanges(names, evidence))


def exchanged() -> Posterior:
    return with_exchanges(NAMES, {"cat=small ant=small": 0.5})


@pytest.mark.parametrize(("of_ant", "of_bee", "found"), [(9.9, 1.5, True), (9.9, 1.4, False), (7.0, 1.5, False)])
def test_the_ratings_of_both_have_to_speak_for_an_exchange(of_ant: float, of_bee: float, found: bool) -> None:
    evidence = {"ant=small bee=large": of_ant, "bee=large ant=small": of_bee}
    right = Rating(arm_named("answer ant"), features(SUM), 1.0, 100, DAY)
    after = update(with_exchanges({}, evidence), SPEC, POOL, right)
    assert after.exchanges.names == (NAMES if found else {})
    assert (after.possible == PossibleChange()) == found, "the possible change begins anew"
    assert any(after.exchanges.evidence.values()) != found, "and the evidence"


def test_an_exchange_is_undone_by_the_ratings_of_one_of_both() -> None:
    right = Rating(arm_named("answer ant"), features(SUM), 1.0, 100, DAY)
    after = update(with_exchanges(NAMES, {"bee=large bee=large": 10.5}), SPEC, POOL, right)
    assert after.exchanges.names == NAMES, "a right sum is what the bee was known for"
    wrong = replace(right, score=0.0)
    after = update(with_exchanges(NAMES, {"bee=large bee=large": 9.5}), SPEC, POOL, wrong)
    assert after.exchanges.name("ant=small") == "ant=small"
    assert after.exchanges.name("bee=large") == "bee=large"


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_stay_as_they_are_do_not_exchange(seed: int) -> None:
    assert learn(known(), play(1_500, SKILLS, seed)).exchanges.names == {}


@pytest.mark.parametrize("seed", range(2))
def test_a_worker_that_has_only_become_worse_is_exchanged_with_nobody(seed: int) -> None:
    worse = {**SKILLS, "bee": (BAD, BAD)}
    ratings = play(900, worse, seed)
    after = learn(replace(known(), possible=None), ratings)
    assert after.exchanges.names == {}
    assert after.changes > known().changes, "the usual rule finds that it has changed"
    with patch.object(exchange, "LEAST_OF_EACH", -99.0):
        assert learn(replace(known(), possible=None), ratings).exchanges.names, "its own ratings alone would say so"


def test_the_first_ratings_of_a_selector_are_no_evidence() -> None:
    first = learn(Posterior(), play(exchange.FIRST_RATINGS, SKILLS, seed=1))
    assert first.exchanges == Exchanges()
    assert learn(first, play(1, SKILLS, seed=1)).exchanges != Exchanges()


def test_an_altered_rating_is_no_more_evidence() -> None:
    rating = replace(play(1, SKILLS, seed=1)[0], before=1.0)
    assert update(known(), SPEC, POOL, rating).exchanges == known().exchanges


def test_exchanges_are_the_same_after_they_were_stored() -> None:
    posterior = exchanged()
    assert from_json(posterior.to_json()) == posterior
    earlier: dict[str, Any] = json.loads(posterior.to_json())
    del earlier["exchanges"]
    assert from_json(json.dumps(earlier).encode()) == replace(posterior, exchanges=Exchanges())


def test_the_evidence_for_an_exchange_fades_and_a_found_one_stays() -> None:
    faded = fade_posterior(exchanged(), 0.5, exchanged().at + DAY)
    assert faded.exchanges == Exchanges(NAMES, {"cat=small ant=small": 0.25})


def test_an_exchange_that_a_tenant_has_found_belongs_to_it() -> None:
    shared, ratings = replace(known(), possible=None), play(150, EXCHANGED, seed=1)
    own = Posterior()
    for first in range(0, 150, 50):
        own = update_own_part(shared, own, SPEC, POOL, ratings[first : first + 50])
    whole = learn(shared, ratings)
    joined = join_posteriors(shared, own)
    assert own.exchanges.names == joined.exchanges.names == NAMES
    assert (own.changes, shared.exchanges.names) == (1, {})
    assert joined.exchanges.evidence == pytest.approx(whole.exchanges.evidence)
    for worker in POOL:
        assert mean(joined, f"answer {worker.name}") == pytest.approx(mean(whole, f"answer {worker.name}"), abs=1e-9)
    assert from_json(own.to_json()) == own
    back = update_own_part(shared, own, SPEC, POOL, play(120, SKILLS, seed=2, at=2 * DAY))
    assert join_posteriors(shared, back).exchanges.name("ant=small") == "ant=small"


def test_a_tenant_follows_an_exchange_that_all_tenants_learn_of() -> None:
    own = update_own_part(known(), Posterior(), SPEC, POOL, play(30, SKILLS, seed=1))
    evidence = own.exchanges.evidence
    assert own.exchanges.names == {}
    assert evidence
    joined = join_posteriors(exchanged(), own).exchanges
    assert joined.names == NAMES
    assert joined.evidence == {"cat=small ant=small": 0.5, **evidence}
    again = update_own_part(exchanged(), own, SPEC, POOL, play(1, EXCHANGED, seed=1))
    assert again.exchanges.names == {}, "it stays the shared one"


def test_the_own_evidence_of_a_tenant_fades() -> None:
    own = replace(Posterior(), exchanges=exchanged().exchanges, at=DAY)
    faded = update_own_part(known(), own, SPEC, POOL, [replace(play(1, SKILLS, 1)[0], at=DAY * 4_000, before=1.0)])
    assert faded.exchanges.names == NAMES
    assert faded.exchanges.evidence["cat=small ant=small"] < 0.01
