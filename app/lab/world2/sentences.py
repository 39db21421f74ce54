"""Chances of what a sentence asks for: a family of training, or nothing (openings, remarks on documents, thanks).

Two multinomial regressions look at the same features: one knows families, one knows domains alone. A sentence of known
words is left to the first, one of unknown words to the second, which errs less on words that it never met. Features are
the mean of pretrained static word vectors where they are at hand (`load_word_vectors`), else words.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from random import Random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.lab.world2.constants import DOMAINS
from app.lab.world2.tasks import Family, Task
from app.lab.world2.texts import WORD

Matrix: TypeAlias = NDArray[np.float64]
Vectors: TypeAlias = Callable[[Sequence[str]], Matrix]
"""Pretrained vectors of sentences, each of length 1."""
SENTENCE = re.compile(r"(?<=[.?!]) ")
NUMBER = re.compile(r"[0-9]+")
SMOOTHING, LEAST_EVIDENCE = 0.2, 3.0
"""Texts that a word is taken to have been in besides, and the evidence from which a sentence asks for a family."""
EXAMPLES, FILLERS, NAMES = 60, 300, 5
"""Sentences of each family and without one that are learned from, and how often the name of a domain is one of it."""
DESCENTS, RATE, MOMENTUM = 300, 3.0, 0.9
DECAY_OF_FAMILIES, DECAY_OF_DOMAINS = 1e-4, 2e-4
"""The share by which weights shrink, chosen on phrases and families that were held out from those of training."""
NOVEL_SHARE = 0.2
"""The share of unknown words from which on a sentence is left to the regression on domains."""


def load_word_vectors() -> Vectors | None:
    """Return the static vectors that the package `wordllama` carries, or None where it is not installed."""
    package = find_spec("wordllama")
    if package is None or package.origin is None:
        return None
    # The package looks for its own tokenizer in a folder of another name, unless its folder is given as the cache.
    folder = Path(package.origin).parent
    model = import_module("wordllama").WordLlama.load(cache_dir=folder, disable_download=True)

    def vectors(sentences: Sequence[str]) -> Matrix:
        return np.asarray(model.embed(list(map(_normalise, sentences)), norm=True), dtype=float)

    return vectors


def words(text: str) -> set[str]:
    """Return the words of a text: single ones, since pairs carry over less to phrasings that were never met."""
    return set(WORD.findall(text.lower()))


def sentences(text: str) -> list[str]:
    """Return the sentences of a text."""
    return SENTENCE.split(text)


def text_counts(texts: Iterable[str]) -> Counter[str]:
    """Return for each word the number of texts that have it."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    return counts


def presence_of_words(texts: Sequence[str], vocabulary: Sequence[str]) -> Matrix:
    """Return a row for each text, with 1 for each word of the vocabulary that it has: [texts, words]."""
    places = {word: place for place, word in enumerate(vocabulary)}
    rows = np.zeros((len(texts), len(vocabulary)))
    for row, text in zip(rows, texts, strict=True):
        row[[places[word] for word in words(text) if word in places]] = 1.0
    return rows


