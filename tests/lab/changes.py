"""The selector after workers have changed, and beside a tenant that inverts its ratings.

    python -m tests.lab.changes [--recorded RouteLLM/routellm/evals/mmlu/responses] [--seeds 4] [--first 0]

Four figures, for the selector as it is, without the detection of exchanges, and without any detection:

swap in the rehearsal world ... after 2,000 ratings two workers exchange their skills. Printed is the share of the lost
        reward that has come back after so many ratings more; also for a selector that is told who has changed (and goes
        on by its own rule; or forgets these workers, with its usual priors and with wider ones), and for one that
        forgets everything at the swap. They bound what quicker detection of changes could gain, and know no exchanges.
swap in recorded outcomes ..... the same where two models exchange their recorded outcomes (reward: the score), as the
        share of the way from the worse to the better model; also for a selector that is told, by its own rule.
one worker worse .............. after 2,000 ratings one worker loses all its skills. Printed is the reward of the best
        choice: a selector that takes it for another worker, and exchanges them, loses by it.
poisoning ..................... the expected reward of a tenant with few ratings, on the way from the best single worker
        to the optimum, alone and beside another tenant that has rated many runs the wrong way round; and what it would
        be if both shared one posterior, as in releases before 0.3.

It prints figures for `deploy/docs/learning.md`.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from app.core.plan.templates import Arm
from app.core.rating import posterior as posteriors
from app.core.rating.features import Features, features
from app.core.rating.posterior import PossibleChange, Posterior, Rating, update_posterior
from app.core.rating.published_posterior import Beliefs, PublishedPosterior
from app.core.rating.tenancy import join_posteriors, update_own_part
from app.lab.outcome import bill, outcome, right
from app.lab.recorded_outcomes import Dataset, read
from app.lab.replay import Bandit, Part, Plan, routes, split
from app.lab.world import Profile, Setting, standard_pool
from app.providers.rehearsal.task_families import Problem
from tests.lab import bandit

BEFORE, LOOKS = 2_000, (150, 300, 600)
BIRCH, CEDAR = 1, 2
WIDER = 3.0
"""The factor of `widen_priors`."""
CERTAIN = 500.0
"""A log likelihood ratio that no ratings outweigh."""
NO_CHANGES = {"CHANGE_PROBABILITY": 1e-30}
"""Changes are so improbable that no evidence suffices: the selector learns, and looks for none."""
NO_EXCHANGES = {"FIRST_RATINGS": 10**9}
"""No rating is evidence for an exchange."""
Pool = tuple[Profile, ...]
Aware = Callable[[Posterior, Collection[str]], Posterior]
"""Returns the posterior that the swap itself makes of one, from the names under which the changed workers are
learned."""


def swap_specialists() -> Pool:
    """The standard pool after two specialists have exchanged their skills."""
    pool = list(standard_pool())
    birch, cedar = pool[BIRCH], pool[CEDAR]
    pool[BIRCH] = replace(birch, skills=cedar.skills, plans=cedar.plans, checks=cedar.checks, name="birch, changed")
    pool[CEDAR] = replace(cedar, skills=birch.skills, plans=birch.plans, checks=birch.checks, name="cedar, changed")
    return tuple(pool)


def lose_a_specialist() -> Pool:
    """The standard pool after one specialist has lost its skills."""
    pool = list(standard_pool())
    pool[BIRCH] = replace(pool[BIRCH], skills=(0.0,) * len(pool[BIRCH].skills), name="birch, worse")
    return tuple(pool)


def play_tasks(tasks: Sequence[Problem], pool: Pool, random: Random, posterior: Posterior, at: float) -> Posterior:
    """The posterior after so many tasks over a pool."""
    for place, task in enumerate(tasks):
        rating = rate_task(task, pool, random, posterior, at + place)
        posterior = update_posterior(posterior, bandit.SPEC, bandit.workers(), rating)
    return posterior


def rate_task(task: Problem, pool: Pool, random: Random, posterior: Posterior, at: float) -> Rating:
    """The rating of a task, for the arm that a posterior chooses."""
    sight = features(task.text)
    arm = bandit.arms_by_name()[bandit.choose(posterior, sight, random).action]
    answered = random.random() < chance(arm, task.kind, pool)
    usd, waited = bill(bandit.as_plan(arm), task.kind[1], pool)
    return Rating(arm, sight, bandit.score(answered, waited), round(1e6 * usd), at)


@cache
def chance(arm: Arm, kind: tuple[int, int], pool: Pool) -> float:
    """The chance of a right answer."""
    return right(bandit.as_plan(arm), kind, pool)


@cache
def worth(arm: Arm, kind: tuple[int, int], pool: Pool) -> float:
    """The expected reward."""
    return outcome(bandit.as_plan(arm), kind, Setting(pool, bandit.WEIGHTS)).reward


def value(posterior: Posterior, exam: Sequence[Problem], pool: Pool) -> float:
    """The mean expected reward of the arm that is best at the posterior's mean."""
    best = [bandit.choose(posterior, features(task.text), Random(0), None).action for task in exam]
    return mean(worth(bandit.arms_by_name()[name], task.kind, pool) for name, task in zip(best, exam, strict=True))


