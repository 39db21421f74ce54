"""The memory of waiting runs is bounded by its size."""

from app.engine.context import EVENT_BYTES, WaitingRuns


def test_what_is_taken_is_kept_no_longer() -> None:
    waiting: WaitingRuns[str] = WaitingRuns()
    waiting.keep("run", "first", 1)
    waiting.keep("run", "second", 2)
    assert [waiting.take("run"), waiting.take("run")] == ["second", None]


def test_the_run_that_waits_longest_goes_first() -> None:
    waiting: WaitingRuns[str] = WaitingRuns(size=10 * EVENT_BYTES)
    for run, events in (("a", 4), ("b", 4), ("a", 4), ("c", 2)):
        waiting.keep(run, f"{run} after {events}", events)
    waiting.keep("d", "d after 1", 1)
    assert [waiting.take(run) for run in "abcd"] == ["a after 4", None, "c after 2", "d after 1"]


def test_what_is_too_large_is_not_kept() -> None:
    waiting: WaitingRuns[str] = WaitingRuns(size=10 * EVENT_BYTES)
    waiting.keep("large", "large", 11)
    assert waiting.take("large") is None
    for run in ("a", "b"):  # and it took no room from others
        waiting.keep(run, run, 5)
    assert [waiting.take(run) for run in "ab"] == ["a", "b"]
