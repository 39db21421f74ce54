"""The reference of all commands as a page of Markdown, made from their definitions."""

from collections.abc import Iterator

import click

from app.cli.commands import command_line
from app.cli.declarations import Command, title

HEAD = """# Commands

Every command and option of `baton`; `baton COMMAND --help` shows the same.
`python -m app.cli.commands > deploy/docs/commands.md` writes this page from the definitions of the commands.

Exit status: 0 fine, 1 it could not be done or the answer is no, 2 the command line or the configuration is wrong or
the output cannot be written, 130 interrupted.

Shell completion: `eval "$(baton completion bash)"` in `~/.bashrc`; `zsh` and `fish` work alike.
"""


def document() -> str:
    """Return the page."""
    root = command_line()
    pages = "\n".join(_page(command, ctx) for command, ctx in commands(root, click.Context(root, info_name="baton")))
    return f"{HEAD}\n{pages}".rstrip()


def commands(group: click.Group, ctx: click.Context) -> Iterator[tuple[Command, click.Context]]:
    """Yield every command with its context, in order of definition."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        below = ctx
        if command is not None:
            below = click.Context(command, info_name=name, parent=ctx)
        if isinstance(command, click.Group):
            yield from commands(command, below)
        elif isinstance(command, Command):
            yield command, below


def _page(command: Command, ctx: click.Context) -> str:
    lines = [f"## {ctx.command_path}", ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [" ".join(paragraph.split()), ""]
    lines += [f"`{ctx.command.get_usage(ctx).removeprefix('Usage: ')}`", ""]
    lines += _table(command, ctx)
    if command.examples:
        lines += ["```sh", *command.examples, "```", ""]
    return "\n".join(lines)


def _table(command: Command, ctx: click.Context) -> list[str]:
    rows = []
    for parameter in command.params:
        name, meaning = parameter.get_help_record(ctx) or ("", "")
        section = title(parameter)
        where = ""
        if section not in ("Arguments", "Options"):
            where = f" ({section})"
        rows.append(f"| `{_cell(name)}` | {_cell(meaning)}{where} |")
    if not rows:
        return []
    return ["| argument or option | meaning |", "|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
