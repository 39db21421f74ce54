"""World 2: frozen constants, tasks in many words, workers known by cards, pools that are held out by a hash."""

import math
import re
from collections import defaultdict
from itertools import combinations
from random import Random

from app.lab.world2 import constants as figures
from app.lab.world2 import tasks as composed
from app.lab.world2.constants import DOMAINS, constants
from app.lab.world2.workers import (
    HELD_OUT_FACTORS,
    PRICE_FACTORS,
    Pool,
    draw_pool,
    is_held_out,
    logistic,
    pass_rate,
    worker_profiles,
)

# The constants.


def test_the_constants_and_the_families_are_those_that_were_frozen() -> None:
    assert figures.digest() == figures.FROZEN
    assert composed.digest() == composed.FROZEN_FAMILIES


def test_each_constant_lies_in_its_range_and_names_its_source() -> None:
    for name, entry in figures.entries().items():
        values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
        assert all(entry["low"] <= value <= entry["high"] for value in values), name
        assert len(entry["source"]) > 20, name
        assert entry["checked"] in ("reference", "page", "memory", "choice"), name


def test_a_plan_of_average_worth_helps_by_the_published_figure() -> None:
    world_constants = constants()
    good = logistic(world_constants.plan_skill)
    assert 0.06 <= good * world_constants.plan_good + (1 - good) * world_constants.plan_bad <= 0.10


# Tasks.


def test_training_meets_no_phrase_and_no_family_that_is_held_out() -> None:
    last = [family.phrases[-1] for family in composed.families()]
    marks = [max(re.split(r"\{.\}", phrase), key=len).strip().lower() for phrase in last]
    for task in composed.draw_tasks("train", "words", 300):
        assert not any(part.family.held_out for part in task.parts)
        assert not any(mark in task.text.lower() for mark in marks)
    for task in composed.draw_tasks("families", "words", 50):
        assert all(part.family.held_out for part in task.parts)
    assert any(mark in composed.draw_tasks("phrasings", "words", 1)[0].text.lower() for mark in marks)


def test_difficulty_is_not_in_the_text() -> None:
    """The hidden trait is drawn apart: no word of a text, nor its length, goes with it beyond chance."""
    tasks = composed.draw_tasks("train", "traits", 2_000)
    hard = [task for task in tasks if task.trait >= 2]
    for word in ("then", "document", "calendar", "numbers", "list", "letters"):
        share = sum(word in task.text.lower() for task in tasks) / len(tasks)
        among = sum(word in task.text.lower() for task in hard) / len(hard)
        assert abs(among - share) <= 4 * math.sqrt(max(share * (1 - share), 0.001) / len(hard)), word
    lengths = []
    for part in (tasks, hard):
        lengths.append(sum(len(task.text) for task in part) / len(part))
    assert abs(lengths[0] - lengths[1]) <= 20


def test_a_wrong_answer_differs_from_the_right_one() -> None:
    for task in composed.draw_tasks("train", "answers", 300) + composed.draw_tasks("families", "answers", 100):
        assert all(part.answer != part.slip and ";" not in part.answer + part.slip for part in task.parts)
    assert composed.draw_tasks("fresh", "0", 3) == composed.draw_tasks("fresh", "0", 3)
    assert composed.draw_tasks("fresh", "0", 3) != composed.draw_tasks("fresh", "1", 3)


# Workers and pools.


def test_a_card_of_any_worker_can_be_read_also_of_one_that_training_never_met() -> None:
    """In world 1 a card was one token and an unseen one a KeyError; here a card is numbers and words."""
    for worker in worker_profiles(unseen=True) + worker_profiles(unseen=False):
        numbers = re.findall(r"(\w+) (\d+) of (\d+)", worker.card.words())
        assert [name for name, _, _ in numbers] == list(DOMAINS)
        assert [int(right) for _, right, _ in numbers] == list(worker.card.right)
        assert worker.name not in worker.card.words()
    training_names = {worker.name for worker in worker_profiles(unseen=False)}
    assert not training_names & {worker.name for worker in worker_profiles(unseen=True)}


def test_what_is_held_out_of_pools_is_independent_of_who_is_in_them() -> None:
    """World 1 held out by a multiplier that is 1 modulo 4, and so just the pools without two workers; here every
    worker, every pair and every size has its quarter."""
    names = [worker.name for worker in worker_profiles(unseen=False)][:14]
    sets = [chosen for size in (3, 4, 5) for chosen in combinations(names, size)]
    out = [chosen for chosen in sets if is_held_out(chosen)]
    assert abs(len(out) / len(sets) - 0.25) <= 4 * math.sqrt(0.25 * 0.75 / len(sets))
    for group in [*combinations(names, 1), *combinations(names, 2)]:
        having = [chosen for chosen in sets if set(group) <= set(chosen)]
        share = sum(map(is_held_out, having)) / len(having)
        assert abs(share - 0.25) <= 5 * math.sqrt(0.25 * 0.75 / len(having)), group
    assert is_held_out(names[:3]) == is_held_out(names[2::-1])


def test_training_meets_no_pool_worker_or_price_that_is_held_out() -> None:
    random = Random(1)
    training_prices = {worker.name: worker.price for worker in worker_profiles(unseen=False)}
    for _ in range(100):
        assert not is_held_out([worker.name for worker in draw_pool(random)])
        assert is_held_out([worker.name for worker in draw_pool(random, unseen_pool=True)])
        assert not {worker.name for worker in draw_pool(random, unseen_workers=True)} & set(training_prices)
        assert _factors(draw_pool(random), training_prices) <= set(PRICE_FACTORS)
        assert _factors(draw_pool(random, unseen_pool=True), training_prices) <= set(HELD_OUT_FACTORS)


def _factors(chosen: Pool, prices: dict[str, float]) -> set[float]:
    return {round(worker.price / prices[worker.name], 6) for worker in chosen}


def test_cards_agree_with_hidden_skill_only_as_far_as_their_samples_reach() -> None:
    """A card's rate misses the true one by what a sample of its size misses, and by no more."""
    misses: dict[int, float] = defaultdict(float)
    spread: dict[int, float] = defaultdict(float)
    for worker in worker_profiles(unseen=False) + worker_profiles(unseen=True):
        for domain, right in enumerate(worker.card.right):
            rate = pass_rate(worker.ability, worker.edges[domain], domain)
            misses[worker.card.questions] += (right / worker.card.questions - rate) ** 2
            spread[worker.card.questions] += rate * (1 - rate) / worker.card.questions
    for questions in misses:
        assert 0.6 <= misses[questions] / spread[questions] <= 1.5
