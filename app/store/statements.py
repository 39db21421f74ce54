"""The statements of the append path, of renewals, and of what a step reads: written in Core, compiled once per dialect
(see `prepared.py`). Everything off this path uses Core as usual.
"""

from collections.abc import Sequence
from typing import Any

import orjson
from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Executable,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    null,
    select,
    union_all,
    update,
)

from app.store.prepared import Prepared, Row, Rows, Writes
from app.store.tables import CONTENTS, EVENTS, NOTICES, ONCE, RUNS, TAGS, TICKETS

BORN = tuple(column.name for column in RUNS.columns)[: list(RUNS.columns.keys()).index("seq")]
"""Columns of a run that only a change of its lease changes, in table order."""
LEASE = ("deadline", "epoch", "driver", "lease_until")
"""Columns of a run that change with its lease, in table order."""
LIVE = tuple(column.name for column in RUNS.columns)[len(BORN) :]
"""Columns of a run that an entry may change, in table order."""
ENDLESS = tuple(name for name in LIVE if name != "ended_at")
"""The same while the run has not ended. To set `ended_at`, be it to what it is, makes SQLite write the index of leases
anew: a quarter of the statement's time and a page of the log."""
RUN = ("id", "epoch", "cap_usd", "cap_tokens", *LIVE, "salt")
"""Columns of a run that an entry is checked against."""
TICKET = tuple(column.name for column in TICKETS.columns)
CLAIM = tuple(column.name for column in ONCE.columns)


