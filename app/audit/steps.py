"""Rules about the execution of steps: queued when their inputs are done, done at most once, settled at the end."""

from collections.abc import Iterator, Mapping
from itertools import chain

from app.audit.account import Account, Fact, Step
from app.audit.report import Violation
from app.core.run.kinds import Kind


def steps(run: Account) -> Iterator[Violation]:
    """Apply all rules of this module."""
    for step in run.steps.values():
        yield from _arrows(run, step)
        yield from _settled_once(run, step)
        yield from _done(run, step)
        yield from _queued(run, step)
        if run.end is not None and step.settled is None and not run.unread:
            yield run.says("step-left-open", run.end.seq, f"step {step.n} is not settled")
    yield from _fan_out(run)


OPEN = frozenset({"waiting", "queued", "running", "awaiting_tool"})
CALLABLE = frozenset({"queued", "running"})


def _arrows(run: Account, step: Step) -> Iterator[Violation]:
    """A step goes waiting -> queued -> running <-> awaiting_tool; facts about a settled step are ignored."""
    state = "waiting"
    for fact in step.facts:
        if fact.kind is Kind.CALL_INTENDED and state in ("done", "failed"):
            yield run.says("call-after-done", fact.seq, f"a call is intended for step {step.n}, which is {state}")
        if fact.kind in EXECUTED if step.opens else fact.kind is Kind.PLAN_OPENED:
            whose = "the conductor's" if step.opens else "a worker's"
            yield run.says("step-arrow", fact.seq, f"step {step.n} is {whose}, and {fact.kind.value} is not for it")
        to, since = MOVES[fact.kind]
        if state in OPEN:
            taken = fact.kind is Kind.STEP_DONE and fact.body.get("origin_run")
            if state not in (since if not taken else {"waiting"}):
                yield run.says("step-arrow", fact.seq, f"step {step.n} goes from {state} to {to}")
            state = to


MOVES: Mapping[Kind, tuple[str, frozenset[str]]] = {
    Kind.PLAN_OPENED: ("running", frozenset({"waiting", "running"})),
    Kind.STEP_QUEUED: ("queued", frozenset({"waiting"})),
    Kind.CALL_INTENDED: ("running", CALLABLE),
    Kind.STEP_AWAITING: ("awaiting_tool", frozenset({"running"})),
    Kind.STEP_RESULTS: ("running", frozenset({"awaiting_tool"})),
    Kind.STEP_DONE: ("done", frozenset({"running"})),
    # and from waiting, where a replay takes its output over: see `replays.py`
    Kind.STEP_FAILED: ("failed", OPEN),
    Kind.STEP_SKIPPED: ("skipped", OPEN),
}
"""The state to which each fact leads, and the states from which it may lead there."""
EXECUTED = frozenset({Kind.STEP_QUEUED, Kind.CALL_INTENDED})
"""Facts about steps that a worker executes; for the others a plan is opened."""


def _settled_once(run: Account, step: Step) -> Iterator[Violation]:
    """The execution of a step settles it once, and so does the run's owner; neither may know of the other."""
    theirs = [fact for fact in step.facts if fact.kind in (Kind.STEP_DONE, Kind.STEP_FAILED)]
    ours = [fact for fact in step.facts if fact.kind is Kind.STEP_SKIPPED]
    for fact in theirs[1:]:
        rule = "step-arrow"
        if fact.kind is theirs[0].kind is Kind.STEP_DONE:
            rule = "done-twice"
        yield run.says(rule, fact.seq, f"step {step.n} is settled by its dispatcher at {theirs[0].seq} already")
    for fact in ours[1:]:
        yield run.says("step-arrow", fact.seq, f"step {step.n} is skipped at {ours[0].seq} already")


def _done(run: Account, step: Step) -> Iterator[Violation]:
    """A step is done by a successful call of its own, with the output of that call."""
    for fact in step.facts:
        if fact.kind is not Kind.STEP_DONE or fact.body.get("origin_run"):
            continue
        if step.opens:
            yield from _concluded(run, step, fact)
            continue
        call = run.calls.get(fact.body["call"])
        if call is None or call.step != step.n or call.went != "ok" or call.outcomes[0].seq > fact.seq:
            yield run.says("done-without-call", fact.seq, f"step {step.n} is done by no successful call of its own")
            continue
        said = call.outcomes[0].body
        for name in ("output", "finish"):
            if fact.body[name] != said[name]:
                yield run.says("done-without-call", fact.seq, f"step {step.n}: {name} is not that of {call.id}")


def _concluded(run: Account, step: Step, fact: Fact) -> Iterator[Violation]:
    """A step of the conductor is done by the workflow that was opened for it, once all of that is settled."""
    tries = run.tries(step.n)
    answer = tries[-1].answer if tries else None
    if answer is None or answer.done is None or not all(nested.settled_by(fact.seq) for nested in tries[-1].steps):
        yield run.says("done-without-call", fact.seq, f"what is nested in step {step.n} has not answered")
    elif any(fact.body[name] != answer.done.body[name] for name in ("output", "chars", "finish", "call")):
        yield run.says("done-without-call", fact.seq, f"step {step.n} does not say what step {answer.n} said")


def _queued(run: Account, step: Step) -> Iterator[Violation]:
    for fact in step.facts:
        if fact.kind is not Kind.STEP_QUEUED:
            continue
        if run.admitted["preview"]:
            yield run.says("preview-executed", fact.seq, f"step {step.n} of a preview is queued")
        late = [n for n in step.inputs if n in run.steps and not run.steps[n].settled_by(fact.seq)]
        if late:
            yield run.says("queued-too-early", fact.seq, f"step {step.n} is queued before step {late[0]} is settled")
        proposal = run.proposals[step.plan.body["proposal"]]
        accepted = proposal.accepted
        if (accepted is None or accepted.seq > fact.seq) and (
            step.plan.body["answers"] or proposal.opened.body.get("waits")
        ):
            yield run.says("queued-too-early", fact.seq, f"step {step.n} waits for its plan, which is not accepted yet")


def _fan_out(run: Account) -> Iterator[Violation]:
    """The steps that are queued and not settled stay within the limit, counted by the order of the journal."""
    most = run.limits["fan_out"]
    for number in sorted({proposal.round for proposal in run.proposals}):
        under_way = 0
        facts: list[Fact] = []
        for proposal in run.proposals:
            if proposal.round == number:
                facts += chain.from_iterable(map(_bounds, proposal.steps))
        for fact in sorted(facts, key=lambda fact: fact.seq):
            under_way += 1 if fact.kind is Kind.STEP_QUEUED else -1
            if fact.kind is Kind.STEP_QUEUED and under_way > most:
                yield run.says("fan-out-over-limit", fact.seq, f"{under_way} steps are under way, at most {most}")


def _bounds(step: Step) -> Iterator[Fact]:
    """Yield the fact that first queued a step, and the one that settled it after that."""
    queued = [fact for fact in step.facts if fact.kind is Kind.STEP_QUEUED]
    if not queued:
        return
    yield queued[0]
    if step.settled is not None and step.settled.seq > queued[0].seq:
        yield step.settled
