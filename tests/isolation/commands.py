"""Every command that takes a tenant, asked for one of two tenants: its output has nothing of the other's."""

from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import click

from app.__main__ import main as main_of_baton
from app.cli.commands import command_line
from tests.isolation.operations import TENANTS

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "audit changes": ("audit", "changes", "--json"),
    "audit reads": ("audit", "reads", "--json"),
    "budgets ls": ("budgets", "ls", "--json"),
    "budgets set": ("budgets", "set", "500", "--per", "month", "--json"),
    "disclosures": ("disclosures", "--json"),
    "grade": ("grade", "--signs", "--json"),
    "keys add": ("keys", "add", "another", "--json"),
    "offpolicy": ("offpolicy", "--tier", "baton-mini", "--json"),
    "replay": ("replay", "--since", "1d", "--limit", "1", "--json"),
    "report": ("report", "--by", "user", "--json"),
    "rollouts": ("rollouts", "{file}", "--everybody", "--json"),
    "top": ("top", "--json"),
    "runs ls": ("runs", "ls", "--limit", "1000", "--json"),
    "runs erase": ("runs", "erase", "--json"),
    "holds add": ("holds", "add", "--reason", "case 12", "--json"),
}
"""The words of each such command, without the tenant. The erasure comes last, but for the hold that would forbid it."""
WITHOUT_RESULT = {"grade", "offpolicy", "replay"}
"""Commands that may end with 1 here, because nothing was rated by a rule or drawn at random, or workers are gone."""
WITHOUT = {"train"}
"""Commands that read the same runs as `rollouts` does, by the same code, and need torch."""


def takers_of_a_tenant() -> Iterator[str]:
    """The names of all commands that have an option `--tenant`."""
    pending: list[tuple[str, click.Command]] = [("", command_line())]
    while pending:
        name, command = pending.pop()
        if isinstance(command, click.Group):
            pending += [(f"{name} {part}".strip(), subcommand) for part, subcommand in command.commands.items()]
        elif any("--tenant" in option.opts for option in command.params):
            yield name


def words_of_others(folder: Path, environ: Mapping[str, str]) -> dict[str, bool]:
    """For each command, True if what it printed or wrote for a tenant has the other's name, which is in its word."""
    settings = {"BATON_POOL": str(folder / "pool.toml"), "BATON_DATA_DIR": str(folder), "BATON_PEPPER": "p" * 32}
    words_by_command: dict[str, bool] = {}
    for name, words in COMMANDS.items():
        for mine, other in (TENANTS, TENANTS[::-1]):
            file = folder / f"{mine} {name}"
            arguments = [word.format(file=file) for word in words]
            with redirect_stdout(StringIO()) as out, redirect_stderr(out):
                status = main_of_baton([*arguments, "--tenant", mine], settings | dict(environ))
            assert status == 0 or name in WITHOUT_RESULT, f"{name}: {out.getvalue()}"
            written = file.read_text() if file.exists() else ""
            words_by_command[name] = words_by_command.get(name, False) or other in out.getvalue() + written
    return words_by_command
