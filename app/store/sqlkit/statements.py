"""The statements of the append path, of renewals and of a step's reads, compiled once for each dialect.

They are written in SQLAlchemy Core and run on the driver's own cursor. All other statements use Core in the usual way,
in `rows/`.

A statement that is executed through Core is looked up in compiled form, with a dictionary for each row and a result
object each time; that alone costs more than the rest of a small batch.

On Postgres every statement is a round trip: some 100 microseconds of CPU here, more in the server, and a wait. So all
writes of a transaction are the parts of one WITH statement over arrays, one array for each column, so that its text
does not depend on the number of rows. All parts see the tables as they were before the statement, so no two of them may
change the same row. SQLite is in this process: there each write is a statement of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import orjson
from msgspec import Struct
from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    Column,
    ColumnElement,
    CompoundSelect,
    Connection,
    Dialect,
    Executable,
    Select,
    Table,
    TableValuedAlias,
    Text,
    and_,
    bindparam,
    cast,
    column,
    delete,
    false,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.types import TypeEngine

from app.store.sqlkit.tables import (
    BUDGET_HOLDS,
    BUDGET_WINDOWS,
    CONTENTS,
    DISCLOSURES,
    EVENTS,
    NOTICES,
    ONCE,
    RUNS,
    SHARED_CONTENTS,
    TAGS,
    TEXTS,
    TICKETS,
)

Row = tuple[Any, ...]
T = TypeVar("T")
ExpectedRevision = tuple[str, int]
"""The id of a run, and the revision that its row is expected to have."""
OwnedRun = tuple[str, str]
"""The id of a run, and the tenant to which it is expected to belong."""

_RUN_COLUMNS = tuple(RUNS.columns.keys())
ADMISSION_COLUMNS = _RUN_COLUMNS[: _RUN_COLUMNS.index("seq")]
"""Columns of a run that are set at its admission, in table order. Only a change of its lease changes some of them."""
LEASE_COLUMNS = ("deadline", "epoch", "driver", "lease_until")
"""Columns of a run that change with its lease, in table order."""
MUTABLE_COLUMNS = _RUN_COLUMNS[len(ADMISSION_COLUMNS) :]
"""Columns of a run that an entry may change, in table order. `revision` is the last of them."""
OPEN_RUN_COLUMNS = tuple(name for name in MUTABLE_COLUMNS if name != "ended_at")
"""Columns of a run that may change by an entry that does not end it. To set `ended_at`, even to the value that it has,
makes SQLite write the index of open runs anew: a quarter of the statement's time and a page of the log."""
_FIXED_COLUMNS = ("thread", "budgets", "tenant", "key", "salt")
CHECKED_COLUMNS = ("id", "epoch", "cap_usd", "cap_tokens", *MUTABLE_COLUMNS, *_FIXED_COLUMNS)
"""Columns of a run that an entry is checked against."""
CACHED_COLUMNS = CHECKED_COLUMNS[:-1]
"""Columns of a run that the row cache holds (see `rows/runs.py`): it holds no run whose salt was erased."""
TICKET_COLUMNS = tuple(TICKETS.columns.keys())
TICKET_COLUMNS_EXCEPT_UNTIL = ("tier", "driver", "version", "claim", "holder", "rung_at", "lost")
"""Columns of a ticket that an entry may change without changing the end of the claim on it."""
IDEMPOTENCY_COLUMNS = tuple(ONCE.columns.keys())
WINDOW_AMOUNTS = ("held", "spent", "overrun", "warned_at", "escrow")
"""Columns of a budget's window that entries change."""
MOST_CONTENTS = 16
"""Most contents that are read together with a journal."""

WHOLE, TAIL, OWN = -2, -1, 0
"""Places of the parts of a content, as `select_shared_parts` orders them: one that is stored as a whole, the text with
which it ends, and what is its own. The texts with which it begins have the places 1, 2 and so on, from the last to the
first."""

RUN_IDS = bindparam("runs", type_=Text, expanding=True)
"""A list of runs, in statements that are built once and executed with the values `{"runs": ids}`."""

