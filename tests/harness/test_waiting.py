"""Waiting ends with the condition, and with an error that names it when the deadline has passed."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.harness.waiting import NotInTime, Stopwatch, stays, until, wait_until

SLEEP_DELAY = 0.2


def becoming_true(looks: int) -> list[bool]:
    """Answers in reverse: the condition is false for so many looks, then true."""
    return [True] + [False] * looks


async def test_it_returns_the_first_true_value() -> None:
    answers = becoming_true(3)
    assert await until(answers.pop)
    assert answers == []


async def test_the_condition_may_be_a_coroutine_function() -> None:
    answers = becoming_true(3)

    async def condition() -> bool:
        return answers.pop()

    assert await until(condition)
    assert answers == []


def test_a_thread_waits_alike() -> None:
    answers = becoming_true(3)
    assert wait_until(answers.pop)
    assert answers == []


async def test_a_deadline_that_has_passed_names_the_condition() -> None:
    with pytest.raises(NotInTime, match="the moon is blue"):
        await until(lambda: False, within=0.0, what="the moon is blue")
    with pytest.raises(NotInTime, match="1 == 2"):
        wait_until(lambda: 1 == 2, within=0.0)


def test_a_stopwatch_counts_sleeping() -> None:
    watch = Stopwatch()
    time.sleep(SLEEP_DELAY)
    assert watch.seconds >= 0.5 * SLEEP_DELAY


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count it")
def test_a_stopwatch_leaves_out_the_wait_for_a_processor() -> None:
    """Two processes share one processor: each waits for as long as the other works."""
    one_processor = {next(iter(os.sched_getaffinity(0)))}
    rival = psutil.Popen([sys.executable, "-c", "while True: pass"])
    everywhere = os.sched_getaffinity(0)
    try:
        rival.cpu_affinity(list(one_processor))
        os.sched_setaffinity(0, one_processor)
        began, watch, used = time.monotonic(), Stopwatch(), time.process_time()
        while time.process_time() - used < SLEEP_DELAY:
            pass
        assert watch.seconds < 0.8 * (time.monotonic() - began)
    finally:
        os.sched_setaffinity(0, everywhere)
        rival.kill()
        rival.wait()


async def test_what_stays_true_is_watched_for_the_whole_time() -> None:
    began = time.monotonic()
    await stays(lambda: True, seconds=0.05)
    assert time.monotonic() - began >= 0.05


async def test_what_ceases_to_be_true_is_seen() -> None:
    answers = [False, True, True]
    with pytest.raises(AssertionError, match="no longer true"):
        await stays(answers.pop, seconds=60)
