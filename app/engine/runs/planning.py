"""The planner asks a conductor for a proposal, and checks each of its steps before it is executed.

A conductor that needs no model proposes at once, so that its plan is committed with the events that led to it. Any
other one streams its steps to the run's driver through `send`; the only way in which it can call a model is `_ask`,
which writes intent and outcome like every other call. A chooser that looks at an embedding gets it in the same way
before its proposal is opened, and chooses without it where there is none. The output of a conductor is not trusted
until `faults` finds nothing.

A conductor's `Brief` has the task, the workers that may take part, the money that is left, why its last proposal was
rejected, and in a further round the round before.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from math import inf

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.conductor.prompt import PARTLY, count_left_out_chars
from app.conductor.protocol import (
    Brief,
    Chooser,
    Conductor,
    ConductorChoice,
    FixedPlanConductor,
    PastStep,
    Policy,
    Previous,
    Question,
    Rationale,
    RequestEmbedding,
)
from app.conductor.recorded import RecordedConductor
from app.core.contents import content_ref
from app.core.message.chat import Form, Message, Piece, Sampling, Task, Text, TextDelta
from app.core.plan.arms import tier_of
from app.core.plan.pricing import least_price, question_tokens
from app.core.plan.workflow import CONDUCTOR, PREVIOUS, Access, Step
from app.core.pool.breaker import NO_TIME
from app.core.pool.catalog import Amount, Catalog, Worker
from app.core.pool.policy import permits, select_dispensable
from app.core.rating.decision import Decision
from app.core.rating.features import excerpt, find_last_question, sketch_to_features
from app.core.run import drafts, visibility
from app.core.run.caller_view import unspent_amount, within_approval
from app.core.run.events import Fact, StepSkipped
from app.core.run.identifiers import Trace
from app.core.run.progress import Propose, may_nest
from app.core.run.recipients import EMBEDDING_TEMPLATE
from app.core.run.recording import RecordedPlan, places
from app.core.run.state import CALLER, FALLBACK, REPLAY, Proposal, RunState, StepState
from app.core.run.visibility import LabelFlow, conversation_reading, label_refusals, labels_matter
from app.engine.calls.attempt import Attempt, CallTime, PlannedCall, Purpose, tier_seconds
from app.engine.calls.step_request import texts_of, view_of_step
from app.engine.commit.run_writer import Contents, RunWriter, retry_until_deadline
from app.engine.context import EngineContext
from app.engine.runs.means import PLAN_TOKENS, Means
from app.engine.steps import claimed_step
from app.errors import BatonError, BudgetExhausted, PlanRejected, RunOverBudget, WorkerError, WorkerUnavailable
from app.network.retries import Left
from app.network.tracing import SPAN_PLAN
from app.providers.protocol import Request
from app.store.protocol import Store

NO_WORKER_LEFT = "no worker of the run is left in the pool file"
PLANNED_WORKER_LEFT = "a worker of the plan has left the pool file"
NOT_CLEARED, NOT_HERE = "not_cleared", "not_here"
FIXED_SHAPE_CONDUCTORS = frozenset({"fixed", "random"})
"""The conductors whose plans have a shape that does not depend on the run's money."""
STOP_WAIT_SECONDS = 2.0
"""Time that a stopped planner gets to write its call's outcome."""


class PlannerMessage(Struct, frozen=True):
    """The message of a planner to its driver: one step, or the proposal's end with the error that ended it, or with the
    reason for the plan's shape, if the conductor gave one."""

    proposal: int
    step: Step | None = None
    error: BatonError | None = None
    why: str = ""

    @property
    def outage(self) -> bool:
        """Return True if the conductor failed, as opposed to having planned badly."""
        return self.error is not None and not isinstance(self.error, PlanRejected)

    @property
    def budget(self) -> tuple[str, float] | None:
        """Return the budget over several runs that had not enough left for its call, and the end of that budget's
        window."""
        if not isinstance(self.error, BudgetExhausted):
            return None
        return (self.error.budget, self.error.until)


