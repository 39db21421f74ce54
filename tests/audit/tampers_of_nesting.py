"""Falsifications of workflows inside steps. In the scene `nested` step 1 is the conductor's, whose plan holds the steps
3 and 4, and step 3 is its own again, with step 5 inside."""

from tests.audit.forgery import ForgedRun, Tamper, case, in_first, in_last, in_limits, put

OPENED, PLANNED, DONE, INTENDED, QUEUED = "plan.opened", "plan.step", "step.done", "call.intended", "step.queued"


def see(n: int, *more: str | int) -> Tamper:
    """Let a step see more than it may, its calls included."""

    def tamper(run: ForgedRun) -> None:
        for line in (*run.all(PLANNED, n=n), *run.all(INTENDED, n=n)):
            line.body["access"] = [*more, *line.body["access"]]

    return tamper


def see_instead(n: int, *access: str | int) -> Tamper:
    """Let a step see these."""

    def tamper(run: ForgedRun) -> None:
        for line in (*run.all(PLANNED, n=n), *run.all(INTENDED, n=n)):
            line.body["access"] = list(access)

    return tamper


def opened_early(run: ForgedRun) -> None:
    """Before what its step is to see is there."""
    run.move(run.all(OPENED, parent=1)[0], before=run.all(DONE, n=0)[0])


def opened_again(run: ForgedRun) -> None:
    """Once more for a step whose workflow has answered."""
    line = run.all(OPENED, parent=3)[0]
    run.insert(len(run.events) - 1, OPENED, line.body | {"proposal": 4, "base": 6})


def concluded_early(run: ForgedRun) -> None:
    """While a step inside is still at work."""
    run.move(run.all(DONE, n=1)[0], before=run.all(DONE, n=4)[0])


def queued_itself(run: ForgedRun) -> None:
    """Queue a step that the conductor itself takes, as if a worker were to execute it."""
    place = run.events.index(run.all(OPENED, parent=1)[0])
    run.insert(place, QUEUED, {"n": 1})


def shown_more(run: ForgedRun) -> None:
    """The conductor is shown the conversation for a step that may not see it."""
    run.all(INTENDED, n=None)[1].body["access"].insert(0, "user")


CASES = (
    case("nested-wrong", "for a worker's step", "nested", in_first(OPENED, put(parent=0), parent=1)),
    case("nested-wrong", "before its inputs are there", "nested", opened_early),
    case("nested-wrong", "once more", "nested", opened_again),
    case("nested-wrong", "of another round", "nested", in_last(OPENED, put(round=2), parent=3)),
    case("nested-wrong", "inside nothing", "conducted", in_first(PLANNED, put(inherits=True))),
    case("access-widened", "the conversation", "nested", see(4, "user")),
    case("access-widened", "a step of the plan around it", "nested", see(4, 2)),
    case("access-widened", "such a step behind the view", "nested", see_instead(4, 0, 3, 2)),
    case("access-widened", "another view than it inherits", "nested", see_instead(4, 3)),
    case("access-widened", "in the view of another step", "nested", in_first(PLANNED, put(parent=2), n=4)),
    case("steps-over-limit", "more room", "nested", in_last(OPENED, put(room=4), parent=1)),
    case("steps-over-limit", "no room left", "nested", in_limits(steps=3)),
    case("order-wrong", "too deep", "nested", in_limits(depth=1)),
    case("worker-outside-pool", "not at all", "nested alone_inside", in_limits(depth=0)),
    case("limits-widened", "deeper than the tier", "nested", in_limits(depth=3)),
    case("step-arrow", "a ticket for it", "nested", queued_itself),
    case("step-arrow", "a worker's call for it", "nested", in_last(INTENDED, put(n=1), n=2)),
    case("done-without-call", "another answer", "nested", in_first(DONE, put(chars=99), n=1)),
    case("done-without-call", "while it is at work", "nested", concluded_early),
    case("access-not-planned", "a conductor that sees more", "nested", shown_more),
    case("plan-mode", "mended twice", "nested", in_first(OPENED, put(mode="repair"), parent=1)),
    case("plan-shape", "a fallback with a subtask", "alone_inside", in_last(PLANNED, put(access=[]), n=1)),
    case("degraded-wrong", "stood in for inside", "alone_inside", lambda run: run.end.update(degraded=False)),
    case("template-unknown", "as if inside nothing", "nested", in_last(INTENDED, put(template="step-1"), n=5)),
    case("request-altered", "another view", "nested", in_first(PLANNED, put(subtask=""), n=1)),
    case("plan-not-what-was-said", "nothing of the view", "nested", in_first(PLANNED, put(inherits=False), n=4)),
)
