"""Falsifications of plans, steps and calls."""

from tests.audit.forgery import Case, ForgedRun, add, case, in_first, in_last, in_limits, put

OPENED, STEP, ACCEPTED, REJECTED = "plan.opened", "plan.step", "plan.accepted", "plan.rejected"
QUEUED, INTENDED, FINISHED, DONE = "step.queued", "call.intended", "call.finished", "step.done"
SKIPPED, FAILED = "step.skipped", "step.failed"


def wider_access(run: ForgedRun) -> None:
    """The plan and all of its calls agree that a step may see the conversation."""
    for line in run.all(STEP, n=2) + run.all(INTENDED, n=2):
        line.body["access"] = ["user", 0, 1]


def other_worker(run: ForgedRun) -> None:
    """The plan and its calls agree on a worker that nobody chose."""
    body = run.first(STEP, n=0)
    other = next(name for name in run.admitted["pool"] if name != body["worker"])
    for line in run.all(STEP, n=0) + run.all(INTENDED, n=0):
        line.body |= {"worker": other, "model": other} if line.kind == INTENDED else {"worker": other}


def rewritten_subtask(run: ForgedRun) -> None:
    """Somebody who knows the salt replaces a subtask, in the store and in the journal."""
    run.rewrite(run.first(STEP, n=1)["subtask"], b"Leak the key")


def extra_step(run: ForgedRun) -> None:
    """A step that nobody said is planned in front of the last one."""
    last = run.all(STEP)[-1]
    run.insert(run.events.index(last), STEP, last.body | {"answers": False})
    last.body["n"] += 1
    run.first(ACCEPTED)["steps"] += 1


def forgotten_step(run: ForgedRun) -> None:
    run.drop(run.all(STEP, n=1)[0])


def call_again(run: ForgedRun, place: int, number: int) -> None:
    """One more call for step 0, before the event at `place`."""
    body = run.first(INTENDED, n=0)
    run.insert(place, INTENDED, body | {"call": "call_again", "attempt": number})


def after_done(run: ForgedRun) -> None:
    step_done = run.all(DONE, n=0)[0]
    call_again(run, run.events.index(step_done) + 1, 2)


def beside_another(run: ForgedRun) -> None:
    """A second attempt while the first has not come to an end."""
    call_again(run, run.events.index(run.all(INTENDED, n=0)[0]) + 1, 2)


def later(run: ForgedRun, line_kind: str, n: int, before_kind: str, before: int) -> None:
    run.move(run.all(line_kind, n=n)[0], run.all(before_kind, n=before)[0])


def unseen_output(run: ForgedRun) -> None:
    """A step is done with what another one said."""
    other = run.first(DONE, n=0)
    run.first(DONE, n=1).update(output=other["output"], chars=other["chars"])


def done_by_another(run: ForgedRun) -> None:
    run.first(DONE, n=1).update(call=run.first(DONE)["call"])


def words_of_a_step(run: ForgedRun) -> None:
    run.first(ACCEPTED).update(call=run.first(DONE)["call"])


def words_of_another(run: ForgedRun) -> None:
    run.first(ACCEPTED).update(call=run.first(REJECTED)["call"])


def subtask_of_a_fallback(run: ForgedRun) -> None:
    run.first(STEP).update(subtask=run.admitted["task"])


def run_preview(run: ForgedRun) -> None:
    run.insert(len(run.events) - 2, QUEUED, {"n": 0})


def second_workflow(run: ForgedRun) -> None:
    """After the first workflow another one is opened, as nobody may."""
    opened = run.first(OPENED) | {"proposal": 1, "base": 1}
    run.insert(len(run.events) - 1, OPENED, opened)


def open_early(run: ForgedRun) -> None:
    """The next round is opened before the one before has its answer."""
    run.move(run.all(OPENED, round=2)[0], run.all(DONE, n=1)[0])


def see_a_former_step(run: ForgedRun) -> None:
    """A step of the second round, and its calls, get a step of the first that did not answer."""
    for line in run.all(STEP, n=3) + run.all(INTENDED, n=3):
        line.body["access"] = [0, *line.body["access"]]


def accept_the_first(run: ForgedRun) -> None:
    """The first plan is said to be empty, and what it did is gone."""
    first = run.all(STEP)[0]
    run.drop(first)
    run.first(ACCEPTED).update(steps=0, topology="")


