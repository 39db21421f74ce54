"""Statements that are compiled once and run on the driver's own cursor, and joint writes to several tables.

A statement that is executed through Core is looked up in compiled form, with a dictionary for each row and a result
object each time; that alone costs more than the rest of a small batch.

On Postgres every statement is a round trip: some 100 microseconds of CPU here, more in the server, and a wait. So all
writes of a transaction are the parts of one WITH statement over arrays, one array for each column, so that its text
does not depend on the number of rows. All parts see the tables as they were before the statement, so no two of them may
change the same row. SQLite is in this process: there each write is a statement of its own.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from sqlalchemy import (
    ARRAY,
    CTE,
    ColumnElement,
    Connection,
    Dialect,
    Executable,
    Select,
    Table,
    TableValuedAlias,
    bindparam,
    column,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.types import TypeEngine

from app.core.records import record

Row = tuple[Any, ...]
T = TypeVar("T")


class StatementSender(Protocol):
    """A connection to Postgres for single statements (see `connections.py`)."""

    def fetch(self, text: str, values: Sequence[object], limit: float) -> Awaitable[Sequence[Row]]:
        """Carry out a statement and return its rows. `TimeoutError` when the loop's clock passes `limit`."""
        ...


class Prepared:
    """One statement as text. Its parameters are in the order of `names`."""

    def __init__(self, statement: Executable, dialect: Dialect, names: Sequence[str]) -> None:
        compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        if list(compiled.positiontup) != list(names):
            raise AssertionError(f"{compiled.positiontup} is not {names}")
        self._text = str(compiled)

    def each(self, conn: Connection, rows: Sequence[Row]) -> None:
        """Execute once for each row of parameters."""
        if rows:
            cursor = conn.connection.cursor()
            if len(rows) == 1:
                cursor.execute(self._text, rows[0])
            else:
                cursor.executemany(self._text, rows)
            cursor.close()

    def fetch(self, conn: Connection, *values: object) -> Sequence[Row]:
        """Execute with these parameters and return the rows."""
        cursor = conn.connection.cursor()
        cursor.execute(self._text, values)
        rows = cursor.fetchall()
        cursor.close()
        return rows

    def sent(self, line: StatementSender, values: Sequence[object], limit: float) -> Awaitable[Sequence[Row]]:
        """Send it as a single statement and return its rows. `TimeoutError` when the loop's clock passes `limit`."""
        return line.fetch(self._text, values, limit)


@record(frozen=True, slots=True)
class SingleStatement(Generic[T]):
    """Work that is one statement. `made` turns its rows into the result."""

    statement: Prepared
    values: Sequence[object]
    made: Callable[[Sequence[Row]], T]

    def __call__(self, conn: Connection) -> T:
        return self.made(self.statement.fetch(conn, *self.values))


class Rows:
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

    def single(self, dialect: Dialect) -> Prepared:
        """The statement that writes one row."""
        table, ours = self._table, [column == bindparam(name) for name, column in self._keys.items()]
        statement: Executable
        if self._verb == "insert":
            statement = insert(table)
        elif self._verb == "once":
            maker = sqlite.insert if dialect.name == "sqlite" else postgresql.insert
            statement = maker(table).on_conflict_do_nothing()
        elif self._verb == "update":
            statement = update(table).where(*ours).values({name: bindparam(name) for name in self._names})
        else:
            statement = delete(table).where(*ours)
        return Prepared(statement, dialect, list(self._columns))

    def part(self, number: int, *, one: bool, condition: Sequence[ColumnElement[bool]] = ()) -> tuple[Any, list[str]]:
        """A part of a joint write for Postgres, and the names of its parameters.

        The parameters are the values of `one` row, or arrays for any number of rows. Nothing is written unless the
        condition holds.
        """
        table, types, mark = self._table, {name: one.type for name, one in self._columns.items()}, f"_{number}"
        if one:  # the driver encodes a value in a tenth of the time of an array
            values: Mapping[str, Any] = {name: bindparam(name + mark, type_=kind) for name, kind in types.items()}
            names = [value.key for value in values.values()]
        else:
            rows, names = unnested(types, mark)
            values = {name: rows.c[name] for name in types}
        ours = [*[column == values[name] for name, column in self._keys.items()], *condition]
        given = select(*values.values()).where(*condition)
        statement: Any
        if self._verb == "insert":
            statement = insert(table).from_select(self._names, given)
        elif self._verb == "once":
            statement = postgresql.insert(table).from_select(self._names, given).on_conflict_do_nothing()
        elif self._verb == "update":
            statement = update(table).where(*ours).values({name: values[name] for name in self._names})
        else:
            statement = delete(table).where(*ours)
        return statement.cte(f"part_{number}"), names


