"""A selector that learns over the rehearsal pool from an erring judge: its regret, and how far its estimates are true.

`python -m app.lab.world2 --selector FILE` writes both as JSON, which `app/lab/plots.py` draws. The regret of a decision
is the exact expected reward of the best arm for the task less that of the chosen one; the estimate of a chosen arm is
what the posterior held for its chance of a right answer, beside how often the answer was right.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from app.core.plan.templates import arms
from app.core.rating.decision import decide
from app.core.rating.features import features
from app.core.rating.posterior import Posterior, Rating, estimates, learned
from app.lab.world2 import tasks as composed
from app.lab.world2.baselines import Setting
from app.lab.world2.constants import constants
from app.lab.world2.execution import draw_verdict
from app.lab.world2.outcome import expected_reward
from app.lab.world2.product_selector import as_catalog, normals, plan_of, selector_spec
from app.lab.world2.provider import rehearsal_workers
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import MOST_STEPS

SEEDS, DECISIONS, EVERY = 5, 1_000, 25
BINS = 10


def write(path: Path) -> None:
    """Simulate all seeds and write the file."""
    regrets, pairs = [], []
    for seed in range(SEEDS):
        regret, told = _simulated(seed)
        regrets.append([round(sum(regret[: end + EVERY]), 4) for end in range(0, DECISIONS, EVERY)])
        pairs += told
    made = {
        "made_by": "python -m app.lab.world2 --selector FILE",
        "every": EVERY,
        "regret": regrets,
        "calibration": _binned(pairs),
    }
    path.write_text(json.dumps(made) + "\n", encoding="utf-8")


def _simulated(seed: int) -> tuple[list[float], list[tuple[float, bool]]]:
    """Return the regret of each decision of one seed, and each estimate with what came of it."""
    pool = tuple(worker for worker, _ in rehearsal_workers())
    setting, random, known = (
        Setting(pool, *[composed.draw_tasks("train", "selector", 1)] * 2),
        Random(f"selector|{seed}"),
        constants(),
    )
    rules, workers = selector_spec(), [as_catalog(worker) for worker in pool]
    every, posterior = arms(rules, workers, MOST_STEPS), Posterior()
    plans = {arm.name: plan_of(arm, setting) for arm in every}
    regret, told = [], []
    for at, task in enumerate(composed.draw_tasks("fresh", f"selector|{seed}", DECISIONS)):
        seen = features(task.text)
        found = estimates(posterior, rules, every, workers, seen)
        choice = decide(found, rules.explore, lambda count: random.choices(normals(), k=count), random.random)
        chosen = next(estimate for estimate in found if estimate.arm.name == choice.action)
        plan = plans[chosen.arm.name]
        best = max([expected_reward(plan, task, setting.rewards) for plan in plans.values()])
        regret.append(best - expected_reward(plan, task, setting.rewards))
        right = random.random() < setting.rewards.right(plan.shape, task)[task.trait][plan.workers]
        told.append((chosen.success, bool(right)))
        usd, seconds, _ = setting.rewards.bill(plan.shape, size_of(task))
        waited = known.wait * min(1.0, float(seconds[plan.workers]) / known.full_seconds)
        score = 1 - waited if draw_verdict(bool(right), random) else 0.0
        rating = Rating(chosen.arm, seen, score, round(1e6 * float(usd[plan.workers])), 1e9 + at)
        posterior = learned(posterior, rules, workers, rating)
    return regret, told


def _binned(pairs: Sequence[tuple[float, bool]]) -> list[tuple[float, float, int]]:
    """Return the mean estimate, the share of right answers and the number of decisions, by tenths of the estimate."""
    found = []
    for place in range(BINS):
        own = [pair for pair in pairs if place / BINS <= pair[0] < (place + 1) / BINS]
        if own:
            mean, right = sum(pair[0] for pair in own) / len(own), sum(pair[1] for pair in own) / len(own)
            found.append((round(mean, 4), round(right, 4), len(own)))
    return found
