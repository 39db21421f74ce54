"""Reports on what runs cost: the figures of `core/rating/economics.py` over the runs of a store, and their tables.

The runs are read page by page, the oldest first, so that memory does not grow with them. A table is a list of rows of
plain values under the columns of its part; `as_csv` and `as_parquet` write one.
"""

import asyncio
import csv
import io
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, tzinfo
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec.structs import replace

from app.core.pool.catalog import Price
from app.core.pool.snapshot import restore_catalog
from app.core.rating.economics import MOST_GROUPS, JournaledRun, Report, ReportOptions, TooManyGroups
from app.errors import ConfigInvalid, Overloaded
from app.store.protocol import Reports, RunQuery, TenantStore
from app.store.run_pages import run_pages

Part = Literal["summary", "groups", "dearest", "failures"]
Row = dict[str, Any]
PAGE: Final = 50
"""Runs that are read at a time: their figures take some milliseconds, in which nothing else goes on."""
SUMS: Final = (
    *("runs", "unanswered", "cost_usd", "judged", "without_verdict", "successes", "judged_cost_usd"),
    "cost_per_success_usd",
)
TEXT, WHOLE, NUMBER = "VARCHAR", "BIGINT", "DOUBLE"
COLUMNS: Final[Mapping[Part, Mapping[str, str]]] = {
    "summary": {"figure": TEXT, "value": NUMBER},
    "groups": {
        "by": TEXT,
        "group": TEXT,
        **{name: NUMBER if name.endswith("usd") else WHOLE for name in SUMS},
    },
    "dearest": {"feature": TEXT, "value": TEXT, "runs": WHOLE, "of_runs": WHOLE, "lift": NUMBER},
    "failures": {
        **dict.fromkeys(("level", "cause", "reason", "topology", "position", "worker"), TEXT),
        "count": WHOLE,
        "first_at": NUMBER,
        "last_at": NUMBER,
        "examples": TEXT,
    },
}
"""The columns of each part with their types in SQL."""
REPORT_SECONDS: Final = 30.0
"""The longest time until a report is ready, the wait for the report before it included."""
PERIOD_SECONDS: Final = 7 * 86_400.0
"""The period that a report is about if the request does not say since when."""
FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Beginnings of texts that spreadsheets take for formulas, in some languages also the full-width ones of East Asia."""


class TooManyRuns(Exception):
    """There are more runs than the report may be about."""


def zone_of(name: str) -> tzinfo:
    """Return the time zone of an IANA name. Raises `ValueError` for an unknown one."""
    if name == "UTC":  # which a machine without a database of time zones knows, too
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("it must be the name of a time zone, such as UTC or Europe/Berlin") from None


async def make(
    store: TenantStore,
    catalogs: Reports,
    query: RunQuery,
    options: ReportOptions,
    zone: tzinfo,
    *,
    most: int | None = None,
) -> dict[str, Any]:
    """Return the figures over the runs that a query selects.

    Raises `TooManyRuns` where there are more than `most`, `TooManyGroups`, and `StoreUnavailable`.
    """
    report, prices = Report(options, zone), _Prices(catalogs)
    run_count = 0
    query = replace(query, sort="time", ascending=True, before=None, limit=PAGE)
    async for page in run_pages(store.journaled_runs, query):
        run_count += len(page)
        if most is not None and run_count > most:
            raise TooManyRuns
        await prices.learn(page)
        for run in page:
            report.add(run, prices.of(run))
        await asyncio.sleep(0)  # figures are made in the event loop: let other tasks in
    return report.figures()


class _Prices:
    """The prices in the snapshots of pools, each of which is read once."""

    def __init__(self, catalogs: Reports) -> None:
        self._catalogs = catalogs
        self._known: dict[str, dict[str, Price] | None] = {}

    async def learn(self, runs: Sequence[JournaledRun]) -> None:
        """Read the snapshots of these runs' pools that are not known yet."""
        missing = sorted({run.catalog for run in runs} - self._known.keys())
        if missing:
            bodies = await self._catalogs.catalogs(missing)
            self._known |= {digest: _prices(bodies.get(digest)) for digest in missing}

    def of(self, run: JournaledRun) -> dict[str, Price] | None:
        """Return the prices of a run's pool; None if its snapshot is not stored."""
        return self._known.get(run.catalog)


