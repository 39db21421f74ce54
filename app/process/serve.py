"""Running one process of the service: which roles it has, how it starts, and in which order it stops.

    start   parts opened -> engine and followers -> first key -> listening -> announced
    stop    SIGTERM: not ready, replies say `Connection: close`, new requests are still served for BATON_DRAIN_SECONDS
            (a second signal, or SIGINT, ends that at once)
            -> no new connections, requests finish within `DRAIN_SECONDS`
            -> dispatcher drains (outcomes written, tickets handed back) -> runs are handed back -> parts closed

SIGHUP reads the pool file and the files of secrets again; a faulty one changes nothing and is reported.
"""

import asyncio
import logging
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pkgutil import resolve_name

import uvicorn
from fastapi import FastAPI
from msgspec import Struct
from msgspec.structs import replace
from starlette.types import ASGIApp

from app.console.app import Console
from app.engine.conductors.watch import PromotionWatch
from app.engine.log_export import Authorities, CheckpointExport
from app.engine.periodic import wait_for_event
from app.engine.retention import ContentRetention, RunRetention, archiving
from app.engine.runs.shadows import Shadows
from app.engine.sealer import Sealer
from app.errors import ConfigInvalid, ServiceUnavailable
from app.gateway.app import create_app, create_probes, place_of
from app.gateway.http.api_keys import adopt, is_any_key_accepted, mint
from app.gateway.http.connection import connection
from app.network import retries
from app.network.log_authorities import check_timestamp_library
from app.process import gc_policy
from app.process.config import Configuration, Settings, log_signers, log_witnesses, reload
from app.process.wiring import DRAIN_SECONDS, Runtime, check_roles, open_runtime
from app.store.archive import open_archive
from app.store.archive_files import open_archive_files

ADMIN = "app.process.administration:admin_app"
"""Imported by name where the admin API has a port."""
FIRST_KEY = "first"
FIRST_SCOPES = ("runs:write", "runs:read", "audit:read", "admin")
SOCKETS_PER_ADDRESS = 8
"""Connections that are accepted in one turn of the event loop, at most."""
BACKLOG_TURNS = 1_000
"""Turns of the event loop in which a process that stops still accepts connections, while some wait for that."""
CALIBRATION_INTERVAL_SECONDS = 60.0
"""Between two looks for new trials."""


class Roles(Struct, frozen=True):
    """The roles of this process. One that has both is the whole service, for which embedded parts are enough."""

    gateway: bool
    dispatcher: bool

    @property
    def is_whole_service(self) -> bool:
        """Return True if this one process is the whole service."""
        return self.gateway and self.dispatcher


class Announcement(Struct, frozen=True):
    """The announcement: where it listens (None: nowhere), where its pool came from, a key that was just made, and where
    the admin API listens."""

    url: str | None
    origin: str
    rehearsal: bool
    key: str | None
    admin: str | None = None


async def serve(
    configuration: Configuration, environ: Mapping[str, str], roles: Roles, announce: Callable[[Announcement], None]
) -> None:
    """Run the process until it gets a SIGTERM or SIGINT."""
    check_roles(configuration, is_whole_service=roles.is_whole_service)
    stopping = asyncio.Event()
    stop_steps, stop_runs = asyncio.Event(), asyncio.Event()
    gc_policy.collect_and_freeze()
    async with open_runtime(configuration) as runtime, asyncio.TaskGroup() as group:

        def reload_now() -> None:
            if _reload(runtime, environ):
                _start_comparing_pepper(group, runtime, roles, stopping)

        _on_signals(runtime, reload_now, stopping)
        group.create_task(_drain(runtime, roles, stopping))
        await runtime.clock.read_at_start()
        group.create_task(runtime.clock.keep_reading(stopping))
        await runtime.versions.look()
        group.create_task(runtime.versions.run(stopping))
        run_tasks: list[asyncio.Task[None]] = []
        step_tasks: list[asyncio.Task[None]] = []
        if roles.dispatcher:
            run_tasks.append(group.create_task(runtime.drivers.run(stop_runs)))
            step_tasks.append(group.create_task(runtime.dispatcher.run(stop_steps)))
        else:
            runtime.runs.engine = None  # engines elsewhere take what this gateway admits
        if roles.gateway:
            run_tasks.append(group.create_task(runtime.runs.run(stop_runs)))
        run_tasks.append(group.create_task(runtime.webhooks.run(stop_runs)))
        _start_background_tasks(group, runtime, roles, stopping)
        if roles.dispatcher:
            _start_engine_tasks(group, runtime, configuration.settings, stopping)
            group.create_task(Sealer(runtime.context, log_signers(configuration.settings)).run(stop_runs))
        try:
            if roles.gateway or configuration.settings.metrics_port is not None:
                await _listen(runtime, environ, roles, stopping, announce)
            else:
                announce(
                    Announcement(
                        url=None, origin=configuration.origin, rehearsal=configuration.catalog.rehearsal, key=None
                    )
                )
                await stopping.wait()
        finally:
            stop_steps.set()
            if step_tasks:
                await asyncio.wait(step_tasks)
            stop_runs.set()
            await asyncio.wait(run_tasks)


