"""The whole service inside a command: the configured pool with its arms, and its own journal."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from msgspec.structs import replace

from app.cli import storage
from app.cli.embedded.engine import start_engine
from app.core.pool.snapshot import seal_catalog
from app.core.rating.calibration import Trial
from app.engine.runs import cancellation
from app.gateway.app import create_app
from app.gateway.http.api_keys import mint
from app.process.config import Configuration, Settings
from app.store.sqlkit import revisions

TENANT = "evaluation"


def move_to_folder(config: Configuration, folder: Path) -> Configuration:
    """Return the pool with arms, for one process that shares nothing with a service that may be running."""
    settings = config.settings.model_copy(
        update={
            "data_dir": folder,
            "database_url": f"sqlite:///{folder / 'baton.db'}",
            "redis_url": None,
            "webhook_url": None,
            "webhook_secret": None,
        }
    )
    evaluation = replace(config.catalog.evaluation, arms=True)
    return replace(config, settings=settings, catalog=seal_catalog(replace(config.catalog, evaluation=evaluation)))


@asynccontextmanager
async def run_embedded_service(
    config: Configuration, folder: Path, concurrency: int
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client with a key that calls the application without a socket. The service ends with the block.

    The cards of its workers have the calibration of the configured database. Runs that an earlier command left open in
    this folder are cancelled, since time has passed in which nobody carried them out.
    """
    trials: tuple[Trial, ...] = ()
    if revisions.exists(config.settings.database_url):
        trials = await _calibration_results(config.settings)
    async with start_engine(move_to_folder(config, folder), concurrency, dispatches=True) as runtime:
        for trial in trials:
            await runtime.gateway.store.note_trial(trial)
        runtime.pool.apply_trials(await runtime.gateway.store.trials())
        scopes, now = ["runs:write", "runs:read"], runtime.gateway.now()
        for left in await storage.open_runs(runtime.gateway.store):
            await cancellation.ask(runtime.gateway.store, None, left, "operator", now)
        runtime.drivers.recovers = True
        key, row = mint(runtime.gateway.pepper, tenant=TENANT, name=TENANT, scopes=scopes, now=now)
        await runtime.gateway.store.add_key(row)
        transport = httpx.ASGITransport(create_app(runtime.gateway), raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://baton", headers=headers) as client:
            yield client


async def _calibration_results(settings: Settings) -> tuple[Trial, ...]:
    """Return the results of `baton calibrate`."""
    async with storage.open_configured_store(settings) as store:
        return await store.trials()
