"""The reward of a batch of plans, through the executor: what TRL calls for each batch of completions.

Cost and wait are ramped in with the progress of training. A plan without a verdict gets None, which the trainer leaves
out of its group's mean and gives no advantage. If nothing gets a verdict any more, training stops instead of going on
about nothing. Plans for held-out questions are only judged.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.errors import WorkerUnavailable
from app.lab.plan_execution import Executor, Place, PlanCache, PlanResult
from app.lab.reward import Verdict, ramped, reward
from app.lab.training_questions import Question
from app.lab.world import Weights

MAX_OUTAGE_BATCHES = 3
"""Batches in a row in which every plan that could be read met an outage, before training is given up."""
MAX_EQUAL_BATCHES = 5
"""Batches in a row in which all plans are alike, before training ends."""
VERDICTS: tuple[Verdict, ...] = ("malformed", "wrong", "right", "outage")


@dataclass(slots=True)
class Scorer:
    """Rewards for `questions`, carried out at `place`; `tell` is called with a line for each batch."""

    questions: Sequence[Question]
    place: Place
    weights: Weights
    ramp: float
    tell: Callable[[str], None]
    held_out: int = 0
    """So many of the questions, the last ones, are not learned from. Their plans are rewarded by the whole weights."""
    cache: PlanCache | None = None
    carried: Counter[str] = field(default_factory=Counter)
    """Verdicts of all batches so far."""
    transport: httpx.AsyncBaseTransport | None = None
    """In place of the network."""
    _outage_batches: int = 0
    _equal_batches: int = 0
    """Batches in a row in which all plans were alike."""

    @property
    def collapsed(self) -> bool:
        """Return True if the last batches had one plan for all of their questions: nothing more can be learned from
        them."""
        return self._equal_batches >= MAX_EQUAL_BATCHES

    async def executor_reward(
        self, completions: Sequence[Any], row: Sequence[int], trainer_state: Any = None, **more: Any
    ) -> list[float | None]:
        """Return the reward of each completion, whose question is `questions[row]`; None for an outage."""
        texts = [_text(completion) for completion in completions]
        async with Executor(self.place, self.transport, self.cache) as executor:
            found = await asyncio.gather(
                *(executor.execute(self.questions[n], text) for n, text in zip(row, texts, strict=True))
            )
        step, steps = 1, 1
        if trainer_state is not None:
            step, steps = trainer_state.global_step, trainer_state.max_steps
        if row[0] >= len(self.questions) - self.held_out:
            return self._held_out_rewards(step, found)
        weights = ramped(self.weights, step / max(steps, 1), self.ramp)
        rewards = [reward(carried.verdict, carried.usd, carried.seconds, weights) for carried in found]
        if len(texts) > 1 and len(set(texts)) == 1:
            self._equal_batches += 1
        else:
            self._equal_batches = 0
        if self._equal_batches == MAX_EQUAL_BATCHES:
            self.tell(f"step {step}: for {MAX_EQUAL_BATCHES} batches all plans were alike; training ends here")
        self._note(step, found, len(set(texts)), more.get("log_metric"))
        return rewards

    def _held_out_rewards(self, step: int, found: Sequence[PlanResult]) -> list[float | None]:
        """Return the rewards of plans for questions that are held out."""
        rewards = [reward(carried.verdict, carried.usd, carried.seconds, self.weights) for carried in found]
        known = [reward for reward in rewards if reward is not None]
        if not known:
            raise WorkerUnavailable("No plan for held-out questions got a verdict; the Baton or its workers are out.")
        self.tell(f"step {step}: {len(known)} held-out questions, reward {sum(known) / len(known):.3f}")
        return rewards

    def _note(
        self, step: int, found: Sequence[PlanResult], different: int, log: Callable[[str, float], None] | None
    ) -> None:
        counts = Counter(carried.verdict for carried in found)
        self.carried.update(counts)
        if counts["outage"] and not counts["right"] + counts["wrong"]:
            self._outage_batches += 1
        else:
            self._outage_batches = 0
        judged = [carried for carried in found if carried.verdict in ("right", "wrong")] or [PlanResult("wrong")]
        figures = {name: counts[name] / len(found) for name in VERDICTS} | {
            "usd": sum(carried.usd for carried in judged) / len(judged),
            "steps_planned": sum(carried.steps for carried in judged) / len(judged),
            "different": float(different),
            "told": sum(carried.told for carried in found) / len(found),
            "known": sum(carried.known for carried in found) / len(found),
        }
        for name, value in figures.items():
            if log is not None:
                log(name, value)
        words = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
        self.tell(f"step {step}: {len(found)} plans: {words}; {different} different")
        if self._outage_batches >= MAX_OUTAGE_BATCHES:
            raise WorkerUnavailable("No plan got a verdict in the last batches; the Baton or its workers are out.")


def _text(completion: Any) -> str:
    """Return the text of a completion: TRL gives conversational completions as one message each, others as text."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"] or "")
