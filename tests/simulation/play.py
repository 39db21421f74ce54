"""Playing a seed and judging it."""

from collections.abc import Iterator

from tests.simulation import approved
from tests.simulation.audited import contradictions
from tests.simulation.faults import AS_SEEDED, FaultRates
from tests.simulation.oracle import ABANDONED, judge
from tests.simulation.report import Report
from tests.simulation.witness import OPENS
from tests.simulation.world import World

DECISIONS = {
    approved.APPROVED: "plan approved",
    approved.REFUSED: "plan refused",
    approved.DROPPED: "approval not given in time",
}


def play(seed: int, fault_rates: FaultRates = AS_SEEDED, *, keep_trace: bool = False) -> Report:
    """One world from its beginning to its verdict; `violations` is empty if every promise was kept."""
    world = World(seed, fault_rates, keep_trace=keep_trace)
    report = world.run()
    report.violations += judge(world) + contradictions(world)
    report.states.update(state for (state,) in world.database.rows("SELECT state FROM runs"))
    report.outcomes.update(
        fact.body["outcome"] for facts in world.witness.facts.values() for fact in facts if fact.kind == "call.finished"
    )
    report.actions.update(actions(world))
    return report


def actions(world: World) -> Iterator[str]:
    """Return what was done in a world beyond runs that plan, call and answer."""
    for facts in world.witness.facts.values():
        waited = ""
        for fact in facts:
            if fact.kind == "run.awaiting_tool":
                waited = fact.author
            elif fact.kind == "run.resumed":
                yield "turn begun elsewhere" if fact.author != waited else "turn begun where it ended"
            elif fact.kind == "plan.step" and fact.body["worker"] == OPENS:
                yield "step nested"
            elif fact.kind == "run.awaiting_approval" and fact.author in world.harmed:
                yield "approval asked by a harmed engine"
            elif fact.kind in DECISIONS:
                yield DECISIONS[fact.kind]
            elif fact.kind == "run.expired" and fact.body.get("error") == approved.NOBODY_DECIDED:
                yield "approval not given in time"
            elif fact.kind == "run.expired" and fact.body.get("error") == ABANDONED:
                yield "wait abandoned"
    yield from ("pool file read again" for _ in world.reloads)
    yield from (f"decision {'accepted' if decision.accepted else 'declined'}" for decision in world.decisions)
    yield from ("run handed back" for gift in world.witness.gifts if gift.taker)
    delivery_ids = [delivery.id for delivery in world.receiver.deliveries]
    yield from (
        "notice told again" if id_ in delivery_ids[:place] else "notice told" for place, id_ in enumerate(delivery_ids)
    )
    yield from ("content erased" for erasure in world.erasures if erasure.over and not erasure.refused)
