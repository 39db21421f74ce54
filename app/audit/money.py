"""Rules about money and tokens: reserved before, settled after, and the same sum wherever it is recorded (D7, N-7)."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.audit.audited_run import AuditedRun, Call, Event
from app.audit.bodies import COUNTS
from app.audit.report import Violation
from app.core.run.kinds import Kind

NO_USAGE: Mapping[str, Any] = {"input": 0, "cached": 0, "output": 0, "reasoning": 0, "estimated": False}


def check_money(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    for call in run.calls.values():
        yield from _check_reservation(run, call)
        yield from _check_cost(run, call)
    yield from _check_caps(run)
    yield from check_row_amounts(run)
    yield from _check_bills_of_turns(run)
    if run.end is not None:
        yield from _check_bill_of_run(run, run.end)


def _check_reservation(run: AuditedRun, call: Call) -> Iterator[Violation]:
    body = call.intent.body
    if body["tokens_held"] < body["max_tokens"]:
        yield run.violation("reservation-low", call.intent.seq, f"{call.id} may write more than is held for it")
    wanted_tokens = body.get("wanted_tokens", 0)
    if wanted_tokens and not min(run.limits["floor_tokens"], wanted_tokens) <= body["max_tokens"] < wanted_tokens:
        yield run.violation(
            "cut-wrong", call.intent.seq, f"{call.id} is cut from {wanted_tokens} tokens to {body['max_tokens']}"
        )


def _check_cost(run: AuditedRun, call: Call) -> Iterator[Violation]:
    if call.outcome is None:
        return
    body, intent = call.outcome.body, call.intent.body
    usage = body["usage"]
    if usage["cached"] > usage["input"] or usage["reasoning"] > usage["output"]:
        yield run.violation("usage-wrong", call.outcome.seq, f"{call.id}: a part is larger than the whole")
    reservation = (intent["usd_held"], intent["tokens_held"])
    if call.outcome_kind == "unknown" and (body["usd"], token_sum(usage)) != reservation:
        yield run.violation("cost-wrong", call.outcome.seq, f"{call.id} is unknown, so what was held counts as spent")


def token_sum(usage: Mapping[str, Any]) -> int:
    """Return input plus output tokens."""
    return int(usage["input"] + usage["output"])


def _check_caps(run: AuditedRun) -> Iterator[Violation]:
    """Held and spent stay within the caps along the journal. Only an intent may be refused, so only an intent can
    exceed a cap (I-7)."""
    units = ("micro-dollars", "tokens")
    caps = (run.limits["usd"], run.limits["tokens"])
    reserved_totals, spent_totals = [0, 0], [0, 0]
    open_calls: dict[str, tuple[int, int]] = {}
    for event in run.events_of(Kind.CALL_INTENDED, Kind.CALL_FINISHED, Kind.APPROVED):
        body = event.body
        if event.kind is Kind.APPROVED:
            caps = (body["max_usd"], caps[1])
            continue
        if event.kind is Kind.CALL_FINISHED:
            reservation = open_calls.pop(body["call"], None)
            if reservation is not None:
                reserved_totals = [reserved_totals[0] - reservation[0], reserved_totals[1] - reservation[1]]
                spent_totals = [spent_totals[0] + body["usd"], spent_totals[1] + token_sum(body["usage"])]
            continue
        reservation = (body["usd_held"], body["tokens_held"])
        open_calls[body["call"]] = reservation
        reserved_totals = [reserved_totals[0] + reservation[0], reserved_totals[1] + reservation[1]]
        for unit, cap, now_held, now_spent in zip(units, caps, reserved_totals, spent_totals, strict=True):
            if now_held + now_spent > cap:
                fault = f"{now_spent} {unit} spent and {now_held} held, the cap is {cap}"
                yield run.violation("over-cap", event.seq, fault)


def check_row_amounts(run: AuditedRun) -> Iterator[Violation]:
    """The run's row has the amounts that are held for open calls and were spent on the others."""
    expected = {
        "cap_usd": run.limits["usd"],
        "cap_tokens": run.limits["tokens"],
        "held_usd": 0,
        "held_tokens": 0,
        "spent_usd": 0,
        "spent_tokens": 0,
    }
    for approval in run.events_of(Kind.APPROVED):
        expected["cap_usd"] = approval.body["max_usd"]
    for call in run.calls.values():
        if call.outcome is None:
            expected["held_usd"] += call.intent.body["usd_held"]
            expected["held_tokens"] += call.intent.body["tokens_held"]
        else:
            expected["spent_usd"] += call.outcome.body["usd"]
            expected["spent_tokens"] += token_sum(call.outcome.body["usage"])
    for column, amount in expected.items():
        stored = run.record.row[column]
        if stored != amount:
            yield run.violation("row-ledger", 0, f"{column} is {stored}, the journal has {amount}")


