"""The reference of all commands as a page of Markdown, made from their definitions."""

from collections.abc import Iterator, Sequence

import click

from app.cli.commands import command_line
from app.cli.declarations import Command, first_sentence, title

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
    ctx = click.Context(root, info_name="baton")
    parts = [HEAD, *_index(root, ctx), ""]
    for command, inner in commands(root, ctx):
        parts.append(_page(command, inner))
    return "\n".join(parts).rstrip()


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


def _index(root: click.Group, ctx: click.Context) -> list[str]:
    """Return a table of all commands with links: a row for each command, and one for each group."""
    lines = ["| command | what it does |", "|---|---|"]
    for name in root.list_commands(ctx):
        command = root.commands[name]
        link = f"[`baton {name}`](#baton-{name})"
        if isinstance(command, click.Group):
            links = [f"[`{inner}`](#baton-{name}-{inner})" for inner in command.list_commands(ctx)]
            link = f"`baton {name}` {', '.join(links)}"
        lines.append(f"| {link} | {_cell(first_sentence(command))} |")
    return lines


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
    """Return the tables of arguments and options: one for those without a section, then one for each section."""
    rows_by_section: dict[str, list[str]] = {"": []}
    for parameter in command.params:
        name, meaning = parameter.get_help_record(ctx) or ("", "")
        section = title(parameter)
        if section in ("Arguments", "Options"):
            section = ""
        rows_by_section.setdefault(section, []).append(f"| `{_cell(name)}` | {_cell(meaning)} |")
    lines: list[str] = []
    for section, rows in rows_by_section.items():
        lines += _section(section, rows)
    return lines


def _section(name: str, rows: Sequence[str]) -> list[str]:
    if not rows:
        return []
    heading: list[str] = []
    if name:
        heading = [f"{name}:", ""]
    return [*heading, "| argument or option | meaning |", "|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
