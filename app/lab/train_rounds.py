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
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import asdict, replace

from app.errors import ConfigInvalid
from app.lab import prompt, reward, second_round, world
from app.lab.evaluate import bootstrap_lessons, draw_exam, exact_outcomes
from app.lab.lessons import SPLITS, Lesson, Split
from app.lab.outcome import outcome
from app.lab.paired_statistics import Interval, interval
from app.lab.plans import SLOTS, Plan, from_tokens
from app.lab.second_round import SIGNS, TAKE, RunOutcome
from app.lab.train import CAVEAT, VALIDATION, Order, format_row, load_best_weights, restore_checkpoint, save_checkpoint
from app.lab.train_loop import (
    LESSONS_AT_A_TIME,
    Group,
    Recipe,
    Tokens,
    Trainer,
    cut_at_end,
    greedy,
    group_mean,
    one_plan_each,
    rate_factor,
    score_plans,
    worker_counts,
)
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


class _Answer(NamedTuple):
    """An answer that the conductor is shown, with the sign, and the prompt that shows it."""

    place: int
    """The place of its lesson in the batch."""
    lesson: Lesson
    first: Tokens
    """The first plan, which led to it."""
    sign: int
    share: float
    """How often the first plan was written, as a share of its group."""
    prompt: list[int]
    hidden_prompt: list[int]
    """The prompt in which some words of the request are hidden from the conductor."""