def forget_changed_workers(posterior: Posterior, changed: Collection[str]) -> Posterior:
    """The posterior of a selector that is told who has changed: it forgets all that it knows of them."""
    weights = {part: of for part, of in posterior.weights.items() if part.partition(":")[2] not in changed}
    return replace(posterior, weights=weights, possible=None)


def widen_priors(posterior: Posterior, changed: Collection[str]) -> Posterior:
    """The posterior of a selector that is told the same, and gives each weight that it had learned of them `WIDER`
    times the variance of its prior, so that it learns these workers faster."""
    weights = dict(posterior.weights)
    for part, belief in posterior.weights.items():
        if part.partition(":")[2] in changed:
            prior = posteriors.prior_of(part)
            weights[part] = {place: (0.0, WIDER * posteriors.spread_of(prior, place)) for place in belief}
    return replace(posterior, weights=weights, possible=None)


def believe_told(posterior: Posterior, changed: Collection[str]) -> Posterior:
    """The posterior of a selector that is told the same, and believes it: it goes on by its own rule, as if it were
    certain that just these workers have changed at this moment."""
    evidence = {}
    for part in posterior.weights:
        if part.startswith(posteriors.ANSWERING):
            evidence[part] = CERTAIN if part.removeprefix(posteriors.ANSWERING) in changed else -CERTAIN
    return replace(posterior, possible=PossibleChange(evidence=evidence))


def forget_everything(_posterior: Posterior, _changed: Collection[str]) -> Posterior:
    """The posterior of a selector that forgets everything at the swap."""
    return Posterior()


def unaware(posterior: Posterior, _changed: Collection[str]) -> Posterior:
    """The posterior of a selector that is told nothing."""
    return posterior


def swap_in_the_world(seeds: range, aware: Aware = unaware) -> list[list[float]]:
    """The share of the lost reward that is back at each look, for each seed. `aware` is what the swap itself does to
    the posterior."""
    exam, after = bandit.problems(200, 1_000_003), swap_specialists()
    changed = {f"{worker.name}={worker.model}" for worker in bandit.workers()[BIRCH : CEDAR + 1]}
    recoveries = []
    for seed in seeds:
        random, tasks = Random(seed), bandit.problems(BEFORE + max(LOOKS), seed)
        posterior = play_tasks(tasks[:BEFORE], standard_pool(), random, Posterior(), 1e9)
        high, low = value(posterior, exam, standard_pool()), value(posterior, exam, after)
        back, ratings_so_far, posterior = [], BEFORE, aware(posterior, changed)
        for look in LOOKS:
            posterior = play_tasks(
                tasks[ratings_so_far : BEFORE + look], after, random, posterior, 1e9 + ratings_so_far
            )
            ratings_so_far = BEFORE + look
            back.append((value(posterior, exam, after) - low) / (high - low))
        recoveries.append(back)
    return recoveries


def worth_after_a_loss(seeds: range) -> list[list[float]]:
    """The reward of the best choice at each look after a specialist has lost its skills, for each seed."""
    exam, after = bandit.problems(200, 1_000_003), lose_a_specialist()
    rewards = []
    for seed in seeds:
        random, tasks = Random(seed), bandit.problems(BEFORE + max(LOOKS), seed)
        posterior = play_tasks(tasks[:BEFORE], standard_pool(), random, Posterior(), 1e9)
        row, last = [], 0
        for look in LOOKS:
            later = tasks[BEFORE + last : BEFORE + look]
            posterior = play_tasks(later, after, random, posterior, 1e9 + BEFORE + last)
            row.append(value(posterior, exam, after))
            last = look
        rewards.append(row)
    return rewards


def swap_in_records(data: Dataset, seeds: range, aware: Aware = unaware) -> list[list[float]]:
    """Do the same where two models exchange their recorded outcomes, and cost nothing."""
    open_, features_by_row, recoveries = routes(data, 0.0), dict[int, Features](), []
    cheap, best = open_.models[0], open_.models[-1]
    for seed in seeds:
        plan = Plan(BEFORE + max(LOOKS), 1_000, seeds, 0.0)
        training, held_out_part = split(data, open_, features_by_row, plan, seed)
        random, selector = Random(f"bandit|{seed}"), Bandit(open_)

        def part(first: int, last: int, of: Part = training) -> Part:
            scores = [{cheap: score[best], best: score[cheap]} for score in of.scores[first:last]]
            return Part(of.rows[first:last], of.seen[first:last], scores)

        def earned(of: Part, selector: Bandit = selector) -> float:
            chosen = [open_.best(selector.expects(sight)) for sight in of.seen]
            return mean(scores[name] for name, scores in zip(chosen, of.scores, strict=True))

        selector.learn(Part(training.rows[:BEFORE], training.seen[:BEFORE], training.scores[:BEFORE]), random)
        told = aware(selector.selector.posterior, {f"{model}={model}" for model in (cheap, best)})
        selector.selector.posterior = told
        exchanged = part(0, len(held_out_part.rows), held_out_part)
        low = mean(scores[cheap] for scores in held_out_part.scores)
        high = mean(scores[best] for scores in held_out_part.scores)
        back, ratings_so_far = [], BEFORE
        for look in LOOKS:
            selector.learn(part(ratings_so_far, BEFORE + look), random)
            ratings_so_far = BEFORE + look
            back.append((earned(exchanged) - low) / (high - low))
        recoveries.append(back)
    return recoveries


