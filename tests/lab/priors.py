"""The selector with other prior variances, on recorded outcomes and in the standard rehearsal world.

    python -m tests.lab.priors RouteLLM/routellm/evals/mmlu/responses [--seeds 10] [--first 0] [--runs 2000]

`present` is the service's own setting (`app/core/rating/posterior.py`). Printed are APGR on recorded outcomes after
2,000 ratings, mean and worst over the seeds, and how much of the way from the best single worker to the searched
optimum the selector has come in the rehearsal world. It prints a table for `deploy/docs/offpolicy.md`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import mean
from unittest.mock import patch

from app.core.rating import posterior
from app.core.rating.features import Features
from app.core.rating.posterior import Variances
from app.lab.baselines import search_arms
from app.lab.recorded_outcomes import Dataset, read
from app.lab.replay import Bandit, Figures, Plan, judge_estimator, routes, split
from tests.lab import bandit

Priors = Mapping[str, Variances]
TEMPLATE: Variances = (0.0, 0.3, 0.05)
SETTINGS: Mapping[str, Priors] = {
    "present": posterior.VARIANCES,
    "words of workers 0.6": {"base": (0.3, 1.0, 0.2), "main": (0.6, 0.5, 0.1), "template": TEMPLATE},
    "words of all 1.0": {"base": (1.0, 1.0, 0.2), "main": (1.0, 0.5, 0.1), "template": TEMPLATE},
    "no counts of workers": {"base": (0.2, 1.0, 0.1), "main": (0.3, 0.2, 0.0), "template": TEMPLATE},
}
"""Variances for words, bias and counts, by part."""
RATINGS, COST_WEIGHT = 2_000, 0.2


def replay_selector(data: Dataset, plan: Plan, features_by_row: dict[int, Features]) -> list[Figures]:
    """The figures of the selector, one for each seed."""
    open_, results = routes(data, plan.cost_weight), []
    for seed in plan.seeds:
        training, held_out_part = split(data, open_, features_by_row, plan, seed)
        selector = Bandit(open_)
        lost = selector.learn(training, Random(f"bandit|{seed}"))
        results.append(judge_estimator(open_, held_out_part, selector.expects, lost))
    return results


def rehearse(runs: int) -> float:
    """The share of the gain in the rehearsal world after so many rated runs."""
    exam = bandit.problems(800, 1_000_003)
    taught = bandit.play(posterior.Posterior(), bandit.problems(runs, 0), Random(0))
    return bandit.share(bandit.value(taught, exam), exam, search_arms(bandit.setting()).optimum)


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--held-out", type=int, default=1_000, help="prompts that the selector is judged by")
    parser.add_argument("--setting", choices=list(SETTINGS), help="only this setting; else all")
    parser.add_argument("--runs", type=int, default=0, help="rated runs in the rehearsal world; 0: none")
    options = parser.parse_args()
    data, features_by_row = read([options.path], {}, {}), dict[int, Features]()
    plan = Plan(RATINGS, options.held_out, range(options.first, options.first + options.seeds), COST_WEIGHT)
    for name, priors in SETTINGS.items():
        if options.setting not in (None, name):
            continue
        with patch.object(posterior, "VARIANCES", priors):
            results = replay_selector(data, plan, features_by_row)
            gain = f", {rehearse(options.runs):.1%} of the gain" if options.runs else ""
        rates = [figures.apgr for figures in results if figures.apgr is not None]
        lost = mean(figures.learning_regret or 0.0 for figures in results)
        print(f"{name}: APGR {mean(rates):.3f} ({min(rates):.3f}), regret while learning {lost:.3f}{gain}", flush=True)


if __name__ == "__main__":
    main()