class Rounds(Trainer):
    """A training run from a checkpoint's weights; `warm_steps` and `steps` are those of the fine-tuning."""

    def __init__(self, recipe: Recipe, weights: Weights, checkpoint: Mapping[str, Tensor]) -> None:
        super().__init__(recipe, weights)
        self.base = self.conductor.copy()
        for own in (self.base, self.conductor, self.averaged):
            own.load(checkpoint)

    def _warm(self) -> dict[str, float]:
        """Imitate the best second plans to the answers of own first plans, and the checkpoint's own first plans."""
        recipe, lessons = self.recipe, self._draw_lessons(self.recipe.warm_lessons)
        hidden_prompts = self._prompts(lessons, hide=True)
        first_counts = self._sample_plans(lessons, self._prompts(lessons), 1, 0)
        signs = [self._random.choice(SIGNS) for _ in lessons]
        second_prompts: list[list[int]] = []
        second_plans: list[list[int]] = []
        for lesson, hidden_prompt, counts, sign in zip(lessons, hidden_prompts, first_counts, signs, strict=True):
            first = from_tokens(next(iter(counts)))
            best = self._best_second_plan(lesson, first, sign)
            second_prompts.append(second_round.second_prompt(hidden_prompt, lesson, first, sign))
            second_plans.append(second_round.second_plan_tokens(best))
        seconds, _ = self._logprobs(second_prompts, _mask_rows(lessons, SLOTS), one_plan_each(second_plans))
        checkpoint_plans: list[Plan] = []
        for plan, lesson in zip(greedy(self.base, lessons), lessons, strict=True):
            checkpoint_plans.append(prompt.over_ordinals(plan, lesson.order))
        anchored = self._logprobs_of(lessons, hidden_prompts, checkpoint_plans)
        rate = recipe.warm_rate * rate_factor(self.step, recipe.warm_steps)
        self._update(-(seconds.mean() + anchored.mean()) / 2, rate)
        return {"imitation": float(seconds.detach().mean())}

    def _best_second_plan(self, lesson: Lesson, first: Plan, sign: int) -> Plan:
        """Return, over ordinals, the best of the empty plan and of some second plans that are drawn."""
        candidates = [TAKE]
        for _ in range(self.recipe.warm_draws):
            candidates.append(second_round.draw_second_plan(self._random, len(lesson.pool)))
        return max(candidates, key=lambda second: self._outcome_given_sign(lesson, first, second, sign).reward)

    def _policy(self) -> dict[str, float]:
        """Take one step of policy gradients over first and second plans."""
        recipe, lessons = self.recipe, self._draw_lessons(self.recipe.lessons)
        prompts, hidden_prompts = self._prompts(lessons), self._prompts(lessons, hide=True)
        first_counts = self._sample_plans(lessons, prompts, recipe.group, 0)
        groups: list[Group] = []
        rewards: list[float] = []
        answers = self._answers(lessons, first_counts, prompts, hidden_prompts)
        run_rewards = self._second_groups(answers, groups)
        for place, (lesson, counts) in enumerate(zip(lessons, first_counts, strict=True)):
            rewards_of_runs: dict[Tokens, float] = {}
            rewards_of_firsts: dict[Tokens, float] = {}
            for first in counts:
                rewards_of_runs[first] = run_rewards[place, first]
                rewards_of_firsts[first] = self._first_plan_reward(lesson, first, run_rewards[place, first])
            groups.append(Group(hidden_prompts[place], len(lesson.pool), score_plans(rewards_of_firsts, counts)))
            rewards.append(group_mean(rewards_of_runs, counts))
        slope = rate_factor(self.step - recipe.warm_steps, recipe.steps)
        loss, entropy = self._objective(groups, recipe.entropy * slope)
        self._update(loss, recipe.rate * slope)
        return {"reward": sum(rewards) / len(rewards), "entropy": entropy}

    def _answers(
        self,
        lessons: Sequence[Lesson],
        first_counts: Sequence[Counter[Tokens]],
        prompts: Sequence[list[int]],
        hidden_prompts: Sequence[list[int]],
    ) -> list[_Answer]:
        """Return every different answer of these first plans with either sign."""
        answers = []
        for place, (lesson, counts) in enumerate(zip(lessons, first_counts, strict=True)):
            for (tokens, count), sign in product(counts.items(), SIGNS):
                first = from_tokens(tokens)
                answer = _Answer(
                    place=place,
                    lesson=lesson,
                    first=tokens,
                    sign=sign,
                    share=count / self.recipe.group,
                    prompt=second_round.second_prompt(prompts[place], lesson, first, sign),
                    hidden_prompt=second_round.second_prompt(hidden_prompts[place], lesson, first, sign),
                )
                answers.append(answer)
        return answers

    def _second_groups(self, answers: Sequence[_Answer], groups: list[Group]) -> dict[tuple[int, Tokens], float]:
        """Add a group of second plans to `groups` for each answer. Return the expected rewards of the runs of each
        first plan, by the place of its lesson and its tokens."""
        lessons = [answer.lesson for answer in answers]
        second_counts = self._sample_plans(lessons, [answer.prompt for answer in answers], self.recipe.group, SLOTS)
        run_rewards: dict[tuple[int, Tokens], float] = defaultdict(float)
        for answer, counts in zip(answers, second_counts, strict=True):
            first = from_tokens(answer.first)
            chance_of_sign = 0.0  # it is the same whatever the second plan
            rewards: dict[Tokens, float] = {}
            for plan in counts:
                second = second_round.second_plan_of(plan)
                run = self._outcome_given_sign(answer.lesson, first, second, answer.sign)
                chance_of_sign = run.again
                rewards[plan] = run.reward
            run_rewards[answer.place, answer.first] += chance_of_sign * group_mean(rewards, counts)
            scored = score_plans(rewards, counts, answer.share * chance_of_sign)
            groups.append(Group(answer.hidden_prompt, len(answer.lesson.pool) + SLOTS, scored))
        return run_rewards

    def _first_plan_reward(self, lesson: Lesson, first: Tokens, run: float) -> float:
        """Return the discounted reward of a first plan whose runs are worth `run`."""
        plan = prompt.over_places(from_tokens(first), lesson.order)
        alone = outcome(plan, lesson.problem.kind, Setting(lesson.pool, self.weights))
        return DISCOUNT * reward.expected_reward(alone, self.weights) + (1 - DISCOUNT) * run

    def _outcome_given_sign(self, lesson: Lesson, first: Plan, second: Plan, sign: int) -> RunOutcome:
        self.executed += 1
        plans = prompt.over_places(first, lesson.order), second_round.place_plan(second, lesson.order)
        return second_round.outcome_given_sign(*plans, lesson.problem.kind, Setting(lesson.pool, self.weights), sign)

    def _sample_plans(
        self, lessons: Sequence[Lesson], prompts: Sequence[Sequence[int]], group: int, row: int
    ) -> list[Counter[Tokens]]:
        """Return for each prompt how often each plan was sampled; `row` is where the masks of this round begin."""
        plans_of_prompt = self.conductor.write(prompts, _mask_rows(lessons, row), group, self._generator).tolist()
        return [Counter(map(tuple, plans)) for plans in plans_of_prompt]


