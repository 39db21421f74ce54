"""The small conductor's warm start from journaled runs: advantage-weighted regression in the place of imitating plans
that are drawn and tried. Policy gradients go on from there.
"""

from collections.abc import Sequence

import torch

from app.lab import prompt
from app.lab.journal_imitation import Remembered
from app.lab.plans import Plan, PlanStep
from app.lab.train_loop import Recipe, Trainer, decayed
from app.lab.world import Weights


class Regressor(Trainer):
    """A training run whose warm start imitates what was carried out, each run by its weight."""

    def __init__(self, recipe: Recipe, weights: Weights, runs: Sequence[Remembered]) -> None:
        super().__init__(recipe, weights)
        self._runs = runs

    def _warm(self) -> dict[str, float]:
        """Imitate some of the runs, in orders of their own; every eighth lesson is a drill, lest they be forgotten."""
        recipe = self.recipe
        chosen = self._random.choices(self._runs, k=recipe.warm_lessons)
        lessons = [run.lesson(self._random) for run in chosen]
        prompts = self._prompts(lessons, hide=True)
        plans: list[Plan] = [
            prompt.ordinals(run.plan, lesson.order) for run, lesson in zip(chosen, lessons, strict=True)
        ]
        counts = torch.tensor([run.weight for run in chosen])
        for place in range(0, len(lessons), 8):
            ordinal = self._random.randrange(len(lessons[place].pool))
            prompts[place] = prompt.drill(lessons[place].pool, lessons[place].order, ordinal)
            plans[place], counts[place] = (PlanStep(ordinal, "solve"),), 1.0
        logprobs = self._imitate(lessons, prompts, plans)
        self._update(
            -(logprobs * counts).mean(), recipe.warm_rate * decayed(self.step - recipe.drill_steps, recipe.warm_steps)
        )
        return {"imitation": float((logprobs.detach() * counts).mean())}
