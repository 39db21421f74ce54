"""The statements of a pass of sealing, compiled once for each dialect: a pass runs every second and has a dozen."""

from collections.abc import Sequence

from sqlalchemy import Dialect, func, select, text
from sqlalchemy.dialects import postgresql, sqlite

from app.store.protocol import ERASED_TAGS
from app.store.sqlkit.statements import PreparedStatement, Statements, TableWrite
from app.store.sqlkit.tables import DISCLOSURES, LOG_LEAVES, LOG_STATE, LOG_TILES, RUNS

STATE = tuple([str(column.name) for column in LOG_STATE.columns])
"""The columns of the log's state, in table order."""
_MOMENT = {
    True: "SELECT pg_snapshot_xmin(snapshot)::text::bigint, pg_snapshot_xmax(snapshot)::text::bigint, "
    "CAST(extract(epoch FROM clock_timestamp()) AS double precision) FROM pg_current_snapshot() AS snapshot",
    False: "SELECT 0, 0, (julianday('now') - 2440587.5) * 86400.0",
}
_TEXTS = {True: "= ANY(CAST(:ids AS text[]))", False: "IN (SELECT value FROM json_each(:ids))"}
_NUMBERS = {True: "= ANY(CAST(:ids AS bigint[]))", False: "IN (SELECT value FROM json_each(:ids))"}
_NAMES = ", ".join([f"'{name}'" for name in ERASED_TAGS])
_POSTGRES_EVENTS = """
SELECT events.run, events.seq, events.kind, events.at, events.body
FROM unnest(CAST(:runs AS text[]), CAST(:sealed AS bigint[])) AS given (run, sealed)
JOIN events ON events.run = given.run AND events.seq > given.sealed ORDER BY events.run, events.seq
"""
_SQLITE_EVENTS = """
SELECT events.run, events.seq, events.kind, events.at, events.body
FROM json_each(:pairs) AS given JOIN events ON events.run = json_extract(given.value, '$[0]')
AND events.seq > json_extract(given.value, '$[1]') ORDER BY events.run, events.seq
"""
_TILE = "SELECT body FROM log_tiles WHERE level = :level AND number = :number"
_QUEUED_CHANGES = "SELECT n, kind, id, xid, at FROM log_queue WHERE xid >= :since ORDER BY xid, n LIMIT :most"


class LogStatements:
    """All statements of a pass. `common` are those of the append path."""

    def __init__(self, common: Statements, dialect: Dialect, of_run: Sequence[str]) -> None:
        """`of_run` are the columns of a run that a pass reads."""
        self.common = common
        arrays, ledger, row = common.arrays, DISCLOSURES.c, LOG_LEAVES.c

        def prepare(statement: str, *names: str) -> PreparedStatement:
            return PreparedStatement(text(statement), dialect, names)

        self.lock = PreparedStatement(select(LOG_STATE).with_for_update(skip_locked=True), dialect, [])
        self.moment = prepare(_MOMENT[arrays])
        self.queued_changes = prepare(_QUEUED_CHANGES, "since", "most")
        self.oldest = prepare("SELECT at FROM log_queue ORDER BY xid, n LIMIT 1")
        its_columns = [RUNS.c[name] for name in of_run]
        self.runs = PreparedStatement(select(*its_columns).where(common.among(RUNS.c.id)), dialect, ["ids"])
        about = select(func.max(row.place)).where(common.among(row.subject)).group_by(row.subject, row.kind, row.id)
        last = select(row.kind, row.id, row.entry, row.salt, row.events, row.frontier).where(row.place.in_(about))
        self.last_entries = PreparedStatement(last, dialect, ["ids"])
        tags = f"SELECT run, name, value FROM tags WHERE name IN ({_NAMES}) AND run {_TEXTS[arrays]}"
        self.private_tags = prepare(f"{tags} ORDER BY run, name, value", "ids")
        ledger_rows = select(DISCLOSURES).where(common.among(ledger.run)).order_by(ledger.run, ledger.call)
        self.disclosures = PreparedStatement(ledger_rows, dialect, ["ids"])
        self.events = prepare(_POSTGRES_EVENTS, "runs", "sealed") if arrays else prepare(_SQLITE_EVENTS, "pairs")
        self.tile = prepare(_TILE, "level", "number")
        insertion = postgresql.insert(LOG_TILES) if arrays else sqlite.insert(LOG_TILES)
        key = [LOG_TILES.c.level, LOG_TILES.c.number]
        upsert = insertion.on_conflict_do_update(index_elements=key, set_={"body": insertion.excluded.body})
        self.write_tiles = PreparedStatement(upsert, dialect, ["level", "number", "body"])
        self.insert_entry = TableWrite(LOG_LEAVES, "insert")
        self.dequeue = prepare(f"DELETE FROM log_queue WHERE n {_NUMBERS[arrays]}", "ids")
        self.change_state = TableWrite(LOG_STATE, "update", STATE[1:], ["id"])
