"""The statements of the append path, of renewals, and of what a step reads: written in Core, compiled once per dialect
(see `prepared.py`). Everything off this path uses Core as usual.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import orjson
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Executable,
    Table,
    Text,
    and_,
    bindparam,
    cast,
    func,
    literal_column,
    null,
    or_,
    select,
    union_all,
    update,
)

from app.store.sqlkit.prepared import (
    Condition,
    Prepared,
    Row,
    Rows,
    SingleStatement,
    WriteStatements,
    columns_of,
    unnested,
)
from app.store.sqlkit.tables import CONTENTS, EVENTS, NOTICES, ONCE, RUNS, TAGS, TICKETS

T = TypeVar("T")

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
SEEN = RUN[:-1]
"""The same of a run whose content is there: all that a guess is about (see `optimistic.py`)."""
TICKET = tuple(column.name for column in TICKETS.columns)
COMPARED = ("epoch", *[name for name in ENDLESS if name != "error"])
"""Columns of a run by which a guess is judged. The others follow from its events, whose number is among these."""
IDENTITY = ("version", "claim", "holder", "lost")
"""Columns of a ticket by which a guess is judged: the others say nothing of whose it is, or (`driver`) change only
together with the run's row."""
SETTLED = ("tier", "driver", "version", "claim", "holder", "rung_at", "lost")
"""Columns of a ticket that an entry may change which leaves a claim as long as it is."""
CLAIM = tuple(column.name for column in ONCE.columns)


_COMPARED = itemgetter(*[SEEN.index(name) for name in COMPARED])
_STEP = itemgetter(TICKET.index("step"))
_IDENTITY = itemgetter(*[TICKET.index(name) for name in IDENTITY])


