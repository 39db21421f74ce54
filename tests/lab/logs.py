"""A log of decisions in the rehearsal world, the truth about any policy there, and how well the estimators find it.

The arms are plans over the standard pool. The log's policy is greedy for what 1,000 earlier decisions taught it, in 70
of 100 decisions, and draws any arm in the others.
`python -m tests.lab.logs` prints a table for `deploy/docs/offpolicy.md`. With `--looks --repeats 200` it prints how
often the intervals that are to hold at all times do hold.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from statistics import mean, stdev
from typing import Any
from zlib import crc32

from msgspec import Struct

from app.core.rating.intervals import NORMAL_QUANTILE, half_width
from app.lab import offpolicy
from app.lab.offpolicy import Estimate, Log, LoggedOutcome, Model, Policy, Report
from app.lab.outcome import outcome
from app.lab.plans import Plan, PlanStep
from app.lab.world import Setting, standard_pool
from app.providers.rehearsal.task_families import FAMILIES, LEVELS, Family, write

EXPLORED = 0.3
WORDS = 32
"""Places of the hashed words among the features."""
PHRASINGS = 4
TRUTH = 25
"""Tasks of each family, level and phrasing, over all of which the truth about a policy is the mean of its exact
expectations."""
LOOKS = (100, 150, 200, 300, 400, 600, 800, 1_200, 1_600)
"""The numbers of rows after which `--looks` judges a log."""
ESTIMATORS = ("logged", "ips", "snips", "dr")


@cache
def arms() -> Mapping[str, Plan]:
    """Twenty-three plans: each worker at once and step by step, with a planner before it, with a checker behind it, and
    with both."""
    place = {worker.name: n for n, worker in enumerate(standard_pool())}
    plans = PlanStep(place["flint"], "plan")
    arms_by_name: dict[str, Plan] = {}
    for name, n in place.items():
        arms_by_name[name] = (PlanStep(n, "solve"),)
        arms_by_name[f"{name}, step by step"] = (PlanStep(n, "reason"),)
        if name != "flint":
            arms_by_name[f"flint > {name}"] = (plans, PlanStep(n, "reason", True, (0,)))
            arms_by_name[f"{name} > flint"] = (PlanStep(n, "reason"), PlanStep(place["flint"], "check", True, (0,)))
    solved, checked = PlanStep(place["ember"], "reason", True, (0,)), PlanStep(place["flint"], "check", True, (1,))
    return arms_by_name | {"flint > ember > flint": (plans, solved, checked)}


@cache
def worth(arm: str, kind: tuple[int, int]) -> tuple[float, float]:
    """The chance that an arm's answer is right, and what it is worth then."""
    expected = outcome(arms()[arm], kind, Setting(standard_pool()))
    return expected.right, expected.worth


@dataclass(frozen=True)
class TaskFeatures:
    """A task: what a selector sees of it, and its class."""

    features: tuple[float, ...]
    kind: tuple[int, int]


Choose = Callable[[TaskFeatures], Policy]


def draw_task(random: Random) -> TaskFeatures:
    """Any task."""
    return _make_task(random, random.choice(FAMILIES), random.randrange(LEVELS), random.randrange(PHRASINGS))


def every(random: Random) -> list[TaskFeatures]:
    """Return equally many tasks of each family, level and phrasing."""
    cells = product(FAMILIES, range(LEVELS), range(PHRASINGS))
    return [_make_task(random, *cell) for cell in cells for _ in range(TRUTH)]


def _make_task(random: Random, family: Family, level: int, phrasing: int) -> TaskFeatures:
    problem = write(random, family, level, phrasing)
    return TaskFeatures(features(problem.text), problem.kind)


def features(text: str) -> tuple[float, ...]:
    """Hashed words, and how many words and numbers there are and how long those get."""
    words, numbers = re.findall(r"[a-z]+", text.casefold()), re.findall(r"\d+", text)
    places = [0.0] * WORDS
    for word in words:
        places[crc32(word.encode()) % WORDS] = 1.0
    return (*places, len(words) / 20, len(numbers) / 5, max(map(len, numbers), default=0) / 5)


def log_decisions(random: Random, policy: Choose, count: int) -> tuple[list[TaskFeatures], list[LoggedOutcome]]:
    """So many decisions of a policy, and what came of them."""
    tasks, rows = [], []
    for _ in range(count):
        task = draw_task(random)
        odds = policy(task)
        arm = random.choices(list(odds), list(odds.values()))[0]
        right, value = worth(arm, task.kind)
        rows.append(LoggedOutcome(task.features, arm, odds[arm], value if random.random() < right else 0.0))
        tasks.append(task)
    return tasks, rows


def uniform(_: TaskFeatures) -> Policy:
    """Any arm."""
    return dict.fromkeys(arms(), 1 / len(arms()))


def always(arm: str) -> Choose:
    """One arm."""
    return lambda _: {arm: 1.0}


def greedy(model: Model) -> Choose:
    """Return the action with the highest expected reward by a model."""
    return lambda task: {max(arms(), key=lambda arm: model.predict(arm, task.features)): 1.0}


def mix_policies(*parts: tuple[float, Choose]) -> Choose:
    """Each of these policies with its share."""

    def choose(task: TaskFeatures) -> Policy:
        odds: dict[str, float] = {}
        for share, policy in parts:
            for arm, chance in policy(task).items():
                odds[arm] = odds.get(arm, 0.0) + share * chance
        return odds

    return choose


