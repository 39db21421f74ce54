"""The reader gives a policy of world 2 a task's size, the kinds of its parts, and the chance that it is confidential.

The number of parts and the length of the document follow from the input's tokens, which any gateway counts. The kind of
each part is read from the words: a text's sentences are cut into as many runs as there are parts, at the places that
make the families of training most probable (naive Bayes, and an operator's own cues for domains). Families, and which
tasks are confidential, are labels of the operator's own training texts; no verdict is needed for them. A family that
was never met is read as the one whose words are nearest.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

from app.lab.world2.tasks import Family, Task
from app.lab.world2.texts import CUES, WORD

SENTENCE = re.compile(r"(?<=[.?!:,;]) ")
SMOOTHING, SELDOM = 0.2, 12
"""Texts that a word is taken to have been in besides; of words in fewer texts than `SELDOM` nothing is learned of
confidence."""
CUE = 3.0
"""The evidence of an operator's own cue for a domain."""
DESCENTS, DECAY = 150, 0.0005
"""Of a regression on words: its steps, and the share by which weights shrink."""
MOST_SENTENCES = 12
TEMPERATURE = 3.0
"""How much less sure than naive Bayes a reading is of itself."""
CHOICES, MOST_READINGS = 2, 4
"""The families of a part, and the combinations of a task, that are considered."""
DOUBTFUL, LEAST = 0.1, 0.02
"""The least weight of a combination in parts of the best one's, and the least chance of confidence, or of none."""
NOVEL = 0.15
"""The share of unknown words from which on a text says nothing of its confidence."""


@dataclass(frozen=True, slots=True)
class Read:
    """A task as it was read: the place of each part's family among those of training, and if it is confidential.

    `weight` is how much is given on this reading; those of all readings of a task add up to 1.
    """

    families: tuple[int, ...]
    document: int
    confidential: bool
    weight: float = 1.0


