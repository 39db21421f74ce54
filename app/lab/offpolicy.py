"""Off-policy evaluation: what another policy would have earned, from decisions that were logged with their probability.

ips ..... mean of weight x reward; the weight is the other policy's probability of what was done over the logged one
snips ... the same over the sum of the weights: a little biased, far steadier
direct .. what a model of the rewards expects of the other policy's choices; it is as wrong as its model
dr ...... doubly robust: the direct estimate, corrected by the weighted errors of the model on what was really done

The model is a ridge regression for each arm on the features of the decision, drawn towards the regression over all
arms. It is cross-fitted: no row is corrected by a model that has seen it. Weights are capped, which trades the noise of
few rows for a bias: of the choices that the capped weights do not stand for (`covered` says how many they do), the
model alone speaks. `dr`'s interval is the wider for it, by how far the model was off on the rows that were cut.
Estimators: Dudik, Langford and Li (arXiv 1103.4601), Swaminathan and Joachims (2015); the pull towards a shared
regression is ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VERSION = "offpolicy-1"
CAP = 20.0
"""The largest weight of a row."""
LEAST = 100.0
"""The effective number of rows below which there is no verdict."""
LEAST_COVERED = 0.5
"""The least share of the other policy's choices that the log must stand for; below it the model alone would judge."""
FOLDS = 5
RIDGE = 1.0
WIDE = 1.96
"""Standard errors to either end of a 95 % interval."""

Policy = Mapping[str, float]
"""The probability of each arm in one decision; arms that are left out have none."""
Vector = Sequence[tuple[int, float]]
"""The features that are not 0, with their places."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One decision and what came of it; `propensity` is the probability with which `action` was really drawn."""

    features: tuple[float, ...]
    action: str
    propensity: float
    reward: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean reward with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def holds(self, truth: float) -> bool:
        """Return True if the interval covers this value."""
        return self.low <= truth <= self.high


@dataclass(frozen=True, slots=True)
class Report:
    """The estimate of another policy from the log. `ahead`, the advantage, is `dr` less the log's own mean, row by
    row."""

    rows: int
    ess: float
    """The effective number of rows: (sum of weights)^2 over the sum of their squares."""
    covered: float
    capped: int
    """Rows whose weight was cut to `CAP`."""
    logged: Estimate
    ips: Estimate
    snips: Estimate
    direct: float
    dr: Estimate
    ahead: Estimate

    @property
    def refusal(self) -> str:
        """Return the reason why there is no verdict; empty if there is one."""
        if self.ess < LEAST:
            return f"the log is worth {math.floor(self.ess)} rows of that policy, and {LEAST:.0f} are needed"
        if self.covered < LEAST_COVERED:
            return f"the log stands for {self.covered:.0%} of that policy's choices, and {LEAST_COVERED:.0%} are needed"
        return ""

    @property
    def verdict(self) -> str:
        """`better` or `worse` than what was logged, `undecided` if the interval holds both, `refused` for too little
        to go by."""
        if self.refusal:
            return "refused"
        if self.ahead.low > 0:
            return "better"
        return "worse" if self.ahead.high < 0 else "undecided"


class Log:
    """Decisions, and for each a model of the rewards that has not seen it; fitted once, for any number of reports."""

    def __init__(self, rows: Sequence[Logged]) -> None:
        """Raises ValueError for no rows, and for a propensity that is not above 0 and up to 1."""
        if not rows or not all(0 < row.propensity <= 1 for row in rows):
            raise ValueError("a log needs rows, each with a propensity above 0 and up to 1")
        self._rows = rows
        self._vectors = [_vector(row.features) for row in rows]
        self._models = _crossed(rows, self._vectors)

    def report(self, target: Sequence[Policy]) -> Report:
        """Estimate the reward of the policy `target`, which is given as its choice in each row's place."""
        rows = self._rows
        full = [choice.get(row.action, 0.0) / row.propensity for row, choice in zip(rows, target, strict=True)]
        weights = [min(CAP, weight) for weight in full]
        rewards = [row.reward for row in rows]
        expected, believed = self._believed(target)
        errors = [r - q for r, q in zip(rewards, believed, strict=True)]
        corrected = [e + w * error for e, w, error in zip(expected, weights, errors, strict=True)]
        total, squares = sum(weights), sum(weight * weight for weight in weights)
        covered = min(1.0, total / len(rows))
        cut = [error for error, weight in zip(errors, full, strict=True) if weight > CAP]
        doubt = (1 - covered) * _off(cut, max(rewards) - min(rewards))
        return Report(
            rows=len(rows),
            ess=total * total / squares if squares else 0.0,
            covered=covered,
            capped=len(cut),
            logged=mean(rewards),
            ips=mean([w * r for w, r in zip(weights, rewards, strict=True)]),
            snips=_ratio(weights, rewards),
            direct=sum(expected) / len(rows),
            dr=mean(corrected, doubt),
            ahead=mean([c - r for c, r in zip(corrected, rewards, strict=True)], doubt),
        )

    def _believed(self, target: Sequence[Policy]) -> tuple[list[float], list[float]]:
        """For each row what its model expects of the other policy's choice, and of what was done."""
        expected, believed = [], []
        for place, (row, choice) in enumerate(zip(self._rows, target, strict=True)):
            model, vector = self._models[place % FOLDS], self._vectors[place]
            expected.append(sum([chance * model.told(arm, vector) for arm, chance in choice.items()]))
            believed.append(model.told(row.action, vector))
        return expected, believed


def mean(values: Sequence[float], doubt: float = 0.0) -> Estimate:
    """The mean of at least one value, with the normal interval; `doubt` is a standard error of another kind."""
    value, error = _averaged(values)
    wide = WIDE * math.hypot(error, doubt)
    return Estimate(value, value - wide, value + wide)


