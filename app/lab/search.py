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
CONTEXTS = tuple((kind, trait) for kind in CLASSES for trait in TRAITS)


class Found(NamedTuple):
    """The best fixed plan, its mean reward over all classes, and for each class its best plan and that one's reward."""

    fixed: Plan
    fixed_reward: float
    best: tuple[Plan, ...]
    best_rewards: tuple[float, ...]
    tried: int

    @property
    def optimum(self) -> float:
        """Return the mean reward of the best plan for each class."""
        return sum(self.best_rewards) / len(self.best_rewards)


def mean_reward(plan: Plan, setting: Setting) -> float:
    """Return the mean reward of one plan over all classes."""
    return sum(exact.outcome(plan, kind, setting).reward for kind in CLASSES) / len(CLASSES)


def shapes(most: int = STEPS) -> tuple[Shape, ...]:
    """Return all shapes of lean plans of at most `most` steps, each in one order of its steps."""
    found: set[Shape] = set()
    for steps in range(1, most + 1):
        found |= {canonical_order(shape) for shape in _lean_shapes((), steps)}
    return tuple(sorted(found, key=lambda shape: (len(shape), shape)))


def _lean_shapes(shape: Shape, steps: int) -> Iterator[Shape]:
    if len(shape) == steps:
        plan = _with_workers(shape, [0] * steps)
        if without_needless_steps(plan) == plan:
            yield shape
        return
    yields = results_of_steps(_with_workers(shape, [0] * len(shape)))
    for role in ROLES:
        for sees in _useful_access(role, yields):
            yield from _lean_shapes((*shape, (role, sees)), steps)


def _useful_access(role: str, yields: Sequence[str]) -> list[tuple[int, ...]]:
    plans = [n for n, what in enumerate(yields) if what == "plan"]
    answers = [n for n, what in enumerate(yields) if what == "answer"]
    if role == "plan":
        return [()]
    if role in ("solve", "reason"):
        return [(), *((n,) for n in plans)]
    if role == "check":
        return [(n,) for n in answers]
    return [seen for count in range(2, len(answers) + 1) for seen in combinations(answers, count)]


def _with_workers(shape: Shape, workers: Sequence[int]) -> Plan:
    return tuple(PlanStep(worker, role, True, sees) for worker, (role, sees) in zip(workers, shape, strict=True))


def canonical_order(shape: Shape) -> Shape:
    """Return the least of all orders in which its steps can stand."""
    return min(_reorder(shape, order) for order in permutations(range(len(shape))) if _is_valid_order(shape, order))


def _is_valid_order(shape: Shape, order: Sequence[int]) -> bool:
    place = {old: new for new, old in enumerate(order)}
    return order[-1] == len(shape) - 1 and all(place[n] < place[old] for old in order for n in shape[old][1])


def _reorder(shape: Shape, order: Sequence[int]) -> Shape:
    place = {old: new for new, old in enumerate(order)}
    steps = []
    for old in order:
        role, sees = shape[old]
        steps.append((role, tuple(sorted([place[n] for n in sees]))))
    return tuple(steps)


def search(setting: Setting, *, most: int = STEPS, only: Callable[[Shape], bool] = lambda shape: True) -> Found:
    """Return the best of all plans whose shape `only` lets pass."""
    walk = Walk(setting)
    for shape in shapes(most):
        if only(shape):
            walk.through(shape)
    return walk.found()


def _sum_at(values: Sequence[int], places: Sequence[int]) -> int:
    return sum([values[n] for n in places])


class Walk:
    """All assignments of workers to one shape after the other; what begins alike is summed once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._hands: list[frozenset[int]] = []
        self._chances: dict[tuple[int, str, bool, int], list[dict[tuple[int, ...], float]]] = {}
        self._fixed: tuple[float, Plan] = (-1.0, ())
        self._best: list[tuple[float, Plan]] = [(-1.0, ())] * len(CLASSES)
        self._tried = 0

    def found(self) -> Found:
        """Return the best of what was walked through."""
        rewards, plans = zip(*self._best, strict=True)
        return Found(self._fixed[1], self._fixed[0], plans, rewards, self._tried)

    def through(self, shape: Shape) -> None:
        """Try every assignment."""
        written = [OUTPUT[role] for role, _ in shape]
        sights = [sees for _, sees in shape]
        read = [_sum_at(written, sees) + QUESTION for sees in sights]
        yields = results_of_steps(_with_workers(shape, [0] * len(shape)))
        self._hands = [contributing_steps(sights, yields, n) for n in range(len(shape))]
        self._extend(shape, list(zip(read, written, strict=True)), [], [[1.0] for _ in CONTEXTS])

    def _extend(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], odds: list[list[float]]) -> None:
        place = len(workers)
        role, sees = shape[place]
        patterns = [exact.bits_at(sees, bits) for bits in range(1 << place)]
        for worker in range(len(self.setting.pool)):
            own = role == "check" and any(workers[n] == worker for n in self._hands[sees[0]])
            known = self._chances_of(worker, role, own, len(sees))
            good: list[list[float]] = []
            for chances, before in zip(known, odds, strict=True):
                good.append([p * chances[seen] for p, seen in zip(before, patterns, strict=True)])
            if place == len(shape) - 1:
                self.note(shape, tokens, [*workers, worker], good)
                continue
            grown: list[list[float]] = []
            for before, now in zip(odds, good, strict=True):
                grown.append([p - g for p, g in zip(before, now, strict=True)] + now)
            self._extend(shape, tokens, [*workers, worker], grown)

    def _chances_of(self, worker: int, role: str, own: bool, count: int) -> list[dict[tuple[int, ...], float]]:
        """Return for each context the chances by the bits that are seen."""
        key = (worker, role, own, count)
        if key not in self._chances:
            seen = list(product((0, 1), repeat=count))
            profile = self.setting.pool[worker]
            found: list[dict[tuple[int, ...], float]] = []
            for kind, trait in CONTEXTS:
                found.append({bits: exact.step_chance(profile, kind, trait, role, bits, own, 0) for bits in seen})
            self._chances[key] = found
        return self._chances[key]

    def note(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], good: list[list[float]]) -> None:
        """Note the outcome of a plan: the tokens read (for the easiest level) and written of each step, and for each of
        `CONTEXTS` the chances of all hidden bits with which its answer is right."""
        worths = self._worth_by_level(shape, tokens, workers)
        rewards = [
            (sum(good[2 * place]) + sum(good[2 * place + 1])) / 2 * worths[kind[1]]
            for place, kind in enumerate(CLASSES)
        ]
        self._tried += 1
        mean = sum(rewards) / len(rewards)
        if mean > self._fixed[0]:
            self._fixed = (mean, _with_workers(shape, workers))
        for place, reward in enumerate(rewards):
            if reward > self._best[place][0]:
                self._best[place] = (reward, _with_workers(shape, workers))

    def _worth_by_level(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int]) -> list[float]:
        """Return the worth of a right answer by level: the sums of `outcome.bill`, made for all levels at once."""
        pool = [self.setting.pool[worker] for worker in workers]
        ends: list[float] = []
        for worker, (_, sees), (_, written) in zip(pool, shape, tokens, strict=True):
            ends.append(max([ends[n] for n in sees], default=0.0) + OVERHEAD + written / worker.pace)
        usd = sum(
            worker.price * (written + INPUT_SHARE * read) for worker, (read, written) in zip(pool, tokens, strict=True)
        )
        more = INPUT_SHARE * PER_LEVEL * sum(worker.price for worker in pool)
        return [self.setting.weights.worth((usd + level * more) / 1e6, ends[-1]) for level in range(LEVELS)]
