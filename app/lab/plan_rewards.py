"""The reward of a batch of plans, through the executor: what TRL calls for each batch of completions.

Cost and wait are ramped in with the progress of training. A plan without a verdict gets None, which the trainer leaves
out of its group's mean and gives no advantage. If nothing gets a verdict any more, training stops instead of going on
about nothing. Plans for held-out questions are only judged.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.errors import WorkerUnavailable
from app.lab.plan_execution import Executor, Place, PlanCache, PlanResult
from app.lab.reward import Verdict, ramp_weights, reward
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
        started = time.monotonic()
        async with Executor(self.place, self.transport, self.cache) as executor:
            executions = []
            for n, text in zip(row, texts, strict=True):
                executions.append(executor.execute(self.questions[n], text))
            results = await asyncio.gather(*executions)
        seconds = time.monotonic() - started
        step, steps = 1, 1
        if trainer_state is not None:
            step, steps = trainer_state.global_step, trainer_state.max_steps
        if row[0] >= len(self.questions) - self.held_out:
            return self._rate_held_out_plans(step, results)
        weights = ramp_weights(self.weights, step / max(steps, 1), self.ramp)
        rewards = _rewards(results, weights)
        if len(texts) > 1 and len(set(texts)) == 1:
            self._equal_batches += 1
        else:
            self._equal_batches = 0
        if self._equal_batches == MAX_EQUAL_BATCHES:
            self.tell(f"step {step}: for {MAX_EQUAL_BATCHES} batches all plans were alike; training ends here")
        log = more.get("log_metric")
        if log is not None:
            log("executor_seconds", seconds)
        self._note(step, results, len(set(texts)), log)
        return rewards

    def _rate_held_out_plans(self, step: int, results: Sequence[PlanResult]) -> list[float | None]:
        """Return the rewards of plans for questions that are held out."""
        rewards = _rewards(results, self.weights)
        judged = [reward for reward in rewards if reward is not None]
        if not judged:
            raise WorkerUnavailable("No plan for held-out questions got a verdict; the Baton or its workers are out.")
        self.tell(f"step {step}: {len(judged)} held-out questions, reward {sum(judged) / len(judged):.3f}")
        return rewards

    def _note(
        self, step: int, results: Sequence[PlanResult], different: int, log: Callable[[str, float], None] | None
    ) -> None:
        """Report what became of a batch of plans. Raises `WorkerUnavailable` if too many batches in a row had none."""
        counts = Counter([result.verdict for result in results])
        self.carried.update(counts)
        if counts["outage"] and not counts["right"] + counts["wrong"]:
            self._outage_batches += 1
        else:
            self._outage_batches = 0
        if log is not None:
            for name, value in _figures(results, counts).items():
                log(name, value)
            log("different", float(different))
        verdicts = [f"{counts[name]} {name}" for name in VERDICTS if counts[name]]
        self.tell(f"step {step}: {len(results)} plans: {', '.join(verdicts)}; {different} different")
        if self._outage_batches >= MAX_OUTAGE_BATCHES:
            raise WorkerUnavailable("No plan got a verdict in the last batches; the Baton or its workers are out.")


def _rewards(results: Sequence[PlanResult], weights: Weights) -> list[float | None]:
    """Return the reward of each result; None for an outage."""
    return [reward(result.verdict, result.usd, result.seconds, weights) for result in results]


def _figures(results: Sequence[PlanResult], counts: Counter[Verdict]) -> dict[str, float]:
    """Return the shares of the verdicts, of plans that tell the answer and of plans that were known; and the mean
    dollars and steps of the plans that were judged."""
    figures: dict[str, float] = {name: counts[name] / len(results) for name in VERDICTS}
    judged = [result for result in results if result.verdict in ("right", "wrong")]
    usd = steps = 0.0
    if judged:
        usd = sum([result.usd for result in judged]) / len(judged)
        steps = sum([result.steps for result in judged]) / len(judged)
    told = sum([result.told for result in results]) / len(results)
    known = sum([result.known for result in results]) / len(results)
    return {**figures, "usd": usd, "steps_planned": steps, "told": told, "known": known}


def _text(completion: Any) -> str:
    """Return the text of a completion: TRL gives conversational completions as one message each, others as text."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"] or "")
