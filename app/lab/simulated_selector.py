"""The selector of the service without the service, for simulations: its own code over a posterior of its own, which
explores by a seed."""

from collections.abc import Sequence
from random import Random
from statistics import NormalDist

from app.core.plan.templates import Arm
from app.core.pool.catalog import SelectorSpec, Worker
from app.core.rating.decision import decide
from app.core.rating.features import Features
from app.core.rating.posterior import Estimate, Posterior, Rating, estimates, update_posterior

NORMAL_QUANTILES = tuple(NormalDist().inv_cdf((n + 0.5) / 1024) for n in range(1024))
"""Equally probable quantiles of the normal distribution, to draw from."""


class SimulatedSelector:
    """A selector that has no rating yet."""

    def __init__(self, spec: SelectorSpec, workers: Sequence[Worker], arms: Sequence[Arm]) -> None:
        self._spec, self._workers, self._arms = spec, workers, arms
        self.posterior = Posterior()

    def estimates(self, request_features: Features) -> Sequence[Estimate]:
        """Return what the posterior holds of each arm for a request with these features."""
        return estimates(self.posterior, self._spec, self._arms, self._workers, request_features)

    def explore(self, request_features: Features, random: Random) -> Estimate:
        """Draw an arm with the probabilities by which the service explores; return its estimate."""
        estimated = self.estimates(request_features)

        def draw_normals(count: int) -> Sequence[float]:
            return random.choices(NORMAL_QUANTILES, k=count)

        action = decide(estimated, self._spec.explore, draw_normals, random.random).action
        return next(estimate for estimate in estimated if estimate.arm.name == action)

    def learn(self, rating: Rating) -> None:
        """Update the posterior by a rating."""
        self.posterior = update_posterior(self.posterior, self._spec, self._workers, rating)
