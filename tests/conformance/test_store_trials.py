"""Every promise of the store seam about trials; both databases."""

from msgspec.structs import replace

from app.core.rating.calibration import Trial
from app.store.protocol import Store

ONE = Trial("luna", "m", "calibration-1", "sum-0-0", "numbers", "sum", 0, "What is 2 + 2?", "run", 5.0, 1.0, 70, 0.25)


async def test_trials_are_kept_as_they_are_in_the_order_of_their_time(store: Store) -> None:
    assert await store.trials() == ()
    others = [
        replace(ONE, worker="sol", at=4.0),
        replace(ONE, model="n", at=6.0),
        replace(ONE, task="sum-0-1", at=7.0),
    ]
    for other in (ONE, *others):
        await store.note_trial(other)
    assert await store.trials() == (others[0], ONE, *others[1:])


async def test_a_later_trial_takes_the_place_of_an_earlier_one(store: Store) -> None:
    again = replace(ONE, at=9.0, score=0.0, run="other", usd=1)
    for trial in (ONE, again):
        await store.note_trial(trial)
    assert await store.trials() == (again,)


async def test_who_has_read_them_all_is_told_of_news_only(store: Store) -> None:
    await store.note_trial(ONE)
    assert await store.trials(ONE.at) == await store.trials(ONE.at + 1) == ()
    later = replace(ONE, task="another", at=ONE.at + 0.5)
    await store.note_trial(later)
    assert await store.trials(ONE.at) == (ONE, later)
