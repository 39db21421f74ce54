"""Contents that are stored in parts, so that a conversation's texts are stored once and not once for each turn.

A turn's task begins with the texts of the turn before it. So the texts of a task form a chain, in which each text names
the one `before` it, and a content names the last one (its `head`); two conversations that begin alike share the
beginning of their chains. What a task ends with, its tools above all, is one text (its `tail`). An answer is stored as
the text that follows the head of its run's task, because that is where the caller's next turn has it.

The id of a text is a hash of its owner, of the texts before it and of its own bytes, so that nobody looks for the
conversation to which a turn belongs: it writes all of its texts, and those that are stored already stay as they are.
The owner is a keyed hash of tenant, key and user, so nothing is shared between those.

An erasure deletes the texts that no content names any more, and which no other text follows, from the ends of the
chains upwards. A turn that has just begun to name such a text must not lose it: on Postgres whoever writes texts of an
owner holds a lock of that owner together with others, and whoever erases them holds it alone; both take it before they
lock a run's row. In SQLite writers exclude each other anyway.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    bindparam,
    delete,
    exists,
    func,
    select,
)

from app.core.message.chat import decode_spoken_text, encode_spoken_message
from app.store.protocol import SharedContent
from app.store.sqlkit.sealing import TEXT, Decrypt, place_of
from app.store.sqlkit.statements import OWN, RUN_IDS, TAIL, WHOLE, Row, select_shared_parts
from app.store.sqlkit.tables import FORMS, RUNS, SHARED_CONTENTS, TEXTS

_LINK = (TEXTS.c.id, TEXTS.c.before)
SHARED_BYTES = 256
"""Fewest bytes of an output or a tail that is stored as a text of its own."""
ID_DIGITS = 32
"""Hexadecimal digits of a text's id."""
LOCK_DIGITS = 16
"""Hexadecimal digits of an owner that make the number of its lock."""


class StoredParts(Struct, frozen=True):
    """The rows of a content that is stored in parts, and the texts that it names."""

    content: Row
    """Its row in `shared_contents`."""
    texts: Sequence[Row]
    thread: str
    """The id of the thread to which an answer to it belongs; empty if it has no head."""


def lock_of(owner: str) -> int:
    """Return the number of an owner's lock, or of a thread's."""
    return int.from_bytes(bytes.fromhex(owner[:LOCK_DIGITS]), signed=True)


def split_into_parts(run: str, shared: SharedContent, key: str = "") -> StoredParts:
    """Return the rows of a content of a run. Texts that are encrypted under different content keys are different
    texts."""
    texts: list[Row] = []
    owner = shared.owner + key
    before = None
    for part in shared.head:
        name = _id(before or owner, part)
        text = decode_spoken_text(part)
        if text is None:
            texts.append((name, before, False, part))
        else:
            texts.append((name, before, True, text))
        before = name
    tail, body = None, shared.body
    if len(shared.tail) >= SHARED_BYTES:
        tail = _id(f"{owner} tail", shared.tail)
        texts.append((tail, None, False, shared.tail))
    else:
        body += shared.tail
    size = sum(map(len, shared.head)) + len(shared.body) + len(shared.tail)
    thread = shared.owner[:LOCK_DIGITS] + before if before is not None else ""
    return StoredParts((run, shared.ref, before, tail, lock_of(shared.owner), size, body), texts, thread)


def parts_of_output(run: str, ref: str, body: bytes, thread: str) -> StoredParts:
    """Return the rows of the output `body` of a step of the run to which the thread belongs."""
    before = thread[LOCK_DIGITS:]
    name = _id(before, encode_spoken_message(body))
    content = (run, ref, None, name, lock_of(thread), len(body), b"")
    return StoredParts(content, [(name, before, True, body)], thread)


def _id(before: str, part: bytes) -> str:
    return hashlib.sha256(before.encode() + b" " + part).hexdigest()[:ID_DIGITS]


def compose(rows: Iterable[Sequence[Any]], decrypt: Decrypt) -> dict[str, dict[str, bytes]]:
    """Return the contents whose parts are in these rows of `select_shared_parts`, by run and ref. One without all its
    texts is left out, and so is one whose key was destroyed."""
    parts_by_content: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for run, ref, *part in map(tuple, rows):
        parts_by_content[run, ref].append(tuple(part))
    bodies: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
    for (run, ref), parts in parts_by_content.items():
        body = _compose_one(_decrypt_parts(parts, place_of(run, ref), decrypt))
        if body is not None:
            bodies[run][ref] = body
    return bodies


def _place(part: Row) -> int:
    place: int = part[0]
    return place


def _decrypt_parts(parts: Iterable[Row], its_own: str, decrypt: Decrypt) -> list[Row]:
    """Return the parts of a content in the order of their places, decrypted, without those whose key was destroyed."""
    decrypted_parts = []
    for place, body, spoken, size in sorted(parts, key=_place):
        bound_to = its_own if place in (WHOLE, OWN) else TEXT
        plain = decrypt(bound_to, bytes(body))
        if plain is not None:
            decrypted_parts.append((place, plain, spoken, size))
    return decrypted_parts


def _compose_one(parts: Sequence[Row]) -> bytes | None:
    """Return a content of its parts, which are ordered by their places (`WHOLE`, `TAIL`, `OWN` and those of the
    head)."""
    head: list[bytes] = []
    own, tail, size = b"", b"", 0
    for place, body, spoken, its_size in parts:
        if place == WHOLE:
            return bytes(body)
        if place == TAIL:
            tail = bytes(body)
        elif place == OWN:
            own, size = bytes(body), its_size
        elif spoken:
            head.append(encode_spoken_message(bytes(body)))
        else:
            head.append(bytes(body))
    whole = b"".join((*reversed(head), own, tail))
    if parts and len(whole) == size:
        return whole
    return None


