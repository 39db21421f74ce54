"""The evidence about one run: its rows, its journal as it was committed, what workers received and callers heard."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.engine.runs.admission import Order
from tests.simulation.callers import CallerConnection, Visit
from tests.simulation.witness import ENDINGS, Fact
from tests.simulation.workers import ReceivedCall
from tests.simulation.world import World

OTHERS = ("caller.", "worker.", "conductor.", "receiver.", "approver.", "operator.")
"""Faults of others than us."""
PROMPTLY, QUIESCE = 3.0, 6.0
"""In leases, and in seconds beyond: how soon anything that is to happen happens once nothing is broken."""
COLUMNS = (
    *("id", "state", "seq", "deadline", "ended_at", "degraded", "salt"),
    *("held_usd", "held_tokens", "spent_usd", "spent_tokens"),
)


@dataclass
class Case:
    """The evidence about one run."""

    run: str
    row: dict[str, Any]
    facts: list[Fact]
    texts: dict[str, str]
    """What was ever stored of it, by its ref; erased content too."""
    received: list[ReceivedCall]
    visit: Visit | None
    hearings: list[CallerConnection]
    """Everybody who heard of it, the last of whom asked when all was over."""
    world: World

    def bodies(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the bodies of all events of these kinds."""
        return [fact.body for fact in self.facts if fact.kind in kinds]

    @property
    def calm(self) -> bool:
        """Return True if no fault happened in this world."""
        return self.world.calm

    def only(self, *kinds: str) -> bool:
        """Return whether nothing happened but faults whose names begin like that."""
        return all(site.startswith(kinds) for site in self.world.faults.hits)

    @property
    def patience(self) -> float:
        """Return the seconds within which anything that is to happen happens once nothing is broken."""
        return PROMPTLY * self.world.lease + QUIESCE

    @property
    def broken_until(self) -> float:
        """Return the time until which something of ours was broken; 0 if nothing was."""
        return 0.0 if self.only(*OTHERS) else self.world.healed

    @property
    def erased(self) -> bool:
        """Return True if its content was erased."""
        return self.row["salt"] is None

    @property
    def order(self) -> Order | None:
        """The request that began it, if its caller was told so."""
        return next((hearing.order for hearing in self.hearings), None) if self.visit is not None else None

    @property
    def end(self) -> Fact | None:
        """Its first terminal event."""
        return next((fact for fact in self.facts if fact.kind in ENDINGS), None)

    @property
    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Outcomes by call."""
        return {body["call"]: body for body in self.bodies("call.finished")}


def cases_of(world: World) -> Iterator[Case]:
    """All runs of a world."""
    hearings = [(hearing, visit) for visit in world.visits for hearing in visit.hearings if hearing.run]
    visits = {hearing.run: visit for hearing, visit in hearings}
    for values in world.database.rows(f"SELECT {', '.join(COLUMNS)} FROM runs ORDER BY id"):
        row = dict(zip(COLUMNS, values, strict=True))
        run = row["id"]
        row["tickets"] = len(world.database.rows("SELECT step FROM tickets WHERE run = ?", run))
        row["contents"] = world.database.rows("SELECT ref, body FROM contents WHERE run = ?", run)
        texts = dict(row["contents"] + world.database.rows("SELECT ref, body FROM buried WHERE run = ?", run))
        yield Case(
            run=run,
            row=row,
            facts=world.witness.facts.get(run, []),
            texts={ref: body.decode() for ref, body in texts.items()} | {"": ""},
            received=[call for call in world.workers.received if call.run == run],
            visit=visits.get(run),
            hearings=[hearing for hearing, _ in hearings if hearing.run == run]
            + [world.recalls[recalled] for recalled in (run,) if recalled in world.recalls],
            world=world,
        )
