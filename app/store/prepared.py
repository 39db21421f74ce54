"""Statements as text, compiled once and run on the driver's own cursor; and how rows of several tables are written.

Executing through Core looks up the compiled form, builds a dictionary per row and a result object each time; that alone
cost more than the rest of a small batch.

On Postgres every statement is a way to the server and back: some 100 microseconds of our processor, more of the
server's, and a wait wherever the machine is busy. So there what a transaction writes becomes the parts of one WITH over
arrays, one for each column, whose text does not depend on how many rows there are. All parts see the tables as they
were before, so no two of them may touch the same row. SQLite is in the process: there each write is a statement.
"""

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import (
    ARRAY,
    Connection,
    Dialect,
    Executable,
    Select,
    Table,
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

Row = tuple[Any, ...]


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

    def part(self, number: int) -> tuple[Any, list[str]]:
        """The write of any number of rows, for Postgres, and the names of its parameters: arrays, one a column."""
        table, types = self._table, {name: one.type for name, one in self._columns.items()}
        arrays = [bindparam(f"{name}_{number}", type_=ARRAY(kind)) for name, kind in types.items()]
        derived = [column(name, kind) for name, kind in types.items()]
        rows = func.unnest(*arrays).table_valued(*derived).render_derived()
        ours = [one == rows.c[name] for name, one in self._keys.items()]
        statement: Any
        if self._verb == "insert":
            statement = insert(table).from_select(self._names, select(*rows.c))
        elif self._verb == "once":
            statement = postgresql.insert(table).from_select(self._names, select(*rows.c)).on_conflict_do_nothing()
        elif self._verb == "update":
            statement = update(table).where(*ours).values({name: rows.c[name] for name in self._names})
        else:
            statement = delete(table).where(*ours)
        return statement.cte(f"part_{number}"), [array.key for array in arrays]


class Writes:
    """Carries out what is to be written, for one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._together = dialect.name == "postgresql"
        self._prepared: dict[tuple[Rows, ...], Prepared] = {}

    def __call__(self, conn: Connection, *wanted: tuple[Rows, Sequence[Row]]) -> None:
        """Write all of these rows; of no two of them may be the same row of a table. Nothing is done without rows."""
        asked = [(to, rows) for to, rows in wanted if rows]
        if not self._together:
            for to, rows in asked:
                self._statement((to,)).each(conn, rows)
        elif asked:
            arrays = [list(values) for _, rows in asked for values in zip(*rows, strict=True)]
            self._statement(tuple([to for to, _ in asked])).each(conn, [tuple(arrays)])

    def _statement(self, parts: tuple[Rows, ...]) -> Prepared:
        """Compiled when first asked for: of the ways in which parts come together there are a dozen or two."""
        if parts not in self._prepared:
            self._prepared[parts] = self._made(parts)
        return self._prepared[parts]

    def _made(self, parts: tuple[Rows, ...]) -> Prepared:
        if not self._together:
            return parts[0].single(self._dialect)
        made = [part.part(number) for number, part in enumerate(parts)]
        whole: Select[Any] = select(literal_column("1")).add_cte(*[part for part, _ in made])
        return Prepared(whole, self._dialect, [name for _, names in made for name in names])
