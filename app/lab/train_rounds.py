"""`baton train --rounds 2`: a trained small conductor learns what to do with the answer of its first plan.

It goes on from a checkpoint. First it is taught: to each of its own first plans and each sign, the best of some second
plans that are tried, the empty one among them; and in addition, lest it forget, the checkpoint's own first plans. Then
policy gradients over both rounds: a second plan's reward is that of the whole run, given the sign; a first plan's is
the same over both signs, but for a share that is its own answer's (`DISCOUNT`; arXiv 2512.04388 discounts the first
round by as much, and forces a second one for half of its samples, where here second plans are tried for all).

In the folder: `model.pt`, `checkpoint.pt` (to go on from), `curve.csv`, `card.json`, `report.txt`.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from typing import Any, NamedTuple

import torch

from app.errors import ConfigInvalid
from app.lab import prompt, reward, second_round, world
from app.lab.evaluate import RESAMPLES, draw_exam, exact_outcomes
from app.lab.lessons import SPLITS, Lesson, Split
from app.lab.outcome import outcome
from app.lab.paired_statistics import Interval, interval, paired_bootstrap
from app.lab.plans import SLOTS, Plan, from_tokens
from app.lab.second_round import SIGNS, TAKE, RunOutcome
from app.lab.train import CAVEAT, VALIDATION, Order, load_best_weights, restore_checkpoint, save_checkpoint
from app.lab.train_loop import Group, Recipe, Trainer, cut_at_end, greedy, one_plan_each, rate_factor
from app.lab.train_model import Conductor, Tensor
from app.lab.training_record import write_card, write_rows
from app.lab.world import Setting, Weights

DISCOUNT = 0.25
"""The share of its own answer in a first plan's reward; the rest is the whole run's."""
TAUGHT, STEPS, LESSONS, GROUP, DRAWS = 80, 40, 32, 6, 16
TEACHING, RATE = 1e-3, 3e-4
EVERY = 20
"""Steps between validations and checkpoints."""
BEFORE, ALONE, BOTH = "the checkpoint, one round", "its first round, two learned", "two rounds"
Tokens = tuple[int, ...]


class _Answer(NamedTuple):
    """An answer that the conductor is shown: its lesson and first plan, how often that was written, and the sign."""

    place: int
    lesson: Lesson
    first: Tokens
    sign: int
    share: float
    read: list[int]
    hidden: list[int]
    """The prompt, and the same with words hidden."""


class Rounds(Trainer):
    """A training run from a checkpoint's weights; `warm_steps` and `steps` are those of the fine-tuning."""

    def __init__(self, recipe: Recipe, weights: Weights, checkpoint: Mapping[str, Tensor]) -> None:
        super().__init__(recipe, weights)
        self.base = self.conductor.copy()
        for own in (self.base, self.conductor, self.averaged):
            own.load(checkpoint)

    def _warm(self) -> dict[str, float]:
        recipe, lessons = self.recipe, self._draw_lessons(self.recipe.warm_lessons)
        read = self._prompts(lessons, hide=True)
        sampled = self._sample_plans(lessons, self._prompts(lessons), 1, 0)
        firsts = [from_tokens(next(iter(counted))) for counted in sampled]
        signs = [self._random.choice(SIGNS) for _ in lessons]
        best = [self._best_second_plan(*case) for case in zip(lessons, firsts, signs, strict=True)]
        prompts = [second_round.second_prompt(*case) for case in zip(read, lessons, firsts, signs, strict=True)]
        written = [second_round.second_plan_tokens(plan) for plan in best]
        seconds, _ = self._logprobs(prompts, _mask_rows(lessons, SLOTS), one_plan_each(written))
        kept = []
        for plan, lesson in zip(greedy(self.base, lessons), lessons, strict=True):
            kept.append(prompt.over_ordinals(plan, lesson.order))
        anchored = self._logprobs_of(lessons, read, kept)
        rate = recipe.warm_rate * rate_factor(self.step, recipe.warm_steps)
        self._update(-(seconds.mean() + anchored.mean()) / 2, rate)
        return {"imitation": float(seconds.detach().mean())}

    def _best_second_plan(self, lesson: Lesson, first: Plan, sign: int) -> Plan:
        """Return, over ordinals, the empty plan or the best of some that are tried."""
        tried = [
            TAKE,
            *(second_round.draw_second_plan(self._random, len(lesson.pool)) for _ in range(self.recipe.warm_draws)),
        ]
        return max(tried, key=lambda second: self._outcome_given_sign(lesson, first, second, sign).reward)

    def _policy(self) -> dict[str, float]:
        recipe, lessons = self.recipe, self._draw_lessons(self.recipe.lessons)
        read, hidden = self._prompts(lessons), self._prompts(lessons, hide=True)
        firsts = self._sample_plans(lessons, read, recipe.group, 0)
        groups: list[Group] = []
        rewards = []
        answers = self._answers(lessons, firsts, read, hidden)
        worth = self._second_groups(answers, groups)
        for place, (lesson, counted) in enumerate(zip(lessons, firsts, strict=True)):
            values = {first: self._first_plan_reward(lesson, first, worth[place, first]) for first in counted}
            mean = sum(values[first] * count for first, count in counted.items()) / recipe.group
            scored = [(first, values[first] - mean, float(count)) for first, count in counted.items()]
            groups.append(Group(hidden[place], len(lesson.pool), scored))
            rewards.append(sum(worth[place, first] * count for first, count in counted.items()) / recipe.group)
        slope = rate_factor(self.step - recipe.warm_steps, recipe.steps)
        loss, entropy = self._objective(groups, recipe.entropy * slope)
        self._update(loss, recipe.rate * slope)
        return {"reward": sum(rewards) / len(rewards), "entropy": entropy}

    def _answers(
        self,
        lessons: Sequence[Lesson],
        firsts: Sequence[Counter[Tokens]],
        read: Sequence[list[int]],
        hidden: Sequence[list[int]],
    ) -> list[_Answer]:
        """Return every different answer of these first plans with either sign."""
        answers = []
        for place, (lesson, counted) in enumerate(zip(lessons, firsts, strict=True)):
            for (first, count), sign in product(counted.items(), SIGNS):
                prompts = _second_prompts(lesson, first, sign, read[place], hidden[place])
                answers.append(_Answer(place, lesson, first, sign, count / self.recipe.group, *prompts))
        return answers

    def _second_groups(self, answers: Sequence[_Answer], groups: list[Group]) -> dict[tuple[int, Tokens], float]:
        """Add a group of second plans for each answer; what the runs of each lesson's first plans are worth."""
        lessons = [answer.lesson for answer in answers]
        written = self._sample_plans(lessons, [answer.read for answer in answers], self.recipe.group, SLOTS)
        worth: dict[tuple[int, Tokens], float] = defaultdict(float)
        for answer, counted in zip(answers, written, strict=True):
            first = from_tokens(answer.first)
            found = {}
            for plan in counted:
                second = second_round.second_plan_of(plan)
                found[plan] = self._outcome_given_sign(answer.lesson, first, second, answer.sign)
            mean = sum(found[plan].reward * count for plan, count in counted.items()) / self.recipe.group
            likely = next(iter(found.values())).again
            worth[answer.place, answer.first] += likely * mean
            share = answer.share * likely
            scored = [(plan, found[plan].reward - mean, count * share) for plan, count in counted.items()]
            groups.append(Group(answer.hidden, len(answer.lesson.pool) + SLOTS, scored))
        return worth

    def _first_plan_reward(self, lesson: Lesson, first: Tokens, run: float) -> float:
        """Return the discounted reward of a first plan whose runs are worth `run`."""
        alone = outcome(
            prompt.over_places(from_tokens(first), lesson.order),
            lesson.problem.kind,
            Setting(lesson.pool, self.weights),
        )
        return DISCOUNT * reward.expected(alone, self.weights) + (1 - DISCOUNT) * run

    def _outcome_given_sign(self, lesson: Lesson, first: Plan, second: Plan, sign: int) -> RunOutcome:
        self.executed += 1
        plans = prompt.over_places(first, lesson.order), second_round.placed(second, lesson.order)
        return second_round.outcome_given_sign(*plans, lesson.problem.kind, Setting(lesson.pool, self.weights), sign)

    def _sample_plans(
        self, lessons: Sequence[Lesson], prompts: Sequence[Sequence[int]], group: int, row: int
    ) -> list[Counter[Tokens]]:
        """Return sampled plans for each prompt, counted; `row` is where the masks of this round begin."""
        found = self.conductor.write(prompts, _mask_rows(lessons, row), group, self._generator).tolist()
        return [Counter(map(tuple, plans)) for plans in found]


