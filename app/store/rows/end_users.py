"""The end users of runs, as far as the content of a run names them."""

from collections.abc import Collection, Sequence
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, bindparam, false, func, or_, select, union_all
from sqlalchemy.types import LargeBinary

from app.core.message.chat import BEGINNING
from app.store.sqlkit.sealing import MAGIC, Decrypt, place_of
from app.store.sqlkit.tables import CONTENTS, EVENTS, SHARED_CONTENTS

IDENTIFIER = "safety_identifier"
"""The other name, apart from `user`, by which a request names its end user."""
MOST_SOUGHT = 50
"""Most users whom the database itself looks for; for more, the tasks of all runs are read."""


def of_runs(conn: Connection, users: Collection[str], runs: Sequence[str], decrypt: Decrypt) -> dict[str, set[str]]:
    """Return the runs among these whose task names one of the users, each with those it names. Raises `UnknownKeys`.

    The database looks for the bytes in which `task_to_json` names a user, so that only likely bodies are read, and
    all that are encrypted. The tags of users are not asked: processes of earlier releases wrote none. An output of a
    worker may have the same fields; it names nobody, because the run's admission names another content as the task.
    """
    if not users or not runs:
        return {}
    search = func.pg_catalog.position if conn.dialect.name == "postgresql" else func.instr
    patterns = _patterns(users)

    def mentions(body: ColumnElement[bytes]) -> ColumnElement[bool]:
        is_encrypted = func.substr(body, 1, len(MAGIC)) == bindparam(None, MAGIC, LargeBinary)
        return or_(is_encrypted, *[search(body, bindparam(None, pattern, LargeBinary)) > 0 for pattern in patterns])

    whole, part = CONTENTS.c, SHARED_CONTENTS.c
    likely = select(whole.run, whole.ref, whole.body, false(), false()).where(whole.run.in_(runs), mentions(whole.body))
    has_parts = part.head.is_not(None), part.tail.is_not(None)
    in_parts = select(part.run, part.ref, part.body, *has_parts).where(part.run.in_(runs), mentions(part.body))
    users_by_content: dict[tuple[str, str], set[str]] = {}
    for run, ref, stored_body, *has in conn.execute(union_all(likely, in_parts)):
        body = decrypt(place_of(run, ref), bytes(stored_body))
        if body is None:
            continue
        named_users = _users_of_task(_without_texts(body, *has)) & set(users)
        if named_users:
            users_by_content[run, ref] = named_users
    tasks = _tasks_of_runs(conn, {run for run, _ in users_by_content})
    return {run: names for (run, ref), names in users_by_content.items() if tasks.get(run, ref) == ref}


def _tasks_of_runs(conn: Connection, runs: Collection[str]) -> dict[str, str]:
    """Return the ref of the task of each of these runs, as far as its first event is undamaged and names one."""
    if not runs:
        return {}
    admissions = select(EVENTS.c.run, EVENTS.c.body).where(EVENTS.c.run.in_(sorted(runs)), EVENTS.c.seq == 1)
    refs: dict[str, str] = {}
    for run, body in conn.execute(admissions):
        admission = _parse_object(body)
        if "task" in admission:
            refs[run] = admission["task"]
    return refs


def _parse_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one for other bytes."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


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
    value = _parse_object(body)
    if "messages" not in value:
        return set()
    names = [value.get("user")]
    echoed = value.get("echoed")
    if isinstance(echoed, dict):
        names.append(echoed.get(IDENTIFIER))
    return {user for user in names if isinstance(user, str)}