def _start_background_tasks(group: asyncio.TaskGroup, runtime: Runtime, roles: Roles, stopping: asyncio.Event) -> None:
    """Start what every process does beside its roles, until `stopping` is set."""
    group.create_task(runtime.ratings.run(stopping))
    group.create_task(runtime.conductor_probe.run(stopping))
    group.create_task(_apply_calibration_results(runtime, stopping))
    group.create_task(_when_database_answers(partial(_compare_schema, runtime), stopping))
    _start_comparing_pepper(group, runtime, roles, stopping)

    def is_busy() -> bool:
        return len(runtime.runs) > 0 or len(runtime.dispatcher) > 0

    group.create_task(gc_policy.collect_when_idle(is_busy, stopping))


def _start_engine_tasks(
    group: asyncio.TaskGroup, runtime: Runtime, settings: Settings, stopping: asyncio.Event
) -> None:
    """Start what an engine does beside runs and steps, until `stopping` is set."""
    group.create_task(_when_database_answers(partial(_note_retention, runtime, settings), stopping))
    group.create_task(_content_retention(runtime, settings).run(stopping))
    group.create_task(_run_retention(runtime, settings).run(stopping))
    group.create_task(Shadows(runtime.context, runtime.drivers).run(stopping))
    group.create_task(PromotionWatch(runtime.context).run(stopping))
    group.create_task(_log_export(runtime, settings).run(stopping))


def _content_retention(runtime: Runtime, settings: Settings) -> ContentRetention:
    """Return the task that erases old content."""
    seconds, classes = settings.retention_content_seconds, settings.classes_of_retention
    return ContentRetention(runtime.context, seconds=seconds, classes=classes)


def _log_export(runtime: Runtime, settings: Settings) -> CheckpointExport:
    """Return the task that exports checkpoints. Raises `ConfigInvalid` if a library is needed and not installed."""
    authorities = Authorities(log_witnesses(settings), settings.log_timestamp_url)
    if authorities.timestamps:
        check_timestamp_library()
    if not settings.log_export:
        return CheckpointExport(runtime.context, None)
    files = open_archive_files(settings.log_export, settings.archive_endpoint)
    return CheckpointExport(runtime.context, files, authorities)


def _run_retention(runtime: Runtime, settings: Settings) -> RunRetention:
    """Return the task that prunes old runs. Raises `ConfigInvalid` if the archive's library is not installed."""
    return RunRetention(
        runtime.context,
        partial(open_archive, settings.database_url),
        archiving(settings.archive, settings.archive_endpoint, contents=settings.archive_content),
        seconds=settings.retention_events_seconds,
        claim_seconds=settings.idempotency_hours * 3600,
        classes=settings.classes_of_retention,
    )


async def _when_database_answers(compare: Callable[[], Awaitable[None]], stopping: asyncio.Event) -> None:
    """Compare something with the database once, as soon as it answers."""
    while not stopping.is_set():
        with suppress(ServiceUnavailable):
            await compare()
            return
        await wait_for_event(stopping, retries.STARTUP_PAUSE)


async def _compare_schema(runtime: Runtime) -> None:
    """Log if the database has another schema than this program expects."""
    database_revision, program_revision = await runtime.context.store.schema()
    log = runtime.context.telemetry.log
    fields = {"error": f"revision {database_revision}, this program {program_revision}"}
    if database_revision is None or database_revision < program_revision:
        log(logging.ERROR, "The database lacks tables of this release: run `baton migrate`.", **fields)
    elif database_revision > program_revision:
        log(
            logging.WARNING,
            "The database is newer than this program. Neighbouring releases work together; replace this "
            "process by the release that has migrated the database.",
            **fields,
        )


def _start_comparing_pepper(group: asyncio.TaskGroup, runtime: Runtime, roles: Roles, stopping: asyncio.Event) -> None:
    """Have a gateway compare its pepper with the API keys once the database answers."""
    if roles.gateway and not stopping.is_set():
        group.create_task(_when_database_answers(partial(_compare_pepper, runtime), stopping))


async def _compare_pepper(runtime: Runtime) -> None:
    """Log if this process has another pepper than the one under which the API keys are hashed."""
    gateway = runtime.gateway
    if await is_any_key_accepted(gateway.store, gateway.peppers(), gateway.now()) is False:
        runtime.context.telemetry.log(
            logging.ERROR,
            "No API key is accepted, because all of them are hashed under another pepper than that of this process: "
            "restore the pepper from the back-up, or give each key a new secret by `baton keys rotate`.",
        )


