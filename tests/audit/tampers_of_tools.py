"""Falsifications of what goes on between a run and the caller's tools."""

import orjson

from tests.audit.forgery import Case, ForgedRun, Tamper, add, case, in_first, in_last, put

RESULTS, AWAITING, RESUMED, TOLD = "step.tool_results", "step.awaiting_tool", "run.resumed", "run.awaiting_tool"
STEP, FINISHED = "plan.step", "call.finished"
SCENE = "called_tools"


def without(kind: str) -> Tamper:
    """The first event of a kind is taken out."""
    return lambda run: run.drop(run.all(kind)[0])


def same_id_twice(run: ForgedRun) -> None:
    calls = run.last(AWAITING)["calls"]
    calls[1]["id"] = calls[0]["id"]


def id_of_before(run: ForgedRun) -> None:
    run.last(AWAITING)["calls"][0]["id"] = run.first(AWAITING)["calls"][0]["id"]


def call_of_another(run: ForgedRun) -> None:
    run.last(AWAITING)["call"] = run.first(AWAITING)["call"]


def other_order(run: ForgedRun) -> None:
    run.last(RESULTS)["ids"].reverse()


def too_early(run: ForgedRun) -> None:
    """Results that stand before the turn that they begin."""
    run.move(run.all(RESULTS)[0], run.all(RESUMED)[0])


def rewritten(kind: str, field: str) -> Tamper:
    """A stored message says something else, and its hash is put in everywhere."""

    def tamper(run: ForgedRun) -> None:
        ref = run.first(kind)[field]
        text = run.contents[ref].replace(b"their-1", b"their-2").replace(b"Result ", b"Nothing ")
        assert text != run.contents[ref]
        run.rewrite(ref, text)

    return tamper


def other_tools(run: ForgedRun) -> None:
    """The second turn is said to have had other tools."""
    ref = run.first(RESUMED)["request"]
    task = orjson.loads(run.contents[ref])
    task["toolbox"]["tools"][0]["description"] = "Sends money."
    run.rewrite(ref, orjson.dumps(task))


def done_by_the_asker(run: ForgedRun) -> None:
    run.first("step.done").update(call=run.first(AWAITING)["call"])


def first_deadline(run: ForgedRun) -> None:
    run.row["deadline"] = run.admitted["deadline"] - 1


CASES: tuple[Case, ...] = (
    case("turn-out-of-order", "a turn that never ended", SCENE, without(TOLD)),
    case("turn-out-of-order", "a turn that never began", SCENE, without(RESUMED)),
    case("turn-out-of-order", "another turn", SCENE, in_last(RESUMED, add("turn"))),
    case("turn-out-of-order", "other steps are told of", SCENE, in_first(TOLD, put(steps=[1]))),
    case("tool-calls-wrong", "no leave to call tools", SCENE, in_first(STEP, put(tools=False))),
    case("tool-calls-wrong", "another step's call", SCENE, call_of_another),
    case("tool-calls-wrong", "an id twice", SCENE, same_id_twice),
    case("tool-calls-wrong", "an id of before", SCENE, id_of_before),
    case("tool-results-wrong", "another order", SCENE, other_order),
    case("tool-results-wrong", "results of nobody's", SCENE, in_first(RESULTS, put(ids=["call_x"]))),
    case("tool-results-wrong", "too early", SCENE, too_early),
    case("retry-without-failure", "it did not wait", SCENE, without(RESULTS)),
    case("step-arrow", "results that nobody waits for", SCENE, without(AWAITING)),
    case("done-without-call", "done by the call of tools", SCENE, done_by_the_asker),
    case("bill-wrong", "a dearer turn", SCENE, in_last(TOLD, add("usd"))),
    case("bill-wrong", "another turn's usage", SCENE, lambda run: run.last(TOLD)["visible"].update(output=1)),
    case("deadline-wrong", "a longer turn", SCENE, in_last(RESUMED, add("deadline", 60))),
    case("deadline-wrong", "a longer wait", SCENE, in_first(TOLD, add("until", 3_600))),
    case("request-altered", "other results", SCENE, rewritten(RESULTS, "results")),
    case("request-altered", "other calls", SCENE, rewritten(AWAITING, "said")),
    case("request-altered", "other tools", SCENE, other_tools),
    case("row-projection", "the first turn's deadline", SCENE, first_deadline),
)
