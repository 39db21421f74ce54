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
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct

from app.core.rating.intervals import LEAST_VALUES, NORMAL_QUANTILE, half_width, sample_size

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

Policy = Mapping[str, float]
"""The probability of each arm in one decision; arms that are left out have none."""
Vector = Sequence[tuple[int, float]]
"""The features that are not 0, with their places."""


class LoggedOutcome(Struct, frozen=True):
    """One decision and what came of it; `propensity` is the probability with which `action` was really drawn."""

    features: tuple[float, ...]
    action: str
    propensity: float
    reward: float
    cluster: str = ""
    """The conversation that it belongs to; an empty one is a conversation of its own."""
    further: "LoggedOutcome | None" = None
    """The decision that followed it before the reward came, with the same reward and cluster."""


class Estimate(Struct, frozen=True):
    """A mean reward with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def holds(self, truth: float) -> bool:
        """Return True if the interval covers this value."""
        return self.low <= truth <= self.high


class Report(Struct, frozen=True):
    """The estimate of another policy from the log. `ahead`, the advantage, is `dr` less the log's own mean, row by
    row."""

    rows: int
    ess: float
    """The effective number of rows: (sum of weights)^2 over the sum of their squares."""
    covered: float
    capped: int
    """Rows where `dr` cut the weight of a decision, the first or the further one, to `CAP`."""
    logged: Estimate
    ips: Estimate
    snips: Estimate
    direct: float
    dr: Estimate
    ahead: Estimate
    clusters: int = 0
    needed: int | None = None
    """About how many rows like these the log must have for a verdict other than `refused` and `undecided`; None if no
    number of them is enough. What `doubt` adds to the interval of `ahead` is not counted."""
    selected: tuple[float, float] = (-math.inf, math.inf)
    """The bounds of `ahead` where the odds of being rated differ by up to `SELECTION`; without sampling error."""
    selection: float = 1.0
    """The largest factor between the odds of being rated under which the verdict stays; 1 if there is none."""

    @property
    def refusal(self) -> str:
        """Return the reason why there is no verdict, with the rows still needed; empty if there is one."""
        if self.covered < LEAST_COVERED and self.ess and (self.needed is None or self.ess >= LEAST):
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
        if not self.ess:
            return "; its choices were never drawn, so that more rows do not help"
        if self.needed is None:
            return "; the advantage is too small for any number of rows"
        return f"; about {max(self.needed - self.rows, 1)} more rows like these lead to a verdict"

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


class _DoublyRobust(NamedTuple):
    """The terms of the doubly robust estimator. Every list has one value for each row of the log."""

    direct: list[float]
    """The reward that the model expects of the other policy's choice."""
    errors: list[float]
    """The value that followed, less what the model expected of the logged action."""
    corrected: list[float]
    """The direct estimate plus the capped weight times the error."""


