"""The checks of `baton doctor`. Each has its own deadline and reports a failure instead of raising it."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from app.cli import storage, terminal
from app.cli.audit import exported_checkpoints
from app.cli.retention import periods
from app.cli.terminal import count, duration
from app.core.message.chat import End, Message, Sampling, Text
from app.core.pool.catalog import Catalog, Deadlines, ProviderSpec, Worker
from app.core.pool.conductor_versions import versions_in_force
from app.core.pool.serving import tier_in
from app.engine.conductors.versions import missing_subjects
from app.errors import (
    BatonError,
    ConfigInvalid,
    ContentKeyUnavailable,
    QueueUnavailable,
    ServiceUnavailable,
    StoreUnavailable,
    WorkerError,
    WorkerRateLimited,
    WorkerRefused,
    WorkerTruncated,
)
from app.gateway.http.api_keys import is_any_key_accepted
from app.network.log_authorities import check_timestamp_library
from app.network.tracing import SIGNALS, endpoint_variable
from app.process.config import Configuration, Settings, describe, log_witnesses
from app.process.config.settings import url_problem
from app.process.wiring import Runtime
from app.providers.protocol import Request
from app.store.archive_files import open_archive_files
from app.store.sqlkit import revisions

logger = logging.getLogger(__name__)

DEADLINES = Deadlines(connect=5.0, first=20.0, gap=10.0, total=25.0)
UNSEALED_SECONDS = 60.0
"""Time after which a change that waits to be sealed is reported."""
CHECK_SECONDS = 30.0
"""Seconds that one check may take."""
OPERATOR_MESSAGES: Mapping[str, str] = {
    "store_unavailable": "it cannot be reached, or does not take writes",
    "queue_unavailable": "it cannot be reached",
}
"""Messages for operators in place of those for callers."""
UNDECLARED_POOLING = "a PgBouncer pools transactions before it, and the URL does not say so: statements will fail"
POOLING_REMEDY = (
    "add `pgbouncer=transaction` to the parameters of BATON_DATABASE_URL, as in postgresql://.../baton?"
    "pgbouncer=transaction, and give the role its time limits (deploy/docs/postgres.md); or let PgBouncer pool "
    "sessions"
)
OUTPUT_TOKEN_TRIES = (1, 16)
"""Output tokens to ask for, in turn, because some providers refuse the first as too few."""


class Verdict(Struct, frozen=True):
    """The result of a check, in words, with its remedy."""

    name: str
    status: Literal["ok", "fail", "skip"]
    words: str
    remedy: str = ""


def check_settings(config: Configuration, environ: Mapping[str, str]) -> list[Verdict]:
    """Report the settings and the pool, which were read without faults before, and what would only fail in use."""
    catalog = config.catalog
    workers, providers = count(len(catalog.workers), "worker"), count(len(catalog.providers), "provider")
    size = f"{workers} at {providers}, tiers {', '.join(catalog.tiers)}"
    return [
        Verdict("settings", "ok", f"{len(config.settings.given)} set by the environment"),
        Verdict("pool", "ok", f"{config.origin}: {size}"),
        *_check_tracing(environ),
        _check_log_export(config.settings),
        *_check_archive(config.settings),
        *_check_retention(config.settings, catalog),
        *_check_rehearsal(catalog),
        *_check_prices(catalog),
        *(Verdict("note", "ok", note) for note in config.notes),
    ]


def _check_log_export(settings: Settings) -> Verdict:
    if not settings.log_export:
        words = "no checkpoint is held outside of the database, so a log that was made anew would pass"
        return Verdict("log export", "skip", words, "set BATON_LOG_EXPORT to a folder elsewhere, or a bucket")
    try:
        if settings.log_timestamp_url:
            check_timestamp_library()
        _check_place(settings.log_export, settings)
    except ConfigInvalid as error:
        return Verdict("log export", "fail", error.faults[0], "correct BATON_LOG_EXPORT, or install what is missing")
    confirmations = [witness.name for witness in log_witnesses(settings)]
    if settings.log_timestamp_url:
        confirmations.append("a time-stamp authority")
    words = f"checkpoints are written to {settings.log_export}"
    if confirmations:
        words += f", confirmed by {', '.join(confirmations)}"
    return Verdict("log export", "ok", words)


def _check_retention(settings: Settings, catalog: Catalog) -> Iterator[Verdict]:
    yield Verdict("retention", "ok", periods.retention_text(settings))
    tiers = {run_class.of.tier for run_class in settings.classes_of_retention}
    for tier in sorted(tiers - {None, *catalog.tiers}, key=str):
        words = f"BATON_RETENTION_CLASSES names the tier {tier}, which the pool file does not have"
        yield Verdict("note", "ok", f"{words}: that class is about past runs alone, if the name is right")


def _check_archive(settings: Settings) -> Iterator[Verdict]:
    if settings.archive:
        try:
            _check_place(settings.archive, settings)
            yield Verdict("archive", "ok", f"runs are written to {settings.archive} before they are deleted")
        except ConfigInvalid as error:
            yield Verdict("archive", "fail", error.faults[0], "correct BATON_ARCHIVE, or install what is missing")


def _check_place(address: str, settings: Settings) -> None:
    """Raise `ConfigInvalid` if files cannot be written to a place, as far as this is seen without writing one."""
    open_archive_files(address, settings.archive_endpoint)
    if "://" not in address:
        _check_folder(Path(address))


def _check_folder(path: Path) -> None:
    """Raise `ConfigInvalid` if a folder, which is made when it is first used, cannot be made or written to."""
    folder = os.path.abspath(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ConfigInvalid([f"{folder} is no folder"])
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigInvalid([f"{folder} cannot be written to by this user"])


def _check_tracing(environ: Mapping[str, str]) -> Iterator[Verdict]:
    for variable in sorted({endpoint_variable(signal, environ) for signal in SIGNALS} - {""}):
        problem = url_problem(environ[variable].partition("?")[0])
        if problem:
            fault, _, remedy = problem.partition("; ")
            yield Verdict("tracing", "fail", f"{variable} {fault}", remedy)


def _check_rehearsal(catalog: Catalog) -> Iterator[Verdict]:
    if catalog.rehearsal:
        words = "REHEARSAL: all workers are simulated; no language model is behind any answer"
        remedy = "for real answers set a provider key such as OPENAI_API_KEY or ANTHROPIC_API_KEY, or BATON_POOL"
        yield Verdict("rehearsal", "ok", words, remedy)


def _check_prices(catalog: Catalog) -> Iterator[Verdict]:
    names = [worker.name for worker in catalog.workers.values() if not worker.priced]
    if names:
        words = f"no price is known of {', '.join(names)}: not called for a request, key or tenant that has a budget"
        remedy = "write `price` in the pool file; price = { input = 0, output = 0 } says that a worker is free"
        yield Verdict("prices", "skip", words, remedy)


def missing_database(config: Configuration) -> Verdict:
    """Report that the configured database is an SQLite file that nobody has made yet."""
    where = _setting_text(config, "BATON_DATABASE_URL")
    file = revisions.sqlite_file(config.settings.database_url)
    try:
        if file.exists():
            raise ConfigInvalid([f"{file} is no file"])
        _check_folder(file.parent)
    except ConfigInvalid as error:
        remedy = "correct BATON_DATABASE_URL or BATON_DATA_DIR"
        return Verdict("database", "fail", f"{where}: {error.faults[0]}", remedy)
    return Verdict("database", "skip", f"{where} does not exist yet; `baton serve` or `baton migrate` makes it")


async def check_schema(config: Configuration) -> list[Verdict]:
    """Check that the database has this version's tables. SQLite is left out, which gets them when it is opened.

    Behind a PgBouncer of which the URL does not tell, nothing else is checked here: statements would fail by chance.
    """
    settings = config.settings
    if settings.database_url.startswith("sqlite"):
        return []
    where = _setting_text(config, "BATON_DATABASE_URL")
    remedy = "check BATON_DATABASE_URL, and that the server runs and accepts this user"

    async def check() -> Verdict:
        cause = await asyncio.to_thread(revisions.cause, settings.database_url)
        if cause is None:
            return Verdict("schema", "ok", "this version's")
        if "baton migrate" in cause:
            return Verdict("schema", "fail", f"{where}: {cause}", "run `baton migrate`")
        if "newer than this program" in cause:
            newer_remedy = "use the release that has migrated the database; during an update this is right"
            return Verdict("schema", "fail", f"{where}: {cause}", newer_remedy)
        return Verdict("schema", "fail", f"{where}: {cause}", remedy)

    async def check_security() -> Verdict:
        security = await asyncio.to_thread(revisions.row_security, settings.database_url)
        if security.reader:
            return Verdict("row security", "ok", f"reads for callers are made by the role {security.reader}")
        words = "not in force: reads for callers rely on the gateways' checks alone"
        return Verdict("row security", "skip", words, security.reason)

    if await _has_undeclared_pooling(settings.database_url):
        return [Verdict("schema", "fail", f"{where}: {UNDECLARED_POOLING}", POOLING_REMEDY)]
    schema = await _with_deadline("schema", check, remedy)
    if schema.status == "ok":
        return [schema, await _with_deadline("row security", check_security, remedy)]
    return [schema]


async def _has_undeclared_pooling(url: str) -> bool:
    """Return True if a PgBouncer pools transactions and the URL does not say so; False if that cannot be found out."""
    try:
        return await asyncio.to_thread(revisions.has_undeclared_pooling, url)
    except StoreUnavailable as error:  # the next check says so
        logger.debug("Whether a PgBouncer pools transactions was not found out: %s", error.message)
        return False


async def check_parts(config: Configuration, runtime: Runtime, *, every: bool, has_database: bool) -> list[Verdict]:
    """Check database, queue, conductors and providers at the same time, and report them in this order.

    `every` asks all workers instead of the cheapest of each provider. Unless `has_database`, the database is missing or
    cannot be used, as was reported before, and is not checked.
    """
    catalog = config.catalog
    conductors = _tiers_by_conductor(catalog)
    pending = [_check_queue(config, runtime)]
    if has_database:
        pending.insert(0, _check_database(config, runtime))
        pending += [_check_keys(runtime), _check_contents(config.settings, runtime)]
        pending += [_check_log(runtime), _check_tiers(runtime)]
        if config.settings.log_export:
            pending.append(_check_exported_checkpoints(config, runtime))
    for name, tiers in conductors.items():
        pending.append(_check_generation(f"conductor of {tiers}", catalog.workers[name], runtime))
    if every:
        others = [worker for worker in catalog.workers.values() if worker.name not in conductors]
        pending += [_check_generation(f"worker {worker.name}", worker, runtime) for worker in others]
    else:
        pending += [_check_provider(spec, catalog, conductors, runtime) for spec in catalog.providers.values()]
    verdicts: list[Verdict] = list(await asyncio.gather(*pending))
    if not conductors:
        verdicts.append(Verdict("conductor", "skip", "no tier is conducted by a model"))
    return verdicts


async def _check_database(config: Configuration, runtime: Runtime) -> Verdict:
    async def check() -> Verdict:
        await runtime.context.store.ready()
        return Verdict("database", "ok", f"{_setting_text(config, 'BATON_DATABASE_URL')} takes writes")

    return await _with_deadline(
        "database",
        check,
        "check BATON_DATABASE_URL and `baton migrate`, that its user may write to every table, and that the disk is "
        "neither full nor read-only",
    )


async def _check_keys(runtime: Runtime) -> Verdict:
    async def check() -> Verdict:
        gateway = runtime.gateway
        has_accepted_key = await is_any_key_accepted(gateway.store, gateway.peppers(), gateway.now())
        if has_accepted_key is None:
            return Verdict("keys", "skip", "none is in force", "make one by `baton keys add NAME`")
        if has_accepted_key:
            return Verdict("keys", "ok", "hashed under the pepper that this command has")
        remedy = "restore the pepper from the back-up, or give each key a new secret by `baton keys rotate`"
        return Verdict("keys", "fail", "all are void: hashed under a pepper that this command does not have", remedy)

    return await _with_deadline("keys", check, "check BATON_DATABASE_URL and `baton migrate`")


async def _check_contents(settings: Settings, runtime: Runtime) -> Verdict:
    """Check that whatever is encrypted can be read with the master keys that this command has."""

    async def check() -> Verdict:
        try:
            key_count = await runtime.context.store.load_content_keys()
        except ContentKeyUnavailable as error:
            remedy = "restore the master key from its back-up, for every process (deploy/docs/secrets.md)"
            return Verdict("contents", "fail", error.message, remedy)
        if settings.content_keys is None:
            return Verdict("contents", "ok", "stored as they are; BATON_CONTENT_KEYS would have them encrypted")
        words = f"encrypted, and {count(key_count, 'content key')} can be used"
        return Verdict("contents", "ok", words)

    return await _with_deadline("contents", check, "check BATON_DATABASE_URL and `baton migrate`")


async def _check_log(runtime: Runtime) -> Verdict:
    async def check() -> Verdict:
        state = await runtime.context.store.log.state()
        if state.lag > UNSEALED_SECONDS:
            words = f"{count(state.waiting, 'change')} not sealed for {duration(state.lag)}"
            return Verdict("log", "skip", words, "engines seal what was committed; start one")
        if not state.size:
            return Verdict("log", "skip", "nothing was sealed yet; an engine does so")
        words = f"sealed up to entry {state.size - 1}"
        if state.stored_key:
            remedy = (
                "whoever may write to the database may sign as well; set BATON_LOG_KEY (`baton audit log --new-key`)"
            )
            return Verdict("log", "ok", f"{words}; the key that signs is stored in the database", remedy)
        return Verdict("log", "ok", f"{words}; signed by {', '.join(state.verifiers)}")

    return await _with_deadline("log", check, "check BATON_DATABASE_URL and `baton migrate`")


async def _check_tiers(runtime: Runtime) -> Verdict:
    """Check that what operators have put in the place of tiers stands in the pool file."""

    async def check() -> Verdict:
        in_force = versions_in_force(await runtime.context.store.changes())
        missing = missing_subjects(runtime.pool.catalog(), in_force)
        if missing:
            remedy = "put it back into the pool file, or let the tier's own definition serve: `baton tier rollback`"
            return Verdict("tiers", "fail", "; ".join(missing), remedy)
        services = []
        for name, versions in in_force.items():
            tier = tier_in(name)
            if tier and versions.live:
                services.append(f"{tier} by the {versions.live}")
        return Verdict("tiers", "ok", f"served in place of their own: {', '.join(services) or 'none'}")

    return await _with_deadline("tiers", check, "check BATON_DATABASE_URL and `baton migrate`")


async def _check_exported_checkpoints(config: Configuration, runtime: Runtime) -> Verdict:
    async def check() -> Verdict:
        size = (await runtime.context.store.log.state()).size
        checkpoints = await exported_checkpoints.read_exported(config.settings, size)
        remedy = "check BATON_LOG_EXPORT and its credentials"
        if checkpoints is None:
            return Verdict("log held outside", "fail", "", remedy)
        if checkpoints.problem:
            return Verdict("log held outside", "fail", checkpoints.problem, remedy)
        if checkpoints.size is None:
            return Verdict("log held outside", "skip", "no checkpoint is there yet; an engine writes one a minute")
        words = (
            f"the newest checkpoint counts {checkpoints.size} of {size} entries, written at {checkpoints.written_at}"
        )
        behind = [name for name, checkpoint in checkpoints.witnesses.items() if checkpoint.size != checkpoints.size]
        if config.settings.log_timestamp_url and checkpoints.stamped_size != checkpoints.size:
            behind.append("the time-stamp authority")
        if behind:
            words += f"; not confirmed by {', '.join(behind)}"
            remedy = "see `baton audit log` for the last ones that are, and the log of the engines for the reason"
            return Verdict("log held outside", "skip", words, remedy)
        return Verdict("log held outside", "ok", words)

    return await _with_deadline("log held outside", check, "check BATON_LOG_EXPORT and its credentials")


async def _check_queue(config: Configuration, runtime: Runtime) -> Verdict:
    if config.settings.redis_url is None:
        return Verdict(
            "redis", "skip", "not configured: the queue is inside the process, which is enough for `baton serve`"
        )

    async def check() -> Verdict:
        await runtime.context.queue.ready()  # an error with its own code: reached, but not usable as it is configured
        return Verdict("redis", "ok", f"{_setting_text(config, 'BATON_REDIS_URL')} answers")

    return await _with_deadline("redis", check, "check BATON_REDIS_URL, and that the server runs")


def _setting_text(config: Configuration, variable: str) -> str:
    return next(row.value for row in describe(config.settings) if row.name == variable)


def _tiers_by_conductor(catalog: Catalog) -> Mapping[str, str]:
    """Return the workers that conduct, with the tiers that they conduct."""
    names: dict[str, list[str]] = {}
    for tier in catalog.tiers.values():
        if tier.conductor.worker is not None:
            names.setdefault(tier.conductor.worker, []).append(tier.name)
    return {name: ", ".join(tiers) for name, tiers in names.items()}


async def _check_provider(spec: ProviderSpec, catalog: Catalog, conductors: Iterable[str], runtime: Runtime) -> Verdict:
    name = f"provider {spec.name}"
    workers = [worker for worker in catalog.workers.values() if worker.provider == spec.name]
    if not workers:
        return Verdict(name, "skip", "no worker of the pool uses it")
    if all(worker.name in conductors for worker in workers):
        return Verdict(name, "skip", "checked as a conductor")
    cheapest = min(workers, key=lambda worker: (3 * worker.price.input + worker.price.output, worker.name))
    return await _check_generation(name, cheapest, runtime)


async def _check_generation(name: str, worker: Worker, runtime: Runtime) -> Verdict:
    """Ask a worker for one token."""
    spec = runtime.pool.catalog().providers[worker.provider]

    async def check() -> Verdict:
        began = runtime.context.monotonic()
        is_limited = await _is_rate_limited(worker, runtime)
        if is_limited:
            return Verdict(name, "ok", "accepts the key, but limits requests at the moment")
        words = f"{worker.name} answers"
        if spec.format == "rehearsal":
            words += " (simulated)"
        return Verdict(name, "ok", f"{words}, {duration(runtime.context.monotonic() - began)}")

    addresses = [endpoint.base_url for endpoint in spec.endpoints] or [spec.base_url]
    remedy = f"check that {', '.join(addresses)} can be reached from here"
    return await _with_deadline(name, check, remedy, spec, worker)


async def _is_rate_limited(worker: Worker, runtime: Runtime) -> bool:
    """Return True if the provider limits requests. Raises the reason if it gives no answer."""
    for tokens in OUTPUT_TOKEN_TRIES:
        try:
            await _generate(worker, runtime, tokens)
            return False
        except WorkerRateLimited:
            return True
        except WorkerRefused:
            if tokens == OUTPUT_TOKEN_TRIES[-1]:
                raise
    return False


async def _generate(worker: Worker, runtime: Runtime, tokens: int) -> None:
    request = Request(worker, (Message("user", (Text("Say ok."),)),), Sampling(max_tokens=tokens))
    adapter = runtime.context.provider(worker.provider)
    has_ended = False
    async for pieces in adapter.stream(request, adapter.render(request), DEADLINES):
        has_ended = has_ended or any(isinstance(piece, End) for piece in pieces)
    if not has_ended:
        raise WorkerTruncated()


async def _with_deadline(
    name: str,
    check: Callable[[], Awaitable[Verdict]],
    remedy: str,
    spec: ProviderSpec | None = None,
    worker: Worker | None = None,
) -> Verdict:
    """Return the check's verdict, or its failure in words, within its time."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await check()
    except TimeoutError:
        return Verdict(name, "fail", f"no answer within {CHECK_SECONDS:.0f} s", remedy)
    except ServiceUnavailable as error:
        words = OPERATOR_MESSAGES.get(error.public_code or "", error.message)
        if isinstance(error, QueueUnavailable) and error.__cause__ is not None:
            words += f" ({terminal.clean(str(error.__cause__) or type(error.__cause__).__name__)})"
        if isinstance(error, StoreUnavailable):
            words += storage.quoted_refusal(error)
        return Verdict(name, "fail", words, remedy)
    except BatonError as error:
        return Verdict(name, "fail", _failure(error) + _cause(error), _remedy(error, remedy, spec, worker))


