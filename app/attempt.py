"""THE CALL: one provider call, from the reservation to the settled outcome (D4, D7).

An `Attempt` is made for a step by `dispatch.py` and for a plan by `planner.py`. It opens no transaction by itself: it
gives the drafts and ledgers that its owner commits, so that an intent travels in one entry with the ticket's claim
and an outcome with the step's end. The order is fixed:

    attempt = Attempt(...)          renders the exact bytes and their salted hash
    commit attempt.intended()       with attempt.hold        before the socket is opened
    async for ... attempt.stream()  at most one request on the wire
    commit attempt.finished()       with attempt.spent       whatever happened, exactly once
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from app.conductor.protocol import Conductor
from app.core import budget
from app.core.chat import End, Piece, Usage, Words, usage_to_json
from app.core.journal import Draft, Kind
from app.core.pool import Catalog, Tier, Worker
from app.core.workflow import Access
from app.errors import BatonError, WorkerMalformed, WorkerTimeout, WorkerTruncated
from app.providers.protocol import Deadlines, Provider, Request
from app.stepqueue.protocol import StepQueue
from app.store.content import address
from app.store.protocol import Ledger, Store
from app.telemetry import SPAN_CALL, Telemetry

CONNECT, FIRST, GAP = 5.0, 120.0, 60.0
"""Seconds a worker may take to connect, to begin, and between two reads, if the run's deadline leaves that much."""


@dataclass(frozen=True, slots=True)
class Means:
    """What drivers and dispatchers work with; made in `wiring.py`, changed never.

    `now` gives seconds since 1970, `tick` a monotonic time, `name` a fresh id with a prefix, `chance` a number in
    [0, 1).
    """

    store: Store
    queue: StepQueue
    catalog: Callable[[], Catalog]
    provider: Callable[[str], Provider]
    conductor: Callable[[Tier], Conductor]
    telemetry: Telemetry
    now: Callable[[], float]
    tick: Callable[[], float]
    name: Callable[[str], str]
    chance: Callable[[], float]
    salt: Callable[[], bytes]
    lease: float
    code: str
    """Version of this code, kept with each run."""


