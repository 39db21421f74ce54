"""Snapshots of pools: nothing is lost, equal pools have equal digests, and other versions' fields do no harm."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.core.pool.catalog import Catalog, Price
from app.core.pool.snapshot import restore_catalog, seal_catalog, snapshot
from app.process.config import configure

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def catalogs() -> list[Catalog]:
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "MISTRAL_API_KEY", "GEMINI_API_KEY"), "sk-secret")
    files = [{"BATON_POOL": str(DEPLOY / name)} for name in ("pool.example.toml", "pool.eu.toml")]
    return [configure(keys | further).catalog for further in ({}, *files)] + [configure({}).catalog]


@pytest.mark.parametrize("catalog", catalogs())
def test_a_snapshot_holds_the_whole_pool(catalog: Catalog) -> None:
    assert restore_catalog(snapshot(catalog)) == catalog
    assert b"sk-secret" not in snapshot(catalog)


def test_the_digest_is_that_of_what_is_in_force() -> None:
    catalog = catalogs()[0]
    name, worker = next(iter(catalog.workers.items()))
    dearer = replace(catalog, workers={**catalog.workers, name: replace(worker, price=Price(1, 2, 3))})
    shuffled = replace(catalog, workers=dict(reversed(catalog.workers.items())))
    assert seal_catalog(dearer).digest != catalog.digest == seal_catalog(shuffled).digest


def test_a_snapshot_of_another_version() -> None:
    catalog = catalogs()[0]
    plain = json.loads(snapshot(catalog)) | {"of_tomorrow": 1}
    for worker in plain["workers"].values():
        worker["of_tomorrow"] = [1]
        del worker["deadlines"]
    other = restore_catalog(json.dumps(plain).encode())
    assert (set(other.workers), other.tiers) == (set(catalog.workers), catalog.tiers)
    assert other.digest != catalog.digest


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"workers": 1}', b"\xff", b"1"])
def test_what_is_no_snapshot(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        restore_catalog(data)
