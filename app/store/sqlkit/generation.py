"""A new generation of all fences, once the database turns out to be another copy of itself.

After a failover to an asynchronous replica, and after a restore, the database lacks its latest commits. It would give
out epochs and claim numbers that processes of the time before have already, and their fences would let two owners write
to one run. So the database remembers which server it was on (`pulse.server`: the identity of the cluster and its
timeline, which a promotion and a recovery change). Whoever connects first to another one raises all epochs and claims
beyond any that was given out, in one transaction, before anything else is written. Every open run has then lost its
driver, and every step that was being executed its engine: they are taken over as if all engines had died, and calls
without an outcome become `unknown`. Since the claims of before are ended here, no run keeps the name of its former
driver: a takeover would end the claims that this engine has made in the meantime, whose calls are under way.

Only a connection that leads to one server can be sure of this: behind a PgBouncer that pools transactions the server
may change unseen, so its connections to the former server have to be closed (`RECONNECT`) at a failover.
"""

from typing import Any, Final

import asyncpg
from sqlalchemy import Connection, text

STEP: Final = 1_000_000
"""The distance between the epochs of two generations: no run changes hands that often."""
MISSING = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError)
"""The schema is older, or the server is no Postgres of its own: no generation is known."""
LOOK: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN NULL ELSE
  (SELECT system_identifier FROM pg_control_system()) || '/' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)
END AS present, (SELECT server FROM pulse WHERE id = 1) AS noted
"""
NOTE: Final = (
    "INSERT INTO pulse (id, beats, server) VALUES (1, 0, $1) ON CONFLICT (id) DO NOTHING",
    "UPDATE pulse SET server = $1 WHERE id = 1 AND server IS DISTINCT FROM $1",
)
"""Writes nothing if another connection has noted that server meanwhile: the first connections to a new database are
opened at once, and would otherwise wait for one another's commits."""
LOCK: Final = "SELECT server FROM pulse WHERE id = 1 FOR UPDATE"
NOW: Final = "extract(epoch FROM clock_timestamp())"
RUNS: Final = """
UPDATE runs SET epoch = epoch + {step}, claims = claims + {step}, revision = revision + {step}, driver = '',
  lease_until = CASE WHEN driver <> '' AND lease_until > {now} THEN {now} ELSE lease_until END
WHERE ended_at IS NULL
"""
TICKETS: Final = """
UPDATE tickets SET claim = claim + {step}, holder = NULL, until = {now}, rung_at = 0 WHERE holder IS NOT NULL
"""


async def look(driver: Any) -> str | None:
    """Return the server that a new connection of asyncpg has reached, after a new generation was begun if it is another
    one than before. None where that cannot be known: on a standby, and before the schema has the column."""
    try:
        present, noted = await driver.fetchrow(LOOK)
    except (*MISSING, asyncpg.InsufficientPrivilegeError):
        return None
    if present is not None and present != noted:
        async with driver.transaction():
            await _begin(driver, present, known=noted is not None)
    if present is None:
        return None
    return str(present)


async def _begin(driver: Any, present: str, *, known: bool) -> None:
    """Note the server, and raise all fences unless another process was faster or no server was `known` before."""
    if known and await driver.fetchval(LOCK) == present:
        return
    if known:
        for statement in (RUNS, TICKETS):
            await driver.execute(statement.format(step=STEP, now=NOW))
    for statement in NOTE:
        await driver.execute(statement, present)


def begin(conn: Connection, now: float) -> float | None:
    """Raise all fences, for a restore that the database does not notice by itself. Returns the time of the journal's
    last event."""
    for statement in (RUNS, TICKETS):
        conn.execute(text(statement.format(step=STEP, now=":now")), {"now": now})
    last: float | None = conn.execute(text("SELECT max(at) FROM events")).scalar_one()
    return last
