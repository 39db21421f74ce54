"""Off-policy evaluation: what another policy would have earned, from decisions that were logged with their probability.

ips ..... mean of weight x reward; the weight is the other policy's probability of what was done over the logged one
snips ... the same over the sum of the weights: a little biased, far steadier
direct .. what a model of the rewards expects of the other policy's choices; it is as wrong as its model
dr ...... doubly robust: the direct estimate, corrected by the weighted errors of the model on what was really done

The model is a ridge regression for each arm on the features of the decision, drawn towards the regression over all
arms. It is cross-fitted: no row is corrected by a model that has seen it. Weights are capped, which trades the noise of
few rows for a bias: of the choices that the capped weights do not stand for (`covered` says how many they do), the
model alone speaks. `dr`'s interval is the wider for it, by how far the model was off on the rows that were cut.

The intervals of `dr` and `ahead` hold at all times at once (`core.rating.intervals`), so that a log may be judged again
with each new row, and stopped as soon as there is a verdict. Rows of one conversation depend on each other: they are
one cluster, which counts as one value. Ratings may be missing for reasons that depend on the answer: `Report.selected`
bounds `ahead` where the odds of being rated differ by at most a factor between any two decisions, and
`Report.selection` is the largest factor under which the verdict stays.

A decision may be followed by a further one, of which the same holds: then the weight of a row is the product of both
weights, and `dr` corrects the further decision first and takes the corrected value for what the first one led to (the
recursion of Jiang and Li, arXiv 1511.03722).
Estimators: Dudik, Langford and Li (arXiv 1103.4601), Swaminathan and Joachims (2015); the pull towards a shared
regression is ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from app.core.rating.intervals import LEAST as LEAST_VALUES
from app.core.rating.intervals import half_width, needed

VERSION = "offpolicy-2"
CAP = 20.0
"""The largest weight of a row."""
LEAST = 100.0
"""The effective number of rows below which there is no verdict."""
LEAST_COVERED = 0.5
"""The least share of the other policy's choices that the log must stand for; below it the model alone would judge."""
FOLDS = 5
RIDGE = 1.0
SELECTION = 2.0
"""The factor between the odds of being rated under which `ahead` is bounded."""
MOST_SELECTION = 20.0
"""The largest factor that is looked for."""
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
    cluster: str = ""
    """The conversation that it belongs to; an empty one is a conversation of its own."""
    further: "Logged | None" = None
    """The decision that followed it before the reward came, with the same reward and cluster."""


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
    clusters: int = 0
    needed: int | None = None
    """About how many rows like these the log must have for a verdict other than `refused` and `undecided`; None if no
    number of them is enough. It is `rows` or less if there is a verdict."""
    selected: tuple[float, float] = (-math.inf, math.inf)
    """The bounds of `ahead` where the odds of being rated differ by up to `SELECTION`; without sampling error."""
    selection: float = 1.0
    """The largest factor between the odds of being rated under which the verdict stays; 1 if there is none."""

    @property
    def refusal(self) -> str:
        """Return the reason why there is no verdict, with the rows still needed; empty if there is one."""
        if self.covered < LEAST_COVERED and self.ess >= LEAST:
            reason = (
                f"the log stands for {self.covered:.0%} of that policy's choices, and {LEAST_COVERED:.0%} are needed"
            )
            return f"{reason}; more rows do not help, more exploration does"
        if self.ess < LEAST:
            reason = f"the log is worth {math.floor(self.ess)} rows of that policy, and {LEAST:.0f} are needed"
            return reason + self._missing_rows
        return ""

    @property
    def _missing_rows(self) -> str:
        if self.needed is None:
            return "; its choices were never drawn, so that more rows do not help"
        return f": about {max(self.needed - self.rows, 1)} more rows like these"

    @property
    def verdict(self) -> str:
        """Return `better` or `worse` than what was logged, `undecided` if the interval holds both, or `refused` for too
        little to go by."""
        if self.refusal:
            return "refused"
        if self.ahead.low > 0:
            return "better"
        if self.ahead.high < 0:
            return "worse"
        return "undecided"


