"""`python -m app.lab.world2.words --out DIR` trains a conductor of words for world 2 and leaves it as vLLM serves it.

It reads the service's own prompt of cards and writes a plan as JSON with subtasks in words. It imitates what a policy
that learned from one-sample verdicts believes to be best (`words_lessons.py`). It needs torch, transformers and
tokenizers (`pip install 'baton[train,lab]'`), and uses a GPU if torch finds one. The recipe `small` is for a CPU,
`large` for a GPU beside several cores (`--processes`), which write its lessons.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import asdict, replace

from app.conductor import cards
from app.lab import manifest, training_record
from app.lab.manifest import GoldenPrompt, Manifest
from app.lab.world2.constants import FROZEN, VERSION
from app.lab.world2.outcome import Rewards, expected_reward
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import MOST_STEPS
from app.lab.world2.tasks import Task, draw_tasks
from app.lab.world2.words_lessons import Lesson, Question, Teacher, invent_worker, parse_plan, plan_text, prompt
from app.lab.world2.words_model import Batches, Sizes, TrainingRun, WordsConductor, load_batches, train_tokenizer
from app.lab.world2.workers import LARGEST, Pool, draw_pool

TASKS_OF_LESSON = 8
"""Tasks of a lesson, which share its cards."""
INVENTED_CARDS = 2_000
"""Invented workers whose cards the tokenizer learns from."""
GOLDEN_PROMPTS = 12
STEPS_BETWEEN_LINES = 50
"""Steps between two lines of the curve."""
EXAMS = 10
"""How often the conductor sits its exam while it is taught."""


class Recipe(Struct, frozen=True):
    """The settings of a training: with the code and the world, all that it depends on."""

    seed: int = 0
    verdicts: int = 16_000
    """Executions that the teacher has learned from."""
    lessons: int = 1_500
    steps: int = 750
    judged: int = 200
    """Tasks of each split that the result is judged by, and about so many of the exam that training sits."""
    sizes: Sizes = Sizes()


RECIPES: Mapping[str, Recipe] = {
    "small": Recipe(),
    "large": Recipe(
        lessons=16_000, steps=10_000, sizes=Sizes(hidden=256, layers=5, heads=4, pools=64, rate=1e-3, rising=200)
    ),
}  # fmt: skip


class Resources(Struct, frozen=True):
    """These are the means that a training may use. Its result does not depend on them, unless `seconds` end it."""

    processes: int = 1
    seconds: float = float("inf")
    """After so long teaching ends, and the learning rate falls accordingly, whatever the number of steps."""


class Evaluation(Struct, frozen=True):
    """Means over tasks: of valid plans of the catalogue, and of the exact expectations of what these come to.

    A plan that is none of the catalogue counts as a wrong answer that costs nothing.
    """

    valid: float
    reward: float
    right: float
    usd: float
    tokens: float
    plans: int
    """Different plans, by shape alone."""


def main() -> int:
    """Train, judge and export a conductor of words for world 2."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(prog="python -m app.lab.world2.words", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="a new folder")
    parser.add_argument(
        "--plan", type=Path, metavar="FOLDER",
        help="train nothing: read pairs of cards and question as JSON, and write this folder's likeliest plans",
    )  # fmt: skip
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="small")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--verdicts", type=int, help="executions that the teacher learns from")
    parser.add_argument("--lessons", type=int, help="pools of invented workers")
    parser.add_argument("--steps", type=int, help="steps of training")
    parser.add_argument("--judged", type=int, help="tasks of each split to judge the result by")
    parser.add_argument("--processes", type=int, default=1, help="that write lessons; the result is the same")
    parser.add_argument("--seconds", type=float, default=Resources().seconds, help="the most that teaching may take")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plan:
        pairs = [(str(cards_text), str(question)) for cards_text, question in json.load(sys.stdin)]
        json.dump(WordsConductor.from_folder(args.plan).likeliest_plans(pairs), sys.stdout)
        return 0
    if not args.out:
        parser.error("name a new folder with --out")
    changed = {name: getattr(args, name) for name in ("verdicts", "lessons", "steps", "judged")}
    overrides = {name: value for name, value in changed.items() if value is not None}
    recipe = replace(RECIPES[args.recipe], seed=args.seed, **overrides)
    if recipe.lessons < recipe.sizes.pools:
        parser.error(f"a step takes {recipe.sizes.pools} lessons: --lessons must be at least that")
    card = train(recipe, args.out, Resources(args.processes, args.seconds))
    print(json.dumps({"name": card.name, "evaluation": card.evaluation}, indent=1))
    return 0


