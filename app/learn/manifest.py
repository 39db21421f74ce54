"""What a trained conductor is, in one file beside its weights: `baton.json`.

Whoever serves it can see what it was made from, and whether what runs fits it: base model, tokenizer, prompt, the
plan's schema. A version's name ends in the beginning of its weights' hash, so that two versions never share one.
`golden.jsonl` has prompts with the tokens that they must come to and the plans that they must lead to.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from app.conductor.styles import STYLES
from app.core.plan import SCHEMA
from app.errors import ConfigInvalid

MANIFEST, GOLDEN = "baton.json", "golden.jsonl"
WEIGHTS: Mapping[str, str] = {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
DIGITS = 12
"""Of a hash, in a name."""


class Record(BaseModel):
    """Exact types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Manifest(Record):
    """One trained conductor."""

    manifest: Literal[1] = 1
    name: str
    """Of this version: a title, `@`, and the beginning of the weights' SHA-256."""
    kind: Literal["model", "adapter"]
    base: str
    """The version that an adapter belongs to; a whole model is its own."""
    tokenizer_sha256: str
    """Over the tokenizer's files, chat template included."""
    schema_version: str
    prompt: str
    template: str
    grammar: Literal["xgrammar", "guidance"]
    """What decodes its plans under the schema; others may not know how its tokens are cut."""
    steps: int
    """The longest plan that it was trained on."""
    workers: int
    """The most workers of a pool."""
    reward: str
    world: str
    commit: str
    evaluation: Mapping[str, Any]
    files: Mapping[str, str]
    """SHA-256 of every other file of the folder."""


class Golden(Record):
    """A prompt, and what is expected of it; None where that is not known."""

    messages: list[dict[str, str]]
    workers: int
    steps: int
    tokens: list[int] | None = None
    plan: str | None = None


def describe(folder: Path, title: str, base: Path | None, golden: Path | None, **facts: Any) -> Manifest:
    """The manifest of weights that were made elsewhere: a whole model, or a LoRA adapter as peft saves it, whose `base`
    is the described folder of its model. Golden prompts come from a file, else from the base without their plans.

    Raises `ConfigInvalid` for what is neither.
    """
    kind: Literal["model", "adapter"] = "adapter" if base is not None else "model"
    if not (folder / WEIGHTS[kind]).is_file():
        raise ConfigInvalid([f"{folder}: has no {WEIGHTS[kind]}; name a folder that has, with or without --base"])
    name = version(title, (folder / WEIGHTS[kind]).read_bytes())
    prompts: list[Golden] = []
    under, tokens = name, folder
    if base is not None:
        card, theirs = read(base)
        _check_adapter(folder)
        prompts = [one.model_copy(update={"plan": None}) for one in theirs]
        under, tokens = card.name, base
        facts |= {"prompt": card.prompt, "grammar": card.grammar, "steps": card.steps, "workers": card.workers}
    if golden is not None:
        prompts = [Golden.model_validate_json(line) for line in golden.read_text().splitlines() if line.strip()]
    facts |= {"template": STYLES[facts["prompt"]].templates[0], "tokenizer_sha256": tokenizer_sha256(tokens)}
    return write(folder, prompts, name=name, kind=kind, base=under, world="", evaluation={}, **facts)


def _check_adapter(folder: Path) -> None:
    try:
        told = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError):
        raise ConfigInvalid([f"{folder}: has no adapter_config.json; peft's save_pretrained writes one"]) from None
    if told.get("peft_type") != "LORA":
        raise ConfigInvalid([f"{folder}: is an adapter of the type {told.get('peft_type')}; vLLM loads LORA only"])


def sha256(data: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def version(title: str, weights: bytes) -> str:
    """The name of a version with these weights."""
    return f"{title}@{sha256(weights)[:DIGITS]}"


def tokenizer_sha256(folder: Path) -> str:
    """Of the tokenizer's files in a folder."""
    return sha256(b"\0".join((folder / name).read_bytes() for name in TOKENIZER))


def write(folder: Path, golden: Sequence[Golden], **facts: Any) -> Manifest:
    """Write golden prompts and manifest beside what is in the folder; `facts` are the manifest's other fields."""
    lines = [json.dumps(one.model_dump(), ensure_ascii=False) for one in golden]
    (folder / GOLDEN).write_text("".join(f"{line}\n" for line in lines))
    made = Manifest(schema_version=SCHEMA, files=_hashes(folder), **facts)
    (folder / MANIFEST).write_text(json.dumps(made.model_dump(), indent=1) + "\n")
    return made


def read(folder: Path) -> tuple[Manifest, list[Golden]]:
    """The manifest of a folder and its golden prompts; `ConfigInvalid` with every fault, such as a file that is not as
    the manifest has it, or a schema or prompt that this version of Baton does not speak."""
    try:
        found = Manifest.model_validate_json((folder / MANIFEST).read_text())
        golden = [Golden.model_validate_json(line) for line in (folder / GOLDEN).read_text().splitlines()]
    except OSError as error:
        raise ConfigInvalid([f"{error.filename}: {error.strerror}; `baton conductor` exports what it needs"]) from None
    except ValidationError as error:
        told = (f"{folder}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigInvalid(list(told)) from None
    if faults := [f"{folder}: {fault}" for fault in _faults(folder, found)]:
        raise ConfigInvalid(faults)
    return found, golden


def _faults(folder: Path, found: Manifest) -> list[str]:
    hashes = _hashes(folder)
    faults = [
        f"{name} is not the file of the manifest" for name, told in found.files.items() if hashes.get(name) != told
    ]
    if found.schema_version != SCHEMA:
        faults.append(f"was made for plans of schema {found.schema_version}; this Baton speaks {SCHEMA}")
    style = STYLES.get(found.prompt)
    if style is None or found.template not in style.templates:
        faults.append(f"was made for the prompt {found.prompt} ({found.template}), which this Baton does not write")
    weights = WEIGHTS[found.kind]
    if weights not in found.files:
        faults.append(f"has no {weights}")
    elif not found.name.endswith(f"@{hashes.get(weights, '')[:DIGITS]}"):
        faults.append(f"the name {found.name} is not that of its weights")
    return faults


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(one for one in folder.iterdir() if one.is_file() and one.name != MANIFEST)
    return {one.name: sha256(one.read_bytes()) for one in files}
