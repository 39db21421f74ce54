"""The most of the gap that any policy can be expected to close over workers without verdicts, by what cards tell.

`python -m app.lab.world2 --ceiling POOLS` prints it. The policy is `bounds.OptimumByCards`: it knows the figures of the
world, the spreads that workers are drawn from, and every task's kind, and decides by the exact posterior of the skills
given cards. The first row has the cards as they are (8, 20 or 60 questions of each domain); the others have cards of
the same workers that were measured anew with so many questions each, which says how many would be needed.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
from msgspec.structs import replace

from app.lab.world2 import tasks as composed
from app.lab.world2.baselines import Setting, domain_plans
from app.lab.world2.bounds import OptimumByCards
from app.lab.world2.standings import Matrix, bootstrap_pools_and_tasks
from app.lab.world2.tasks import Task
from app.lab.world2.workers import Pool, draw_pass_counts, draw_pool

TRAINING, TESTED = 60, 30
QUESTIONS_BY_DOMAIN = (20, 60, 240)
AS_THEY_ARE = "as they are"


def report(pools: int) -> str:
    """Return the shares of the gap in Markdown, with 95 % intervals over pools and tasks."""
    random = Random("world-2|ceiling")
    tasks = composed.draw_tasks("fresh", "ceiling", TESTED)
    rewards: dict[str, list[Matrix]] = {}
    for _ in range(pools):
        for name, reward in _rewards_by_policy(draw_pool(random, unseen_workers=True), tasks, random).items():
            rewards.setdefault(name, []).append(reward)
    rewards_of = {name: np.stack(rows) for name, rows in rewards.items()}
    domain_plan_names = [name for name in rewards_of if name.startswith("plan by")]
    baseline = max(domain_plan_names, key=lambda name: float(rewards_of[name].mean()))
    gap = rewards_of["optimum"] - rewards_of[baseline]
    lines = [
        f"{pools} pools of unseen workers, {TESTED} fresh tasks. The gap is {gap.mean():.3f}, above {baseline}.", "",
        "| questions on the cards | share of the gap | 95 % interval |", "|---|---|---|",
    ]  # fmt: skip
    for name in (AS_THEY_ARE, *map(str, QUESTIONS_BY_DOMAIN)):
        closed = rewards_of[name] - rewards_of[baseline]
        low, high = np.percentile(_bootstrap_shares(closed, gap), [2.5, 97.5])
        lines.append(f"| {name} | {closed.mean() / gap.mean():.0%} | {low:.0%} to {high:.0%} |")
    return "\n".join(lines)


def measure_again(chosen: Pool, questions: int, random: Random) -> Pool:
    """Return the same workers with cards of so many questions of each domain."""
    workers = []
    for worker in chosen:
        right = draw_pass_counts(random, worker.ability, worker.edges, questions)
        workers.append(replace(worker, card=replace(worker.card, right=right, questions=questions)))
    return tuple(workers)


def _rewards_by_policy(chosen: Pool, tasks: Sequence[Task], random: Random) -> dict[str, Matrix]:
    """Return the rewards by task of everything that is compared over one pool."""
    training = composed.draw_tasks("train", "ceiling", TRAINING)
    validation = composed.draw_tasks("train", "ceiling|validation", TRAINING // 2)
    setting = Setting(chosen, training, validation)
    table = setting.table(tasks).astype(float)
    rewards = {"optimum": table.max(axis=1)}
    places = np.arange(len(tasks))
    for policy in domain_plans(0):
        rewards[policy.name] = table[places, policy.choose(setting, tasks)]
    pools = {AS_THEY_ARE: chosen}
    for questions in QUESTIONS_BY_DOMAIN:
        pools[str(questions)] = measure_again(chosen, questions, random)
    for name, pool in pools.items():
        rewards[name] = table[places, OptimumByCards().choose(Setting(pool, [], []), tasks)]
    return rewards


def _bootstrap_shares(closed: Matrix, gap: Matrix) -> Matrix:
    """Return the share of the gap in each resample; both are drawn again alike."""
    shares: Matrix = bootstrap_pools_and_tasks(closed, np.random.default_rng(1)) / bootstrap_pools_and_tasks(
        gap, np.random.default_rng(1)
    )
    return shares
