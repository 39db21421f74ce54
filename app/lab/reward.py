"""The reward of a rollout: malformed < wrong < right, and cost counts among right answers only.

Whatever a right answer cost, it is worth more than any wrong one; of two right answers the cheaper is worth more, up to
the caps. A worker's outage is no verdict on the plan: it gives no reward at all, and the rollout is left out. In
training the weight of cost and wait is ramped in, so that being right is learned first.
"""

from typing import Literal

from msgspec.structs import replace

from app.lab.outcome import Outcome
from app.lab.world import Weights

VERSION = "reward-1"
MALFORMED, WRONG = -0.2, 0.0
Verdict = Literal["malformed", "wrong", "right", "outage"]


def reward(verdict: Verdict, usd: float, seconds: float, weights: Weights) -> float | None:
    """Return the reward of one rollout with its dollars and seconds; None for an outage."""
    if verdict == "outage":
        return None
    if verdict == "right":
        return weights.worth(usd, seconds)
    return MALFORMED if verdict == "malformed" else WRONG


def expected_reward(outcome: Outcome, weights: Weights) -> float:
    """Return the mean reward of a well-formed plan over the workers' dice."""
    return outcome.right * weights.worth(outcome.usd, outcome.seconds) + (1 - outcome.right) * WRONG


def ramp_weights(weights: Weights, progress: float, ramp: float) -> Weights:
    """Return the weights after a share `progress` of training, if they are complete after the share `ramp` of it."""
    part = 1.0 if ramp <= 0 else min(1.0, progress / ramp)
    return replace(weights, cost=weights.cost * part, wait=weights.wait * part)