def train(recipe: Recipe, out: Path, means: Resources) -> Manifest:
    """Train a conductor and leave it in the folder, which must be new, with its manifest. The weights
    that did best in the exam are kept, from each exam on with a manifest, in case that training is broken off."""
    out.mkdir(parents=True)
    began, seed = time.monotonic(), f"world-2|words|{recipe.seed}"
    teacher = Teacher(recipe.seed, recipe.verdicts)
    _say("the teacher has learned")
    exam = teacher.exam(f"{seed}|exam", math.ceil(recipe.judged / TASKS_OF_LESSON), TASKS_OF_LESSON)
    lessons = teacher.lessons(seed, recipe.lessons, TASKS_OF_LESSON, means.processes)
    _say(f"there are {TASKS_OF_LESSON * len(lessons):,} tasks to learn from")
    words = WordsConductor.with_random_weights(
        recipe.sizes, train_tokenizer(_texts(lessons, Random(seed))), teacher.families, recipe.seed
    )
    batches = load_batches(Batches(words, lessons, recipe.sizes, recipe.steps, recipe.seed), means.processes)
    run = TrainingRun(recipe.sizes, recipe.steps, means.seconds)
    rows, best = ["step,plan,readers,worth"], -math.inf
    for step, (plan, readers) in enumerate(run.train(words, batches), 1):
        worth = ""
        if run.is_exam_due(EXAMS):
            mark = exam_mark(words, exam)
            worth = f"{mark:.4f}"
            if mark > best:
                best = mark
                words.save(out)
                write_manifest(words, out, recipe, {"exam": mark})
        rows.append(f"{step},{plan:.4f},{readers:.4f},{worth}")
        if step % STEPS_BETWEEN_LINES == 0 or worth:
            _say(f"step {step} of {recipe.steps}: {plan:.3f} nats a plan, {readers:.3f} of the readers; {worth}")
    (out / "curve.csv").write_text("\n".join(rows) + "\n")
    card = {"recipe": msgspec.to_builtins(recipe), "parameters": words.parameters, "constants": FROZEN}
    card |= {
        "device": str(words.model.device),
        "seconds": round(time.monotonic() - began),
        "software": training_record.software(),
    }
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    exported = WordsConductor.from_folder(out)
    return write_manifest(exported, out, recipe, judge(exported, recipe))


def exam_mark(words: WordsConductor, exam: Sequence[Question]) -> float:
    """Return how much less the teacher believes the likeliest plans to be worth than the best ones, on average."""
    random, prompts, orders = Random(0), [], []
    for question in exam:
        orders.append(random.sample(range(len(question.pool)), len(question.pool)))
        prompts.append((prompt(question.pool, orders[-1]), cards.question(question.text)))
    lost = 0.0
    for text, order, question in zip(words.likeliest_plans(prompts), orders, exam, strict=True):
        plan = parse_plan(text, order)
        earned = question.worth[plan] if plan else 0.0
        lost += max(question.worth.values()) - earned
    return -lost / len(exam)


def judge(words: WordsConductor, recipe: Recipe) -> dict[str, Any]:
    """Return what the conductor comes to on each split."""
    evaluations = {}
    for split, (pools, test_tasks) in draw_splits(recipe.seed, recipe.judged).items():
        evaluations[split] = asdict(evaluate(words, pools, test_tasks))
        _say(f"{split}: {evaluations[split]}")
    return evaluations


