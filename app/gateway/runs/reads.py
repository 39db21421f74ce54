"""Readings of content that are logged: who has read texts of a run, when, and which part.

Each view of a step's messages is logged, and each reading of an answer by a key other than the one that asked for it.
A key that polls its own response is no entry. The entry is written before the texts are sent: while the database takes
no writes, nobody reads the content of others.
"""

from app.gateway.http.callers import Caller
from app.gateway.http.context import GatewayContext
from app.store.protocol import RunRow


async def note(context: GatewayContext, caller: Caller, row: RunRow, part: str, digest: str = "") -> None:
    """Log that a caller reads a part of a run. With a `digest` of what it reads, a repeated reading of the same is not
    logged again."""
    administration = context.store.administration_of(caller.tenant)
    await administration.note_read(row.id, row.tenant, part, by=caller.actor, digest=digest)


async def note_foreign(context: GatewayContext, caller: Caller, row: RunRow, part: str, digest: str = "") -> None:
    """Log that a caller reads a part of a run which another key began."""
    if row.key != caller.key.id:
        await note(context, caller, row, part, digest)
