"""Every plan that could be best, tried: the best fixed plan and the best plan for each class, by exhaustion.

A plan with needless access or idle steps is never better than its lean form (`without_needless_steps`; a test holds
this against plans drawn from the whole grammar), so only lean plans are tried: all shapes of at most four steps over
all workers. Plans that differ only in the order of independent steps are tried once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations, product
from typing import NamedTuple

from app.lab import outcome as exact
from app.lab.plans import ROLES, STEPS, Plan, PlanStep, contributing_steps, results_of_steps, without_needless_steps
from app.lab.world import CLASSES, INPUT_SHARE, OUTPUT, OVERHEAD, PER_LEVEL, QUESTION, TRAITS, Setting
from app.providers.rehearsal.task_families import LEVELS

Shape = tuple[tuple[str, tuple[int, ...]], ...]
"""Role and seen steps of each step."""
CONTEXTS = tuple(product(CLASSES, TRAITS))


class SearchResult(NamedTuple):
    """The best of all plans: one for all classes, and one for each."""

    fixed: Plan
    fixed_reward: float
    """The mean reward of `fixed` over all classes."""
    best: tuple[Plan, ...]
    """By class, in the order of `CLASSES`."""
    best_rewards: tuple[float, ...]
    tried: int

    @property
    def optimum(self) -> float:
        """Return the mean reward of the best plan for each class."""
        return sum(self.best_rewards) / len(self.best_rewards)


def mean_reward(plan: Plan, setting: Setting) -> float:
    """Return the mean reward of one plan over all classes."""
    return sum([exact.outcome(plan, kind, setting).reward for kind in CLASSES]) / len(CLASSES)


def shapes(most: int = STEPS) -> tuple[Shape, ...]:
    """Return all shapes of lean plans of at most `most` steps, each in one order of its steps."""
    all_shapes: set[Shape] = set()
    for steps in range(1, most + 1):
        for shape in _lean_shapes((), steps):
            all_shapes.add(canonical_order(shape))
    return tuple(sorted(all_shapes, key=lambda shape: (len(shape), shape)))


def _lean_shapes(prefix: Shape, steps: int) -> Iterator[Shape]:
    """Yield the lean shapes of so many steps that begin with these steps."""
    if len(prefix) == steps:
        plan = _with_workers(prefix, [0] * steps)
        if without_needless_steps(plan) == plan:
            yield prefix
        return
    results = results_of_steps(_with_workers(prefix, [0] * len(prefix)))
    for role in ROLES:
        for sees in _useful_access(role, results):
            yield from _lean_shapes((*prefix, (role, sees)), steps)


def _useful_access(role: str, results: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the access lists with which a step of this role can help, after steps with these results."""
    if role == "plan":
        return [()]
    if role in ("solve", "reason"):
        return [(), *_each_alone(results, "plan")]
    if role == "check":
        return _each_alone(results, "answer")
    answers = [n for n, result in enumerate(results) if result == "answer"]
    accesses: list[tuple[int, ...]] = []
    for count in range(2, len(answers) + 1):
        accesses += combinations(answers, count)
    return accesses


def _each_alone(results: Sequence[str], kind: str) -> list[tuple[int, ...]]:
    """Return an access list for each step with this result, which holds it alone."""
    return [(n,) for n, result in enumerate(results) if result == kind]


def _with_workers(shape: Shape, workers: Sequence[int]) -> Plan:
    return tuple([PlanStep(worker, role, True, sees) for worker, (role, sees) in zip(workers, shape, strict=True)])


def canonical_order(shape: Shape) -> Shape:
    """Return the least of all orders in which its steps can stand."""
    reordered = []
    for order in permutations(range(len(shape))):
        if _is_valid_order(shape, order):
            reordered.append(_reorder(shape, order))
    return min(reordered)


def _is_valid_order(shape: Shape, order: Sequence[int]) -> bool:
    """Return True if the last step stays the last, and every step stands behind those that it sees."""
    if order[-1] != len(shape) - 1:
        return False
    place = {old: new for new, old in enumerate(order)}
    for old in order:
        _, sees = shape[old]
        for n in sees:
            if place[n] > place[old]:
                return False
    return True


def _reorder(shape: Shape, order: Sequence[int]) -> Shape:
    place = {old: new for new, old in enumerate(order)}
    steps = []
    for old in order:
        role, sees = shape[old]
        steps.append((role, tuple(sorted([place[n] for n in sees]))))
    return tuple(steps)


def search(setting: Setting, *, most: int = STEPS, only: Callable[[Shape], bool] = lambda shape: True) -> SearchResult:
    """Return the best of all plans whose shape `only` lets pass."""
    plan_search = PlanSearch(setting)
    for shape in shapes(most):
        if only(shape):
            plan_search.try_shape(shape)
    return plan_search.result()