_NAMED = "(regexp_matches(convert_from(events.body, 'UTF8'), '[0-9a-f]{64}', 'g'))[1]"
"""Every part of an event's body that may be the ref of a content, as Postgres finds it."""
_ID, _REVISION = CHECKED_COLUMNS.index("id"), CHECKED_COLUMNS.index("revision")
BY_KEY: Mapping[str, str] = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
"""Settings for statements that find all rows by their keys: the append path, renewals, and reads of one run.

Postgres plans a write anew each time (half a millisecond), or keeps a plan that it made for an almost empty table, and
then reads all of the table when it is large. Other statements are planned as the server sees fit.
"""


class PreparedStatement:
    """One statement as text. Its parameters are in the order of `names`."""

    def __init__(self, statement: Executable, dialect: Dialect, names: Sequence[str]) -> None:
        compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        if list(compiled.positiontup) != list(names):
            raise AssertionError(f"{compiled.positiontup} is not {names}")
        self.text = str(compiled)

    def each(self, conn: Connection, rows: Sequence[Row]) -> None:
        """Execute once for each row of parameters."""
        if rows:
            cursor = conn.connection.cursor()
            if len(rows) == 1:
                cursor.execute(self.text, rows[0])
            else:
                cursor.executemany(self.text, rows)
            cursor.close()

    def fetch(self, conn: Connection, *values: object) -> Sequence[Row]:
        """Execute with these parameters and return the rows."""
        cursor = conn.connection.cursor()
        cursor.execute(self.text, values)
        rows = cursor.fetchall()
        cursor.close()
        return rows


class SingleStatement(Struct, Generic[T], frozen=True):
    """Work that is one statement. `to_result` turns its rows into the result."""

    statement: PreparedStatement
    values: Sequence[object]
    to_result: Callable[[Sequence[Row]], T]

    def __call__(self, conn: Connection) -> T:
        return self.to_result(self.statement.fetch(conn, *self.values))


class TableWrite:
    """One way of writing rows of a table.

    The verbs are `insert`, `once` (insert, unless the key exists), `update` of the named columns, and `delete`. The
    values of a row are in the order of `names`, followed by `keys`, the columns that identify the row. An inserted row
    has all columns in table order.
    """

    def __init__(
        self,
        table: Table,
        verb: Literal["insert", "once", "update", "delete"],
        names: Sequence[str] = (),
        keys: Sequence[str] = (),
    ) -> None:
        inserts = verb in ("insert", "once")
        self._table, self._verb = table, verb
        self._names = tuple(table.columns.keys()) if inserts else tuple(names)
        self._keys = {f"its_{key}": table.c[key] for key in keys}
        self._columns = {**{name: table.c[name] for name in self._names}, **self._keys}

    def single(self, dialect: Dialect) -> PreparedStatement:
        """Return the statement that writes one row."""
        table = self._table
        has_keys = [column == bindparam(name) for name, column in self._keys.items()]
        statement: Executable
        if self._verb == "insert":
            statement = insert(table)
        elif self._verb == "once" and dialect.name == "sqlite":
            statement = sqlite.insert(table).on_conflict_do_nothing()
        elif self._verb == "once":
            statement = postgresql.insert(table).on_conflict_do_nothing()
        elif self._verb == "update":
            statement = update(table).where(*has_keys).values({name: bindparam(name) for name in self._names})
        else:
            statement = delete(table).where(*has_keys)
        return PreparedStatement(statement, dialect, list(self._columns))

    def part(
        self, number: int, *, single_row: bool, condition: Sequence[ColumnElement[bool]] = ()
    ) -> tuple[Any, list[str]]:
        """Return a part of a joint write for Postgres, and the names of its parameters.

        The parameters are the values of a single row, or arrays for any number of rows. Nothing is written unless the
        condition holds.
        """
        table, suffix = self._table, f"_{number}"
        types = {name: column.type for name, column in self._columns.items()}
        values: dict[str, Any] = {}
        if single_row:  # the driver encodes a value in a tenth of the time of an array
            names = [name + suffix for name in types]
            for name, kind in types.items():
                values[name] = bindparam(name + suffix, type_=kind)
        else:
            rows, names = unnest_arrays(types, suffix)
            for name in types:
                values[name] = rows.c[name]
        has_keys = [column == values[name] for name, column in self._keys.items()]
        conditions = [*has_keys, *condition]
        new_rows = select(*values.values()).where(*condition)
        statement: Any
        if self._verb == "insert":
            statement = insert(table).from_select(self._names, new_rows)
        elif self._verb == "once":
            statement = postgresql.insert(table).from_select(self._names, new_rows).on_conflict_do_nothing()
        elif self._verb == "update":
            statement = update(table).where(*conditions).values({name: values[name] for name in self._names})
        else:
            statement = delete(table).where(*conditions)
        return statement.cte(f"part_{number}"), names


