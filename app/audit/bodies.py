"""The fields of each kind of event with their types, defined independently for the auditor."""

from collections.abc import Callable, Mapping

from app.core.run.kinds import TERMINAL, Kind

Test = Callable[[object], bool]
MAX_STEPS = 100_000
"""More steps than any run has: a greater number was altered, and a list of so many would fill the memory."""


def is_text(value: object) -> bool:
    """Return True for a string."""
    return isinstance(value, str)


def is_truth(value: object) -> bool:
    """Return True for a truth value."""
    return isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Return True for a count: an integer that is not negative."""
    return type(value) is int and value >= 0


def is_number(value: object) -> bool:
    """Return True for any number."""
    return type(value) in (int, float)


def is_step(value: object) -> bool:
    """Return True for a number of steps or of one step, or None."""
    return value is None or (isinstance(value, int) and is_whole(value) and value <= MAX_STEPS)


def is_price(value: object) -> bool:
    """Return True for an amount of micro-dollars, or None for a price that is not known."""
    return value is None or is_whole(value)


def is_round(value: object) -> bool:
    """Return True for the number of a round, or a missing field."""
    return value is None or (is_step(value) and value != 0)


def is_mark(value: object) -> bool:
    """Return True for `true`, or a missing field."""
    return value is None or isinstance(value, bool)


def is_texts(value: object) -> bool:
    """Return True for a list of strings."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def is_set(value: object) -> bool:
    """Return True for a list of strings, or a missing field."""
    return value is None or is_texts(value)


def is_word(value: object) -> bool:
    """Return True for a string, or a missing field."""
    return value is None or isinstance(value, str)


def is_steps(value: object) -> bool:
    """Return True for a list of step numbers, or a missing field."""
    return value is None or (isinstance(value, list) and all(is_whole(entry) for entry in value))


def is_access(value: object) -> bool:
    """Return True for an access list: `user` and step numbers, each once."""
    if not isinstance(value, list) or not all(entry == "user" or is_whole(entry) for entry in value):
        return False
    return len(set(value)) == len(value)


def is_usage(value: object) -> bool:
    """Return True for token counts that say whether they are estimated."""
    if not isinstance(value, dict):
        return False
    return all(is_whole(value.get(name)) for name in COUNTS) and is_truth(value.get("estimated"))


def is_limits(value: object) -> bool:
    """Return True for the limits of a run, by name."""
    if not isinstance(value, dict):
        return False
    if not all(is_number(limit) for limit in value.values()) or "seconds" not in value:
        return False
    return all(is_whole(value.get(name)) for name in WHOLE_LIMITS) and value["steps"] <= MAX_STEPS


def is_calls(value: object) -> bool:
    """Return True for tool calls: the ids by which the caller knows them, and the names of the tools."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(call, dict) and is_text(call.get("id")) and is_text(call.get("name")) for call in value)


def is_table(value: object) -> bool:
    """Return True for an object."""
    return isinstance(value, dict)


COUNTS = ("input", "cached", "output", "reasoning")
WHOLE_LIMITS = ("steps", "fan_out", "rounds", "attempts", "output_tokens", "tokens", "usd")
_END: Mapping[str, Test] = {
    "step": is_step,
    "usd": is_whole,
    "usage": is_usage,
    "visible": is_usage,
    "degraded": is_truth,
}
FIELDS: Mapping[Kind, Mapping[str, Test]] = {
    Kind.ADMITTED: {
        "task": is_text,
        "tier": is_text,
        "model": is_text,
        "effort": is_text,
        "limits": is_limits,
        "deadline": is_number,
        "pool": is_texts,
        "excluded": is_table,
        "labels": is_texts,
        "conductor": is_text,
        "catalog": is_text,
        "streams": is_truth,
        "preview": is_truth,
    },
    Kind.CANCEL_ASKED: {},
    Kind.PLAN_OPENED: {
        "proposal": is_whole,
        "base": is_whole,
        "mode": is_text,
        "conductor": is_text,
        "order": is_texts,
        "parent": is_step,
        "round": is_round,
        "room": is_step,
    },
    Kind.PLAN_STEP: {
        "proposal": is_whole,
        "n": is_whole,
        "worker": is_text,
        "subtask": is_text,
        "access": is_access,
        "answers": is_truth,
        "parent": is_step,
        "inherits": is_mark,
        "declassified": is_set,
    },
    Kind.PLAN_ACCEPTED: {"proposal": is_whole, "call": is_text, "steps": is_whole, "topology": is_text},
    Kind.PLAN_REJECTED: {"proposal": is_whole, "call": is_text, "reasons": is_texts, "outage": is_truth},
    Kind.STEP_QUEUED: {"n": is_whole},
    Kind.CALL_INTENDED: {
        "call": is_text,
        "n": is_step,
        "attempt": is_whole,
        "worker": is_text,
        "provider": is_text,
        "model": is_text,
        "access": is_access,
        "request": is_text,
        "bytes": is_whole,
        "max_tokens": is_whole,
        "usd_held": is_whole,
        "tokens_held": is_whole,
        "catalog": is_text,
        "template": is_text,
        "planned_by": is_word,
        "region": is_word,
        "labels": is_set,
        "unseen": is_steps,
        "results": is_mark,
        "origin": is_word,
    },
    Kind.CALL_FINISHED: {
        "call": is_text,
        "n": is_step,
        "outcome": is_text,
        "usage": is_usage,
        "usd": is_whole,
        "output": is_text,
        "finish": is_text,
    },
    Kind.STEP_AWAITING: {"n": is_whole, "call": is_text, "said": is_text, "calls": is_calls},
    Kind.STEP_RESULTS: {"n": is_whole, "results": is_text, "ids": is_texts, "labels": is_set},
    Kind.AWAITING: {
        "turn": is_whole,
        "steps": is_access,
        "until": is_number,
        "usd": is_whole,
        "usage": is_usage,
        "visible": is_usage,
    },
    Kind.RESUMED: {"turn": is_whole, "deadline": is_number, "streams": is_truth, "request": is_text},
    Kind.AWAITING_APPROVAL: {
        "turn": is_whole,
        "proposal": is_whole,
        "digest": is_text,
        "plan": is_text,
        "until": is_number,
        "seconds": is_number,
        "reasons": is_texts,
        "price": is_price,
        "workers": is_table,
        "catalog": is_text,
        "discloses": is_table,
        "usd": is_whole,
    },
    Kind.APPROVED: {
        "proposal": is_whole,
        "digest": is_text,
        "binding": is_text,
        "by": is_text,
        "deadline": is_number,
        "workers": is_table,
        "max_usd": is_whole,
        "reason": is_text,
    },
    Kind.REFUSED: {"proposal": is_whole, "digest": is_text, "by": is_text, "reason": is_text},
    Kind.APPROVAL_EXPIRED: {"proposal": is_whole, "deadline": is_number},
    Kind.STEP_DONE: {
        "n": is_whole,
        "output": is_text,
        "chars": is_whole,
        "finish": is_text,
        "call": is_text,
        "declassified": is_set,
        "labels": is_set,
        "origin_step": is_step,
    },
    Kind.STEP_FAILED: {"n": is_whole, "error": is_text},
    Kind.STEP_SKIPPED: {"n": is_whole, "reason": is_text},
    **{kind: _END for kind in TERMINAL},
}


def wrong_field(kind: Kind, body: object) -> str:
    """Return the first field that is missing or has the wrong type; empty if there is none."""
    if not isinstance(body, dict):
        return "the whole body"
    return next((name for name, test in FIELDS[kind].items() if not test(body.get(name))), "")