def _second_prompts(lesson: Lesson, first: Tokens, sign: int, *prompts: list[int]) -> list[list[int]]:
    return [second_round.second_prompt(read, lesson, from_tokens(first), sign) for read in prompts]


def _mask_rows(lessons: Sequence[Lesson], row: int) -> Tensor:
    return torch.tensor([len(lesson.pool) + row for lesson in lessons])


def both_rounds(conductor: Conductor, lessons: Sequence[Lesson]) -> list[tuple[Plan, list[Plan]]]:
    """Return the likeliest first plan of each lesson and the likeliest second one to each sign, over places of its
    pool."""
    firsts = greedy(conductor, lessons)
    seconds: list[list[Plan]] = [[] for _ in lessons]
    for sign in SIGNS:
        for start in range(0, len(lessons), 64):
            some = range(start, min(start + 64, len(lessons)))
            prompts = []
            for n in some:
                first = prompt.over_ordinals(firsts[n], lessons[n].order)
                prompts.append(second_round.second_prompt(lessons[n].prompt(), lessons[n], first, sign))
            rows = _mask_rows([lessons[n] for n in some], SLOTS)
            written = conductor.write(prompts, rows, 1, None)[:, 0].tolist()
            for n, tokens in zip(some, written, strict=True):
                seconds[n].append(
                    second_round.placed(second_round.second_plan_of(cut_at_end(tokens)), lessons[n].order)
                )
    return list(zip(firsts, seconds, strict=True))


