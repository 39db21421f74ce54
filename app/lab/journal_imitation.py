"""Journaled runs as examples that the small conductor can imitate: tasks of the rehearsal world, and plans of its
grammar.

A rollout is anybody's: the small conductor reads the world's templates and writes the world's five subtasks, and what
it could not have read or written is left out, each by its reason. So are tasks, phrasings and pools that are held out
for evaluation. A worker's price is that of its card at the time.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app.errors import ConfigInvalid
from app.lab.lessons import Lesson
from app.lab.offpolicy import effective_size
from app.lab.plans import SLOTS, SUBTASKS, Plan, PlanStep, accesses, from_tokens, to_tokens
from app.lab.rollouts import Rollout, with_weights
from app.lab.world import Pool, Weights, is_held_out, profiles
from app.providers.rehearsal.task_families import Problem, is_reserved_for_evaluation, read

BETA, CAP = 0.3, 20.0
PRICE = re.compile(r"^Worker (\d+): .*?price per million tokens: \$\S+ in, \$(\d[\d.e+-]*) out", re.MULTILINE)
"""In a prompt's card; what it says is in dollars."""
ROLES: Mapping[str, str] = {words: role for role, words in SUBTASKS.items()}


class UnusableRollout(Exception):
    """A rollout that the small conductor cannot learn from; the message is the reason, in words that fit many."""


class JournaledExample(Struct, frozen=True):
    """A task before its pool, the plan that was carried out, over the pool's places, and how much that counts."""

    problem: Problem
    pool: Pool
    plan: Plan
    weight: float

    def lesson(self, random: Random) -> Lesson:
        """Return the task with its pool in a random order, so that the worker is learned and not its place."""
        order = list(range(len(self.pool)))
        random.shuffle(order)
        return Lesson(self.problem, self.pool, tuple(order))


def build_examples(
    rollouts: Sequence[Rollout], weights: Weights, beta: float = BETA
) -> tuple[list[JournaledExample], Counter[str]]:
    """Return the runs that can be learned from, each weighted by exp(advantage / beta) as in
    `rollouts.with_weights`; and the number of those that cannot, by reason. Only those that can count in a mean."""
    readable: list[tuple[Rollout, tuple[Problem, Pool, Plan]]] = []
    skipped: Counter[str] = Counter()
    for rollout in rollouts:
        try:
            readable.append((rollout, _parse_rollout(rollout)))
        except UnusableRollout as reason:
            skipped[str(reason)] += 1
    weighted = with_weights([rollout for rollout, _ in readable], weights, beta, CAP)
    examples = []
    for (_, (problem, pool, plan)), (_, weight) in zip(readable, weighted, strict=True):
        examples.append(JournaledExample(problem, pool, plan, weight))
    return examples, skipped


def examples_for(
    rollouts: Sequence[Rollout], weights: Weights, beta: float, say: Callable[[str], None]
) -> list[JournaledExample]:
    """Return the runs that the small conductor learns from, and report those left out. Raises `ConfigInvalid` if none
    is left."""
    examples, skipped = build_examples(rollouts, weights, beta)
    effective = effective_size([run.weight for run in examples])
    say(f"{len(examples)} of {len(rollouts)} rollouts are imitated, by their weights worth {effective:.0f} equal ones")
    for reason, count in skipped.most_common():
        say(f"left out: {count}, because {reason}")
    if not examples:
        raise ConfigInvalid(["--warm-start: the small conductor can learn from none of these rollouts"])
    return examples


def digest_of(runs: Sequence[JournaledExample]) -> str:
    """Return the SHA-256 of what is imitated; an empty string if nothing is."""
    if not runs:
        return ""
    return hashlib.sha256(repr(runs).encode()).hexdigest()


def _parse_rollout(rollout: Rollout) -> tuple[Problem, Pool, Plan]:
    if rollout.split != "train":
        raise UnusableRollout("it is held out")
    if rollout.verdict is None:
        raise UnusableRollout("nobody has rated it")
    return _problem(rollout), _pool(rollout), _plan(rollout)


def _problem(rollout: Rollout) -> Problem:
    messages = [turn["content"] for turn in rollout.conversation]
    problem = None
    if len(messages) == 1:
        problem = read(messages[0])
    if problem is None:
        raise UnusableRollout("its task is none of the world's")
    if is_reserved_for_evaluation(problem):
        raise UnusableRollout("its task is kept for examinations")
    return problem


def _pool(rollout: Rollout) -> Pool:
    everyone = profiles()
    if not set(rollout.workers) <= everyone.keys():
        raise UnusableRollout("its pool has workers that are not of the world")
    if len(rollout.workers) > SLOTS:
        raise UnusableRollout(f"its pool has more than {SLOTS} workers")
    if is_held_out(rollout.workers):
        raise UnusableRollout("its pool is kept for examinations")
    price_of_place: dict[int, float] = {}
    for place, price in PRICE.findall(rollout.prompt[0]["content"]):
        price_of_place[int(place)] = float(price)
    pool = []
    for place, name in enumerate(rollout.workers):
        worker = everyone[name]
        pool.append(replace(worker, price=price_of_place.get(place, worker.price)))
    return tuple(pool)


def _plan(rollout: Rollout) -> Plan:
    try:
        plan = tuple(map(_step, json.loads(rollout.completion)["steps"]))
        from_tokens(to_tokens(plan))
        workers = [step.worker for step in plan]
        least, most = min(workers), max(workers)
    except (ValueError, KeyError, TypeError):
        raise UnusableRollout("its plan is none that the small conductor can write") from None
    if least < 0 or most >= len(rollout.workers):
        raise UnusableRollout("its plan names a worker that was not offered")
    return plan


def _step(entry: Mapping[str, Any]) -> PlanStep:
    """Return a step of a plan. Raises KeyError or ValueError for what the grammar does not have, tools and other words
    included."""
    listed = list(entry["access"])
    user = "user" in listed
    sees = tuple(name for name in listed if name != "user")
    if entry.get("tools") or (user, sees) not in accesses():
        raise ValueError
    return PlanStep(int(entry["worker"]), ROLES[entry["subtask"]], user, sees)