def poisoning(own: int, foreign: int, seed: int) -> tuple[float, float, float]:
    """The share of the gain of a tenant with `own` ratings: alone, beside a tenant that has rated `foreign` runs the
    wrong way round, and with one posterior for both."""
    exam, pool, optimum = bandit.problems(300, 1_000_003), standard_pool(), bandit.best_by_class()
    honest = _learn_own_ratings(own, seed, pool, lambda score: score)
    inverted = _learn_own_ratings(foreign, seed + 100, pool, lambda score: 1 - score)
    values = [value(join_posteriors(Posterior(), part), exam, pool) for part in (honest, inverted)]
    lent = Beliefs(PublishedPosterior(), own, (PublishedPosterior(),)).lent(bandit.SPEC.peers)
    together, random = join_posteriors(Posterior(), honest), Random(seed + 100)
    for place, task in enumerate(bandit.problems(foreign, seed + 100)):
        rated_task = rate_task(task, pool, random, together, 1e9 + own + place)
        together = update_posterior(
            together, bandit.SPEC, bandit.workers(), replace(rated_task, score=1 - rated_task.score)
        )
    worths = values[0], (1 - lent) * values[0] + lent * values[1], value(together, exam, pool)
    first, second, third = (bandit.share(worth, exam, optimum) for worth in worths)
    print(f"  expected reward {worths[0]:.4f} alone, {worths[1]:.4f} beside the other one, {worths[2]:.4f} if shared")
    return first, second, third


def _learn_own_ratings(count: int, seed: int, pool: Pool, say: Callable[[float], float]) -> Posterior:
    posterior, own_ratings, random = Posterior(), [], Random(seed)
    for place, task in enumerate(bandit.problems(count, seed)):
        rated_task = rate_task(task, pool, random, posterior, 1e9 + place)
        own_ratings.append(replace(rated_task, score=say(rated_task.score)))
        posterior = update_posterior(posterior, bandit.SPEC, bandit.workers(), own_ratings[-1])
    return update_own_part(Posterior(), Posterior(), bandit.SPEC, bandit.workers(), own_ratings)


def _print(name: str, recoveries: Sequence[Sequence[float]]) -> None:
    for place, look in enumerate(LOOKS):
        of = [row[place] for row in recoveries]
        every = ", ".join(f"{share:.0%}" for share in sorted(of))
        print(
            f"{name}, {look} ratings after the swap: {mean(of):.0%} is back; by seed, the worst first: {every}",
            flush=True,
        )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    data = read([options.recorded], {}, {}) if options.recorded else None
    rules: Sequence[tuple[str, dict[str, Any]]] = (
        ("as it is", {"FIRST_RATINGS": posteriors.FIRST_RATINGS}),
        ("without exchanges", NO_EXCHANGES),
        ("without detection", {**NO_CHANGES, **NO_EXCHANGES}),
    )
    for name, constants in rules:
        with patch.multiple(posteriors, **constants):
            _print(f"rehearsal world, {name}", swap_in_the_world(seeds))
            if data is not None:
                _print(f"recorded outcomes, {name}", swap_in_records(data, seeds))
            for look, rewards in zip(LOOKS, zip(*worth_after_a_loss(seeds), strict=True), strict=True):
                print(f"one worker worse, {name}, {look} ratings later: a reward of {mean(rewards):.4f}", flush=True)
    with patch.multiple(posteriors, **NO_EXCHANGES):
        _print("rehearsal world, told who has changed", swap_in_the_world(seeds, believe_told))
        if data is not None:
            _print("recorded outcomes, told who has changed", swap_in_records(data, seeds, believe_told))
    forgetful = (
        ("told so and forgets these workers", forget_changed_workers),
        ("told so, with wider priors", widen_priors),
        ("begun anew at the swap", forget_everything),
    )
    with patch.multiple(posteriors, **NO_CHANGES, **NO_EXCHANGES):
        for name, aware in forgetful:
            _print(f"rehearsal world, {name}, without detection", swap_in_the_world(seeds, aware))
    for seed in seeds:
        shares = poisoning(own=300, foreign=600, seed=seed)
        signed = ", ".join(f"{share:+.2f}" for share in shares)
        print(f"poisoning, seed {seed}: shares of the gain alone, beside the other tenant, with one for both: {signed}")


if __name__ == "__main__":
    main()
