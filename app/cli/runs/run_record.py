"""The record of a run for `baton runs show` and `baton plan`: that of the audit trail, with its steps in full."""

from typing import Any

import orjson

from app.core.message.chat import task_from_json
from app.core.run.state import RunState, fold
from app.gateway.runs import audit
from app.store.protocol import RunRow, Store


async def read(store: Store, row: RunRow) -> tuple[dict[str, Any], str | None]:
    """Return the audit trail's record of a run, with its steps in full and the comments of its ratings, and the
    caller's last message, which is None if it was erased."""
    journal = await store.journal(row.id)
    state = fold(journal.events)
    given = await store.feedback(row.id)
    record = audit.whole(row, journal, given)
    record["comments"] = {rating.id: rating.comment for rating in given if rating.comment}
    record |= {"rehearsal": state.admitted.rehearsal, "preview": state.admitted.preview}
    record["steps"] = [await audit.step_in_full(store, state, journal.events, n) for n in state.steps]
    return record, await _question(store, state)


async def _question(store: Store, state: RunState) -> str | None:
    bodies = await store.contents(state.run, [state.admitted.task])
    if not bodies:
        return None
    messages = task_from_json(orjson.loads(bodies[state.admitted.task])).messages
    return next((message.text for message in reversed(messages) if message.role == "user"), "")
