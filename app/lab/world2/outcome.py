"""The exact expected reward of plans in world 2: for one kind of task and one pool, all assignments of a shape at once.

Shapes are trees: every answer is used once. Given a task's hidden trait and whether its plan and its digest are good,
the parts of a task are independent of each other, and so are the branches of a shape. So the chance that a part is
right in the end is a product of sums along the tree, and the chance of the whole is summed over trait, plan and digest.
Arrays have one axis for the case (the trait; where several drawn pools are given, each pool's traits one after the
other) and one for the worker of each step. `execution.py` is the same world as workers
that read messages; a test finds the same figures on every shape and role.
"""

from collections.abc import Sequence
from itertools import product
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from app.lab.world2.constants import DOCUMENT_TOKENS, TRAITS, Constants, constants
from app.lab.world2.rules import (
    LANGUAGE,
    PARTIAL,
    Size,
    answers_seen,
    combine_logit,
    contributing_steps,
    input_tokens_of_step,
    output_tokens_of_step,
    parts_handed_over,
    shows_plan,
    size_of,
)
from app.lab.world2.shapes import Plan, Shape, catalogue
from app.lab.world2.tasks import Family, Task
from app.lab.world2.workers import Pool

Array: TypeAlias = NDArray[np.float64]


class Rewards:
    """The expected rewards of all plans over one pool. What recurs from task to task is computed once.

    `world` holds the world's constants; a policy that believes in other ones can ask what would be best if they were
    true. `others` are the same workers with other skills: rewards are then means over `pool` and all of these, so that
    a policy that does not know the skills can ask what is best on average over what they may be. `worths` are what
    right answers are worth: whoever asks for several beliefs over one pool can let them share these, since they follow
    from the cards alone.
    """

    def __init__(
        self,
        pool: Pool,
        world: Constants | None = None,
        others: Sequence[Pool] = (),
        worths: dict[tuple[str, Size], Array] | None = None,
    ) -> None:
        self.pool, self._constants = pool, world or constants()
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
        self._worths: dict[tuple[str, Size], Array] = {}
        if worths is not None:
            self._worths = worths
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
            cost, world = self.share_of_cost(shape, size), self._constants
            wait = world.wait * np.minimum(1.0, seconds / world.full_seconds)
            self._worths[key] = 1 - cost - wait - world.disclosure * disclosed
        return self._worths[key]

    def share_of_cost(self, shape: str, size: Size) -> Array:
        """Return what the dollars of a plan take from the worth of a right answer."""
        usd, _, _ = self.bill(shape, size)
        share: Array = self._constants.cost * np.minimum(1.0, usd / self._constants.full_usd)
        return share

    def bill(self, shape: str, size: Size) -> tuple[Array, Array, Array]:
        """Return dollars, seconds on the critical path, and 1 where a confidential task is read by who retains it."""
        steps, world = catalogue()[shape], self._constants
        usd: Array = np.zeros([1] * len(steps))
        disclosed: Array = np.zeros([1] * len(steps))
        ends: list[Array] = []
        for place, step in enumerate(steps):
            reads = np.minimum(self._context, input_tokens_of_step(steps, step, size))
            writes = output_tokens_of_step(steps, step, size.parts)
            usd = usd + self._axis(self._price * (writes + world.input_share * reads) / 1e6, place, len(steps))
            lasts = world.overhead_seconds + reads / world.read_per_second + writes / self._speed
            begins: Array = np.zeros([1] * len(steps))
            for earlier in step.sees:
                begins = np.maximum(begins, ends[earlier])
            ends.append(begins + self._axis(lasts, place, len(steps)))
            if step.user and size.confidential:
                disclosed = np.maximum(disclosed, self._axis(self._retains.astype(float), place, len(steps)))
        all_axes = [len(self.pool)] * len(steps)
        last = ends[0]
        for end in ends:
            last = np.maximum(last, end)
        return np.broadcast_to(usd, all_axes), np.broadcast_to(last, all_axes), np.broadcast_to(disclosed, all_axes)

    def tokens(self, shape: str, size: Size) -> Array:
        """Return the tokens that the workers of a plan read and write."""
        steps = catalogue()[shape]
        total: Array = np.zeros([1] * len(steps))
        for place, step in enumerate(steps):
            reads = np.minimum(self._context, input_tokens_of_step(steps, step, size))
            total = total + self._axis(reads + output_tokens_of_step(steps, step, size.parts), place, len(steps))
        return np.broadcast_to(total, [len(self.pool)] * len(steps))

    def _axis(self, values: Array, place: int, steps: int) -> Array:
        """Return values by worker, laid along the axis of the step at `place`."""
        return values.reshape(self._lengths(place, steps))

    def _by_case(self, values: Array, place: int, steps: int) -> Array:
        """Return values by pool and worker, laid along the axes of the case and of the step at `place`."""
        repeated = np.repeat(values, len(TRAITS), axis=0)
        return repeated.reshape([self._cases, *self._lengths(place, steps)])

    def _lengths(self, place: int, steps: int) -> list[int]:
        """Return the lengths of the steps' axes in an array that depends on the worker of the step at `place` alone."""
        lengths = [1] * steps
        lengths[place] = len(self.pool)
        return lengths

    def _chance_of(self, shape: str, role: str, good: int, document: int) -> Array:
        """Return the chance that the plan, or the digest, is as `good` says."""
        key = (shape, role, good, document)
        if key not in self._hints:
            steps = catalogue()[shape]
            chance = self._by_case(self._hint_chance(role, document), _roles(steps).index(role), len(steps))
            if not good:
                chance = 1 - chance
            self._hints[key] = chance
        return self._hints[key]

    def _hint_chance(self, role: str, document: int) -> Array:
        """Return the chance that each worker's plan, or digest, is good, by case."""
        world = self._constants
        if role == "plan":
            return _logistic(world.plan_skill + world.check_skill * (self._ability - world.ability_mean))
        return _logistic(
            world.digest_keeps + world.check_skill * self._edges[:, :, LANGUAGE] + self._truncation(document)
        )

    def _truncation(self, document: int) -> Array:
        """Return the loss of workers whose context is shorter than the document."""
        return np.where(self._context < DOCUMENT_TOKENS[document], self._constants.truncated, 0.0)

    def _part_right(self, shape: str, task: Task, place: int, plan: int | None, digest: int | None) -> Array:
        """Return the chance that one part is right in the end, by case and assignment."""
        steps, family = catalogue()[shape], task.parts[place].family
        parts, document = len(task.parts), task.document
        if set(PARTIAL).isdisjoint(_roles(steps)):
            place = len(PARTIAL)  # all parts are worked on together, so that their places make no difference
        place = min(place, len(PARTIAL))
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
        step_of_part = parts_handed_over(args.steps, step, args.parts)
        if args.place in step_of_part:
            return self._constants.handover * self._part_right_at(args, step_of_part[args.place])
        return self._part_solved(args, at, step.role, len(step_of_part))

    def _part_solved(self, args: "_PartQuery", at: int, role: str, handed: int) -> Array:
        """Return the chance that the worker of a step solves the part, `handed` others being worked out already."""
        step = args.steps[at]
        at_once = args.parts - handed
        if role in PARTIAL:
            at_once = 1
        plan = digest = None
        if shows_plan(args.steps, step):
            plan = args.plan
        if not step.user:
            digest = args.digest
        key = (args.family.name, role != "solve", at_once, _as_key(plan), _as_key(digest), args.document)
        if key not in self._chances:
            self._chances[key] = self._chance(args, role != "solve", at_once, plan, digest)
        return self._chances[key].reshape([self._cases, *self._lengths(at, len(args.steps))])

    def _chance(self, args: "_PartQuery", reasons: bool, at_once: int, plan: int | None, digest: int | None) -> Array:
        """Return the chance that each worker solves the part in each case: [cases, workers].

        `plan` and `digest` are 1 if the plan or digest that the step reads is good and 0 if it is not. `plan` is None
        where the step reads no plan, `digest` where it sees the task itself.
        """
        world, domain = self._constants, args.family.domain
        logits = self._ability + self._edges[:, :, domain] - args.family.difficulty - world.load * (at_once - 1)
        if reasons:
            logits = logits + world.reason[domain]
        if plan == 1:
            logits = logits + world.plan_good
        elif plan == 0:
            logits = logits + world.plan_bad
        if digest is None:
            logits = logits - world.length[args.document] + self._truncation(args.document)
        elif not digest:
            logits = logits + world.digest_lost
        traits = world.trait_sd * np.array(TRAITS)
        return _logistic(logits[:, None, :] - traits[:, None]).reshape(self._cases, len(self.pool))

    def _part_checked(self, args: "_PartQuery", at: int) -> Array:
        """Return the chance that the part is right after a check, which keeps a right answer or finds a wrong one and
        solves it anew."""
        world, steps = self._constants, args.steps
        (answer,) = answers_seen(steps, steps[at])
        skill = world.check_skill * (self._ability - world.ability_mean)
        before = self._part_right_at(args, answer)
        keeps = self._by_case(_logistic(world.keeps + skill), at, len(steps))
        other = self._by_case(_logistic(world.finds_other + skill), at, len(steps))
        own = self._by_case(_logistic(world.finds_own + skill), at, len(steps))
        finds = np.where(self._is_one_of(steps, at, contributing_steps(steps, answer, args.parts)), own, other)
        return before * keeps + (1 - before) * finds * self._part_solved(args, at, "reason", 0)

    def _part_combined(self, args: "_PartQuery", at: int) -> Array:
        """Return the chance that the part is right in the answer that a step chooses among those that it sees."""
        world, steps = self._constants, args.steps
        branches = [self._part_right_at(args, place) for place in answers_seen(steps, steps[at])]
        skill = world.check_skill * (self._ability - world.ability_mean)
        counts: list[Array] = [np.ones(())]
        for branch in branches:
            counts = _add_branch(counts, branch)
        chosen: Array = np.zeros(())
        for right in range(1, len(counts)):
            logits = combine_logit(right, len(branches), world) + np.where(right < len(branches), skill, 0.0)
            chosen = chosen + counts[right] * self._by_case(_logistic(logits), at, len(steps))
        return chosen

    def _is_one_of(self, steps: Shape, at: int, others: Sequence[int]) -> NDArray[np.bool_]:
        """Return True where the worker of step `at` is the worker of one of the others."""
        places = np.arange(float(len(self.pool)))
        mine = self._axis(places, at, len(steps))
        is_same = np.zeros([1] * len(steps), dtype=bool)
        for other in others:
            is_same = is_same | (mine == self._axis(places, other, len(steps)))
        return is_same


class _PartQuery(Struct, frozen=True):
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
    plans = []
    for name, steps in catalogue().items():
        for chosen in product(range(workers), repeat=len(steps)):
            plans.append(Plan(name, chosen))
    return plans


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
    chances: list[Array] = []
    for same_count, one_less in zip([*counts, nought], [nought, *counts], strict=True):
        chances.append(same_count * (1 - branch) + one_less * branch)
    return chances


def _roles(steps: Shape) -> list[str]:
    return [step.role for step in steps]


def _bit_values(steps: Shape, role: str) -> tuple[int | None, ...]:
    """Return whether the plan or digest of a shape may be good (1) or not (0); None for a shape without one."""
    if role in _roles(steps):
        return (0, 1)
    return (None,)


def _as_key(bit: int | None) -> int:
    """Return a bit as a part of a key; -1 for none."""
    if bit is None:
        return -1
    return bit


def _logistic(logits: Array) -> Array:
    return 1 / (1 + np.exp(-logits))