def _failure(error: BatonError) -> str:
    """Return the message of an error. What a worker's error advises callers is left out, because a verdict has a remedy
    for operators."""
    if not isinstance(error, WorkerError):
        return error.message
    text, _, advice = error.message.partition("; ")
    _, bracket, detail = advice.partition(" (")
    return f"{text.rstrip('.')}{bracket}{detail.rstrip('.')}."


def _cause(error: BatonError) -> str:
    """Return the cause of a failed call as the provider named it; empty if it did not."""
    if not isinstance(error, WorkerError):
        return ""
    failure = error.failure
    parts: list[str] = []
    if failure.reason:
        parts.append(failure.reason)
    if failure.code:
        parts.append(failure.code)
    if failure.request_id:
        parts.append(f"request {failure.request_id}")
    if failure.excerpt:
        parts.append(f'"{terminal.clean(failure.excerpt)}"')
    return f" Cause: {', '.join(parts)}."


def _remedy(error: BatonError, usual: str, spec: ProviderSpec | None, worker: Worker | None) -> str:
    """Return the remedy. A provider that is reached and refuses has a wrong key or model."""
    if spec is None or worker is None:
        return usual
    if not isinstance(error, WorkerError):
        return usual
    key = "that it wants no key"
    if spec.key_variable:
        key = f"the key in {spec.key_variable}"
    remedies = {
        "authentication": f"check {key}, and that its account may use the model {worker.model} from this region",
        "quota": "the account behind this key has no credit or quota left; add some at the provider",
        "unknown_model": f"check the model name {worker.model}, {key}, and base_url ({spec.base_url})",
        "endpoint": f"check base_url ({spec.base_url}): the server there does not take this kind of request",
        "refused": "the endpoint is there but refuses a plain question; check the model name "
        f"{worker.model} and its limits",
    }
    return remedies.get(error.failure.reason, usual)