class Planner:
    """The proposals of one run."""

    def __init__(
        self,
        context: EngineContext,
        *,
        task: Task,
        salt: bytes,
        conductor: Policy,
        send: Callable[[PlannerMessage], object],
        trace: Trace,
    ) -> None:
        """`send` is called with each message, and `trace` is the span of the run, to which plans belong. The function
        that journals calls comes with each proposal and is not kept: a driver that refers to itself could be freed by
        the garbage collector only."""
        self._context = context
        self._task = task
        self._salt = salt
        self._policy = conductor
        self._conductor = _first_conductor(conductor)
        """The conductor that proposes: for a chooser the one that it chose last, and at first the one that repairs."""
        self._send = send
        self._running: asyncio.Task[None] | None = None
        self._stopped = False
        self._state: RunState | None = None
        self._until = 0.0
        """The time by which its plan must be made, in seconds since 1970."""
        self._trace = trace
        self._call_parent = trace
        """The span to which the next call of a conductor belongs."""
        self.call = ""
        """The latest planning call."""
        self._text = ""
        self._embeddings: dict[int, RequestEmbedding] = {}
        """The embedding of each proposal that waits for one, or why there is none, by proposal."""
        self._previous_rounds: dict[int, Previous | None] = {}
        """The round before each proposal that a chooser makes in a further round; None where it cannot be read."""
        self._lowers: frozenset[str] = frozenset()
        """The labels that the subtasks of the plan in progress lose, because its writer declassifies them."""
        self._planned: dict[tuple[int, int], Step] = {}
        """The steps of proposals whose price may have to be approved, by proposal and place."""
        self._opened: dict[int, tuple[Catalog, Brief]] = {}
        """The brief of each proposal that a conductor is about to be asked for, and the pool file that it was made of:
        `plan.opened` names its workers in their order, so it stays as it is although the file is read again."""
        self._ejected: dict[int, Mapping[str, str]] = {}
        """The workers that are left out of each proposal because they fail, with the reasons."""

    async def open(
        self, state: RunState, command: Propose, writer: RunWriter
    ) -> tuple[list[Fact], list[tuple[str, bytes]]]:
        """`plan.opened`, and the whole plan if the conductor is instant; with the contents to store with them.
        Nothing at all while a chooser waits for an embedding or for the answer before: see `start`."""
        if self._lacks_workers(state, command):
            opened = drafts.plan_opened(command, state.admitted.conductor, [], instant=True)
            return [opened, drafts.plan_rejected(command.number, "", [NO_WORKER_LEFT], outage=False)], []
        if self._has_to_prepare(state, command):
            return [], []
        decision, contents = self._choose(state, command)
        conductor = self._conductor_for(state, command)
        recorded = self._find_recorded_plan(state, command)
        catalog, brief = self._context.catalog(), self._brief(state, command, conductor)
        names = [worker.name for worker in brief.workers]
        if brief.nests:
            names.append(CONDUCTOR)
        planned_by = state.admitted.conductor
        if command.mode == "fallback":
            planned_by = FALLBACK
        is_instant = conductor.instant
        if recorded is not None:
            is_instant = recorded.instant
        decided = None
        if decision is not None:
            decided = decision.body()
        opened = replace(
            drafts.plan_opened(command, planned_by, names, instant=is_instant),
            decision=decided,
            ejected=self._ejected.get(command.number) or None,
            waits=not conductor.instant and self._has_to_wait(state, brief),
            reasons=brief.reasons,
        )
        self._lowers = frozenset()
        if not conductor.instant:
            self._opened[command.number] = catalog, brief
            return [opened], contents
        steps = []
        async for step in conductor.propose(brief, partial(self._ask, writer, catalog, brief)):
            if isinstance(step, Step):
                steps.append(step)
        events, plan_contents = self._open_complete_plan(state, command, opened, steps)
        return events, contents + plan_contents

    def _lacks_workers(self, state: RunState, command: Propose) -> bool:
        """True if nobody can plan because all workers of the run have left the pool file. The fallback, and a plan that
        was given, name workers all the same: their steps fail, and say so."""
        if command.mode == "fallback" or isinstance(self._policy, FixedPlanConductor | RecordedConductor):
            return False
        return not any(name in self._context.catalog().workers for name in state.admitted.pool)

    def _open_complete_plan(
        self, state: RunState, command: Propose, opened: Fact, steps: Sequence[Step]
    ) -> tuple[list[Fact], list[tuple[str, bytes]]]:
        """The events of a proposal whose steps are all known when it is opened, with their contents."""
        if not steps and state.admitted.conductor == CALLER:
            return [opened, drafts.plan_rejected(command.number, "", [PLANNED_WORKER_LEFT], outage=False)], []
        objections = self._objections(state, command, steps)
        if objections:
            self._context.telemetry.count("baton_plans_total", state.admitted.tier, "rejected")
            reasons = (RunOverBudget.code, *objections)
            return [opened, drafts.plan_rejected(command.number, "", reasons, outage=False)], []
        events = [opened]
        contents: list[tuple[str, bytes]] = []
        for place, step in enumerate(steps):
            planned, step_contents = self.step(state, command, place, step)
            events.append(planned)
            contents += step_contents
        taken_over, outputs = self._take_over_steps(command, self._find_recorded_plan(state, command))
        refused = label_refusals(self._context.catalog(), state, [*events, *taken_over])
        if refused:
            events += [StepSkipped(command.base + place, PlanRejected.code) for place in range(len(steps))]
            events.append(drafts.plan_rejected(command.number, "", refused, outage=False))
            return events, contents
        inputs = [step.access.steps for step in steps]
        price = self.price(state, command.number, len(steps))
        events += [drafts.plan_accepted(command.number, "", inputs, price=price), *taken_over]
        return events, contents + outputs

    @cached_property
    def _means(self) -> Means:
        """Return the means of the run, for those plans whose price or time is looked at."""
        return Means(self._context, self._task)

    def _has_to_wait(self, state: RunState, brief: Brief) -> bool:
        """True if no step may begin before the plan is complete: it may need an approval, or money or time is short."""
        if state.admitted.approval is not None:
            return True
        return self._means.are_short(state, brief.workers, brief.limits.steps)

    def price(self, state: RunState, proposal: int, count: int) -> int | None:
        """The worst case of a proposal of so many steps, one call each, in micro-dollars; None where no approval can
        depend on it."""
        if state.admitted.approval is None:
            return None
        return self._means.worst_case(state, [self._planned[proposal, place] for place in range(count)])

    def _take_over_steps(
        self, command: Propose, plan: RecordedPlan | None
    ) -> tuple[list[Fact], list[tuple[str, bytes]]]:
        """The ends of the steps whose outputs a replay takes over, with the outputs as contents of this run."""
        taken: list[Fact] = []
        texts: list[tuple[str, bytes]] = []
        if plan is None or not isinstance(self._policy, RecordedConductor):
            return taken, texts
        for position, kept in plan.kept_outputs.items():
            ref = self._ref(kept.text)
            taken.append(drafts.step_taken_over(self._policy.recording.run, command.base + position, ref, kept))
            if ref:
                texts.append((ref, kept.text.encode()))
        return taken, texts

    def _objections(self, state: RunState, command: Propose, steps: Sequence[Step]) -> Sequence[str]:
        """The reasons why the plan of a fixed shape does not fit the run's money or time. A selector has left out what
        does not fit, and a plan of the caller's, or an arm's, is carried out as far as it goes."""
        if command.mode != "first" or state.admitted.conductor not in FIXED_SHAPE_CONDUCTORS:
            return ()
        tier = self._context.tier_of(state.admitted)
        if tier is None or tier.conductor.whole:
            return ()
        return self._means.objections(state, steps)

    def objections(self, state: RunState, proposal: Proposal, planned: PlannerMessage) -> Sequence[str]:
        """The reasons why a model's plan that is complete does not fit the run's money or time. None if its steps did
        not wait for it to be complete, because any plan fits."""
        if not proposal.waits or planned.step is not None or planned.error is not None:
            return ()
        return self._means.objections_to(state, state.steps_of(proposal))

    def _choose(self, state: RunState, command: Propose) -> tuple[Decision | None, list[tuple[str, bytes]]]:
        """A chooser's decision, where there is one to be made, with the features that it rests on."""
        if not isinstance(self._policy, Chooser) or command.mode != "first":
            return None, []
        brief = self._brief(state, command, FixedPlanConductor(()))
        seconds_left = self._means.seconds_left(state)
        brief = replace(
            brief,
            planning=self._means.planning_amount(state, brief.workers),
            planning_seconds=self._means.planning_seconds(state),
            seconds_left=seconds_left,
            paces=self._means.paces(brief.workers),
            tenant=state.admitted.tenant,
            previous=self._previous_rounds.get(command.number),
        )
        embedding = self._embedding(state, command)
        chosen = self._policy.choose(
            brief,
            f"{state.run}/{command.number}",
            explores=state.admitted.explore,
            asks=self._may_model_plan(state),
            embedding=embedding,
        )
        self._conductor = chosen.conductor
        body = orjson.dumps(chosen.seen.to_json())
        ref = content_ref(self._salt, body)
        left = {"usd": brief.usd_left, "tokens": brief.tokens_left, "seconds": seconds_left}
        return _decision(chosen, ref, left, _embedder_facts(self._policy.embedder, embedding)), [(ref, body)]

    def _embedding(self, state: RunState, command: Propose) -> RequestEmbedding:
        """The embedding of the request. A further round uses that of the first one, if this process has made it."""
        if command.round == 1:
            return self._embeddings.get(command.number, RequestEmbedding(blind=NOT_CLEARED))
        return self._embeddings.get(state.proposals[0].number, RequestEmbedding(blind=NOT_HERE))

    def _may_model_plan(self, state: RunState) -> bool:
        """True if the tier's model may plan for this run: it reads the whole task (D6), and should be healthy."""
        catalog = self._context.catalog()
        tier = self._context.tier_of(state.admitted)
        if tier is None or tier.conductor.worker is None:
            return False
        model = catalog.workers.get(tier.conductor.worker)
        if model is None or not permits(model, conversation_reading(state)):
            return False
        return not self._context.health.objection(model, self._means.seconds_left(state))

    def step(self, state: RunState, proposal: Propose | Proposal, place: int, step: Step) -> tuple[Fact, Contents]:
        """`plan.step` with its subtask's content."""
        if state.admitted.approval is not None:
            self._planned[proposal.number, place] = step
        refs, contents = [], []
        for text in (step.subtask, step.why, step.why_withheld):
            ref = self._ref(text)
            refs.append(ref)
            if ref:
                contents.append((ref, text.encode()))
        subtask, why, withheld = refs
        written = drafts.WrittenStep(
            step, subtask, why, withheld, declassified=self._find_lowered_labels(state, proposal)
        )
        answer_before = state.answer_of_round(proposal.round - 1)
        previous_step = None
        if answer_before is not None:
            previous_step = answer_before.step.n
        parent = None
        if proposal.parent is not None:
            parent = state.steps[proposal.parent]
        may_stand_in = not _is_bound(self._task)
        planned = drafts.plan_step(proposal, place, written, previous_step, parent, may_stand_in=may_stand_in)
        return planned, tuple(contents)

    def accept_plan(
        self, state: RunState, proposal: Proposal, inputs: Sequence[Sequence[int]], why: str
    ) -> tuple[Fact, Contents]:
        """`plan.accepted` with the content of the conductor's reason for the plan's shape."""
        ref, price = self._ref(why), self.price(state, proposal.number, len(inputs))
        contents: Contents = ()
        if ref:
            contents = ((ref, why.encode()),)
        return drafts.plan_accepted(proposal.number, self.call, inputs, ref, price), contents

    def _find_lowered_labels(self, state: RunState, proposal: Propose | Proposal) -> frozenset[str]:
        """The labels that a subtask loses of those that its writer has read."""
        if not self._lowers:
            return self._lowers
        return self._lowers & LabelFlow(state).planner_reading(proposal.round, proposal.parent).labels

    def _find_refusals(
        self, catalog: Catalog, state: RunState, command: Propose, step: Step, drafted: list[Fact]
    ) -> list[str]:
        """Return the reasons why the steps so far, of which this is the latest, may not be given to their workers: what
        they read has labels (D6). It is added to those that are drafted. `catalog` is the pool file of which the brief
        was made, for all steps of a plan: one that was refused for a moment only would be missing in front of others.
        A worker's clearance is looked at again when it is called."""
        if labels_matter(state, catalog.workers.values()):
            drafted.append(self.step(state, command, len(drafted), step)[0])
        if not drafted:
            return []
        return label_refusals(catalog, state, drafted)

    def _ref(self, text: str) -> str:
        """A text's address; empty for the empty text."""
        if not text:
            return ""
        return content_ref(self._salt, text.encode())

    def start(self, group: asyncio.TaskGroup, state: RunState, command: Propose, writer: RunWriter) -> None:
        """Let a conductor that takes its time propose; its steps arrive through `send`. Or get the embedding, or the
        answer of the round before, that a chooser waits for; when there is nothing more to wait for, an empty message
        wakes the driver, which decides again."""
        is_opened = command.number in self._opened
        if not is_opened and not self.idle:
            return
        self._state = state
        self._until = self._deadline(state, command)
        self._stopped = False
        if is_opened:
            work = self._propose(state, command, writer)
        else:
            work = self._prepare_choice(state, command, writer)
        self._running = group.create_task(work)

    @property
    def idle(self) -> bool:
        """Return True if no proposal is in progress."""
        return self._running is None or self._running.done()

    async def stop(self) -> None:
        """Cancel the proposal in progress, if any, and wait until its call's outcome is written."""
        if self._running is None or self._running.done():
            return
        if not self._stopped:  # a second cancellation would interrupt the writing of the outcome
            self._stopped = True
            self._running.cancel()
        done, _ = await asyncio.wait([self._running], timeout=STOP_WAIT_SECONDS)
        if done:
            self._running = None  # the cancellation that it ended with refers to this planner

    async def _propose(self, state: RunState, command: Propose, writer: RunWriter) -> None:
        conductor = self._conductor_for(state, command)
        self.call = ""
        error: BatonError | None = None
        why = ""
        named: dict[str, str | int] = {
            "gen_ai.operation.name": SPAN_PLAN,
            "baton.plan.mode": command.mode,
            "baton.round": command.round,
        }
        span = self._context.tracing.start(SPAN_PLAN, self._trace, named)
        self._call_parent = span.trace
        try:
            catalog, brief = self._opened.pop(command.number)
            if not self._means.has_time_to_plan(state, brief.workers):
                raise WorkerUnavailable(code=f"conductor_{NO_TIME}")
            brief = replace(brief, seconds_left=float(max(int(self._means.seconds_left(state)), 0)))
            brief = await with_inputs(self._context.store, state, command, brief, self._seconds_to_plan)
            drafted: list[Fact] = []
            refused: list[str] = []
            async for step in conductor.propose(brief, partial(self._ask, writer, catalog, brief)):
                if isinstance(step, Rationale):
                    why = step.why
                    continue
                refused = self._find_refusals(catalog, state, command, step, drafted)
                if not refused:
                    self._send(PlannerMessage(command.number, step))
            if refused:
                raise PlanRejected(refused)
        except BatonError as caught:
            error = caught.without_frames()  # the attempt keeps it
        except Exception as bug:
            error = BatonError()
            self._context.telemetry.log(
                logging.ERROR,
                "A plan could not be made because of a bug; the run goes on without it.",
                bug,
                run=state.run,
            )
        finally:
            self._call_parent = self._trace
            error_code = ""
            if error is not None:
                error_code = error.public_code or "error"
            span.end(error_code)
        self._send(PlannerMessage(command.number, error=error, why=why))

    def _has_to_prepare(self, state: RunState, command: Propose) -> bool:
        """True if a chooser has to look at something before its proposal is opened: in the first round at an embedding
        of the request, in a further one at the answer before."""
        if command.round > 1 and isinstance(self._policy, Chooser) and command.mode == "first":
            return command.number not in self._previous_rounds
        return self._embedder(state, command) is not None

    def _embedder(self, state: RunState, command: Propose) -> Worker | None:
        """The worker to ask for an embedding before a proposal is opened. It is shown the caller's text, so it must be
        cleared for its labels, as a conductor must (D6)."""
        if not isinstance(self._policy, Chooser) or self._policy.embedder is None or command.mode != "first":
            return None
        worker = self._context.catalog().workers.get(self._policy.embedder)
        if worker is None or command.number in self._embeddings or not permits(worker, conversation_reading(state)):
            return None
        return worker

    async def _prepare_choice(self, state: RunState, command: Propose, writer: RunWriter) -> None:
        """Get what a chooser waits for; no error on the way is the run's."""
        worker = self._embedder(state, command)
        if command.round > 1:
            self._previous_rounds[command.number] = await self._read_previous_round(state, command)
        elif worker is not None:
            self._embeddings[command.number] = await self._embed_request(state, command, writer, worker)
        self.call = self._text = ""
        self._send(PlannerMessage(command.number))

    async def _read_previous_round(self, state: RunState, command: Propose) -> Previous | None:
        """The round before, or None where it cannot be read."""
        try:
            brief = self._brief(state, command, FixedPlanConductor(()))
            brief = await with_inputs(self._context.store, state, command, brief, self._seconds_to_plan)
            return brief.previous
        except BatonError:
            return None

    async def _embed_request(
        self, state: RunState, command: Propose, writer: RunWriter, worker: Worker
    ) -> RequestEmbedding:
        """The embedding of the request, or the reason why there is none."""
        text = excerpt(find_last_question(self._task.messages))
        if not text:
            return RequestEmbedding(blind="no_text")
        try:
            embedding = await self._ask_embedder(state, command, writer, worker, text)
            return RequestEmbedding(sketch_to_features(embedding, worker.model))
        except BatonError as error:
            error.without_frames()
            return RequestEmbedding(blind=error.public_code or "embedder_failed")

    async def _ask_embedder(
        self, state: RunState, command: Propose, writer: RunWriter, worker: Worker, text: str
    ) -> Sequence[float]:
        brief = self._brief(state, command, FixedPlanConductor(()))
        ask = partial(self._ask, writer, self._context.catalog(), brief)
        patience = 0.0
        if isinstance(self._policy, Chooser):
            patience = self._policy.patience
        question = Question(worker.name, (Message("user", (Text(text),)),), max_tokens=1, template=EMBEDDING_TEMPLATE)
        answer = ""
        async for pieces in ask(question, within=patience):
            for piece in pieces:
                if isinstance(piece, TextDelta):
                    answer += piece.text
        embedding: list[float] = orjson.loads(answer)
        return embedding

    def _conductor_for(self, state: RunState, command: Propose) -> Conductor:
        """The tier's conductor, or the plan of the run that is replayed; for the fallback, one worker that simply
        answers and that the run can pay."""
        if command.mode == "fallback":
            return FixedPlanConductor((Step(self._means.lone_worker(state), answers=True),))
        recorded = self._find_recorded_plan(state, command)
        if recorded is None:
            return self._conductor
        return FixedPlanConductor(recorded.steps)

    def _find_recorded_plan(self, state: RunState, command: Propose) -> RecordedPlan | None:
        """The plan of the run that is replayed; None where this run is none, or the fallback decides."""
        if not isinstance(self._policy, RecordedConductor) or command.mode == "fallback":
            return None
        key = str(command.round)
        if command.parent is not None:
            key = places(state)[command.parent]
        return self._policy.plan(key)

    def _brief(self, state: RunState, command: Propose, conductor: Conductor) -> Brief:
        catalog = self._context.catalog()
        brief = brief_of(catalog, self._task, state, command, instant=conductor.instant, rejected=self._text)
        ejected = self._find_ejected_workers(state, command, brief.workers)
        tier = self._context.tier_of(state.admitted)
        workers = tuple([worker for worker in brief.workers if worker.name not in ejected])
        if tier is None:
            return replace(brief, workers=workers, reasons=False, message_chars=0)
        spec = tier.conductor
        gives_reasons = spec.reasons and not conductor.instant
        return replace(brief, workers=workers, reasons=gives_reasons, message_chars=spec.message_chars)

    def _find_ejected_workers(self, state: RunState, command: Propose, workers: Sequence[Worker]) -> Mapping[str, str]:
        """The workers that are left out because they fail, with the reasons: decided once for each proposal.

        A caller or a replay that names workers gets them, or the next best when a step is executed; a fallback takes
        any worker.
        """
        if state.admitted.conductor in (CALLER, FALLBACK, REPLAY) or command.mode == "fallback":
            return {}
        if command.number not in self._ejected:
            self._ejected[command.number] = select_dispensable(workers, self._context.health.ejected_workers(workers))
        return self._ejected[command.number]

    def _deadline(self, state: RunState, command: Propose) -> float:
        """The time until which plans may be made: a slow conductor must leave the steps their time."""
        tier = self._context.tier_of(state.admitted)
        share = 1.0
        if tier is not None:
            share = tier.conductor.share
        seconds = state.admitted.limits.seconds
        if command.round > 1 or command.parent is not None:
            seconds = max(self._means.seconds_left(state), 0.0)
        return state.turn.deadline - (1 - share) * seconds

    def _seconds_to_plan(self) -> float:
        return self._until - self._context.now()

    async def _ask(
        self, writer: RunWriter, catalog: Catalog, brief: Brief, question: Question, *, within: float = inf
    ) -> AsyncGenerator[list[Piece], None]:
        """The answer to a conductor's question, `within` so many seconds. A call that failed at one endpoint before it
        said anything is made again while another endpoint is healthy, as often as calls of a step are."""
        until, attempts_left = self._context.now() + within, brief.limits.attempts
        while True:
            attempts_left -= 1
            call = self._call(writer, catalog, brief, question, until - self._context.now())
            has_begun = False
            try:
                async with aclosing(call) as answer:
                    async for pieces in answer:
                        has_begun = True
                        yield pieces
                return
            except WorkerError as error:
                if has_begun or not attempts_left or not error.elsewhere:
                    raise

    async def _call(
        self, writer: RunWriter, catalog: Catalog, brief: Brief, question: Question, within: float
    ) -> AsyncGenerator[list[Piece], None]:
        """One journaled call for a conductor, `within` so many seconds: its intent first, exactly one outcome after.
        `catalog` is the pool file of which the brief was made."""
        state, worker = self._callable_worker(catalog, question.worker)
        self._lowers = worker.declassifies
        version = state.admitted.tried_version or await self._context.version(question.worker, state.run)
        served = _adapt_worker(worker, version, within)
        planned = PlannedCall(
            call=self._context.name("call"),
            step=None,
            request=_request(served, question),
            access=self._access_of_planner(state),
            number=state.proposal_count,
            salt=self._salt,
            trace=self._call_parent,
            purpose=self._purpose(state, brief, question.template, version),
        )
        time = CallTime(self._until, spare=True, tier_seconds=tier_seconds(catalog, state))
        whole = Attempt(self._context, catalog, planned, time)
        attempt = self._within_means(state, brief, whole, embeds=question.template == EMBEDDING_TEMPLATE)
        if version and self._context.health.is_out(worker):  # its server, whichever of its models is asked
            raise WorkerUnavailable(code="conductor_out")
        refusal = self._context.health.refusal(served, self._seconds_to_plan())
        if refusal:
            raise WorkerUnavailable(code=f"conductor_{refusal}")
        with attempt.abandon_on_error():
            pin = partial(self._context.pin, attempt.catalog)
            await retry_until_deadline(self._context.store, pin, self._seconds_to_plan)
            await writer.append((attempt.build_intent(),), hold=attempt.hold)
        self.call, self._text = attempt.call, ""
        try:
            async with aclosing(attempt.stream()) as stream:  # the call ends before its outcome is made
                async for pieces in stream:
                    self._context.health.note_sign_of_life(served)
                    yield pieces
        finally:
            self._text = attempt.reply.text
            await writer.append(
                (attempt.build_outcome(),),
                contents=attempt.contents,
                release=attempt.hold,
                spent=attempt.spent,
                within=claimed_step.OUTCOME_WAIT_SECONDS,
            )

    def _callable_worker(self, catalog: Catalog, name: str) -> tuple[RunState, Worker]:
        """Return the run's state, and the conductor's model. Raises `PlanRejected` or `WorkerUnavailable` if it may not
        be called."""
        state, worker = self._state, self._context.catalog().workers.get(name)
        if state is None or worker is None:
            raise PlanRejected(["the conductor's model is not in the pool file"])
        if not (self._conducts(self._context.catalog(), state, name) and self._conducts(catalog, state, name)):
            raise WorkerUnavailable(code="conductor_replaced")
        if not self._may_read(worker, state):  # since the admission, or by what was read since then (D6)
            raise WorkerUnavailable(code="conductor_not_cleared")
        if state.admitted.needs_prices and not worker.priced:
            raise WorkerUnavailable(code="conductor_not_priced")
        return state, catalog.workers.get(name, worker)

    def _conducts(self, catalog: Catalog, state: RunState, name: str) -> bool:
        """Return True unless a pool file, which was read again since this process took the run, has another model as
        the conductor or embedder of the run's tier."""
        admitted = state.admitted
        tier = tier_of(catalog, admitted.tier, admitted.model, admitted.served_by)
        if tier is None:
            return True
        selector = tier.conductor.selector
        return name == tier.conductor.worker or (selector is not None and name == selector.embedder)

    def _within_means(self, state: RunState, brief: Brief, whole: Attempt, *, embeds: bool) -> Attempt:
        """A call of a conductor, cut to what the run can pay if the cheapest worker is to answer after it.

        Raises `RunOverBudget` if that is not enough for a short plan.
        """
        floor, question = brief.limits.floor, question_tokens(brief.task)
        answers = [least_price(worker, question, floor) for worker in brief.workers]
        cheapest = min(answers, key=lambda amount: amount.usd, default=Amount())
        least_tokens = max(PLAN_TOKENS, floor)
        if embeds:
            least_tokens = 1
        means = within_approval(state, unspent_amount(state).minus(cheapest))
        attempt = whole.within(means, least_tokens)
        if attempt is None:
            raise RunOverBudget
        return attempt

    def _may_read(self, model: Worker, state: RunState) -> bool:
        """True if a model may be shown what the open proposal is planned from; before that, the conversation."""
        proposal = state.open_proposal
        if proposal is None or not labels_matter(state, [model]):
            return permits(model, conversation_reading(state))
        return permits(model, LabelFlow(state).planner_reading(proposal.round, proposal.parent))

    def _purpose(self, state: RunState, brief: Brief, template: str, version: str) -> Purpose:
        seconds_left = None
        if brief.seconds_left is not None:
            seconds_left = int(brief.seconds_left)
        omitted_chars = 0
        if template in PARTLY.values():
            omitted_chars = count_left_out_chars(brief.task.messages, brief.message_chars)
        return Purpose(
            template=template,
            usd_left=brief.usd_left,
            seconds_left=seconds_left,
            rejected=self._ref(brief.rejected),
            left_out=omitted_chars,
            version=version or "",
            run=state.run,
            tenant=state.admitted.tenant,
            shadow=state.admitted.origin_kind == "shadow",
            budgets=state.admitted.budgets,
            disclosed=visibility.disclosure_to_planner(
                state, self._access_of_planner(state), embeds=template == EMBEDDING_TEMPLATE
            ),
        )

    def _access_of_planner(self, state: RunState) -> Access:
        """A conductor reads the conversation, in a further round the answer before as well; or what the step may see
        for which it plans."""
        if state.open_proposal is not None and state.open_proposal.parent is not None:
            return state.steps[state.open_proposal.parent].access
        if state.previous_answer is None:
            return Access(True, ())
        return Access(True, (state.previous_answer.step.n,))


