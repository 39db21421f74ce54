"""All policies of world 2 on all splits, for several seeds, with clustered intervals, as one table in Markdown.

A seed draws its own tasks, pools and training. Every pool of a split meets the same test tasks, so the bootstrap draws
tasks *and* pools again, both with replacement and independently of each other; over all seeds it draws seeds as well.
The reference is the plan by domain that does best on the split's test tasks, by any classifier: it is chosen after the
fact, in its favour. The gap is the optimum less the reference. Seeds are published worst first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from app.errors import ConfigInvalid
from app.lab.world2 import constants as figures
from app.lab.world2 import tasks as composed
from app.lab.world2.baselines import (
    NearestOutcomes,
    Optimum,
    Policy,
    RandomPlan,
    Setting,
    clairvoyant_rewards,
    domain_plans,
    list_fixed_policies,
    true_domain_plans,
)
from app.lab.world2.product_selector import ProductSelector
from app.lab.world2.rules import size_of
from app.lab.world2.tasks import Task
from app.lab.world2.workers import Pool, draw_pool

Matrix: TypeAlias = NDArray[np.float64]
"""One row for each pool, one column for each test task."""
Say = Callable[[str], None]
Name = Literal["fresh tasks", "unseen phrasings", "unseen families", "unseen pools and prices", "unseen workers"]
SPLITS: tuple[Name, ...] = (
    "fresh tasks", "unseen phrasings", "unseen families", "unseen pools and prices", "unseen workers",
)  # fmt: skip
OPTIMUM, CLAIRVOYANT = "searched optimum", "clairvoyant"
RESAMPLES = 2_000
SETTINGS = "settings"
"""The name in the file of a seed under which it says what its figures depend on."""


class Sizes(Struct, frozen=True):
    """The size of a comparison."""

    pools: int = 4
    training: int = 160
    validation: int = 80
    tested: int = 50
    ratings: int = 1_000
    """Verdicts that the product's selector gets over each pool."""


class Figures(Struct, frozen=True):
    """The figures of one policy under one seed and split: expected reward, accuracy and dollars by pool and task."""

    reward: Matrix
    right: Matrix
    usd: Matrix


@dataclass(slots=True)
class SeedResults:
    """The figures of one seed, by split and policy."""

    seed: int
    splits: dict[Name, dict[str, Figures]] = field(default_factory=dict)

    def gap(self, split: Name) -> Matrix:
        """Return the optimum less the reference, by pool and task."""
        figures = self.splits[split]
        return figures[OPTIMUM].reward - figures[best_domain_plan(figures)].reward


def best_domain_plan(figures: Mapping[str, Figures]) -> str:
    """Return the best plan by domain, by any classifier."""
    names = [name for name in figures if name.startswith("plan by domain")]
    return max(names, key=lambda name: float(figures[name].reward.mean()))


class PolicyGroup(Struct, frozen=True):
    """Policies that are made together: their names, and how to make them from the settings of the pools that training
    meets, and the seed."""

    names: tuple[str, ...]
    make: Callable[[Sequence[Setting], int], Sequence[Policy]]


def baseline_group() -> PolicyGroup:
    """Return the policies that are given exact rewards, the reference and the optimum among them."""

    def make(settings: Sequence[Setting], seed: int) -> Sequence[Policy]:
        constant = [*list_fixed_policies(), *domain_plans(seed), true_domain_plans(), NearestOutcomes()]
        return [RandomPlan(seed), *constant, Optimum()]

    names = [policy.name for policy in make([], 0)]
    return PolicyGroup(tuple(names), make)


def selector_group(sizes: Sizes) -> PolicyGroup:
    """Return the baseline that is taught by verdicts over the very pool that it serves."""

    def make(settings: Sequence[Setting], seed: int) -> Sequence[Policy]:
        return [ProductSelector(seed, sizes.ratings)]

    return PolicyGroup((ProductSelector.name,), make)


def run_seed(seed: int, sizes: Sizes, groups: Sequence[PolicyGroup], results: SeedResults | None = None) -> SeedResults:
    """Compare policies under one seed. Groups whose figures `results` has already are not made again."""
    results = results or SeedResults(seed)
    names = set(results.splits.get(SPLITS[0], {}))
    missing = [group for group in groups if not names.issuperset(group.names)]
    if not missing:
        return results
    training = composed.draw_tasks("train", f"{seed}", sizes.training)
    validation = composed.draw_tasks("train", f"{seed}|validation", sizes.validation)
    random = Random(f"world-2|pools|{seed}")
    settings = [Setting(draw_pool(random), training, validation) for _ in range(sizes.pools)]
    policies: list[Policy] = []
    for group in missing:
        policies += group.make(settings, seed)
    tasks_of_split: dict[Name, list[Task]] = {
        "fresh tasks": composed.draw_tasks("fresh", f"{seed}", sizes.tested),
        "unseen phrasings": composed.draw_tasks("phrasings", f"{seed}", sizes.tested),
        "unseen families": composed.draw_tasks("families", f"{seed}", sizes.tested),
    }
    compared = {split: _compare(settings, policies, tasks) for split, tasks in tasks_of_split.items()}
    for split, pools in _draw_unseen_pools(random, sizes.pools).items():
        unseen_settings = [Setting(pool, training, validation) for pool in pools]
        compared[split] = _compare(unseen_settings, policies, tasks_of_split["fresh tasks"])
    for split, figures_of_policy in compared.items():
        results.splits[split] = results.splits.get(split, {}) | figures_of_policy
    return results


