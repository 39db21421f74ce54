"""The entries of the log, and commitments to rows, written anew after deploy/docs/transparency.md."""

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.audit.log.tree import LogFormatError

RUN, PRUNED, FEEDBACK, LOG_KEY = "run", "pruned", "feedback", "log_key"
FIXED = frozenset({PRUNED, FEEDBACK, "catalog", "conductor_change", "admin_event"})
"""Kinds of things that never change: each of their entries must fit the row, not only the last one."""
ROW, END, PRIVATE, DISCLOSURES, BEFORE = "row", "end", "private", "disclosures", "before"


@dataclass(slots=True)
class LogEntry:
    """An entry of the log with its place there and the salt of its commitments."""

    place: int
    kind: str
    id: str
    at: float
    events: int
    root: str
    """Of a run: the root over its first `events` events, in base64."""
    is_deletion: bool
    run: str
    fields: Mapping[str, Any]
    salt: bytes | None


def read_entry(place: int, entry: bytes, salt: bytes | None) -> LogEntry:
    """Return an entry. Raises `LogFormatError`."""
    try:
        fields = orjson.loads(entry)
        for text in (fields["t"], fields["id"], fields.get("root", ""), fields.get("run", "")):
            if not isinstance(text, str):
                raise TypeError("a kind, an id or a root that is no text")
        events = int(fields.get("events", 0))
        if events < 0:
            raise ValueError("a negative number of events")
        return LogEntry(
            place=place,
            kind=fields["t"],
            id=fields["id"],
            at=float(fields["at"]),
            events=events,
            root=fields.get("root", ""),
            is_deletion=bool(fields.get("gone", False)),
            run=fields.get("run", ""),
            fields=fields,
            salt=salt,
        )
    except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
        raise LogFormatError(f"Entry {place:,} of the log is not in the form that the guide describes.") from None


def commits_to(
    entry: LogEntry, part: str, values: Mapping[str, Any] | Sequence[Mapping[str, Any]], salt: bytes
) -> bool:
    """Return True if the part of the entry is the commitment to these values."""
    plain = _without_nulls(values) if isinstance(values, Mapping) else [_without_nulls(value) for value in values]
    body = orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)
    commitment = hmac.digest(salt, part.encode() + b"\n" + body, "sha256")
    return base64.b64encode(commitment).decode() == entry.fields.get(part)


def has_salt_before(entry: LogEntry, salt: bytes | None) -> bool:
    """Return True if this is the salt of the entry before it, as the entry says."""
    return salt is not None and base64.b64encode(hashlib.sha256(salt).digest()).decode() == entry.fields.get(BEFORE)


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that are not NULL, bytes as base64."""
    columns = {}
    for name, value in values.items():
        if value is not None:
            columns[str(name)] = base64.b64encode(value).decode() if isinstance(value, bytes | memoryview) else value
    return columns
