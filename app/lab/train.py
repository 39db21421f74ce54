"""`baton train --backend builtin`: one training run from scratch, its curve, its checkpoint, its card, its comparison.

Everything lands in one folder: `checkpoint.pt` (to go on from), `model.pt`, `curve.csv`, `curve.png` where matplotlib
is installed, `card.json` with recipe, seeds, hashes and pool, and `report.txt` with the tables. The best checkpoint is
chosen on validation lessons, which no table uses: half over the standard pool, half over pools of training's own.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from typing import Any

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import asdict, replace

from app.errors import ConfigInvalid
from app.lab import plan_samples, prompt, reward, world
from app.lab.baselines import FIXED, OPTIMUM, plans_of_arm, search_arms
from app.lab.evaluate import Table, compare, draw_exam, exact_outcomes, format_table, mean_of
from app.lab.journal_imitation import JournaledExample, digest_of, examples_for
from app.lab.lessons import SPLITS, Lesson, draw_lesson
from app.lab.plan_grammar import FORMS, WORDS, Form
from app.lab.plans import Plan
from app.lab.rollouts import Rollout
from app.lab.train_imitation import Regressor
from app.lab.train_loop import RECIPES, Recipe, Trainer, greedy
from app.lab.training_record import Axes, software, write_curve
from app.lab.world import Setting, Weights, profiles, standard_pool
from app.providers.rehearsal.task_families import FAMILIES

EVERY = 50
"""Steps between validations and checkpoints."""
VALIDATION = 240
HELD_OUT = 1_000
CAVEAT = "Simulated workers: this shows that the training loop learns, not that real workers improve."


class Order(Struct, frozen=True):
    """A training run: what to train, and the folder for its results."""

    out: Path
    recipe: Recipe
    weights: Weights
    lessons: int = HELD_OUT
    """Lessons of each split's comparison."""
    threads: int = 1
    runs: Sequence[JournaledExample] = ()
    """Journaled ones, for the warm start to imitate."""


def train(order: Order, say: Callable[[str], None]) -> tuple[Table, ...]:
    """Train, or go on from the folder's checkpoint, and compare."""
    torch.set_num_threads(order.threads)
    order.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(order.recipe, order.weights)
    if order.runs:
        trainer = Regressor(order.recipe, order.weights, order.runs)
    rows = restore_checkpoint(order, trainer, say)
    standard, pools = draw_exam("held-out tasks", VALIDATION, -1), _draw_pool_lessons(VALIDATION)
    while trainer.step < trainer.total:
        measured = trainer.advance()
        if trainer.step % EVERY == 0 or trainer.step == trainer.total:
            halves = []
            for lessons in (standard, pools):
                halves.append(_validation_means(lessons, greedy(trainer.averaged, lessons), order.weights))
            row = {"step": trainer.step, "plans": trainer.executed, **_curve_row(*halves)}
            rows.append(row | {name: round(value, 4) for name, value in measured.items()})
            save_checkpoint(order, trainer, rows)
            say(format_row(rows[-1]))
    load_best_weights(order, trainer)
    return _compare_on_splits(order, trainer, rows, say)


def format_row(row: Mapping[str, Any]) -> str:
    """Return a row of the curve as a line: the names of its figures with their values."""
    return " ".join([f"{name} {value}" for name, value in row.items()])


def _draw_pool_lessons(count: int) -> list[Lesson]:
    """Draw the lessons of validation over random pools, such as training meets."""
    random = Random("validation")
    return [draw_lesson(random, "train", standard=0.0) for _ in range(count)]


def _validation_means(lessons: list[Lesson], chosen: list[Plan], weights: Weights) -> dict[str, float]:
    """Return the means of these plans over the lessons, and the number of different plans."""
    outcomes = exact_outcomes(lessons, chosen, weights)
    return {
        "reward": mean_of(outcomes, "reward"),
        "accuracy": mean_of(outcomes, "right"),
        "steps": sum(map(len, chosen)) / len(chosen),
        "different": len(set(chosen)),
    }


def _curve_row(standard: dict[str, float], pools: dict[str, float]) -> dict[str, float]:
    """Return the columns of the curve: the means of both halves, by which weights are chosen, and each half's
    reward."""
    return {
        "validation": round((standard["reward"] + pools["reward"]) / 2, 4),
        "standard": round(standard["reward"], 4),
        "pools": round(pools["reward"], 4),
        "accuracy": round((standard["accuracy"] + pools["accuracy"]) / 2, 4),
        "steps": round((standard["steps"] + pools["steps"]) / 2, 4),
        "different": standard["different"],
    }


