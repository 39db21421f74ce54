"""The composition root: the only file that names implementations.

`open_runtime` opens the store, the queue and the providers that a configuration asks for, and closes them in the
opposite order. A process then runs one or both of two roles over the same parts: a gateway, which admits and follows
runs, and an engine, which drives them and executes their steps. Clock, randomness and names enter here and travel as
arguments.
"""

import asyncio
import hashlib
import itertools
import os
import platform
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace
from pydantic import SecretStr

from app.conductor.fixed import FixedConductor, RandomConductor
from app.conductor.model import ModelConductor
from app.conductor.protocol import Policy
from app.conductor.selector import Selector
from app.conductor.styles import STYLES
from app.core.pool.breaker import State
from app.core.pool.budgets import scope_of
from app.core.pool.catalog import Catalog, ConductorSpec, ProviderSpec, Tier
from app.core.rating.calibration import Trial, add_measurements
from app.core.run.notices import read_secrets
from app.engine.conductors.probe import ConductorProbe
from app.engine.conductors.ratings import RatingReader, SelectorBeliefs
from app.engine.conductors.versions import VersionReader
from app.engine.context import EngineContext, StandstillWatch
from app.engine.delivery.webhooks import Target, Webhooks
from app.engine.runs.client import RunClient
from app.engine.runs.registry import Drivers
from app.engine.steps.dispatcher import Dispatcher
from app.engine.worker_health import Health
from app.errors import ConfigInvalid, WorkerMisconfigured
from app.gateway.http.context import Bounds, GatewayContext, Rates
from app.network import tls
from app.network.tracing import SIGNALS, Tracing, endpoint_variable
from app.process.clock import Clock
from app.process.config import Configuration, Settings, content_keys, endpoint_secret, pepper_file, peppers, rate_limits
from app.process.config.secret_files import secret_text
from app.providers.endpoints import Endpoints
from app.providers.formats import adapter
from app.providers.protocol import ClosableProvider, Provider
from app.stepqueue.memory import MemoryQueue
from app.stepqueue.protocol import SealKeys, StepQueue
from app.store.sql import open_store
from app.store.writing.budget_ledger import Signal
from app.telemetry import Telemetry

if TYPE_CHECKING:
    from app.process.otlp import Export
    from app.stepqueue.redis import RedisQueue

DRAIN_SECONDS = 25.0
"""Time that running requests and steps get after a SIGTERM; orchestrators usually kill after 30 seconds."""
REDIS_QUEUE = "app.stepqueue.redis:RedisQueue"
OTLP_EXPORT = "app.process.otlp:export"
WORLD_PROVIDER = "app.lab.provider:WorldProvider"
"""Only some processes need these modules, so they are imported by name when a setting or the pool file asks for them:
Redis and tracing are each a twelfth of all imports, and the simulated workers of a world are no part of the service."""


class Peppers:
    """The peppers in force, and the keys that are derived from them: of live messages, and of shared texts."""

    def __init__(self, settings: Settings) -> None:
        self._accepted = peppers(settings)
        self.seals = SealKeys()
        self.install(settings)

    def install(self, settings: Settings) -> None:
        """Take the peppers of these settings into force. Raises `ConfigInvalid`, after which nothing has changed."""
        if settings.pepper is None and not pepper_file(settings).exists():
            raise ConfigInvalid([f"{pepper_file(settings)}: the pepper is gone; restore it from a backup"])
        self._accepted = peppers(settings)
        self.seals.keys = tuple(hashlib.blake2b(pepper, person=b"baton live").digest() for pepper in self._accepted)

    def sharing_key(self) -> bytes:
        """Return the key of the hashes by which texts are shared. With another pepper they are stored once more."""
        return hashlib.blake2b(self._accepted[0], person=b"baton texts").digest()

    def accepted_peppers(self) -> tuple[bytes, ...]:
        """Return the pepper under which API keys are hashed, then the earlier ones that are still accepted."""
        return self._accepted