class Study(Struct, frozen=True):
    """The policy of the log, and those that are judged from it."""

    policy: Choose
    targets: Mapping[str, Choose]

    def truths(self) -> dict[str, float]:
        """Return the true value of each policy."""
        tasks = every(Random("truth"))
        truth_by_policy = {}
        for name, policy in self.targets.items():
            truth_by_policy[name] = mean(_expected_worth(policy, task) for task in tasks)
        return truth_by_policy

    def reports(self, seed: int, rows: int) -> Iterator[tuple[str, Report]]:
        """Return the estimates for each policy from one log of so many rows."""
        tasks, decisions = log_decisions(Random(f"log {seed}"), self.policy, rows)
        log = Log(decisions)
        for name, policy in self.targets.items():
            yield name, log.report([policy(task) for task in tasks])


def _expected_worth(policy: Choose, task: TaskFeatures) -> float:
    worth_by_arm = {arm: worth(arm, task.kind) for arm in policy(task)}
    return sum(chance * worth_by_arm[arm][0] * worth_by_arm[arm][1] for arm, chance in policy(task).items())


def fit_model(rows: Sequence[LoggedOutcome]) -> Model:
    """Return the regressions over all of these rows, of which there is one at least."""
    size = offpolicy._model_size(rows)
    by_arm: dict[str, Any] = {}
    for row in rows:
        offpolicy._add_row(by_arm, row, offpolicy._vector(row.features), size)
    return offpolicy._fit([by_arm], size, offpolicy._reward_bounds(rows))


@cache
def study(seed: int = 0) -> Study:
    """The log's policy has learned from 1,000 decisions, its successor from 4,000."""
    random = Random(f"study {seed}")
    served = greedy(fit_model(log_decisions(random, uniform, 1_000)[1]))
    learned = greedy(fit_model(log_decisions(random, uniform, 4_000)[1]))
    targets = {
        "as it serves without exploring": served,
        "any arm": uniform,
        "its successor for half of all tasks": mix_policies((0.5, served), (0.5, learned)),
        "its successor": learned,
        "always flint > ember": always("flint > ember"),
    }
    return Study(mix_policies((1 - EXPLORED, served), (EXPLORED, uniform)), targets)


def table(reports_by_name: Mapping[str, Sequence[Report]], truths: Mapping[str, float]) -> str:
    """Bias, spread and coverage of each estimator for each policy."""
    lines = [f"{'policy':37}truth   ESS  covered  refused  " + "".join(f"{name:>22}" for name in ESTIMATORS)]
    for policy, reports in reports_by_name.items():
        refused = sum(report.verdict == "refused" for report in reports)
        head = f"{policy:37}{truths[policy]:.3f}  {mean(report.ess for report in reports):4.0f}  "
        head += f"{mean(report.covered for report in reports):7.2f}  {refused:3d} of {len(reports):<2d}"
        for name in ESTIMATORS:
            estimates = [getattr(report, name) for report in reports]
            off, spread = (
                mean(estimate.value for estimate in estimates) - truths[policy],
                stdev(estimate.value for estimate in estimates),
            )
            holding_share = sum(estimate.holds(truths[policy]) for estimate in estimates) / len(estimates)
            head += f"  {off:+.3f} / {spread:.3f} {holding_share:4.0%}"
        lines.append(head)
    return "\n".join(lines)


def shares_held_at_all_looks(repeats: int, looks: Sequence[int], seed: int = 0) -> tuple[float, float]:
    """The share of simulated logs whose interval of the advantage holds the truth at every look, for the intervals that
    hold at all times and for those of one look.

    Two arms are drawn evenly, in conversations of one to four rows that have the same difficulty. The truth is that
    the first arm is ahead of the log by 0.1.
    """
    holding = fixed = 0
    for repeat in range(repeats):
        rows = _conversations(Random(f"looks|{seed}|{repeat}"), max(looks))
        reports = [Log(rows[:look]).report([{"a": 1.0}] * look) for look in looks]
        holding += all(report.ahead.holds(0.1) for report in reports)
        fixed += all(_of_one_look(report).holds(0.1) for report in reports)
    return holding / repeats, fixed / repeats


def _of_one_look(report: Report) -> Estimate:
    """The advantage with the normal interval."""
    half = (report.ahead.high - report.ahead.low) / 2
    wide = half * NORMAL_QUANTILE / (half_width(report.clusters) * math.sqrt(report.clusters))
    return Estimate(report.ahead.value, report.ahead.value - wide, report.ahead.value + wide)


def _conversations(random: Random, count: int) -> list[LoggedOutcome]:
    rows: list[LoggedOutcome] = []
    while len(rows) < count:
        hard, name = random.choice((-0.2, 0.2)), f"{len(rows)}"
        for _ in range(random.randint(1, 4)):
            arm = random.choice("ab")
            right = random.random() < (0.6 if arm == "a" else 0.4) + hard
            rows.append(LoggedOutcome((), arm, 0.5, float(right), name))
    return rows[:count]


def main() -> None:
    """Repeat, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--looks", action="store_true", help="coverage of intervals at several looks, and nothing else")
    options = parser.parse_args()
    if options.looks:
        holding, fixed = shares_held_at_all_looks(options.repeats, LOOKS, options.seed)
        looks = ", ".join(map(str, LOOKS))
        rows = f"{options.repeats} logs, looks after {looks} rows"
        print(f"{rows}: {holding:.1%} held at all looks, {fixed:.1%} if for one look")
        return
    under = study(options.seed)
    reports_by_name: dict[str, list[Report]] = {name: [] for name in under.targets}
    for repeat in range(options.repeats):
        for name, report in under.reports(repeat, options.rows):
            reports_by_name[name].append(report)
    print(
        f"{len(arms())} arms, {options.rows} rows, {options.repeats} repeats; bias / sd and coverage of each estimator"
    )
    print(table(reports_by_name, under.truths()))


if __name__ == "__main__":
    main()
