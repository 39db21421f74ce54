"""The conductor of a replay: its plans are those that an earlier run accepted, so that nobody is asked."""

from collections.abc import AsyncIterator

from msgspec import Struct

from app.conductor.protocol import Ask, Brief
from app.core.plan.workflow import Step
from app.core.run.recording import RecordedPlan, Recording

NO_PLAN = RecordedPlan(())
"""A plan without steps: it takes the answer of the round before, and is none for a first round or a step."""


class RecordedConductor(Struct, frozen=True):
    """Proposes the recorded plan of each round, and of each step that the conductor itself took."""

    recording: Recording
    instant: bool = True

    def plan(self, key: str) -> RecordedPlan:
        """Return the recorded plan under a key; the empty one if there is none."""
        return self.recording.plans.get(key, NO_PLAN)

    async def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step]:
        """Yield the recorded plan of the round. `ask` is not used."""
        for step in self.plan(str(brief.round)).steps:
            yield step
