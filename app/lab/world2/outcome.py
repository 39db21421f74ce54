"""The exact expected reward of plans in world 2: for one kind of task and one pool, all assignments of a shape at once.

Shapes are trees: every answer is used once. Given a task's hidden trait and whether its plan and its digest are good,
the parts of a task are independent of each other, and so are the branches of a shape. So the chance that a part is
right in the end is a product of sums along the tree, and the chance of the whole is summed over trait, plan and digest.
Arrays have one axis for the case (the trait; where several drawn pools are given, each pool's traits one after the
other) and one for the worker of each step. `execution.py` is the same world as workers
that read messages; a test finds the same figures on every shape and role.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.lab.world2.constants import DOCUMENT_TOKENS, TRAITS, Constants, constants
from app.lab.world2.rules import (
    ANSWERING,
    LANGUAGE,
    PARTIAL,
    Size,
    combine_logit,
    contributing_steps,
    input_tokens_of_step,
    output_tokens_of_step,
    parts_handed_over,
    size_of,
)
from app.lab.world2.shapes import Plan, Shape, catalogue
from app.lab.world2.tasks import Family, Task
from app.lab.world2.workers import Pool

Array: TypeAlias = NDArray[np.float64]


class Rewards:
    """The expected rewards of all plans over one pool. What recurs from task to task is computed once.

    `known` are the world's constants; a policy that believes in others can ask what would be best if they were true.
    `others` are the same workers with other skills: rewards are then means over `pool` and all of these, so that a
    policy that does not know the skills can ask what is best on average over what they may be. `worths` are what right
    answers are worth: whoever asks for several beliefs over one pool can let them share these, since they follow from
    the cards alone.
    """

    def __init__(
        self,
        pool: Pool,
        known: Constants | None = None,
        others: Sequence[Pool] = (),
        worths: dict[tuple[str, Size], Array] | None = None,
    ) -> None:
        self.pool, self._constants = pool, known or constants()
        abilities, edges = [], []
        for offered in (pool, *others):
            abilities.append([worker.ability for worker in offered])
            edges.append([worker.edges for worker in offered])
        self._ability, self._edges = np.array(abilities), np.array(edges)
        self._cases = len(self._ability) * len(TRAITS)
        self._context = np.array([float(worker.card.context) for worker in pool])
        self._price = np.array([worker.price for worker in pool])
        self._speed = np.array([worker.card.speed for worker in pool])
        self._retains = np.array([worker.card.retains for worker in pool])
        self._parts: dict[tuple[str, str, int, int, int, int, int], Array] = {}
        self._chances: dict[tuple[str, bool, int, int, int, int], Array] = {}
        self._hints: dict[tuple[str, str, int, int], Array] = {}
        self._worths = {} if worths is None else worths
        self._kind: tuple[tuple[str, ...], int] = ((), 0)
        self._means: dict[str, Array] = {}

    def table(self, shape: str, task: Task) -> Array:
        """Return the expected reward of each assignment, over the hidden trait: one axis for each step."""
        families, document, _ = task.kind
        if (families, document) != self._kind:
            self._kind, self._means = (families, document), {}
        if shape not in self._means:
            self._means[shape] = self.right(shape, task).mean(axis=0)
        return self._means[shape] * self.worth(shape, size_of(task))

    def right(self, shape: str, task: Task) -> Array:
        """Return the chance of a right answer by case (first axis) and assignment."""
        return self.mean_right(shape, [(1.0, task)])

    def mean_right(self, shape: str, tasks: Sequence[tuple[float, Task]]) -> Array:
        """Return the chance of a right answer, on average over tasks that differ in the families of their parts alone;
        each has its weight."""
        steps, document = catalogue()[shape], tasks[0][1].document
        total = np.zeros((self._cases, *[1] * len(steps)))
        for plan, digest in product(_bit_values(steps, "plan"), _bit_values(steps, "digest")):
            whole = self._all_parts(shape, tasks, plan, digest)
            if digest is not None:
                whole = self._chance_of(shape, "digest", digest, document) * whole
            if plan is not None:
                whole = self._chance_of(shape, "plan", plan, 0) * whole
            total = total + whole
        return np.broadcast_to(total, (self._cases, *[len(self.pool)] * len(steps)))

    def _all_parts(
        self, shape: str, tasks: Sequence[tuple[float, Task]], plan: int | None, digest: int | None
    ) -> Array:
        """Return the chance that all parts are right, given whether plan and digest are good, on average over tasks."""
        average: Array = np.zeros(())
        for weight, task in tasks:
            whole: Array = np.full((), weight)
            for place in range(len(task.parts)):
                whole = whole * self._part_right(shape, task, place, plan, digest)
            average = average + whole
        return average

    def worth(self, shape: str, size: Size) -> Array:
        """Return what a right answer is worth: 1 less the shares of its cost, its wait and its disclosure."""
        key = (shape, size)
        if key not in self._worths:
            _, seconds, disclosed = self.bill(shape, size)
            cost, known = self.share_of_cost(shape, size), self._constants
            wait = known.wait * np.minimum(1.0, seconds / known.full_seconds)
            self._worths[key] = 1 - cost - wait - known.disclosure * disclosed
        return self._worths[key]

    def share_of_cost(self, shape: str, size: Size) -> Array:
        """Return what the dollars of a plan take from the worth of a right answer."""
        usd, _, _ = self.bill(shape, size)
        share: Array = self._constants.cost * np.minimum(1.0, usd / self._constants.full_usd)
        return share

    def bill(self, shape: str, size: Size) -> tuple[Array, Array, Array]:
        """Return dollars, seconds on the critical path, and 1 where a confidential task is read by who retains it."""
        steps, known = catalogue()[shape], self._constants
        usd: Array = np.zeros([1] * len(steps))
        disclosed: Array = np.zeros([1] * len(steps))
        ends: list[Array] = []
        for place, step in enumerate(steps):
            reads = np.minimum(self._context, input_tokens_of_step(steps, step, size))
            writes = output_tokens_of_step(steps, step, size.parts)
            usd = usd + self._axis(self._price * (writes + known.input_share * reads) / 1e6, place, len(steps))
            lasts = known.overhead_seconds + reads / known.read_per_second + writes / self._speed
            begins: Array = np.zeros([1] * len(steps))
            for seen in step.sees:
                begins = np.maximum(begins, ends[seen])
            ends.append(begins + self._axis(lasts, place, len(steps)))
            if step.user and size.confidential:
                disclosed = np.maximum(disclosed, self._axis(self._retains.astype(float), place, len(steps)))
        shown = [len(self.pool)] * len(steps)
        last = ends[0]
        for end in ends:
            last = np.maximum(last, end)
        return np.broadcast_to(usd, shown), np.broadcast_to(last, shown), np.broadcast_to(disclosed, shown)

    def tokens(self, shape: str, size: Size) -> Array:
        """Return the tokens that the workers of a plan read and write."""
        steps = catalogue()[shape]
        total: Array = np.zeros([1] * len(steps))
        for place, step in enumerate(steps):
            shown = np.minimum(self._context, input_tokens_of_step(steps, step, size))
            total = total + self._axis(shown + output_tokens_of_step(steps, step, size.parts), place, len(steps))
        return np.broadcast_to(total, [len(self.pool)] * len(steps))

    def _axis(self, values: Array, place: int, steps: int) -> Array:
        """Return values by worker, laid along the axis of the step at `place`."""
        return values.reshape([len(self.pool) if n == place else 1 for n in range(steps)])

    def _by_case(self, values: Array, place: int, steps: int) -> Array:
        """Return values by pool and worker, laid along the axes of the case and of the step at `place`."""
        repeated = np.repeat(values, len(TRAITS), axis=0)
        return repeated.reshape([self._cases, *[len(self.pool) if n == place else 1 for n in range(steps)]])

    def _chance_of(self, shape: str, role: str, good: int, document: int) -> Array:
        """Return the chance that the plan, or the digest, is as `good` says."""
        key = (shape, role, good, document)
        if key not in self._hints:
            steps = catalogue()[shape]
            place = [step.role for step in steps].index(role)
            chance = self._by_case(self._hint_chance(role, document), place, len(steps))
            self._hints[key] = chance if good else 1 - chance
        return self._hints[key]

    def _hint_chance(self, role: str, document: int) -> Array:
        """Return the chance that each worker's plan, or digest, is good, by case."""
        known = self._constants
        if role == "plan":
            return _logistic(known.plan_skill + known.check_skill * (self._ability - known.ability_mean))
        return _logistic(
            known.digest_keeps + known.check_skill * self._edges[:, :, LANGUAGE] + self._truncation(document)
        )

    def _truncation(self, document: int) -> Array:
        """Return the loss of workers whose context is shorter than the document."""
        return np.where(self._context < DOCUMENT_TOKENS[document], self._constants.truncated, 0.0)

    def _part_right(self, shape: str, task: Task, place: int, plan: int | None, digest: int | None) -> Array:
        """Return the chance that one part is right in the end, by case and assignment."""
        steps, family = catalogue()[shape], task.parts[place].family
        parts, document = len(task.parts), task.document
        works_apart = any([step.role in PARTIAL for step in steps])
        place = min(place, len(PARTIAL)) if works_apart else len(PARTIAL)
        key = (shape, family.name, place, parts, document, _as_key(plan), _as_key(digest))
        if key not in self._parts:
            query = _PartQuery(steps, family, place, parts, document, plan, digest)
            self._parts[key] = self._part_right_at(query, len(steps) - 1)
        return self._parts[key]

    def _part_right_at(self, args: "_PartQuery", at: int) -> Array:
        """Return the chance that the part is right in what the step `at` says."""
        step = args.steps[at]
        if step.role == "check":
            return self._part_checked(args, at)
        if step.role == "combine":
            return self._part_combined(args, at)
        handed = parts_handed_over(args.steps, step, args.parts)
        if args.place in handed:
            return self._constants.handover * self._part_right_at(args, handed[args.place])
        return self._part_solved(args, at, step.role, len(handed))

    def _part_solved(self, args: "_PartQuery", at: int, role: str, handed: int) -> Array:
        """Return the chance that the worker of a step solves the part, `handed` others being worked out already."""
        step = args.steps[at]
        planned = any([args.steps[seen].role == "plan" for seen in step.sees])
        at_once = 1 if role in PARTIAL else args.parts - handed
        plan = args.plan if planned else None
        digest = None if step.user else args.digest
        key = (args.family.name, role != "solve", at_once, _as_key(plan), _as_key(digest), args.document)
        if key not in self._chances:
            self._chances[key] = self._chance(args, role != "solve", at_once, plan, digest)
        shown = [len(self.pool) if place == at else 1 for place in range(len(args.steps))]
        return self._chances[key].reshape([self._cases, *shown])

    def _chance(self, args: "_PartQuery", reasons: bool, at_once: int, plan: int | None, digest: int | None) -> Array:
        """Return the chance that each worker (column) solves the part in each case (row).

        `digest` is 1 if the digest that the step reads is good and 0 if it is not, None where the step sees the task.
        """
        known, domain = self._constants, args.family.domain
        logits = self._ability + self._edges[:, :, domain] - args.family.difficulty - known.load * (at_once - 1)
        logits = logits + (known.reason[domain] if reasons else 0.0)
        if plan is not None:
            logits = logits + (known.plan_good if plan else known.plan_bad)
        if digest is None:
            logits = logits - known.length[args.document] + self._truncation(args.document)
        elif not digest:
            logits = logits + known.digest_lost
        traits = known.trait_sd * np.array(TRAITS)
        return _logistic(logits[:, None, :] - traits[:, None]).reshape(self._cases, len(self.pool))

    def _part_checked(self, args: "_PartQuery", at: int) -> Array:
        known, steps = self._constants, args.steps
        (seen,) = [place for place in steps[at].sees if steps[place].role in ANSWERING]
        skill = known.check_skill * (self._ability - known.ability_mean)
        before = self._part_right_at(args, seen)
        keeps = self._by_case(_logistic(known.keeps + skill), at, len(steps))
        other = self._by_case(_logistic(known.finds_other + skill), at, len(steps))
        own = self._by_case(_logistic(known.finds_own + skill), at, len(steps))
        finds = np.where(self._is_one_of(steps, at, contributing_steps(steps, seen, args.parts)), own, other)
        return before * keeps + (1 - before) * finds * self._part_solved(args, at, "reason", 0)

    def _part_combined(self, args: "_PartQuery", at: int) -> Array:
        known, steps = self._constants, args.steps
        branches = [self._part_right_at(args, place) for place in steps[at].sees if steps[place].role in ANSWERING]
        skill = known.check_skill * (self._ability - known.ability_mean)
        counts: list[Array] = [np.ones(())]
        for branch in branches:
            counts = _add_branch(counts, branch)
        chosen: Array = np.zeros(())
        for right in range(1, len(counts)):
            logits = combine_logit(right, len(branches), known) + np.where(right < len(branches), skill, 0.0)
            chosen = chosen + counts[right] * self._by_case(_logistic(logits), at, len(steps))
        return chosen

    def _is_one_of(self, steps: Shape, at: int, others: Sequence[int]) -> NDArray[np.bool_]:
        """Return True where the worker of step `at` is the worker of one of the others."""
        places = np.arange(float(len(self.pool)))
        mine = self._axis(places, at, len(steps))
        found = np.zeros([1] * len(steps), dtype=bool)
        for other in others:
            found = found | (mine == self._axis(places, other, len(steps)))
        return found