class Log:
    """Decisions, and for each a model of the rewards that has not seen it; fitted once, for any number of reports."""

    def __init__(self, rows: Sequence[Logged]) -> None:
        """Raises ValueError for no rows, and for a propensity that is not above 0 and up to 1."""
        if not rows or not all([0 < row.propensity <= 1 for row in rows]):
            raise ValueError("a log needs rows, each with a propensity above 0 and up to 1")
        self._rows = rows
        self._vectors = [_vector(row.features) for row in rows]
        self._clusters = _cluster_numbers(rows)
        self._models = _cross_fit(rows, self._vectors, self._clusters)
        self._followed = [place for place, row in enumerate(rows) if row.further is not None]
        further = [row.further for row in rows if row.further is not None]
        self._further = Log(further) if further else None

    def report(self, target: Sequence[Policy], further: Sequence[Policy | None] = ()) -> Report:
        """Estimate the reward of the policy `target`, which is given as its choice in each row's place; `further` has
        its choices in the places of further decisions, None where there was none."""
        rows = self._rows
        rewards = [row.reward for row in rows]
        policies_of_further = [policy for policy in further if policy is not None]
        full, later = self._with_further_decisions(self._weights(target), policies_of_further)
        weights = [min(CAP, weight) for weight in full]
        expected, errors, corrected = self._doubly_robust(target, later)
        total, squares = sum(weights), sum(weight * weight for weight in weights)
        covered = min(1.0, total / len(rows))
        cut = [error for error, weight in zip(errors, full, strict=True) if weight > CAP]
        doubt = (1 - covered) * _bias_bound(cut, max(rewards) - min(rewards))
        ess = total * total / squares if squares else 0.0
        gains = [c - r for c, r in zip(corrected, rewards, strict=True)]
        ahead = anytime_estimate(gains, self._clusters, doubt)
        return Report(
            rows=len(rows),
            ess=ess,
            covered=covered,
            capped=len(cut),
            logged=mean(rewards),
            ips=mean([w * r for w, r in zip(weights, rewards, strict=True)]),
            snips=_ratio(weights, rewards),
            direct=sum(expected) / len(rows),
            dr=anytime_estimate(corrected, self._clusters, doubt),
            ahead=ahead,
            clusters=max(self._clusters) + 1,
            needed=_needed(len(rows), ess, gains, self._clusters),
            selected=selection_bounds(gains, SELECTION),
            selection=_selection(gains, ahead),
        )

    def _weights(self, target: Sequence[Policy]) -> list[float]:
        """Return for each row the other policy's probability of the logged action over the logged one."""
        return [choice.get(row.action, 0.0) / row.propensity for row, choice in zip(self._rows, target, strict=True)]

    def _with_further_decisions(
        self, weights: Sequence[float], further: Sequence[Policy]
    ) -> tuple[list[float], list[float]]:
        """Return the weights of the rows with those of their further decisions, and the value of what each row led
        to."""
        whole, later = list(weights), [row.reward for row in self._rows]
        if self._further is None:
            return whole, later
        values = self._further._doubly_robust(further, [row.reward for row in self._further._rows])[2]
        for place, weight, value in zip(self._followed, self._further._weights(further), values, strict=True):
            whole[place] *= weight
            later[place] = value
        return whole, later

    def _doubly_robust(
        self, target: Sequence[Policy], values: Sequence[float]
    ) -> tuple[list[float], list[float], list[float]]:
        """Return for each row what its model expects of the other policy's choice; the error of the model, if the row
        led to this value; and the expectation with the weighted error."""
        weights = [min(CAP, weight) for weight in self._weights(target)]
        expected, believed = self._predictions(target)
        errors = [value - q for value, q in zip(values, believed, strict=True)]
        return expected, errors, [e + w * error for e, w, error in zip(expected, weights, errors, strict=True)]

    def _predictions(self, target: Sequence[Policy]) -> tuple[list[float], list[float]]:
        """Return for each row what its model expects of the other policy's choice, and of the logged action."""
        expected, believed = [], []
        for place, (row, choice) in enumerate(zip(self._rows, target, strict=True)):
            model, vector = self._models[self._clusters[place] % FOLDS], self._vectors[place]
            expected.append(sum([chance * model.predict_vector(arm, vector) for arm, chance in choice.items()]))
            believed.append(model.predict_vector(row.action, vector))
        return expected, believed