# -- one run


def train(order: Order, trainer: Rounds, say: Callable[[str], None]) -> dict[Split, dict[str, Any]]:
    """Fine-tune, or go on from the folder's checkpoint; return the comparison of each split."""
    torch.set_num_threads(order.threads)
    order.out.mkdir(parents=True, exist_ok=True)
    rows = restore_checkpoint(order, trainer, say)
    validation = draw_exam("held-out tasks", VALIDATION, -1)
    while trainer.step < trainer.total:
        measured = trainer.advance()
        if trainer.step % EVERY == 0 or trainer.step == trainer.total:
            runs = list(second_round.run_outcomes(validation, both_rounds(trainer.averaged, validation), order.weights))
            reward_mean = round(sum(run.reward for run in runs) / len(runs), 5)
            again_mean = round(sum(run.again for run in runs) / len(runs), 5)
            rows.append({"step": trainer.step, "validation": reward_mean, "again": again_mean})
            rows[-1] |= {name: round(value, 4) for name, value in measured.items()}
            save_checkpoint(order, trainer, rows)
            say(" ".join(f"{name} {value}" for name, value in rows[-1].items()))
    load_best_weights(order, trainer)
    write_rows(order.out / "curve.csv", rows)
    return {split: compare(order, trainer, draw_exam(split, order.lessons, 1)) for split in SPLITS}


def compare(order: Order, trainer: Rounds, lessons: Sequence[Lesson]) -> dict[str, Any]:
    """Compare three arms: one round by the checkpoint, one round by what has learned two, and two rounds. Return their
    means, and the advantage of the last in reward and accuracy, paired over lessons."""
    runs: dict[str, list[RunOutcome]] = {}
    for arm, conductor in ((BEFORE, trainer.base), (ALONE, trainer.averaged)):
        outcomes = exact_outcomes(lessons, greedy(conductor, lessons), order.weights)
        runs[arm] = [RunOutcome(result.reward, result.right, result.usd, result.seconds, 0.0) for result in outcomes]
    runs[BOTH] = list(second_round.run_outcomes(lessons, both_rounds(trainer.averaged, lessons), order.weights))
    arms = {}
    for arm, of_arm in runs.items():
        means = [sum(column) / len(lessons) for column in zip(*of_arm, strict=True)]
        arms[arm] = dict(zip(RunOutcome._fields, means, strict=True))
    ahead = {name: _advantage(runs, name, order.recipe.seed) for name in ("reward", "right")}
    return {
        "lessons": len(lessons),
        "arms": arms,
        "ahead": ahead,
    }