ALONG = 16
"""Contents that come along with a journal."""
_NAMED = "(regexp_matches(convert_from(events.body, 'UTF8'), '[0-9a-f]{64}', 'g'))[1]"
"""What may be the ref of a content in the body of an event, as Postgres finds it."""


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
        self.step_input = Prepared(self._step_input(), dialect, ["its_id", "its_seq", "most"]) if self.arrays else None
        self.contents = Prepared(
            select(CONTENTS.c.ref, CONTENTS.c.body).where(
                CONTENTS.c.run == bindparam("its_run"), self.among(CONTENTS.c.ref)
            ),
            dialect,
            ["its_run", "ids"],
        )
        self.tickets = Lookup(self, dialect, TICKETS, ["run", "step"])
        self._both = Prepared(self._runs_and_tickets(), dialect, ["ids", "moving"]) if self.arrays else None
        self.write = WriteStatements(dialect)
        if self.arrays:
            self._same, self._same_runs = self._unchanged(moving=True), self._unchanged(moving=False)
            self._same_one, self._same_run = self._unchanged_one(moving=True), self._unchanged_one(moving=False)
        self.new_run = Rows(RUNS, "insert")
        self.change_run = Rows(RUNS, "update", ENDLESS, ["id", "epoch"])
        self.end_run = Rows(RUNS, "update", LIVE, ["id", "epoch"])
        self.hand_run = Rows(RUNS, "update", (*LEASE, *ENDLESS), ["id", "epoch"])
        self.hand_ended = Rows(RUNS, "update", (*LEASE, *LIVE), ["id", "epoch"])
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
        self.settle_ticket = Rows(TICKETS, "update", SETTLED, ["run", "step"])
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

    def write_if(
        self,
        conn: Connection,
        runs: Sequence[Row],
        tickets: Sequence[Row],
        moving: Sequence[str],
        *wanted: tuple[Rows, Sequence[Row]],
    ) -> bool:
        """Write if these runs, and all tickets of those that are `moving`, still are what they are taken to be; whether
        they were."""
        found, held = self.under_lock(conn, [row[0] for row in runs], moving)
        whole = all(row[-1] is not None for row in found)
        alike = {row[0]: _COMPARED(row) for row in found} == {row[0]: _COMPARED(row) for row in runs}
        theirs, known = ({row[:2]: _IDENTITY(row) for row in rows} for rows in (held, tickets))
        if whole and alike and theirs == known:
            self.write(conn, *wanted)
            return True
        return False

    def asked_if(
        self,
        runs: Sequence[Row],
        tickets: Sequence[Row],
        moving: Sequence[str],
        done: T,
        *wanted: tuple[Rows, Sequence[Row]],
    ) -> SingleStatement[T | None]:
        """The same on a server, in one statement that locks what it looks at as `under_lock` does; it comes to `done`,
        or to None where nothing was written."""
        if not runs:  # there is nothing but new runs
            return self.write.only_if(None, (), done, *wanted)
        if len(runs) == 1:
            one, *further = runs[0], *([_print_of_all(tickets)] if moving else [])
            condition = self._same_one if moving else self._same_run
            return self.write.only_if(condition, [one[0], _print(_COMPARED(one)), *further], done, *wanted)
        condition = self._same if moving else self._same_runs
        arrays = columns_of([(row[0], _print(_COMPARED(row))) for row in runs], 2)
        if moving:
            arrays += columns_of([(*row[:2], _print(_IDENTITY(row))) for row in tickets], 3)
            arrays.append(list(moving))
        return self.write.only_if(condition, arrays, done, *wanted)

    def _unchanged(self, *, moving: bool) -> Condition:
        run = RUNS.c
        given, names = unnested({"id": Text(), "print": Text()}, "_seen")
        same = (run.salt.is_not(None), _printed([run[name] for name in COMPARED]) == given.c.print)
        rows = select(run.id).select_from(RUNS.join(given, run.id == given.c.id)).where(*same)
        ours = rows.order_by(run.id).with_for_update(of=RUNS).cte("ours")
        holds = select(func.count()).select_from(ours).scalar_subquery() == _length("id_seen")
        if moving:
            unmoved, further = self._unmoved()
            holds, names = holds & unmoved, [*names, *further]
        return Condition(select(holds.label("holds")).cte("unchanged"), names)

    def _unchanged_one(self, *, moving: bool) -> Condition:
        """The same of one run. Its tickets are told as one text, all of them, in the order of their steps."""
        run, ticket, names = RUNS.c, TICKETS.c, ["id_seen", "print_seen"]
        its = select(_printed([run[name] for name in COMPARED]).label("print"))
        ours = its.where(run.id == _text("id_seen"), run.salt.is_not(None)).with_for_update().cte("ours")
        holds = select(ours.c.print).scalar_subquery() == _text("print_seen")
        if moving:
            names.append("print_taken")
            each = select(_printed([ticket[name] for name in ("step", *IDENTITY)]).label("print"))
            rows = each.where(ticket.run == _text("id_seen")).order_by(ticket.step)
            theirs = rows.with_for_update().cte("theirs")
            whole = func.coalesce(func.string_agg(theirs.c.print, literal_column("'|'")), literal_column("''"))
            holds = and_(holds, select(whole).scalar_subquery() == _text("print_taken"))
        return Condition(select(holds.label("holds")).cte("unchanged"), names)

    def _unmoved(self) -> tuple[ColumnElement[bool], list[str]]:
        """The tickets under lock, too, and none beside them."""
        ticket = TICKETS.c
        given, names = unnested({"run": Text(), "step": BigInteger(), "print": Text()}, "_taken")
        it = (ticket.run == given.c.run) & (ticket.step == given.c.step)
        same = _printed([ticket[name] for name in IDENTITY]) == given.c.print
        rows = select(ticket.run).select_from(TICKETS.join(given, it)).where(same).order_by(ticket.run, ticket.step)
        theirs = rows.with_for_update(of=TICKETS).cte("theirs")
        alike = select(func.count()).select_from(theirs).scalar_subquery()
        of_them = select(func.count()).select_from(TICKETS).where(self.among(ticket.run, "moving")).scalar_subquery()
        return and_(alike == _length("run_taken"), of_them == _length("run_taken")), [*names, "moving"]

    def _step_input(self) -> Executable:
        """A run's row, and arrays of rows: its events after a seq, its tickets, and those of its contents that are no
        longer than `most` bytes, as many as a step may need; after some event, only what the later ones name."""
        run = RUNS.c

        def rows(table: Table, names: Sequence[str], order: str, *where: ColumnElement[bool]) -> Any:
            columns = [table.c[name] for name in names]
            ours = select(func.row(*columns)).where(table.c.run == bindparam("its_id"), *where)
            return ours.order_by(table.c[order])

        later = EVENTS.c.seq > bindparam("its_seq")
        named = select(literal_column(_NAMED, Text())).where(EVENTS.c.run == bindparam("its_id"), later)
        fresh = or_(bindparam("its_seq") == literal_column("0"), CONTENTS.c.ref.in_(named))
        brief = func.octet_length(CONTENTS.c.body) <= bindparam("most")
        parts = (
            rows(EVENTS, ("seq", "kind", "at", "body"), "seq", later),
            rows(TICKETS, TICKET, "step"),
            rows(CONTENTS, ("ref", "body"), "ref", brief, fresh).limit(literal_column(str(ALONG))),
        )
        arrays = [func.array(part.scalar_subquery()) for part in parts]
        return select(*[run[name] for name in SEEN], run.salt, *arrays).where(run.id == bindparam("its_id"))

    def values(self, ids: Sequence[str]) -> object:
        """A list as the one parameter that it travels as."""
        return list(ids) if self.arrays else orjson.dumps(ids).decode()

    def among(self, column: Column[Any], name: str = "ids") -> ColumnElement[bool]:
        """Membership in a list that travels as one parameter, so that the statement's text never changes."""
        if self.arrays:
            return column == func.any(bindparam(name, type_=ARRAY(Text)))
        values = func.json_each(bindparam(name, type_=Text)).table_valued("value")
        return column.in_(select(values.c.value))


def _print(values: Iterable[object]) -> str:
    """Values as one text, which costs less to send and to compare than each of them: as the server says them, see
    `_printed`. Texts of ours have no bars in them, and none is empty."""
    return "|".join([_WORDS[value] if value is None or isinstance(value, bool) else str(value) for value in values])


def _print_of_all(tickets: Iterable[Row]) -> str:
    """The texts of a run's tickets as one, in the order of their steps."""
    return _print([value for row in sorted(tickets, key=_STEP) for value in (_STEP(row), *_IDENTITY(row))])


_WORDS: Mapping[object, str] = {None: "", True: "t", False: "f"}


def _printed(columns: Iterable[ColumnElement[Any]]) -> ColumnElement[str]:
    bar: ColumnElement[str] = literal_column("'|'")
    first, *rest = columns
    return func.concat(first, *[part for column in rest for part in (bar, column)])


def _text(name: str) -> ColumnElement[str]:
    return bindparam(name, type_=Text)


def _length(name: str) -> ColumnElement[int]:
    return func.cardinality(bindparam(name, type_=ARRAY(Text)))


def _journal() -> Executable:
    """A run's salt beside each of its events after a seq; beside nothing if there are none."""
    of_it = (EVENTS.c.run == RUNS.c.id) & (EVENTS.c.seq > bindparam("its_seq"))
    columns = (RUNS.c.salt, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    its_run = RUNS.c.id == bindparam("its_id")
    return select(*columns).select_from(RUNS.outerjoin(EVENTS, of_it)).where(its_run).order_by(EVENTS.c.seq)