def _mask_rows(lessons: Sequence[Lesson], row: int) -> Tensor:
    """Return the row of the grammar's masks for each lesson's pool, if those of the round begin at `row`."""
    return worker_counts(lessons) + row


def both_rounds(conductor: Conductor, lessons: Sequence[Lesson]) -> list[tuple[Plan, list[Plan]]]:
    """Return the likeliest first plan of each lesson and the likeliest second one to each sign, over places of its
    pool."""
    firsts = greedy(conductor, lessons)
    seconds_by_sign = []
    for sign in SIGNS:
        seconds: list[Plan] = []
        for start in range(0, len(lessons), LESSONS_AT_A_TIME):
            batch = slice(start, start + LESSONS_AT_A_TIME)
            seconds += _likeliest_second_plans(conductor, lessons[batch], firsts[batch], sign)
        seconds_by_sign.append(seconds)
    return list(zip(firsts, map(list, zip(*seconds_by_sign, strict=True)), strict=True))


def _likeliest_second_plans(
    conductor: Conductor, lessons: Sequence[Lesson], firsts: Sequence[Plan], sign: int
) -> list[Plan]:
    """Return the likeliest second plan to one sign for each lesson and first plan, over places of its pool."""
    prompts = []
    for lesson, plan in zip(lessons, firsts, strict=True):
        first = prompt.over_ordinals(plan, lesson.order)
        prompts.append(second_round.second_prompt(lesson.prompt(), lesson, first, sign))
    plans_as_tokens = conductor.write(prompts, _mask_rows(lessons, SLOTS), 1, None)[:, 0].tolist()
    plans = []
    for lesson, tokens in zip(lessons, plans_as_tokens, strict=True):
        second = second_round.second_plan_of(cut_at_end(tokens))
        plans.append(second_round.place_plan(second, lesson.order))
    return plans


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
            plans = both_rounds(trainer.averaged, validation)
            means = _mean_run(list(second_round.run_outcomes(validation, plans, order.weights)))
            row = {"step": trainer.step, "validation": round(means["reward"], 5), "again": round(means["again"], 5)}
            for name, value in measured.items():
                row[name] = round(value, 4)
            rows.append(row)
            save_checkpoint(order, trainer, rows)
            say(format_row(row))
    load_best_weights(order, trainer)
    write_rows(order.out / "curve.csv", rows)
    return {split: compare(order, trainer, draw_exam(split, order.lessons, 1)) for split in SPLITS}


def _mean_run(runs: Sequence[RunOutcome]) -> dict[str, float]:
    """Return the means of all figures over these runs, by name."""
    means = [sum(column) / len(runs) for column in zip(*runs, strict=True)]
    return dict(zip(RunOutcome._fields, means, strict=True))


