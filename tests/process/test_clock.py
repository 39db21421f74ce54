"""The clock that all processes share, over a machine's own that is wrong, and a database that is slow, odd or away."""

import asyncio
from dataclasses import dataclass

import pytest

from app.errors import StoreUnavailable
from app.process.clock import LOGGED_DIFFERENCE_SECONDS, MAX_ANSWER_SECONDS, RETRY_INTERVAL_SECONDS, Clock
from tests.harness.waiting import until


@dataclass
class Times:
    """A machine and a database, each with its own idea of the time."""

    wall: float = 1_000.0
    monotonic: float = 50.0
    database: float = 1_000.0
    took: float = 0.0
    away: bool = False
    reads: int = 0

    async def read(self) -> float:
        self.reads += 1
        self.pass_by(self.took / 2)
        database_time = self.database
        self.pass_by(self.took / 2)
        if self.away:
            raise StoreUnavailable
        return database_time

    def pass_by(self, seconds: float) -> None:
        self.wall, self.monotonic, self.database = (
            self.wall + seconds,
            self.monotonic + seconds,
            self.database + seconds,
        )

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.monotonic, self.read)


@pytest.mark.parametrize("wrong", [-300.0, -1.0, 0.0, 1.0, 300.0])
async def test_what_the_database_says_is_the_time(wrong: float, caplog: pytest.LogCaptureFixture) -> None:
    times = Times(wall=1_000.0 + wrong, took=0.2)
    clock = times.clock()
    assert clock.now() == times.wall, "until it has been asked"
    await clock.read()
    assert clock.now() == pytest.approx(times.database)
    assert bool(caplog.records) == (abs(wrong) >= LOGGED_DIFFERENCE_SECONDS), "only a large difference is logged"


@pytest.mark.parametrize("jump", [-300.0, 300.0])
async def test_a_machine_whose_clock_is_set_changes_nothing(jump: float) -> None:
    times = Times()
    clock = times.clock()
    await clock.read()
    times.wall += jump
    assert clock.now() == pytest.approx(times.database)
    times.pass_by(7.0)
    await clock.read()
    assert clock.now() == pytest.approx(times.database)


async def test_one_odd_answer_is_not_followed_and_two_that_agree_are() -> None:
    times = Times()
    clock = times.clock()
    await clock.read()
    for odd in (60.0, -60.0):
        times.database += odd
        await clock.read()
        assert clock.now() == pytest.approx(1_000.0)
    times.database += 60.0
    await clock.read()
    assert clock.now() == pytest.approx(1_000.0)
    times.pass_by(RETRY_INTERVAL_SECONDS)
    await clock.read()
    assert clock.now() == pytest.approx(times.database) == pytest.approx(1_060.0 + RETRY_INTERVAL_SECONDS)


async def test_a_slow_answer_counts_only_where_there_is_no_better_one() -> None:
    times = Times(wall=1_300.0, took=4 * MAX_ANSWER_SECONDS)
    clock = times.clock()
    await clock.read()
    assert clock.now() == pytest.approx(times.database)
    for _ in range(3):
        times.database += 60.0
        await clock.read()
    assert clock.now() == pytest.approx(times.database - 180.0)


@pytest.mark.parametrize(("took", "reads"), [(4 * MAX_ANSWER_SECONDS, 3), (0.0, 1)])
async def test_a_slow_database_is_asked_again_before_the_process_listens(took: float, reads: int) -> None:
    """One that refuses is not waited for."""
    times = Times(took=took, away=True)
    await times.clock().read_at_start()
    assert times.reads == reads


async def test_until_the_database_is_there_the_machine_is_believed_and_then_no_more() -> None:
    times = Times(wall=1_300.0, away=True)
    clock, stopping = times.clock(), asyncio.Event()
    keeping = asyncio.create_task(clock.keep_reading(stopping))
    await asyncio.sleep(0)
    assert (clock.now(), clock.is_set) == (1_300.0, False)
    times.away = False
    await until(lambda: clock.is_set)
    assert clock.now() == pytest.approx(1_000.0)
    stopping.set()
    await keeping
