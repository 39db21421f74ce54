"""The manifest of a trained conductor, in one file next to its weights: `baton.json`.

An operator can read from it how the model was made, and check that a server fits it: base model, tokenizer, prompt, the
plan's schema. A version's name ends in the beginning of its weights' hash, so that two versions never share one.
`golden.jsonl` has prompts with the tokens that they must come to and the plans that they must lead to. `baton.sig` may
have the signature of the manifest, and so of all files that it names.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from app.conductor.styles import STYLES
from app.core.plan.proposals import SCHEMA
from app.core.transparency.notes import Signer
from app.core.transparency.version_signatures import TrustedSigners, sign_version
from app.errors import ConfigInvalid

MANIFEST, GOLDEN, SIGNATURE = "baton.json", "golden.jsonl", "baton.sig"
WEIGHTS: Mapping[str, str] = {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}
PARTS = "model.safetensors.index.json"
"""The index that large models have instead: which file each weight is in."""
TOKENIZER, CHAT = ("tokenizer.json", "tokenizer_config.json"), "chat_template.jinja"
"""Newer libraries write the template apart."""
TITLE = re.compile(r"[\w.-]+")
DIGITS = 12
"""Hexadecimal digits of a hash in a version's name."""


class Record(BaseModel):
    """Exact types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Manifest(Record):
    """One trained conductor."""

    manifest: Literal[1] = 1
    name: str
    """The name of this version: a title, `@`, and the beginning of the weights' SHA-256."""
    kind: Literal["model", "adapter"]
    base: str
    """The version that an adapter belongs to; a whole model is its own."""
    tokenizer_sha256: str
    """Over the tokenizer's files, chat template included."""
    schema_version: str
    prompt: str
    template: str
    grammar: Literal["xgrammar", "guidance"]
    """The library that decodes its plans under the schema; others may not know how its tokens are cut."""
    steps: int
    """The longest plan that it was trained on."""
    workers: int
    """The most workers of a pool."""
    reward: str
    world: str
    commit: str
    evaluation: Mapping[str, Any]
    files: Mapping[str, str]
    """SHA-256 of every file of the folder, by its path there, but of this one and of its signature."""


class GoldenPrompt(Record):
    """A prompt, and what is expected of it; None where that is not known."""

    messages: list[dict[str, str]]
    workers: int
    steps: int
    tokens: list[int] | None = None
    plan: str | None = None


DEFAULTS: Mapping[str, Any] = {
    "title": "conductor", "prompt": "general", "grammar": "guidance", "steps": 5, "workers": 8,
    "reward": "", "world": "", "commit": "", "evaluation": {},
}  # fmt: skip
"""The manifest's fields where neither training nor the caller gives them."""
OF_BASE = ("prompt", "grammar", "steps", "workers")
"""Fields that an adapter takes from its base."""


def describe(folder: Path, base: Path | None, golden: Path | None, **fields: Any) -> Manifest:
    """Write the manifest of weights that are there: a whole model, or a LoRA adapter as peft saves it, whose `base` is
    the described folder of its model. A field that is not `given` (None) is as training has left it for these very
    weights, else as the base has it. Golden prompts come from a file, else from training, else from the base without
    their plans.

    Raises `ConfigInvalid` for what is neither.
    """
    earlier, prompts = _earlier_manifest(folder)
    kind: Literal["model", "adapter"] = (
        "adapter" if base is not None or (earlier and earlier.kind == "adapter") else "model"
    )
    digest = weights_sha256(folder, kind)
    facts = {**DEFAULTS, **_fields_of_training(earlier)}
    if kind == "adapter":
        _check_adapter(folder)
    if base is not None:
        card, theirs = read(base)
        for name in OF_BASE:
            facts[name] = getattr(card, name)
        facts |= {"base": card.name, "tokenizer_sha256": tokenizer_sha256(base)}
        prompts = prompts or [prompt.model_copy(update={"plan": None}) for prompt in theirs]
    elif kind == "model":
        facts["tokenizer_sha256"] = tokenizer_sha256(folder)
    facts |= {name: value for name, value in fields.items() if value is not None}
    name = version(facts.pop("title"), digest)
    if golden is not None:
        prompts = _golden_prompts(golden)
    facts |= {"template": STYLES[facts["prompt"]].templates[0], "base": name if kind == "model" else facts["base"]}
    return write(folder, prompts, name=name, kind=kind, **facts)