def _prices(snapshot: bytes | None) -> dict[str, Price] | None:
    """Return the known prices in a snapshot; None if there is no snapshot, or if this version cannot read it."""
    if snapshot is None:
        return None
    try:
        workers = restore_catalog(snapshot).workers
    except ValueError:
        return None
    return {name: worker.price for name, worker in workers.items() if worker.priced}


def too_many_groups(error: TooManyGroups) -> str:
    """Return the advice to a caller whose grouping has too many groups."""
    return f"'{error}' has more than {MOST_GROUPS:,} groups; choose a shorter period, a filter or another grouping"


@asynccontextmanager
async def in_time(slot: asyncio.Semaphore, remedy: str) -> AsyncIterator[None]:
    """Wait for the `slot` of a report, and hold it. Raises `Overloaded`, with what the caller can do, where the report
    is not ready within `REPORT_SECONDS`."""
    try:
        async with asyncio.timeout(REPORT_SECONDS), slot:
            yield
    except TimeoutError:
        message = f"The report was not ready within {REPORT_SECONDS:.0f} seconds; {remedy}."
        raise Overloaded(message, retry_after=REPORT_SECONDS) from None


# -- tables


def table(figures: Mapping[str, Any], part: Part) -> list[Row]:
    """Return the rows of one part, with the columns of `COLUMNS`."""
    if part == "summary":
        return [{"figure": name, "value": value} for name, value in _scalars(figures)]
    if part == "groups":
        return list(figures["groups"])
    if part == "dearest":
        return list(figures["dearest"]["features"])
    return [{**row, "examples": " ".join(row["examples"])} for row in figures["failures"]]


def _scalars(figures: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """Return the single figures, by the path of their names."""
    scalars: list[tuple[str, float | None]] = []
    for name in ("left_out", "total", "dearest", "access_lists", "cheapest"):
        for figure, value in figures[name].items():
            if value is None:
                scalars.append((f"{name}.{figure}", None))
            elif isinstance(value, int | float):
                scalars.append((f"{name}.{figure}", float(value)))
    scalars.append(("failures_left_out", float(figures["failures_left_out"])))
    return scalars


def as_csv(rows: Sequence[Row], part: Part) -> str:
    """Return a table as CSV (RFC 4180). A text that a spreadsheet would take for a formula begins with an
    apostrophe."""
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow(COLUMNS[part])
    for row in rows:
        writer.writerow([csv_cell(row[name]) for name in COLUMNS[part]])
    return output.getvalue()


def csv_cell(value: object) -> object:
    """Return a value as a cell that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.startswith(FORMULAS):
        return f"'{value}"
    if value is None:
        return ""
    return value


def as_parquet(rows: Sequence[Row], part: Part) -> bytes:
    """Return a table as a Parquet file. Raises `ConfigInvalid` if the library is not installed."""
    try:
        connect: Callable[..., Any] = resolve_name("duckdb:connect")
    except ImportError:
        raise ConfigInvalid(["Parquet needs the extra: pip install 'baton[parquet]'"]) from None
    columns = COLUMNS[part]
    declared = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
    values = [tuple(map(row.__getitem__, columns)) for row in rows]
    with tempfile.TemporaryDirectory() as folder, connect(":memory:") as database:
        file = Path(folder) / "table.parquet"
        database.execute(f"CREATE TABLE made ({declared})")
        if values:
            database.executemany(f"INSERT INTO made VALUES ({', '.join('?' * len(columns))})", values)
        database.execute(f"COPY made TO '{str(file).replace(chr(39), chr(39) * 2)}' (FORMAT parquet)")
        return file.read_bytes()
