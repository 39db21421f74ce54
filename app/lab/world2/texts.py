"""Classifiers of a task's text: regular expressions, naive Bayes, nearest neighbours and k-means over word weights.

They are the basis of "one constant plan for each domain". Each learns from the texts of training tasks, the first three
with the true domain of most parts as the label. A classifier maps texts to the numbers of groups.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.lab.world2.constants import DOMAINS
from app.lab.world2.tasks import Task

Matrix: TypeAlias = NDArray[np.float64]
Groups: TypeAlias = NDArray[np.int64]
Classifier = Callable[[Sequence[Task]], Groups]

WORD = re.compile(r"[a-z]+")
NEIGHBOURS = 15
ROUNDS = 12
SMOOTHING = 0.5
CUES = (
    r"\b(bill|owe|tickets|apiece|coins|bags|groups|chairs|left over|cases|rounds of|per cent|hundred|rate)\b",
    r"\b(monday|days?|weeks|clock|midnight|minutes|march|shift|lease|date)\b",
    r"\b(variable|program|counter|job|list|array|items|index|buffer|bits|machine|base two|function)\b|range\(",
    r"\b(in this order|circle|lamp|door|switch|true|claims|guard|statement|on or off|turns?|shakes?|pairs)\b",
    r"\b(dictionary|letters?|characters|lengths|longest|words?|from a to z|initials|mirror|backwards)\b",
)
"""For each domain the words by which an operator would route to it."""


class Vocabulary:
    """The words of training texts, with their weights: rare ones count more (tf-idf), and rows have the length 1."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        counts: Counter[str] = Counter()
        for task in tasks:
            counts.update(words_and_pairs(task.text))
        words = sorted([word for word, count in counts.items() if count > 1])
        self.places = {word: place for place, word in enumerate(words)}
        self._weights = np.array([math.log((1 + len(tasks)) / (1 + counts[word])) for word in words])

    def presence(self, tasks: Sequence[Task]) -> Matrix:
        """Return one row for each task, with 1 for each word that it has."""
        rows = np.zeros((len(tasks), len(self.places)))
        for row, task in zip(rows, tasks, strict=True):
            row[[self.places[word] for word in words_and_pairs(task.text) if word in self.places]] = 1.0
        return rows

    def weigh(self, tasks: Sequence[Task]) -> Matrix:
        """Return the same with the words' weights."""
        rows = self.presence(tasks) * self._weights
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        weighted: Matrix = rows / np.maximum(lengths, 1e-9)
        return weighted


def words_and_pairs(text: str) -> set[str]:
    """Return the words of a text and its pairs of neighbouring words."""
    words = WORD.findall(text.lower())
    return {*words, *map(" ".join, pairwise(words))}


def by_regex(tasks: Sequence[Task]) -> Groups:
    """Return for each text the domain of whose words it has the most, of several the first."""
    groups = []
    for task in tasks:
        counts = [len(re.findall(cue, task.text.lower())) for cue in CUES]
        groups.append(counts.index(max(counts)))
    return np.array(groups)


def naive_bayes(training: Sequence[Task]) -> Classifier:
    """Learn a Bernoulli naive Bayes classifier of domains."""
    vocabulary, labels = Vocabulary(training), domains(training)
    rows = vocabulary.presence(training)
    shares, chances = [], []
    for domain in range(len(DOMAINS)):
        own = rows[labels == domain]
        shares.append(math.log((len(own) + SMOOTHING) / (len(rows) + SMOOTHING * len(DOMAINS))))
        chances.append((own.sum(axis=0) + SMOOTHING) / (len(own) + 2 * SMOOTHING))
    has, lacks = np.log(np.array(chances)), np.log(1 - np.array(chances))

    def classify(tasks: Sequence[Task]) -> Groups:
        presence = vocabulary.presence(tasks)
        scores = presence @ has.T + (1 - presence) @ lacks.T + np.array(shares)
        return np.asarray(scores.argmax(axis=1))

    return classify


def nearest_neighbours(training: Sequence[Task]) -> Classifier:
    """Learn a vote of the nearest training texts on the domain."""
    vocabulary, labels = Vocabulary(training), domains(training)
    rows = vocabulary.weigh(training)

    def classify(tasks: Sequence[Task]) -> Groups:
        nearest = np.argsort(-(vocabulary.weigh(tasks) @ rows.T), axis=1)[:, :NEIGHBOURS]
        votes = np.array([(labels[nearest] == domain).sum(axis=1) for domain in range(len(DOMAINS))])
        return np.asarray(votes.argmax(axis=0))

    return classify


def clusters(training: Sequence[Task], count: int, seed: int) -> Classifier:
    """Learn clusters of texts by k-means on their directions."""
    vocabulary, random = Vocabulary(training), np.random.default_rng(seed)
    rows = vocabulary.weigh(training)
    centres = rows[random.choice(len(rows), size=min(count, len(rows)), replace=False)]
    for _ in range(ROUNDS):
        nearest = (rows @ centres.T).argmax(axis=1)
        for place in np.unique(nearest):
            mean = rows[nearest == place].mean(axis=0)
            centres[place] = mean / max(float(np.linalg.norm(mean)), 1e-9)

    def classify(tasks: Sequence[Task]) -> Groups:
        return np.asarray((vocabulary.weigh(tasks) @ centres.T).argmax(axis=1))

    return classify


def domains(tasks: Sequence[Task]) -> Groups:
    """Return the true domain of most parts of each task."""
    return np.array([task.domain for task in tasks])