def _earlier_manifest(folder: Path) -> tuple[Manifest | None, list[GoldenPrompt]]:
    """Return the earlier manifest and golden prompts, if they describe the weights that are there now."""
    try:
        earlier = Manifest.model_validate_json((folder / MANIFEST).read_text())
        golden = _golden_prompts(folder / GOLDEN)
    except (OSError, UnicodeDecodeError, ValidationError, ConfigInvalid):
        return None, []
    if earlier.name.endswith(f"@{weights_sha256(folder, earlier.kind)[:DIGITS]}"):
        return earlier, golden
    return None, []


def _golden_prompts(file: Path) -> list[GoldenPrompt]:
    """Return the golden prompts of a file, which has one on each line. Raises `ConfigInvalid`, and OSError."""
    prompts: list[GoldenPrompt] = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ConfigInvalid([f"{file}: is no text in UTF-8"]) from None
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                prompts.append(GoldenPrompt.model_validate_json(line))
        except ValidationError as error:
            raise _invalid(f"{file}:{number}", error) from None
    return prompts


def _invalid(place: str, error: ValidationError) -> ConfigInvalid:
    """Return every fault of a manifest or of a golden prompt."""
    faults = []
    for detail in error.errors():
        field = ".".join(map(str, detail["loc"]))
        faults.append(": ".join(filter(None, (place, field, detail["msg"]))))
    return ConfigInvalid(faults)


def _fields_of_training(earlier: Manifest | None) -> dict[str, Any]:
    if earlier is None:
        return {}
    dropped = {"manifest", "name", "kind", "template", "schema_version", "files"}
    return {**earlier.model_dump(exclude=dropped), "title": earlier.name.rpartition("@")[0]}


def _check_adapter(folder: Path) -> None:
    try:
        settings = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError):
        raise ConfigInvalid([f"{folder}: has no adapter_config.json; peft's save_pretrained writes one"]) from None
    if settings.get("peft_type") != "LORA":
        raise ConfigInvalid([f"{folder}: is an adapter of the type {settings.get('peft_type')}; vLLM loads LORA only"])