def _averaged(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    count = len(values)
    mean = sum(values) / count
    spread = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return mean, math.sqrt(spread / count)


def _off(errors: Sequence[float], widest: float) -> float:
    """Return a bound of a model's mean error from its errors on few rows; half of the range if there are fewer than
    two."""
    return math.hypot(*_averaged(errors)) if len(errors) > 1 else widest / 2


def _ratio(weights: Sequence[float], rewards: Sequence[float]) -> Estimate:
    """The weighted mean, its spread by the delta method."""
    total = sum(weights)
    if not total:
        return Estimate(0.0, -math.inf, math.inf)
    value = sum(w * r for w, r in zip(weights, rewards, strict=True)) / total
    wide = WIDE * math.sqrt(sum((w * (r - value)) ** 2 for w, r in zip(weights, rewards, strict=True))) / total
    return Estimate(value, value - wide, value + wide)


# -- the model of the rewards


def _crossed(rows: Sequence[Logged], vectors: Sequence[Vector]) -> list["Model"]:
    """For the rows of each fold, which are every `FOLDS`th, the model of all others."""
    bounds = (min(row.reward for row in rows), max(row.reward for row in rows))
    size = max(len(row.features) for row in rows) + 1
    sums = [_summed(rows[fold::FOLDS], vectors[fold::FOLDS], size) for fold in range(FOLDS)]
    return [_fitted([*sums[:fold], *sums[fold + 1 :]], size, bounds) for fold in range(FOLDS)]


def fitted(rows: Sequence[Logged]) -> "Model":
    """The regressions over all of these rows, of which there is one at least."""
    size = max(len(row.features) for row in rows) + 1
    rewards = [row.reward for row in rows]
    sums = _summed(rows, [_vector(row.features) for row in rows], size)
    return _fitted([sums], size, (min(rewards), max(rewards)))


@dataclass(frozen=True, slots=True)
class Model:
    """The regressions: one for each arm that was ever done, and one for all others. They predict no reward outside
    `bounds`, the range of those that were seen."""

    shared: Sequence[float]
    own: Mapping[str, Sequence[float]]
    bounds: tuple[float, float]

    def expects(self, arm: str, features: Sequence[float]) -> float:
        """The reward of this arm."""
        return self.told(arm, _vector(features))

    def told(self, arm: str, vector: Vector) -> float:
        """Return the predicted reward for features that are a vector already."""
        line = self.own.get(arm, self.shared)
        return min(self.bounds[1], max(self.bounds[0], sum([line[place] * value for place, value in vector])))


def _vector(features: Sequence[float]) -> Vector:
    """The features after a constant."""
    return [(0, 1.0), *((place, value) for place, value in enumerate(features, 1) if value)]


class _Sums:
    """The sums that a regression needs of its rows: the lower half of X'X, and X'y."""

    __slots__ = ("moment", "square")

    def __init__(self, size: int) -> None:
        self.square = [[0.0] * (place + 1) for place in range(size)]
        self.moment = [0.0] * size

    def note(self, vector: Vector, value: float) -> None:
        """One row; places rise within a vector."""
        for count, (i, x) in enumerate(vector, 1):
            line = self.square[i]
            self.moment[i] += x * value
            for j, y in vector[:count]:
                line[j] += x * y

    def add(self, other: "_Sums") -> None:
        """Add all rows of another."""
        self.moment = [a + b for a, b in zip(self.moment, other.moment, strict=True)]
        for place, line in enumerate(other.square):
            self.square[place] = [a + b for a, b in zip(self.square[place], line, strict=True)]


def _summed(rows: Sequence[Logged], vectors: Sequence[Vector], size: int) -> dict[str, _Sums]:
    found: dict[str, _Sums] = {}
    for row, vector in zip(rows, vectors, strict=True):
        found.setdefault(row.action, _Sums(size)).note(vector, row.reward)
    return found


def _fitted(folds: Sequence[Mapping[str, _Sums]], size: int, bounds: tuple[float, float]) -> Model:
    arms: dict[str, _Sums] = {}
    everything = _Sums(size)
    for fold in folds:
        for arm, sums in fold.items():
            arms.setdefault(arm, _Sums(size)).add(sums)
            everything.add(sums)
    shared = _ridge(everything, [0.0] * size)
    return Model(shared, {arm: _ridge(sums, shared) for arm, sums in arms.items()}, bounds)


def _ridge(sums: _Sums, centre: Sequence[float]) -> list[float]:
    """The regression that is drawn towards `centre`."""
    size = len(centre)
    square = sums.square
    predicted = []
    for i in range(size):
        below = sum([square[i][j] * centre[j] for j in range(i + 1)])
        above = sum([square[j][i] * centre[j] for j in range(i + 1, size)])
        predicted.append(below + above)
    rest = _solved(square, [moment - known for moment, known in zip(sums.moment, predicted, strict=True)])
    return [c + r for c, r in zip(centre, rest, strict=True)]


def _solved(square: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with (square + RIDGE) x = right, by Cholesky; `square` is a lower half."""
    size = len(right)
    lower: list[list[float]] = []
    for i in range(size):
        line: list[float] = []
        for j in range(i):
            other = lower[j]
            line.append((square[i][j] - sum([a * b for a, b in zip(line, other, strict=False)])) / other[j])
        line.append(math.sqrt(square[i][i] + RIDGE - sum([a * a for a in line])))
        lower.append(line)
    half: list[float] = []
    for line, value in zip(lower, right, strict=True):
        half.append((value - sum([a * b for a, b in zip(line, half, strict=False)])) / line[-1])
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = half[i] / lower[i][i]
        for j in range(i):
            half[j] -= lower[i][j] * found[i]
    return found
