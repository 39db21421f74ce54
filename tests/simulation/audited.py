"""The product's offline auditor over a world's database: a second judge, which was written by others."""

from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar, cast

from app.audit.check import Auditor
from app.providers.protocol import Provider
from app.store.archive import Archive
from app.store.sqlkit.sealing import Keyring
from tests.simulation.loop import EPOCH
from tests.simulation.operators import usual_pool
from tests.simulation.seam import Seam
from tests.simulation.workers import SimProvider
from tests.simulation.world import World

T = TypeVar("T")


def contradictions(world: World) -> list[str]:
    """Return what the auditor finds in the journals, in its words."""
    machine = world.loop.outside
    seam = Seam("auditor", machine, world.faults, world, Random(0))
    provider = cast(Provider, SimProvider(world.workers, seam, usual_pool()))
    auditor = Auditor(EPOCH + world.loop.time(), lambda _spec: provider, allows_pending=False)
    report = _at_once(auditor.audit(Archive(world.database.conn.engine, Keyring())))
    return [
        f"audit.{violation.rule}: {violation.run} seq {violation.seq}: {violation.what}"
        for violation in report.violations
    ]


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits: SQLite is read in place."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the auditor waited for something")
