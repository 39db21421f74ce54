"""Waiting ends with the condition, and with an error that names it when the deadline has passed."""

import time

import pytest

from tests.harness.waiting import NotInTime, assert_stays, fastest, fastest_in_thread, until, wait_until


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


async def test_the_fastest_of_several_tries_counts() -> None:
    tries = [1.0, 0.1, 4.0, 5.0]
    assert await fastest(tries.pop, enough=0.2) == 0.1
    assert tries == [1.0], "it ends with the first one that is fast enough"


def test_the_least_of_all_tries_is_returned_when_none_is_fast_enough() -> None:
    assert fastest_in_thread(iter([3.0, 2.0]).__next__, enough=1.0, tries=2) == 2.0


async def test_what_stays_true_is_watched_for_the_whole_time() -> None:
    began = time.monotonic()
    await assert_stays(lambda: True, seconds=0.05)
    assert time.monotonic() - began >= 0.05


async def test_what_ceases_to_be_true_is_seen() -> None:
    answers = [False, True, True]
    with pytest.raises(AssertionError, match="no longer true"):
        await assert_stays(answers.pop, seconds=60)