@dataclass(frozen=True, slots=True)
class _PartQuery:
    """One part of a task under one shape, given whether the plan and the digest are good."""

    steps: Shape
    family: Family
    place: int
    parts: int
    document: int
    plan: int | None
    digest: int | None


def all_plans(workers: int) -> list[Plan]:
    """Return all plans over a pool of so many workers, in the order of `rewards_of_all_plans`."""
    found = []
    for name, steps in catalogue().items():
        found += [Plan(name, chosen) for chosen in product(range(workers), repeat=len(steps))]
    return found


def rewards_of_all_plans(rewards: Rewards, task: Task) -> NDArray[np.float32]:
    """Return the expected rewards of all plans for one task, in the order of `all_plans`."""
    tables = [rewards.table(name, task).ravel() for name in catalogue()]
    return np.concatenate(tables).astype(np.float32)


def mean_rewards_of_all_plans(rewards: Rewards, readings: Sequence[tuple[float, Task]]) -> NDArray[np.float64]:
    """Return the expected rewards of all plans, in the order of `all_plans`, on average over readings of one task.

    Readings have weights that add up to 1. They agree in the number of parts and in the document. What a text says of
    its parts tells nothing of its confidence, so that their chances are multiplied.
    """
    by_families: dict[tuple[str, ...], tuple[float, Task]] = {}
    secret = 0.0
    for weight, task in readings:
        families = task.kind[0]
        before, _ = by_families.get(families, (0.0, task))
        by_families[families] = (before + weight, task)
        secret += weight * task.confidential
    size = size_of(readings[0][1])
    tables = []
    for name in catalogue():
        worth = secret * rewards.worth(name, replace(size, confidential=True))
        worth = worth + (1 - secret) * rewards.worth(name, replace(size, confidential=False))
        tables.append((rewards.mean_right(name, list(by_families.values())).mean(axis=0) * worth).ravel())
    return np.concatenate(tables)