def unnested(types: Mapping[str, TypeEngine[Any]], mark: str) -> tuple[TableValuedAlias, list[str]]:
    """Rows that are sent as arrays, one for each of these columns, and the names of these parameters."""
    arrays = [bindparam(f"{name}{mark}", type_=ARRAY(kind)) for name, kind in types.items()]
    derived = [column(name, kind) for name, kind in types.items()]
    return func.unnest(*arrays).table_valued(*derived).render_derived(), [array.key for array in arrays]


def columns_of(rows: Iterable[Row], count: int) -> list[list[Any]]:
    """The arrays, one for each of `count` columns, as which rows are sent."""
    return [list(values) for values in zip(*rows, strict=True)] or [[] for _ in range(count)]


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A condition of a joint write: a query with one row and one column `holds`, and the names of its parameters."""

    cte: CTE
    names: Sequence[str]

    @property
    def holds(self) -> ColumnElement[bool]:
        """The column that is true if the condition holds."""
        return self.cte.c.holds


_Parts = tuple[tuple[Rows, bool], ...]
"""The parts of a joint write, and for each of them whether it writes a single row."""


class WriteStatements:
    """Carries out writes to several tables, for one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._together = dialect.name == "postgresql"
        self._prepared: dict[tuple[Condition | None, _Parts], Prepared] = {}

    def __call__(self, conn: Connection, *wanted: tuple[Rows, Sequence[Row]]) -> None:
        """Write all of these rows. No two of them may be the same row of a table."""
        asked = [(to, rows) for to, rows in wanted if rows]
        if not self._together:
            for to, rows in asked:
                self._single(to).each(conn, rows)
        elif asked:
            statement, values = self._joint(asked)
            statement.each(conn, [values])

    def only_if(
        self, condition: Condition | None, given: Sequence[object], done: T, *wanted: tuple[Rows, Sequence[Row]]
    ) -> SingleStatement[T | None]:
        """The write as a single statement of Postgres, which checks a condition first, if there is one.

        Its result is `done`, or None if the condition does not hold. `given` are the parameters of the condition.
        """
        statement, values = self._joint([(to, rows) for to, rows in wanted if rows], condition)
        return SingleStatement(statement, (*given, *values), lambda rows: done if rows[0][0] else None)

    def _single(self, to: Rows) -> Prepared:
        key = (None, ((to, True),))
        if key not in self._prepared:
            self._prepared[key] = to.single(self._dialect)
        return self._prepared[key]

    def _joint(
        self, asked: Sequence[tuple[Rows, Sequence[Row]]], condition: Condition | None = None
    ) -> tuple[Prepared, Row]:
        """The statement for these parts, compiled when it is first used: there are some dozens of combinations."""
        key = (condition, tuple([(to, len(rows) == 1) for to, rows in asked]))
        if key not in self._prepared:
            self._prepared[key] = self._made(key[1], condition)
        values: list[Any] = []
        for _, rows in asked:
            values += rows[0] if len(rows) == 1 else columns_of(rows, 0)
        return self._prepared[key], tuple(values)

    def _made(self, parts: _Parts, condition: Condition | None) -> Prepared:
        holds: list[ColumnElement[bool]] = []
        whole: Select[Any] = select(literal_column("1"))
        names: list[str] = []
        if condition is not None:
            holds = [select(condition.holds).scalar_subquery()]
            whole = select(condition.holds).add_cte(condition.cte)
            names += condition.names
        for number, (part, one) in enumerate(parts):
            written, its_names = part.part(number, one=one, condition=holds)
            whole = whole.add_cte(written)
            names += its_names
        return Prepared(whole, self._dialect, names)
