"""Falsifications of what concerns a run as a whole: its form, its end, its money, its row, its texts, its requests."""

import orjson

from tests.audit.forgery import Case, ForgedRun, Tamper, add, case, in_first, in_last, in_limits, in_row, put

ENDS = "single conducted retried cancelled expired over_budget previewed lost_an_input"
ADMITTED, CANCEL_ASKED = "run.admitted", "run.cancel_asked"
INTENDED, FINISHED, DONE, FAILED = "call.intended", "call.finished", "step.done", "step.failed"


def close_the_gap_not(run: ForgedRun) -> None:
    del run.events[len(run.events) // 2]


def swap_lines(run: ForgedRun) -> None:
    run.events[3], run.events[4] = run.events[4], run.events[3]


def same_number(run: ForgedRun) -> None:
    run.events[4].seq = run.events[3].seq


def leave_open(run: ForgedRun) -> None:
    """Leave the run unfinished, its row as well as its journal."""
    run.drop(run.events[-1])
    run.row.update(state="running", ended_at=None, degraded=False, error=None)


def leave_a_call_open(run: ForgedRun) -> None:
    run.drop(run.all(FINISHED)[0])


def lower_the_cap(run: ForgedRun) -> None:
    run.admitted["limits"]["usd"] = run.row["cap_usd"] = 5


def both_costs(run: ForgedRun) -> None:
    """Usage and cost of a call that go together."""
    body = run.first(FINISHED, outcome="ok")
    body["usage"]["output"] += 1_000_000
    body["usd"] += 2_000_000
    run.row["spent_usd"] += 2_000_000
    run.row["spent_tokens"] += 1_000_000


def in_usage(name: str) -> Case:
    return case("bill-wrong", f"{name} of the end", "single conducted", lambda run: run.end[name].update(input=1))


def usage_of(**figures: int) -> Tamper:
    """Other figures for the first call."""
    return lambda run: run.first(FINISHED)["usage"].update(figures)


def ends_as(kind: str) -> Tamper:
    """Another end."""
    return lambda run: setattr(run.events[-1], "kind", kind)


def end_at_once(run: ForgedRun) -> None:
    for event in run.events:
        event.at = run.row["created_at"]


def answer_of_another(run: ForgedRun) -> None:
    run.end["answer"] = run.first(DONE)["output"]


def answer_of_a_former_round(run: ForgedRun) -> None:
    former = run.first(DONE, n=1)
    run.end.update(step=1, answer=former["output"], finish=former["finish"])


def failed_after_all(run: ForgedRun) -> None:
    run.events[-1].kind = "run.failed"
    run.end.update(step=None, error="plan_rejected")


def more_time(run: ForgedRun) -> None:
    run.admitted["deadline"] += 60


def show_the_task_again(run: ForgedRun) -> None:
    run.last(INTENDED, n=None)["rejected"] = run.admitted["task"]


def call_late(run: ForgedRun) -> None:
    run.all(INTENDED)[0].at = run.row["deadline"] + 20


def widen_the_pool(run: ForgedRun) -> None:
    run.admitted["pool"].append("planner")


def cheaper_pool(run: ForgedRun) -> None:
    body = orjson.loads(run.catalogs[run.admitted["catalog"]])
    body["workers"]["alpha"]["price"]["output"] = 1
    run.catalogs[run.admitted["catalog"]] = orjson.dumps(body)


def foreign_text(run: ForgedRun) -> None:
    run.contents[run.admitted["task"]] = b'{"messages": [], "sampling": {"stop": []}, "user": null, "metadata": {}}'


def rewritten_output(run: ForgedRun) -> None:
    """Somebody who knows the salt replaces what a step said, in the store and in the journal."""
    step_done = run.first(DONE, n=0)
    run.rewrite(step_done["output"], b"x" * step_done["chars"])


def rewritten_task(run: ForgedRun) -> None:
    task = orjson.loads(run.contents[run.admitted["task"]])
    task["messages"][0]["parts"][0]["text"] = "What is 2 + 3?"
    run.rewrite(run.admitted["task"], orjson.dumps(task))


def ticket(run: ForgedRun, step: int, claim: int) -> None:
    run.tickets.append({"run": run.row["id"], "step": step, "claim": claim, "until": 0.0, "holder": None})


def unclaimed_work(run: ForgedRun) -> None:
    """A live run whose queued step is nowhere in the outbox."""
    leave_open(run)
    while run.events[-1].kind != "step.queued":
        run.drop(run.events[-1])
    run.row.update(spent_usd=0, spent_tokens=0)


def erase_the_salt(run: ForgedRun) -> None:
    run.row["salt"] = None


FORM = (
    case("seq-gap", "an event is missing", ENDS, close_the_gap_not),
    case("seq-order", "two events stand the other way round", ENDS, swap_lines),
    case("seq-order", "two events have one number", ENDS, same_number),
    case("unknown-kind", "a kind of our own", ENDS, lambda run: setattr(run.events[3], "kind", "plan.approved")),
    case("body-malformed", "a field is missing", "single", lambda run: run.first(INTENDED).pop("usd_held")),
    case("body-malformed", "a text for a figure", "single", in_first(INTENDED, put(usd_held="1"))),
    case("body-malformed", "tokens below nothing", "single", usage_of(output=-1)),
    case("not-admitted", "no admission", ENDS, lambda run: run.drop(run.events[0])),
    case("not-admitted", "admitted again", ENDS, lambda run: run.insert(3, ADMITTED, run.admitted)),
)
ENDINGS = (
    case("terminal-twice", "a second end", ENDS, lambda run: run.repeat(run.events[-1])),
    case("terminal-twice", "another end", "single", lambda run: run.insert(8, "run.failed", run.end | {"step": None})),
    case("after-the-end", "cancelled when it is over", ENDS, lambda run: run.insert(len(run.events), CANCEL_ASKED, {})),
    case("overdue", "forgotten", "single conducted", leave_open),
    case("run-arrow", "planned twice", "single conducted", lambda run: run.repeat(run.all("plan.accepted")[0])),
    case("end-unfounded", "failed with an answer", "single", ends_as("run.failed")),
    case("end-unfounded", "nobody asked for it", "cancelled", lambda run: run.drop(run.all(CANCEL_ASKED)[0])),
    case("end-unfounded", "before its time", "expired", end_at_once),
    case("end-unfounded", "within its budget", "over_budget", in_last(FAILED, put(error="worker_failed"))),
    case("end-unfounded", "succeeded in failing", "lost_an_input", ends_as("run.succeeded")),
    case("answer-wrong", "another step answers", "conducted", lambda run: run.end.update(step=0)),
    case("answer-wrong", "the answer of another step", "conducted", answer_of_another),
    case("answer-wrong", "it fell back", "single conducted", lambda run: run.end.update(fell_back=True)),
    case("answer-wrong", "an answer to a preview", "previewed", lambda run: run.end.update(step=0)),
    case("answer-wrong", "the answer of a former round", "bettered", answer_of_a_former_round),
    case("end-unfounded", "nothing has stopped it", "stopped", lambda run: run.end.pop("stopped")),
    case("end-unfounded", "something has stopped it", "bettered", lambda run: run.end.update(stopped="run_expired")),
    case("end-unfounded", "failed with an answer", "stopped", failed_after_all),
    case("degraded-wrong", "not degraded though stopped", "stopped", lambda run: run.end.update(degraded=False)),
    case("degraded-wrong", "degraded", "single conducted", lambda run: run.end.update(degraded=True)),
    case("degraded-wrong", "not degraded", "fallen_back lost_an_input", lambda run: run.end.update(degraded=False)),
    case("deadline-wrong", "more time", "single", more_time),
)
MONEY = (
    case("over-cap", "a lower cap", "single conducted", lower_the_cap),
    case("reservation-low", "no reservation", "single", in_first(INTENDED, put(usd_held=0, tokens_held=0))),
    case("reservation-low", "less money", "single conducted", in_last(INTENDED, add("usd_held", -1))),
    case("reservation-low", "fewer tokens", "single", in_first(INTENDED, put(tokens_held=1_000, usd_held=2_000))),
    case("cost-wrong", "a cheaper call", "single conducted", in_last(FINISHED, add("usd", -1))),
    case("cost-wrong", "more tokens", "single", usage_of(output=70)),
    case("cost-wrong", "an unknown outcome for less", "retried", in_first(FINISHED, put(outcome="unknown"))),
    case("usage-wrong", "more cached than read", "single", usage_of(cached=99)),
    case("bill-wrong", "a lower bill", "single conducted", lambda run: run.end.update(usd=run.end["usd"] - 1)),
    in_usage("usage"),
    in_usage("visible"),
    case("bill-wrong", "a dearer call", "single conducted", both_costs),
    *(
        case("row-ledger", f"{column} of the row", "single conducted retried cancelled", in_row(add(column)))
        for column in ("cap_usd", "cap_tokens", "held_usd", "held_tokens", "spent_usd", "spent_tokens")
    ),
)
BESIDE = (
    *(
        case("row-projection", f"{name} of the row", "single conducted", in_row(put(**{name: value})))
        for name, value in {
            "state": "failed",
            "topology": "debate",
            "steps": 9,
            "ended_at": 1.0,
            "error": "run_failed",
            "degraded": True,
            "tenant": "other",
            "tier": "other",
            "model": "other",
            "deadline": 1.0,
            "created_at": 1.0,
            "seq": 3,
            "origin_kind": "replay",
            "origin_run": "run_other",
        }.items()
    ),
    case("ticket-left", "a ticket for nobody", "single", lambda run: ticket(run, 9, 0)),
    case("ticket-left", "a ticket of a run that is over", "cancelled", lambda run: ticket(run, 0, 0)),
    case("ticket-left", "a ticket of a step that is done", "single", lambda run: ticket(run, 0, 1)),
    case("ticket-missing", "a step without a ticket", "single", unclaimed_work),
    case("content-altered", "a foreign task", "single conducted", foreign_text),
    case("content-altered", "another salt", "single", in_row(put(salt=b"0123456789abcdef"))),
    case("content-missing", "a text is gone", "single conducted", lambda run: run.contents.popitem()),
    case("content-foreign", "a text of somebody else", "single", lambda run: run.contents.update({"ab" * 32: b"x"})),
    case("content-foreign", "half erased", "single", erase_the_salt),
    case("content-foreign", "erased by its row alone", "single", in_row(put(erased_at=5.0, erased_by="user"))),
    case("chars-wrong", "a longer output", "single conducted", in_first(DONE, add("chars"))),
    case("catalog-missing", "no snapshot", "single conducted", lambda run: run.catalogs.clear()),
    case("catalog-missing", "another pool", "single over_budget", lambda run: run.admitted.update(catalog="0" * 64)),
    case("catalog-altered", "a cheaper pool", "single conducted", cheaper_pool),
)
REQUESTS = (
    case("template-unknown", "a template of nobody's", "single conducted", in_last(INTENDED, put(template=""))),
    case("template-unknown", "that of another round", "bettered", in_last(INTENDED, put(template="plan-1"), n=None)),
    case("request-altered", "another hash", "single conducted repaired", in_last(INTENDED, put(request="0" * 64))),
    case("request-altered", "another size", "single conducted", in_first(INTENDED, add("bytes"))),
    case("request-altered", "another output limit", "single conducted", in_last(INTENDED, add("max_tokens", -1))),
    case("request-altered", "a rewritten output", "conducted", rewritten_output),
    case("request-altered", "a rewritten task", "single streamed conducted", rewritten_task),
    case("request-altered", "streamed or not", "single", lambda run: run.admitted.update(streams=True)),
    case("brief-wrong", "another budget", "conducted repaired", in_last(INTENDED, add("usd_left"), n=None)),
    case("brief-wrong", "no rejected plan", "repaired", show_the_task_again),
    case("worker-changed", "another worker", "single conducted", in_last(INTENDED, put(worker="beta", model="alpha"))),
    case("worker-changed", "another model", "single conducted", in_first(INTENDED, put(model="alpha-2"))),
    case("worker-changed", "a worker of nobody's", "single", in_first(INTENDED, put(worker="delta"))),
    case("clearance", "a label", "single conducted previewed", lambda run: run.admitted.update(labels=["phi"])),
    case("rule", "a label of a rule", "single conducted", lambda run: run.admitted.update(labels=["record"])),
    case("declassified", "an output", "single conducted", in_first(DONE, put(declassified=["phi"]))),
    case("declassified", "a subtask", "conducted", in_first("plan.step", put(declassified=["phi"]))),
    case("declassified", "the caller's subtask", "debated", in_first("plan.step", put(declassified=["phi"]))),
    case("pool-outside-tier", "the conductor in the pool", "single", widen_the_pool),
    case("limits-widened", "more steps", "single conducted", in_limits(steps=50)),
    case("limits-widened", "more attempts", "single", in_limits(attempts=50)),
    case("limits-widened", "longer for tool results", "single", in_limits(tool_wait=86_400.0)),
    case("output-over-limit", "more output", "single", in_first(INTENDED, put(max_tokens=1_001))),
    case("call-after-deadline", "too late", "single", call_late),
)
CASES = (*FORM, *ENDINGS, *MONEY, *BESIDE, *REQUESTS)