class Pool:
    """The configuration in force, and what is made of it: peppers, adapters, conductors. Replaced by `install`."""

    def __init__(self, configuration: Configuration, health: Health, beliefs: SelectorBeliefs) -> None:
        """`health` follows the pool that is in force; its selectors choose by `beliefs`."""
        self._beliefs = beliefs
        self.health = health
        self._retired: list[ClosableProvider] = []
        self._adapters: dict[str, ClosableProvider] = {}
        self._parts: dict[str, AdapterParts] = {}
        """The settings, secrets and files that each adapter was set up with, by provider."""
        self._conductors: dict[tuple[str, ConductorSpec], Policy] = {}
        self._trials: tuple[Trial, ...] = ()
        self.peppers = Peppers(configuration.settings)
        self.configuration = configuration
        self.install(configuration)

    def install(self, configuration: Configuration) -> None:
        """Take another configuration into force. The adapter of a provider of which nothing has changed stays, with its
        connections and the breakers of its endpoints. Calls that run on other old adapters go on; those close with the
        pool. Raises `ConfigInvalid` for a provider that cannot be set up or a pepper that is gone, after which nothing
        has changed."""
        adapters: dict[str, ClosableProvider] = {}
        parts: dict[str, AdapterParts] = {}
        rekeyed = set()
        for name, spec in configuration.catalog.providers.items():
            before, after = self._parts.get(name), _parts_of(name, spec, configuration)
            adapters[name] = self._adapters[name] if before == after else _adapter(name, spec, configuration)
            parts[name] = after
            if before is not None and before.secrets != after.secrets:
                rekeyed.add(name)
        self.peppers.install(configuration.settings)
        self._retired += [old for name, old in self._adapters.items() if adapters.get(name) is not old]
        self._adapters, self._parts = adapters, parts
        self._conductors = {}
        self._set_catalog(configuration)
        self._watch_endpoints()
        self.health.forget_providers(rekeyed)

    def apply_trials(self, trials: tuple[Trial, ...]) -> None:
        """Put measured results on the workers' cards; adapters and conductors stay."""
        if trials != self._trials:
            self._trials = trials
            self._set_catalog(self.configuration)

    def _set_catalog(self, configuration: Configuration) -> None:
        self.configuration = replace(configuration, catalog=add_measurements(configuration.catalog, self._trials))
        self.health.use_catalog(self.configuration.catalog)

    def _watch_endpoints(self) -> None:
        """Have the health of this process know the endpoints of all providers that have several."""
        states: dict[tuple[str, str], Callable[[], State]] = {}
        for name, provider in self._adapters.items():
            if isinstance(provider, Endpoints):
                provider.on_ejection = partial(self.health.note_ejected_endpoint, name)
                states |= {(name, endpoint): state for endpoint, state in provider.states().items()}
        self.health.watch_endpoints(states)

    def catalog(self) -> Catalog:
        """Return the workers and tiers in force."""
        return self.configuration.catalog

    def provider(self, name: str) -> Provider:
        """Return the adapter of a provider, for one call where it has several endpoints; raises `WorkerMisconfigured`
        if the pool file no longer has it."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise WorkerMisconfigured()
        if isinstance(adapter, Endpoints):
            return adapter.choose()
        return adapter

    def conductor(self, tier: Tier) -> Policy:
        """Return the policy that plans for a tier, or for an arm of one. Of the many arms none is kept that costs
        nothing to make."""
        if tier.conductor.kind == "random":
            return RandomConductor()
        if tier.conductor.whole:
            return FixedConductor(tier.conductor)
        key = (tier.learns_as, tier.conductor)
        conductor = self._conductors.get(key)
        if conductor is None:
            conductor = self._conductors[key] = self._make_conductor(tier.learns_as, tier.conductor)
        return conductor

    def breakers(self) -> dict[str, str]:
        """Return the state of each worker's breaker, as this process has measured it."""
        return {name: self.health.state(worker) for name, worker in sorted(self.catalog().workers.items())}

    def are_conductors_healthy(self) -> bool | None:
        """Return True if every model that conducts is healthy, as far as is known; None if no tier has one."""
        names = {tier.conductor.worker for tier in self.catalog().tiers.values() if tier.conductor.kind == "model"}
        workers = [worker for worker in self.catalog().workers.values() if worker.name in names]
        if not workers:
            return None
        return not self.health.ejected_workers(workers)

    def _make_conductor(self, tier: str, spec: ConductorSpec) -> Policy:
        model = self._model_conductor(spec, spec.worker) if spec.worker is not None else None
        if spec.selector is not None:
            return Selector(tier, spec.selector, partial(self._beliefs.of, tier), model)
        return model or FixedConductor(spec)

    def _model_conductor(self, spec: ConductorSpec, worker: str) -> ModelConductor:
        catalog = self.configuration.catalog
        options = catalog.providers[catalog.workers[worker].provider].options
        return ModelConductor(
            worker,
            STYLES[spec.prompt],
            positional=options.get("positional") == "true",
            logprobs=options.get("logprobs") == "true",
            temperature=spec.temperature,
        )

    async def close(self) -> None:
        """Close every connection."""
        for provider in (*self._retired, *self._adapters.values()):
            await provider.close()


