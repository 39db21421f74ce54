"""Contents of runs, addressed by a salted hash, so that they can be erased while the journal stays verifiable.

The journal holds addresses only. Without the salt, which is erased with the content, nobody can find a short text by
hashing candidates; with the salt, a body proves that it is the one that the journal names.
"""

import hashlib
from collections.abc import Sequence

from sqlalchemy import Connection, delete, update
from sqlalchemy.dialects import postgresql, sqlite

from app.store.rows import feedback
from app.store.sqlkit.statements import Row, SingleStatement, Statements
from app.store.sqlkit.tables import CATALOGS, CONTENTS, RUNS


def address(salt: bytes, body: bytes) -> str:
    """The ref of a body within its run: the SHA-256 of the run's salt and the body, as 64 hex digits."""
    return hashlib.sha256(salt + body).hexdigest()


def read(statements: Statements, run: str, refs: Sequence[str]) -> SingleStatement[dict[str, bytes]]:
    """The bodies that are still stored, by ref."""
    return SingleStatement(statements.contents, (run, statements.values(refs)), _bodies)


def _bodies(rows: Sequence[Row]) -> dict[str, bytes]:
    return {ref: bytes(body) for ref, body in rows}


def erase(conn: Connection, run: str) -> bool:
    """Erase all content of a run, its salt and the comments on it. False if there is no such run."""
    erased = update(RUNS).where(RUNS.c.id == run).values(salt=None, revision=RUNS.c.revision + 1)
    known = conn.execute(erased).rowcount
    conn.execute(delete(CONTENTS).where(CONTENTS.c.run == run))
    feedback.erase_comments(conn, [run])
    return bool(known)


def keep_catalog(conn: Connection, digest: str, snapshot: bytes) -> None:
    """Store a pool's snapshot. One that is stored already stays as it is."""
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    conn.execute(insert(CATALOGS).values(digest=digest, body=snapshot).on_conflict_do_nothing())