def _draw_unseen_pools(random: Random, count: int) -> dict[Name, list[Pool]]:
    return {
        "unseen pools and prices": [draw_pool(random, unseen_pool=True) for _ in range(count)],
        "unseen workers": [draw_pool(random, unseen_workers=True) for _ in range(count)],
    }


def _compare(settings: Sequence[Setting], policies: Sequence[Policy], tasks: Sequence[Task]) -> dict[str, Figures]:
    """Return the figures of these policies over the same tasks, with a row for the pool of each setting. The
    clairvoyant's rewards come with those of the optimum."""
    rows: dict[str, list[tuple[Matrix, Matrix, Matrix]]] = {policy.name: [] for policy in policies}
    above: list[tuple[Matrix, Matrix, Matrix]] = []
    for setting in settings:
        table = setting.table(tasks).astype(float)
        for policy in policies:
            chosen = policy.choose(setting, tasks)
            reward = table[np.arange(len(tasks)), chosen]
            rows[policy.name].append((reward, *_bills(setting, tasks, chosen)))
        if OPTIMUM in rows:
            unknown = np.full(len(tasks), np.nan)
            above.append((clairvoyant_rewards(setting, tasks), unknown, unknown))
    if OPTIMUM in rows:
        rows[CLAIRVOYANT] = above
    figures_of_policy = {}
    for name, by_pool in rows.items():
        rewards, rights, dollars = zip(*by_pool, strict=True)
        figures_of_policy[name] = Figures(np.stack(rewards), np.stack(rights), np.stack(dollars))
    return figures_of_policy


def _bills(setting: Setting, tasks: Sequence[Task], chosen: NDArray[np.int64]) -> tuple[Matrix, Matrix]:
    """Return accuracy and dollars of the chosen plans."""
    right, usd = [], []
    for task, place in zip(tasks, chosen, strict=True):
        plan = setting.plans[int(place)]
        right_by_trait = setting.rewards.right(plan.shape, task)
        right.append(np.mean([chances[plan.workers] for chances in right_by_trait]))
        usd.append(setting.rewards.bill(plan.shape, size_of(task))[0][plan.workers])
    return np.array(right), np.array(usd)


# Keeping.


def save_results(results: SeedResults, path: Path, sizes: Sizes) -> None:
    """Write the figures of a seed as a whole or not at all, so that an interrupted comparison can go on."""
    arrays = {SETTINGS: np.array(_settings_of(sizes))}
    for split, rows in results.splits.items():
        for name, row in rows.items():
            arrays[f"{split}|{name}"] = np.stack([row.reward, row.right, row.usd])
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    part.replace(path)


def load_results(seed: int, path: Path, sizes: Sizes) -> SeedResults:
    """Read the figures of a seed. Raises `ConfigInvalid` if they are of another comparison."""
    results = SeedResults(seed, {split: {} for split in SPLITS})
    with np.load(path) as arrays:
        if SETTINGS not in arrays.files or str(arrays[SETTINGS]) != _settings_of(sizes):
            raise ConfigInvalid([f"{path} was kept by a comparison of other sizes or constants; name another folder"])
        for key in arrays.files:
            if key != SETTINGS:
                split, name = key.split("|")
                results.splits[split][name] = Figures(*arrays[key])
    return results


def _settings_of(sizes: Sizes) -> str:
    """Return what the figures of a seed depend on apart from the code."""
    return f"{sizes}, constants {figures.FROZEN}, families {composed.FROZEN_FAMILIES}"


# Intervals.


def bootstrap_pools_and_tasks(values: Matrix, random: np.random.Generator) -> Matrix:
    """Return the means of a matrix in each resample of a two-way bootstrap: pools and tasks are drawn again, both at
    once. (`paired_statistics.paired_bootstrap` draws tasks alone, for several arms together.)"""
    pools, tasks = values.shape
    by_pool = random.multinomial(pools, [1 / pools] * pools, size=RESAMPLES) / pools
    by_task = random.multinomial(tasks, [1 / tasks] * tasks, size=RESAMPLES) / tasks
    means: Matrix = ((by_pool @ values) * by_task).sum(axis=1)
    return means


