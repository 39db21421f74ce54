"""Published routers as baselines: each learns from scores of prompts and estimates the score of every model on another.

mean scores ............ the mean of the model, whatever the prompt
knn .................... the mean of the most similar prompts, weighted by similarity
k-means ................ the mean of the prompt's cluster (Avengers, arXiv 2505.19797)
logistic regression .... one for each model
matrix factorisation ... a low-rank product of prompt and model (RouteLLM, arXiv 2406.18665)

All see the features that a selector sees, hashed words and counts, and no embedding. A training prompt may have scores
of all models or of some; so the same code learns from full information and from a log.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from msgspec import Struct

from app.core.rating.features import WIDTH, Features
from app.core.rating.posterior import logistic

NEIGHBOURS = 50
CLUSTERS = 32
PROMPTS_PER_CLUSTER = 40
ITERATIONS = 8
EPOCHS = 6
RANK = 4
COMMON = 0.6
"""The share of prompts that have a word from which on it says nothing of likeness."""
LEARNING_RATE = 0.3
"""The learning rate of AdaGrad."""
WEIGHT_DECAY = 0.002
"""The share by which a weight that is used shrinks at each step."""
MEMBER_WEIGHT = 0.1
"""The weight of each prompt of a cluster in the cluster's mean."""
PRIOR_WEIGHT = 0.5
"""The weight of the model's mean over all prompts in the mean of a cluster or of neighbours: that of five members."""

Vector = Sequence[tuple[int, float]]
Scores = Mapping[str, float]
Estimator = Callable[[Features], Scores]
"""The expected score of each model on a prompt."""


class Example(Struct, frozen=True):
    """A prompt with the scores that are known of it."""

    features: Features
    scores: Scores


def mean_scores(examples: Sequence[Example], models: Sequence[str]) -> Scores:
    """Return the mean score of each model; 0.5 for one without examples."""
    means = {}
    for model in models:
        scores = [example.scores[model] for example in examples if model in example.scores]
        means[model] = 0.5
        if scores:
            means[model] = sum(scores) / len(scores)
    return means


