"""A full disk under SQLite: nothing that fits is refused, and writes go on by themselves once there is room."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.core.contents import content_ref
from app.errors import StoreUnavailable
from app.store.sql import SqlStore, open_store
from tests.conformance.entries import SALT, admission_entry

pytestmark = pytest.mark.faults_suite

DISK_BYTES = 48 * 2**20
BODY_BYTES = 2**20
TIMES = 60
"""Bodies that are written and erased one after another: more than the disk holds."""
HEALTHY_SECONDS = 30.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def write(store: SqlStore, run: str) -> None:
    body = os.urandom(BODY_BYTES)
    await store.append(replace(admission_entry(run), contents=((content_ref(SALT, body), body),)))


async def write_many(store: SqlStore) -> None:
    for number in range(TIMES):
        await write(store, f"run-{number}")


def fill(file: Path) -> None:
    """Let a file take all room that is left."""
    with suppress(OSError), file.open("wb", buffering=0) as opened:
        while True:
            opened.write(bytes(BODY_BYTES))


async def test_a_small_disk_is_not_filled_by_the_log(small_disk: Path) -> None:
    async with open_store(f"sqlite:///{small_disk}/baton.db") as store:
        for number in range(TIMES):
            await write(store, f"run-{number}")
            await store.erase_contents([f"run-{number}"])


async def test_writes_go_on_by_themselves_once_a_full_disk_has_room(small_disk: Path) -> None:
    async with open_store(f"sqlite:///{small_disk}/baton.db") as store:
        await write(store, "first")
        ballast = small_disk / "ballast"
        fill(ballast)
        with pytest.raises(StoreUnavailable):
            await write_many(store)
        assert not store.healthy
        ballast.unlink()
        assert await store.wait_until_healthy(HEALTHY_SECONDS)
        await write(store, "last")
        assert (await store.run("last")).seq == 1
