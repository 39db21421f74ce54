"""A run played by chance: a driver, a conductor and dispatchers that do anything they may do, in any order.

Every event goes through `advance`, and every invariant that must hold at every moment is asserted on the way. Events
are written by the product's own drafts; what is played here is who writes when.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from app.core.message.chat import Usage, sum_usages
from app.core.plan.workflow import CONDUCTOR, Access, Step
from app.core.pool.catalog import Limits
from app.core.run import drafts
from app.core.run.caller_view import bill
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Event,
    Fact,
    NamedCall,
    PlanOpened,
    RunAdmitted,
    RunCancelAsked,
    StepAwaitingTool,
    StepDone,
    StepFailed,
    StepQueued,
    StepToolResults,
)
from app.core.run.fold import advance, begin
from app.core.run.kinds import DRIVER_LOST
from app.core.run.progress import (
    Await,
    Command,
    Conclude,
    Finish,
    Propose,
    Queue,
    Skip,
    decide,
    may_nest,
    nesting_depth,
    parent_of,
)
from app.core.run.state import RUN_ENDED, Call, Proposal, RunState, StepState, Turn

POOL = ("ada", "bob", "cyd")
DEADLINE = 1_000.0


def admission(**changes: Any) -> Fact:
    """`run.admitted` of a plain run."""
    plain: dict[str, Any] = {
        "task": "task-ref",
        "tier": "mini",
        "model": "baton-mini",
        "effort": "medium",
        "limits": Limits(fan_out=2),
        "deadline": DEADLINE,
        "pool": POOL,
        "excluded": {},
        "labels": ["phi"],
        "conductor": "model",
        "catalog": "digest",
        "rehearsal": False,
        "streams": False,
        "preview": False,
        "ignored": (),
        "on_disconnect": "cancel",
        "wire": {"format": "chat"},
    }
    chosen = plain | changes
    return RunAdmitted(**chosen | {"labels": frozenset(chosen["labels"])})


def intent(call: str, n: int | None, *, access: tuple[str | int, ...] = ("user",), worker: str = "ada") -> Fact:
    """`call.intended`."""
    step_access = Access("user" in access, tuple(place for place in access if isinstance(place, int)))
    return CallIntended(call=call, n=n, worker=worker, access=step_access, usd_held=9, tokens_held=90)


def outcome(call: str, n: int | None, usage: Usage = Usage(), *, usd: int = 0, kind: str = "ok") -> Fact:
    """`call.finished`."""
    return CallFinished(call=call, n=n, outcome=kind, usage=usage, usd=usd, seconds=0.5)


def step_done(n: int, call: str, chars: int = 5) -> Fact:
    """`step.done`."""
    return StepDone(n, call, output=f"ref-{n}" if chars else "", chars=chars, finish="stop")


def await_tools(n: int, call: str, *ids: str) -> Fact:
    """`step.awaiting_tool`."""
    return StepAwaitingTool(n, call, f"said-{call}", chars=4, calls=tuple(NamedCall(id_, "look") for id_ in ids))


def resume(number: int, deadline: float, *, streams: bool = True) -> Fact:
    """`run.resumed`."""
    return drafts.run_resumed(Turn(number, deadline, streams, "request", deadline - 9), "")


def step_failed(n: int, error: str = "worker_failed") -> Fact:
    """`step.failed`."""
    return StepFailed(n, error)


def number_events(*written: Fact) -> tuple[Event, ...]:
    """A journal of these."""
    return tuple(Event.of("run", seq, 0.0, draft) for seq, draft in enumerate(written, 1))


@dataclass
class Play:
    """One run. `play` goes on until it has ended and every call has its outcome."""

    random: Random
    preview: bool = False
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    state: RunState = field(init=False)
    queued: list[int] = field(default_factory=list)
    turns: dict[int, tuple[Usage, int]] = field(default_factory=dict)
    """What each turn of the run used so far."""
    forgiving: float = 0.9
    """How likely a proposal or a call is a good one."""
    insists: bool = False
    """Whether the conductor always wants another round."""
    itself: float = 0.3
    """How likely it takes a step itself, where it may."""

    def __post_init__(self) -> None:
        self.forgiving = self.random.choice((0.5, 0.9, 1.0))
        rounds, depth = self.random.choice((1, 1, 2, 3)), self.random.choice((0, 0, 1, 2))
        limits = Limits(steps=5, fan_out=self.random.randint(1, 4), rounds=rounds, depth=depth)
        draft = admission(preview=self.preview, limits=limits)
        self.events.append(Event.of("run", 1, 0.0, draft))
        self.state = begin(self.events[0])

    def play(self) -> RunState:
        """To the end."""
        for _ in range(500):
            if self.state.ended and not self.state.open_calls:
                return self.state
            moves = list(self.moves())
            assert moves, "a run that has not ended can always go on"
            self.write(*self.random.choice(moves))
        raise AssertionError("the run does not end")

    def write(self, *written: Fact) -> None:
        """Commit one entry."""
        for draft in written:
            event = Event.of("run", len(self.events) + 1, self.now, draft)
            self.events.append(event)
            self.state = advance(self.state, event)
            self.check(draft)

    def check(self, draft: Fact) -> None:
        """Check all that must hold after every event."""
        state = self.state
        if isinstance(draft, StepQueued):
            step = state.steps[draft.n]
            assert step.n not in self.queued, "a step is queued once"
            self.queued.append(step.n)
            assert all(state.steps[n].settled for n in step.access.steps), "inputs are settled"
            inputs = [state.steps[n] for n in step.access.steps]
            there = step.access.user or step.inherits or not inputs or any(step.chars for step in inputs)
            assert there, "there is something to see"
            unmade = state.open_proposal
            whole = unmade is None or unmade.number != step.proposal
            assert whole or not step.answers, "the answering step waits for the whole plan"
            assert not step.opens_workflow, "what is the conductor's is for no dispatcher"
            if (parent := parent_of(state, step)) is not None:
                reads_of_other_plans = {n for n in step.access.steps if state.steps[n].proposal != step.proposal}
                assert reads_of_other_plans <= set(parent.access.steps), "authority never widens"
                assert parent.access.user or not step.access.user
        if isinstance(draft, PlanOpened) and state.round > 1 and draft.parent is None:
            assert state.previous_answer is not None, "a round follows an answer"
            assert all(step.settled for step in state.steps.values()), "with nothing left to do"
        assert state.round <= state.admitted.limits.rounds
        busy = [step for step in state.active_steps if step.state in ("queued", "running") and not step.opens_workflow]
        assert len(busy) <= state.admitted.limits.fan_out
        accepted = [proposal.number for proposal in state.all_proposals if proposal.state == "accepted"]
        workers = [step for step in state.active_steps if step.proposal in accepted and not step.opens_workflow]
        assert len(workers) <= state.admitted.limits.steps, "nested steps count to their round's"
        assert all(nesting_depth(state, n) <= state.admitted.limits.depth for n in state.nested)
        assert [proposal.number for proposal in state.all_proposals] == list(range(state.proposal_count))
        split = bill(state)
        assert sum_usages((split.visible, split.orchestration)) == split.turn
        assert min(split.orchestration.input, split.orchestration.output, split.turn_usd) >= 0
        self.turns[state.turn.number] = (split.turn, split.turn_usd)
        assert split.total == sum_usages(usage for usage, _ in self.turns.values())
        assert split.usd == sum(usd for _, usd in self.turns.values())
        assert split.total == sum_usages(call.usage for call in state.calls.values())
        assert split.usd == state.usd == sum(call.usd for call in state.calls.values())

    # -- who may do what

    def moves(self) -> Iterator[tuple[Fact, ...]]:
        """Every entry that somebody could write next."""
        state, random = self.state, self.random
        for call in state.open_calls:
            yield self._end(call)
        if state.ended:
            return
        yield from self._driver()
        if state.state == "awaiting_tool":
            yield from self._return()
            return
        for step in state.steps.values():
            if step.opens_workflow:
                continue
            if step.state == "queued" or (step.state == "running" and not self._has_open_call(step)):
                yield (intent(self._name(), step.n, access=tuple(step.access.as_list()), worker=step.worker),)
                if random.random() > self.forgiving:
                    yield (step_failed(step.n, random.choice(("worker_failed", "run_over_budget", "no_time"))),)
        if random.random() < 0.02:
            yield (RunCancelAsked("client"),)
        if random.random() < 0.02:
            self.now += DEADLINE / 3

    def _return(self) -> Iterator[tuple[Fact, ...]]:
        """The caller comes back with results, or it does not."""
        waiting = [step for step in self.state.steps.values() if step.state == "awaiting_tool"]
        assert set(self.state.unanswered_tool_calls.values()) == {step.n for step in waiting}
        assert not any(step.state in ("queued", "running") for step in self.state.current_steps)
        results = [StepToolResults(step.n, f"results-{step.n}", step.exchanges[-1].ids) for step in waiting]
        self.now = self.random.choice((self.now, self.state.turn.until))
        deadline = self.now + DEADLINE
        yield (resume(self.state.turn.number + 1, deadline, streams=self.random.random() < 0.5), *results)

    def _driver(self) -> Iterator[tuple[Fact, ...]]:
        commands = decide(self.state, self.now)
        assert commands == decide(self.state, self.now)
        written: list[Fact] = []
        for command in commands:
            written += self._obey(command)
        if written:
            yield tuple(written)
        if self.state.open_proposal is not None and not self._over(commands):
            yield self._plan(self.state.open_proposal)

    def _over(self, commands: tuple[Any, ...]) -> bool:
        return any(isinstance(command, Finish) for command in commands)

    def _obey(self, command: Command) -> tuple[Fact, ...]:
        if isinstance(command, Propose):
            assert command.number == self.state.proposal_count
            assert self.state.open_proposal is None, "one plan at a time is made"
            assert command.parent is None or command.room > 0, "there is always room for a step that answers"
            return (drafts.plan_opened(command, "model", POOL, instant=False),)
        if isinstance(command, Queue):
            assert command.steps
            return tuple(StepQueued(n) for n in command.steps)
        if isinstance(command, Skip | Conclude):
            return drafts.steps_settled(self.state, command)
        if isinstance(command, Await):
            assert command.steps
            return (drafts.run_awaiting_tool(self.state, command, self.now + 50),)
        skips = drafts.steps_skipped(self.state.active_steps, RUN_ENDED)
        return (*skips, drafts.run_ended(self._after(skips), command))

    def _after(self, written: tuple[Fact, ...]) -> RunState:
        state = self.state
        for draft in written:
            state = advance(state, Event.of("run", state.seq + 1, 0.0, draft))
        return state

    def _plan(self, proposal: Proposal) -> tuple[Fact, ...]:
        """One more step of the open proposal, or its end."""
        state, random = self.state, self.random
        current = state.steps_of(proposal)
        place, inner = len(current), proposal.parent is not None
        if random.random() < 0.2:
            return (intent(self._name(), None),)
        if random.random() > self.forgiving and proposal.mode != "fallback":
            return self._reject(outage=random.random() < 0.3)
        if place and current[-1].answers:
            access = []
            for earlier in current:
                access.append([n - proposal.base for n in earlier.access.steps if n >= proposal.base])
            return (drafts.plan_accepted(proposal.number, "", access),)
        if proposal.round > 1 and not inner and not place and not self.insists and random.random() < 0.5:
            return (drafts.plan_accepted(proposal.number, "", []),)
        steps_read = tuple(n for n in range(place) if random.random() < 0.5)
        subtask = random.choice(("ref", ""))
        before = state.previous_answer.step.n if state.previous_answer is not None and not inner else None
        access = Access(random.random() < 0.5 or not subtask, steps_read, before is not None and random.random() < 0.5)
        last = place + 1 >= (proposal.room or 5) or proposal.mode == "fallback" or random.random() < 0.4
        deeper = may_nest(state, proposal.parent) and proposal.mode != "fallback" and random.random() < self.itself
        step = Step(
            CONDUCTOR if deeper else random.choice(POOL),
            subtask,
            access,
            answers=last,
            probability=random.choice((None, 0.5)),
        )
        parent = state.steps[proposal.parent] if proposal.parent is not None else None
        return (drafts.plan_step(proposal, place, drafts.WrittenStep(step, subtask), before, parent),)

    def _reject(self, *, outage: bool) -> tuple[Fact, ...]:
        unmade = self.state.open_proposal
        assert unmade is not None
        skips = drafts.steps_skipped(self.state.steps_of(unmade), "plan_rejected")
        reason = self.random.choice(("no", "run_over_budget" if outage else "never", DRIVER_LOST))
        return (*skips, drafts.plan_rejected(unmade.number, "", [reason], outage=outage))

    def _end(self, call: Call) -> tuple[Fact, ...]:
        """A call's outcome, and what follows for its step; a step that was settled meanwhile is written about too."""
        random, n = self.random, call.step
        good = random.random() < self.forgiving
        usage = Usage(random.randint(5, 50), random.randint(0, 5), random.randint(2, 9), random.randint(0, 2), not good)
        kind = "ok" if good else random.choice(("error", "truncated", "cancelled", "unknown"))
        written = (outcome(call.id, n, usage, usd=random.randint(0, 99), kind=kind),)
        if self.state.ended or n is None:
            return written
        tools = not self.state.admitted.limits.depth  # what can be nested has none of the caller's tools
        if good and tools and random.random() < 0.3 and len(self.state.steps[n].exchanges) < 4:
            return (*written, await_tools(n, call.id, f"{call.id}-a", f"{call.id}-b"))
        return (*written, step_done(n, call.id, random.choice((0, 7)))) if good else written

    def _has_open_call(self, step: StepState) -> bool:
        return any(call.step == step.n for call in self.state.open_calls)

    def _name(self) -> str:
        return f"call-{len(self.events)}"
