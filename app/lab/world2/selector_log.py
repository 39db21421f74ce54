"""A selector that learns over the rehearsal pool from an erring judge: its regret, and how far its estimates are true.

`python -m app.lab.world2 --selector FILE` writes both as JSON, which `app/lab/plots.py` draws. The regret of a decision
is the exact expected reward of the best arm for the task less that of the chosen one; the estimate of a chosen arm is
what the posterior held for its chance of a right answer, beside how often the answer was right.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from app.core.rating.features import features
from app.lab.world2 import tasks as composed
from app.lab.world2.baselines import Setting
from app.lab.world2.outcome import expected_reward
from app.lab.world2.product_selector import SelectorOverPool, execute_once
from app.lab.world2.provider import rehearsal_workers

SEEDS, DECISIONS, EVERY = 5, 1_000, 25
BINS = 10


def write(path: Path) -> None:
    """Simulate all seeds and write the file."""
    regret_curves, predictions = [], []
    for seed in range(SEEDS):
        regrets, of_seed = _simulate(seed)
        regret_curves.append(_cumulative(regrets))
        predictions += of_seed
    log = {
        "made_by": "python -m app.lab.world2 --selector FILE",
        "every": EVERY,
        "regret": regret_curves,
        "calibration": _calibration(predictions),
    }
    path.write_text(json.dumps(log) + "\n", encoding="utf-8")


def _simulate(seed: int) -> tuple[list[float], list[tuple[float, bool]]]:
    """Return the regret of each decision of one seed, and the chance of success that was estimated for each with
    whether its answer was right."""
    pool = tuple(worker for worker, _ in rehearsal_workers())
    example = composed.draw_tasks("train", "selector", 1)
    setting = Setting(pool, example, example)
    selector = SelectorOverPool(setting)
    random = Random(f"selector|{seed}")
    regrets, predictions = [], []
    for n, task in enumerate(composed.draw_tasks("fresh", f"selector|{seed}", DECISIONS)):
        task_features = features(task.text)
        estimate = selector.explore(task_features, random)
        plan = selector.plans[estimate.arm.name]
        best_reward = max([expected_reward(other, task, setting.rewards) for other in selector.plans.values()])
        regrets.append(best_reward - expected_reward(plan, task, setting.rewards))
        execution = execute_once(setting, plan, task, random)
        predictions.append((estimate.success, execution.right))
        selector.learn(execution.rating(estimate.arm, task_features, 1e9 + n))
    return regrets, predictions


def _cumulative(regrets: Sequence[float]) -> list[float]:
    """Return the sum of all regrets so far, after each `EVERY` decisions."""
    sums = []
    for end in range(EVERY, DECISIONS + EVERY, EVERY):
        sums.append(round(sum(regrets[:end]), 4))
    return sums


def _calibration(predictions: Sequence[tuple[float, bool]]) -> list[tuple[float, float, int]]:
    """Return the mean estimate, the share of right answers and the number of decisions, by tenths of the estimate."""
    rows = []
    for n in range(BINS):
        estimates, rights = [], []
        for estimate, right in predictions:
            if n / BINS <= estimate < (n + 1) / BINS:
                estimates.append(estimate)
                rights.append(right)
        if estimates:
            count = len(estimates)
            rows.append((round(sum(estimates) / count, 4), round(sum(rights) / count, 4), count))
    return rows
