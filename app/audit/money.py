"""Rules about money and tokens: reserved before, settled after, and the same sum wherever it is recorded (D7, N-7)."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.audit.account import Account, Call, Fact
from app.audit.bodies import COUNTS
from app.audit.report import Violation
from app.core.run.kinds import Kind

NOTHING: Mapping[str, Any] = {"input": 0, "cached": 0, "output": 0, "reasoning": 0, "estimated": False}


def money(run: Account) -> Iterator[Violation]:
    """Apply all rules of this module."""
    for call in run.calls.values():
        yield from _reservation(run, call)
        yield from _cost(run, call)
    yield from _caps(run)
    yield from amounts(run)
    yield from _turns(run)
    if run.end is not None:
        yield from _bill(run, run.end)


def _reservation(run: Account, call: Call) -> Iterator[Violation]:
    body = call.intent.body
    if body["tokens_held"] < body["max_tokens"]:
        yield run.says("reservation-low", call.intent.seq, f"{call.id} may write more than is held for it")
    wanted = body.get("wanted_tokens", 0)
    if wanted and not min(run.limits["floor_tokens"], wanted) <= body["max_tokens"] < wanted:
        yield run.says("cut-wrong", call.intent.seq, f"{call.id} is cut from {wanted} tokens to {body['max_tokens']}")


def _cost(run: Account, call: Call) -> Iterator[Violation]:
    if call.outcome is None:
        return
    body, held = call.outcome.body, call.intent.body
    usage = body["usage"]
    if usage["cached"] > usage["input"] or usage["reasoning"] > usage["output"]:
        yield run.says("usage-wrong", call.outcome.seq, f"{call.id}: a part is larger than the whole")
    if call.went == "unknown" and (body["usd"], tokens(usage)) != (held["usd_held"], held["tokens_held"]):
        yield run.says("cost-wrong", call.outcome.seq, f"{call.id} is unknown, so what was held counts as spent")


def tokens(usage: Mapping[str, Any]) -> int:
    """Return input plus output tokens."""
    return int(usage["input"] + usage["output"])


def _caps(run: Account) -> Iterator[Violation]:
    """Held and spent stay within the caps along the journal. Only an intent may be refused, so only an intent can
    exceed a cap (I-7)."""
    caps = (run.limits["usd"], run.limits["tokens"])
    held, spent = [0, 0], [0, 0]
    open_calls: dict[str, tuple[int, int]] = {}
    for fact in run.of(Kind.CALL_INTENDED, Kind.CALL_FINISHED, Kind.APPROVED):
        body = fact.body
        if fact.kind is Kind.APPROVED:
            caps = (body["max_usd"], caps[1])
            continue
        if fact.kind is Kind.CALL_FINISHED:
            given = open_calls.pop(body["call"], None)
            if given is not None:
                held = [held[0] - given[0], held[1] - given[1]]
                spent = [spent[0] + body["usd"], spent[1] + tokens(body["usage"])]
            continue
        open_calls[body["call"]] = asked = (body["usd_held"], body["tokens_held"])
        held = [held[0] + asked[0], held[1] + asked[1]]
        for name, cap, now, before in zip(("micro-dollars", "tokens"), caps, held, spent, strict=True):
            if now + before > cap:
                yield run.says("over-cap", fact.seq, f"{before} {name} spent and {now} held, the cap is {cap}")


def amounts(run: Account) -> Iterator[Violation]:
    """The run's row has the amounts that are held for open calls and were spent on the others."""
    row, made = run.record.row, run.calls.values()
    held = [call.intent.body for call in made if call.outcome is None]
    spent = [call.outcome.body for call in made if call.outcome is not None]
    due = {
        "cap_usd": ([run.limits["usd"], *[approval.body["max_usd"] for approval in run.of(Kind.APPROVED)]])[-1],
        "cap_tokens": run.limits["tokens"],
        "held_usd": sum(body["usd_held"] for body in held),
        "held_tokens": sum(body["tokens_held"] for body in held),
        "spent_usd": sum(body["usd"] for body in spent),
        "spent_tokens": sum(tokens(body["usage"]) for body in spent),
    }
    for column, wanted in due.items():
        if row[column] != wanted:
            yield run.says("row-ledger", 0, f"{column} is {row[column]}, the journal has {wanted}")


def _bill(run: Account, end: Fact) -> Iterator[Violation]:
    """The bill of the terminal event is the sum over the calls that had ended by then."""
    settled, last = _settled(run, end), run.turns[-1]
    latest = [call for call in settled if run.turn_at(call.intent.seq) is last]
    step = run.steps.get(end.body["step"]) if end.body["step"] is not None else None
    answered = ""
    if step is not None and step.done is not None:
        answered = step.done.body["call"]
    yield from _compared(run, end, settled, _visible(latest, {answered}))


def _turns(run: Account) -> Iterator[Violation]:
    """The bill of a turn that ends with tool calls covers this turn alone."""
    for turn in run.turns:
        if turn.awaiting is None:
            continue
        made = [call for call in _settled(run, turn.awaiting) if run.turn_at(call.intent.seq) is turn]
        asked: set[str] = set()
        for n in turn.awaiting.body["steps"]:
            exchanges = run.steps[n].exchanges if n in run.steps else []
            times = [
                exchange.awaiting
                for exchange in exchanges
                if turn.began.seq < exchange.awaiting.seq < turn.awaiting.seq
            ]
            asked |= {str(awaiting.body["call"]) for awaiting in times}
        yield from _compared(run, turn.awaiting, made, _visible(made, asked))


def _settled(run: Account, end: Fact) -> list[Call]:
    """Return the calls that had their outcome by then."""
    return [call for call in run.calls.values() if call.outcome is not None and call.outcome.seq < end.seq]


def _compared(run: Account, end: Fact, calls: list[Call], visible: Mapping[str, Any]) -> Iterator[Violation]:
    bill, total = end.body, _sum([call.outcomes[0].body["usage"] for call in calls])
    if run.unread and end is run.end:
        total, visible = {**NOTHING, "input": tokens(total), "estimated": True}, NOTHING
    usd = sum(call.outcomes[0].body["usd"] for call in calls)
    if bill["usd"] != usd:
        yield run.says("bill-wrong", end.seq, f"{bill['usd']} micro-dollars, the calls cost {usd}")
    if any(bill["usage"][name] != total[name] for name in (*COUNTS, "estimated")):
        yield run.says("bill-wrong", end.seq, "its usage is not the sum over the calls")
    if any(bill["visible"][name] != visible[name] for name in (*COUNTS, "estimated")):
        yield run.says("bill-wrong", end.seq, "its visible usage is not that of the first and of the answering call")


def _sum(usages: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    whole: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    for usage in usages:
        for name in COUNTS:
            whole[name] += usage[name]
    whole["estimated"] = any(usage["estimated"] for usage in usages)
    return whole


def _visible(made: list[Call], speakers: set[str]) -> Mapping[str, Any]:
    """Return the visible usage of one turn: the input of the first successful call that saw the conversation, and the
    output of the calls whose text or tool calls the caller gets."""
    fine = [call for call in made if call.went == "ok"]
    saw = [call for call in fine if call.step is not None and "user" in call.intent.body["access"]] or fine
    first = saw[0].outcomes[0].body["usage"] if saw else NOTHING
    said = _sum([call.outcomes[0].body["usage"] for call in made if call.id in speakers])
    whole = _sum([call.outcomes[0].body["usage"] for call in made])
    return {
        "input": first["input"],
        "cached": first["cached"],
        "output": said["output"],
        "reasoning": said["reasoning"],
        "estimated": whole["estimated"],
    }