async def _note_retention(runtime: Runtime, settings: Settings) -> None:
    """Log for how long this engine keeps texts and runs, if the log says something else."""
    days = {"content": settings.retention_content, "events": settings.retention_events}
    periods = {name: "never" if value is None else f"{value:g}" for name, value in days.items()}
    await runtime.context.store.note_retention({**periods, "classes": settings.retention_classes})


async def _apply_calibration_results(runtime: Runtime, stopping: asyncio.Event) -> None:
    """Put new results of `baton calibrate` on the workers' cards; while the database is away the cards stay."""
    while not stopping.is_set():
        with suppress(ServiceUnavailable):
            runtime.pool.apply_trials(await runtime.context.store.trials())
        await wait_for_event(stopping, CALIBRATION_INTERVAL_SECONDS)


async def _listen(
    runtime: Runtime,
    environ: Mapping[str, str],
    roles: Roles,
    stopping: asyncio.Event,
    announce: Callable[[Announcement], None],
) -> None:
    """Serve the API, where this process is a gateway, and probes and metrics where they have a listener of their own;
    until `stopping` is set."""
    settings = runtime.pool.configuration.settings
    servers = []
    if roles.gateway:
        app = create_app(runtime.gateway, has_metrics=settings.metrics_port is None)
        console = Console(app, runtime.gateway.peppers, runtime.gateway.now, partial(_log_console_bug, runtime))
        servers.append(_server(runtime, console, settings.host, settings.port))
    if settings.metrics_port is not None:
        host = settings.metrics_host or settings.host
        servers.append(_server(runtime, create_probes(runtime.gateway), host, settings.metrics_port))
    admin = None
    if roles.gateway and settings.admin_port is not None:
        make_admin_app: Callable[..., FastAPI] = resolve_name(ADMIN)
        app = make_admin_app(runtime, environ, has_engine=roles.dispatcher)
        has_people = settings.oidc_issuer is not None
        console = Console(
            app,
            runtime.gateway.peppers,
            runtime.gateway.now,
            partial(_log_console_bug, runtime),
            is_admin=True,
            has_people=has_people,
        )
        admin = _server(runtime, console, settings.admin_host, settings.admin_port)
        servers.append(admin)
    first, *more = servers
    # Bound here, because an address in use ends the process, and cannot do so out of a task.
    sockets = [server.config.bind_socket() for server in more]
    async with asyncio.TaskGroup() as group:
        key = group.create_task(_first_key(runtime, roles))
        await asyncio.wait([key], timeout=retries.STARTUP_PAUSE)  # it may come with the first request
        closer = group.create_task(_close_connections(first, runtime.gateway.stop_requested))
        stopper = group.create_task(_stop_server(first, stopping))
        announcer = group.create_task(_announce(servers, roles, key, runtime.pool.configuration, announce, admin))
        for server, bound in zip(more, sockets, strict=True):
            group.create_task(server.serve([bound]))
        await first.serve()
        for server in more:  # metrics and the admin API are served until the last request is over
            server.should_exit = True
        for task in (key, closer, stopper, announcer):
            task.cancel()


def _log_console_bug(runtime: Runtime, error: Exception, path: str) -> None:
    """Log a bug of the console by its type and place, never by its values."""
    runtime.context.telemetry.log(
        logging.ERROR, "A page of the console failed because of a bug.", route=path, error=place_of(error)
    )


def _server(runtime: Runtime, app: ASGIApp, host: str, port: int) -> "Server":
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        interface="asgi3",  # uvicorn would guess it only from an `async def __call__`, which the console has not
        http=connection(runtime.gateway),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # nothing depends on where a request seems to come from
        timeout_keep_alive=runtime.pool.configuration.settings.keep_alive_seconds,
        timeout_graceful_shutdown=int(DRAIN_SECONDS),
    )
    return Server(config)


async def _announce(
    servers: Sequence["Server"],
    roles: Roles,
    key: asyncio.Task[str | None],
    configuration: Configuration,
    announce: Callable[[Announcement], None],
    admin: "Server | None",
) -> None:
    """Announce the process once it listens. A first key that could not be made by then, because the database was away,
    is announced when it has been: nobody could read it later."""
    for server in servers:
        await server.listening.wait()
    new_key = key.result() if key.done() else None
    url = servers[0].url if roles.gateway else None
    admin_url = admin.url if admin is not None else None
    announcement = Announcement(url, configuration.origin, configuration.catalog.rehearsal, new_key, admin_url)
    announce(announcement)
    if new_key is None:
        late_key = await key
        if late_key is not None:
            announce(replace(announcement, key=late_key))


