"""Contents of runs, addressed by a salted hash, so that they can be erased while the journal stays verifiable.

The journal holds addresses only. Without the salt, which is erased with the content, nobody can find a short text by
hashing candidates; with the salt, a body proves that it is the one that the journal names.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, func, select, tuple_, union, union_all, update

from app.core.run.kinds import COPIES
from app.core.transparency.leaves import ERASURE
from app.store.protocol import ERASED_TAGS, PLAN_TAG, Actor
from app.store.protocol.journal import ErasedBy
from app.store.rows import feedback, holds, texts
from app.store.rows.admin_events import note_erasures
from app.store.rows.runs import clock
from app.store.rows.transparency_log import queue_runs
from app.store.sqlkit.sealing import Decrypt, place_of
from app.store.sqlkit.statements import RUN_IDS, Row, SingleStatement, Statements, select_shared_parts
from app.store.sqlkit.tables import CATALOGS, CONTENTS, RUNS, SHARED_CONTENTS, TAGS, insert_into


def _sizes() -> Select[Any]:
    """Select the bytes of all contents of each run of a list, whole ones and shared ones."""
    whole = select(CONTENTS.c.run, func.length(CONTENTS.c.body).label("size")).where(CONTENTS.c.run.in_(RUN_IDS))
    shared = select(SHARED_CONTENTS.c.run, SHARED_CONTENTS.c.size).where(SHARED_CONTENTS.c.run.in_(RUN_IDS))
    both = union_all(whole, shared).subquery()
    return select(both.c.run, func.sum(both.c.size)).group_by(both.c.run)


_SIZES = _sizes()
_WHOLE_CONTENTS = select(CONTENTS).where(CONTENTS.c.run.in_(RUN_IDS))


def read(statements: Statements, run: str, refs: Sequence[str], decrypt: Decrypt) -> SingleStatement[dict[str, bytes]]:
    """Return the bodies that are still stored, by ref. Raises `UnknownKeys`."""
    parameters = (run, statements.values(refs))
    return SingleStatement(statements.contents, (*parameters, *parameters), partial(_bodies, run, decrypt))


def _bodies(run: str, decrypt: Decrypt, rows: Sequence[Row]) -> dict[str, bytes]:
    return texts.compose(rows, decrypt).get(run, {})


def of_runs(conn: Connection, runs: Sequence[str], decrypt: Decrypt) -> Mapping[str, Mapping[str, bytes]]:
    """Return all contents of these runs that are still stored, by run and ref. Raises `UnknownKeys`."""
    shared = texts.of_runs(conn, runs, decrypt)
    contents: dict[str, dict[str, bytes]] = {run: dict(bodies) for run, bodies in shared.items()}
    for run, ref, stored_body in conn.execute(_WHOLE_CONTENTS, {"runs": runs}):
        body = decrypt(place_of(run, ref), bytes(stored_body))
        if body is not None:
            contents.setdefault(run, {})[ref] = body
    return contents


def one_of_each(conn: Connection, pairs: Sequence[tuple[str, str]], decrypt: Decrypt) -> Mapping[str, bytes]:
    """Return the content with this ref of each of these runs, if it is still stored. Raises `UnknownKeys`."""
    whole, part = CONTENTS.c, SHARED_CONTENTS.c
    rows = conn.execute(select(whole.run, whole.ref, whole.body).where(tuple_(whole.run, whole.ref).in_(pairs)))
    bodies: dict[str, bytes] = {}
    for run, ref, stored_body in rows:
        body = decrypt(place_of(run, ref), bytes(stored_body))
        if body is not None:
            bodies[run] = body
    shared_pairs = [pair for pair in pairs if pair[0] not in bodies]
    parts = conn.execute(select_shared_parts(tuple_(part.run, part.ref).in_(shared_pairs)))
    for run, body_of_ref in texts.compose(parts, decrypt).items():
        bodies[run] = next(iter(body_of_ref.values()))
    return bodies


def sizes(conn: Connection, runs: Sequence[str]) -> Mapping[str, int]:
    """Return the bytes of all contents of each of these runs that has any. Shared texts count for each run."""
    return {run: int(size) for run, size in conn.execute(_SIZES, {"runs": runs})}


def erase(
    conn: Connection, statements: Statements, runs: Sequence[str], decrypt: Decrypt, cause: ErasedBy, by: Actor
) -> int:
    """Erase all content of these runs, their salts and the comments on them, and the texts that no other run names; the
    erasures that somebody has asked for are logged.

    Runs that a legal hold covers stay as they are. Returns how many still had a salt. The rows are locked in the order
    of their ids, as all writers of several runs lock them. Raises `UnknownKeys`.
    """
    holds.lock(conn)
    statements.plan_by_key(conn)
    hold_of_run = holds.find_by_run(conn, runs, decrypt)
    runs = [run for run in runs if run not in hold_of_run]
    owners = texts.lock_owners(conn, runs)
    query = select(RUNS.c.id, RUNS.c.tenant).where(RUNS.c.id.in_(runs), RUNS.c.salt.is_not(None)).order_by(RUNS.c.id)
    tenants_by_run = {run: tenant for run, tenant in conn.execute(query.with_for_update())}
    ids = list(tenants_by_run)
    erasure = update(RUNS).where(RUNS.c.id.in_(ids))
    changes = {"erased_at": clock(conn), "erased_by": cause, "revision": RUNS.c.revision + 1}
    conn.execute(erasure.values(salt=None, thread=None, **changes))
    queue_runs(conn, ids, ERASURE)
    if cause != "retention":
        note_erasures(conn, tenants_by_run, cause, by)
    delete_bodies(conn, runs, owners)
    feedback.erase_comments(conn, runs)
    return len(ids)


def delete_bodies(conn: Connection, runs: Sequence[str], owners: frozenset[int]) -> None:
    """Delete the texts of these runs that no other run names, and the tags with words of their callers.

    The runs must be locked, and before them these owners.
    """
    texts.lock_owners(conn, runs, owners)  # of contents that were written before the runs were locked
    conn.execute(delete(CONTENTS).where(CONTENTS.c.run.in_(runs)))
    texts.erase(conn, runs)
    # The names are literals: a partial index is used only for a condition that the planner can see.
    of_callers = TAGS.c.name.in_(bindparam("of_callers", ERASED_TAGS, expanding=True, literal_execute=True))
    conn.execute(delete(TAGS).where(TAGS.c.run.in_(runs), of_callers))


def erase_one(
    conn: Connection, statements: Statements, run: str, tenant: str | None, decrypt: Decrypt, by: Actor
) -> bool:
    """Erase as `erase` does, also the copies of the run, which have its texts. False if there is no such run, or if it
    is not this tenant's (None: any tenant's).

    Raises `LegalHold` if a hold covers one of them.
    """
    holds.lock(conn)
    is_theirs = (RUNS.c.id == run,) if tenant is None else (RUNS.c.id == run, RUNS.c.tenant == tenant)
    if conn.execute(select(RUNS.c.id).where(*is_theirs)).first() is None:
        return False
    erased_runs: set[str] = set()
    # A copy that was being admitted meanwhile is there at the second look; later ones are refused (`writing/batch.py`).
    while names := [name for name in (run, *copies(conn, run)) if name not in erased_runs]:
        holds.refuse(conn, names, decrypt)
        erase(conn, statements, names, decrypt, "request", by)
        erased_runs.update(names)
    return True


def copies(conn: Connection, run: str) -> tuple[str, ...]:
    """Return the runs that repeat a run, or a run that repeats it, and its further revisions if it is a plan: they have
    stored its request once more."""
    names: list[str] = []
    origins = [run]
    while origins:
        repeating = select(RUNS.c.id).where(RUNS.c.origin_run.in_(origins), RUNS.c.origin_kind.in_(COPIES))
        revisions = select(TAGS.c.run).where(TAGS.c.name == PLAN_TAG, TAGS.c.value.in_(origins))
        origins = list(conn.execute(union(repeating, revisions)).scalars())
        names += origins
    return tuple(names)


def keep_catalog(conn: Connection, digest: str, snapshot: bytes) -> None:
    """Store a pool's snapshot. One that is stored already stays as it is."""
    conn.execute(insert_into(conn, CATALOGS).values(digest=digest, body=snapshot).on_conflict_do_nothing())
