"""The small conductor's warm start from journaled runs: advantage-weighted regression in the place of imitating plans
that are drawn and tried. Policy gradients go on from there.
"""

from collections.abc import Sequence

import torch

from app.lab import prompt
from app.lab.journal_imitation import JournaledExample
from app.lab.plans import Plan, PlanStep
from app.lab.train_loop import Recipe, Trainer, rate_factor
from app.lab.world import Weights


class Regressor(Trainer):
    """A training run whose warm start imitates what was carried out, each run by its weight."""

    def __init__(self, recipe: Recipe, weights: Weights, runs: Sequence[JournaledExample]) -> None:
        super().__init__(recipe, weights)
        self._runs = runs

    def _warm(self) -> dict[str, float]:
        """Imitate some of the runs, in orders of their own; every eighth lesson is a drill, lest they be forgotten."""
        recipe = self.recipe
        chosen = self._random.choices(self._runs, k=recipe.warm_lessons)
        lessons = [run.lesson(self._random) for run in chosen]
        prompts = self._prompts(lessons, hide=True)
        plans: list[Plan] = []
        for run, lesson in zip(chosen, lessons, strict=True):
            plans.append(prompt.over_ordinals(run.plan, lesson.order))
        counts = torch.tensor([run.weight for run in chosen])
        for place in range(0, len(lessons), 8):
            ordinal = self._random.randrange(len(lessons[place].pool))
            prompts[place] = prompt.drill_prompt(lessons[place].pool, lessons[place].order, ordinal)
            plans[place], counts[place] = (PlanStep(ordinal, "solve"),), 1.0
        logprobs = self._logprobs_of(lessons, prompts, plans)
        rate = recipe.warm_rate * rate_factor(self.step - recipe.drill_steps, recipe.warm_steps)
        self._update(-(logprobs * counts).mean(), rate)
        return {"imitation": float((logprobs.detach() * counts).mean())}