class SentenceReader:
    """Learns from labelled texts which sentences ask for which family, and tells it of others."""

    def __init__(self, training: Sequence[Task], families: Sequence[Family], vectors: Vectors | None) -> None:
        self._vocabulary = set(text_counts([task.text for task in training]))
        self._places = {family.name: place for place, family in enumerate(families)}
        self._domains = np.array([family.domain for family in families])
        self.labelled = self._label_sentences(training)
        """The sentences of each text of training, each with the place of its family or, without one, their number."""
        sample = _sample_evenly(chain.from_iterable(self.labelled), len(families))
        texts, labels = [text for text, _ in sample], np.array([label for _, label in sample])
        self._features = vectors or _Words(texts)
        self._share = np.log(np.bincount(labels, minlength=len(families) + 1) / len(labels))
        features = self._features(texts)
        self._by_family = _fit_regression(features, labels, len(families) + 1, DECAY_OF_FAMILIES)
        names = np.repeat(self._features(DOMAINS), NAMES, axis=0)
        domains = np.append(np.append(self._domains, len(DOMAINS))[labels], np.repeat(np.arange(len(DOMAINS)), NAMES))
        self._by_domain = _fit_regression(np.vstack([features, names]), domains, len(DOMAINS) + 1, DECAY_OF_DOMAINS)

    def evidence(self, texts: Sequence[str]) -> Matrix:
        """Return by sentence and family the log of how much likelier the sentence is if it asks for the family than if
        it asks for nothing."""
        features = self._features(texts)
        by_family, by_domain = _chances(features, self._by_family), _chances(features, self._by_domain)
        sizes = np.bincount(self._domains, minlength=len(DOMAINS))
        spread = np.hstack([by_domain[:, self._domains] / sizes[self._domains], by_domain[:, -1:]])
        novelties = np.array([self.novelty(text) for text in texts])
        unknown = np.minimum(1.0, novelties / NOVEL_SHARE)[:, None]
        logs = np.log((1 - unknown) * by_family + unknown * spread + 1e-9) - self._share
        evidence: Matrix = logs[:, :-1] - logs[:, -1:]
        return evidence

    def novelty(self, text: str) -> float:
        """Return the share of a text's words that training never met; 1 for a text without words."""
        words_of_text = words(text)
        if not words_of_text:
            return 1.0
        return 1 - len(words_of_text & self._vocabulary) / len(words_of_text)

    def _label_sentences(self, training: Sequence[Task]) -> list[list[tuple[str, int]]]:
        """Label sentences by naive Bayes: of a text's own families the one with the most evidence, or none."""
        evidence, places = self._naive_bayes([task for task in training if len(task.parts) == 1])
        texts = []
        for task in training:
            own = [self._places[part.family.name] for part in task.parts]
            text = []
            for sentence in sentences(task.text):
                sums = evidence[:, [places[word] for word in words(sentence)]].sum(axis=1)
                label = max(own, key=lambda family: float(sums[family]))
                if sums[label] <= LEAST_EVIDENCE:
                    label = len(self._places)
                text.append((sentence, label))
            texts.append(text)
        return texts

    def _naive_bayes(self, single: Sequence[Task]) -> tuple[Matrix, dict[str, int]]:
        """Return for each family and word the log of how much more often texts of this family alone have the word."""
        vocabulary = sorted(self._vocabulary)
        places = {word: place for place, word in enumerate(vocabulary)}
        rows = presence_of_words([task.text for task in single], vocabulary)
        labels = np.array([self._places[task.parts[0].family.name] for task in single])
        evidence = []
        for place in range(len(self._places)):
            own, others = rows[labels == place], rows[labels != place]
            having = (own.sum(axis=0) + SMOOTHING) / (len(own) + 2 * SMOOTHING)
            evidence.append(np.log(having * (len(others) + 2 * SMOOTHING) / (others.sum(axis=0) + SMOOTHING)))
        return np.array(evidence), places


class _Words:
    """The weights of a sentence's words, rare ones more than others, as a row of length 1."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = text_counts(texts)
        self._places = {word: place for place, word in enumerate(sorted(counts))}
        self._weights = np.array([math.log((1 + len(texts)) / counts[word]) for word in sorted(counts)])

    def __call__(self, texts: Sequence[str]) -> Matrix:
        rows = np.zeros((len(texts), len(self._places)))
        for row, text in zip(rows, texts, strict=True):
            places = [self._places[word] for word in words(text) if word in self._places]
            row[places] = self._weights[places]
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
        return rows


def _sample_evenly(pairs: Iterable[tuple[str, int]], families: int) -> list[tuple[str, int]]:
    """Return up to so many different sentences of each family, and of none."""
    different: dict[str, tuple[str, int]] = {}
    for text, label in pairs:
        different[_normalise(text)] = (text, label)
    order = list(different.values())
    Random(0).shuffle(order)
    counts: Counter[int] = Counter()
    sample = []
    for text, label in order:
        most = FILLERS
        if label < families:
            most = EXAMPLES
        if counts[label] < most:
            counts[label] += 1
            sample.append((text, label))
    return sample


def _normalise(text: str) -> str:
    """Return the sentence in small letters, with one number for all."""
    return NUMBER.sub("7", text.lower())


def _fit_regression(features: Matrix, labels: NDArray[np.int64], classes: int, decay: float) -> Matrix:
    """Return the weights of a multinomial regression, a row for each feature and one for the start."""
    rows = np.hstack([features, np.ones((len(features), 1))])
    shrinks = np.append(np.full(features.shape[1], decay), 0.0)[:, None]
    targets = np.eye(classes)[labels]
    weights = speed = np.zeros((rows.shape[1], classes))
    for _ in range(DESCENTS):
        wrong = _softmax(rows @ weights) - targets
        speed = MOMENTUM * speed - RATE * (rows.T @ wrong / len(rows) + shrinks * weights)
        weights = weights + speed
    return weights


def _chances(features: Matrix, weights: Matrix) -> Matrix:
    return _softmax(features @ weights[:-1] + weights[-1])


def _softmax(logits: Matrix) -> Matrix:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances: Matrix = raised / raised.sum(axis=1, keepdims=True)
    return chances
