"""The terminal: consoles, figures in words, and log lines, which are JSON where standard error is not a terminal."""

import logging
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.core.message.hidden_characters import HIDDEN
from app.core.pool.catalog import MILLION
from app.telemetry import JsonLines

PIPED_WIDTH = 160
"""The columns of what is no terminal, where the environment variable `COLUMNS` does not say."""
QUIETED_LOGGERS = ("uvicorn", "alembic", "asyncio", "httpx", "aiohttp")


class _Console(Console):
    """A console that no text can steer, and that does not choose the exit status of the process when its reader has
    left, as rich's does."""

    def render_str(self, text: str, **attributes: Any) -> Text:
        """Render a text, which callers or workers may have written, without control characters."""
        return super().render_str(clean(text), **attributes)

    def on_broken_pipe(self) -> None:
        """Raise the error on."""
        raise BrokenPipeError


def stdout() -> Console:
    """Return the console of standard output, for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """Return the console of standard error, for progress and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stdout
    if stderr:
        stream = sys.stderr
    width = None
    if not stream.isatty() and "COLUMNS" not in os.environ:  # rich reads both by itself
        width = PIPED_WIDTH
    return _Console(stderr=stderr, width=width, highlight=False, emoji=False, markup=False)


def clean(text: str) -> str:
    """Return a text of callers or workers with a mark in the place of each control character, so that it has no escape
    sequences, and of each character that nobody would see."""
    return "".join([_visible(char) for char in text])


def _visible(char: str) -> str:
    if char not in "\n\t" and (ord(char) in HIDDEN or unicodedata.category(char).startswith("C")):
        return "\N{REPLACEMENT CHARACTER}"
    return char


def excerpt(text: str, length: int) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(clean(text).split())
    if len(line) <= length:
        return line
    return f"{line[: length - 1]}…"


def dollars(micro: float) -> str:
    """Return micro-dollars as dollars, with as many digits as are needed."""
    whole, _, part = f"{micro / MILLION:,.6f}".partition(".")
    return f"${whole}.{part.rstrip('0').ljust(2, '0')}"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 run`, `1,234 runs`. `plural` is for nouns that take more than an s."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or f'{noun}s'}"


def minute(at: float) -> str:
    """Return a point in time in seconds since 1970 to the minute, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def second(at: float) -> str:
    """Return a point in time in seconds since 1970 to the second, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment(at: float) -> str:
    """Return a point in time in seconds since 1970 with its time zone, which is UTC."""
    return f"{second(at)} UTC"


def duration(seconds: float) -> str:
    """Return a duration in milliseconds below one second, else in seconds."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s"


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table in the style of all commands."""
    return Table(*columns, title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)


def print_table(table: Table, without_rows: str) -> None:
    """Print a table on standard output; in place of one that has no rows, the sentence `without_rows`."""
    if table.row_count:
        stdout().print(table)
    else:
        stdout().print(without_rows)


def add_row(table: Table, cells: Iterable[str]) -> None:
    """Add a row of texts, which callers or workers may have written. Long texts are folded."""
    table.add_row(*[Text(clean(cell), overflow="fold") for cell in cells])


def plain(value: object) -> str:
    """Return a value of a JSON document in words, for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return ("no", "yes")[value]
    return str(value)


def print_json(value: object) -> None:
    """Print a value as indented JSON on standard output; records are objects with their fields."""
    print(orjson.dumps(value, default=msgspec.to_builtins, option=orjson.OPT_INDENT_2).decode(), flush=True)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    stderr().print(f"Warning: {text}.", soft_wrap=True)


def program_command() -> str:
    """Return the command by which this program can be called again from the current folder."""
    path = Path(sys.argv[0])
    if path.name != "baton":
        return f"{Path(sys.executable).name} -m app"
    if shutil.which("baton"):
        return "baton"
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path)


class PlainLines(logging.Formatter):
    """Formats log lines for people: time, level from warnings on, message, fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Render one record. An exception is shown by its type only."""
        message = clean(record.getMessage())
        if record.levelno >= logging.WARNING:
            message = f"{record.levelname}: {message}"
        line = f"{self.formatTime(record, self.datefmt)} {message}"
        for name, value in getattr(record, "fields", {}).items():
            line += f"  {name}={clean(str(value))}"
        if record.exc_info and record.exc_info[0]:
            line += f"  error={record.exc_info[0].__name__}"
        return line


def log_to_stderr(level: str) -> None:
    """Send log lines to standard error, as JSON unless it is a terminal. Called once, at start-up."""
    stream = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty():
        stream.setFormatter(PlainLines())
    else:
        stream.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [stream]
    root.setLevel(level.upper())
    for name in QUIETED_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
