"""`python -m tests.bench.words_reach`: what accuracy a conductor of words can have at how many tokens.

Over the pools and tasks of `tests.bench.words`, in parts of the tokens of the tuned mixture of agents: plans that are
best by exact chances, which no conductor knows, and by what the teacher of `words_lessons.py` believes of workers by
their cards, each at several prices of a token. All figures are exact expectations, without a conductor's own tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from app.lab.world2.outcome import Rewards, all_plans, rewards_of_all_plans, tokens_of_all_plans
from app.lab.world2.provider import service_tasks
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import catalogue
from app.lab.world2.tasks import Task
from app.lab.world2.words_lessons import Teacher
from app.lab.world2.workers import Pool
from tests.bench.words import COMPARED, POOLS, bench_pools, tune_plans

PRICES = (0.0, 1e-5, 3e-5)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.words_reach", description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=1_000)
    parser.add_argument("--verdicts", type=int, default=16_000, help="of the teacher")
    parser.add_argument("--seed", type=int, default=0, help="of the pools")
    options = parser.parse_args()
    pools, held_out = bench_pools(options.seed), service_tasks("fresh")[: options.tasks]
    figures = measure_reach(Teacher(0, options.verdicts), pools, held_out)
    mixture = figures[f"tuned {COMPARED[0]}"]
    print("| plans | accuracy | less the mixture's | tokens | in parts of the mixture's | reward |")
    print("|---|---|---|---|---|---|")
    for name, (right, tokens, reward) in figures.items():
        share = tokens / mixture[1]
        print(f"| {name} | {right:.3f} | {right - mixture[0]:+.3f} | {tokens:,.0f} | {share:.3f} | {reward:.3f} |")
    return 0


def measure_reach(teacher: Teacher, pools: Sequence[Pool], held_out: Sequence[Task]) -> dict[str, np.ndarray[Any, Any]]:
    """Return accuracy, tokens and reward of each way to choose plans, on average over tasks."""
    exact, believed = [Rewards(pool) for pool in pools], [teacher.estimate_rewards(pool) for pool in pools]
    fixed = tune_plans(pools)
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for number, task in enumerate(held_out):
        at = number % POOLS
        every, all_rewards = all_plans(len(pools[at])), exact[at]
        tokens, rewards = tokens_of_all_plans(all_rewards, size_of(task)), rewards_of_all_plans(all_rewards, task)
        right = _right(all_rewards, task)
        chosen = {f"tuned {arm}": every.index(fixed[arm][at]) for arm in COMPARED}
        theirs = rewards_of_all_plans(believed[at], teacher.task_as_read(task))
        for price in PRICES:
            paid = price * tokens
            chosen[f"most often right, {1e5 * price:g} in 100 less for 1,000 tokens"] = int((right - paid).argmax())
            chosen[f"best reward, {1e5 * price:g} in 100 less"] = int((rewards - paid).argmax())
            chosen[f"as the teacher believes, {1e5 * price:g} in 100 less"] = int((theirs - paid).argmax())
        for name, place in chosen.items():
            row = (float(right[place]), float(tokens[place]), float(rewards[place]))
            rows.setdefault(name, []).append(row)
    return {name: np.mean(some, axis=0) for name, some in rows.items()}


def _right(rewards: Rewards, task: Task) -> np.ndarray[Any, Any]:
    """The chance of a right answer by each plan."""
    return np.concatenate([rewards.right(name, task).mean(axis=0).ravel() for name in catalogue()])


if __name__ == "__main__":
    raise SystemExit(main())