def write_manifest(words: WordsConductor, out: Path, recipe: Recipe, evaluation: Mapping[str, Any]) -> Manifest:
    """Write the manifest and the golden prompts of a conductor whose weights are in the folder."""
    return manifest.write(
        out,
        golden_prompts(words, recipe.seed),
        name=manifest.version(manifest.title_of(out), manifest.weights_sha256(out, "model")),
        kind="model",
        base=manifest.version(manifest.title_of(out), manifest.weights_sha256(out, "model")),
        tokenizer_sha256=manifest.tokenizer_sha256(out),
        prompt="cards",
        template=cards.TEMPLATE,
        grammar="xgrammar",
        steps=MOST_STEPS,
        workers=LARGEST,
        reward="world-2",
        world=VERSION,
        commit=training_record.commit(),
        evaluation=evaluation,
    )


def draw_splits(seed: int, count: int) -> dict[str, tuple[list[Pool], list[Task]]]:
    """Return pools and tasks that training has not met; each task is posed over one of the pools."""
    random = Random(f"world-2|words|judged|{seed}")
    pools = [draw_pool(random) for _ in range(8)]
    unseen = [draw_pool(random, unseen_workers=True) for _ in range(8)]
    return {
        "fresh tasks": (pools, draw_tasks("fresh", f"words|{seed}", count)),
        "unseen phrasings": (pools, draw_tasks("phrasings", f"words|{seed}", count)),
        "unseen families": (pools, draw_tasks("families", f"words|{seed}", count)),
        "unseen workers": (unseen, draw_tasks("fresh", f"words|{seed}", count)),
    }


def evaluate(words: WordsConductor, pools: Sequence[Pool], test_tasks: Sequence[Task]) -> Evaluation:
    """Return what the likeliest plans for these tasks come to."""
    random = Random(0)
    pool_of_task = [pools[place % len(pools)] for place in range(len(test_tasks))]
    orders = [random.sample(range(len(workers)), len(workers)) for workers in pool_of_task]
    prompts = []
    for workers, order, task in zip(pool_of_task, orders, test_tasks, strict=True):
        prompts.append((prompt(workers, order), cards.question(task.text)))
    total, shapes = [0.0] * 5, set()
    rewards = {id(workers): Rewards(workers) for workers in pools}
    texts = words.likeliest_plans(prompts)
    for text, workers, order, task in zip(texts, pool_of_task, orders, test_tasks, strict=True):
        plan = parse_plan(text, order)
        if plan is None:
            continue
        shapes.add(plan.shape)
        exact = rewards[id(workers)]
        right_chance = float(exact.right(plan.shape, task).mean(axis=0)[plan.workers])
        usd = float(exact.bill(plan.shape, size_of(task))[0][plan.workers])
        tokens_of_plan = float(exact.tokens(plan.shape, size_of(task))[plan.workers])
        for place, value in enumerate((1.0, expected_reward(plan, task, exact), right_chance, usd, tokens_of_plan)):
            total[place] += value / len(test_tasks)
    valid, reward, right, usd, tokens = (round(value, 6) for value in total)
    return Evaluation(valid, reward, right, usd, tokens, len(shapes))


def golden_prompts(words: WordsConductor, seed: int) -> list[GoldenPrompt]:
    """Return prompts of unseen workers with this conductor's likeliest plans."""
    random = Random(f"world-2|words|golden|{seed}")
    golden = []
    for task in draw_tasks("fresh", f"words golden|{seed}", GOLDEN_PROMPTS):
        workers = draw_pool(random, unseen_workers=True)
        cards_text, question = prompt(workers, range(len(workers))), cards.question(task.text)
        messages = [{"role": "system", "content": cards_text}, {"role": "user", "content": question}]
        (plan,) = words.likeliest_plans([(cards_text, question)])
        golden.append(GoldenPrompt(messages=messages, workers=len(workers), steps=MOST_STEPS, plan=plan))
    return golden


def _texts(lessons: Sequence[Lesson], random: Random) -> list[str]:
    """Return the texts that the tokenizer learns from."""
    texts = [prompt((invent_worker(random),), [0]) for _ in range(INVENTED_CARDS)]
    for lesson in lessons:
        order = range(len(lesson.pool))
        texts.append(prompt(lesson.pool, order))
        for task in lesson.tasks:
            texts += [task.text, plan_text(task.plans[0], order)]
    return texts


def _say(line: str) -> None:
    print(f"{time.process_time():6.0f} CPU s  {line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
