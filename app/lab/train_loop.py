"""Training the small conductor: a supervised warm start, then policy gradients over groups of its own plans.

Before it, drills: the prompt names a card, the plan is its worker. Warm start: for each lesson `teacher.py` carries out
some plans, and the best is imitated, with the pool shown in several orders.
Then GRPO without a division by the spread: a group of plans is sampled for each prompt, each plan's advantage is its
reward less its group's mean, one update per batch. Equal plans of a group are scored once with their weights summed,
and groups without any difference are left out. The grammar's mask holds in the rollout and in the loss.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple, TypeAlias

import torch
from msgspec import Struct
from msgspec.structs import asdict

from app.errors import ConfigInvalid
from app.lab import prompt, reward, subtask_wording, teacher
from app.lab.lessons import Lesson, draw_lesson
from app.lab.outcome import outcome
from app.lab.plan_grammar import FORMS, WORDS
from app.lab.plans import Plan, PlanStep
from app.lab.train_model import Conductor, Tensor, config
from app.lab.world import Setting, Weights


class Recipe(Struct, frozen=True):
    """The settings of a training run: with the code and the world, all that it depends on."""

    seed: int = 0
    form: str = "roles"
    """The form in which plans are written."""
    hidden: int = 64
    layers: int = 3
    heads: int = 2
    drill_steps: int = 250
    drill_rate: float = 1e-3
    warm_steps: int = 1_000
    warm_lessons: int = 64
    warm_draws: int = 64
    """Plans that the teacher carries out for a lesson, at most."""
    warm_orders: int = 2
    """In how many orders of its pool a lesson is imitated."""
    steps: int = 240
    lessons: int = 64
    group: int = 8
    standard: float = 0.35
    """The share of lessons over the standard pool."""
    unknown: float = 0.7
    """The largest share of a task's words that training disturbs, so that unseen phrasings are no surprise."""
    warm_rate: float = 1.5e-3
    rate: float = 1e-3
    entropy: float = 0.01
    """The bonus for undecidedness; it falls to nothing with the learning rate."""
    average: float = 0.98
    """The share of the averaged weights that a step keeps; they are the ones that are judged and kept."""
    ramp: float = 0.1
    """The share of what follows the drills after which cost counts in full."""
    executions: int = 0
    """The number of times that a plan is carried out for its reward; 0 means its exact expectation."""
    remembered: str = ""
    """SHA-256 of the journaled runs that the warm start imitates in the place of drawn plans; empty: none."""
    start: str = ""
    """SHA-256 of the model that second rounds go on from; empty: random weights."""


RECIPES: Mapping[str, Recipe] = {
    "roles": Recipe(),
    "words": Recipe(form="words", warm_steps=700, steps=110, entropy=0.003),
    "words-large": Recipe(
        form="words", hidden=512, layers=10, heads=8, drill_rate=3e-4, warm_lessons=256, warm_rate=4e-4, steps=400,
        group=16, rate=1e-4, entropy=0.003,
    ),
}  # fmt: skip
"""By name: what ships; plans in words at a size for a CPU (0.14 million parameters) and at one for a GPU (26)."""


LESSONS_AT_A_TIME = 64
"""The lessons for which the likeliest plans are written together."""


def new_conductor(recipe: Recipe) -> Conductor:
    """Return the model that a recipe begins with."""
    form = FORMS[recipe.form]
    return Conductor.with_random_weights(config(form, recipe.hidden, recipe.layers, recipe.heads), recipe.seed, form)


Tokens: TypeAlias = tuple[int, ...]
ScoredPlan: TypeAlias = tuple[Tokens, float, float]
"""A plan's tokens, its advantage, and its weight: how often it was sampled."""


class Group(NamedTuple):
    """The different plans that one prompt led to."""

    prompt: list[int]
    workers: int
    plans: list[ScoredPlan]