class PlanSearch:
    """A depth-first search over all assignments of workers to the steps of one shape after the other.

    Plans that begin with the same workers share the sums over their first steps.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._contributors: list[frozenset[int]] = []
        """For each step of the present shape, the steps that contributed to its answer."""
        self._step_chances: dict[tuple[int, str, bool, int], list[dict[tuple[int, ...], float]]] = {}
        self._fixed: tuple[float, Plan] = (-1.0, ())
        self._best: list[tuple[float, Plan]] = [(-1.0, ())] * len(CLASSES)
        self._tried = 0

    def result(self) -> SearchResult:
        """Return the best of the plans that were tried."""
        rewards, plans = zip(*self._best, strict=True)
        return SearchResult(self._fixed[1], self._fixed[0], plans, rewards, self._tried)

    def try_shape(self, shape: Shape) -> None:
        """Try every assignment of workers to the steps of a shape."""
        sees_by_step = [sees for _, sees in shape]
        results = results_of_steps(_with_workers(shape, [0] * len(shape)))
        self._contributors = [contributing_steps(sees_by_step, results, n) for n in range(len(shape))]
        tokens: list[tuple[int, int]] = []
        for role, sees in shape:
            input_tokens = QUESTION + sum([tokens[n][1] for n in sees])
            tokens.append((input_tokens, OUTPUT[role]))
        self._extend(shape, tokens, [], [[1.0] for _ in CONTEXTS])

    def _extend(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], odds: list[list[float]]) -> None:
        """Try every worker for the next step, and everything that may follow.

        `odds` has for each of `CONTEXTS` the probability of every combination of the hidden bits of the steps so far:
        a list of 2^steps, whose place in binary has the bit of step n at bit n.
        """
        step = len(workers)
        role, sees = shape[step]
        bits_of_seen = [exact.bits_at(sees, bits) for bits in range(1 << step)]
        for worker in range(len(self.setting.pool)):
            own = role == "check" and worker in [workers[n] for n in self._contributors[sees[0]]]
            step_chances = self._step_chances_of(worker, role, own, len(sees))
            good: list[list[float]] = []
            for chances, before in zip(step_chances, odds, strict=True):
                good.append([p * chances[bits] for p, bits in zip(before, bits_of_seen, strict=True)])
            if step == len(shape) - 1:
                self.record(shape, tokens, [*workers, worker], good)
                continue
            extended: list[list[float]] = []
            for before, with_good_step in zip(odds, good, strict=True):
                with_bad_step = [p - g for p, g in zip(before, with_good_step, strict=True)]
                extended.append(with_bad_step + with_good_step)
            self._extend(shape, tokens, [*workers, worker], extended)

    def _step_chances_of(self, worker: int, role: str, own: bool, count: int) -> list[dict[tuple[int, ...], float]]:
        """Return for each context the chance that a step of this worker is good, by the bits of the steps that it
        sees."""
        key = (worker, role, own, count)
        if key not in self._step_chances:
            profile = self.setting.pool[worker]
            by_context: list[dict[tuple[int, ...], float]] = []
            for kind, trait in CONTEXTS:
                chances = {}
                for bits in product((0, 1), repeat=count):
                    chances[bits] = exact.step_chance(profile, kind, trait, role, bits, own, 0)
                by_context.append(chances)
            self._step_chances[key] = by_context
        return self._step_chances[key]

    def record(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], good: list[list[float]]) -> None:
        """Record the outcome of a plan: the tokens read (for the easiest level) and written of each step, and for each
        of `CONTEXTS` the chances of all hidden bits with which its answer is right."""
        worth = self._worth_by_level(shape, tokens, workers)
        rewards: list[float] = []
        for n, (_, level) in enumerate(CLASSES):
            right = (sum(good[2 * n]) + sum(good[2 * n + 1])) / len(TRAITS)
            rewards.append(right * worth[level])
        self._tried += 1
        mean = sum(rewards) / len(rewards)
        if mean > self._fixed[0]:
            self._fixed = (mean, _with_workers(shape, workers))
        for n, reward in enumerate(rewards):
            if reward > self._best[n][0]:
                self._best[n] = (reward, _with_workers(shape, workers))

    def _worth_by_level(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int]) -> list[float]:
        """Return the worth of a right answer by level: the sums of `outcome.bill`, made for all levels at once."""
        ends: list[float] = []
        token_usd, price_sum = 0.0, 0.0
        for place, (_, sees), (input_tokens, output_tokens) in zip(workers, shape, tokens, strict=True):
            worker = self.setting.pool[place]
            begins = max([ends[n] for n in sees], default=0.0)
            ends.append(begins + OVERHEAD + output_tokens / worker.pace)
            token_usd += worker.price * (output_tokens + INPUT_SHARE * input_tokens)
            price_sum += worker.price
        usd_per_level = INPUT_SHARE * PER_LEVEL * price_sum
        worth = []
        for level in range(LEVELS):
            usd = (token_usd + level * usd_per_level) / 1e6
            worth.append(self.setting.weights.worth(usd, ends[-1]))
        return worth