def _first_conductor(policy: Policy) -> Conductor:
    """Return the conductor that proposes before a choice was made."""
    if not isinstance(policy, Chooser):
        return policy
    if policy.model is None:
        return FixedPlanConductor(())
    return policy.model


def _is_bound(task: Task) -> bool:
    """True if the caller has asked for an answer of a form, with a tool call, or with stop sequences: only the step
    that answers is asked for these."""
    return task.form is not None or task.toolbox.must or bool(task.sampling.stop)


def _decision(
    chosen: ConductorChoice, features: str, left: Mapping[str, float], embedder: Mapping[str, str]
) -> Decision:
    return Decision(
        choice=chosen.choice,
        policy=chosen.policy,
        version=chosen.version,
        features=features,
        explore=chosen.explore,
        seed=chosen.seed,
        masked=chosen.masked,
        left=left,
        lent=chosen.lent,
        embedder=embedder,
    )


def _request(worker: Worker, question: Question) -> Request:
    """The request by which a worker is asked."""
    top_p = None
    if question.temperature:
        top_p = 1.0
    sampling = Sampling(temperature=question.temperature, top_p=top_p, max_tokens=question.max_tokens)
    form = None
    if question.schema:
        form = Form(question.schema, strict=True)
    return Request(worker, question.messages, sampling, form, question.logprobs or None)


