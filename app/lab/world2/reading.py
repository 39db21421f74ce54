"""The reader gives a policy of world 2 a task's size, the kinds of its parts, and the chance that it is confidential.

The number of parts and the length of the document follow from the input's tokens, which any gateway counts. The kind of
each part is read from the words: neighbouring sentences ask for the parts one after the other, and all others for
nothing (`sentences.py`). A reading is one of several with their chances, so that a policy can choose what is best on
average over them. Families, and which tasks are confidential, are labels of the operator's own training texts; no
verdict is needed for them. A family that was never met is read as families whose words are near, with little trust.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from app.lab.world2.constants import DOMAINS
from app.lab.world2.sentences import SentenceReader, Vectors, presence_of_words, sentences, text_counts, words
from app.lab.world2.tasks import Family, Task

LEAST_TEXTS = 12
"""Of words in fewer texts nothing is learned of confidence."""
DESCENTS, DECAY = 150, 0.0005
"""Of a regression on words: its steps, and the share by which weights shrink."""
MOST_SENTENCES = 12
SAMPLES = 16
"""The combinations of families that are drawn where a task has several parts."""
LEAST_CHANCE = 0.02
"""The least chance of a family, of confidence, or of none, that is considered."""
NOVEL_SHARE = 0.15
"""The share of unknown words from which on a text says nothing of its confidence."""


class Reading(Struct, frozen=True):
    """A task as it was read: the place of each part's family among those of training, and if it is confidential.

    `weight` is how much is given on this reading; those of all readings of a task add up to 1.
    """

    families: tuple[int, ...]
    document: int
    confidential: bool
    weight: float = 1.0


class Reader:
    """Reads tasks, after it has learned from labelled texts. With `vectors` it also knows words that it never met."""

    def __init__(self, training: Sequence[Task], vectors: Vectors | None = None) -> None:
        families: set[Family] = set()
        for task in training:
            families.update([part.family for part in task.parts])
        self.families: tuple[Family, ...] = tuple(sorted(families, key=lambda family: family.name))
        self._sentences = SentenceReader(training, self.families, vectors)
        self._begins, self._lengths = self._layout()
        self._transitions = self._transition_chances(training)
        self._confidential_weights = self._fit_confidentiality(training)

    def read(self, task: Task) -> Reading:
        """Return the most probable reading; of the task only the text and the number of its tokens are used."""
        return max(self.readings(task), key=lambda reading: reading.weight)

    def readings(self, task: Task) -> list[Reading]:
        """Return the readings that are worth considering, with their weights."""
        texts = sentences(task.text)[:MOST_SENTENCES]
        combined, asking = self._family_chances(self._sentences.evidence(texts), len(task.parts))
        fillers = [text for text, chance in zip(texts, asking, strict=True) if chance < 0.5]
        confidential = self._confidential_chance(task.text, " ".join(fillers))
        readings = []
        for families, chance in combined.items():
            for secret, share in ((True, confidential), (False, 1 - confidential)):
                if share > LEAST_CHANCE:
                    readings.append(Reading(families, task.document, secret, chance * share))
        total = sum([reading.weight for reading in readings])
        return [replace(reading, weight=reading.weight / total) for reading in readings]

    # The parts.

    def _family_chances(
        self, evidence: NDArray[np.float64], parts: int
    ) -> tuple[dict[tuple[int, ...], float], NDArray[np.float64]]:
        """Return the chances of combinations of families, and by sentence the chance that it asks for one.

        A cut names the sentences at which the parts begin, and the one behind the last part.
        """
        sums = np.vstack([np.zeros(evidence.shape[1]), evidence.cumsum(axis=0)])
        cuts = [tuple(range(parts + 1))]
        if len(evidence) >= parts:
            cuts = list(combinations(range(len(sums)), parts + 1))
        logs, runs = [], []
        for cut in cuts:
            ends = np.minimum(cut, len(sums) - 1)
            evidence_of_parts = sums[ends[1:]] - sums[ends[:-1]]
            log_likelihood = float(np.log(np.exp(np.minimum(evidence_of_parts, 50.0)).mean(axis=1)).sum())
            runs.append(evidence_of_parts)
            logs.append(self._log_prior(cut) + log_likelihood)
        weights = np.exp(np.array(logs) - max(logs))
        weights /= weights.sum()
        asking = np.zeros(len(evidence))
        for cut, weight in zip(cuts, weights, strict=True):
            asking[cut[0] : cut[-1]] += weight
        return self._sample_families(np.array(runs), weights), asking

    def _log_prior(self, cut: Sequence[int]) -> float:
        """Return the log of how often the parts of training's texts begin and end there."""
        logs = [math.log(self._lengths[end - begin]) for begin, end in pairwise(cut)]
        return math.log(self._begins[cut[0]]) + sum(logs)

    def _sample_families(self, runs: NDArray[np.float64], weights: NDArray[np.float64]) -> dict[tuple[int, ...], float]:
        """Draw families by their chances: exactly for one part, by systematic draws for several."""
        chances = np.exp(runs - runs.max(axis=2, keepdims=True))
        chances /= chances.sum(axis=2, keepdims=True)
        if runs.shape[1] == 1:
            likely = weights @ chances[:, 0]
            return {(place,): float(chance) for place, chance in enumerate(likely) if chance > LEAST_CHANCE}
        random = np.random.default_rng(0)
        counts: Counter[tuple[int, ...]] = Counter()
        even = (np.arange(SAMPLES) + 0.5) / SAMPLES
        places = np.searchsorted(weights.cumsum(), even * weights.sum())
        dice = np.array([random.permutation(even) for _ in range(runs.shape[1])])
        for draw, place in enumerate(places):
            families: list[int] = []
            for part, chance in enumerate(chances[place]):
                if families:
                    chance = chance * self._transitions[families[-1]]
                sums = chance.cumsum()
                families.append(int(np.searchsorted(sums, dice[part, draw] * sums[-1])))
            counts[tuple(families)] += 1
        return {families: count / SAMPLES for families, count in counts.items()}

    def _layout(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return how often the first part begins at each sentence, and how often a part has so many sentences."""
        begins, lengths = np.full(MOST_SENTENCES + 1, 0.1), np.full(MOST_SENTENCES + 1, 0.1)
        for text in self._sentences.labelled:
            labels = [label for _, label in text[:MOST_SENTENCES]]
            asking = [place for place, label in enumerate(labels) if label < len(self.families)]
            first = asking[0] if asking else 0
            begins[first] += 1
            length = 0
            for place in asking:
                length += 1
                if place + 1 == len(labels) or labels[place + 1] != labels[place]:
                    lengths[length] += 1
                    length = 0
        return begins / begins.sum(), lengths / lengths.sum()

    def _transition_chances(self, training: Sequence[Task]) -> NDArray[np.float64]:
        """Return how often a part of each family (row) is followed by one of each other, by their domains."""
        counts = np.ones((len(DOMAINS), len(DOMAINS)))
        for task in training:
            for before, after in pairwise(task.parts):
                counts[before.family.domain, after.family.domain] += 1
        domains = np.array([family.domain for family in self.families])
        sizes = np.bincount(domains, minlength=len(DOMAINS))
        shares = counts / counts.sum(axis=1, keepdims=True)
        follows: NDArray[np.float64] = shares[domains][:, domains] / sizes[domains]
        return follows

    # Confidence.

    def _confidential_chance(self, text: str, fillers: str) -> float:
        """Return the chance that a task is confidential: the mean of training, as far as words are not known; `fillers`
        are the sentences that ask for nothing."""
        novelty = min(1.0, self._sentences.novelty(fillers) / NOVEL_SHARE)
        weights = [self._confidential_weights.get(word, 0.0) for word in words(text)]
        logit = sum(weights) + self._confidential_intercept
        return (1 - novelty) / (1 + math.exp(-logit)) + novelty * self._confidential_share

    def _fit_confidentiality(self, training: Sequence[Task]) -> dict[str, float]:
        """Return the weights of words in a logistic regression on labels; words of few texts have none."""
        texts = [task.text for task in training]
        counts = text_counts(texts)
        often = sorted([word for word, count in counts.items() if count >= LEAST_TEXTS])
        presence = presence_of_words(texts, often)
        labels = np.array([float(task.confidential) for task in training])
        weights, speed, self._confidential_intercept = np.zeros(len(often)), np.zeros(len(often)), 0.0
        for _ in range(DESCENTS):
            wrong = 1 / (1 + np.exp(-(presence @ weights + self._confidential_intercept))) - labels
            speed = 0.9 * speed - 0.5 * (presence.T @ wrong / len(labels) + DECAY * weights)
            weights = weights + speed
            self._confidential_intercept -= 0.5 * float(wrong.mean())
        self._confidential_share = float(labels.mean())
        return dict(zip(often, weights.tolist(), strict=True))
