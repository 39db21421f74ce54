"""Replays under the plan of their run: a few of those that `tests.bench.replays` plays."""

from tests.bench.replays import play, table


async def test_a_replay_shows_the_same_workers_the_same() -> None:
    """The service's auditor looks at each of them when they have ended."""
    replays = await play(14, 2)
    assert [replayed for replayed in replays if replayed.differs] == []
    assert len({replayed.tier for replayed in replays}) > 4
    assert table(replays)[-1].startswith("| all | 14 |")
