"""Statements as text, compiled once and run on the driver's own cursor; and how rows of several tables are written.

Executing through Core looks up the compiled form, builds a dictionary per row and a result object each time; that alone
cost more than the rest of a small batch.

On Postgres every statement is a way to the server and back: some 100 microseconds of our processor, more of the
server's, and a wait wherever the machine is busy. So there what a transaction writes becomes the parts of one WITH over
arrays, one for each column, whose text does not depend on how many rows there are. All parts see the tables as they
were before, so no two of them may touch the same row. SQLite is in the process: there each write is a statement.
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
    """The short way to a server: see `connections.py`."""

    def fetch(self, text: str, values: Sequence[object], limit: float) -> Awaitable[Sequence[Row]]:
        """The rows of a statement."""
        ...


class Prepared:
    """One statement as text; a row's values stand in the order of `names`."""

    def __init__(self, statement: Executable, dialect: Dialect, names: Sequence[str]) -> None:
        compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        if list(compiled.positiontup) != list(names):
            raise AssertionError(f"{compiled.positiontup} is not {names}")
        self._text = str(compiled)

    def each(self, conn: Connection, rows: Sequence[Row]) -> None:
        """Execute once per row; nothing at all without rows."""
        if rows:
            cursor = conn.connection.cursor()
            if len(rows) == 1:
                cursor.execute(self._text, rows[0])
            else:
                cursor.executemany(self._text, rows)
            cursor.close()

    def fetch(self, conn: Connection, *values: object) -> Sequence[Row]:
        """The rows for these values."""
        cursor = conn.connection.cursor()
        cursor.execute(self._text, values)
        rows = cursor.fetchall()
        cursor.close()
        return rows

    def sent(self, line: StatementSender, values: Sequence[object], limit: float) -> Awaitable[Sequence[Row]]:
        """The rows for these values, by the short way, until the loop's clock passes `limit`."""
        return line.fetch(self._text, values, limit)


@record(frozen=True, slots=True)
class SingleStatement(Generic[T]):
    """Work that is one statement, and what its rows come to."""

    statement: Prepared
    values: Sequence[object]
    made: Callable[[Sequence[Row]], T]

    def __call__(self, conn: Connection) -> T:
        return self.made(self.statement.fetch(conn, *self.values))


class Rows:
    """One way to write rows of a table.

    `insert` them, insert them `once` (a row whose key is there stays as it is), `update` the named columns or `delete`.
    A row's values stand in the order of `names` and then of `keys`, the columns that say which row it is; of an
    inserted one they are all columns in table order.
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
        """The statement for one row."""
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
        """The write of one row, or of any number, for Postgres, and the names of its parameters: the values, or arrays
        of them. Nothing is written unless the condition holds."""
        table, types, mark = self._table, {name: one.type for name, one in self._columns.items()}, f"_{number}"
        if one:  # to encode an array takes the driver ten times as long as its one value
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
    """Rows that travel as arrays, one for each column of these names, and the names of those parameters."""
    arrays = [bindparam(f"{name}{mark}", type_=ARRAY(kind)) for name, kind in types.items()]
    derived = [column(name, kind) for name, kind in types.items()]
    return func.unnest(*arrays).table_valued(*derived).render_derived(), [array.key for array in arrays]


def columns_of(rows: Iterable[Row], count: int) -> list[list[Any]]:
    """The arrays that rows of so many columns travel as."""
    return [list(values) for values in zip(*rows, strict=True)] or [[] for _ in range(count)]


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """What must be so for anything to be written: the one row that `holds` it, and the names of its parameters."""

    cte: CTE
    names: Sequence[str]

    @property
    def holds(self) -> ColumnElement[bool]:
        """The column that says it."""
        return self.cte.c.holds


_Parts = tuple[tuple[Rows, bool], ...]
"""What is written together, each with whether it is one row."""


class WriteStatements:
    """Carries out what is to be written, for one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._together = dialect.name == "postgresql"
        self._prepared: dict[tuple[Condition | None, _Parts], Prepared] = {}

    def __call__(self, conn: Connection, *wanted: tuple[Rows, Sequence[Row]]) -> None:
        """Write all of these rows; of no two of them may be the same row of a table. Nothing is done without rows."""
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
        """The same on Postgres in one statement that looks first, if there is a condition; it comes to `done`, or None
        where that did not hold. `given` are the condition's parameters."""
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
        """Compiled when first asked for: of the ways in which parts come together there are some dozens."""
        key = (condition, tuple([(to, len(rows) == 1) for to, rows in asked]))
        if key not in self._prepared:
            self._prepared[key] = self._made(key[1], condition)
        values: list[Any] = []
        for _, rows in asked:
            values += rows[0] if len(rows) == 1 else columns_of(rows, 0)
        return self._prepared[key], tuple(values)

    def _made(self, parts: _Parts, condition: Condition | None) -> Prepared:
        holds = [select(condition.holds).scalar_subquery()] if condition else []
        made = [part.part(number, one=one, condition=holds) for number, (part, one) in enumerate(parts)]
        names = [name for _, names in made for name in names]
        said = select(condition.holds) if condition else select(literal_column("1"))
        whole: Select[Any] = said.add_cte(*([condition.cte] if condition else []), *[part for part, _ in made])
        return Prepared(whole, self._dialect, [*condition.names, *names] if condition else names)
