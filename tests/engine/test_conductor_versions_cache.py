"""A gateway's cache of conductors' versions is never old, unless the database cannot be read."""

from collections.abc import Sequence

import pytest

from app.core.pool.catalog import Catalog
from app.core.pool.conductor_versions import Change
from app.engine.conductors.versions import MOST_AGE_SECONDS, VersionReader
from app.errors import StoreUnavailable
from app.telemetry import Telemetry


class Changes:
    """A store of changes, which can be away; `reads` counts what was asked of it."""

    def __init__(self) -> None:
        self.made: list[Change] = []
        self.away = False
        self.reads = 0

    async def changes(self) -> Sequence[Change]:
        self.reads += 1
        if self.away:
            raise StoreUnavailable
        return tuple(self.made)

    def promote(self, version: str) -> None:
        self.made.append(Change(f"change_{len(self.made)}", 0.0, "me", "planner", "promoted", version))


@pytest.fixture
def store() -> Changes:
    return Changes()


class Watch:
    """Seconds, as they are set."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def versions(store: Changes, watch: Watch) -> VersionReader:
    pool = Catalog({}, {}, {}, {}, "")
    return VersionReader(store, Telemetry(), watch, lambda: pool)  # type: ignore[arg-type]


async def test_the_first_to_ask_reads_if_nobody_could_before(store: Changes, versions: VersionReader) -> None:
    """A process that starts while the database is away conducts with the version in force as soon as it is back."""
    store.promote("planner@1")
    store.away = True
    await versions.look()
    store.away = False
    assert await versions.version("planner", "run") == "planner@1"
    assert await versions.version("other", "run") == ""
    assert store.reads == 2


async def test_what_was_read_long_ago_is_read_again(store: Changes, watch: Watch, versions: VersionReader) -> None:
    await versions.look()
    store.promote("planner@1")
    watch.now += MOST_AGE_SECONDS
    assert await versions.version("planner", "run") == ""
    watch.now += 0.1
    assert await versions.version("planner", "run") == "planner@1"
    store.away = True
    watch.now += 2 * MOST_AGE_SECONDS
    assert await versions.version("planner", "run") == "planner@1"