def bootstrap_seeds(draws: Sequence[Matrix], random: np.random.Generator) -> Matrix:
    """Return the means over seeds that are drawn again, each with one of its own draws."""
    stacked = np.stack(draws)
    seeds = random.integers(len(draws), size=(RESAMPLES, len(draws)))
    picks = random.integers(stacked.shape[1], size=(RESAMPLES, len(draws)))
    means: Matrix = stacked[seeds, picks].mean(axis=1)
    return means


def format_interval(draws: Matrix) -> str:
    """Return the 95 % percentile interval, in words."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"[{low:+.3f}, {high:+.3f}]"


# The report.


def report(results: Sequence[SeedResults], sizes: Sizes) -> str:
    """Return the tables: by split all policies over all seeds, then the gap of each seed, worst first."""
    lines = [
        f"{len(results)} seeds (worst first), {sizes.pools} pools and {sizes.tested} test tasks for each split and "
        f"seed; {sizes.training} training and {sizes.validation} validation tasks; constants {figures.FROZEN[:12]}. "
        "The reference is the best plan by domain; differences have 95 % intervals over seeds, pools and tasks.",
    ]
    for split in SPLITS:
        lines += ["", f"### {split.capitalize()}", "", *_split_table(results, split)]
    lines += ["", "### The gap by seed", "", *_gap_table(results)]
    names = list(results[0].splits[SPLITS[0]])
    learned = [name for name in names if name.startswith("learned")]
    thrifty = [name for name in names if name.startswith("thrifty")]
    for name in learned[-1:] + thrifty:
        lines += ["", f"### The share of the gap by seed: {name}", "", *_share_table(results, name)]
    return "\n".join(lines) + "\n"


def _split_table(results: Sequence[SeedResults], split: Name) -> list[str]:
    lines = [
        "| policy | reward | worst seed | less the reference | share of the gap | accuracy | m$ |",
        "|---|---|---|---|---|---|---|",
    ]
    gap = float(np.mean([result.gap(split).mean() for result in results]))
    seeds = [result.splits[split] for result in results]
    for name in _policies_of_all_seeds(seeds):
        lines.append(_policy_line(name, seeds, gap))
    return lines


def _policy_line(name: str, seeds: Sequence[Mapping[str, Figures]], gap: float) -> str:
    """Return the line of one policy, from the figures of all policies under each seed; `gap` is the mean gap."""
    rewards, accuracies, dollars = [], [], []
    leads: list[Matrix] = []
    for by_policy in seeds:
        own, reference = by_policy[name], by_policy[best_domain_plan(by_policy)]
        rewards.append(float(own.reward.mean()))
        accuracies.append(own.right.mean())
        dollars.append(own.usd.mean())
        leads.append(own.reward - reference.reward)
    random = np.random.default_rng(1)
    draws = bootstrap_seeds([bootstrap_pools_and_tasks(lead, random) for lead in leads], random)
    less = float(np.mean([lead.mean() for lead in leads]))
    usd = float(np.mean(dollars))
    bill = " | "
    if not np.isnan(usd):
        bill = f"{float(np.mean(accuracies)):.3f} | {1e3 * usd:.2f}"
    return (
        f"| {name} | {np.mean(rewards):.3f} | {min(rewards):.3f} | {less:+.3f} {format_interval(draws)} | "
        f"{100 * less / gap:.0f} % | {bill} |"
    )


def _policies_of_all_seeds(seeds: Sequence[Mapping[str, Figures]]) -> list[str]:
    """Return the policies that all seeds have, those with the least reward first."""
    names = set(seeds[0]).intersection(*seeds)
    return sorted(names, key=lambda name: float(np.mean([by_policy[name].reward.mean() for by_policy in seeds])))


def _gap_table(results: Sequence[SeedResults]) -> list[str]:
    """Return the gap by seed and split with its interval, the seed with the smallest gap first."""
    lines = [f"| seed | {' | '.join(SPLITS)} |", "|---" * (1 + len(SPLITS)) + "|"]
    for result in sorted(results, key=lambda each: float(each.gap("fresh tasks").mean())):
        cells = []
        for split in SPLITS:
            draws = bootstrap_pools_and_tasks(result.gap(split), np.random.default_rng(1))
            cells.append(f"{result.gap(split).mean():+.3f} {format_interval(draws)}")
        lines.append(f"| {result.seed} | {' | '.join(cells)} |")
    return lines


def _share_table(results: Sequence[SeedResults], name: str) -> list[str]:
    """Return the share of the gap that a policy closes under each seed."""
    lines = [f"| seed | {' | '.join(SPLITS)} |", "|---" * (1 + len(SPLITS)) + "|"]
    rows = []
    for result in results:
        shares = []
        for split in SPLITS:
            figures = result.splits[split]
            lead = figures[name].reward - figures[best_domain_plan(figures)].reward
            shares.append(float(lead.mean()) / float(result.gap(split).mean()))
        rows.append((shares, result.seed))
    for shares, seed in sorted(rows):
        cells = [f"{100 * share:.0f} %" for share in shares]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return lines