class Log:
    """Decisions, and for each a model of the rewards that has not seen it; fitted once, for any number of reports."""

    def __init__(self, rows: Sequence[LoggedOutcome]) -> None:
        """Raises ValueError for no rows, and for a propensity that is not above 0 and up to 1."""
        if not rows or not all([0 < row.propensity <= 1 for row in rows]):
            raise ValueError("a log needs rows, each with a propensity above 0 and up to 1")
        self._rows = rows
        self._vectors = [_vector(row.features) for row in rows]
        self._clusters = _cluster_numbers(rows)
        self._models = _cross_fit(rows, self._vectors, self._clusters)
        self._followed_rows: list[int] = []
        """The places of the rows that have a further decision, in the order of the rows of `_further_log`."""
        self._further_log: Log | None = None
        further_rows: list[LoggedOutcome] = []
        for place, row in enumerate(rows):
            if row.further is not None:
                self._followed_rows.append(place)
                further_rows.append(row.further)
        if further_rows:
            self._further_log = Log(further_rows)

    def report(self, target: Sequence[Policy], further: Sequence[Policy | None] = ()) -> Report:
        """Estimate the reward of the policy `target`, which is given as its choice in each row's place; `further` has
        its choices in the places of further decisions, None where there was none."""
        n = len(self._rows)
        rewards = self._rewards()
        further_target = [policy for policy in further if policy is not None]
        full_weights, largest_weights, values = self._with_further_decisions(target, further_target)
        estimated = self._doubly_robust(target, values)

        weights: list[float] = []
        weighted_rewards: list[float] = []
        gains: list[float] = []
        errors_of_capped_rows: list[float] = []
        for place, reward in enumerate(rewards):
            weight = min(CAP, full_weights[place])
            weights.append(weight)
            weighted_rewards.append(weight * reward)
            gains.append(estimated.corrected[place] - reward)
            if largest_weights[place] > CAP:
                errors_of_capped_rows.append(estimated.errors[place])

        ess = effective_size(weights)
        covered = min(1.0, sum(weights) / n)
        reward_range = max(rewards) - min(rewards)
        doubt = (1 - covered) * _bias_bound(errors_of_capped_rows, reward_range)
        ahead = anytime_estimate(gains, self._clusters, doubt)
        return Report(
            rows=n,
            ess=ess,
            covered=covered,
            capped=len(errors_of_capped_rows),
            logged=mean(rewards),
            ips=mean(weighted_rewards),
            snips=_self_normalised_mean(weights, rewards),
            direct=sum(estimated.direct) / n,
            dr=anytime_estimate(estimated.corrected, self._clusters, doubt),
            ahead=ahead,
            clusters=max(self._clusters) + 1,
            needed=_count_rows_needed(weights, gains, self._clusters),
            selected=selection_bounds(gains, SELECTION),
            selection=_selection(gains, ahead),
        )

    def _rewards(self) -> list[float]:
        return [row.reward for row in self._rows]

    def _weights(self, target: Sequence[Policy]) -> list[float]:
        """Return the importance weight of each row: the other policy's probability of the logged action over the
        propensity."""
        weights: list[float] = []
        for row, policy in zip(self._rows, target, strict=True):
            weights.append(policy.get(row.action, 0.0) / row.propensity)
        return weights

    def _with_further_decisions(
        self, target: Sequence[Policy], further_target: Sequence[Policy]
    ) -> tuple[list[float], list[float], list[float]]:
        """Return for each row the product of the weights of its decision and of its further one, the larger of the two,
        and the value that the first decision led to: the corrected estimate of the further one, or the reward where
        there was none."""
        weights = self._weights(target)
        largest = list(weights)
        values = self._rewards()
        further_log = self._further_log
        if further_log is None:
            return weights, largest, values
        further_weights = further_log._weights(further_target)
        further_values = further_log._doubly_robust(further_target, further_log._rewards()).corrected
        for place, weight, value in zip(self._followed_rows, further_weights, further_values, strict=True):
            weights[place] *= weight
            largest[place] = max(largest[place], weight)
            values[place] = value
        return weights, largest, values

    def _doubly_robust(self, target: Sequence[Policy], values: Sequence[float]) -> _DoublyRobust:
        """Estimate the other policy's value row by row, if each logged action led to the value in its place."""
        estimated = _DoublyRobust([], [], [])
        weights = self._weights(target)
        for place, row in enumerate(self._rows):
            model = self._models[self._clusters[place] % FOLDS]
            vector = self._vectors[place]
            direct = model.expected_reward(target[place], vector)
            error = values[place] - model.predict_vector(row.action, vector)
            estimated.direct.append(direct)
            estimated.errors.append(error)
            estimated.corrected.append(direct + min(CAP, weights[place]) * error)
        return estimated


def mean(values: Sequence[float], doubt: float = 0.0) -> Estimate:
    """Return the mean of at least one value, with the normal interval; `doubt` is a standard error of another kind."""
    value, error = _mean_and_error(values)
    margin = NORMAL_QUANTILE * math.hypot(error, doubt)
    return Estimate(value, value - margin, value + margin)


def anytime_estimate(values: Sequence[float], clusters: Sequence[int], doubt: float = 0.0) -> Estimate:
    """Return the mean of values with the interval that holds at all times; `doubt` is a standard error of another kind.
    The interval is infinite for fewer clusters than `intervals.LEAST_VALUES`."""
    value = fmean(values)
    count = max(clusters) + 1
    width = half_width(count)
    if math.isinf(width):
        return Estimate(value, -math.inf, math.inf)
    margin = math.hypot(width * _spread(values, clusters), width * math.sqrt(count) * doubt)
    return Estimate(value, value - margin, value + margin)


def _spread(values: Sequence[float], clusters: Sequence[int]) -> float:
    """Return the standard deviation of what a cluster adds to the mean of all values, times their number."""
    count = max(clusters) + 1
    average = fmean(values)
    deviations = [0.0] * count
    for value, cluster in zip(values, clusters, strict=True):
        deviations[cluster] += value - average
    variance = _dot(deviations, deviations) / max(count - 1, 1)
    return count / len(values) * math.sqrt(variance)


