"""The statements of the append path, of renewals, and of what a step reads: written in Core, compiled once per dialect,
run on the driver's own cursor.

Executing through Core looks up the compiled form, builds a dictionary per row and a result object each time; that alone
cost more than the rest of a small batch. Everything off this path uses Core as usual.
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
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from app.store.tables import CONTENTS, EVENTS, NOTICES, ONCE, RUNS, TAGS, TICKETS

BORN = tuple(column.name for column in RUNS.columns)[: list(RUNS.columns.keys()).index("seq")]
"""Columns of a run that only a change of its lease changes, in table order."""
LEASE = ("deadline", "epoch", "driver", "lease_until")
"""Columns of a run that change with its lease, in table order."""
LIVE = tuple(column.name for column in RUNS.columns)[len(BORN) :]
"""Columns of a run that an entry may change, in table order."""
TICKET = tuple(column.name for column in TICKETS.columns)
NOTICE = tuple(column.name for column in NOTICES.columns)
CLAIM = tuple(column.name for column in ONCE.columns)


class Prepared:
    """One statement as text; a row's values stand in the order of `names`."""

    def __init__(self, statement: Executable, dialect: Dialect, names: Sequence[str]) -> None:
        compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        if list(compiled.positiontup) != list(names):
            raise AssertionError(f"{compiled.positiontup} is not {names}")
        self._text = str(compiled)

    def each(self, conn: Connection, rows: list[tuple[Any, ...]]) -> None:
        """Execute once per row; nothing at all without rows."""
        if rows:
            cursor = conn.connection.cursor()
            if len(rows) == 1:
                cursor.execute(self._text, rows[0])
            else:
                cursor.executemany(self._text, rows)
            cursor.close()

    def fetch(self, conn: Connection, *values: object) -> Sequence[tuple[Any, ...]]:
        """The rows for these values."""
        cursor = conn.connection.cursor()
        cursor.execute(self._text, values)
        rows = cursor.fetchall()
        cursor.close()
        return rows


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
        self.runs = Lookup(self, dialect, RUNS, ["id"], "id", "epoch", "cap_usd", "cap_tokens", *LIVE, "salt")
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
        self.new_run = Prepared(insert(RUNS), dialect, [*BORN, *LIVE])
        self.change_run = Prepared(
            update(RUNS)
            .where(RUNS.c.id == bindparam("its_id"), RUNS.c.epoch == bindparam("its_epoch"))
            .values({name: bindparam(name) for name in LIVE}),
            dialect,
            [*LIVE, "its_id", "its_epoch"],
        )
        self.change_lease = Prepared(
            update(RUNS).where(RUNS.c.id == bindparam("its_id")).values({name: bindparam(name) for name in LEASE}),
            dialect,
            [*LEASE, "its_id"],
        )
        self.hasten = Prepared(
            update(RUNS)
            .where(RUNS.c.id == bindparam("its_id"), RUNS.c.driver == literal_column("''"))
            .values(lease_until=bindparam("lease_until")),
            dialect,
            ["lease_until", "its_id"],
        )
        self.new_event = Prepared(insert(EVENTS), dialect, ["run", "seq", "kind", "at", "body"])
        self.new_content = Prepared(self._insert_once(CONTENTS), dialect, ["run", "ref", "body"])
        self.new_tag = Prepared(self._insert_once(TAGS), dialect, ["name", "value", "run"])
        self.new_notice = Prepared(self._insert_once(NOTICES), dialect, NOTICE)
        this_ticket = (TICKETS.c.run == bindparam("its_run"), TICKETS.c.step == bindparam("its_step"))
        self.new_ticket = Prepared(insert(TICKETS), dialect, TICKET)
        self.change_ticket = Prepared(
            update(TICKETS).where(*this_ticket).values({name: bindparam(name) for name in TICKET[2:]}),
            dialect,
            [*TICKET[2:], "its_run", "its_step"],
        )
        self.end_ticket = Prepared(delete(TICKETS).where(*this_ticket), dialect, ["its_run", "its_step"])

        self.claims = Lookup(self, dialect, ONCE, ["id"])
        self.new_claim = Prepared(insert(ONCE), dialect, CLAIM)
        self.change_claim = Prepared(
            update(ONCE).where(ONCE.c.id == bindparam("its_id")).values({name: bindparam(name) for name in CLAIM[1:]}),
            dialect,
            [*CLAIM[1:], "its_id"],
        )

    def _renewals(self, dialect: Dialect) -> None:
        """Thousands of leases and claims are prolonged every second or so, and the loop stands still meanwhile."""
        run, ticket = RUNS.c, TICKETS.c
        ours = (self.among(run.id), run.driver == bindparam("its_driver"), run.ended_at.is_(None))
        self.leases = Prepared(
            select(run.id, run.epoch, run.seq).where(*ours).order_by(run.id).with_for_update(),
            dialect,
            ["ids", "its_driver"],
        )
        self.renew = Prepared(
            update(RUNS).where(run.id == bindparam("its_id")).values(lease_until=bindparam("lease_until")),
            dialect,
            ["lease_until", "its_id"],
        )
        self.held = Prepared(
            select(ticket.run, ticket.step, ticket.claim)
            .where(self.among(ticket.run), ticket.holder.is_not(None))
            .order_by(ticket.run, ticket.step)
            .with_for_update(),
            dialect,
            ["ids"],
        )
        this_claim = [ticket[name] == bindparam(f"its_{name}") for name in ("run", "step", "claim")]
        self.keep = Prepared(
            update(TICKETS).where(*this_claim).values(until=bindparam("until")),
            dialect,
            ["until", "its_run", "its_step", "its_claim"],
        )

    def values(self, ids: Sequence[str]) -> object:
        """A list as the one parameter that it travels as."""
        return list(ids) if self.arrays else orjson.dumps(ids).decode()

    def among(self, column: Column[Any]) -> ColumnElement[bool]:
        """Membership in a list that travels as one parameter, so that the statement's text never changes."""
        if self.arrays:
            return column == func.any(bindparam("ids", type_=ARRAY(Text)))
        values = func.json_each(bindparam("ids", type_=Text)).table_valued("value")
        return column.in_(select(values.c.value))

    def _insert_once(self, table: Table) -> Executable:
        if self.arrays:
            return postgresql.insert(table).on_conflict_do_nothing()
        return sqlite.insert(table).on_conflict_do_nothing()


def _journal() -> Executable:
    """A run's salt beside each of its events after a seq; beside nothing if there are none."""
    of_it = (EVENTS.c.run == RUNS.c.id) & (EVENTS.c.seq > bindparam("its_seq"))
    columns = (RUNS.c.salt, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    its_run = RUNS.c.id == bindparam("its_id")
    return select(*columns).select_from(RUNS.outerjoin(EVENTS, of_it)).where(its_run).order_by(EVENTS.c.seq)
