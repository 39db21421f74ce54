"""Fixtures for every folder of tests: a closed network, and real servers for the tests that ask for them.

Servers start with the first test that asks and serve the whole session; each test gets a database or an emptied Redis
of its own. `BATON_TEST_DATABASE_URL` and `BATON_TEST_REDIS_URL` name servers that are already running; those are left
as they were found.
"""

import asyncio
import functools
import gc
import ipaddress
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest
from hypothesis import settings
from redis.asyncio import Redis
from sqlalchemy import Dialect, Engine, create_engine
from sqlalchemy.engine import URL, make_url

from app.cli.terminal import QUIETED_LOGGERS
from app.console import templating
from app.stepqueue import live
from app.stepqueue import redis as redis_queue
from app.store import sql
from app.store.sqlkit import postgres, sqlite
from app.store.sqlkit.log_statements import LogStatements
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import ADMIN_EVENTS, FORMS, LOG_STATE, METADATA
from tests.harness import fork_server, prepared_databases, processes, servers
from tests.harness.waiting import PATIENCE_SECONDS

pytest_plugins = ["tests.harness.fixtures"]
settings.register_profile("tests", deadline=None, max_examples=50)
settings.load_profile("tests")  # hypothesis would else fail an example that takes 0.2 s, as on a busy machine
PREPARED_DATABASES: Final = pytest.StashKey[tuple[Path, subprocess.Popen[bytes]]]()
"""The folder of `tests/harness/prepared_databases.py`, and the process that fills it."""

LONG_FOLDERS: Final = ("bench", "clients", "harness", "integration", "lab")
"""What is in them is marked as `long`: it measures, trains, starts many processes or tests the harness itself."""
LONGEST_FILES: Final = (
    *("cli/test_commands.py", "deploy/test_readme.py", "simulation/test_seeds.py", "store/test_migrations.py"),
    *("integration/test_processes.py", "integration/test_degraded.py", "integration/test_reattachment.py"),
    *("isolation/test_isolation.py", "lab/test_offpolicy.py", "lab/test_world.py", "lab/test_world2_learning.py"),
)
"""The files that take longest, the first of them first. Some wait for processes, and some compute meanwhile."""
OBJECTS_PER_COLLECTION: Final = 50_000
"""Objects made and not freed since the last garbage collection that cause the next one: by default, 700."""


class NetworkBlocked(RuntimeError):
    """A test tried to leave the machine. Not an OSError, so that nobody takes it for a worker that is down."""


def _is_local(host: object) -> bool:
    name = host.decode() if isinstance(host, bytes) else str(host)
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name in {"localhost", "ip6-localhost", ""}


def _guard_resolver(blocked: list[str], resolve: Callable[..., Any]) -> Callable[..., Any]:
    def getaddrinfo(host: object, *args: Any, **kwargs: Any) -> Any:
        if host is not None and not _is_local(host):
            blocked.append(f"resolve {host!r}")
            raise NetworkBlocked(f"tests stay on loopback: {blocked[-1]}")
        return resolve(host, *args, **kwargs)

    return getaddrinfo


def _guard_method(blocked: list[str], method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `connect`, `connect_ex` or `sendto`, all of which take the address last."""

    def connect_locally(sock: socket.socket, *args: Any) -> Any:
        if sock.family in {socket.AF_INET, socket.AF_INET6} and not _is_local(args[-1][0]):
            blocked.append(f"{method.__name__} {args[-1]!r}")
            raise NetworkBlocked(f"tests stay on loopback: {blocked[-1]}")
        return method(sock, *args)

    return connect_locally


def pytest_configure() -> None:
    """Give every process of the tests the usual SIGINT. A shell ignores it in what it runs in the background, and
    asyncio restores it in a process that has handled it once, so that processes would differ by the test before.

    What commands print has the width of a pipe, whatever the terminal of the one who tests: some export `COLUMNS`.
    """
    os.environ.pop("COLUMNS", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before several workers are to run tests, have other processes make what each of the workers needs.

    They are ready when the tests have been collected, which keeps one core only.
    """
    if not session.config.getoption("--workers", 0):
        return
    fork_server.preload(processes.environment(Path()))
    if "BATON_TEST_DATABASE_URL" not in os.environ:
        folder = session.config._tmp_path_factory.mktemp("databases")  # type: ignore[attr-defined]
        session.config.stash[PREPARED_DATABASES] = folder, prepared_databases.start(folder)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait for what workers will copy. Where it could not be made, the first test that needs it says why."""
    _, maker = session.config.stash.get(PREPARED_DATABASES, (None, None))
    if maker is not None and maker.wait():
        del session.config.stash[PREPARED_DATABASES]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from everything that collection imports: it stays to the end.

    Afterwards it looks more rarely than it usually does, which took a twelfth of the time of all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(OBJECTS_PER_COLLECTION)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is long, and run the longest files first: the last one to start would else run alone at the end."""
    for item in items:
        if item.path.parent.name in LONG_FOLDERS:
            item.add_marker(pytest.mark.long)
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-2:]), len(LONGEST_FILES)))