def _adapter(name: str, spec: ProviderSpec, configuration: Configuration) -> ClosableProvider:
    """Return the adapter of a provider; the workers of a world answer in front of the rehearsal workers."""
    keys: dict[str, str] = {}
    for endpoint in spec.endpoints:
        endpoint_key = configuration.secrets.get(endpoint_secret(name, endpoint.name))
        if endpoint_key is not None:
            keys[endpoint.name] = endpoint_key.get_secret_value()
    key, credentials = configuration.secrets.get(name), configuration.proxy_credentials.get(name)
    provider: ClosableProvider = adapter(spec, secret_text(key), secret_text(credentials), keys)
    if spec.format == "rehearsal" and "world" in spec.options:
        provider = resolve_name(WORLD_PROVIDER)(spec, provider)
    return provider


class AdapterParts(Struct, frozen=True):
    """The settings, secrets and files that an adapter is set up with.

    Credentials that the library of a cloud finds by itself (`auth`) are not among them: an adapter looks for them anew
    when they are refused.
    """

    spec: ProviderSpec
    secrets: tuple[SecretStr | None, ...]
    """Its credentials at a proxy, its key, and the keys of its endpoints."""
    files: tuple[bytes, ...]
    """The contents of the files of its route, which may be renewed under the same names."""


def _parts_of(name: str, spec: ProviderSpec, configuration: Configuration) -> AdapterParts:
    names = (name, *[endpoint_secret(name, endpoint.name) for endpoint in spec.endpoints])
    secrets = (configuration.proxy_credentials.get(name), *map(configuration.secrets.get, names))
    return AdapterParts(spec, secrets, tls.contents(spec.route))


class Runtime(Struct, frozen=True):
    """Everything that one process of the service is made of."""

    pool: Pool
    context: EngineContext
    runs: RunClient
    drivers: Drivers
    dispatcher: Dispatcher
    conductor_probe: ConductorProbe
    versions: VersionReader
    gateway: GatewayContext
    webhooks: Webhooks
    clock: Clock
    ratings: RatingReader

    def install(self, configuration: Configuration) -> None:
        """Take another pool and other secrets into force. Raises `ConfigInvalid`, after which nothing has changed."""
        self.pool.install(configuration)
        _show_rehearsal(self.context.telemetry, configuration)
        self.webhooks.sign_for(_webhook_target(configuration.settings))


