"""Playing a seed and judging it."""

from tests.simulation.audited import contradictions
from tests.simulation.faults import AS_SEEDED, Weather
from tests.simulation.oracle import judge
from tests.simulation.report import Report
from tests.simulation.world import World


def play(seed: int, weather: Weather = AS_SEEDED, *, keep_trace: bool = False) -> Report:
    """One world from its beginning to its verdict; `violations` is empty if every promise was kept."""
    world = World(seed, weather, keep_trace=keep_trace)
    report = world.run()
    report.violations += judge(world) + contradictions(world)
    report.states.update(state for (state,) in world.database.rows("SELECT state FROM runs"))
    report.outcomes.update(
        fact.body["outcome"] for facts in world.witness.facts.values() for fact in facts if fact.kind == "call.finished"
    )
    return report
