"""The command line is read without carrying anything out; its help, its reference and its completion."""

import os
import re
import shlex
from importlib.util import find_spec
from typing import Any

import click
import pytest

from app.__main__ import main
from app.cli.commands import command_line, parse, reference
from app.cli.declarations import Command
from app.core.roles import SCOPES
from tests.harness.processes import ROOT

ROOT_COMMAND = command_line()
COMMANDS = {
    ctx.command_path: (command, ctx)
    for command, ctx in reference.commands(ROOT_COMMAND, click.Context(ROOT_COMMAND, info_name="baton"))
}
EXAMPLES = [example for command, _ in COMMANDS.values() for example in command.examples]


def test_every_command_has_a_module_a_description_and_an_example_of_itself() -> None:
    assert len(COMMANDS) > 30
    for path, (command, _) in COMMANDS.items():
        assert find_spec(f"app.cli.{command.module}"), path
        assert command.help, path
        assert any(f"{path} " in f"{example} " or f"{path})" in example for example in command.examples), path


@pytest.mark.parametrize("path", COMMANDS)
def test_every_argument_and_option_has_a_description(path: str) -> None:
    command, ctx = COMMANDS[path]
    for parameter in command.params:
        record = parameter.get_help_record(ctx)
        assert record is not None, parameter.name
        assert record[1].strip(), parameter.name
        assert "None" not in record[1], parameter.name
    described = command.get_help(ctx).splitlines()
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            assert sum(f"{line} ".startswith(f"  {parameter.make_metavar(ctx)} ") for line in described) == 1


def test_every_command_prints_json_on_request_but_those_that_print_a_script_or_go_on() -> None:
    without = set()
    for path, (command, _) in COMMANDS.items():
        if "--json" not in {o for p in command.params for o in p.opts}:
            without.add(path)
    assert without == {"baton completion", "baton train", "baton conductor serve"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_can_be_parsed(example: str) -> None:
    inner = re.search(r"\$\((.*)\)", example)
    words = shlex.split(inner[1] if inner else example)
    words = words[words.index("baton") + 1 :]
    assert parse(words).verb in words


def test_the_help_of_a_command_fits_a_narrow_terminal_and_ends_with_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--help"], ["train", "--help"], ["keys", "add", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(words, {})
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert text
        described, _, examples = text.partition("\nExamples:\n")
        assert max(map(len, described.splitlines())) <= 80
        assert bool(examples) == (words != ["--help"])


def test_the_help_names_every_scope() -> None:
    command, ctx = COMMANDS["baton keys add"]
    text = command.get_help(ctx)
    assert all(scope in text for scope in SCOPES)


def test_lists_of_commands_show_whole_sentences() -> None:
    for group in (ROOT_COMMAND, ROOT_COMMAND.commands["runs"]):
        text = " ".join(group.get_help(click.Context(group, info_name="baton")).split())
        assert "..." not in text.replace("[ARGS]...", "")
    assert " Answer HTTP requests, while engines (`baton dispatcher`) carry out the runs. " in (
        " ".join(ROOT_COMMAND.get_help(click.Context(ROOT_COMMAND, info_name="baton")).split())
    )


def test_the_reference_is_current() -> None:
    page = (ROOT / "deploy" / "docs" / "commands.md").read_text()
    assert page == reference.document() + "\n", "run: python -m app.cli.commands > deploy/docs/commands.md"


def test_every_option_of_a_command_is_in_its_part_of_the_reference() -> None:
    parts = {part.partition("\n")[0]: part for part in reference.document().split("\n## ")}
    for path, (command, _) in COMMANDS.items():
        options = [
            name for parameter in command.params if isinstance(parameter, click.Option) for name in parameter.opts
        ]
        assert [name for name in options if name not in parts[path]] == []


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("keys add x --usd 0.25", "usd", 250_000),
        ("keys add x --expires 2d", "expires", 172_800.0),
        ("keys add x --scope admin --scope runs:read", "scopes", ("admin", "runs:read")),
        ("keys add x --role auditor --role caller", "roles", ("auditor", "caller")),
        ("keys add x", "expires", None),
        ("runs show", "run", "last"),
        ("runs ls", "limit", 20),
        ("conductor shadow c v", "since", 86_400.0),
        ("conductor canary c v 0.05", "share", 0.05),
        ("conductor serve m --flag=--enforce-eager", "flag", ("--enforce-eager",)),
        ("eval --with a --with b", "beside", ("a", "b")),
        ("train --from x --rounds 2", "rounds", 2),
        ("calibrate", "each", 2),
        ("audit check --run r file", "file", "file"),
        ("plans edit last --add 0 --access ''", "access", ""),
    ],
)
def test_values_have_their_units_and_defaults(words: str, name: str, value: Any) -> None:
    assert getattr(parse(shlex.split(words)), name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("keys add x --usd 0", "dollars above 0"),
        ("keys add x --usd much", "dollars above 0"),
        ("keys add x --rpm 1.5", "whole number from 1 to 1,000,000"),
        ("runs ls --limit 1001", "whole number from 1 to 1,000"),
        ("keys add x --expires 3y", "time span"),
        ("conductor canary c v 1", "between 0 and 1"),
        ("calibrate --each 4", "'1', '2', '3'"),
        ("runs lst", "No such command 'lst'"),
        ("runs ls --stat x", "--state"),
        ("runs ls --state done", "'succeeded'"),
        ("replay --since 1d --state done", "'succeeded'"),
        ("report --since 5300w", "at most 100 years"),
        (f"report --since {'9' * 5000}d", "at most 100 years"),
        (f"disclosures --since {'9' * 400}d", "at most 100 years"),
        ("disclosures --until 27.11.2026", "a time such as"),
        ("report --threshold nan", "finite"),
        ("eval --temperature nan", "finite"),
        ("conductor serve m --port 100000", "range 1<=x<=65535"),
        ("runs show last --seconds -1", "range"),
        ("runs erase --run '' --tenant acme", "'--run': must not be empty"),
        ("keys add ''", "must not be empty"),
        ("keys add x --tier ''", "must not be empty"),
        ("keys add x --label 'top secret'", "letters, digits and"),
        ("audit export ''", "must not be empty"),
        ("tier promote baton-mini --to sol --force ' '", "'--force': must not be empty"),
        ("audit check --run a\udcff", "is not UTF-8"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_says_what_is_right(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(shlex.split(words))
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "_BATON_COMPLETE", "zsh_complete")
    for words, expected in (
        ("baton ke", "keys"),
        ("baton keys add --ten", "--tenant"),
        ("baton train --recipe w", "words"),
    ):
        monkeypatch.setitem(os.environ, "COMP_WORDS", words)
        monkeypatch.setitem(os.environ, "COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            parse([])
        assert expected in capsys.readouterr().out.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell], {}) == 0
    assert f"_BATON_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_an_unknown_option_is_not_taken_for_another_one() -> None:
    assert isinstance(ROOT_COMMAND.commands["serve"], Command)
    with pytest.raises(SystemExit):
        parse(["serve", "--prot", "1"])
