"""`baton train`: train a conductor, and say how good it is. Torch is an extra: all of the service runs without it."""

import argparse
from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from app.errors import ConfigInvalid


def run(asked: argparse.Namespace, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """0; 1 if `--gap` asks for more than was reached."""
    try:
        train = resolve_name("app.learn.train:run")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigInvalid(["torch is not installed; `make learn` sets up an environment that has it"]) from None
    return 0 if train(asked, _say) else 1


def _say(line: str) -> None:
    print(line, flush=True)