@asynccontextmanager
async def open_runtime(configuration: Configuration, *, now: Callable[[], float] = time.time) -> AsyncIterator[Runtime]:
    """Open what the configuration asks for; close it when the block is left. `now` is this machine's clock."""
    settings = configuration.settings
    home = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    telemetry = Telemetry(
        request_lines=settings.log_requests, step_lines=settings.log_steps, tenants=settings.metrics_tenants
    )
    telemetry.gauge("baton_build_info", 1, version("baton"), settings.revision, platform.python_version())
    _show_rehearsal(telemetry, configuration)
    ids = RandomIds()
    uniform = random.Random(ids.bytes(16)).random
    beliefs = SelectorBeliefs()
    pool = Pool(configuration, Health(telemetry, monotonic=time.monotonic, random=uniform), beliefs)
    opening = open_store(settings.database_url, grace=settings.lease_seconds, content_keys=content_keys(settings))
    seals = pool.peppers.seals
    async with opening as store, _queue(configuration, seals, telemetry) as queue, _tracing(home) as tracing:
        telemetry.watch_pool("database", lambda: store.pool_use)
        store.on_signal = partial(_count_signal, telemetry)
        clock = Clock(now, time.monotonic, store.clock)
        versions = VersionReader(store, telemetry, time.monotonic, pool.catalog)
        context = EngineContext(
            store=store,
            queue=queue,
            catalog=pool.catalog,
            provider=pool.provider,
            conductor=pool.conductor,
            health=pool.health,
            telemetry=telemetry,
            now=clock.now,
            monotonic=time.monotonic,
            name=ids.name,
            random=uniform,
            salt=lambda: ids.bytes(16),
            lease=settings.lease_seconds,
            standstills=StandstillWatch(time.monotonic, settings.lease_seconds),
            code=version("baton"),
            clock_is_set=lambda: clock.is_set,
            version=versions.version,
            tracing=tracing,
            notifies=settings.webhook_url is not None,
            sharing_key=pool.peppers.sharing_key,
        )
        drivers, dispatcher = _engine(context, settings, home)
        runs = _run_client(context, settings, home, drivers)
        gateway = replace(
            _gateway(context, settings, pool, runs, lambda: pool.breakers() if drivers.is_open else None),
            serves=versions.live,
        )
        conductor_probe = ConductorProbe(context, on_out=drivers.give_up_plans)
        try:
            webhooks = Webhooks(context, _webhook_target(settings))
            ratings = RatingReader(context, beliefs)
            yield Runtime(
                pool, context, runs, drivers, dispatcher, conductor_probe, versions, gateway, webhooks, clock, ratings
            )
        finally:
            await pool.close()


def _show_rehearsal(telemetry: Telemetry, configuration: Configuration) -> None:
    """Show in the metrics whether simulated workers answer."""
    telemetry.gauge("baton_rehearsal", configuration.catalog.rehearsal)


def _count_signal(telemetry: Telemetry, signal: Signal) -> None:
    """Count what became of a budget."""
    if signal.kind == "overrun":
        telemetry.count("baton_budget_overrun_micro_usd_total", scope_of(signal.budget), by=signal.usd)
    else:
        telemetry.count("baton_budget_warnings_total", scope_of(signal.budget))


def _gateway(
    context: EngineContext,
    settings: Settings,
    pool: Pool,
    runs: RunClient,
    breakers: Callable[[], Mapping[str, str] | None],
) -> GatewayContext:
    return GatewayContext(
        store=context.store,
        queue=context.queue,
        runs=runs,
        catalog=context.catalog,
        telemetry=context.telemetry,
        tracing=context.tracing,
        peppers=pool.peppers.accepted_peppers,
        now=context.now,
        tick=context.monotonic,
        name=context.name,
        bounds=Bounds(body=settings.max_body_bytes),
        rates=Rates(
            running=settings.concurrent_runs,
            key=rate_limits(settings.key_limits),
            tenant=rate_limits(settings.tenant_limits),
            user=rate_limits(settings.user_limits),
        ),
        origins=settings.origins,
        remembered=settings.idempotency_hours * 3600,
        omits_search=settings.web_search == "omit",
        conducts=pool.are_conductors_healthy,
        breakers=breakers,
    )