def _adapt_worker(worker: Worker, version: str, within: float) -> Worker:
    """A worker that serves another version of its model, or has less time than it usually has."""
    if version:
        worker = replace(worker, model=version)
    if within == inf:
        return worker
    return replace(worker, deadlines=worker.deadlines.within(within, live=False, spare=False))


def _embedder_facts(embedder: str | None, embedding: RequestEmbedding) -> Mapping[str, str]:
    """The facts that the journal keeps of an embedder."""
    if embedder is None:
        return {}
    if not embedding.blind:
        return {"embedder": embedder}
    return {"embedder": embedder, "blind": embedding.blind}


def faults(state: RunState, proposal: Proposal, planned: PlannerMessage) -> Sequence[str]:
    """The reasons why the open proposal cannot go on, or end, with a message of its planner. A step's form was checked
    by the plan's reader."""
    steps = state.steps_of(proposal)
    if planned.step is not None:
        return _check_placement(state, proposal, planned.step, steps)
    if isinstance(planned.error, BudgetExhausted):
        return (RunOverBudget.code, f"the budget {planned.error.budget} has not enough left")
    if isinstance(planned.error, PlanRejected) and planned.error.reasons:
        return planned.error.reasons
    if planned.error is not None:
        return [planned.error.public_code or "conductor_failed"]
    if steps and not steps[-1].answers:
        return ["the plan has no answering step"]
    if not steps and (proposal.round == 1 or proposal.parent is not None):
        return ["the plan has no steps"]
    return []


