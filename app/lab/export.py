"""A trained conductor as a folder that Hugging Face's libraries and vLLM read, with its manifest.

The evaluation and the golden plans are those of the very weights that are written, which are rounded to bfloat16.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors.torch import save_file

from app.conductor import compact
from app.errors import ConfigInvalid
from app.lab import manifest, prompt, reward, tokenizer, training_record, world
from app.lab.evaluate import draw_exam, exact_outcomes, mean_of
from app.lab.lessons import SPLITS, Lesson, Split
from app.lab.manifest import GoldenPrompt, Manifest
from app.lab.plan_grammar import FORMS, Form
from app.lab.plans import SLOTS, STEPS, Plan
from app.lab.train_loop import Recipe, greedy, new_conductor
from app.lab.train_model import CONTEXT, Conductor, Tensor
from app.lab.world import Weights

TASKS, TASKS_SEED = 1_000, 2
"""The number of tasks of each split, drawn separately from those of the training's own tables."""
GOLDEN, GOLDEN_SEED = 24, 3
SERVED = "served"
STYLE = {"roles": "compact", "words": "worded"}
"""The prompt that a form is asked with, by the name that the service has for it."""


class TrainingResult(Struct, frozen=True):
    """The result of a training run: its recipe and its chosen weights."""

    recipe: Recipe
    weighing: Weights
    weights: Mapping[str, Tensor]
    card: str
    """The card of the training, which goes with the weights."""


def read_training(folder: Path) -> TrainingResult:
    """Read the folder of a training run. Raises `ConfigInvalid` for a folder without one."""
    try:
        words = (folder / "card.json").read_text()
        weights = torch.load(folder / "model.pt", weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise ConfigInvalid([f"{error.filename}: there is no such file; `baton train` leaves it at its end"]) from None
    card = json.loads(words)
    return TrainingResult(Recipe(**card["recipe"]), Weights(**card["weights"]), weights, words)


def export(source: TrainingResult, folder: Path, title: str) -> Manifest:
    """Export the whole model in bfloat16; the folder must be new or empty."""
    _make_empty(folder)
    conductor = new_conductor(source.recipe)
    conductor.load(source.weights)
    conductor.model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.tokenizer(conductor.form, CONTEXT).save_pretrained(folder)
    (folder / "card.json").write_text(source.card)
    place = folder / manifest.WEIGHTS["model"]
    name = manifest.version(title, manifest.sha256(place.read_bytes()))
    return _write_manifest(folder, source, load_conductor(folder), tokens=folder, kind="model", name=name, base=name)


def export_beside(out: Path) -> Manifest:
    """Export a finished training run to `served` in its folder, in place of what was there."""
    shutil.rmtree(out / SERVED, ignore_errors=True)
    return export(read_training(out), out / SERVED, manifest.title_of(out))


def export_adapter(source: TrainingResult, base: Path, folder: Path, title: str, rank: int) -> Manifest:
    """Write the change of the projections by training as a LoRA adapter of an exported model; the folder must be new or
    empty. A change of more than this rank is cut to it, and a change of other weights is left out: what is measured,
    and what the golden plans are, is the base under this adapter.
    """
    card, _ = manifest.read(base)
    if card.kind != "model":
        raise ConfigInvalid([f"{base}: is an adapter itself; name the folder of its base"])
    under = load_conductor(base)
    if not _has_sizes_of(under, source.weights):
        raise ConfigInvalid([f"{base}: is a model of another size than what was trained"])
    _make_empty(folder)
    parts, merged = _low_rank(under.weights, source.weights, rank)
    place = folder / manifest.WEIGHTS["adapter"]
    save_file(parts, place, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_adapter_config(card.name, rank), indent=1) + "\n")
    (folder / "card.json").write_text(source.card)
    under.load({**under.weights, **merged})
    name = manifest.version(title, manifest.sha256(place.read_bytes()))
    return _write_manifest(folder, source, under, tokens=base, kind="adapter", name=name, base=card.name)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _low_rank(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], Any]:
    """Return the adapter's two factors for each projection, by peft's names, and the projections under them."""
    parts, merged = {}, {}
    for name in base:
        if not name.endswith("_proj.weight"):
            continue
        u, s, vh = torch.linalg.svd(tuned[name].float() - base[name])
        count = min(rank, len(s))
        roots = s[:count].sqrt()
        up, down = torch.zeros(base[name].shape[0], rank), torch.zeros(rank, base[name].shape[1])
        up[:, :count], down[:count] = u[:, :count] * roots, roots[:, None] * vh[:count]
        peft = f"base_model.model.{name.removesuffix('.weight')}"
        for half, factor in (("lora_A", down), ("lora_B", up)):
            parts[f"{peft}.{half}.weight"] = factor.to(torch.bfloat16)
        merged[name] = base[name] + up.to(torch.bfloat16).float() @ down.to(torch.bfloat16).float()
    return parts, merged