def _run_client(context: EngineContext, settings: Settings, home: str, engine: Drivers) -> RunClient:
    """Return the gateway's side of runs; its address differs from that of the engine in the same process."""
    bound, waiting_bound = settings.concurrent_runs, settings.waiting_runs
    return RunClient(context, home=f"{home}-gateway", bound=bound, waiting_bound=waiting_bound, engine=engine)


def _engine(context: EngineContext, settings: Settings, home: str) -> tuple[Drivers, Dispatcher]:
    """Return the two halves of an engine: the drivers of its runs, and the dispatcher that executes steps."""
    drivers = Drivers(context, home=home, bound=settings.concurrent_runs, spread=settings.steps == "spread")
    drivers.dispatcher = dispatcher = Dispatcher(
        context, drivers, name=home, slots=settings.concurrent_steps, grace=DRAIN_SECONDS
    )
    return drivers, dispatcher


@asynccontextmanager
async def _queue(configuration: Configuration, seals: SealKeys, telemetry: Telemetry) -> AsyncIterator[StepQueue]:
    settings = configuration.settings
    tiers = tuple(configuration.catalog.tiers)
    if settings.redis_url is None:
        async with MemoryQueue(tiers, lease=settings.lease_seconds) as memory:
            yield memory
    else:
        queue_class: type[RedisQueue] = resolve_name(REDIS_QUEUE)
        async with queue_class(settings.redis_url, tiers, lease=settings.lease_seconds, seals=seals) as redis:
            telemetry.watch("baton_messages_forged", lambda: redis.forged)
            for name, pool in redis.pools.items():
                telemetry.watch_pool(name, partial(getattr, pool, "use"))
            yield redis


def _webhook_target(settings: Settings) -> Target | None:
    if settings.webhook_url is None or settings.webhook_secret is None:
        return None
    return Target(settings.webhook_url, read_secrets(settings.webhook_secret.get_secret_value()))


def check_roles(configuration: Configuration, *, is_whole_service: bool) -> None:
    """Raise `ConfigInvalid` for a set-up in which processes could not reach each other.

    With `is_whole_service` there is only this one process.
    """
    settings = configuration.settings
    faults = []
    if not is_whole_service and settings.redis_url is None:
        faults.append("BATON_REDIS_URL: separate gateways and engines need Redis; set it, or use `baton serve`")
    if not is_whole_service and settings.database_url.startswith("sqlite"):
        faults.append("BATON_DATABASE_URL: separate gateways and engines need Postgres; set it, or use `baton serve`")
    if faults:
        raise ConfigInvalid(faults)


class RandomIds:
    """Unpredictable bytes and ids: BLAKE2 over a counter under a key of this process; no call asks the kernel."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._counter = itertools.count()

    def bytes(self, size: int) -> bytes:
        """Return `size` bytes, at most 64, never the same twice."""
        return hashlib.blake2b(next(self._counter).to_bytes(8, "big"), key=self._key, digest_size=size).digest()

    def name(self, prefix: str) -> str:
        """Return a fresh id: a prefix, milliseconds since 1970 in hexadecimal so that ids sort by time, and 80 random
        bits."""
        return f"{prefix}_{time.time_ns() // 1_000_000:011x}{self.bytes(10).hex()}"


@asynccontextmanager
async def _tracing(home: str) -> AsyncIterator[Tracing]:
    """Open the spans and GenAI metrics of the process. They are exported over OTLP if OpenTelemetry's variables say
    where to, the last of them when the block is left."""
    if not any(endpoint_variable(signal, os.environ) for signal in SIGNALS):
        yield Tracing()
        return
    open_export: Callable[[str, Mapping[str, str]], Export] = resolve_name(OTLP_EXPORT)
    export = open_export(home, os.environ)
    try:
        yield Tracing(export.tracer, export.meter)
    finally:
        await asyncio.to_thread(export.close)