class Attempt:
    """One provider call for `step` of a run (None: for its plan)."""

    def __init__(
        self,
        means: Means,
        *,
        call: str,
        step: int | None,
        worker: Worker,
        request: Request,
        access: Access,
        number: int,
        salt: bytes,
        deadline: float,
    ) -> None:
        """`deadline` is the run's, in seconds since 1970; `number` counts a step's attempts from 1."""
        self.call = call
        self.step = step
        self.worker = worker
        self._means = means
        self._request = request
        self._access = access
        self._number = number
        self._salt = salt
        self._deadline = deadline
        self._provider = means.provider(worker.provider)
        self._body = self._provider.render(request)
        schema_bytes = len(self._body) if request.schema else 0
        self._input_bound = budget.input_bound(request.messages, schema_bytes)
        self._max_output = request.sampling.max_tokens or worker.card.max_output
        self.hold = Ledger(*budget.worst_case(worker, self._input_bound, self._max_output))
        self._texts: list[str] = []
        self._end: End | None = None
        self._began = self._first = 0.0
        self._seconds = 0.0
        self.outcome = "unknown"
        self.error: BatonError | None = None

    def intended(self) -> Draft:
        """The intent: worker, access list, hash of the exact bytes, what is reserved, and what cannot be honoured."""
        body: dict[str, object] = {
            "call": self.call,
            "n": self.step,
            "attempt": self._number,
            "worker": self.worker.name,
            "provider": self.worker.provider,
            "model": self.worker.model,
            "access": self._access.as_list(),
            "request": address(self._salt, self._body),
            "bytes": len(self._body),
            "max_tokens": self._max_output,
            "usd_held": self.hold.usd,
            "tokens_held": self.hold.tokens,
        }
        lost_ones = [name for name in sorted(self._provider.unsupported) if getattr(self._request.sampling, name)]
        if lost_ones:
            body["ignored"] = lost_ones
        return Draft(Kind.CALL_INTENDED, body)

    async def stream(self) -> AsyncIterator[list[Piece]]:
        """Make the call and pass on its pieces. Raises the `WorkerError` that ended it, after noting it."""
        self._began = self._means.tick()
        attributes = {"gen_ai.operation.name": SPAN_CALL, "gen_ai.request.model": self.worker.model}
        try:
            with self._means.telemetry.span(SPAN_CALL, attributes):
                async for pieces in self._provider.stream(self._request, self._body, self._deadlines()):
                    self._note(pieces)
                    yield pieces
            if self._end is None:
                raise WorkerTruncated()
            self.outcome = "ok"
        except BatonError as error:
            self.error = error
            self.outcome = "truncated" if isinstance(error, WorkerTruncated) else "error"
            raise
        except (GeneratorExit, BaseException) as error:
            self.outcome = "error" if isinstance(error, Exception) else "cancelled"
            self.error = WorkerMalformed() if isinstance(error, Exception) else None
            raise
        finally:
            self._seconds = self._means.tick() - self._began

    def _deadlines(self) -> Deadlines:
        left = self._deadline - self._means.now()
        if left <= 0:
            raise WorkerTimeout()
        return Deadlines(min(CONNECT, left), min(FIRST, left), min(GAP, left), left)

    def _note(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Words):
                if not self._texts:
                    self._first = self._means.tick() - self._began
                self._texts.append(piece.text)
            elif isinstance(piece, End):
                self._end = piece

    @property
    def text(self) -> str:
        """What the worker has said so far."""
        return "".join(self._texts)

    @property
    def began_to_answer(self) -> bool:
        """Whether any text has come."""
        return bool(self._texts)

    @property
    def finish(self) -> str:
        """The finish reason, or empty."""
        return self._end.finish if self._end else ""

    @property
    def output(self) -> str:
        """The content address of `text`, or empty if there is none."""
        return address(self._salt, self.text.encode()) if self._texts else ""

    @property
    def contents(self) -> tuple[tuple[str, bytes], ...]:
        """What to store beside the outcome."""
        return ((self.output, self.text.encode()),) if self._texts else ()

    @property
    def usage(self) -> Usage:
        """As reported; else estimated: the likely figure for a complete call, an upper bound for a broken one."""
        if self._end is not None and self._end.usage is not None:
            return self._end.usage
        if self.outcome == "ok":
            return budget.estimate(self._request.messages, self.text)
        if self.outcome == "error" and not self._texts:
            return Usage()
        unheard = self._max_output if not self._request.live else 0
        return budget.broken(self._input_bound, self._max_output, self.text, unheard)

    @property
    def spent(self) -> Ledger:
        """What the call cost, for settling."""
        usage = self.usage
        return Ledger(self.worker.price.cost(usage), usage.total)

    def finished(self) -> Draft:
        """The outcome, exactly one for each intent."""
        usage = self.usage
        spent = Ledger(self.worker.price.cost(usage), usage.total)
        self._count(usage, spent)
        body: dict[str, object] = {
            "call": self.call,
            "n": self.step,
            "outcome": self.outcome,
            "usage": usage_to_json(usage),
            "usd": spent.usd,
            "seconds": round(self._seconds, 6),
            "first": round(self._first, 6),
            "finish": self.finish,
            "output": self.output,
        }
        if self._end is not None and self._end.refused:
            body["refused"] = True
        if self.error is not None:
            body["error"] = self.error.public_code
        return Draft(Kind.CALL_FINISHED, body)

    def _count(self, usage: Usage, spent: Ledger) -> None:
        telemetry, name = self._means.telemetry, self.worker.name
        telemetry.count("baton_calls_total", name, self.outcome)
        telemetry.count("baton_tokens_total", name, "input", by=usage.input)
        telemetry.count("baton_tokens_total", name, "output", by=usage.output)
        telemetry.count("baton_cost_micro_usd_total", name, by=spent.usd)
        telemetry.observe("baton_call_seconds", self._seconds, name)


def lost(call: str, step: int | None, held: Ledger) -> Draft:
    """The outcome of an intent whose process was lost: possibly billed, so all that was held counts as spent."""
    body: Mapping[str, object] = {
        "call": call,
        "n": step,
        "outcome": "unknown",
        "usage": usage_to_json(Usage(input=held.tokens, estimated=True)),
        "usd": held.usd,
        "seconds": 0.0,
        "first": 0.0,
        "finish": "",
        "output": "",
    }
    return Draft(Kind.CALL_FINISHED, body)