def compare(order: Order, trainer: Rounds, lessons: Sequence[Lesson]) -> dict[str, Any]:
    """Compare three arms: one round by the checkpoint, one round by what has learned two, and two rounds. Return their
    means, and the advantage of the last in reward and accuracy, paired over lessons or pools."""
    runs: dict[str, list[RunOutcome]] = {}
    for arm, conductor in ((BEFORE, trainer.base), (ALONE, trainer.averaged)):
        runs[arm] = []
        for result in exact_outcomes(lessons, greedy(conductor, lessons), order.weights):
            runs[arm].append(RunOutcome(result.reward, result.right, result.usd, result.seconds, 0.0))
    runs[BOTH] = list(second_round.run_outcomes(lessons, both_rounds(trainer.averaged, lessons), order.weights))
    return {
        "lessons": len(lessons),
        "arms": {arm: _mean_run(of_arm) for arm, of_arm in runs.items()},
        "ahead": {name: _advantage(lessons, runs, name, order.recipe.seed) for name in ("reward", "right")},
    }


def _advantage(lessons: Sequence[Lesson], runs: Mapping[str, Sequence[RunOutcome]], name: str, seed: int) -> Interval:
    """Return the advantage of two rounds over the checkpoint's one."""
    series: dict[str, list[float]] = {}
    for arm, of_arm in runs.items():
        series[arm] = [getattr(run, name) for run in of_arm]
    means = bootstrap_lessons(lessons, series, seed)
    return interval([mean[BOTH] - mean[BEFORE] for mean in means])


def format_comparison(split: str, comparison: Mapping[str, Any]) -> str:
    """Return a comparison as text, for a terminal or a document."""
    lines = [f"{split}: {comparison['lessons']} lessons", f"{'':31}reward  accuracy  cost m$  seconds  second rounds"]
    for arm, means in comparison["arms"].items():
        figures = f"{means['reward']:.3f}     {means['right']:.3f}  {1000 * means['usd']:7.3f}  {means['seconds']:7.2f}"
        lines.append(f"{arm:31}{figures}  {means['again']:13.0%}")
    advantages = []
    for name, advantage in comparison["ahead"].items():
        advantages.append(f"{name} {advantage.value:+.3f} [{advantage.low:+.3f}, {advantage.high:+.3f}]")
    return "\n".join([*lines, f"two rounds are ahead of the checkpoint: {', '.join(advantages)}"])


def read_checkpoint(folder: Path) -> tuple[Recipe, Weights, Mapping[str, Tensor]]:
    """Read the recipe, the reward weights and the model of a training run or of an export; the recipe says that what
    follows starts from that model."""
    try:
        card = json.loads((folder / "card.json").read_text())
        if (folder / "model.pt").is_file():
            weights = torch.load(folder / "model.pt", weights_only=True)
        else:
            weights = resolve_name("app.lab.export").load_conductor(folder).weights
    except OSError as error:
        raise ConfigInvalid([f"--from: {error.filename}: {error.strerror}; `baton train` leaves one"]) from None
    return Recipe(**{**card["recipe"], "start": card["model_sha256"]}), Weights(**card["weights"]), weights


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
    comparisons = train(order, trainer, say)
    paragraphs = [f"seed {recipe.seed}. {CAVEAT}"]
    for split, comparison in comparisons.items():
        paragraphs.append(format_comparison(split, comparison))
    (order.out / "report.txt").write_text("\n\n".join(paragraphs) + "\n")
    for table in paragraphs[1:]:
        say(f"\n{table}")
    write_card(order.out, _card(order, trainer, comparisons))


def _card(order: Order, trainer: Rounds, comparisons: Mapping[Split, dict[str, Any]]) -> dict[str, Any]:
    """Return the run's card."""
    tables = {}
    for split, comparison in comparisons.items():
        ahead = {name: msgspec.to_builtins(advantage) for name, advantage in comparison["ahead"].items()}
        tables[split] = {**comparison, "ahead": ahead}
    return {
        "caveat": CAVEAT,
        "backend": "builtin",
        "rounds": 2,
        "from": order.recipe.start,
        "recipe": asdict(order.recipe),
        "weights": asdict(order.weights),
        "discount": DISCOUNT,
        "world": world.VERSION,
        "reward": reward.VERSION,
        "model_sha256": hashlib.sha256((order.out / "model.pt").read_bytes()).hexdigest(),
        "plans_carried_out": trainer.executed,
        "tables": tables,
    }
