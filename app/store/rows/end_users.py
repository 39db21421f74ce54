"""The end users of runs, as far as the content of a run names them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    false,
    func,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.types import LargeBinary

from app.core.message.chat import BEGINNING
from app.store.rows.runs import parse_object
from app.store.sqlkit.sealing import MAGIC, Decrypt, place_of
from app.store.sqlkit.tables import CONTENTS, EVENTS, SHARED_CONTENTS

IDENTIFIER = "safety_identifier"
"""The other name, apart from `user`, by which a request names its end user."""
MOST_SOUGHT = 50
"""Most users whom the database itself looks for; for more, the tasks of all runs are read."""
READ_BYTES = 4 * 2**20
"""Most bytes of encrypted tasks that are read at a time, unless a single one has more."""


def of_runs(conn: Connection, users: Collection[str], runs: Sequence[str], decrypt: Decrypt) -> dict[str, set[str]]:
    """Return the runs among these whose task names one of the users, each with those it names. Raises `UnknownKeys`.

    The database looks for the bytes in which `task_to_json` names a user, so that only likely bodies are read, and
    the tasks that are encrypted. The tags of users are not asked: processes of earlier releases wrote none. An
    output of a worker may have the same fields; it names nobody, because the run's admission names another content
    as the task.
    """
    if not users or not runs:
        return {}
    search = func.pg_catalog.position if conn.dialect.name == "postgresql" else func.instr
    patterns = _patterns(users)

    def mentions(table: Table) -> ColumnElement[bool]:
        found = [search(table.c.body, bindparam(None, pattern, LargeBinary)) > 0 for pattern in patterns]
        return and_(table.c.run.in_(runs), or_(*found))

    users_by_content: dict[tuple[str, str], set[str]] = {}
    for run, ref, stored_body, *has in chain(_read(conn, mentions), _encrypted_tasks(conn, runs)):
        body = decrypt(place_of(run, ref), bytes(stored_body))
        if body is None:
            continue
        named_users = _users_of_task(_without_texts(body, *has)) & set(users)
        if named_users:
            users_by_content[run, ref] = named_users
    tasks = _tasks_of_runs(conn, {run for run, _ in users_by_content})
    return {run: names for (run, ref), names in users_by_content.items() if tasks.get(run, ref) == ref}


def _read(conn: Connection, chosen: Callable[[Table], ColumnElement[bool]]) -> Iterator[Any]:
    """Return the chosen contents: run, ref, body, and whether its beginning and its end are stored apart."""
    whole, part = CONTENTS.c, SHARED_CONTENTS.c
    as_a_whole = select(whole.run, whole.ref, whole.body, false(), false()).where(chosen(CONTENTS))
    has_parts = part.head.is_not(None), part.tail.is_not(None)
    in_parts = select(part.run, part.ref, part.body, *has_parts).where(chosen(SHARED_CONTENTS))
    return iter(conn.execute(union_all(as_a_whole, in_parts)))


def _encrypted_tasks(conn: Connection, runs: Sequence[str]) -> Iterator[Any]:
    """Yield the tasks of these runs that are encrypted, as `_read` does, at most `READ_BYTES` of them at a time."""
    sizes: dict[tuple[str, str], int] = {}
    for table in (CONTENTS, SHARED_CONTENTS):
        row = table.c
        is_encrypted = func.substr(row.body, 1, len(MAGIC)) == bindparam(None, MAGIC, LargeBinary)
        query = select(row.run, row.ref, func.length(row.body)).where(row.run.in_(runs), is_encrypted)
        for run, ref, size in conn.execute(query):
            sizes[run, ref] = size
    tasks = _tasks_of_runs(conn, {run for run, _ in sizes})
    group: list[tuple[str, str]] = []
    bytes_left = READ_BYTES
    for (run, ref), size in sizes.items():
        if tasks.get(run, ref) != ref:
            continue
        if group and size > bytes_left:
            yield from _read(conn, partial(_is_among, group))
            group, bytes_left = [], READ_BYTES
        group.append((run, ref))
        bytes_left -= size
    if group:
        yield from _read(conn, partial(_is_among, group))


def _is_among(pairs: Collection[tuple[str, str]], table: Table) -> ColumnElement[bool]:
    return tuple_(table.c.run, table.c.ref).in_(pairs)


def _tasks_of_runs(conn: Connection, runs: Collection[str]) -> dict[str, str]:
    """Return the ref of the task of each of these runs, as far as its first event is undamaged and names one."""
    if not runs:
        return {}
    admissions = select(EVENTS.c.run, EVENTS.c.body).where(EVENTS.c.run.in_(sorted(runs)), EVENTS.c.seq == 1)
    refs: dict[str, str] = {}
    for run, body in conn.execute(admissions):
        admission = parse_object(body)
        if "task" in admission:
            refs[run] = admission["task"]
    return refs


def _patterns(users: Collection[str]) -> list[bytes]:
    """Return the bytes, one of which a task has that names one of the users."""
    patterns = []
    for name in ("user", IDENTIFIER):
        field = f'"{name}":'.encode()
        if len(users) > MOST_SOUGHT:
            patterns.append(field)
            continue
        for user in sorted(users):
            patterns.append(field + orjson.dumps(user))
    return patterns


def _without_texts(body: bytes, has_head: bool, has_tail: bool) -> bytes:
    """Return a task without its conversation and its last fields, where these are stored apart: it is JSON all the
    same."""
    whole = bytes(body)
    if has_head:
        whole = BEGINNING + whole
    if has_tail:
        whole += b"}"
    return whole


def _users_of_task(body: bytes) -> set[str]:
    """Return the users whom this content names if it is a task; none if it is a text that only has such words in it.

    It may be an output of a worker's, so nothing is known of the types of its values.
    """
    value = parse_object(body)
    if "messages" not in value:
        return set()
    names = [value.get("user")]
    echoed = value.get("echoed")
    if isinstance(echoed, dict):
        names.append(echoed.get(IDENTIFIER))
    return {user for user in names if isinstance(user, str)}
