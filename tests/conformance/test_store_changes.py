"""The promise of the store seam about conductors' versions; both databases."""

from msgspec.structs import replace

from app.core.pool.conductor_versions import Change
from app.store.protocol import Store


async def test_changes_come_back_as_they_were_made_in_the_order_of_their_time(store: Store) -> None:
    first = Change("b", 5.0, "ann", "planner", "loaded", "v@1", note='{"valid": 24}')
    changes = [
        replace(first, id="a", at=9.0, kind="canary", share=0.125),
        first,
        replace(first, id="c", who="ünal"),
    ]
    assert await store.changes() == ()
    for change in changes:
        assert await store.change(change)
    assert not await store.change(replace(first, version="v@2")), "the id exists already"
    assert await store.changes() == (first, changes[2], changes[0])