RowWrites = tuple[TableWrite, Sequence[Row]]
"""One way of writing rows of a table, and the rows to be written in that way."""


def unnest_arrays(types: Mapping[str, TypeEngine[Any]], suffix: str) -> tuple[TableValuedAlias, list[str]]:
    """Return rows that are sent as arrays, one for each of these columns, and the names of these parameters, which end
    with the suffix."""
    arrays = [bindparam(f"{name}{suffix}", type_=ARRAY(kind)) for name, kind in types.items()]
    derived = [column(name, kind) for name, kind in types.items()]
    return func.unnest(*arrays).table_valued(*derived).render_derived(), [array.key for array in arrays]


def columns_of(rows: Iterable[Row], count: int) -> list[list[Any]]:
    """Return the arrays, one for each of `count` columns, as which rows are sent."""
    return [list(values) for values in zip(*rows, strict=True)] or [[] for _ in range(count)]


class Condition(Struct, frozen=True, eq=False):
    """A condition of a joint write: a query with one row and one column `holds`, and the names of its parameters."""

    cte: CTE
    names: Sequence[str]

    @property
    def holds(self) -> ColumnElement[bool]:
        """Return the column that is true if the condition holds."""
        return self.cte.c.holds


class _Conditions(Struct, frozen=True):
    """The conditions of writes that check a revision, by what they concern."""

    only_new_runs: Condition | None
    one_run: Condition
    several_runs: Condition
    several_runs_and_tickets: Condition


_Parts = tuple[tuple[TableWrite, bool], ...]
"""The parts of a joint write, and for each of them whether it writes a single row."""