def mean(values: Sequence[float], doubt: float = 0.0) -> Estimate:
    """Return the mean of at least one value, with the normal interval; `doubt` is a standard error of another kind."""
    value, error = _mean_and_error(values)
    wide = WIDE * math.hypot(error, doubt)
    return Estimate(value, value - wide, value + wide)


def anytime_estimate(values: Sequence[float], clusters: Sequence[int], doubt: float = 0.0) -> Estimate:
    """Return the mean of values with the interval that holds at all times; `doubt` is a standard error of another kind.
    The interval is infinite for fewer clusters than `intervals.LEAST`."""
    value, spread, count = fmean(values), _spread(values, clusters), max(clusters) + 1
    width = half_width(count)
    if math.isinf(width):
        return Estimate(value, -math.inf, math.inf)
    wide = math.hypot(width * spread, width * math.sqrt(count) * doubt)
    return Estimate(value, value - wide, value + wide)


def _spread(values: Sequence[float], clusters: Sequence[int]) -> float:
    """Return the standard deviation of what a cluster adds to the mean of all values, times their number."""
    count, average = max(clusters) + 1, fmean(values)
    sums = [0.0] * count
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value - average
    scale = count / len(values)
    return scale * math.sqrt(sum([deviation * deviation for deviation in sums]) / max(count - 1, 1))


def _cluster_numbers(rows: Sequence[Logged]) -> list[int]:
    """Return the number of each row's conversation, from 0 in the order in which they come."""
    known: dict[str, int] = {}
    return [known.setdefault(row.cluster or f"row {place}", len(known)) for place, row in enumerate(rows)]


def _needed(rows: int, ess: float, gains: Sequence[float], clusters: Sequence[int]) -> int | None:
    """Return about how many rows like these give a verdict: enough effective ones, and an interval that is shorter than
    the advantage."""
    if not ess:
        return None
    count = max(clusters) + 1
    spread, margin = _spread(gains, clusters), abs(fmean(gains))
    wanted = needed(spread, margin) if spread else LEAST_VALUES
    if wanted is None:
        return None
    return max(math.ceil(rows * LEAST / ess), math.ceil(wanted * rows / count))


def selection_bounds(gains: Sequence[float], factor: float) -> tuple[float, float]:
    """Return the least and the largest mean of the gains of all decisions, rated or not, where the odds that a decision
    was rated differ by at most `factor` between any two of them, in any way."""
    low = _least_mean(sorted(gains), factor)
    return low, -_least_mean(sorted([-gain for gain in gains]), factor)


def _least_mean(rising: Sequence[float], factor: float) -> float:
    """Return the least mean of values where each counts between once and `factor` times: the lowest count for more."""
    total, weight = sum(rising), float(len(rising))
    least = total / weight
    for value in rising:
        total += (factor - 1) * value
        weight += factor - 1
        least = min(least, total / weight)
    return least


def _selection(gains: Sequence[float], ahead: Estimate) -> float:
    """Return the largest factor under which the verdict stays, with the interval's width; 1 if there is none."""
    if not ahead.low > 0 and not ahead.high < 0:
        return 1.0
    side = 1.0 if ahead.low > 0 else -1.0
    rising, half = sorted([side * gain for gain in gains]), (ahead.high - ahead.low) / 2
    low, high = 1.0, MOST_SELECTION
    if _least_mean(rising, high) > half:
        return high
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if _least_mean(rising, middle) > half else (low, middle)
    return low


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    count = len(values)
    mean = sum(values) / count
    spread = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return mean, math.sqrt(spread / count)


def _bias_bound(errors: Sequence[float], widest: float) -> float:
    """Return a bound of a model's mean error from its errors on few rows; half of the range if there are fewer than
    two."""
    if len(errors) > 1:
        return math.hypot(*_mean_and_error(errors))
    return widest / 2


def _ratio(weights: Sequence[float], rewards: Sequence[float]) -> Estimate:
    """Return the weighted mean, with its spread by the delta method."""
    total = sum(weights)
    if not total:
        return Estimate(0.0, -math.inf, math.inf)
    value = sum(w * r for w, r in zip(weights, rewards, strict=True)) / total
    wide = WIDE * math.sqrt(sum((w * (r - value)) ** 2 for w, r in zip(weights, rewards, strict=True))) / total
    return Estimate(value, value - wide, value + wide)