def _cluster_numbers(rows: Sequence[LoggedOutcome]) -> list[int]:
    """Return the number of each row's conversation, from 0 in the order in which they come."""
    number_of: dict[str, int] = {}
    numbers: list[int] = []
    for place, row in enumerate(rows):
        conversation = row.cluster or f"row {place}"
        numbers.append(number_of.setdefault(conversation, len(number_of)))
    return numbers


def effective_size(weights: Sequence[float]) -> float:
    """Return the effective number of weighted rows, (sum of weights)^2 over the sum of their squares: as many equally
    weighted ones have the same variance. It is 0 for no weight."""
    total = sum(weights)
    squares = _dot(weights, weights)
    if not squares:
        return 0.0
    return total * total / squares


def _count_rows_needed(weights: Sequence[float], gains: Sequence[float], clusters: Sequence[int]) -> int | None:
    """Return about how many rows like these give a verdict: enough effective ones, and an interval that is shorter than
    the advantage. None if no number does, as where the capped weights stand for too little of the other policy."""
    rows, ess = len(weights), effective_size(weights)
    covered, error = _mean_and_error(weights)
    if not ess or covered + 2 * error < LEAST_COVERED:
        return None
    count = max(clusters) + 1
    spread = _spread(gains, clusters)
    clusters_needed: int | None = LEAST_VALUES
    if spread:
        clusters_needed = sample_size(spread, abs(fmean(gains)))
    if clusters_needed is None:
        return None
    rows_for_support = math.ceil(rows * LEAST / ess)
    rows_for_interval = math.ceil(clusters_needed * rows / count)
    return max(rows_for_support, rows_for_interval)


def selection_bounds(gains: Sequence[float], factor: float) -> tuple[float, float]:
    """Return the least and the largest mean of the gains of all decisions, rated or not, where the odds that a decision
    was rated differ by at most `factor` between any two of them, in any way."""
    losses = [-gain for gain in gains]
    return _least_mean(sorted(gains), factor), -_least_mean(sorted(losses), factor)


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
    if ahead.low > 0:
        towards_verdict = sorted(gains)
    elif ahead.high < 0:
        towards_verdict = sorted([-gain for gain in gains])
    else:
        return 1.0
    margin = (ahead.high - ahead.low) / 2
    if _least_mean(towards_verdict, MOST_SELECTION) > margin:
        return MOST_SELECTION
    low, high = 1.0, MOST_SELECTION
    while high - low > 0.01:
        middle = (low + high) / 2
        if _least_mean(towards_verdict, middle) > margin:
            low = middle
        else:
            high = middle
    return low


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return mean, math.sqrt(variance / count)


def _bias_bound(errors: Sequence[float], reward_range: float) -> float:
    """Return a bound of a model's mean error from its errors on few rows; half of the range of rewards if there are
    fewer than two."""
    if len(errors) > 1:
        return math.hypot(*_mean_and_error(errors))
    return reward_range / 2


def _self_normalised_mean(weights: Sequence[float], rewards: Sequence[float]) -> Estimate:
    """Return the weighted mean, with its standard error by the delta method."""
    total = sum(weights)
    if not total:
        return Estimate(0.0, -math.inf, math.inf)
    value = _dot(weights, rewards) / total
    squared_residuals = [(w * (r - value)) ** 2 for w, r in zip(weights, rewards, strict=True)]
    margin = NORMAL_QUANTILE * math.sqrt(sum(squared_residuals)) / total
    return Estimate(value, value - margin, value + margin)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the inner product, summed from the first component on."""
    return sum([x * y for x, y in zip(a, b, strict=True)])


# -- the model of the rewards


def _cross_fit(rows: Sequence[LoggedOutcome], vectors: Sequence[Vector], clusters: Sequence[int]) -> list["Model"]:
    """Return, for the rows of each fold (those of every `FOLDS`th conversation), the model fitted on all others."""
    size = _model_size(rows)
    bounds = _reward_bounds(rows)
    folds: list[dict[str, _Moments]] = [{} for _ in range(FOLDS)]
    for row, vector, cluster in zip(rows, vectors, clusters, strict=True):
        _add_row(folds[cluster % FOLDS], row, vector, size)
    models: list[Model] = []
    for fold in range(FOLDS):
        other_folds = [*folds[:fold], *folds[fold + 1 :]]
        models.append(_fit(other_folds, size, bounds))
    return models


def _model_size(rows: Sequence[LoggedOutcome]) -> int:
    """Return the number of coefficients of a regression: the constant, and the features of the row that has most."""
    return max(len(row.features) for row in rows) + 1


def _reward_bounds(rows: Sequence[LoggedOutcome]) -> tuple[float, float]:
    rewards = [row.reward for row in rows]
    return min(rewards), max(rewards)


class Model(Struct, frozen=True):
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
        coefficients = self.own.get(arm, self.shared)
        predicted = sum([coefficients[place] * value for place, value in vector])
        lowest, highest = self.bounds
        return min(highest, max(lowest, predicted))

    def expected_reward(self, policy: Policy, vector: Vector) -> float:
        """Return the mean of the predicted rewards over the arms, each with the policy's probability of it."""
        return sum([probability * self.predict_vector(arm, vector) for arm, probability in policy.items()])