def cost_shares_of_all_plans(rewards: Rewards, size: Size) -> NDArray[np.float64]:
    """Return what the dollars of all plans take from the worth of a right answer, in the order of `all_plans`."""
    return np.concatenate([rewards.share_of_cost(name, size).ravel() for name in catalogue()])


def tokens_of_all_plans(rewards: Rewards, size: Size) -> NDArray[np.float64]:
    """Return the tokens of all plans, in the order of `all_plans`."""
    return np.concatenate([rewards.tokens(name, size).ravel() for name in catalogue()])


def expected_reward(plan: Plan, task: Task, rewards: Rewards) -> float:
    """Return the expected reward of one plan."""
    return float(rewards.table(plan.shape, task)[plan.workers])


def _add_branch(counts: Sequence[Array], branch: Array) -> list[Array]:
    """Return the chances of 0, 1, 2... right answers, from those without this branch."""
    nought: Array = np.zeros(())
    fewer, more = [*counts, nought], [nought, *counts]
    return [stays * (1 - branch) + gains * branch for stays, gains in zip(fewer, more, strict=True)]


def _bit_values(steps: Shape, role: str) -> tuple[int | None, ...]:
    if any([step.role == role for step in steps]):
        return (0, 1)
    return (None,)


def _as_key(bit: int | None) -> int:
    return -1 if bit is None else bit


def _logistic(logits: Array) -> Array:
    return 1 / (1 + np.exp(-logits))