_PARTS = select_shared_parts(SHARED_CONTENTS.c.run.in_(RUN_IDS))


def of_runs(conn: Connection, runs: Sequence[str], decrypt: Decrypt) -> Mapping[str, Mapping[str, bytes]]:
    """Return all contents of these runs that are stored in parts, by run and ref."""
    if not runs:
        return {}
    return compose(conn.execute(_PARTS, {"runs": runs}), decrypt)


def lock_owners(conn: Connection, runs: Sequence[str], held_locks: frozenset[int] = frozenset()) -> frozenset[int]:
    """Have nobody else write or erase texts of the owners of these runs until the end of the transaction.

    `held_locks` are the locks that it holds already. Returns all that it holds then.
    """
    if conn.dialect.name != "postgresql":
        return held_locks
    query = select(SHARED_CONTENTS.c.owner).where(SHARED_CONTENTS.c.run.in_(runs)).distinct()
    owners = frozenset(conn.execute(query).scalars())
    for owner in sorted(owners - held_locks):
        conn.execute(select(func.pg_advisory_xact_lock(bindparam("owner", owner, BigInteger))))
    return owners | held_locks


def erase(conn: Connection, runs: Sequence[str]) -> None:
    """Erase the contents of these runs that are stored in parts, and the texts that nothing names any more.

    The owners of the runs must be locked.
    """
    theirs = SHARED_CONTENTS.c.run.in_(runs)
    deletion = delete(SHARED_CONTENTS).where(theirs)
    ends = conn.execute(deletion.returning(SHARED_CONTENTS.c.head, SHARED_CONTENTS.c.tail)).all()
    candidates = set(chain.from_iterable(ends)) - {None}
    while candidates:
        deletion_of_texts = delete(TEXTS).where(TEXTS.c.id.in_(_chains_to_erase(sorted(candidates))))
        rows = conn.execute(deletion_of_texts.returning(*_LINK)).all()
        erased_ids = {name for name, _ in rows}
        candidates = {before for _, before in rows} - {None} - erased_ids


def _chains_to_erase(ids: Sequence[str]) -> Select[Any]:
    """Select from these texts those that nothing names and no text follows, each with the texts before it that only it
    needs.

    A text that two erased ones follow is left for the next statement.
    """
    ends = (
        select(*_LINK)
        .where(TEXTS.c.id.in_(ids), *_is_unnamed(TEXTS), ~_has_follower(TEXTS))
        .cte("chain", recursive=True)
    )
    earlier = TEXTS.alias("earlier")
    above = select(earlier.c.id, earlier.c.before).join(ends, ends.c.before == earlier.c.id)
    whole = ends.union_all(above.where(*_is_unnamed(earlier), ~_has_follower(earlier, by_others_than=ends.c.id)))
    return select(whole.c.id)


def _is_unnamed(text: FromClause) -> Sequence[ColumnElement[bool]]:
    """No content names the text."""
    columns = (SHARED_CONTENTS.c.head, SHARED_CONTENTS.c.tail)
    return tuple(~exists(select(column).where(column == text.c.id)) for column in columns)


def _has_follower(text: FromClause, by_others_than: ColumnElement[str] | None = None) -> ColumnElement[bool]:
    following = TEXTS.alias("following")
    followers = select(following.c.id).where(following.c.before == text.c.id)
    if by_others_than is not None:
        followers = followers.where(following.c.id != by_others_than)
    return exists(followers)


_COUNT_OF_UNUSED = select(func.count()).select_from(TEXTS).where(*_is_unnamed(TEXTS), ~_has_follower(TEXTS))


def count_unused(conn: Connection) -> int:
    """Return the number of texts that no content names and no other text follows. There are none unless something is
    wrong."""
    return conn.execute(_COUNT_OF_UNUSED).scalar_one()


def count_missing(conn: Connection) -> int:
    """Return the number of texts and contents that name a text which is not stored. There are none unless something is
    wrong."""
    columns = (TEXTS.c.before, SHARED_CONTENTS.c.head, SHARED_CONTENTS.c.tail)
    target = TEXTS.alias("stored")
    count = 0
    for column in columns:
        is_missing = ~exists(select(target.c.id).where(target.c.id == column))
        count += conn.execute(select(func.count()).where(column.is_not(None), is_missing)).scalar_one()
    return count


def count_misplaced(conn: Connection) -> int:
    """Return the number of texts that have another tenant than the text before them, or than the run of a content that
    names them. There are none unless something is wrong."""
    earlier = TEXTS.alias("earlier")
    after = select(TEXTS.c.id).join(earlier, earlier.c.id == TEXTS.c.before).where(earlier.c.tenant != TEXTS.c.tenant)
    wrong = set(conn.execute(after).scalars())
    for column in (SHARED_CONTENTS.c.head, SHARED_CONTENTS.c.tail):
        tables = TEXTS.join(SHARED_CONTENTS, column == TEXTS.c.id).join(RUNS, RUNS.c.id == SHARED_CONTENTS.c.run)
        query = select(TEXTS.c.id).select_from(tables).where(RUNS.c.tenant != TEXTS.c.tenant)
        wrong.update(conn.execute(query).scalars())
    return len(wrong)


def read_sharing_start(conn: Connection) -> float | None:
    """Return the time from which on contents may be stored in parts, in seconds since 1970."""
    return conn.execute(select(FORMS.c.since).where(FORMS.c.name == "shared")).scalar_one_or_none()