def _check_bill_of_run(run: AuditedRun, end: Event) -> Iterator[Violation]:
    """The bill of the terminal event is the sum over the calls that had ended by then."""
    settled, last = _settled_calls(run, end), run.turns[-1]
    latest = [call for call in settled if run.turn_at(call.intent.seq) is last]
    step = run.steps.get(end.body["step"]) if end.body["step"] is not None else None
    answered = ""
    if step is not None and step.completion is not None:
        answered = step.completion.body["call"]
    yield from _check_bill(run, end, settled, _visible_usage(latest, {answered}))


def _check_bills_of_turns(run: AuditedRun) -> Iterator[Violation]:
    """The bill of a turn that ends with tool calls covers this turn alone."""
    for turn in run.turns:
        if turn.tool_calls is None:
            continue
        calls = [call for call in _settled_calls(run, turn.tool_calls) if run.turn_at(call.intent.seq) is turn]
        speakers: set[str] = set()
        for n in turn.tool_calls.body["steps"]:
            if n not in run.steps:
                continue
            for tool_use in run.steps[n].tool_uses:
                if turn.start.seq < tool_use.calls.seq < turn.tool_calls.seq:
                    speakers.add(str(tool_use.calls.body["call"]))
        yield from _check_bill(run, turn.tool_calls, calls, _visible_usage(calls, speakers))


def _settled_calls(run: AuditedRun, end: Event) -> list[Call]:
    """Return the calls that had their outcome by then."""
    return [call for call in run.calls.values() if call.outcome is not None and call.outcome.seq < end.seq]


def _check_bill(run: AuditedRun, end: Event, calls: list[Call], visible: Mapping[str, Any]) -> Iterator[Violation]:
    bill, total = end.body, _sum_of_usages([call.outcomes[0].body["usage"] for call in calls])
    if run.was_ended_unread and end is run.end:
        total, visible = {**NO_USAGE, "input": token_sum(total), "estimated": True}, NO_USAGE
    usd = sum(call.outcomes[0].body["usd"] for call in calls)
    if bill["usd"] != usd:
        yield run.violation("bill-wrong", end.seq, f"{bill['usd']} micro-dollars, the calls cost {usd}")
    if any(bill["usage"][name] != total[name] for name in (*COUNTS, "estimated")):
        yield run.violation("bill-wrong", end.seq, "its usage is not the sum over the calls")
    if any(bill["visible"][name] != visible[name] for name in (*COUNTS, "estimated")):
        yield run.violation(
            "bill-wrong", end.seq, "its visible usage is not that of the first and of the answering call"
        )


def _sum_of_usages(usages: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    whole: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    for usage in usages:
        for name in COUNTS:
            whole[name] += usage[name]
    whole["estimated"] = any(usage["estimated"] for usage in usages)
    return whole


def _visible_usage(calls: list[Call], speakers: set[str]) -> Mapping[str, Any]:
    """Return the visible usage of one turn: the input of the first successful call that saw the conversation, and the
    output of the calls whose text or tool calls the caller gets."""
    successful = [call for call in calls if call.outcome_kind == "ok"]
    readers = [call for call in successful if call.step is not None and "user" in call.intent.body["access"]]
    first: Mapping[str, Any] = NO_USAGE
    if successful:
        first_call = readers[0] if readers else successful[0]
        first = first_call.outcomes[0].body["usage"]
    answer = _sum_of_usages([call.outcomes[0].body["usage"] for call in calls if call.id in speakers])
    whole = _sum_of_usages([call.outcomes[0].body["usage"] for call in calls])
    return {
        "input": first["input"],
        "cached": first["cached"],
        "output": answer["output"],
        "reasoning": answer["reasoning"],
        "estimated": whole["estimated"],
    }
