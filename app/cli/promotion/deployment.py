"""`baton conductor serve` and `deploy`: start vLLM for a trained conductor, and load a version of it.

A version that does not fit is refused before it is loaded: the server's base model, its tokenizer, the plan's schema,
the prompt and the pool are checked. It is loaded under its own name and asked its golden prompts; if it fails, it is
unloaded.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from app.cli import terminal
from app.cli.arguments import Arguments
from app.conductor.styles import STYLES, Style
from app.core.plan import proposals
from app.core.plan.workflow import Step
from app.core.pool.catalog import Tier
from app.engine.conductors.versions import refuse_or_warn
from app.errors import ConfigInvalid
from app.lab import manifest
from app.lab.manifest import GoldenPrompt, Manifest
from app.process.config import Configuration, Settings, trusted_signers
from app.process.config import read as read_settings
from app.providers.vllm import Management

STRUCTURED_OUTPUT_CONFIGS: Mapping[str, str] = {
    "xgrammar": '{"backend":"xgrammar"}',
    "guidance": '{"backend":"guidance","disable_any_whitespace":true}',
}
"""Without disable_any_whitespace guidance allows endless blanks; with it xgrammar requires some."""
MAX_ADAPTERS = 4
MIN_AGREEMENT = 0.9
"""The share of golden plans that must be equal to those of the manifest."""
ADAPTERS_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class GoldenResult(Struct, frozen=True):
    """The result of the golden prompts: the number of prompts, of valid plans, of prompts with a known plan, and of
    those whose plan was equal to it."""

    prompts: int
    valid: int
    known: int
    agreed: int

    @property
    def faults(self) -> list[str]:
        """Return the reasons why the version is refused."""
        reasons = []
        if self.valid < self.prompts:
            reasons.append(f"{self.prompts - self.valid} of {self.prompts} golden prompts led to no valid plan")
        if self.agreed < MIN_AGREEMENT * self.known:
            reasons.append(
                f"{self.agreed} of {self.known} golden plans came out as they should; {MIN_AGREEMENT:.0%} must"
            )
        return reasons


def command(args: Arguments, settings: Settings) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts vLLM for the folder of a whole model, and the variables that it needs."""
    folder = Path(args.folder)
    card, _ = manifest.read(folder)
    check_signature(folder, card, settings)
    if card.kind != "model":
        raise ConfigInvalid([f"{folder}: is an adapter; serve its base, {card.base}, then deploy it"])
    config = json.loads((folder / "config.json").read_text())
    flags = {
        "--model": str(folder),
        "--host": args.host,
        "--port": str(args.port),
        "--max-model-len": str(min(config["max_position_embeddings"], args.context)),
        "--structured-outputs-config": STRUCTURED_OUTPUT_CONFIGS[card.grammar],
    }
    if card.prompt == "general":  # a chat model, which was trained without thoughts before its plan
        flags["--default-chat-template-kwargs"] = '{"enable_thinking": false}'
    else:  # trained here, in full precision; it is small
        flags["--dtype"] = "float32"
    words = [args.python, "-m", "vllm.entrypoints.openai.api_server", "--enable-prefix-caching"]
    words += ["--served-model-name", args.name, card.name]
    words += chain.from_iterable(flags.items())
    if not args.adapters:
        return [*words, *args.flag], {}
    words += ["--enable-lora", "--max-loras", str(MAX_ADAPTERS), "--max-lora-rank", str(args.rank)]
    return [*words, *args.flag], {ADAPTERS_VARIABLE: "True"}


def serve(args: Arguments, environ: Mapping[str, str]) -> int:
    """Replace this process by the server, or print the command that would start it."""
    words, variables = command(args, read_settings(environ))
    if args.dry_run:
        parts = [f"{name}={value}" for name, value in variables.items()]
        print(" ".join([*parts, shlex.join(words)]))
        return 0
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, {**environ, **variables})
    except OSError as error:
        raise ConfigInvalid([f"{words[0]}: {error.strerror}; name vLLM's interpreter with --python"]) from None


def check_fit(card: Manifest, config: Configuration, conductor: str) -> None:
    """Raise `ConfigInvalid` with every reason why a version cannot conduct in this worker's name."""
    tiers = find_conducted_tiers(config, conductor)
    if not tiers:
        raise ConfigInvalid([f"{conductor}: conducts no tier of the pool file"])
    faults: list[str] = []
    for tier in tiers:
        faults += _adapter_faults(card, tier)
    if faults:
        raise ConfigInvalid(faults)


