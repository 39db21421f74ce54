"""The command line of `baton`, which consists of the commands of all rooms.

Reading the command line imports nothing of the service, and carries nothing out: `parse` returns the arguments.
"""

from collections.abc import Sequence
from functools import cache

import click

from app.cli.administration import commands as administration
from app.cli.arguments import Arguments
from app.cli.audit import commands as audit
from app.cli.declarations import Group
from app.cli.learning import commands as learning
from app.cli.operations import commands as operations
from app.cli.plans import commands as plans
from app.cli.promotion import commands as promotion
from app.cli.retention import commands as retention
from app.cli.runs import commands as runs

DESCRIPTION = """Baton: one OpenAI-compatible endpoint in front of a conducted pool of models.

Settings are environment variables: `baton config` lists them all. `baton COMMAND --help` says more about a command,
with examples. Exit status: 0 fine, 1 it could not be done or the answer is no, 2 the command line or the configuration
is wrong."""


@cache
def command_line() -> Group:
    """Return the whole command line, which is declared once: that takes longer than reading a line with it."""
    root = Group("baton", help=DESCRIPTION, context_settings={"help_option_names": ["-h", "--help"]})
    click.version_option(package_name="baton", prog_name="baton", message="%(prog)s %(version)s")(root)
    for room in (operations, administration, runs, plans, retention, audit, learning, promotion):
        room.define(root)
    return root


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read a command line, by default that of this process.

    Raises `SystemExit` with 2 for a faulty one, and with 0 after it has printed help, the version or a completion.
    """
    words = None
    if argv is not None:
        words = list(argv)
    try:
        outcome = command_line().main(words, prog_name="baton", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    if not isinstance(outcome, Arguments):
        raise SystemExit(outcome)
    return outcome
