"""Workers that have exchanged what answers behind their names.

An operator or a provider can confuse two models: an alias points to the other one, or each of two deployments serves
the other one's weights. Nothing has to be learned anew then, because each of the two is what the other one was. So the
ratings of each two workers are compared with what was known of the other one, from the moment on after which they speak
most for an exchange (CUSUM). At `LEAST_EVIDENCE` the names change places: each of the two is believed to be what was
learned under the other one's name, with the price and the strengths that go with it.

A worker that has only become worse looks like another one by its own ratings. So the ratings of both have to speak for
an exchange, each by `LEAST_OF_EACH`; else such a worker is exchanged with one after the other. This is not asked where
an exchange gives a worker its own name back, so that a wrong one is undone sooner. While little is known, ordinary
learning looks like an exchange, so the first `FIRST_RATINGS` are no evidence. Learning a rating costs one more
prediction for each other worker, and beliefs keep two numbers for each two workers. At a threshold of 7 a smaller
change is found sooner, but workers that are much alike and asked equally often are exchanged wrongly
(`deploy/docs/learning.md`).
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

LEAST_EVIDENCE = 10.0
"""The log likelihood ratio of the ratings of two workers from which on they are taken to have exchanged."""
LEAST_OF_EACH = 1.5
"""The least part of that log likelihood ratio that the ratings of each of the two workers contribute."""
FIRST_RATINGS = 600
"""The ratings of a selector that are no evidence."""


class Exchanges(Struct, frozen=True):
    """The workers that have exchanged, and the evidence for more of them. A worker is named with its model, as in the
    parts of a posterior."""

    names: Mapping[str, str] = {}
    """By worker: the name under which it is known; its own one where it is missing."""
    evidence: Mapping[str, float] = {}
    """By worker and another name, with a space between: the log likelihood ratio of the worker's ratings, for what is
    known under that name and against what the worker is believed to be."""

    def name(self, worker: str) -> str:
        """Return the name under which a worker is known."""
        return self.names.get(worker, worker)

    def after(self, worker: str, gains: Mapping[str, float]) -> "Exchanges":
        """Return the exchanges after one more rating of a worker. `gains` are the log likelihood ratios of the
        rating for an exchange, by other worker."""
        evidence = dict(self.evidence)
        for other, gain in gains.items():
            as_other, as_worker = f"{worker} {self.name(other)}", f"{other} {self.name(worker)}"
            of_worker, of_other = evidence.get(as_other, 0.0) + gain, evidence.get(as_worker, 0.0)
            if of_worker + of_other <= 0:
                of_worker = of_other = 0.0
            evidence[as_other], evidence[as_worker] = of_worker, of_other
            puts_right = worker == self.name(other) or other == self.name(worker)
            certain = puts_right or min(of_worker, of_other) >= LEAST_OF_EACH
            if certain and of_worker + of_other >= LEAST_EVIDENCE:
                names = {**self.names, worker: self.name(other), other: self.name(worker)}
                return Exchanges(names, dict.fromkeys(evidence, 0.0))
        return replace(self, evidence=evidence)

    def exchanged_since(self, before: "Exchanges") -> list[str]:
        """Return the workers, without their models, that are known under another name than before."""
        return sorted(worker.partition("=")[0] for worker in self.names if self.name(worker) != before.name(worker))

    def fade(self, share: float) -> "Exchanges":
        """Return the exchanges with a share of the evidence."""
        return replace(self, evidence={pair: ratio * share for pair, ratio in self.evidence.items()})

    def join(self, own: "Exchanges") -> "Exchanges":
        """Return the exchanges by which a tenant's requests are decided: its own, and the shared ones for the rest."""
        return Exchanges(own.names or self.names, {**self.evidence, **own.evidence})

    def extract(self, shared: "Exchanges") -> "Exchanges":
        """Return the own ones of a tenant among these; the inverse of `join`."""
        evidence = {pair: ratio for pair, ratio in self.evidence.items() if shared.evidence.get(pair) != ratio}
        return Exchanges(self.names if self.names != shared.names else {}, evidence)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"names": dict(self.names), "evidence": dict(self.evidence)}