def _adapter_config(base: str, rank: int) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
        "inference_mode": True,
    }


def load_conductor(folder: Path) -> Conductor:
    """Return the model of an exported folder, in full precision; its card names the form in which it writes."""
    recipe = Recipe(**json.loads((folder / "card.json").read_text())["recipe"])
    return Conductor.from_folder(folder, FORMS[recipe.form])


def _has_sizes_of(conductor: Conductor, weights: Mapping[str, Tensor]) -> bool:
    """Return True if these are weights of a model of this size."""
    own = conductor.weights
    if own.keys() != weights.keys():
        return False
    return all([own[name].shape == weights[name].shape for name in own])


def _write_manifest(
    folder: Path, source: TrainingResult, conductor: Conductor, *, tokens: Path, **facts: Any
) -> Manifest:
    """Write golden prompts and manifest next to files that are complete; the tokenizer is in the folder `tokens`."""
    return manifest.write(
        folder,
        golden_prompts(conductor),
        tokenizer_sha256=manifest.tokenizer_sha256(tokens),
        prompt=STYLE[source.recipe.form],
        template=compact.TEMPLATE,
        grammar="xgrammar",
        steps=STEPS,
        workers=SLOTS,
        reward=reward.VERSION,
        world=world.VERSION,
        commit=training_record.commit(),
        evaluation={split: evaluate_split(conductor, split, source.weighing) for split in SPLITS},
        **facts,
    )


def golden_prompts(conductor: Conductor) -> list[GoldenPrompt]:
    """Return prompts with this conductor's likeliest plans. Half of them are over the standard pool, half over unseen
    ones."""
    lessons = draw_exam("held-out tasks", GOLDEN // 2, GOLDEN_SEED)
    lessons += draw_exam("random pools", GOLDEN // 2, GOLDEN_SEED)
    golden = []
    for lesson, plan in zip(lessons, greedy(conductor, lessons), strict=True):
        golden.append(_golden_prompt(lesson, prompt.over_ordinals(plan, lesson.order), conductor.form))
    return golden


def _golden_prompt(lesson: Lesson, plan: Plan, form: Form) -> GoldenPrompt:
    text = prompt.as_text(lesson.problem.text, lesson.pool, lesson.order)
    return GoldenPrompt(
        messages=[{"role": "user", "content": text}],
        workers=len(lesson.pool),
        steps=STEPS,
        tokens=lesson.prompt(form=form),
        plan=form.text(form.encode(plan)),
    )


def evaluate_split(conductor: Conductor, split: Split, weighing: Weights) -> dict[str, float]:
    """Return the mean reward, accuracy and dollars a task of the conductor's likeliest plans for a split's tasks."""
    lessons = draw_exam(split, TASKS, TASKS_SEED)
    outcomes = exact_outcomes(lessons, greedy(conductor, lessons), weighing)
    means = {name: round(mean_of(outcomes, name), 6) for name in ("reward", "right", "usd")}
    return {"tasks": TASKS, "seed": TASKS_SEED, **means}


def _make_empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigInvalid([f"{folder}: is not empty; name a new folder, or clear it"])
    folder.mkdir(parents=True, exist_ok=True)