@pytest.fixture(scope="session", autouse=True)
def _first_logging() -> list[tuple[logging.Logger, int, list[logging.Handler]]]:
    """The log levels and handlers before any test, and before any fixture that serves several tests."""
    loggers = [logging.getLogger(name) for name in (None, "app.store", *QUIETED_LOGGERS)]
    return [(logger, logger.level, logger.handlers[:]) for logger in loggers]


@pytest.fixture(autouse=True)
def _same_logging(_first_logging: list[tuple[logging.Logger, int, list[logging.Handler]]]) -> Iterator[None]:
    """Undo each test's settings of log levels and handlers, which commands change, and those of its module's fixtures.

    They are undone before the test as well, because a fixture of its module may have carried out a command.
    """
    _set_logging(_first_logging)
    yield
    _set_logging(_first_logging)


def _set_logging(logging_settings: list[tuple[logging.Logger, int, list[logging.Handler]]]) -> None:
    for logger, level, handlers in logging_settings:
        if logger.level != level:  # to set it empties the caches of all loggers
            logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def network_guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Sockets reach loopback and Unix paths only. A blocked attempt fails the test even if its error was swallowed.

    Covers Python's own sockets, so not uvloop's and not child processes. A test that provokes an attempt clears the
    list.
    """
    blocked: list[str] = []
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, _guard_method(blocked, getattr(socket.socket, name)))
    monkeypatch.setattr(socket, "getaddrinfo", _guard_resolver(blocked, socket.getaddrinfo))
    yield blocked
    assert not blocked, f"the test tried to leave the machine: {blocked}"


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Share one TLS context: each HTTP client would read all root certificates, which takes 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_version() -> Iterator[None]:
    """Read the version once: each service would parse the metadata of its package, which takes 2 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.process.wiring.version", functools.cache(version))
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_templates() -> Iterator[None]:
    """Compile each template of the console once: each service would compile those that it shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templating, "environment", functools.cache(templating.environment))
        yield


@pytest.fixture(scope="session")
def make_schema(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Migrate as the service does, but copy a migrated file for each new SQLite database: a third of the work."""
    folder, _ = request.config.stash.get(PREPARED_DATABASES, (None, None))
    migrated_file = (folder or tmp_path_factory.mktemp("schema")) / prepared_databases.SQLITE_FILE
    lock = threading.Lock()

    def schema(url: str) -> None:
        parsed = make_url(url)
        path = Path(parsed.database or "")
        with lock:
            if parsed.get_backend_name() == "sqlite" and not path.exists():
                if not migrated_file.exists():
                    prepared_databases.make_sqlite(migrated_file)
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(migrated_file, path)
                return
        migrate(url)

    return schema


@pytest.fixture
def embedded_database(tmp_path: Path, make_schema: Callable[[str], None]) -> None:
    """Make the database that a command finds in the data folder `tmp_path`: no command makes one by itself."""
    make_schema(f"sqlite:///{tmp_path / 'baton.db'}")


@pytest.fixture
def database_of_commands(tmp_path: Path, make_schema: Callable[[str], None]) -> None:
    """Make the database that `tests.cli.test_commands.baton` finds in the folder `tmp_path`: a copy of a migrated one,
    for tests of other things than `baton migrate`."""
    make_schema(f"sqlite:///{tmp_path / 'data' / 'baton.db'}")