def _advantage(runs: Mapping[str, Sequence[RunOutcome]], name: str, seed: int) -> Interval:
    """Return the advantage of two rounds over the checkpoint's one."""
    series: dict[str, list[float]] = {}
    for arm, of_arm in runs.items():
        series[arm] = [getattr(run, name) for run in of_arm]
    means = paired_bootstrap(series, Random(seed), RESAMPLES)
    return interval([mean[BOTH] - mean[BEFORE] for mean in means])


def format_comparison(split: str, found: Mapping[str, Any]) -> str:
    """Return a comparison as text, for a terminal or a document."""
    lines = [f"{split}: {found['lessons']} lessons", f"{'':31}reward  accuracy  cost m$  seconds  second rounds"]
    for arm, means in found["arms"].items():
        figures = f"{means['reward']:.3f}     {means['right']:.3f}  {1000 * means['usd']:7.3f}  {means['seconds']:7.2f}"
        lines.append(f"{arm:31}{figures}  {means['again']:13.0%}")
    told = (
        f"{name} {advantage.value:+.3f} [{advantage.low:+.3f}, {advantage.high:+.3f}]"
        for name, advantage in found["ahead"].items()
    )
    return "\n".join([*lines, f"two rounds are ahead of the checkpoint: {', '.join(told)}"])


def read_checkpoint(folder: Path) -> tuple[Recipe, Weights, Mapping[str, Tensor]]:
    """Read the recipe, the reward weights and the model of a training run or of an export."""
    try:
        card = json.loads((folder / "card.json").read_text())
        if (folder / "model.pt").is_file():
            weights = torch.load(folder / "model.pt", weights_only=True)
        else:
            weights = resolve_name("app.lab.export").load_conductor(folder).weights
    except OSError as error:
        raise ConfigInvalid([f"--from: {error.filename}: {error.strerror}; `baton train` leaves one"]) from None
    return Recipe(**card["recipe"]), Weights(**card["weights"]), weights


def run(options: Any, say: Callable[[str], None]) -> None:
    """Train for the command line."""
    if options.checkpoint is None:
        raise ConfigInvalid(["--rounds 2: name the folder of a training run with --from"])
    recipe, weights, start = read_checkpoint(Path(options.checkpoint))
    if recipe.form != "roles":
        raise ConfigInvalid(["--rounds 2: second plans are written by role; name a run without --recipe"])
    recipe = replace(recipe, drill_steps=0, warm_steps=options.warm_steps or TAUGHT, steps=options.steps or STEPS)
    recipe = replace(recipe, seed=options.seed, warm_lessons=LESSONS, lessons=LESSONS, group=GROUP, warm_draws=DRAWS)
    recipe = replace(recipe, rate=RATE, warm_rate=TEACHING, ramp=0.0)
    order = Order(Path(options.out), recipe, weights, options.lessons, options.threads)
    trainer = Rounds(recipe, weights, start)
    say(CAVEAT)
    tables = train(order, trainer, say)
    written = [format_comparison(split, found) for split, found in tables.items()]
    (order.out / "report.txt").write_text("\n\n".join([f"seed {recipe.seed}. {CAVEAT}", *written]) + "\n")
    for table in written:
        say(f"\n{table}")
    write_card(order.out, _card(order, trainer, Path(options.checkpoint), tables))


def _card(order: Order, trainer: Rounds, start: Path, tables: Mapping[Split, dict[str, Any]]) -> dict[str, Any]:
    shown = {}
    for split, found in tables.items():
        ahead = {name: asdict(advantage) for name, advantage in found["ahead"].items()}
        shown[split] = {**found, "ahead": ahead}
    return {
        "caveat": CAVEAT,
        "backend": "builtin",
        "rounds": 2,
        "from": json.loads((start / "card.json").read_text())["model_sha256"],
        "recipe": asdict(order.recipe),
        "weights": asdict(order.weights),
        "discount": DISCOUNT,
        "world": world.VERSION,
        "reward": reward.VERSION,
        "model_sha256": hashlib.sha256((order.out / "model.pt").read_bytes()).hexdigest(),
        "plans_carried_out": trainer.executed,
        "tables": shown,
    }
