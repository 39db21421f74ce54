"""A process that reads its pool file and its secrets again while it runs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from app.process import serve
from app.process.config import configure
from app.process.wiring import Runtime, open_runtime

REHEARSAL = """
[providers.rehearsal]
format = "rehearsal"

[workers."small"]
provider = "rehearsal"
model = "small"
price = { input = 1, output = 1 }

[tiers.baton-mini]
pool = ["small"]
"""
REAL = """
[providers.near]
format = "openai"
base_url = "http://127.0.0.1:9/v1"

[workers."small"]
provider = "near"
model = "small"
price = { input = 1, output = 1 }

[tiers.baton-mini]
pool = ["small"]
"""
UNUSABLE_KEY = REAL.replace("[workers", 'key = "NEAR_KEY"\n\n[workers')
"""No header can carry the key of its provider."""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose pool file and pepper stand in files of the folder."""
    (tmp_path / "pool.toml").write_text(REHEARSAL)
    (tmp_path / "pepper").write_text("p" * 32)
    return {
        "BATON_DATA_DIR": str(tmp_path),
        "BATON_POOL": str(tmp_path / "pool.toml"),
        "BATON_PEPPER_FILE": str(tmp_path / "pepper"),
        "NEAR_KEY": "sk-\N{LATIN SMALL LETTER U WITH DIAERESIS}",
    }


@pytest.fixture
async def runtime(environ: dict[str, str]) -> AsyncIterator[Runtime]:
    """A process with simulated workers only."""
    async with open_runtime(configure(environ)) as opened:
        yield opened


def reload(runtime: Runtime, environ: dict[str, str], pool: str, pepper: str = "p" * 32) -> None:
    """Do what SIGHUP does, once the files have this pool and this pepper."""
    Path(environ["BATON_POOL"]).write_text(pool)
    Path(environ["BATON_PEPPER_FILE"]).write_text(pepper)
    serve._reload(runtime, environ)


def shown_rehearsal(runtime: Runtime) -> float | None:
    return runtime.context.telemetry.registry.get_sample_value("baton_rehearsal")


async def test_the_metrics_say_whether_the_pool_in_force_is_simulated(
    runtime: Runtime, environ: dict[str, str]
) -> None:
    assert shown_rehearsal(runtime) == 1
    reload(runtime, environ, REAL)
    assert shown_rehearsal(runtime) == 0
    reload(runtime, environ, REHEARSAL)
    assert shown_rehearsal(runtime) == 1


async def test_a_provider_that_cannot_be_set_up_leaves_all_as_it_was(runtime: Runtime, environ: dict[str, str]) -> None:
    """The pepper too, which was changed in its file with the pool file: every key would be refused."""
    peppers, catalog = runtime.gateway.peppers(), runtime.context.catalog()
    reload(runtime, environ, UNUSABLE_KEY, "q" * 32)
    assert runtime.gateway.peppers() == peppers
    assert runtime.context.catalog() == catalog
    assert shown_rehearsal(runtime) == 1


async def test_a_name_that_cannot_be_addressed_leaves_all_as_it_was(
    runtime: Runtime, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    catalog = runtime.context.catalog()
    reload(runtime, environ, REAL.replace("small", "small/../large"))
    assert runtime.context.catalog() == catalog
    assert "not a usable name" in str([record.__dict__ for record in caplog.records])


async def test_a_provider_that_has_not_changed_keeps_its_adapter_and_so_its_connections(
    runtime: Runtime, environ: dict[str, str], tmp_path: Path
) -> None:
    certificate = tmp_path / "ca.pem"
    certificate.write_bytes(trustme.CA().cert_pem.bytes())
    pool = REAL.replace("http:", "https:").replace("[workers", f'ca = "{certificate}"\n\n[workers')
    reload(runtime, environ, pool)
    adapter = runtime.pool.provider("near")
    reload(runtime, environ, pool)
    assert runtime.pool.provider("near") is adapter
    certificate.write_bytes(trustme.CA().cert_pem.bytes())
    reload(runtime, environ, pool)
    assert runtime.pool.provider("near") is not adapter


@pytest.mark.parametrize("auth", ["azure", "google", "aws"])
async def test_a_provider_with_the_credentials_of_a_cloud_keeps_its_adapter_as_well(
    runtime: Runtime, environ: dict[str, str], auth: str
) -> None:
    region = 'region = "eu-west-1"\n' if auth == "aws" else ""
    pool = REAL.replace("\n[workers", f'auth = "{auth}"\n{region}\n[workers')
    reload(runtime, environ, pool)
    adapter = runtime.pool.provider("near")
    reload(runtime, environ, pool)
    assert runtime.pool.provider("near") is adapter
