"""The entries of Baton's log, one for each state of something that auditors rely on.

deploy/docs/transparency.md has the layout.

An entry is JSON without spaces and with sorted keys. It holds ids, times and hashes only, and stays for good:

    {"at":1790000000.125,"events":7,"id":"run_…","private":"…","root":"…","row":"…","t":"run","v":1}

`t` says of what it is the state and `id` of which one, `at` when it was sealed. The hashes are base64 of 32 bytes:

    root             the Merkle root over the events 1 to `events` of the run (app/core/run/journal_hash.py)
    private          the commitment to what is erased with the content of a run, under the salt of the run
    before           the SHA-256 of the salt of the entry before it about the same row
    all other parts  commitments under the salt of the entry, which is stored beside it and deleted with its run

    commitment = HMAC-SHA-256(salt, part || LF || values)

`values` is a JSON object of the columns of the row that are not NULL, or an array of such objects, without spaces and
with sorted keys: numbers as the shortest decimal that reads back, bytes as base64. Whoever has salt and row can check
the commitment; once the salt is deleted, nobody can find the row by trying.
"""

import hmac
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import orjson
from msgspec import Struct

VERSION = 1
SALT_BYTES = 16
"""Bytes of the salt of an entry."""
RUN, PRUNED, ERASURE = "run", "pruned", "erasure"
"""The state of a run, the row that is left of a pruned one, and when and by what the content of a run was erased."""
LOG_KEY = "log_key"
"""The entry that names the keys by which checkpoints are signed from then on."""
ROW, PRIVATE, END, DISCLOSURES = "row", "private", "end", "disclosures"
"""Parts of an entry that are commitments."""
Values = Mapping[str, Any]
"""The columns of a row by their names."""


def canonical(values: Values | Sequence[Values]) -> bytes:
    """Return the bytes to which a commitment is made."""
    stated = [_drop_none(value) for value in values] if isinstance(values, list | tuple) else _drop_none(values)
    try:
        return orjson.dumps(stated, default=_text_of_bytes, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # the names are texts of a class of SQLAlchemy's own
        return orjson.dumps(stated, default=_text_of_bytes, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def _drop_none(values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _text_of_bytes(value: object) -> str:
    if isinstance(value, bytes | memoryview):
        return b64encode(value).decode()
    raise TypeError


def commitment(salt: bytes, part: str, values: Values | Sequence[Values]) -> str:
    """Return the commitment to a part of an entry, in base64."""
    digest = hmac.digest(salt, part.encode() + b"\n" + canonical(values), "sha256")
    return b64encode(digest).decode()


class Leaf(Struct, frozen=True):
    """An entry, as it was read. `parts` has its commitments by their names."""

    kind: str
    id: str
    at: float
    events: int
    """Of a run: the number of its events that are sealed with this entry and those before it."""
    root: bytes
    """Of a run: the root over these events."""
    gone: bool
    """True if there was no such row any more."""
    parts: Mapping[str, str]
    version: int = VERSION


_NAMES = frozenset({"v", "t", "id", "at", "events", "root", "gone", "run"})


def leaf(kind: str, name: str, at: float, parts: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry about the thing of this kind and id. `parts` are the other fields, in any order."""
    return orjson.dumps({"v": VERSION, "t": kind, "id": name, "at": at, **parts}, option=orjson.OPT_SORT_KEYS)


def before_part(salt: bytes) -> dict[str, Any]:
    """Return the field of an entry that names the salt of the one before it about the same row, which no row proves any
    more."""
    return {"before": b64encode(sha256(salt).digest()).decode()}


def events_part(events: int, root: bytes) -> dict[str, Any]:
    """Return the fields of an entry that stand for the first events of a run."""
    return {"events": events, "root": b64encode(root).decode()}


def parse_leaf(entry: bytes) -> Leaf:
    """Return the entry of these bytes. Raises ValueError for bytes that are none."""
    try:
        fields = orjson.loads(entry)
        return Leaf(
            kind=str(fields["t"]),
            id=str(fields["id"]),
            at=float(fields["at"]),
            events=int(fields.get("events", 0)),
            root=b64decode(fields.get("root", "")),
            gone=bool(fields.get("gone", False)),
            parts={name: value for name, value in fields.items() if name not in _NAMES and isinstance(value, str)},
            version=int(fields["v"]),
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError("An entry of the log has a form that no release of Baton writes.") from None
