"""Rollouts: journaled runs in the shape that training and evaluation read, one JSON object a line.

A rollout has what the conductor was shown, the plan that was carried out as the conductor would have written it, and
what came of it. It names no caller, key or tenant. All runs of one conversation are on one side of the split.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from app.conductor.prompt import TEMPLATE, messages
from app.conductor.protocol import Brief
from app.core.message.chat import Message
from app.core.plan.workflow import Step
from app.lab.reward import Verdict, reward
from app.lab.world import Weights

SCHEMA = "rollout-1"
RIGHT = 0.5
"""The least score that counts as right."""
MOST_LINES = 1_000_000
Turns = tuple[Mapping[str, str], ...]
"""Messages as chat models read them: `role` and `content`."""
Split = Literal["train", "held-out"]


class Rollout(Struct, frozen=True):
    """One run. Money is in dollars, `seconds` is the critical path of its steps, without the planning."""

    run: str
    at: float
    """When it was admitted, in seconds since 1970."""
    tier: str
    conductor: str
    """The conductor that planned."""
    split: Split
    conversation: Turns
    """The caller's conversation."""
    prompt: Turns
    """The prompt that a model conductor is shown for it; workers stand there by ordinal."""
    completion: str
    """The plan as JSON over these ordinals."""
    workers: tuple[str, ...]
    """Their names, by ordinal."""
    pool: str
    """Digest of the pool's snapshot."""
    steps: int
    usd: float
    seconds: float
    score: float | None = None
    """From 0 to 1; None if nobody has rated it."""
    rated: str = ""
    """The origin of the rating: kind, source and version."""
    probability: float | None = None
    """The probability of the choice of all workers, where it is known."""
    most: int = 0
    """Steps that its conductor was allowed; 0 in files that do not say."""
    template: str = TEMPLATE
    schema: str = SCHEMA

    @property
    def verdict(self) -> Verdict | None:
        """Return right or wrong; None if it is not rated."""
        if self.score is None:
            return None
        if self.score >= RIGHT:
            return "right"
        return "wrong"


def conductor_prompt(brief: Brief) -> Turns:
    """Return the very prompt that the `model` conductor uses."""
    return turns_of(messages(brief))


def turns_of(conversation: Iterable[Message]) -> Turns:
    """Return messages as chat models read them."""
    return tuple([{"role": message.role, "content": message.text} for message in conversation])


def plan_json(steps: Sequence[Step], workers: Sequence[str]) -> str:
    """Return a plan as a conductor writes it over these ordinals, without blanks, as servers decode it under the
    schema. Raises ValueError for a worker that is not among them."""
    entries = []
    for step in steps:
        entry: dict[str, Any] = {
            "worker": workers.index(step.worker),
            "subtask": step.subtask,
            "access": step.access.as_list(),
        }
        if step.tools:
            entry["tools"] = True
        entries.append(entry)
    return json.dumps({"steps": entries}, ensure_ascii=False, separators=(",", ":"))


def split(conversation: Turns, held_out: float) -> Split:
    """Return the side of a conversation, by a hash of how it begins: a share of `held_out` is not used for training."""
    if hashlib.sha256(opening(conversation).encode()).digest()[0] < 256 * held_out:
        return "held-out"
    return "train"


def opening(conversation: Turns) -> str:
    """Return how a conversation begins, up to the user's first message, as JSON: all of its turns have that in
    common."""
    roles = [turn["role"] for turn in conversation]
    first = 0
    if "user" in roles:
        first = roles.index("user")
    return json.dumps([dict(turn) for turn in conversation[: first + 1]], sort_keys=True)


def to_line(rollout: Rollout) -> str:
    """Return a rollout as one line."""
    return json.dumps(asdict(rollout), ensure_ascii=False)


def from_lines(lines: Iterable[str]) -> Iterator[Rollout]:
    """Yield the rollouts of a file. Raises ValueError with the number of the line that is none."""
    for number, line in enumerate(lines, 1):
        if number > MOST_LINES:
            raise ValueError(f"more than {MOST_LINES} lines")
        if line.strip():
            try:
                yield _rollout(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(f"line {number} is no rollout of {SCHEMA}: {error}") from None


def _rollout(value: Mapping[str, Any]) -> Rollout:
    if value["schema"] != SCHEMA:
        raise ValueError(f"its schema is {value['schema']}")
    turns = {name: tuple(map(_turn, value[name])) for name in TURNS}
    return Rollout(**{**value, **turns, "workers": tuple(value["workers"])})


def _turn(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": value["role"], "content": value["content"]}


TURNS = ("conversation", "prompt")


class Example(Struct, frozen=True):
    """A plan that a model imitates, and its weight."""

    prompt: Turns
    completion: str
    weight: float = 1.0


def right_examples(rollouts: Iterable[Rollout]) -> list[Example]:
    """Return the examples of a warm start: the plans of runs that were rated right."""
    examples = []
    for rollout in rollouts:
        if rollout.verdict == "right":
            examples.append(Example(rollout.prompt, rollout.completion))
    return examples


def advantage_weighted(rollouts: Iterable[Rollout], weights: Weights, beta: float, cap: float) -> list[Example]:
    """Return the examples of advantage-weighted regression (arXiv 1910.00177): each rated plan with its weight."""
    examples = []
    for rollout, weight in with_weights(rollouts, weights, beta, cap):
        examples.append(Example(rollout.prompt, rollout.completion, weight))
    return examples


def with_weights(rollouts: Iterable[Rollout], weights: Weights, beta: float, cap: float) -> list[tuple[Rollout, float]]:
    """Return each rated rollout with its weight, exp(advantage / beta), at most `cap`.

    The advantage is over the mean reward of the same conversation's other plans where there are some, else of all
    rollouts. What nobody has rated is left out. The weights have the mean 1.
    """
    rated: list[Rollout] = []
    rewards: list[float] = []
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        earned = _reward_of(rollout, weights)
        if earned is not None:
            rated.append(rollout)
            rewards.append(earned)
            groups[_conversation_key(rollout)].append(earned)
    if not rated:
        return []
    mean = sum(rewards) / len(rewards)
    raw = []
    for rollout, earned in zip(rated, rewards, strict=True):
        advantage = earned - _baseline(groups[_conversation_key(rollout)], earned, mean)
        raw.append(math.exp(min(advantage / beta, math.log(cap))))
    scale = len(raw) / sum(raw)
    return [(rollout, weight * scale) for rollout, weight in zip(rated, raw, strict=True)]


def _reward_of(rollout: Rollout, weights: Weights) -> float | None:
    if rollout.verdict is None:
        return None
    return reward(rollout.verdict, rollout.usd, rollout.seconds, weights)


def _conversation_key(rollout: Rollout) -> str:
    return json.dumps([dict(turn) for turn in rollout.conversation], sort_keys=True)


def _baseline(group: Sequence[float], worth: float, mean: float) -> float:
    if len(group) > 1:
        return (sum(group) - worth) / (len(group) - 1)
    return mean