def constant(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate the mean of each model for all prompts alike. So prompts are upgraded at random along the curve, and by
    reward all of them go to the same model."""
    means = mean_scores(examples, models)
    return lambda features: means


def knn(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by the nearest prompts, by the cosine of their weighted words."""
    rarity = _rarity_weights(examples)
    index: dict[int, list[tuple[int, float]]] = {}
    """By word, the examples that have it, with the component of each one's vector."""
    for n, example in enumerate(examples):
        for word, value in _unit_vector(example.features.words, rarity):
            index.setdefault(word, []).append((n, value))
    means = mean_scores(examples, models)

    def estimate(features: Features) -> Scores:
        cosine: dict[int, float] = {}
        for word, value in _unit_vector(features.words, rarity):
            for n, other in index.get(word, ()):
                cosine[n] = cosine.get(n, 0.0) + value * other
        nearest = sorted(cosine, key=lambda n: -cosine[n])[:NEIGHBOURS]
        neighbours = []
        for n in nearest:
            neighbours.append((examples[n].scores, max(cosine[n], 0.0)))
        return _average_scores(neighbours, means)

    return estimate


def _average_scores(members: Sequence[tuple[Scores, float]], means: Scores) -> Scores:
    """Return for each model the mean of the scores by their weights, drawn towards its mean over all prompts."""
    estimates = {}
    for model, mean in means.items():
        weights, weighted_scores = [], []
        for scores, weight in members:
            if model in scores:
                weights.append(weight)
                weighted_scores.append(scores[model] * weight)
        total = sum(weights) + PRIOR_WEIGHT
        estimates[model] = (sum(weighted_scores) + PRIOR_WEIGHT * mean) / total
    return estimates


def k_means(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by clusters of words, by the cosine."""
    rarity = _rarity_weights(examples)
    vectors = [_unit_vector(example.features.words, rarity) for example in examples]
    count = max(1, min(CLUSTERS, len(examples) // PROMPTS_PER_CLUSTER))
    centres = [_centre([vector]) for vector in random.sample(vectors, count)]
    for _ in range(ITERATIONS):
        vectors_of_cluster: dict[int, list[Vector]] = {}
        for vector in vectors:
            vectors_of_cluster.setdefault(_nearest(vector, centres), []).append(vector)
        for cluster, members in vectors_of_cluster.items():
            centres[cluster] = _centre(members)

    scores_of_cluster: dict[int, list[tuple[Scores, float]]] = {}
    for vector, example in zip(vectors, examples, strict=True):
        scores_of_cluster.setdefault(_nearest(vector, centres), []).append((example.scores, MEMBER_WEIGHT))
    means = mean_scores(examples, models)
    estimates = {cluster: _average_scores(scores, means) for cluster, scores in scores_of_cluster.items()}

    def estimate(features: Features) -> Scores:
        cluster = _nearest(_unit_vector(features.words, rarity), centres)
        return estimates.get(cluster, means)

    return estimate


def _centre(vectors: Sequence[Vector]) -> Sequence[float]:
    """Return the sum of vectors, with length 1."""
    total = [0.0] * WIDTH
    for vector in vectors:
        for place, value in vector:
            total[place] += value
    length = _length(total)
    return [value / length for value in total]


def _length(values: Sequence[float]) -> float:
    """Return the length of a vector; 1 for a vector of zeros, which can be divided by it."""
    length = math.sqrt(sum([value * value for value in values]))
    if not length:
        return 1.0
    return length


def _nearest(vector: Vector, centres: Sequence[Sequence[float]]) -> int:
    """Return the first of the centres with the largest cosine."""
    cosines = [_dot(vector, centre) for centre in centres]
    return cosines.index(max(cosines))


def _dot(vector: Vector, dense: Sequence[float]) -> float:
    return sum([value * dense[place] for place, value in vector])


def _rarity_weights(examples: Sequence[Example]) -> Mapping[int, float]:
    """Return a weight for each word, the logarithm of its inverse document frequency. Words that most prompts have are
    left out."""
    frequency: Counter[int] = Counter()
    for example in examples:
        frequency.update([word for word, _ in example.features.words])
    weights = {}
    for word, count in frequency.items():
        if count <= COMMON * len(examples):
            weights[word] = math.log((1 + len(examples)) / count)
    return weights


def _unit_vector(words: Vector, rarity: Mapping[int, float]) -> Vector:
    """Return the words that have a weight, weighted, as a vector of length 1."""
    weighted = [(word, value * rarity[word]) for word, value in words if rarity.get(word, 0.0) > 0]
    length = _length([value for _, value in weighted])
    return [(word, value / length) for word, value in weighted]


@dataclass(slots=True)
class _Parameter:
    """A number that AdaGrad fits."""

    value: float = 0.0
    squared_gradients: float = 1e-3
    """The sum of the squares of all gradients so far."""

    def ascend(self, gradient: float) -> None:
        """Take one step of AdaGrad with weight decay."""
        self.squared_gradients += gradient * gradient
        step = LEARNING_RATE * gradient / math.sqrt(self.squared_gradients)
        self.value += step - WEIGHT_DECAY * self.value


def logistic_regression(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by a regression for each model, fitted by AdaGrad."""
    coefficients: dict[str, dict[int, _Parameter]] = {model: {} for model in models}
    for example in _epochs(examples, random):
        vector = _inputs(example.features)
        for model, score in example.scores.items():
            of_model = coefficients[model]
            error = score - logistic(_logit(of_model, vector))
            for place, value in vector:
                if place not in of_model:
                    of_model[place] = _Parameter()
                of_model[place].ascend(error * value)

    def estimate(features: Features) -> Scores:
        vector = _inputs(features)
        return {model: logistic(_logit(coefficients[model], vector)) for model in models}

    return estimate


def _logit(coefficients: Mapping[int, _Parameter], vector: Vector) -> float:
    return sum([coefficients[place].value * value for place, value in vector if place in coefficients])


def _epochs(examples: Sequence[Example], random: Random) -> Sequence[Example]:
    """Return all examples once for each epoch, each time in another order."""
    shuffled: list[Example] = []
    for _ in range(EPOCHS):
        shuffled += random.sample(examples, len(examples))
    return shuffled


def _inputs(features: Features) -> Vector:
    """Return a constant, the counts and the words."""
    counts = [(WIDTH + 1 + n, 0.3 * value) for n, value in enumerate(features.counts)]
    return [(WIDTH, 1.0), *counts, *features.words]


def matrix_factorisation(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by a product of `RANK` factors of the prompt's words and of the model, fitted by AdaGrad."""
    word_factors: dict[int, list[_Parameter]] = {}
    model_factors = {model: _random_factors(random, 0.5) for model in models}
    bias = {model: _Parameter() for model in models}
    for example in _epochs(examples, random):
        vector = _inputs(example.features)
        for place, _ in vector:
            if place not in word_factors:
                word_factors[place] = _random_factors(random, 0.1)
        prompt = _prompt_factors(word_factors, vector)
        prompt_gradient = [0.0] * RANK
        for model, score in example.scores.items():
            error = score - logistic(bias[model].value + _product(model_factors[model], prompt))
            bias[model].ascend(error)
            for n, factor in enumerate(model_factors[model]):
                prompt_gradient[n] += error * factor.value
                factor.ascend(error * prompt[n])
        for place, value in vector:
            for factor, gradient in zip(word_factors[place], prompt_gradient, strict=True):
                factor.ascend(gradient * value)

    def estimate(features: Features) -> Scores:
        prompt = _prompt_factors(word_factors, _inputs(features))
        return {model: logistic(bias[model].value + _product(model_factors[model], prompt)) for model in models}

    return estimate


def _random_factors(random: Random, deviation: float) -> list[_Parameter]:
    """Return the factors before the first step, which are drawn about 0."""
    return [_Parameter(random.gauss(0, deviation)) for _ in range(RANK)]


def _prompt_factors(word_factors: Mapping[int, Sequence[_Parameter]], vector: Vector) -> Sequence[float]:
    """Return the sum of the factors of a prompt's words: [`RANK`]."""
    total = [0.0] * RANK
    for place, value in vector:
        for n, factor in enumerate(word_factors.get(place, ())):
            total[n] += factor.value * value
    return total


def _product(factors: Sequence[_Parameter], values: Sequence[float]) -> float:
    return sum([factor.value * value for factor, value in zip(factors, values, strict=True)])


Fit = Callable[[Sequence[Example], Sequence[str], Random], Estimator]
BASELINES: Mapping[str, Fit] = {
    "mean scores": constant,
    "kNN": knn,
    "k-means": k_means,
    "logistic regression": logistic_regression,
    "matrix factorisation": matrix_factorisation,
}
"""Every baseline by its name in tables."""
