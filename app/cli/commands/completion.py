"""`baton completion SHELL` prints the script with which a shell completes commands and options of `baton`."""

from collections.abc import Callable, Mapping

from click.shell_completion import get_completion_class

from app.cli.arguments import Arguments
from app.cli.commands import command_line

VARIABLE = "_BATON_COMPLETE"
"""The environment variable by which the shell asks this program for completions."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the script. Returns 0."""
    kind = get_completion_class(args.shell)
    assert kind is not None, "the command line offers the shells that click has"
    print(kind(command_line(), {}, "baton", VARIABLE).source())
    return 0
