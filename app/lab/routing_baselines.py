"""Published routers as baselines: each learns from scores of prompts and estimates the score of every model on another.

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
STEP = 0.3
"""The learning rate of AdaGrad."""
SHRINK = 0.002
"""The share by which a weight that is used shrinks at each step."""
PRIOR = 5.0
"""Prompts of average score that the mean of a cluster or of neighbours counts in addition."""

Vector = Sequence[tuple[int, float]]
Scores = Mapping[str, float]
Estimator = Callable[[Features], Scores]
"""The expected score of each model on a prompt."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the scores that are known of it."""

    seen: Features
    scores: Scores


def means(examples: Sequence[Example], models: Sequence[str]) -> Scores:
    """Return the mean score of each model; 0.5 for one without examples."""
    found = {}
    for model in models:
        scores = [example.scores[model] for example in examples if model in example.scores]
        found[model] = sum(scores) / len(scores) if scores else 0.5
    return found


def constant(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate the mean of each model for all prompts alike: routing by it is random routing."""
    found = means(examples, models)
    return lambda seen: found


def knn(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by the nearest prompts, by the cosine of their weighted words."""
    weights = _rarity(examples)
    postings: dict[int, list[tuple[int, float]]] = {}
    for number, example in enumerate(examples):
        for place, value in _weighted(example.seen.words, weights):
            postings.setdefault(place, []).append((number, value))
    usual = means(examples, models)

    def estimate(seen: Features) -> Scores:
        similar: dict[int, float] = {}
        for place, value in _weighted(seen.words, weights):
            for number, other in postings.get(place, ()):
                similar[number] = similar.get(number, 0.0) + value * other
        nearest = sorted(similar, key=lambda number: -similar[number])[:NEIGHBOURS]
        near = [(examples[number].scores, max(similar[number], 0.0)) for number in nearest]
        return {model: _mean(model, near, usual[model]) for model in models}

    return estimate


def _mean(model: str, near: Sequence[tuple[Scores, float]], usual: float) -> float:
    """Return the weighted mean, with a little of the usual score."""
    known = [(scores[model], weight) for scores, weight in near if model in scores]
    least = 0.1 * PRIOR
    total = sum([weight for _, weight in known]) + least
    return (sum([score * weight for score, weight in known]) + least * usual) / total


def k_means(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by clusters of words, by the cosine."""
    weights = _rarity(examples)
    vectors = [_weighted(example.seen.words, weights) for example in examples]
    count = max(1, min(CLUSTERS, len(examples) // PROMPTS_PER_CLUSTER))
    centres = [_centre([vector]) for vector in random.sample(vectors, count)]
    for _ in range(ITERATIONS):
        members: dict[int, list[Vector]] = {}
        for vector in vectors:
            members.setdefault(_nearest(vector, centres), []).append(vector)
        centres = [_centre(members[n]) if n in members else centre for n, centre in enumerate(centres)]
    usual = means(examples, models)
    inside: dict[int, list[tuple[Scores, float]]] = {}
    for vector, example in zip(vectors, examples, strict=True):
        inside.setdefault(_nearest(vector, centres), []).append((example.scores, 0.1))
    found: dict[int, Scores] = {}
    for n, near in inside.items():
        found[n] = {model: _mean(model, near, usual[model]) for model in models}
    return lambda seen: found.get(_nearest(_weighted(seen.words, weights), centres), usual)


def _centre(vectors: Sequence[Vector]) -> Sequence[float]:
    """Return the sum of vectors, with length 1."""
    summed = [0.0] * WIDTH
    for vector in vectors:
        for place, value in vector:
            summed[place] += value
    length = math.sqrt(sum([value * value for value in summed])) or 1.0
    return [value / length for value in summed]


def _nearest(vector: Vector, centres: Sequence[Sequence[float]]) -> int:
    likeness = [_likeness(vector, centre) for centre in centres]
    return likeness.index(max(likeness))


def _likeness(vector: Vector, centre: Sequence[float]) -> float:
    return sum([value * centre[place] for place, value in vector])


def _rarity(examples: Sequence[Example]) -> Mapping[int, float]:
    """Return a weight for each word: the rarer, the more, and none for one that most prompts have."""
    counts = Counter(place for example in examples for place, _ in example.seen.words)
    rare = [(place, count) for place, count in counts.items() if count <= COMMON * len(examples)]
    return {place: math.log((1 + len(examples)) / count) for place, count in rare}


def _weighted(words: Vector, weights: Mapping[int, float]) -> Vector:
    """Return weighted words with length 1."""
    found = [(place, value * weights[place]) for place, value in words if weights.get(place, 0.0) > 0]
    length = math.sqrt(sum([value * value for _, value in found])) or 1.0
    return [(place, value / length) for place, value in found]


def logistic_regression(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by a regression for each model, fitted by AdaGrad."""
    lines: dict[str, dict[int, list[float]]] = {model: {} for model in models}
    for example in _shuffled(examples, random):
        vector = _inputs(example.seen)
        for model, score in example.scores.items():
            line = lines[model]
            error = score - logistic(_sum(line, vector))
            for place, value in vector:
                _move(line.setdefault(place, [0.0, 1e-3]), error * value)

    def estimate(seen: Features) -> Scores:
        vector = _inputs(seen)
        return {model: logistic(_sum(line, vector)) for model, line in lines.items()}

    return estimate


def _sum(line: Mapping[int, Sequence[float]], vector: Vector) -> float:
    return sum([line[place][0] * value for place, value in vector if place in line])


def _move(weight: list[float], gradient: float) -> None:
    """Take one step of AdaGrad for a weight and its sum of squared gradients."""
    weight[1] += gradient * gradient
    weight[0] += STEP * gradient / math.sqrt(weight[1]) - SHRINK * weight[0]


def _shuffled(examples: Sequence[Example], random: Random) -> Sequence[Example]:
    """Return all examples once for each epoch, each time in another order."""
    found: list[Example] = []
    for _ in range(EPOCHS):
        found += random.sample(examples, len(examples))
    return found


def _inputs(seen: Features) -> Vector:
    """Return a constant, the counts and the words."""
    counts = [(WIDTH + 1 + n, 0.3 * value) for n, value in enumerate(seen.counts)]
    return [(WIDTH, 1.0), *counts, *seen.words]


def matrix_factorisation(examples: Sequence[Example], models: Sequence[str], random: Random) -> Estimator:
    """Estimate by a product of `RANK` factors of the prompt's words and of the model, fitted by AdaGrad."""
    factors: dict[int, list[list[float]]] = {}
    own = {model: _started(random, 0.5) for model in models}
    bias = {model: [0.0, 1e-3] for model in models}
    for example in _shuffled(examples, random):
        vector = _inputs(example.seen)
        for place, _ in vector:
            if place not in factors:
                factors[place] = _started(random, 0.1)
        prompt, pulls = _projected(factors, vector), [0.0] * RANK
        for model, score in example.scores.items():
            error = score - logistic(bias[model][0] + _product(own[model], prompt))
            _move(bias[model], error)
            for n, weight in enumerate(own[model]):
                pulls[n] += error * weight[0]
                _move(weight, error * prompt[n])
        for place, value in vector:
            for weight, pull in zip(factors[place], pulls, strict=True):
                _move(weight, pull * value)

    def estimate(seen: Features) -> Scores:
        prompt = _projected(factors, _inputs(seen))
        return {model: logistic(bias[model][0] + _product(own[model], prompt)) for model in models}

    return estimate


def _started(random: Random, spread: float) -> list[list[float]]:
    """Return the factors before the first step, each weight with its sum of squared gradients."""
    return [[random.gauss(0, spread), 1e-3] for _ in range(RANK)]


def _projected(factors: Mapping[int, Sequence[Sequence[float]]], vector: Vector) -> Sequence[float]:
    found = [0.0] * RANK
    for place, value in vector:
        for n, weight in enumerate(factors.get(place, ())):
            found[n] += weight[0] * value
    return found


def _product(weights: Sequence[Sequence[float]], values: Sequence[float]) -> float:
    return sum([weight[0] * value for weight, value in zip(weights, values, strict=True)])


Fit = Callable[[Sequence[Example], Sequence[str], Random], Estimator]
BASELINES: Mapping[str, Fit] = {
    "random": constant,
    "kNN": knn,
    "k-means": k_means,
    "logistic regression": logistic_regression,
    "matrix factorisation": matrix_factorisation,
}
"""Every baseline by its name in tables."""