class Reader:
    """Reads tasks, after it has learned from labelled texts."""

    def __init__(self, training: Sequence[Task]) -> None:
        families = {part.family.name: part.family for task in training for part in task.parts}
        self.families: tuple[Family, ...] = tuple(sorted(families.values(), key=lambda family: family.name))
        self._places = {family.name: place for place, family in enumerate(self.families)}
        known = sorted({word for task in training for word in words(task.text)})
        self._words = {word: place for place, word in enumerate(known)}
        self._parts = self._evidence_of_families(training)
        self._secret = self._evidence_of_confidence(training)

    def read(self, task: Task) -> Read:
        """Return the most probable reading; of the task only the text and the number of its tokens are used."""
        return max(self.readings(task), key=lambda read: read.weight)

    def readings(self, task: Task) -> list[Read]:
        """Return the readings that are worth considering, with their weights."""
        scores = np.array([self._scores(sentence) for sentence in self._sentences(task.text)])
        runs = self._cut(scores, len(task.parts))
        combined = self._combined([_softened(run) for run in runs])
        confidential = self._confidence(task.text)
        found = []
        for families, weight in combined:
            for secret, share in ((True, confidential), (False, 1 - confidential)):
                if share > LEAST:
                    found.append(Read(families, task.document, secret, weight * share))
        total = sum(read.weight for read in found)
        return [replace(read, weight=read.weight / total) for read in found]

    def _combined(self, chances: Sequence[NDArray[np.float64]]) -> list[tuple[tuple[int, ...], float]]:
        """The most probable combinations of families."""
        likely = [np.argsort(-chance)[:CHOICES] for chance in chances]
        found = []
        for families in product(*likely):
            weight = math.prod(float(chance[family]) for chance, family in zip(chances, families, strict=True))
            found.append((tuple(int(family) for family in families), weight))
        best = max(weight for _, weight in found)
        found = sorted(found, key=lambda one: -one[1])[:MOST_READINGS]
        return [(families, weight) for families, weight in found if weight > DOUBTFUL * best]

    def _confidence(self, text: str) -> float:
        """The chance that a task is confidential: the mean of training, as far as the text's words are not known."""
        seen = words(text)
        known = [self._words[word] for word in seen if word in self._words]
        novelty = min(1.0, (1 - len(known) / len(seen)) / NOVEL)
        chance = 1 / (1 + math.exp(-(float(self._secret[known].sum()) + self._start)))
        return (1 - novelty) * chance + novelty * self._share

    def _sentences(self, text: str) -> list[str]:
        found = SENTENCE.split(text)
        return (
            found if len(found) <= MOST_SENTENCES else [*found[: MOST_SENTENCES - 1], " ".join(found[MOST_SENTENCES:])]
        )

    def _scores(self, sentence: str) -> NDArray[np.float64]:
        """The evidence of a sentence for each family."""
        total = np.zeros(len(self.families))
        for word in words(sentence):
            if word in self._words:
                total = total + self._parts[:, self._words[word]]
        cued = np.array([len(re.findall(cue, sentence.lower())) for cue in CUES])
        total = total + CUE * cued[[family.domain for family in self.families]]
        return total

    def _cut(self, scores: NDArray[np.float64], parts: int) -> list[NDArray[np.float64]]:
        """The evidence for families in each run of sentences, for the most probable cut into runs."""
        sums = np.vstack([np.zeros(scores.shape[1]), scores.cumsum(axis=0)])
        best, found = -math.inf, [np.zeros(scores.shape[1])] * parts
        for cuts in combinations(range(1, len(scores)), parts - 1):
            runs = [sums[end] - sums[begin] for begin, end in pairwise((0, *cuts, len(scores)))]
            total = sum([float(run.max()) for run in runs])
            if total > best:
                best, found = total, runs
        return found

    def _evidence_of_families(self, training: Sequence[Task]) -> NDArray[np.float64]:
        """For each family and word, the log of how much more often texts with the family have the word."""
        having, lacking = self._counts(training)
        evidence: NDArray[np.float64] = np.log(having / lacking)
        return evidence

    def _counts(self, training: Sequence[Task]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The shares of the texts that have each word: of those with a family as their only part, and of the others."""
        single = [task for task in training if len(task.parts) == 1]
        rows = np.zeros((len(single), len(self._words)))
        for row, task in zip(rows, single, strict=True):
            row[[self._words[word] for word in words(task.text)]] = 1.0
        labels = np.array([self._places[task.parts[0].family.name] for task in single])
        having, lacking = [], []
        for place in range(len(self.families)):
            own, others = rows[labels == place], rows[labels != place]
            having.append((own.sum(axis=0) + SMOOTHING) / (len(own) + 2 * SMOOTHING))
            lacking.append((others.sum(axis=0) + SMOOTHING) / (len(others) + 2 * SMOOTHING))
        return np.array(having), np.array(lacking)

    def _evidence_of_confidence(self, training: Sequence[Task]) -> NDArray[np.float64]:
        """The weights of words in a logistic regression on labels; words of few texts have none."""
        rows = np.zeros((len(training), len(self._words)))
        for row, task in zip(rows, training, strict=True):
            row[[self._words[word] for word in words(task.text)]] = 1.0
        often = np.flatnonzero(rows.sum(axis=0) >= SELDOM)
        seen, labels = rows[:, often], np.array([float(task.confidential) for task in training])
        weights, speed, self._start = np.zeros(len(often)), np.zeros(len(often)), 0.0
        for _ in range(DESCENTS):
            wrong = 1 / (1 + np.exp(-(seen @ weights + self._start))) - labels
            speed = 0.9 * speed - 0.5 * (seen.T @ wrong / len(labels) + DECAY * weights)
            weights = weights + speed
            self._start -= 0.5 * float(wrong.mean())
        self._share = float(labels.mean())
        found = np.zeros(len(self._words))
        found[often] = weights
        return found


def words(text: str) -> set[str]:
    """Return the words of a text: single ones, since pairs carry over less to phrasings that were never met."""
    return set(WORD.findall(text.lower()))


def _softened(evidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chances of families, less sure than naive Bayes is of itself."""
    chances = np.exp((evidence - evidence.max()) / TEMPERATURE)
    softened: NDArray[np.float64] = chances / chances.sum()
    return softened
