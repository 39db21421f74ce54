"""The line that a step leaves in the log when this engine is done with it.

It is made of the facts that were committed, so a step that another engine has taken over leaves none here. A step that
waits for tool results leaves one line for each turn. A step that is a workflow of its own is executed by no engine: its
inner steps leave lines.
"""

from collections.abc import Iterable

from app.core.pool.catalog import MILLION
from app.core.run.events import CallFinished, CallIntended, StepAwaitingTool, StepDone, StepFailed
from app.core.run.facts import Fact
from app.core.run.state import RunState
from app.engine.context import EngineContext


class StepLog:
    """One step in one turn, as far as this engine executes it."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._began = context.tick()
        self._state: RunState | None = None
        self._step = 0
        self._worker = ""
        self._attempt = self._tokens = self._usd = 0
        self._reason = ""
        self._is_written = False

    def begin(self, state: RunState, n: int) -> None:
        """Note the step `n` as it is in the journal: the calls of other engines in this turn belong to its costs."""
        self._state, self._step, self._worker = state, n, state.steps[n].worker
        made = [call for call in state.calls.values() if call.step == n and call.turn == state.turn.number]
        self._attempt = len(made)
        self._tokens = sum(call.usage.total for call in made)
        self._usd = sum(call.usd for call in made)

    def call(self, worker: str) -> None:
        """Note a call whose intent is committed."""
        self._worker, self._attempt = worker, self._attempt + 1

    def committed(self, facts: Iterable[Fact]) -> None:
        """Note what was committed; the step's end is written."""
        for fact in facts:
            if isinstance(fact, CallIntended):
                self.call(fact.worker)
            elif isinstance(fact, CallFinished):
                self._tokens += fact.usage.total
                self._usd += fact.usd
                self._reason = fact.reason
            elif isinstance(fact, StepDone):
                self.write("done")
            elif isinstance(fact, StepAwaitingTool):
                self.write("awaiting_tool")
            elif isinstance(fact, StepFailed):
                self.write("failed", error=fact.error)

    def write(self, outcome: str, *, error: str = "") -> None:
        """Write the line, once; `outcome` is `done`, `failed`, `awaiting_tool`, or `cancelled` with its run."""
        state = self._state
        if state is None or self._is_written:
            return
        self._is_written = True
        admitted = state.admitted
        fields: dict[str, object] = {
            "run": state.run,
            "step": self._step,
            "worker": self._worker,
            "attempt": self._attempt,
            "outcome": outcome,
            "tokens": self._tokens,
            "ms": round((self._context.tick() - self._began) * 1000, 3),
            "cost_usd": self._usd / MILLION,
            "tier": admitted.tier,
        }
        known = {
            "request": state.turn.request_id,
            "key": admitted.key_name,
            "tenant": admitted.tenant,
            "reason": self._reason,
            "error": error,
        }
        self._context.telemetry.log_step(fields | {name: value for name, value in known.items() if value})
