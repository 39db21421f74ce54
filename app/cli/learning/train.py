"""`baton train` trains a conductor and reports how good it is. It needs torch, which the service does not."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from app.cli.arguments import Arguments
from app.errors import ConfigInvalid

EXTRAS = frozenset({"torch", "transformers", "tokenizers", "safetensors", "trl", "peft", "datasets"})
ONE_ROUND = ("drill_steps", "warm_start", "gap", "dear")
"""Options of the builtin training that do not apply to second rounds."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Train. Returns 1 if `--gap` asks for more than was reached."""
    if args.backend != "builtin":
        import_object("app.cli.learning.train_chat:run")(args, environ, import_object("app.lab.train_grpo"), _say)
        return 0
    if args.rounds > 1:
        _check_rounds(args)
        import_object("app.lab.train_rounds:run")(args, _say)
        return 0
    rollouts = ()
    if args.warm_start:
        rollouts = import_object("app.cli.learning.train_chat:imitation_rollouts")(args, environ)
    if import_object("app.lab.train:run")(args, _say, rollouts):
        return 0
    return 1


def _check_rounds(args: Arguments) -> None:
    """Raise `ConfigInvalid` for options that do not apply to second rounds."""
    faults: list[str] = []
    for name in ONE_ROUND:
        if getattr(args, name) not in (None, False):
            faults.append(f"--{name.replace('_', '-')}: has no effect with --rounds 2; remove it")
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
        where = "`make learn` sets up an environment that has it; `pip install 'baton[train]'` adds all that is needed"
        raise ConfigInvalid([f"{error.name} is not installed; {where}"]) from None


def _say(line: str) -> None:
    print(line, flush=True)
