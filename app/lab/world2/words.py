"""`python -m app.lab.world2.words --out DIR` trains a conductor of words for world 2 and leaves it as vLLM serves it.

It reads the service's own prompt of cards and writes a plan as JSON with subtasks in words. It imitates what a policy
that learned from one-sample verdicts believes to be best (`words_lessons.py`). It needs torch, transformers and
tokenizers (`pip install 'baton[train,lab]'`), one thread, and no GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

from app.conductor import cards
from app.lab import manifest, training_record
from app.lab.manifest import Golden, Manifest
from app.lab.world2.constants import FROZEN, VERSION
from app.lab.world2.outcome import Rewards, expected
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import MOST_STEPS
from app.lab.world2.tasks import Task, tasks
from app.lab.world2.words_lessons import Lesson, Teacher, invented, plan_of, plan_text, prompt, tokens
from app.lab.world2.words_model import Sizes, Words, teach, tokenizer
from app.lab.world2.workers import LARGEST, Pool, pool

TASKS = 8
"""Tasks of a lesson, which share its cards."""
CARDS = 2_000
"""Invented workers whose cards the tokenizer learns from."""
GOLDEN = 12
SAID = 50
"""Steps between two lines of the curve."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a training: with the code and the world, all that it depends on."""

    seed: int = 0
    verdicts: int = 16_000
    """Executions that the teacher has learned from."""
    lessons: int = 1_500
    steps: int = 750
    judged: int = 200
    """Tasks of each split that the result is judged by."""


@dataclass(frozen=True, slots=True)
class Judged:
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
    known = Recipe()
    parser = argparse.ArgumentParser(prog="python -m app.lab.world2.words", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="a new folder")
    parser.add_argument(
        "--plan", type=Path, metavar="FOLDER",
        help="train nothing: read pairs of cards and question as JSON, and write this folder's likeliest plans",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=known.seed)
    parser.add_argument("--verdicts", type=int, default=known.verdicts, help="executions that the teacher learns from")
    parser.add_argument("--lessons", type=int, default=known.lessons, help="pools of invented workers")
    parser.add_argument("--steps", type=int, default=known.steps, help="steps of training")
    parser.add_argument("--judged", type=int, default=known.judged, help="tasks of each split to judge the result by")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.plan:
        pairs = [(str(shown), str(question)) for shown, question in json.load(sys.stdin)]
        json.dump(Words.saved(asked.plan).likeliest(pairs), sys.stdout)
        return 0
    if not asked.out:
        parser.error("name a new folder with --out")
    card = train(Recipe(asked.seed, asked.verdicts, asked.lessons, asked.steps, asked.judged), asked.out)
    print(json.dumps({"name": card.name, "evaluation": card.evaluation}, indent=1))
    return 0


def train(recipe: Recipe, out: Path) -> Manifest:
    """Train a conductor and leave it in the folder, which must be new, with its manifest."""
    out.mkdir(parents=True)
    random = Random(f"world-2|words|{recipe.seed}")
    teacher = Teacher(recipe.seed, recipe.verdicts)
    _say("the teacher has learned")
    lessons = [teacher.lesson(random, TASKS) for _ in range(recipe.lessons)]
    _say(f"there are {TASKS * len(lessons):,} tasks to learn from")
    sizes = Sizes()
    words = Words.fresh(sizes, tokenizer(_texts(lessons, random)), teacher.families, recipe.seed)
    rows = ["step,plan,readers"]
    for step, (plan, readers) in enumerate(teach(words, lessons, sizes, recipe.steps, recipe.seed), 1):
        rows.append(f"{step},{plan:.4f},{readers:.4f}")
        if step % SAID == 0:
            _say(f"step {step} of {recipe.steps}: {plan:.3f} nats a plan, {readers:.3f} of the readers")
    (out / "curve.csv").write_text("\n".join(rows) + "\n")
    words.save(out)
    card = {"recipe": asdict(recipe), "sizes": asdict(sizes), "parameters": words.parameters, "constants": FROZEN}
    (out / "card.json").write_text(json.dumps(card | {"software": training_record.software()}, indent=1) + "\n")
    return described(Words.saved(out), out, recipe)