def _check_placement(state: RunState, proposal: Proposal, step: Step, earlier: Sequence[StepState]) -> list[str]:
    """The reasons why this cannot be the next step."""
    parent, place = proposal.parent, len(earlier)
    most = proposal.room or state.admitted.limits.steps
    is_nested = step.worker == CONDUCTOR and may_nest(state, parent)
    reasons = []
    if step.worker not in state.admitted.pool and not is_nested:
        reasons.append(f"step {place}: worker is not an eligible worker")
    if any(not 0 <= n < place for n in step.access.steps):
        reasons.append(f"step {place}: access lists a step that is not an earlier one")
    if step.access.previous and (state.previous_answer is None or parent is not None):
        reasons.append(f"step {place}: access lists a previous answer, and there is none")
    if place >= most:
        reasons.append(f"the plan has more than {most} steps")
    if place and earlier[-1].answers:
        reasons.append(f"step {place}: comes after the answering step")
    return reasons


def brief_of(catalog: Catalog, task: Task, state: RunState, command: Propose, *, instant: bool, rejected: str) -> Brief:
    """The brief for a proposal, without what has to be read from the store. `instant` is for a conductor that needs no
    model; `rejected` is the text of the last proposal."""
    workers = [catalog.workers[name] for name in state.admitted.pool if name in catalog.workers]
    if not instant:
        workers = _shuffle(workers, state.run)
    limits = state.admitted.limits
    if command.room:
        limits = replace(limits, steps=command.room)
    brief = Brief(
        task=task,
        workers=tuple(workers),
        limits=limits,
        usd_left=max(limits.usd - state.usd, 0),
        tokens_left=unspent_amount(state).tokens,
        run=state.run,
        round=command.round if command.parent is None else 1,
        nests=not instant and may_nest(state, command.parent),
    )
    last = _last_proposal(state, command)
    if last is None or command.mode != "repair":
        return brief
    return replace(brief, objections=last.reasons, rejected=rejected)


