"""`baton conductor export`: what has been trained, made ready to be served."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name

from app.command import terminal
from app.errors import ConfigInvalid


def run(asked: argparse.Namespace, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs."""
    _export(asked)
    return 0


def _export(asked: argparse.Namespace) -> None:
    try:
        export = resolve_name("app.learn.export")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigInvalid(["torch is not installed; `make learn` sets up an environment that has it"]) from None
    made = export.export(export.trained(Path(asked.trained)), Path(asked.out), asked.title)
    console = terminal.out()
    console.print(f"{made.name} in {asked.out}", markup=False)
    for split, found in made.evaluation.items():
        figures = f"reward {found['reward']:.3f}, right {found['right']:.3f}, ${found['usd']:.6f} a task"
        console.print(f"  {split}, {found['tasks']} tasks: {figures}", markup=False)