# -- the model of the rewards


def _cross_fit(rows: Sequence[Logged], vectors: Sequence[Vector], clusters: Sequence[int]) -> list["Model"]:
    """Return, for the rows of each fold (those of every `FOLDS`th conversation), the model fitted on all others."""
    bounds = (min(row.reward for row in rows), max(row.reward for row in rows))
    size = max(len(row.features) for row in rows) + 1
    sums = []
    for fold in range(FOLDS):
        places = [place for place, cluster in enumerate(clusters) if cluster % FOLDS == fold]
        sums.append(_sum_by_arm([rows[place] for place in places], [vectors[place] for place in places], size))
    return [_fit([*sums[:fold], *sums[fold + 1 :]], size, bounds) for fold in range(FOLDS)]


def fit_model(rows: Sequence[Logged]) -> "Model":
    """Return the regressions over all of these rows, of which there is one at least."""
    size = max(len(row.features) for row in rows) + 1
    rewards = [row.reward for row in rows]
    sums = _sum_by_arm(rows, [_vector(row.features) for row in rows], size)
    return _fit([sums], size, (min(rewards), max(rewards)))


@dataclass(frozen=True, slots=True)
class Model:
    """The regressions: one for each arm that was ever done, and one for all others. They predict no reward outside
    `bounds`, the range of those that were seen."""

    shared: Sequence[float]
    own: Mapping[str, Sequence[float]]
    bounds: tuple[float, float]

    def predict(self, arm: str, features: Sequence[float]) -> float:
        """Return the expected reward of this arm."""
        return self.predict_vector(arm, _vector(features))

    def predict_vector(self, arm: str, vector: Vector) -> float:
        """Return the predicted reward for features that are a vector already."""
        line = self.own.get(arm, self.shared)
        return min(self.bounds[1], max(self.bounds[0], sum([line[place] * value for place, value in vector])))


def _vector(features: Sequence[float]) -> Vector:
    """Return the features after a constant."""
    return [(0, 1.0), *((place, value) for place, value in enumerate(features, 1) if value)]


class _Sums:
    """The sums that a regression needs of its rows: the lower half of X'X, and X'y."""

    __slots__ = ("moment", "square")

    def __init__(self, size: int) -> None:
        self.square = [[0.0] * (place + 1) for place in range(size)]
        self.moment = [0.0] * size

    def note(self, vector: Vector, value: float) -> None:
        """Note one row; places rise within a vector."""
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


def _sum_by_arm(rows: Sequence[Logged], vectors: Sequence[Vector], size: int) -> dict[str, _Sums]:
    found: dict[str, _Sums] = {}
    for row, vector in zip(rows, vectors, strict=True):
        found.setdefault(row.action, _Sums(size)).note(vector, row.reward)
    return found


def _fit(folds: Sequence[Mapping[str, _Sums]], size: int, bounds: tuple[float, float]) -> Model:
    arms: dict[str, _Sums] = {}
    everything = _Sums(size)
    for fold in folds:
        for arm, sums in fold.items():
            arms.setdefault(arm, _Sums(size)).add(sums)
            everything.add(sums)
    shared = _ridge(everything, [0.0] * size)
    return Model(shared, {arm: _ridge(sums, shared) for arm, sums in arms.items()}, bounds)


def _ridge(sums: _Sums, centre: Sequence[float]) -> list[float]:
    """Return the regression that is drawn towards `centre`."""
    size = len(centre)
    square = sums.square
    predicted = []
    for i in range(size):
        below = sum([square[i][j] * centre[j] for j in range(i + 1)])
        above = sum([square[j][i] * centre[j] for j in range(i + 1, size)])
        predicted.append(below + above)
    rest = _solve_ridge(square, [moment - known for moment, known in zip(sums.moment, predicted, strict=True)])
    return [c + r for c, r in zip(centre, rest, strict=True)]


def _solve_ridge(square: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x with (square + RIDGE) x = right, by Cholesky; `square` is a lower half."""
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