def _last_proposal(state: RunState, command: Propose) -> Proposal | None:
    """Return the proposal before this one, of the run or of the step that it is for; None if there is none."""
    proposals = state.proposals
    if command.parent is not None:
        proposals = state.nested.get(command.parent, ())
    for proposal in reversed(proposals):
        if proposal.number < command.number:
            return proposal
    return None


async def with_inputs(store: Store, state: RunState, command: Propose, brief: Brief, seconds_left: Left) -> Brief:
    """The brief with the round before, if there was one, or with the view of the step that it is for. `NotFound` if
    that was erased, `StoreUnavailable` if the database is away for longer than `seconds_left`."""
    if command.parent is not None:
        view = await retry_until_deadline(store, partial(view_of_step, store, state, command.parent), seconds_left)
        return replace(brief, task=replace(brief.task, messages=view.messages("")))
    answer = state.answer_of_round(command.round - 1)
    if answer is None:
        return brief
    steps = state.steps_of_round(command.round - 1)
    refs = {answer.step.output, *(step.subtask for step in steps)}
    texts = await retry_until_deadline(store, partial(texts_of, store, state.run, refs), seconds_left)
    before = state.answer_of_round(command.round - 2)
    names: dict[int, str | int] = {step.n: place for place, step in enumerate(steps)}
    if before is not None:
        names[before.step.n] = PREVIOUS
    past = []
    for step in steps:
        access: list[int | str] = []
        for entry in step.access.as_list():
            access.append("user" if entry == "user" else names[int(entry)])
        past.append(PastStep(step.worker, texts[step.subtask], tuple(access), step.state == "done"))
    return replace(brief, previous=Previous(tuple(past), texts[answer.step.output]))


def _shuffle(workers: Iterable[Worker], run: str) -> list[Worker]:
    """An order that depends on the run alone, so that it can be made again; `plan.opened` has it too."""
    return sorted(workers, key=lambda worker: content_ref(run.encode(), worker.name.encode()))
