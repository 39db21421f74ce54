"""Query strings of the audit routes: each parameter has one reader.

What a reader cannot read is a 400 that names the parameter.
"""

import base64
import binascii
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Any

import orjson

from app.core.pool.catalog import MILLION
from app.errors import InvalidRequest

REPLY_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)?(run_[0-9a-z]+)(?:[-_]\d+)?")
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
PAGE = 100
EVENT_PAGE = 1_000
Reader = Callable[[str], Any]
"""From a parameter's text to its value; raises ValueError with what it wants."""


def read(params: Mapping[str, str], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The values of the given parameters; raises `InvalidRequest` for one that is unknown or cannot be read."""
    asked: dict[str, Any] = {}
    for name, value in params.items():
        if name not in readers:
            raise InvalidRequest(f"Unknown query parameter; there are {', '.join(readers)}.", code="unknown_parameter")
        if len(value) > 512 or "\x00" in value or not value.isprintable():
            raise InvalidRequest(f"Invalid value for '{name}'.", param=name, code="invalid_value")
        try:
            asked[name] = readers[name](value)
        except ValueError as error:
            raise InvalidRequest(f"Invalid value for '{name}': {error}.", param=name, code="invalid_value") from None
    return asked


def text(value: str) -> str:
    """Any text."""
    return value


def one_of(known: Iterable[str]) -> Reader:
    """One of a closed set."""
    names = tuple(known)

    def choice(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return choice


def truth(value: str) -> bool:
    """`true` or `false`."""
    if value not in ("true", "false", "1", "0"):
        raise ValueError("must be true or false")
    return value in ("true", "1")


def whole(value: str) -> int:
    """A whole number from 0."""
    if not (value.isascii() and value.isdecimal() and len(value) <= 15):
        raise ValueError("must be a whole number")
    return int(value)


def limit(value: str) -> int:
    """A page's length."""
    number = whole(value)
    if not 1 <= number <= PAGE:
        raise ValueError(f"must be from 1 to {PAGE}")
    return number


def event_limit(value: str) -> int:
    """The length of a page of events."""
    number = whole(value)
    if not 1 <= number <= EVENT_PAGE:
        raise ValueError(f"must be from 1 to {EVENT_PAGE}")
    return number


def moment(value: str) -> float:
    """Seconds since 1970, or a time as RFC 3339 writes it; without an offset it is UTC."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = _rfc3339(value)
    if not (math.isfinite(seconds) and 0 <= seconds < 1e11):
        raise ValueError("must be seconds since 1970 or RFC 3339")
    return seconds


def _rfc3339(value: str) -> float:
    try:
        at = datetime.fromisoformat(value.replace(" ", "+"))
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("must be seconds since 1970 or RFC 3339") from None


def micro_dollars(value: str) -> int:
    """Dollars as a decimal number, in micro-dollars, rounded up: what a cost must reach."""
    try:
        amount = Decimal(value)
    except InvalidOperation:
        raise ValueError("must be a decimal number of dollars") from None
    if not amount.is_finite() or not 0 <= amount <= MILLION:
        raise ValueError("must be a decimal number of dollars")
    return int((amount * MILLION).to_integral_value(ROUND_CEILING))


def as_cursor(created_at: float, run: str) -> str:
    """Where the next page begins."""
    return base64.urlsafe_b64encode(orjson.dumps([created_at, run])).decode().rstrip("=")


def cursor(value: str) -> tuple[float, str]:
    """The inverse of `as_cursor`."""
    try:
        pair = orjson.loads(base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)))
        created_at, run = pair
    except (ValueError, TypeError, binascii.Error):
        raise ValueError("is not a cursor of this service") from None
    if not isinstance(created_at, float | int) or not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise ValueError("is not a cursor of this service")
    return float(created_at), run


def run_of(name: str) -> str:
    """The run that a reply's id leads to; a run's own id as it is."""
    reply = REPLY_ID.fullmatch(name)
    return reply[1] if reply else name
