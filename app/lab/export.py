"""A trained conductor as a folder that Hugging Face's libraries and vLLM read, with its manifest.

It is written as a Llama whose attention has biases, the output's being zero: the same sums as Qwen2's. Under its own
name Hugging Face's library forces Qwen2's tokenizer upon it, whatever the folder says, and the words would be lost.
What is measured and what the golden plans are comes from the very weights that are written, rounded as they are.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.conductor import compact
from app.errors import ConfigInvalid
from app.lab import manifest, prompt, reward, tensors, tokenizer, training_record, world
from app.lab.evaluate import exam
from app.lab.lessons import SPLITS, Lesson
from app.lab.manifest import Golden, Manifest
from app.lab.outcome import outcome
from app.lab.plan_grammar import FORMS, Form
from app.lab.plans import SLOTS, STEPS, Plan
from app.lab.train_loop import Recipe, greedy, shape_of
from app.lab.train_model import CONTEXT, NORM, Conductor, Shape, Tensor
from app.lab.world import Setting, Weights

TASKS, TASKS_SEED = 1_000, 2
"""Of each split, drawn apart from those of the training's own tables."""
GOLDEN, GOLDEN_SEED = 24, 3
SERVED = "served"
STYLE = {"roles": "compact", "words": "worded"}
"""The prompt that a form is asked with, by the name that the service has for it."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training run has left: its recipe and its chosen weights."""

    recipe: Recipe
    weighing: Weights
    weights: Mapping[str, Tensor]
    card: str
    """The card of the training, which goes with the weights."""


def trained(folder: Path) -> Trained:
    """What lies in the folder of a training run."""
    try:
        words = (folder / "card.json").read_text()
        weights = torch.load(folder / "model.pt", weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise ConfigInvalid([f"{error.filename}: there is no such file; `baton train` leaves it at its end"]) from None
    card = json.loads(words)
    return Trained(Recipe(**card["recipe"]), Weights(**card["weights"]), weights, words)


def export(source: Trained, folder: Path, title: str) -> Manifest:
    """The whole model in bfloat16; the folder must be new or empty."""
    _empty(folder)
    shape = shape_of(source.recipe)
    shipped = {name: tensor.to(torch.bfloat16) for name, tensor in ({**source.weights, **_no_biases(shape)}).items()}
    place = folder / manifest.WEIGHTS["model"]
    tensors.write(place, shipped)
    (folder / "card.json").write_text(source.card)
    form = FORMS[source.recipe.form]
    ends = {"eos_token_id": prompt.pad(form), "pad_token_id": prompt.pad(form)}
    _write(folder, "config.json", _config(shape) | ends)
    _write(folder, "generation_config.json", ends)
    _write(folder, "tokenizer.json", tokenizer.tokenizer(form))
    _write(folder, "tokenizer_config.json", tokenizer.tokenizer_config(CONTEXT))
    name = manifest.version(title, manifest.sha256(place.read_bytes()))
    return _described(folder, source, loaded(folder), tokens=folder, kind="model", name=name, base=name)


def leave(out: Path) -> Manifest:
    """`served` in the folder of a training run, made anew: what the run has come to, ready to be served."""
    shutil.rmtree(out / SERVED, ignore_errors=True)
    return export(trained(out), out / SERVED, manifest.titled(out))


def export_adapter(source: Trained, base: Path, folder: Path, title: str, rank: int) -> Manifest:
    """What training has changed in the projections, as a LoRA adapter of an exported model; the folder must be new or
    empty. A change of more than this rank is cut to it, and a change of other weights is left out: what is measured,
    and what the golden plans are, is the base under this adapter.
    """
    card, _ = manifest.read(base)
    if card.kind != "model":
        raise ConfigInvalid([f"{base}: is an adapter itself; name the folder of its base"])
    under = loaded(base)
    if under.shape != shape_of(source.recipe):
        raise ConfigInvalid([f"{base}: is a model of another size than what was trained"])
    _empty(folder)
    parts, merged = _low_rank(under.weights, source.weights, rank)
    place = folder / manifest.WEIGHTS["adapter"]
    tensors.write(place, parts)
    _write(folder, "adapter_config.json", _adapter_config(card.name, rank))
    (folder / "card.json").write_text(source.card)
    conductor = Conductor(under.shape, {**under.weights, **merged}, under.form)
    name = manifest.version(title, manifest.sha256(place.read_bytes()))
    return _described(folder, source, conductor, tokens=base, kind="adapter", name=name, base=card.name)


def _low_rank(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], Any]:
    """The adapter's two factors for each projection, by peft's names, and the projections under them."""
    parts, merged = {}, {}
    for name in base:
        if not name.endswith("_proj.weight"):
            continue
        left, sizes, right = torch.linalg.svd(tuned[name].float() - base[name])
        kept = min(rank, len(sizes))
        roots = sizes[:kept].sqrt()
        up, down = torch.zeros(base[name].shape[0], rank), torch.zeros(rank, base[name].shape[1])
        up[:, :kept], down[:kept] = left[:, :kept] * roots, roots[:, None] * right[:kept]
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