def _vector(features: Sequence[float]) -> Vector:
    """Return the features after a constant."""
    vector = [(0, 1.0)]
    for place, value in enumerate(features, 1):
        if value:
            vector.append((place, value))
    return vector


class _Moments:
    """The sums that a regression needs of its rows x and rewards y: the lower half of X'X, and X'y."""

    __slots__ = ("xx", "xy")

    def __init__(self, size: int) -> None:
        self.xx = [[0.0] * (place + 1) for place in range(size)]
        self.xy = [0.0] * size

    def add_row(self, vector: Vector, reward: float) -> None:
        """Add one row; places rise within a vector."""
        for count, (i, x) in enumerate(vector, 1):
            self.xy[i] += x * reward
            row = self.xx[i]
            for j, y in vector[:count]:
                row[j] += x * y

    def add(self, other: "_Moments") -> None:
        """Add all rows of another."""
        self.xy = _add_vectors(self.xy, other.xy)
        for i, row in enumerate(other.xx):
            self.xx[i] = _add_vectors(self.xx[i], row)

    def xx_times(self, vector: Sequence[float]) -> list[float]:
        """Return X'X times a vector."""
        size = len(vector)
        product: list[float] = []
        for i in range(size):
            up_to_diagonal = _dot(self.xx[i], vector[: i + 1])
            beyond_diagonal = sum([self.xx[j][i] * vector[j] for j in range(i + 1, size)])
            product.append(up_to_diagonal + beyond_diagonal)
        return product


def _add_vectors(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _add_row(by_arm: dict[str, _Moments], row: LoggedOutcome, vector: Vector, size: int) -> None:
    """Add a row to the sums of its arm."""
    if row.action not in by_arm:
        by_arm[row.action] = _Moments(size)
    by_arm[row.action].add_row(vector, row.reward)


def _fit(folds: Sequence[Mapping[str, _Moments]], size: int, bounds: tuple[float, float]) -> Model:
    """Return the regressions over the rows of all of these folds: the shared one first, then one for each arm."""
    by_arm: dict[str, _Moments] = {}
    all_rows = _Moments(size)
    for fold in folds:
        for arm, moments in fold.items():
            if arm not in by_arm:
                by_arm[arm] = _Moments(size)
            by_arm[arm].add(moments)
            all_rows.add(moments)
    shared = _ridge(all_rows, [0.0] * size)
    own = {arm: _ridge(moments, shared) for arm, moments in by_arm.items()}
    return Model(shared, own, bounds)


def _ridge(moments: _Moments, centre: Sequence[float]) -> list[float]:
    """Return the coefficients of the regression that is drawn towards c, `centre`: c + (X'X + RIDGE)^-1 (X'y - X'X
    c)."""
    residual: list[float] = []
    for observed, predicted in zip(moments.xy, moments.xx_times(centre), strict=True):
        residual.append(observed - predicted)
    return _add_vectors(centre, _solve_ridge(moments.xx, residual))


def _solve_ridge(xx: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x with (X'X + RIDGE) x = right; `xx` is the lower half of X'X.

    By Cholesky: with L L' = X'X + RIDGE, first L z = right is solved, and then L' x = z.
    """
    size = len(right)
    lower: list[list[float]] = []
    for i in range(size):
        row: list[float] = []
        for j in range(i):
            row.append((xx[i][j] - _dot(row, lower[j][:j])) / lower[j][j])
        row.append(math.sqrt(xx[i][i] + RIDGE - _dot(row, row)))
        lower.append(row)
    z: list[float] = []
    for i in range(size):
        z.append((right[i] - _dot(lower[i][:i], z)) / lower[i][i])
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = z[i] / lower[i][i]
        for j in range(i):
            z[j] -= lower[i][j] * x[i]
    return x