def sha256(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def title_of(folder: Path) -> str:
    """Return the title of what is in a folder; a snapshot in Hugging Face's cache has the title of its model."""
    cached = re.search(r"models--(?:.+--)?(.+)/snapshots/", str(folder.absolute()))
    return re.sub(r"[^\w.-]", "-", cached[1] if cached else folder.absolute().name) or str(DEFAULTS["title"])


def version(title: str, digest: str) -> str:
    """Return the name of a version whose weights have this SHA-256. Raises `ConfigInvalid` for a title with other signs
    than a name of the pool file has in front of its `@`."""
    if not TITLE.fullmatch(title):
        raise ConfigInvalid([f"--title {title}: write letters, digits and . _ - only"])
    return f"{title}@{digest[:DIGITS]}"


def weights_sha256(folder: Path, kind: str) -> str:
    """Return the SHA-256 of the file that holds the weights, or over those of its parts. Raises `ConfigInvalid` if
    there are none."""
    files = _weights(folder, kind)
    for name in files:
        if not (folder / name).is_file():
            raise ConfigInvalid([f"{folder}: has no {WEIGHTS[kind]}; name a folder that has, with or without --base"])
    digests = [_digest(folder / name) for name in files]
    if len(digests) == 1:
        return digests[0]
    return sha256("".join(digests).encode())


def _weights(folder: Path, kind: str) -> list[str]:
    """Return the names of the files that hold the weights."""
    if kind == "adapter" or (folder / WEIGHTS[kind]).is_file():
        return [WEIGHTS[kind]]
    try:
        return sorted(set(json.loads((folder / PARTS).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [WEIGHTS[kind]]


def tokenizer_sha256(folder: Path) -> str:
    """Return the SHA-256 of the tokenizer's files in a folder. Raises `ConfigInvalid` if they are not there."""
    names = list(TOKENIZER)
    if (folder / CHAT).is_file():
        names.append(CHAT)
    try:
        return sha256(b"\0".join([(folder / name).read_bytes() for name in names]))
    except FileNotFoundError as error:
        raise ConfigInvalid(
            [f"{error.filename}: {error.strerror}; a fast tokenizer's save_pretrained writes it"]
        ) from None


def write(folder: Path, golden: Sequence[GoldenPrompt], **facts: Any) -> Manifest:
    """Write golden prompts and manifest into the folder; `facts` are the manifest's other fields. The signature of an
    earlier manifest is removed."""
    (folder / SIGNATURE).unlink(missing_ok=True)
    lines = [json.dumps(prompt.model_dump(), ensure_ascii=False) + "\n" for prompt in golden]
    (folder / GOLDEN).write_text("".join(lines))
    manifest = Manifest(schema_version=SCHEMA, files=_hashes(folder), **facts)
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=1) + "\n")
    return manifest


def read(folder: Path) -> tuple[Manifest, list[GoldenPrompt]]:
    """Return the manifest of a folder and its golden prompts. Raises `ConfigInvalid` with every fault, such as a file
    that is not as the manifest has it, or a schema or prompt that this version of Baton does not speak."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
        golden = _golden_prompts(folder / GOLDEN)
    except OSError as error:
        raise ConfigInvalid([f"{error.filename}: {error.strerror}; `baton conductor describe` writes it"]) from None
    except UnicodeDecodeError:
        raise ConfigInvalid([f"{folder / MANIFEST}: is no text in UTF-8"]) from None
    except ValidationError as error:
        raise _invalid(str(folder), error) from None
    if faults := [f"{folder}: {fault}" for fault in _faults(folder, manifest)]:
        raise ConfigInvalid(faults)
    return manifest, golden


def sign(folder: Path, signer: Signer) -> Manifest:
    """Sign the manifest of a folder. `ConfigInvalid` as for `read`, and for further files: what is signed is whole."""
    manifest, _ = read(folder)
    reason = _name_further_files(folder, manifest)
    if reason:
        raise ConfigInvalid([reason])
    (folder / SIGNATURE).write_text(sign_version(manifest.name, _digest(folder / MANIFEST), signer))
    return manifest


def signature(folder: Path) -> str:
    """Return the signature of a folder's manifest as it stands there, not yet checked; empty if there is none."""
    place = folder / SIGNATURE
    if not place.is_file():
        return ""
    return place.read_text(errors="replace")


def objection(folder: Path, version: str, trusted: TrustedSigners) -> str:
    """Return the reason why the signature of a version's folder is not accepted, or an empty string. The manifest is
    valid, and its files are as it has them. A file that it does not have was not signed, and a server might load it."""
    reason = trusted.objection(version, signature(folder), _digest(folder / MANIFEST))
    if reason or not trusted.keys:
        return reason
    return _name_further_files(folder, Manifest.model_validate_json((folder / MANIFEST).read_text()))


def _name_further_files(folder: Path, manifest: Manifest) -> str:
    """Return a sentence about the files of a folder that its manifest does not have; empty if there are none."""
    others = sorted(_hashes(folder).keys() - manifest.files.keys())
    if not others:
        return ""
    return f"{folder}: {', '.join(others)} is not in the manifest; remove it, or describe and sign the folder anew"


def _faults(folder: Path, manifest: Manifest) -> list[str]:
    hashes = _hashes(folder)
    faults = [f"{name} is not the file of the manifest" for name in sorted(_find_changed(manifest.files, hashes))]
    if manifest.schema_version != SCHEMA:
        faults.append(f"was made for plans of schema {manifest.schema_version}; this Baton speaks {SCHEMA}")
    style = STYLES.get(manifest.prompt)
    if style is None or manifest.template not in style.templates:
        faults.append(
            f"was made for the prompt {manifest.prompt} ({manifest.template}), which this Baton does not write"
        )
    weights = _weights(folder, manifest.kind)
    if not set(weights) <= manifest.files.keys():
        faults.append(f"has no {WEIGHTS[manifest.kind]}")
    elif _find_changed(manifest.files, hashes).isdisjoint(weights) and not _is_own_name(folder, manifest):
        faults.append(f"the name {manifest.name} is not that of its weights")
    return faults


def _find_changed(recorded: Mapping[str, str], hashes: Mapping[str, str]) -> set[str]:
    return {name for name, digest in recorded.items() if hashes.get(name) != digest}


def _is_own_name(folder: Path, manifest: Manifest) -> bool:
    return manifest.name == version(manifest.name.rpartition("@")[0], weights_sha256(folder, manifest.kind))


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder, by its path there, but of its manifest and signature. Those in
    folders inside it count too: a server reads templates from `additional_chat_templates`."""
    hashes = {}
    for parent, _, names in os.walk(folder, followlinks=True):
        for file in [Path(parent, name) for name in names]:
            path = file.relative_to(folder).as_posix()
            if file.is_file() and path not in (MANIFEST, SIGNATURE):
                hashes[path] = _digest(file)
    return dict(sorted(hashes.items()))


def _digest(place: Path) -> str:
    """Return the SHA-256 of a file, which may be larger than memory."""
    with place.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