class WriteStatements:
    """Carries out writes to several tables, for one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._together = dialect.name == "postgresql"
        self._prepared: dict[tuple[Condition | None, _Parts], PreparedStatement] = {}

    def __call__(self, conn: Connection, *writes: RowWrites) -> None:
        """Write all of these rows. No two of them may be the same row of a table."""
        parts = [(way, rows) for way, rows in writes if rows]
        if not self._together:
            for way, rows in parts:
                self._single(way).each(conn, rows)
        elif parts:
            statement, values = self._joint(parts)
            statement.each(conn, [values])

    def only_if(
        self, condition: Condition | None, parameters: Sequence[object], result: T, *writes: RowWrites
    ) -> SingleStatement[T | None]:
        """Return the write as a single statement of Postgres, which checks a condition first, if there is one.

        It returns `result`, or None if the condition does not hold. `parameters` are those of the condition.
        """
        statement, values = self._joint([(way, rows) for way, rows in writes if rows], condition)
        return SingleStatement(statement, (*parameters, *values), lambda rows: result if rows[0][0] else None)

    def _single(self, way: TableWrite) -> PreparedStatement:
        key = (None, ((way, True),))
        if key not in self._prepared:
            self._prepared[key] = way.single(self._dialect)
        return self._prepared[key]

    def _joint(self, parts: Sequence[RowWrites], condition: Condition | None = None) -> tuple[PreparedStatement, Row]:
        """Return the statement for these parts, compiled when it is first used, and the values of its parameters.

        There are some dozens of combinations of parts.
        """
        key = (condition, tuple([(way, len(rows) == 1) for way, rows in parts]))
        if key not in self._prepared:
            self._prepared[key] = self._compile(key[1], condition)
        values: list[Any] = []
        for _, rows in parts:
            if len(rows) == 1:
                values += rows[0]
            else:
                values += columns_of(rows, 0)
        return self._prepared[key], tuple(values)

    def _compile(self, parts: _Parts, condition: Condition | None) -> PreparedStatement:
        """Compile the parts as one WITH statement, each of which writes only if the condition holds."""
        holds: list[ColumnElement[bool]] = []
        whole: Select[Any] = select(literal_column("1"))
        names: list[str] = []
        if condition is not None:
            holds = [select(condition.holds).scalar_subquery()]
            whole = select(condition.holds).add_cte(condition.cte)
            names += condition.names
        for number, (way, single_row) in enumerate(parts):
            part, part_names = way.part(number, single_row=single_row, condition=holds)
            whole = whole.add_cte(part)
            names += part_names
        return PreparedStatement(whole, self._dialect, names)


class Lookup:
    """Reads rows under lock by the ids in one column, in the order of their key.

    Mostly one id is looked up, for which there is a statement of its own: it takes a third of the time on SQLite
    (16 us instead of 50).
    """

    def __init__(
        self, statements: "Statements", dialect: Dialect, table: Table, key: Sequence[str], *names: str
    ) -> None:
        """`names` are the columns to read; all of them if none is given. The ids are in the first column of `key`."""
        column, order = table.c[key[0]], [table.c[name] for name in key]
        rows = select(*[table.c[name] for name in names or table.columns.keys()]).order_by(*order).with_for_update()
        self._values = statements.values
        self._one = PreparedStatement(rows.where(column == bindparam("its_id")), dialect, ["its_id"])
        self._many = PreparedStatement(rows.where(statements.among(column)), dialect, ["ids"])

    def fetch(self, conn: Connection, ids: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        """Return the rows for these ids. Without ids there are none, and no statement is sent."""
        if len(ids) == 1:
            return self._one.fetch(conn, ids[0])
        if not ids:
            return ()
        return self._many.fetch(conn, self._values(ids))


class Statements:
    """All prepared statements of one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self.arrays = dialect.name == "postgresql"
        self._renewals(dialect)
        self.runs = Lookup(self, dialect, RUNS, ["id"], *CHECKED_COLUMNS)
        self.run = PreparedStatement(select(RUNS).where(RUNS.c.id == bindparam("its_id")), dialect, ["its_id"])
        self.journal = PreparedStatement(_journal(), dialect, ["its_seq", "its_id"])
        self.step_input = (
            PreparedStatement(_step_input(), dialect, ["its_id", "its_seq", "most"]) if self.arrays else None
        )
        self.contents = PreparedStatement(self._contents(), dialect, ["shared_run", "shared_ids", "its_run", "ids"])
        self.tickets = Lookup(self, dialect, TICKETS, ["run", "step"])
        self.rows: PreparedStatement | None = None
        self._locked_rows: PreparedStatement | None = None
        self._lock_texts: PreparedStatement | None = None
        self._by_key: PreparedStatement | None = None
        self.write = WriteStatements(dialect)
        if self.arrays:
            self._prepare_for_postgres(dialect)
        one_of_theirs = RUNS.c.id == bindparam("its_id"), RUNS.c.tenant == bindparam("its_tenant")
        self._owner = PreparedStatement(select(RUNS.c.id).where(*one_of_theirs), dialect, ["its_id", "its_tenant"])
        self.insert_run = TableWrite(RUNS, "insert")
        self.update_open_run = TableWrite(RUNS, "update", OPEN_RUN_COLUMNS, ["id", "epoch"])
        self.update_ended_run = TableWrite(RUNS, "update", MUTABLE_COLUMNS, ["id", "epoch"])
        lease_and_cap = (*LEASE_COLUMNS, "cap_usd")
        self.update_open_run_and_lease = TableWrite(
            RUNS, "update", (*lease_and_cap, *OPEN_RUN_COLUMNS), ["id", "epoch"]
        )
        self.update_ended_run_and_lease = TableWrite(
            RUNS, "update", (*lease_and_cap, *MUTABLE_COLUMNS), ["id", "epoch"]
        )
        self.make_due = PreparedStatement(
            update(RUNS)
            .where(RUNS.c.id == bindparam("its_id"), RUNS.c.driver == literal_column("''"))
            .values(lease_until=bindparam("lease_until")),
            dialect,
            ["lease_until", "its_id"],
        )
        self.insert_event = TableWrite(EVENTS, "insert")
        self.insert_disclosure = TableWrite(DISCLOSURES, "insert")
        outcome = ["outcome", "input_tokens", "output_tokens"]
        self.complete_disclosure = TableWrite(DISCLOSURES, "update", outcome, ["run", "call"])
        self.insert_content = TableWrite(CONTENTS, "once")
        self.insert_shared_content = TableWrite(SHARED_CONTENTS, "once")
        self.insert_text = TableWrite(TEXTS, "once")
        self.insert_tag = TableWrite(TAGS, "once")
        self.insert_notice = TableWrite(NOTICES, "once")
        self.insert_ticket = TableWrite(TICKETS, "insert")
        self.update_ticket = TableWrite(TICKETS, "update", TICKET_COLUMNS[2:], ["run", "step"])
        self.update_ticket_except_until = TableWrite(TICKETS, "update", TICKET_COLUMNS_EXCEPT_UNTIL, ["run", "step"])
        self.delete_ticket = TableWrite(TICKETS, "delete", keys=["run", "step"])
        self.update_window = TableWrite(BUDGET_WINDOWS, "update", WINDOW_AMOUNTS, ["account", "start"])
        self.insert_hold = TableWrite(BUDGET_HOLDS, "insert")
        self.idempotency = Lookup(self, dialect, ONCE, ["id"])
        self.insert_idempotency = TableWrite(ONCE, "insert")
        self.update_idempotency = TableWrite(ONCE, "update", IDEMPOTENCY_COLUMNS[1:], ["id"])

    def _prepare_for_postgres(self, dialect: Dialect) -> None:
        """Prepare what only Postgres has: reads of two tables in one round trip, locks, settings and conditions."""
        self.rows = PreparedStatement(self._runs_and_tickets(locks=False), dialect, ["ids", "ticket_runs"])
        self._locked_rows = PreparedStatement(self._runs_and_tickets(locks=True), dialect, ["ids", "ticket_runs"])
        self._lock_texts = PreparedStatement(select(_text_locks()), dialect, ["locks"])
        settings = [func.set_config(*_literals(name, value, "true")) for name, value in BY_KEY.items()]
        self._by_key = PreparedStatement(select(*settings), dialect, [])
        self._conditions: dict[tuple[bool, bool], _Conditions] = {}
        for locks in (False, True):
            for owned in (False, True):
                self._conditions[locks, owned] = _Conditions(
                    only_new_runs=_nothing_but_locks() if locks else None,
                    one_run=_one_is_current(locks=locks, owned=owned),
                    several_runs=self._all_are_current(with_tickets=False, locks=locks, owned=owned),
                    several_runs_and_tickets=self._all_are_current(with_tickets=True, locks=locks, owned=owned),
                )
        self._all_are_owned = Condition(select(_are_owned().label("holds")).cte("unchanged"), _OWNED)

    def _renewals(self, dialect: Dialect) -> None:
        """Thousands of leases and claims are renewed every second or so, and the event loop waits for each batch.

        Their commits do not wait for the server's disk, least of all with the locks of all these rows: a crash takes
        back a few moments of a lease, and fences do not depend on those.
        """
        run, ticket = RUNS.c, TICKETS.c
        without_waiting = (func.set_config(*_literals("synchronous_commit", "off", "true")),) if self.arrays else ()
        ours = (self.among(run.id), run.driver == bindparam("its_driver"), run.ended_at.is_(None))
        self.lock_leases = PreparedStatement(
            select(run.id, run.epoch, run.seq, *without_waiting).where(*ours).order_by(run.id).with_for_update(),
            dialect,
            ["ids", "its_driver"],
        )
        self.update_lease = TableWrite(RUNS, "update", ["lease_until"], ["id"])
        self.lock_claims = PreparedStatement(
            select(ticket.run, ticket.step, ticket.claim, *without_waiting)
            .where(self.among(ticket.run), ticket.holder.is_not(None))
            .order_by(ticket.run, ticket.step)
            .with_for_update(),
            dialect,
            ["ids"],
        )
        self.update_claim = TableWrite(TICKETS, "update", ["until"], ["run", "step", "claim"])

    def plan_by_key(self, conn: Connection) -> None:
        """Have Postgres plan all further statements of this transaction by key (see `BY_KEY`)."""
        if self._by_key is not None:
            self._by_key.fetch(conn)

    def lock_texts(self, conn: Connection, locks: Sequence[int]) -> None:
        """Take these locks of owners of texts on Postgres, as one of many that write texts of theirs."""
        if self._lock_texts is not None and locks:
            self._lock_texts.fetch(conn, locks)

    def lock_runs_and_tickets(
        self, conn: Connection, runs: Sequence[str], ticket_runs: Sequence[str]
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """Return the rows of these runs, and the tickets of those in `ticket_runs`; on Postgres in one round trip.

        On Postgres, if another transaction had the lock, a ticket that it inserted is not among them (what it changed
        or deleted is). No entry misses it: only the driver makes tickets, and a dispatcher takes one after its commit.
        """
        if self._locked_rows is None or not ticket_runs:
            return self.runs.fetch(conn, runs), self.tickets.fetch(conn, ticket_runs)
        return runs_and_tickets(self._locked_rows.fetch(conn, runs, ticket_runs))

    def _runs_and_tickets(self, *, locks: bool) -> Executable:
        """Return runs, and the tickets of those in `ticket_runs`. With `locks` both are locked, in the order of their
        keys, so that no two transactions wait for each other in a circle."""
        runs = select(*[RUNS.c[name] for name in CHECKED_COLUMNS]).where(self.among(RUNS.c.id)).order_by(RUNS.c.id)
        tickets = (
            select(TICKETS).where(self.among(TICKETS.c.run, "ticket_runs")).order_by(TICKETS.c.run, TICKETS.c.step)
        )
        if locks:
            runs, tickets = runs.with_for_update(), tickets.with_for_update()
        first, second = runs.subquery(), tickets.subquery()
        return union_all(
            select(*first.c, *[cast(null(), column.type) for column in second.c]),
            select(*[cast(null(), column.type) for column in first.c], *second.c),
        )

    def write_if_current(self, conn: Connection, expected: Sequence[ExpectedRevision], *writes: RowWrites) -> bool:
        """Write if the rows of all these runs have the expected revisions. If one has not, write nothing: False."""
        expected_revisions = dict(expected)
        revisions = {row[_ID]: row[_REVISION] for row in self.runs.fetch(conn, list(expected_revisions))}
        if revisions != expected_revisions:
            return False
        self.write(conn, *writes)
        return True

    def write_if_owned(self, conn: Connection, owned: Sequence[OwnedRun], *writes: RowWrites) -> bool:
        """Write if each of these runs belongs to the tenant that is given with it. If one does not, or is not there,
        write nothing: False."""
        if not owned:
            self.write(conn, *writes)
            return True
        if self.arrays:
            statement = self.write.only_if(self._all_are_owned, columns_of(owned, 2), True, *writes)
            return statement(conn) is not None
        for run, tenant in owned:
            if not self._owner.fetch(conn, run, tenant):
                return False
        self.write(conn, *writes)
        return True

    def single_write_if_current(
        self,
        expected: Sequence[ExpectedRevision],
        ticket_runs: Sequence[str],
        result: T,
        *writes: RowWrites,
        locks: Sequence[int],
        owned: Sequence[OwnedRun] = (),
    ) -> SingleStatement[T | None]:
        """Return the conditional write as one statement of Postgres. Its result is `result`, or None if nothing was
        written.

        It takes the `locks` of owners of texts, as `lock_texts` does, then locks the rows of the runs, and then the
        tickets of the `ticket_runs`, as `lock_runs_and_tickets` does. The tickets of a single run need no lock of
        their own: entries change them under the lock of the run's row. Nothing is written either unless each `owned`
        run belongs to its tenant.
        """
        conditions = self._conditions[bool(locks), bool(owned)]
        lock_values = [locks] if locks else []
        owners = columns_of(owned, 2) if owned else []
        if not expected:
            return self.write.only_if(conditions.only_new_runs, lock_values, result, *writes)
        if len(expected) == 1:
            values = [*lock_values, *expected[0], *owners]
            return self.write.only_if(conditions.one_run, values, result, *writes)
        values = [*columns_of(expected, 2), *lock_values]
        if ticket_runs:
            values += [list(ticket_runs), *owners]
            return self.write.only_if(conditions.several_runs_and_tickets, values, result, *writes)
        return self.write.only_if(conditions.several_runs, [*values, *owners], result, *writes)

    def _all_are_current(self, *, with_tickets: bool, locks: bool, owned: bool) -> Condition:
        """Return the condition that several runs have the expected revisions, and lock their rows and tickets."""
        expected, names = unnest_arrays({"id": Text(), "revision": BigInteger()}, "_known")
        names += _LOCKS[:locks]
        same = (RUNS.c.id == expected.c.id) & (RUNS.c.revision == expected.c.revision)
        rows = select(RUNS.c.id).select_from(RUNS.join(expected, same)).where(*_after_locks(locks)).order_by(RUNS.c.id)
        current = rows.with_for_update(of=RUNS).cte("current_runs")
        count = select(func.count()).select_from(current).scalar_subquery()
        holds: ColumnElement[bool] = count == func.cardinality(bindparam("id_known", type_=ARRAY(Text)))
        if with_tickets:
            ticket = TICKETS.c
            theirs = select(ticket.run).where(self.among(ticket.run, "ticket_runs")).order_by(ticket.run, ticket.step)
            locked_tickets = theirs.with_for_update().cte("locked_tickets")
            holds = and_(
                holds, select(func.count()).select_from(locked_tickets).scalar_subquery() >= literal_column("0")
            )
            names = [*names, "ticket_runs"]
        if owned:
            holds, names = and_(holds, _are_owned()), [*names, *_OWNED]
        return Condition(select(holds.label("holds")).cte("unchanged"), names)

    def _contents(self) -> Executable:
        """Return the parts of contents of one run, however they are stored."""
        its_own = CONTENTS.c.run == bindparam("its_run"), self.among(CONTENTS.c.ref)
        plain = select(CONTENTS.c.run, CONTENTS.c.ref, *_place(WHOLE), CONTENTS.c.body, false(), *_place(0))
        shared = SHARED_CONTENTS.c.run == bindparam("shared_run"), self.among(SHARED_CONTENTS.c.ref, "shared_ids")
        return union_all(*_shared_parts(*shared), plain.where(*its_own))

    def values(self, ids: Sequence[str] | Sequence[int]) -> object:
        """Return a list as the one parameter that it is sent as."""
        if self.arrays:
            return list(ids)
        return orjson.dumps(ids).decode()

    def among(self, column: Column[Any], name: str = "ids") -> ColumnElement[bool]:
        """Return membership in a list that is sent as one parameter, so that the statement's text never changes."""
        if self.arrays:
            return column == func.any(bindparam(name, type_=ARRAY(Text)))
        values = func.json_each(bindparam(name, type_=Text)).table_valued("value")
        return column.in_(select(values.c.value))


def runs_and_tickets(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the `CHECKED_COLUMNS` of runs, and the `TICKET_COLUMNS` of tickets, from rows that have either."""
    width = len(CHECKED_COLUMNS)
    runs: list[Row] = []
    tickets: list[Row] = []
    for row in rows:
        if row[0]:
            runs.append(row[:width])
        else:
            tickets.append(row[width:])
    return runs, tickets


def _literals(name: str, value: str, local: str) -> list[ColumnElement[Any]]:
    """Return the arguments of `set_config`, which sets for the transaction only if `local` is true."""
    return [literal_column(word) for word in (f"'{name}'", f"'{value}'", local)]


_LOCKS = ("locks",)
"""The name of the parameter with the locks of owners of texts."""


def _text_locks() -> ColumnElement[int]:
    """Return the number of these locks, all of which are taken when it is computed."""
    lock = func.unnest(bindparam("locks", type_=ARRAY(BigInteger))).column_valued("lock")
    return func.count(func.pg_advisory_xact_lock_shared(lock))


def _after_locks(locks: bool) -> tuple[ColumnElement[bool], ...]:
    """Return a condition that always holds, and that is checked before any row is read. The locks are taken by then."""
    if not locks:
        return ()
    text_locks = select(_text_locks().label("count")).cte("text_locks")
    return (select(text_locks.c.count).scalar_subquery() >= literal_column("0"),)


def _nothing_but_locks() -> Condition:
    (holds,) = _after_locks(True)
    return Condition(select(holds.label("holds")).cte("unchanged"), _LOCKS)


_OWNED = ("id_owned", "tenant_owned")
"""The names of the parameters with the ids of runs and with the tenants to which they must belong."""


def _are_owned() -> ColumnElement[bool]:
    """Return the condition that each of these runs belongs to the tenant that is given with it."""
    owners, _ = unnest_arrays({"id": Text(), "tenant": Text()}, "_owned")
    owned_runs = RUNS.join(owners, (RUNS.c.id == owners.c.id) & (RUNS.c.tenant == owners.c.tenant))
    count = select(func.count()).select_from(owned_runs).scalar_subquery()
    return count == func.cardinality(bindparam("id_owned", type_=ARRAY(Text)))


def _one_is_current(*, locks: bool, owned: bool) -> Condition:
    """Return the condition that the row of one run has the expected revision, and lock that row."""
    conditions = (
        *_after_locks(locks),
        RUNS.c.id == bindparam("id_known"),
        RUNS.c.revision == bindparam("revision_known"),
    )
    current = select(RUNS.c.id).where(*conditions).with_for_update().cte("current_run")
    count = select(func.count()).select_from(current).scalar_subquery()
    names = [*_LOCKS[:locks], "id_known", "revision_known"]
    holds: ColumnElement[bool] = count == literal_column("1")
    if owned:
        holds, names = and_(holds, _are_owned()), [*names, *_OWNED]
    return Condition(select(holds.label("holds")).cte("unchanged"), names)


def select_shared_parts(*chosen: ColumnElement[bool]) -> CompoundSelect[Any]:
    """Return the parts of the chosen contents: run, ref, place, body, True for a message of the assistant's, and at the
    place `OWN` the size of the whole."""
    return union_all(*_shared_parts(*chosen))


def _shared_parts(*chosen: ColumnElement[bool]) -> tuple[Select[Any], ...]:
    columns = [SHARED_CONTENTS.c[name] for name in ("run", "ref", "head", "tail", "size", "body")]
    contents = select(*columns).where(*chosen).cte("asked")
    first = select(contents.c.run, contents.c.ref, TEXTS.c.id, TEXTS.c.before, *_place(1))
    chain = first.join(TEXTS, TEXTS.c.id == contents.c.head).cte("chain", recursive=True)
    earlier = select(chain.c.run, chain.c.ref, TEXTS.c.id, TEXTS.c.before, chain.c.place + literal_column("1"))
    chain = chain.union_all(earlier.join(TEXTS, TEXTS.c.id == chain.c.before))
    own = select(contents.c.run, contents.c.ref, *_place(OWN), contents.c.body, false(), contents.c.size)
    head = select(chain.c.run, chain.c.ref, chain.c.place, TEXTS.c.body, TEXTS.c.spoken, *_place(0))
    tail = select(contents.c.run, contents.c.ref, *_place(TAIL), TEXTS.c.body, false(), *_place(0))
    return own, head.join(TEXTS, TEXTS.c.id == chain.c.id), tail.join(TEXTS, TEXTS.c.id == contents.c.tail)


def _place(number: int) -> list[ColumnElement[int]]:
    return [cast(literal_column(str(number)), BigInteger).label("place")]


def _journal() -> Executable:
    """Return a run's salt with each of its events after a seq; one row with the salt alone if there are none."""
    of_it = (EVENTS.c.run == RUNS.c.id) & (EVENTS.c.seq > bindparam("its_seq"))
    columns = (RUNS.c.salt, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    its_run = RUNS.c.id == bindparam("its_id")
    return select(*columns).select_from(RUNS.outerjoin(EVENTS, of_it)).where(its_run).order_by(EVENTS.c.seq)


def _step_input() -> Executable:
    """Return a run's row, and three arrays of rows: its events after a seq, its tickets, and its small contents.

    At most `MOST_CONTENTS` contents are read, none longer than `most` bytes. After seq 0 these are any contents of the
    run; after a later one, only those that the later events name.
    """
    run = RUNS.c
    its_id: ColumnElement[str] = bindparam("its_id")
    later = EVENTS.c.seq > bindparam("its_seq")
    refs_in_events = select(literal_column(_NAMED, Text())).where(EVENTS.c.run == its_id, later)
    is_needed = or_(bindparam("its_seq") == literal_column("0"), CONTENTS.c.ref.in_(refs_in_events))
    small = func.octet_length(CONTENTS.c.body) <= bindparam("most")
    events = _rows_of(EVENTS, ("seq", "kind", "at", "body"), "seq").where(later)
    tickets = _rows_of(TICKETS, TICKET_COLUMNS, "step")
    contents = (
        _rows_of(CONTENTS, ("ref", "body"), "ref").where(small, is_needed).limit(literal_column(str(MOST_CONTENTS)))
    )
    arrays = [func.array(part.scalar_subquery()) for part in (events, tickets, contents)]
    return select(*[run[name] for name in CACHED_COLUMNS], run.salt, run.driver, *arrays).where(run.id == its_id)


def _rows_of(table: Table, names: Sequence[str], order: str) -> Any:
    """Return the columns of these names of a run's rows in a table, each row as one value."""
    columns = [table.c[name] for name in names]
    return select(func.row(*columns)).where(table.c.run == bindparam("its_id")).order_by(table.c[order])