def find_conducted_tiers(config: Configuration, conductor: str) -> list[Tier]:
    """Return the tiers for which a worker plans, alone or as one of a selector's choices."""
    return [tier for tier in config.catalog.tiers.values() if tier.conductor.worker == conductor]


def _adapter_faults(card: Manifest, tier: Tier) -> Iterator[str]:
    prompt = tier.conductor.prompt
    if card.prompt != prompt:
        yield f'tiers.{tier.name}.conductor.prompt: is "{prompt}", and {card.name} was made for "{card.prompt}"'
    steps = max(limits.steps for limits in tier.efforts.values())
    if steps > card.steps:
        yield f"tiers.{tier.name}: allows {steps} steps, and {card.name} was trained on plans of at most {card.steps}"
    if len(tier.pool) > card.workers:
        yield f"tiers.{tier.name}: has {len(tier.pool)} workers, and {card.name} can name {card.workers}"


def check_server(server: Management, card: Manifest, golden: Sequence[GoldenPrompt]) -> None:
    """Raise `ConfigInvalid` if the server has another base model, or another tokenizer by the golden prompts."""
    names = server.models()
    if card.base not in names:
        fault = f"the server answers to {', '.join(names)}, and not to {card.base}, the base of {card.name}"
        remedy = "`baton conductor serve` names it so, elsewhere add it to --served-model-name"
        raise ConfigInvalid([f"{fault}; {remedy}"])
    for place, prompt in enumerate(golden):
        if prompt.tokens is not None and server.tokens(card.base, prompt.messages) != prompt.tokens:
            raise ConfigInvalid(
                [f"golden prompt {place} has other tokens on this server: its tokenizer is not that of {card.name}"]
            )


def golden_result(server: Management, card: Manifest, golden: Sequence[GoldenPrompt]) -> GoldenResult:
    """Ask every golden prompt at temperature 0, and count the results."""
    style = STYLES[card.prompt]
    valid_plans = known_plans = equal_plans = 0
    for prompt in golden:
        steps = _plan_of(server, card.name, prompt, style)
        if steps is not None:
            valid_plans += 1
        if prompt.plan is not None:
            known_plans += 1
            if steps is not None and steps == read(prompt.plan, prompt):
                equal_plans += 1
    return GoldenResult(len(golden), valid_plans, known_plans, equal_plans)


def _plan_of(server: Management, model: str, prompt: GoldenPrompt, style: Style) -> tuple[Step, ...] | None:
    schema = proposals.schema(prompt.workers, prompt.steps, style.subtask_chars)
    return read(server.plan(model, prompt.messages, schema, style.answer_tokens(prompt.steps)), prompt)


def read(text: str, prompt: GoldenPrompt) -> tuple[Step, ...] | None:
    """Return the plan of a text, or None if it is not a valid plan."""
    return proposals.read_plan_text(text, [str(n) for n in range(prompt.workers)], prompt.steps)


def check_signature(folder: Path, card: Manifest, settings: Settings) -> None:
    """Raise `ConfigInvalid` for a version that no key in `BATON_CONDUCTOR_SIGNERS` has signed, or warn of it, as
    `BATON_CONDUCTOR_UNSIGNED` says."""
    signers = trusted_signers(settings)
    refuse_or_warn(signers, manifest.objection(folder, card.name, signers), terminal.warn)


def deploy(
    servers: Sequence[Management], folder: Path, card: Manifest, golden: Sequence[GoldenPrompt], path: str
) -> str:
    """Load a version into each server that lacks it, and check it on all of them. Returns the result of the last one as
    JSON, with the version's signature; where it fails, it is unloaded from each server that did not have it before."""
    if not golden:
        raise ConfigInvalid([f"{folder}: has no golden prompts, so that nothing could be checked"])
    new_servers: list[Management] = []
    try:
        for server in servers:
            check_server(server, card, golden)
            if card.name not in server.models():
                _load(server, card, path)
                new_servers.append(server)
            result = golden_result(server, card, golden)
            if result.faults:
                raise ConfigInvalid([f"{card.name}: {fault}" for fault in result.faults])
    except BaseException:
        for server in new_servers:
            server.unload(card.name)
        raise
    facts = {"base": card.base, "commit": card.commit, "folder": str(folder.resolve()), "path": path}
    note = asdict(result) | facts
    signature = manifest.signature(folder)
    if signature:
        note["signature"] = signature
    return json.dumps(note)


def _load(server: Management, card: Manifest, path: str) -> None:
    if card.kind == "model":
        raise ConfigInvalid([f"the server does not answer to {card.name}; start it with `baton conductor serve`"])
    server.load(card.name, path)