def loaded(folder: Path) -> Conductor:
    """The model of an exported folder, in full precision, as the trainer runs it; its form is told by the card."""
    recipe = Recipe(**json.loads((folder / "card.json").read_text())["recipe"])
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        config["vocab_size"],
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["intermediate_size"],
        config["rope_parameters"]["rope_theta"],
    )
    weights = tensors.read(folder / manifest.WEIGHTS["model"])
    kept = weights.keys() - _no_biases(shape).keys()
    return Conductor(shape, {name: weights[name].float() for name in sorted(kept)}, FORMS[recipe.form])


def _no_biases(shape: Shape) -> dict[str, Tensor]:
    """What a Llama has and Qwen2 has not."""
    return {f"model.layers.{n}.self_attn.o_proj.bias": torch.zeros(shape.hidden) for n in range(shape.layers)}


def _described(folder: Path, source: Trained, conductor: Conductor, *, tokens: Path, **facts: Any) -> Manifest:
    """Golden prompts and manifest, beside files that are complete; the tokenizer is in the folder `tokens`."""
    return manifest.write(
        folder,
        _golden(conductor),
        tokenizer_sha256=manifest.tokenizer_sha256(tokens),
        prompt=STYLE[source.recipe.form],
        template=compact.TEMPLATE,
        grammar="xgrammar",
        steps=STEPS,
        workers=SLOTS,
        reward=reward.VERSION,
        world=world.VERSION,
        commit=training_record.commit(),
        evaluation={split: _measured(conductor, split, source.weighing) for split in SPLITS},
        **facts,
    )


def _golden(conductor: Conductor) -> list[Golden]:
    """Half of them over the standard pool, half over unseen ones; the plans are the likeliest."""
    lessons = exam("held-out tasks", GOLDEN // 2, GOLDEN_SEED) + exam("random pools", GOLDEN // 2, GOLDEN_SEED)
    plans = greedy(conductor, lessons)
    return [
        _expected(one, prompt.ordinals(plan, one.order), conductor.form)
        for one, plan in zip(lessons, plans, strict=True)
    ]


def _expected(one: Lesson, plan: Plan, form: Form) -> Golden:
    asked = prompt.as_text(one.problem.text, one.pool, one.order)
    return Golden(
        messages=[{"role": "user", "content": asked}],
        workers=len(one.pool),
        steps=STEPS,
        tokens=one.prompt(form=form),
        plan=form.text(form.encode(plan)),
    )


def _measured(conductor: Conductor, split: Any, weighing: Weights) -> dict[str, float]:
    lessons = exam(split, TASKS, TASKS_SEED)
    found = [
        outcome(plan, one.problem.kind, Setting(one.pool, weighing))
        for one, plan in zip(lessons, greedy(conductor, lessons), strict=True)
    ]
    means = {name: sum(getattr(one, name) for one in found) / TASKS for name in ("reward", "right", "usd")}
    return {"tasks": TASKS, "seed": TASKS_SEED, **{name: round(value, 6) for name, value in means.items()}}


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": False,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": NORM,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "torch_dtype": "bfloat16",
    }


def _empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigInvalid([f"{folder}: is not empty; name a new folder, or clear it"])
    folder.mkdir(parents=True, exist_ok=True)


def _write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
