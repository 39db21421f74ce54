"""The accounts of an installation after a case: what its auditor says, and what the workers really received.

`settle` waits until nothing is open, then returns every violation that it finds: those of `baton audit check`, and
these, which no journal can show by itself (N-3):

* every request that a worker received has an intent with the hash of exactly these bytes, and none was sent twice;
* an attempt whose outcome is `ok` or `truncated` was received.
"""

import asyncio
import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from msgspec import Struct

from app.core.contents import content_ref
from app.core.run.events import Event, Kind
from tests.faults.scene import Scene, execute
from tests.harness.audited import violations_in
from tests.harness.waiting import NotInTime, wait_until


class Account(Struct, frozen=True):
    """One run: its row and its events."""

    row: Any
    events: tuple[Event, ...]

    @property
    def id(self) -> str:
        """The run's."""
        return str(self.row["id"])

    def bodies(self, kind: Kind) -> list[Any]:
        """Return the bodies of its events of that kind."""
        return [event.body for event in self.events if event.kind is kind]

    def outcomes(self) -> list[list[str]]:
        """Return what the attempts of each step came to, in the order of the steps."""
        finished = {body["call"]: body["outcome"] for body in self.bodies(Kind.CALL_FINISHED)}
        steps: dict[int, list[str]] = {body["n"]: [] for body in self.bodies(Kind.PLAN_STEP)}
        for body in self.bodies(Kind.CALL_INTENDED):
            if body["n"] is not None:
                steps[body["n"]].append(finished.get(body["call"], "open"))
        return [steps[n] for n in sorted(steps)]

    def planning(self) -> list[str]:
        """Return what the planning calls came to."""
        finished = {body["call"]: body["outcome"] for body in self.bodies(Kind.CALL_FINISHED)}
        return [finished.get(b["call"], "open") for b in self.bodies(Kind.CALL_INTENDED) if b["n"] is None]


def accounts(database: str) -> list[Account]:
    """Return every run of a database, the oldest first."""
    rows = asyncio.run(execute(database, "SELECT * FROM runs ORDER BY created_at, id"))
    event_rows = asyncio.run(execute(database, "SELECT run, seq, kind, at, body FROM events ORDER BY run, seq"))
    events: dict[str, list[Event]] = {}
    for run, seq, kind, at, body in event_rows:
        events.setdefault(run, []).append(Event(run, seq, Kind(kind), at, orjson.loads(body)))
    return [Account(row, tuple(events.get(row["id"], ()))) for row in rows]


def account(scene: Scene, run: str) -> Account:
    """Return one run."""
    return next(account for account in accounts(scene.database) if account.id == run)


def settle(scene: Scene, seconds: float = 20.0) -> list[str]:
    """Wait until everything has ended, and report what is wrong with the accounts of all runs so far."""
    try:
        wait_until(lambda: not find_unsettled(scene), within=seconds, what="everything ends")
    except NotInTime:
        raise NotInTime(f"not within {seconds} s: these go on: {find_unsettled(scene)}; {stuck(scene)}") from None
    wrong = [str(violation) for violation in asyncio.run(violations_in(scene.database))]
    return wrong + list(find_unaccounted(accounts(scene.database), scene.stub.requests()))


def find_unsettled(scene: Scene) -> list[str]:
    """Return what is still going on: open runs, and tickets whose last outcome is missing."""
    rows = scene.rows(
        "SELECT id FROM runs WHERE ended_at IS NULL UNION ALL SELECT run || ' step ' || step::text FROM tickets LIMIT 9"
    )
    return [str(row[0]) for row in rows]


def stuck(scene: Scene) -> list[str]:
    """Return what the database knows of the first few runs that go on: who drives them, and what happened last."""
    rows = scene.rows(
        "SELECT id, state, driver, epoch, seq, round((lease_until - extract(epoch FROM now()))::numeric, 1) AS lease, "
        "ARRAY(SELECT kind FROM events WHERE run = runs.id ORDER BY seq DESC LIMIT 4) AS latest "
        "FROM runs WHERE ended_at IS NULL LIMIT 5"
    )
    return [str(dict(row)) for row in rows]


def find_unaccounted(accounts: Sequence[Account], received: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Requests without an intent, intents that were sent twice, and answers that nobody gave."""
    bodies = Counter(base64.b64decode(record["body_base64"]) for record in received if not _is_probe(record))
    intents: Counter[bytes] = Counter()
    answers: Counter[bytes] = Counter()
    received_count = 0
    for account in accounts:
        outcomes = {body["call"]: body["outcome"] for body in account.bodies(Kind.CALL_FINISHED)}
        intended: dict[str, list[str]] = {}
        for body in account.bodies(Kind.CALL_INTENDED):
            intended.setdefault(body["request"], []).append(outcomes.get(body["call"], "open"))
        received_count += sum(_was_heard(each) for them in intended.values() for each in them)
        salt = bytes(account.row["salt"] or b"")
        for record_body in bodies:
            mine = intended.get(content_ref(salt, record_body), ())
            intents[record_body] += len(mine)
            answers[record_body] += sum(map(_was_heard, mine))
    for record_body, count in bodies.items():
        if count > intents[record_body]:
            size, intended_count = len(record_body), intents[record_body]
            yield f"a worker received {count} requests of {size} bytes, of which {intended_count} were intended"
        if count < answers[record_body]:
            yield f"{answers[record_body]} answers are recorded to a request that was received {count} times"
    if received_count > sum(answers.values()):
        yield f"{received_count - sum(answers.values())} recorded answers are to requests that no worker received"


def _is_probe(record: dict[str, Any]) -> bool:
    """Return whether it only asks if anybody lives there: such calls belong to no run
    (`app/engine/conductors/probe.py`)."""
    body = orjson.loads(record["body"] or "{}")
    return 1 in (body.get("max_tokens"), body.get("max_completion_tokens"))


def _was_heard(outcome: str) -> bool:
    """Return whether this outcome needs that the worker received the request."""
    return outcome in ("ok", "truncated")