class Trainer:
    """One training run; its state can be saved and taken up again after any step."""

    def __init__(self, recipe: Recipe, weights: Weights) -> None:
        self.recipe, self.weights, self.form = recipe, weights, FORMS[recipe.form]
        self.conductor = new_conductor(recipe)
        self._parameters = list(self.conductor.model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._random = Random(recipe.seed)
        self._generator = torch.Generator(torch.empty(0).device).manual_seed(recipe.seed)
        self.averaged = self.conductor.copy()
        """Under the moving average of the weights."""
        self.step = 0
        self.executed = 0
        """Plans that were carried out for their reward."""

    @property
    def total(self) -> int:
        """Return the number of steps of all three parts."""
        return self.recipe.drill_steps + self.recipe.warm_steps + self.recipe.steps

    def advance(self) -> dict[str, float]:
        """Do one more step; return what it measured."""
        if self.step < self.recipe.drill_steps:
            measured = self._drill()
        elif self.step < self.recipe.drill_steps + self.recipe.warm_steps:
            measured = self._warm()
        else:
            measured = self._policy()
        self.step += 1
        return measured

    def state(self) -> dict[str, Any]:
        """Return all that the next step depends on."""
        return {
            "recipe": asdict(self.recipe),
            "reward_weights": asdict(self.weights),
            "step": self.step,
            "executed": self.executed,
            "weights": _detach_weights(self.conductor),
            "averaged": _detach_weights(self.averaged),
            "optimizer": self._optimizer.state_dict(),
            "random": self._random.getstate(),
            "generator": self._generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises `ConfigInvalid` if it is another recipe's or was rewarded otherwise."""
        if (state["recipe"], state.get("reward_weights")) != (
            asdict(self.recipe),
            asdict(self.weights),
        ):
            raise ConfigInvalid(
                ["--out: the folder holds a run of another recipe, seed, start or reward; name another folder"]
            )
        self.step, self.executed = state["step"], state["executed"]
        self.conductor.load(state["weights"])
        self.averaged.load(state["averaged"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._random.setstate(state["random"])
        self._generator.set_state(state["generator"])

    # The three parts.

    def _drill(self) -> dict[str, float]:
        """Teach reading cards: the prompt names one, the plan is its worker alone. Nothing is said of who is good at
        what."""
        lessons = self._draw_lessons(self.recipe.warm_lessons)
        logprobs = self._logprobs_of(lessons, *self._drills(lessons))
        self._update(-logprobs.mean(), self.recipe.drill_rate * min((self.step + 1) / 10, 1.0))
        return {"imitation": float(logprobs.detach().mean())}

    def _warm(self) -> dict[str, float]:
        """Imitate the best of the plans that the teacher tried; every eighth lesson is a drill, lest they be
        forgotten."""
        recipe, weights = self.recipe, self._ramp_weights()
        lessons: list[Lesson] = []
        prompts: list[list[int]] = []
        plans: list[Plan] = []
        rewards: list[float] = []
        for place, lesson in enumerate(self._draw_lessons(recipe.warm_lessons // recipe.warm_orders)):
            orders = [lesson.shuffle_pool(self._random) for _ in range(recipe.warm_orders)]
            lessons += orders
            if place % 8 == 0:
                drill_prompts, drill_plans = self._drills(orders)
                prompts += drill_prompts
                plans += drill_plans
                continue
            targets, best_reward = self._imitation_targets(lesson, len(orders), weights)
            prompts += self._prompts(orders, hide=True)
            for target, other in zip(targets, orders, strict=True):
                plans.append(prompt.over_ordinals(prompt.over_places(target, lesson.order), other.order))
            rewards.append(best_reward)
        logprobs = self._logprobs_of(lessons, prompts, plans)
        slope = rate_factor(self.step - recipe.drill_steps, recipe.warm_steps)
        self._update(-logprobs.mean(), recipe.warm_rate * slope)
        return {"reward": sum(rewards) / len(rewards), "imitation": float(logprobs.detach().mean())}

    def _imitation_targets(self, lesson: Lesson, count: int, weights: Weights) -> tuple[list[Plan], float]:
        """Return the best plan that the teacher found for a lesson, `count` times, and its reward. In the form of words
        each time has words of its own."""
        worth = partial(self._reward, lesson, weights=weights)
        plan, best_reward = teacher.search_best_plan(self._random, len(lesson.pool), worth, self.recipe.warm_draws)
        if self.form is WORDS:
            return teacher.put_in_words(self._random, plan, worth, count)
        return [plan] * count, best_reward

    def _drills(self, lessons: Sequence[Lesson]) -> tuple[list[list[int]], list[Plan]]:
        """Return for each lesson a prompt that names one worker's card, and the plan of this worker alone."""
        ordinals = [self._random.randrange(len(lesson.pool)) for lesson in lessons]
        prompts: list[list[int]] = []
        plans: list[Plan] = []
        for lesson, ordinal in zip(lessons, ordinals, strict=True):
            prompts.append(prompt.drill_prompt(lesson.pool, lesson.order, ordinal, self.form))
            plans.append(self._drill_plan(ordinal))
        return prompts, plans

    def _drill_plan(self, ordinal: int) -> Plan:
        """Return the plan that answers a drill."""
        text = ""
        if self.form is WORDS:
            text = subtask_wording.phrase(self._random, "solve", subtask_wording.GENERAL)
        return (PlanStep(ordinal, "solve", text=text),)

    def _logprobs_of(
        self, lessons: Sequence[Lesson], prompts: Sequence[Sequence[int]], plans: Sequence[Plan]
    ) -> Tensor:
        """Return the log-probability of each lesson's plan: [lessons]."""
        tokens = [self.form.encode(plan) for plan in plans]
        logprobs, _ = self._logprobs(prompts, worker_counts(lessons), one_plan_each(tokens))
        return logprobs[:, 0]

    def _ramp_weights(self) -> Weights:
        """Return the weights of cost and wait as the progress of training has ramped them in."""
        progress = (self.step - self.recipe.drill_steps) / max(1, self.total - self.recipe.drill_steps)
        return reward.ramp_weights(self.weights, progress, self.recipe.ramp)

    def _policy(self) -> dict[str, float]:
        """Take one step of policy gradients over groups of sampled plans."""
        recipe, lessons = self.recipe, self._draw_lessons(self.recipe.lessons)
        weights = self._ramp_weights()
        workers = worker_counts(lessons)
        hidden_prompts = self._prompts(lessons, hide=True)
        samples = self.conductor.write(self._prompts(lessons), workers, recipe.group, self._generator).tolist()
        groups: list[Group] = []
        mean_rewards: list[float] = []
        distinct: set[Tokens] = set()
        for lesson, hidden_prompt, sampled_plans in zip(lessons, hidden_prompts, samples, strict=True):
            counts: Counter[Tokens] = Counter(map(tuple, sampled_plans))
            distinct.update(counts)
            rewards: dict[Tokens, float] = {}
            for tokens in counts:
                rewards[tokens] = self._reward(lesson, self.form.decode(cut_at_end(tokens)), weights)
            mean_rewards.append(group_mean(rewards, counts))
            if len(counts) > 1:
                groups.append(Group(hidden_prompt, len(lesson.pool), score_plans(rewards, counts)))
        measured = {"reward": sum(mean_rewards) / len(mean_rewards), "distinct": len(distinct)}
        if not groups:
            return measured | {"entropy": 0.0}
        slope = rate_factor(self.step - recipe.drill_steps - recipe.warm_steps, recipe.steps)
        loss, entropy = self._objective(groups, recipe.entropy * slope)
        self._update(loss, recipe.rate * slope)
        return measured | {"entropy": entropy}

    def _objective(self, groups: Sequence[Group], bonus: float) -> tuple[Tensor, float]:
        """Return minus the weighted log-probability of the groups' plans, less the bonus; and the mean entropy of a
        choice.

        The rollout has read whole tasks, the loss reads them with words hidden: what came of knowing all is to be done
        knowing less. (Hiding the same words in both was tried; `deploy/docs/rehearsal.md` has the figures.)
        """
        plans, advantages, counts = self._as_tensors(groups)
        longest = int((plans != 0).sum(-1).max()) + 1
        workers = torch.tensor([group.workers for group in groups])
        logprobs, entropies = self._logprobs([group.prompt for group in groups], workers, plans[:, :, :longest])
        norm = self.recipe.lessons * self.recipe.group
        spread = (entropies * counts).sum()
        loss = -((logprobs * advantages * counts).sum() + bonus * spread) / norm
        choices = ((plans != 0).sum(-1) * counts).sum()
        return loss, float(spread.detach() / choices)

    def _as_tensors(self, groups: Sequence[Group]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the plans [groups, most plans, longest], and their advantages and counts [groups, most plans]. Smaller
        groups are filled up with empty plans, which count 0 times."""
        most_plans = max([len(group.plans) for group in groups])
        empty_plan: ScoredPlan = ((0,) * self.form.longest, 0.0, 0.0)
        plan_rows, advantage_rows, count_rows = [], [], []
        for group in groups:
            padding = [empty_plan] * (most_plans - len(group.plans))
            plans, advantages, counts = zip(*group.plans, *padding, strict=True)
            plan_rows.append(plans)
            advantage_rows.append(advantages)
            count_rows.append(counts)
        return torch.tensor(plan_rows), torch.tensor(advantage_rows), torch.tensor(count_rows, dtype=torch.float32)

    def _logprobs(self, prompts: Sequence[Sequence[int]], workers: Tensor, plans: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each plan, and the entropies of its choices summed: both [prompts, group]."""
        scores = self.conductor.scores(prompts, plans[:, :, :-1], workers)
        is_written = plans[:, :, 1:] != 0
        chosen = scores.gather(-1, plans[:, :, 1:, None]).squeeze(-1)
        finite = scores.masked_fill(scores == -math.inf, 0.0)
        entropies = -(scores.exp() * finite).sum(-1)
        return torch.where(is_written, chosen, 0.0).sum(-1), torch.where(is_written, entropies, 0.0).sum(-1)

    def _update(self, loss: Tensor, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        decay = min(self.recipe.average, self.step / (self.step + 10))
        with torch.no_grad():
            for mean, parameter in zip(self.averaged.model.parameters(), self._parameters, strict=True):
                mean.lerp_(parameter, 1 - decay)

    # Lessons and their rewards.

    def _draw_lessons(self, count: int) -> list[Lesson]:
        return [draw_lesson(self._random, "train", self.recipe.standard) for _ in range(count)]

    def _prompts(self, lessons: Sequence[Lesson], *, hide: bool = False) -> list[list[int]]:
        """Return the tokens that the conductor reads of each lesson; with `hide`, some words are hidden from it."""
        if not hide:
            return [lesson.prompt(form=self.form) for lesson in lessons]
        return [lesson.prompt(self._random, self.recipe.unknown, self.form) for lesson in lessons]

    def _reward(self, lesson: Lesson, plan: Plan, weights: Weights) -> float:
        """Return the reward of a plan over ordinals: its exact expectation, or the mean of some executions."""
        placed = prompt.over_places(plan, lesson.order)
        expected = outcome(placed, lesson.problem.kind, Setting(lesson.pool, weights))
        self.executed += max(1, self.recipe.executions)
        if not self.recipe.executions:
            return reward.expected_reward(expected, weights)
        successes = 0
        for _ in range(self.recipe.executions):
            if self._random.random() < expected.right:
                successes += 1
        return successes / self.recipe.executions * expected.worth


def greedy(conductor: Conductor, lessons: Sequence[Lesson]) -> list[Plan]:
    """Return the most likely plan of each lesson, over places of its pool."""
    plans: list[Plan] = []
    form = conductor.form
    for start in range(0, len(lessons), LESSONS_AT_A_TIME):
        batch = lessons[start : start + LESSONS_AT_A_TIME]
        prompts = [lesson.prompt(form=form) for lesson in batch]
        plans_as_tokens = conductor.write(prompts, worker_counts(batch), 1, None)[:, 0].tolist()
        for lesson, tokens in zip(batch, plans_as_tokens, strict=True):
            plans.append(prompt.over_places(form.decode(cut_at_end(tokens)), lesson.order))
    return plans


def group_mean(rewards: Mapping[Tokens, float], counts: Counter[Tokens]) -> float:
    """Return the mean reward of a group's plans, each counted as often as it was sampled."""
    return sum([rewards[plan] * count for plan, count in counts.items()]) / counts.total()


def score_plans(rewards: Mapping[Tokens, float], counts: Counter[Tokens], share: float = 1.0) -> list[ScoredPlan]:
    """Return the different plans of a group with their advantages: their rewards less the group's mean. The weight of
    each is how often it was sampled, times `share`."""
    mean = group_mean(rewards, counts)
    plans = []
    for plan, count in counts.items():
        plans.append((plan, rewards[plan] - mean, count * share))
    return plans


def worker_counts(lessons: Sequence[Lesson]) -> Tensor:
    """Return the number of workers of each lesson's pool: [lessons]."""
    return torch.tensor([len(lesson.pool) for lesson in lessons])


def one_plan_each(plans: Sequence[Sequence[int]]) -> Tensor:
    """Return the tokens of one plan for each prompt, filled up with 0: [prompts, 1, longest]."""
    longest = max(map(len, plans))
    rows = []
    for tokens in plans:
        padding = [0] * (longest - len(tokens))
        rows.append([[*tokens, *padding]])
    return torch.tensor(rows)


def _detach_weights(conductor: Conductor) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in conductor.weights.items()}


def cut_at_end(tokens: Sequence[int]) -> list[int]:
    """Return a written plan without what follows its end."""
    return list(tokens[: list(tokens).index(2) + 1])


def rate_factor(step: int, steps: int) -> float:
    """Return the factor on a learning rate: ten steps up, then down to a tenth."""
    return min((step + 1) / 10, 1.0) * (1 - 0.9 * step / max(steps, 1))
