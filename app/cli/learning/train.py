"""`baton train` trains a conductor and reports how good it is. It needs torch, which the service does not."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from app.cli.arguments import Arguments
from app.errors import ConfigInvalid

EXTRAS = frozenset({"torch", "transformers", "tokenizers", "safetensors", "trl", "peft", "datasets"})
ONE_ROUND = {"--recipe", "--drill-steps", "--warm-start", "--beta", "--gap", "--dear"}
"""Options of the builtin training that do not apply to second rounds."""
BUILTIN = {"--recipe", "--drill-steps", "--warm-steps", "--lessons", "--gap", "--rounds", "--from"}
"""Options of the builtin training alone."""
CHAT = {
    *("--model", "--lora", "--micro", "--completion", "--epochs", "--batch", "--imitation-rate"),
    *("--full-usd", "--full-seconds"),
}
"""Options of both trainings of a chat model."""
POLICY = {
    *("--questions", "--group", "--rate", "--every", "--vllm", "--vllm-url", "--tasks", "--rollouts", "--trust-code"),
    *("--held-out-questions", "--patience", "--cache", "--random-pools", "--url", "--concurrency"),
}
"""Options of `--backend trl` alone."""
JOURNAL = {"--consent", "--everybody", "--without", "--held-out", "--tenant", "--rated"}
"""Options that apply only where `--warm-start` is `journal`."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Train. Returns 1 if `--gap` asks for more than was reached."""
    _refuse_unused_options(args)
    if args.backend != "builtin":
        import_object("app.cli.learning.train_chat:run")(args, environ, import_object("app.lab.train_grpo"), _say)
        return 0
    if args.rounds > 1:
        import_object("app.lab.train_rounds:run")(args, _say)
        return 0
    rollouts = ()
    if args.warm_start:
        rollouts = import_object("app.cli.learning.train_chat:imitation_rollouts")(args, environ)
    if import_object("app.lab.train:run")(args, _say, rollouts):
        return 0
    return 1


def _refuse_unused_options(args: Arguments) -> None:
    """Raise `ConfigInvalid` for options that do not apply to the training that was asked for."""
    training = f"--backend {args.backend}"
    if args.backend == "trl":
        unused = BUILTIN | {"--beta"}
    elif args.backend == "awr":
        unused = BUILTIN | POLICY | {"--steps"}
    elif args.rounds > 1:
        training = "--rounds 2"
        unused = CHAT | POLICY | ONE_ROUND
    else:
        unused = CHAT | POLICY | {"--from"}
    faults = [f"{option}: has no effect with {training}; remove it" for option in sorted(args.given & unused)]
    if args.warm_start != "journal":
        for option in sorted(args.given & JOURNAL):
            faults.append(f"{option}: chooses runs of the journal; name it with --warm-start journal")
    if faults:
        raise ConfigInvalid(faults)


def import_object(name: str) -> Any:
    """Import an object by its name. Raises `ConfigInvalid` if that needs an extra that is not installed."""
    if ":" not in name:
        name += ":"  # else `resolve_name` takes a module that cannot be imported for an attribute that is missing
    try:
        return resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        where = "`make learn WORLD=1` makes an environment that has it; `pip install 'baton[train]'` adds all of it"
        raise ConfigInvalid([f"{error.name} is not installed; {where}"]) from None


def _say(line: str) -> None:
    print(line, flush=True)