def restore_checkpoint(order: Order, trainer: Trainer, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Restore the trainer from the folder's checkpoint, if there is one, and return the checkpoint's rows."""
    place = order.out / "checkpoint.pt"
    if not place.exists():
        return []
    saved = torch.load(place, weights_only=True)
    trainer.restore(saved["trainer"])
    say(f"going on from step {trainer.step} of {trainer.total}")
    return list(saved["rows"])


def save_checkpoint(order: Order, trainer: Trainer, rows: list[dict[str, Any]]) -> None:
    """Save the state, and the weights apart if no validation was better. Each file is written aside first, so that a
    kill is harmless."""
    best = max([row["validation"] for row in rows])
    if rows[-1]["validation"] >= best:
        _write_aside(order.out / "model.pt", trainer.state()["averaged"])
    _write_aside(order.out / "checkpoint.pt", {"trainer": trainer.state(), "rows": rows})


def _write_aside(place: Path, value: Any) -> None:
    aside = place.with_suffix(".new")
    torch.save(value, aside)
    aside.replace(place)


def load_best_weights(order: Order, trainer: Trainer) -> None:
    """Load the weights of the best validation."""
    trainer.averaged.load(torch.load(order.out / "model.pt", weights_only=True))


def _compare_on_splits(
    order: Order, trainer: Trainer, rows: list[dict[str, Any]], say: Callable[[str], None]
) -> tuple[Table, ...]:
    """Compare the trained conductor with the baselines on every split, and write curve, card and report."""
    tables: list[Table] = []
    samples: list[tuple[Lesson, Plan]] = []
    for split in SPLITS:
        lessons = draw_exam(split, order.lessons, 1)
        chosen = greedy(trainer.averaged, lessons)
        samples += zip(lessons, chosen, strict=True)
        tables.append(compare(split, lessons, chosen, order.weights, order.recipe.seed, trainer.form))
        say(f"\n{format_table(tables[-1])}")
    _write_curve(order, trainer.form, rows, draw_exam("held-out tasks", VALIDATION, -1))
    (order.out / "card.json").write_text(json.dumps(_card(order, trainer, tables), indent=1) + "\n")
    parts = [f"seed {order.recipe.seed}. {CAVEAT}", *map(format_table, tables)]
    if trainer.form is WORDS:
        parts.append(plan_samples.format_samples(trainer.form, samples))
        say(f"\n{parts[-1]}")
    (order.out / "report.txt").write_text("\n\n".join(parts) + "\n")
    return tuple(tables)


def _write_curve(order: Order, form: Form, rows: list[dict[str, Any]], validation: list[Lesson]) -> None:
    """Write the curve of both halves of the validation, beside the rewards of the baselines."""

    def add_baselines(axes: Axes) -> None:
        for arm in (OPTIMUM, FIXED):
            chosen = plans_of_arm(arm, validation, order.weights, 0, form)
            mean = _validation_means(validation, chosen, order.weights)["reward"]
            axes.axhline(mean, linestyle="--", color="grey")
            axes.annotate(arm, (0, mean), va="bottom")
        axes.axvline(order.recipe.drill_steps + order.recipe.warm_steps, linestyle=":", color="grey")
        axes.set_xlabel("step (dotted: end of the warm start)")
        axes.set_ylabel("reward on validation tasks")

    labels = {half: f"trained conductor, {half}" for half in ("standard", "pools")}
    write_curve(order.out, rows, labels, annotate=add_baselines)


def _card(order: Order, trainer: Trainer, tables: list[Table]) -> dict[str, Any]:
    """Return the run's card."""
    model = (order.out / "model.pt").read_bytes()
    tasks_sha256 = {}
    for split in SPLITS:
        lessons = draw_exam(split, order.lessons, 1)
        tasks_sha256[split] = hashlib.sha256(repr(lessons).encode()).hexdigest()
    families = dict.fromkeys([family.name for family in FAMILIES], "trained")
    for family in FAMILIES:
        if family.held_out:
            families[family.name] = "held out"
    return {
        "caveat": CAVEAT,
        "backend": "builtin",
        "recipe": asdict(order.recipe),
        "weights": asdict(order.weights),
        "world": world.VERSION,
        "reward": reward.VERSION,
        "model_sha256": hashlib.sha256(model).hexdigest(),
        "parameters": trainer.conductor.model.num_parameters(),
        "vocabulary_sha256": hashlib.sha256("\n".join(prompt.words(trainer.form)).encode()).hexdigest(),
        "tasks_sha256": tasks_sha256,
        "families": families,
        "pool": [msgspec.to_builtins(worker) for worker in standard_pool()],
        "everyone": [msgspec.to_builtins(worker) for worker in profiles().values()],
        "plans_carried_out": trainer.executed,
        "plans_searched": search_arms(Setting(standard_pool(), order.weights)).tried,
        "software": software(),
        "device": str(torch.empty(0).device),
        "tables": [table.as_json() for table in tables],
    }


def _export(out: Path, say: Callable[[str], None]) -> None:
    """Export the folder to be served. The manifest needs Baton's own dependencies, which need not be installed with
    torch."""
    try:
        version = resolve_name("app.lab.export").export_beside(out)
    except ModuleNotFoundError as error:
        say(f"{error.name} is not installed, so there is nothing to serve yet: `baton conductor export {out}` makes it")
        return
    say(f"{version.name} is in {out / 'served'}: `baton conductor serve` takes it as it is")


def _device_context(recipe: Recipe) -> AbstractContextManager[Any]:
    """Return the context of training: on a GPU, if there is one, all new tensors are there, and products of matrices
    are in TF32. Plans by role are small enough for a CPU, and were measured there."""
    if FORMS[recipe.form] is not WORDS or not torch.cuda.is_available():
        return nullcontext()
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda")  # type: ignore[no-any-return]


def run(options: Any, say: Callable[[str], None], rollouts: Sequence[Rollout] = ()) -> bool:
    """Train for the command line; return True if every target that was asked for is met."""
    recipe = replace(RECIPES[options.recipe], seed=options.seed)
    for name in ("drill_steps", "warm_steps", "steps"):
        if getattr(options, name) is not None:
            recipe = replace(recipe, **{name: getattr(options, name)})
    if rollouts and recipe.form != "roles":
        raise ConfigInvalid(["--warm-start: journaled plans are imitated by role; remove --recipe, or the file"])
    weights = Weights()
    if options.dear:
        weights = world.DEAR
    runs: list[JournaledExample] = []
    if rollouts:
        runs = examples_for(rollouts, weights, options.beta, say)
    recipe = replace(recipe, remembered=digest_of(runs))
    order = Order(Path(options.out), recipe, weights, options.lessons, options.threads, runs)
    say(CAVEAT)
    with _device_context(recipe):
        tables = train(order, say)
    _export(order.out, say)
    return not options.gap or tables[0].closed.value >= options.gap