class Lookup:
    """Rows by the ids in one column, in the order of `key` and under lock; mostly by a single one, which takes a third
    of the time on SQLite (16 us instead of 50)."""

    def __init__(
        self, statements: "Statements", dialect: Dialect, table: Table, key: Sequence[str], *names: str
    ) -> None:
        """`names`: the columns to read; all, if there are none. The ids stand in the first column of `key`."""
        column, order = table.c[key[0]], [table.c[name] for name in key]
        rows = select(*[table.c[name] for name in names or table.columns.keys()]).order_by(*order).with_for_update()
        self._values = statements.values
        self._one = Prepared(rows.where(column == bindparam("its_id")), dialect, ["its_id"])
        self._many = Prepared(rows.where(statements.among(column)), dialect, ["ids"])

    def fetch(self, conn: Connection, ids: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        """The rows for these ids; without ids none, and nothing is asked."""
        if len(ids) == 1:
            return self._one.fetch(conn, ids[0])
        return self._many.fetch(conn, self._values(ids)) if ids else ()


class Statements:
    """Everything that `commit`, `runs.run` and the renewals need, for one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self.arrays = dialect.name == "postgresql"
        self._renewals(dialect)
        self.runs = Lookup(self, dialect, RUNS, ["id"], *RUN)
        self.run = Prepared(select(RUNS).where(RUNS.c.id == bindparam("its_id")), dialect, ["its_id"])
        self.journal = Prepared(_journal(), dialect, ["its_seq", "its_id"])
        self.contents = Prepared(
            select(CONTENTS.c.ref, CONTENTS.c.body).where(
                CONTENTS.c.run == bindparam("its_run"), self.among(CONTENTS.c.ref)
            ),
            dialect,
            ["its_run", "ids"],
        )
        self.tickets = Lookup(self, dialect, TICKETS, ["run", "step"])
        self._both = Prepared(self._runs_and_tickets(), dialect, ["ids", "moving"]) if self.arrays else None
        self.write = Writes(dialect)
        self.new_run = Rows(RUNS, "insert")
        self.change_run = Rows(RUNS, "update", ENDLESS, ["id", "epoch"])
        self.end_run = Rows(RUNS, "update", LIVE, ["id", "epoch"])
        self.hand_run = Rows(RUNS, "update", (*LEASE, *LIVE), ["id", "epoch"])
        self.hasten = Prepared(
            update(RUNS)
            .where(RUNS.c.id == bindparam("its_id"), RUNS.c.driver == literal_column("''"))
            .values(lease_until=bindparam("lease_until")),
            dialect,
            ["lease_until", "its_id"],
        )
        self.new_event = Rows(EVENTS, "insert")
        self.new_content = Rows(CONTENTS, "once")
        self.new_tag = Rows(TAGS, "once")
        self.new_notice = Rows(NOTICES, "once")
        self.new_ticket = Rows(TICKETS, "insert")
        self.change_ticket = Rows(TICKETS, "update", TICKET[2:], ["run", "step"])
        self.end_ticket = Rows(TICKETS, "delete", keys=["run", "step"])
        self.claims = Lookup(self, dialect, ONCE, ["id"])
        self.new_claim = Rows(ONCE, "insert")
        self.change_claim = Rows(ONCE, "update", CLAIM[1:], ["id"])

    def _renewals(self, dialect: Dialect) -> None:
        """Thousands of leases and claims are prolonged every second or so, and the loop stands still meanwhile.

        Nobody waits until such a commit is on a server's disk, least of all with the locks of all these rows: what a
        crash takes back are a few moments of a lease, and fences do not depend on those.
        """
        run, ticket = RUNS.c, TICKETS.c
        words: list[ColumnElement[Any]] = [literal_column(word) for word in ("'synchronous_commit'", "'off'", "true")]
        at_ease = (func.set_config(*words),) if self.arrays else ()
        ours = (self.among(run.id), run.driver == bindparam("its_driver"), run.ended_at.is_(None))
        self.leases = Prepared(
            select(run.id, run.epoch, run.seq, *at_ease).where(*ours).order_by(run.id).with_for_update(),
            dialect,
            ["ids", "its_driver"],
        )
        self.renew = Rows(RUNS, "update", ["lease_until"], ["id"])
        self.held = Prepared(
            select(ticket.run, ticket.step, ticket.claim, *at_ease)
            .where(self.among(ticket.run), ticket.holder.is_not(None))
            .order_by(ticket.run, ticket.step)
            .with_for_update(),
            dialect,
            ["ids"],
        )
        self.keep = Rows(TICKETS, "update", ["until"], ["run", "step", "claim"])

    def under_lock(
        self, conn: Connection, ids: Sequence[str], moving: Sequence[str]
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """The rows of these runs, and the tickets of those that are `moving`; from a server in one go.

        There, if somebody else had the lock, a ticket that they inserted is not among them (what they changed or
        deleted is). Nobody misses it: the driver alone makes tickets, and who takes one has heard of its commit.
        """
        if self._both is None or not moving:
            return self.runs.fetch(conn, ids), self.tickets.fetch(conn, moving)
        rows = self._both.fetch(conn, ids, moving)
        return [row[: len(RUN)] for row in rows if row[0]], [row[len(RUN) :] for row in rows if not row[0]]

    def _runs_and_tickets(self) -> Executable:
        """In this order, so that two transactions never wait for each other crosswise."""
        runs = select(*[RUNS.c[name] for name in RUN]).where(self.among(RUNS.c.id)).order_by(RUNS.c.id)
        tickets = select(TICKETS).where(self.among(TICKETS.c.run, "moving")).order_by(TICKETS.c.run, TICKETS.c.step)
        first, second = runs.with_for_update().subquery(), tickets.with_for_update().subquery()
        return union_all(
            select(*first.c, *[cast(null(), column.type) for column in second.c]),
            select(*[cast(null(), column.type) for column in first.c], *second.c),
        )

    def values(self, ids: Sequence[str]) -> object:
        """A list as the one parameter that it travels as."""
        return list(ids) if self.arrays else orjson.dumps(ids).decode()

    def among(self, column: Column[Any], name: str = "ids") -> ColumnElement[bool]:
        """Membership in a list that travels as one parameter, so that the statement's text never changes."""
        if self.arrays:
            return column == func.any(bindparam(name, type_=ARRAY(Text)))
        values = func.json_each(bindparam(name, type_=Text)).table_valued("value")
        return column.in_(select(values.c.value))


def _journal() -> Executable:
    """A run's salt beside each of its events after a seq; beside nothing if there are none."""
    of_it = (EVENTS.c.run == RUNS.c.id) & (EVENTS.c.seq > bindparam("its_seq"))
    columns = (RUNS.c.salt, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    its_run = RUNS.c.id == bindparam("its_id")
    return select(*columns).select_from(RUNS.outerjoin(EVENTS, of_it)).where(its_run).order_by(EVENTS.c.seq)
