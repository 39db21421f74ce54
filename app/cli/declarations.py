"""Parts of the command line: commands with examples, types of values, and options that several commands share."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any, TypeVar

import click

from app.cli.arguments import Arguments, arguments
from app.core.pool.rules import LABEL_FORM, LABEL_WORDS

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)
Decorator = Callable[[Decorated], Decorated]
SPANS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
"""Seconds of each unit of a time span."""
MAX_SPAN_SECONDS = 100 * 365 * 86_400
"""A century: times beyond one could not be shown as dates."""
MAX_SPAN_DIGITS = len(str(MAX_SPAN_SECONDS))


class Option(click.Option):
    """An option that may stand in a section of the help, under a title of its own, and may take an empty text."""

    def __init__(self, *args: Any, section: str = "", may_be_empty: bool = False, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section
        self.may_be_empty = may_be_empty


class Command(click.Command):
    """A command whose help shows examples, each of which is a whole command line."""

    def __init__(
        self, *args: Any, module: str, examples: Sequence[str] = (), ends_with_reader: bool = False, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self.module = module
        self.examples = examples
        self.ends_with_reader = ends_with_reader

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the description, which click would cut off at `limit` characters."""
        return first_sentence(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line, and refuse one that is not UTF-8, because no database stores it, and an
        option or argument that is given as an empty text, or as spaces alone.

        That is the slip of a script whose variable is not set, and would mean something else than what was asked for.
        """
        for word in args:
            if not _is_utf8(word):
                raise click.UsageError(f"{word!a} is not UTF-8", ctx)
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if _is_given_empty(parameter, ctx):
                raise click.BadParameter("must not be empty", ctx, parameter)
        return rest

    def invoke(self, ctx: click.Context) -> Arguments:
        """Return the arguments; nothing is carried out while the command line is read."""
        given = {parameter.opts[0] for parameter in self.params if _is_given(parameter, ctx)}
        return arguments(
            self.module, self.name or "", ctx.params, given=frozenset(given), ends_with_reader=self.ends_with_reader
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section, then the examples. The arguments stand above them."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(title(parameter), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _is_utf8(word: str) -> bool:
    """Return True if a word of the command line was UTF-8: Python has unpaired surrogates in place of other bytes."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_given_empty(parameter: click.Parameter, ctx: click.Context) -> bool:
    """Return True if the command line gives an empty text for a parameter that must not be empty.

    Parameters named `baton_...` set the variables of the environment, whose values are checked where settings are read.
    """
    name = parameter.name or ""
    if getattr(parameter, "may_be_empty", False) or name.startswith("baton_"):
        return False
    value = ctx.params.get(name)
    values = value if isinstance(value, tuple) else (value,)
    is_empty = any([isinstance(text, str) and not text.strip() for text in values])
    return is_empty and _is_given(parameter, ctx)


def _is_given(parameter: click.Parameter, ctx: click.Context) -> bool:
    """Return True if a parameter stands on the command line."""
    return ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE


def title(parameter: click.Parameter) -> str:
    """Return the title in the help under which a parameter stands."""
    if isinstance(parameter, click.Argument):
        return "Arguments"
    return getattr(parameter, "section", "") or "Options"


def first_sentence(command: click.Command) -> str:
    """Return the first sentence of a command's description, on one line."""
    text = " ".join((command.help or "").split())
    return text[: text.find(". ") + 1] or text


class Group(click.Group):
    """A group of commands in the order in which they were defined."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the description, which click would cut off at `limit` characters."""
        return first_sentence(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in order of definition."""
        return list(self.commands)

    def add(
        self, name: str, module: str, *examples: str, ends_with_reader: bool = False
    ) -> Callable[[Callable[..., None]], Command]:
        """Define a command that `module` of the package `app.cli` runs. Its description is the function's docstring.

        `ends_with_reader` is for one that prints for as long as somebody reads; see `Arguments`.
        """

        def define(function: Callable[..., None]) -> Command:
            command = click.command(
                name,
                cls=Command,
                module=module,
                examples=examples,
                ends_with_reader=ends_with_reader,
                context_settings={"show_default": True},
            )(function)
            self.add_command(command)
            return command

        return define


def group(parent: Group, name: str, words: str) -> Group:
    """Define a group of commands inside another group."""
    child = Group(name, help=words)
    parent.add_command(child)
    return child


def argument(name: str, words: str, **attributes: Any) -> Decorator[Any]:
    """Declare a positional argument."""
    return click.argument(name, help=words, **attributes)


def option(*names: str, help: str, section: str = "", **attributes: Any) -> Decorator[Any]:
    """Declare an option. Without a type or a default it takes a text and is None if it is not given.

    An empty text is refused unless it `may_be_empty`.
    """
    return click.option(*names, cls=Option, help=help, section=section, **attributes)


def flag(*names: str, help: str, section: str = "") -> Decorator[Any]:
    """Declare an option without a value."""
    return option(*names, is_flag=True, help=help, section=section)


def repeatable(*names: str, help: str, section: str = "", **attributes: Any) -> Decorator[Any]:
    """Declare an option that may be given several times; its value is a tuple."""
    return option(*names, multiple=True, help=f"{help} Repeatable.", section=section, **attributes)


def in_order(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Join decorators of options into one that keeps their order."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


# -- types of values


class Count(click.ParamType[int]):
    """A whole number from 1 to `most`."""

    name = "number"

    def __init__(self, most: int = 1_000_000) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        number = _number(value)
        if not 1 <= number <= self._most or number != int(number):
            self.fail(f"must be a whole number from 1 to {self._most:,}", param, ctx)
        return int(number)


class Label(click.ParamType[str]):
    """A label as keys and requests may have it."""

    name = "label"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the label."""
        if not re.fullmatch(LABEL_FORM, value):
            self.fail(f"must be {LABEL_WORDS}", param, ctx)
        return str(value)


class Dollars(click.ParamType[int]):
    """An amount in dollars; its value is in micro-dollars."""

    name = "dollars"

    def __init__(self, *, or_nothing: bool = False) -> None:
        """`or_nothing` is for an amount that may be 0."""
        self._or_nothing = or_nothing

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return micro-dollars."""
        amount = _number(value)
        if self._or_nothing and amount == 0:
            return 0
        if not 0.000001 <= amount <= 1_000_000:
            least = "above 0"
            if self._or_nothing:
                least = "from 0"
            self.fail(f"must be a number of dollars {least} to 1,000,000, in steps of 0.000001", param, ctx)
        return round(amount * 1_000_000)


class Share(click.ParamType[float]):
    """A share of the runs, between 0 and 1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the share."""
        share = _number(value)
        if not 0 < share < 1:
            self.fail("must be a share of the runs between 0 and 1; `promote` is for all of them", param, ctx)
        return share


class Finite(click.FloatRange):
    """A number within a range, which is neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail("must be a finite number", param, ctx)
        return number

    def _describe_range(self) -> str:
        """Return the range for the help. Click would show one without ends as `x<=None`."""
        if self.min is None and self.max is None:
            return ""
        return super()._describe_range()


class Span(click.ParamType[float]):
    """A time span such as 90s, 30m, 12h, 30d or 52w, of at most a century; its value is in seconds."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        digits, unit = value[:-1].lstrip("0"), value[-1:]
        if unit not in SPANS or not digits.isdecimal():
            self.fail("must be a time span such as 90s, 30m, 12h, 30d or 52w", param, ctx)
        if len(digits) > MAX_SPAN_DIGITS or int(digits) * SPANS[unit] > MAX_SPAN_SECONDS:
            self.fail("must be a time span of at most 100 years, such as 52w", param, ctx)
        return float(int(digits) * SPANS[unit])


class Moment(click.ParamType[float | datetime]):
    """A time: a span such as 7d before now, in seconds, or a date and time as RFC 3339 writes it, else in UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | datetime:
        """Return seconds, or a time that has a time zone."""
        if value[-1:] in SPANS and value[:-1].isdecimal():
            return SPAN.convert(value, param, ctx)
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            self.fail("must be a span such as 7d, or a time such as 2026-11-17T00:00Z", param, ctx)
        if at.tzinfo is None:
            return at.replace(tzinfo=UTC)
        return at


def _number(text: Any) -> float:
    """Return a number, or NaN, which no range contains."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


COUNT = Count()
DOLLARS = Dollars()
LABEL = Label()
SHARE = Share()
SPAN = Span()

# -- options that several commands share

HOST = option("--host", "baton_host", metavar="ADDRESS", help="The address to listen on (BATON_HOST).")
PORT = option(
    "--port", "baton_port", type=click.IntRange(0, 65_535), metavar="PORT", help="The port to listen on (BATON_PORT)."
)
POOL = option("--pool", "baton_pool", metavar="FILE", help="The pool file (BATON_POOL).")
AS_JSON = flag("--json", help="Print JSON.")
SINCE = option("--since", type=SPAN, metavar="SPAN", help="Only runs of the last 30m, 12h, 7d, ...")
TRUST_CODE = flag(
    "--trust-code",
    help="Run unit tests of answers' code even if the kernel does not allow the network to be cut off.",
)


def filter_options(*names: str) -> Decorator[Any]:
    """Declare filters of runs, such as `--tier` and `--tenant`."""
    return in_order(*(option(f"--{name}", help=f"Only runs of this {name}.") for name in names))


def consent_options(section: str = "") -> Decorator[Any]:
    """Declare the options that choose the runs to learn from."""
    return in_order(
        option(
            "--consent",
            metavar="LABEL",
            section=section,
            help="Only runs with this label, or whose metadata has it with the value yes, true or 1.",
        ),
        flag("--everybody", section=section, help="Take all runs, because all callers have agreed to training."),
        repeatable("--without", metavar="LABEL", section=section, help="Leave out runs with this label."),
        option(
            "--held-out",
            type=Finite(0, 1, max_open=True),
            default=0.1,
            section=section,
            help="The share of conversations that is kept from training.",
        ),
        option(
            "--tier", section=section, help="Only runs of this tier; with --backend trl it is the tier to train for."
        ),
        option("--tenant", section=section, help="Only runs of this tenant."),
        flag("--rated", section=section, help="Only runs that a person or a rule has rated."),
    )


PLANNING = in_order(
    argument("question", "The question to plan for."),
    option("--tier", default="baton-ultra", help="The tier, or an alias of one."),
    option("--effort", help="minimal, low, medium, high, ... (default: the tier's own)."),
    repeatable("--label", type=LABEL, help="A label of the task; workers not cleared for it are left out."),
    repeatable("--allow", metavar="WORKER", help="A worker that may be used."),
    repeatable("--deny", metavar="WORKER", help="A worker that may not be used."),
    option("--pin", metavar="WORKER", help="The one worker to use."),
)
"""The question and the options of the commands that plan."""
