"""The classes of `BATON_RETENTION_CLASSES`: how long runs of a tenant, a tier or a label are kept.

    label=phi=>content=7; tenant=acme,tier=baton-ultra=>content=30,events=3650; tenant=bank=>events=never

Each class names a tenant, a tier or a label, or several that must all hold, and days for texts (`content`) or whole
runs (`events`), or `never`.
"""

import re
from math import inf

from app.core.pool.rules import LABEL_FORM, LABEL_WORDS
from app.core.run.retention_classes import RetentionClass, RunClass

DAY_SECONDS = 86_400.0
MAX_DAYS = 36_525.0
NAMES = ("tenant", "tier", "label")
KEPT = ("content", "events")


def retention_classes(text: str) -> tuple[RetentionClass, ...]:
    """Read the classes. Raises ValueError for a class that cannot be read, with its number."""
    classes = []
    for number, part in enumerate(filter(None, map(str.strip, text.split(";"))), 1):
        selectors, separator, periods = part.partition("=>")
        of, seconds = _pairs(selectors, NAMES), _pairs(periods, KEPT)
        if not separator or of is None or seconds is None:
            raise ValueError(f"class {number} cannot be read; write it as label=phi=>content=7,events=3650")
        if "label" in of and not re.fullmatch(LABEL_FORM, of["label"]):
            raise ValueError(f"class {number} has a label that no request can have; a label is {LABEL_WORDS}")
        seconds_by_kind = {name: _seconds(value, number) for name, value in seconds.items()}
        classes.append(RetentionClass(RunClass(**of), seconds_by_kind.get("content"), seconds_by_kind.get("events")))
    return tuple(classes)


def _pairs(text: str, names: tuple[str, ...]) -> dict[str, str] | None:
    """Return the values by name; None if a name is unknown, is given twice, or has no value, or if there is none."""
    values: dict[str, str] = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        if name not in names or name in values or not value.strip():
            return None
        values[name] = value.strip()
    return values


def _seconds(text: str, number: int) -> float:
    """Return the seconds of a number of days, or infinity for `never`."""
    if text == "never":
        return inf
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= MAX_DAYS:
        raise ValueError(f"class {number} has no number of days; write one up to {MAX_DAYS:.0f}, or never")
    return days * DAY_SECONDS