def described(words: Words, out: Path, recipe: Recipe) -> Manifest:
    """Judge what was exported, and write its manifest and golden prompts."""
    found = {}
    for split, (pools, posed) in splits(recipe.seed, recipe.judged).items():
        found[split] = asdict(judge(words, pools, posed))
        _say(f"{split}: {found[split]}")
    return manifest.write(
        out,
        golden(words, recipe.seed),
        name=manifest.version(manifest.titled(out), manifest.weights_sha256(out, "model")),
        kind="model",
        base=manifest.version(manifest.titled(out), manifest.weights_sha256(out, "model")),
        tokenizer_sha256=manifest.tokenizer_sha256(out),
        prompt="cards",
        template=cards.TEMPLATE,
        grammar="xgrammar",
        steps=MOST_STEPS,
        workers=LARGEST,
        reward="world-2",
        world=VERSION,
        commit=training_record.commit(),
        evaluation=found,
    )


def splits(seed: int, count: int) -> dict[str, tuple[list[Pool], list[Task]]]:
    """Return pools and tasks that training has not met; each task is posed over one of the pools."""
    random = Random(f"world-2|words|judged|{seed}")
    seen = [pool(random) for _ in range(8)]
    unseen = [pool(random, unseen_workers=True) for _ in range(8)]
    return {
        "fresh tasks": (seen, tasks("fresh", f"words|{seed}", count)),
        "unseen phrasings": (seen, tasks("phrasings", f"words|{seed}", count)),
        "unseen families": (seen, tasks("families", f"words|{seed}", count)),
        "unseen workers": (unseen, tasks("fresh", f"words|{seed}", count)),
    }


def judge(words: Words, pools: Sequence[Pool], posed: Sequence[Task]) -> Judged:
    """Return what the likeliest plans for these tasks come to."""
    random = Random(0)
    over = [pools[place % len(pools)] for place in range(len(posed))]
    orders = [random.sample(range(len(one)), len(one)) for one in over]
    asked = [
        (prompt(one, order), cards.question(task.text)) for one, order, task in zip(over, orders, posed, strict=True)
    ]
    total, shapes = [0.0] * 5, set()
    rewards = {id(one): Rewards(one) for one in pools}
    for text, one, order, task in zip(words.likeliest(asked), over, orders, posed, strict=True):
        plan = plan_of(text, order)
        if plan is None:
            continue
        shapes.add(plan.shape)
        known = rewards[id(one)]
        chance = float(known.right(plan.shape, task).mean(axis=0)[plan.workers])
        usd = float(known.bill(plan.shape, size_of(task))[0][plan.workers])
        for place, value in enumerate((1.0, expected(plan, task, known), chance, usd, tokens(plan, task, one))):
            total[place] += value / len(posed)
    valid, reward, right, usd, read = (round(value, 6) for value in total)
    return Judged(valid, reward, right, usd, read, len(shapes))


def golden(words: Words, seed: int) -> list[Golden]:
    """Return prompts of unseen workers with this conductor's likeliest plans."""
    random = Random(f"world-2|words|golden|{seed}")
    found = []
    for task in tasks("fresh", f"words golden|{seed}", GOLDEN):
        one = pool(random, unseen_workers=True)
        shown, question = prompt(one, range(len(one))), cards.question(task.text)
        messages = [{"role": "system", "content": shown}, {"role": "user", "content": question}]
        (plan,) = words.likeliest([(shown, question)])
        found.append(Golden(messages=messages, workers=len(one), steps=MOST_STEPS, plan=plan))
    return found


def _texts(lessons: Sequence[Lesson], random: Random) -> list[str]:
    """The texts that the tokenizer learns from."""
    texts = [prompt((invented(random),), [0]) for _ in range(CARDS)]
    for lesson in lessons:
        order = range(len(lesson.pool))
        texts.append(prompt(lesson.pool, order))
        for posed in lesson.posed:
            texts += [posed.text, plan_text(posed.plans[0], order)]
    return texts


def _say(line: str) -> None:
    print(f"{time.process_time():6.0f} CPU s  {line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