def listener_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a listener of its own."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    elif ":" in host:  # an address of IPv6
        host = f"[{host}]"
    return f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, with signals left to `serve` and an event that is set when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.url = ""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to `serve`, which stops everything in order."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind, unless bound sockets are given; then set the address and `listening`."""
        await super().startup(sockets)
        if self.started:
            await self._open_further_sockets()
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.url = listener_url(host, port)
            self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept first who has connected already: with its listening socket the kernel resets whoever waits there."""
        connections = select.poll()
        for listening in self._listening_sockets():
            connections.register(listening.fileno(), select.POLLIN)
        for _ in range(BACKLOG_TURNS):
            if not connections.poll(0):
                break
            await asyncio.sleep(0)
        await super().shutdown(sockets)

    def close_connections_after_replies(self) -> None:
        """Have every reply from now on say that its connection is closed behind it. uvicorn makes its default headers
        anew each second, from these."""
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers.append((b"connection", b"close"))

    def _listening_sockets(self) -> Sequence[socket.socket]:
        return list(chain.from_iterable(server.sockets for server in self.servers))

    async def _open_further_sockets(self) -> None:
        """Listen on the same socket several times: libuv accepts one connection a turn of the loop on each, so that
        callers who come faster than turns are made would wait in the kernel, where nobody refuses them."""
        protocol_class: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        protocol = partial(
            protocol_class, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        loop = asyncio.get_running_loop()
        for listening in self._listening_sockets():
            for _ in range(SOCKETS_PER_ADDRESS - 1):
                duplicate = socket.socket(fileno=os.dup(listening.fileno()))
                self.servers.append(await loop.create_server(protocol, sock=duplicate))


async def _drain(runtime: Runtime, roles: Roles, stopping: asyncio.Event) -> None:
    """Once the process is told to stop, let a gateway serve for the drain time; then set `stopping`."""
    await runtime.gateway.stop_requested.wait()
    drain = runtime.pool.configuration.settings.drain_seconds if roles.gateway else 0.0
    await wait_for_event(stopping, drain)
    stopping.set()


async def _close_connections(server: Server, stop_requested: asyncio.Event) -> None:
    """From then on every reply says that its connection is closed behind it, so that clients and proxies make new ones,
    elsewhere."""
    await stop_requested.wait()
    server.close_connections_after_replies()


async def _stop_server(server: Server, stopping: asyncio.Event) -> None:
    await stopping.wait()
    server.should_exit = True


def _on_signals(runtime: Runtime, reload_now: Callable[[], None], stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    stop_requested = runtime.gateway.stop_requested

    def terminate() -> None:
        if stop_requested.is_set():
            stopping.set()
        stop_requested.set()

    def interrupt() -> None:
        stop_requested.set()
        stopping.set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGHUP, reload_now)


def _reload(runtime: Runtime, environ: Mapping[str, str]) -> bool:
    """Read the pool file and the files of secrets again. Returns False if they have faults and nothing has changed."""
    configuration, faults = reload(runtime.pool.configuration, environ)
    log = runtime.context.telemetry.log
    if not faults:
        try:
            runtime.install(configuration)
        except ConfigInvalid as error:
            faults = error.faults
    if faults:
        log(
            logging.ERROR,
            "The pool file or a secret's file is not valid; the last valid ones stay in force. Correct it and send "
            "SIGHUP.",
            faults=list(faults),
        )
        return False
    log(
        logging.INFO,
        "The pool file and the files of secrets were read again and are in force.",
        origin=configuration.origin,
    )
    return True


async def _first_key(runtime: Runtime, roles: Roles) -> str | None:
    """Adopt the key that the operator named, or, where this is the whole service and no key exists, make one.

    Tried again until the store answers: the service starts without its database and becomes ready when that does.
    """
    gateway, settings = runtime.gateway, runtime.pool.configuration.settings

    async def once() -> str | None:
        if settings.bootstrap_key is not None:
            text = settings.bootstrap_key.get_secret_value()
            row = adopt(text, gateway.pepper, tenant="default", name=FIRST_KEY, scopes=FIRST_SCOPES, now=gateway.now())
            await gateway.store.add_key(row)
            return None
        if not roles.is_whole_service or await gateway.store.keys():
            return None
        text, row = mint(gateway.pepper, tenant="default", name=FIRST_KEY, scopes=FIRST_SCOPES, now=gateway.now())
        await gateway.store.add_key(row)
        return text

    def log_failure(error: BaseException) -> None:
        code = error.public_code if isinstance(error, ServiceUnavailable) else ""
        runtime.context.telemetry.log(
            logging.WARNING, "The first API key waits for the database, which is unavailable.", error=code
        )

    key: str | None = await retries.startup(faults=(ServiceUnavailable,), log=log_failure)(once)
    return key