@pytest.fixture(scope="session", autouse=True)
def shared_schema_and_statements(make_schema: Callable[[str], None]) -> Iterator[None]:
    """Make the schema and the statements once, as a process does: a thousand stores are opened in this one.

    The engines of SQLite files share what SQLAlchemy has compiled.
    """
    statements_by_dialect: dict[str, Statements] = {}
    log_statements_by_dialect: dict[str, LogStatements] = {}

    def statements(dialect: Dialect) -> Statements:
        if dialect.name not in statements_by_dialect:
            statements_by_dialect[dialect.name] = Statements(dialect)
        return statements_by_dialect[dialect.name]

    def log_statements(common: Statements, dialect: Dialect, of_run: Sequence[str]) -> LogStatements:
        if dialect.name not in log_statements_by_dialect:
            log_statements_by_dialect[dialect.name] = LogStatements(common, dialect, of_run)
        return log_statements_by_dialect[dialect.name]

    def engine(url: URL, **options: Any) -> Engine:
        new_engine = create_engine(url, **options)
        new_engine.dialect = first_engine.dialect
        new_engine._compiled_cache = first_engine._compiled_cache
        return new_engine

    first_engine = create_engine("sqlite://")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.store.sql.migrate", make_schema)
        patch.setattr("app.store.sql.Statements", statements)
        patch.setattr("app.store.writing.log_writer.LogStatements", log_statements)
        patch.setattr("app.store.archive.create_engine", engine)
        patch.setattr("app.store.sqlkit.sqlite.create_engine", engine)
        yield


@pytest.fixture(scope="session")
def postgres_data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a database that has the schema, to be copied."""
    folder, _ = request.config.stash.get(PREPARED_DATABASES, (None, None))
    if folder is not None:
        return folder / prepared_databases.POSTGRES_DATA
    data = tmp_path_factory.mktemp("postgres") / prepared_databases.POSTGRES_DATA
    prepared_databases.make_postgres(data)
    return data


@pytest.fixture(scope="session")
def postgres_server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the Postgres that all tests share; use `postgres_url`."""
    running_server = os.environ.get("BATON_TEST_DATABASE_URL")
    if running_server:
        yield make_url(running_server).set(drivername="postgresql").render_as_string(hide_password=False)
        return
    with servers.postgres(copied=request.getfixturevalue("postgres_data")) as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    """The URL of the Redis that all tests share; use `redis_url`."""
    running_server = os.environ.get("BATON_TEST_REDIS_URL")
    if running_server:
        yield running_server
        return
    with servers.redis() as server:
        yield server.url


@pytest.fixture
async def postgres_url(postgres_server_url: str, patient_store: None) -> AsyncIterator[str]:
    """The URL of an empty database of the test's own, which is dropped afterwards even if connections are open."""
    async with _database_like("template0", postgres_server_url) as url:
        yield url


@pytest.fixture
async def copied_postgres_url(
    postgres_server_url: str, migrated_template: str, patient_store: None
) -> AsyncIterator[str]:
    """The URL of a database of the test's own with the schema in it, for tests that change the schema."""
    async with _database_like(migrated_template, postgres_server_url) as url:
        yield url


@asynccontextmanager
async def _database_like(template: str, server_url: str) -> AsyncIterator[str]:
    server, name = make_url(server_url), f"baton_test_{uuid.uuid4().hex}"
    admin = await asyncpg.connect(server.render_as_string(hide_password=False))
    try:
        await admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        yield server.set(database=name).render_as_string(hide_password=False)
        await admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    finally:
        await admin.close()


@pytest.fixture(scope="session")
def migrated_template(postgres_server_url: str) -> Iterator[str]:
    """The name of a database with the schema in it, which nobody connects to: to copy it is a tenth of migrating."""
    if "BATON_TEST_DATABASE_URL" not in os.environ:
        yield prepared_databases.TEMPLATE
        return
    server, name = make_url(postgres_server_url), f"baton_test_{uuid.uuid4().hex}"
    asyncio.run(_execute(server, f'CREATE DATABASE "{name}" TEMPLATE template0'))
    migrate(server.set(database=name).render_as_string(hide_password=False))
    yield name
    asyncio.run(_execute(server, f'DROP DATABASE "{name}" WITH (FORCE)'))