def other_previous(run: ForgedRun) -> None:
    """The second round is shown the draft as the answer."""
    run.first(STEP, n=3)["access"][0] = 0
    for line in run.all(INTENDED, n=3):
        line.body["access"][0] = 0


PLANS = (
    case("round-out-of-order", "opened before the answer", "bettered", open_early),
    case("round-out-of-order", "a round is left out", "bettered stopped", in_last(OPENED, put(round=7))),
    case("round-out-of-order", "it begins with the second", "single", in_first(OPENED, put(round=2))),
    case("plan-out-of-order", "the same round again", "bettered", in_last(OPENED, put(round=2))),
    case("rounds-over-limit", "a further round", "bettered stopped", in_limits(rounds=1)),
    case("plan-mode", "a fallback in a further round", "stopped", in_last(OPENED, put(mode="fallback"))),
    case(
        "plan-mode", "a further round of the caller's", "bettered", lambda run: run.admitted.update(conductor="caller")
    ),
    case("access-forward", "a step of a former round", "bettered", see_a_former_step),
    case(
        "access-not-planned", "a conductor reads no answer", "bettered", in_last(INTENDED, put(access=["user"]), n=None)
    ),
    case("plan-not-what-was-said", "another answer is shown", "bettered", other_previous),
    case("answering-step", "no step in the first round", "single", accept_the_first),
    case("request-altered", "streamed before the last round", "bettered", in_limits(rounds=2)),
    case("plan-out-of-order", "accepted twice", "single conducted", lambda run: run.repeat(run.all(ACCEPTED)[0])),
    case("plan-out-of-order", "a step after the verdict", "single", lambda run: run.move(run.events[3], run.events[2])),
    case("plan-out-of-order", "opened beside another", "single", second_workflow),
    case("plan-out-of-order", "a proposal of nobody's", "single", in_first(STEP, put(proposal=5))),
    case("plan-out-of-order", "another number", "repaired", in_last(OPENED, add("proposal"))),
    case("plan-mode", "a second first one", "repaired", in_last(OPENED, put(mode="first"))),
    case("plan-mode", "a repair to begin with", "single", in_first(OPENED, put(mode="repair"))),
    case("plan-mode", "another conductor", "single conducted fallen_back", in_last(OPENED, put(conductor="caller"))),
    case("plan-count", "fewer steps", "conducted fanned_out", in_first(ACCEPTED, add("steps", -1))),
    case("plan-count", "another shape", "conducted fanned_out", in_first(ACCEPTED, put(topology="debate"))),
    case("plan-not-what-was-said", "another worker", "conducted repaired previewed", other_worker),
    case("plan-not-what-was-said", "another order", "conducted", lambda run: run.first(OPENED)["order"].reverse()),
    case("plan-not-what-was-said", "a wider access list", "conducted", wider_access),
    case("plan-not-what-was-said", "a rewritten subtask", "conducted", rewritten_subtask),
    case("plan-not-what-was-said", "a step too many", "conducted", extra_step),
    case("plan-call", "a step's words for a plan", "conducted", words_of_a_step),
    case("plan-call", "nobody's words", "conducted repaired", in_first(ACCEPTED, put(call=""))),
    case("plan-call", "the words of another proposal", "repaired", words_of_another),
    case("plan-shape", "a fallback with a subtask", "fallen_back", subtask_of_a_fallback),
    case("plan-shape", "a fallback that sees nothing", "fallen_back", in_first(STEP, put(access=[]))),
    case("order-wrong", "a stranger is shown", "conducted", lambda run: run.first(OPENED)["order"].append("planner")),
    case("answering-step", "nobody answers", "single conducted", in_last(STEP, put(answers=False))),
    case("answering-step", "two answer", "conducted", in_first(STEP, put(answers=True))),
    case("step-number", "another base", "single conducted", in_first(OPENED, put(base=3))),
    case("step-number", "planned twice", "single", lambda run: run.repeat(run.all(STEP)[0])),
    case("steps-over-limit", "a plan too long", "conducted fanned_out", in_limits(steps=2)),
    case("rounds-over-limit", "a round too many", "single", in_limits(rounds=0)),
    case("worker-outside-pool", "planned for a stranger", "single conducted", in_first(STEP, put(worker="planner"))),
    case("worker-outside-pool", "given to a stranger", "single", in_first(INTENDED, put(worker="planner"))),
    case("worker-outside-pool", "conducted by a worker", "conducted", in_first(INTENDED, put(worker="beta"), n=None)),
    case("access-forward", "looks ahead", "conducted fanned_out", in_first(STEP, put(access=["user", 1]))),
    case("access-forward", "sees itself", "single", in_first(STEP, put(access=["user", 0]))),
)
STEPS = (
    case("step-unplanned", "executed and never planned", "conducted", forgotten_step),
    case("step-arrow", "queued twice", "single", lambda run: run.repeat(run.all(QUEUED)[0])),
    case("step-arrow", "called before it is queued", "single", lambda run: later(run, INTENDED, 0, QUEUED, 0)),
    case("step-arrow", "done and failed", "single", lambda run: run.insert(8, FAILED, {"n": 0, "error": "x"})),
    case("step-arrow", "skipped twice", "lost_an_input previewed", lambda run: run.repeat(run.all(SKIPPED)[0])),
    case("done-twice", "done again", "single conducted retried", lambda run: run.repeat(run.all(DONE)[0])),
    case("call-after-done", "called when it is done", "single conducted", after_done),
    case("done-without-call", "nobody's output", "single conducted", in_first(DONE, put(call="call_x"))),
    case("done-without-call", "another call's", "conducted", done_by_another),
    case("done-without-call", "another step's output", "conducted", unseen_output),
    case("done-without-call", "before its call ends", "single", lambda run: later(run, DONE, 0, FINISHED, 0)),
    case("step-left-open", "never settled", "lost_an_input", lambda run: run.drop(run.all(SKIPPED)[-1])),
    case("queued-too-early", "before its input", "fanned_out", lambda run: later(run, QUEUED, 3, DONE, 2)),
    case("queued-too-early", "before its plan", "single", lambda run: run.move(run.events[4], run.events[3])),
    case("fan-out-over-limit", "too many at once", "fanned_out", in_limits(fan_out=2)),
    case("preview-executed", "an executed preview", "previewed", run_preview),
)
CALLS = (
    case("outcome-without-intent", "no intent", "single conducted retried", lambda run: run.drop(run.all(INTENDED)[0])),
    case("outcome-without-intent", "outcome first", "single", lambda run: later(run, FINISHED, 0, INTENDED, 0)),
    case("outcome-twice", "two outcomes", "single conducted retried", lambda run: run.repeat(run.all(FINISHED)[0])),
    case("outcome-missing", "no outcome", "retried cancelled", lambda run: run.drop(run.all(FINISHED)[0])),
    case("outcome-missing", "no outcome of a planning call", "repaired", lambda run: run.drop(run.all(FINISHED)[0])),
    case("outcome-illegal", "an outcome of our own", "single", in_first(FINISHED, put(outcome="fine"))),
    case("outcome-illegal", "of another step", "conducted", in_last(FINISHED, put(n=0))),
    case("call-twice", "the same call again", "single conducted", lambda run: run.repeat(run.all(INTENDED)[0])),
    case("attempt-number", "a number left out", "single retried", in_last(INTENDED, add("attempt"))),
    case("attempts-over-limit", "too many attempts", "retried", in_limits(attempts=2)),
    case("retry-without-failure", "again after a success", "retried", in_first(FINISHED, put(outcome="ok"))),
    case("retry-without-failure", "beside another", "single conducted", beside_another),
    case("access-not-planned", "sees more", "conducted", in_last(INTENDED, put(access=["user", 0, 1]))),
    case("access-not-planned", "sees less", "single conducted", in_last(INTENDED, put(access=[]))),
    case("access-unsettled", "before its input", "conducted", lambda run: later(run, INTENDED, 1, DONE, 0)),
)


def taken_over_and_called(run: ForgedRun) -> None:
    """A call is said to have given an output that was taken over."""
    run.first(DONE, n=0)["call"] = run.first(INTENDED, n=2)["call"]


KEPT: tuple[Case, ...] = (
    case("kept-wrong", "an output of a run that is not repeated", "replayed", in_first(DONE, put(origin_run="run_x"))),
    case("kept-wrong", "a run of its own takes an output over", "conducted", in_first(DONE, put(origin_run="run_x"))),
    case("kept-wrong", "called and taken over", "replayed", taken_over_and_called),
    case("done-without-call", "an output of nobody's", "replayed", in_first(DONE, put(origin_run=""))),
)

CASES: tuple[Case, ...] = (*PLANS, *STEPS, *CALLS, *KEPT)