@pytest.fixture(scope="session")
def migrated_database(postgres_server_url: str, migrated_template: str) -> Iterator[tuple[str, str]]:
    """A database with the schema in it, and the statements that empty it; use `migrated_postgres_url`."""
    server, name = make_url(postgres_server_url), f"baton_test_{uuid.uuid4().hex}"
    url = server.set(database=name).render_as_string(hide_password=False)
    asyncio.run(_execute(server, f'CREATE DATABASE "{name}" TEMPLATE "{migrated_template}"'))
    kept_tables = (FORMS.name, ADMIN_EVENTS.name, LOG_STATE.name)
    filled_by_tests = [table for table in METADATA.tables if table not in kept_tables]
    # A trigger refuses to delete from the log of changes, whose numbers begin anew with each test.
    kept = f"DO $$ BEGIN IF (SELECT is_called FROM {ADMIN_EVENTS.name}_seq_seq) THEN TRUNCATE {ADMIN_EVENTS.name} "
    kept += "RESTART IDENTITY; END IF; END $$; UPDATE forms SET since = 0;"  # to truncate takes as long as all the rest
    kept += "DELETE FROM log_queue; DELETE FROM log_state;"  # deleting rows has filled the queue again
    kept += "INSERT INTO log_state (id, size, xid, catch_up) VALUES (1, 0, 0, '');"
    yield url, "".join(f"DELETE FROM {table};" for table in filled_by_tests) + kept
    asyncio.run(_execute(server, f'DROP DATABASE "{name}" WITH (FORCE)'))


async def _execute(server: URL, *statements: str) -> None:
    connection = await asyncpg.connect(server.render_as_string(hide_password=False))
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture
def migrated_postgres_url(migrated_database: tuple[str, str], patient_store: None) -> Iterator[str]:
    """An async SQLAlchemy URL of a database with the schema in it and no rows; for tests that leave the schema alone.

    Making and dropping a database costs ten times what emptying one does. Connections that a test leaves open are cut.
    """
    url, empty_all_tables = migrated_database
    yield url
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    asyncio.run(_execute(make_url(url), f"{others} AND pid <> pg_backend_pid()", empty_all_tables))


@pytest.fixture
def redis_prefix() -> str:
    """A key prefix that is this test's alone."""
    return f"baton-test-{uuid.uuid4().hex}:"


@pytest.fixture
async def redis_url(redis_server_url: str, redis_prefix: str) -> AsyncIterator[str]:
    """The URL of an empty Redis. Our own server is flushed before and after, a given one loses `redis_prefix` only."""
    started_by_us = "BATON_TEST_REDIS_URL" not in os.environ
    async with Redis.from_url(
        redis_server_url, socket_timeout=PATIENCE_SECONDS, socket_connect_timeout=PATIENCE_SECONDS
    ) as client:
        if started_by_us:
            await client.flushall()
        yield redis_server_url
        if started_by_us:
            await client.flushall()
            return
        async for key in client.scan_iter(match=f"{redis_prefix}*", count=1000):
            await client.delete(key)


@pytest.fixture
def patient_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have queues of this process wait for their server, which is healthy: on a busy machine it may take longer than
    the second after which they go on without it."""
    for name in ("SOCKET_SECONDS", "GIVE_UP_SECONDS", "PROBE_SECONDS"):
        monkeypatch.setattr(redis_queue, name, PATIENCE_SECONDS)
    monkeypatch.setattr(live, "PROBE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(redis_queue, "_options", functools.partial(redis_queue._options, answers=PATIENCE_SECONDS))


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stores of this process wait for their database, which is healthy: on a busy machine a connection or a row
    that others lock may take longer than the two seconds after which they give a write up. Tests in which it is not
    healthy set bounds of their own."""
    for name in ("CONNECT_SECONDS", "LOCK_SECONDS"):
        monkeypatch.setattr(postgres, name, PATIENCE_SECONDS)
    monkeypatch.setattr(sqlite, "LOCK_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(sql, "Postgres", functools.partial(sql.Postgres, work_seconds=PATIENCE_SECONDS))
