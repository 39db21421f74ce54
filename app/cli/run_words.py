"""The words in which a run is explained: what a step may see, what an attempt came to, why it was routed so."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from app.cli.terminal import dollars, excerpt
from app.core.pool.catalog import MILLION

Record = Mapping[str, Any]
"""A run, step, proposal or attempt in the form of the audit trail (`runs/audit.py`)."""
CONDUCTORS: Mapping[str, str] = {
    "model": "a model planned it",
    "fixed": "a fixed shape; no model was asked",
    "random": "a plan drawn by lot; no model was asked",
    "selector": "the selector chose by what ratings have taught it",
    "caller": "the request brought its own plan",
    "fallback": "the fallback worker answers alone",
}
MODES: Mapping[str, str] = {
    "first": "first proposal",
    "repair": "repair, shown why the first was rejected",
    "fallback": "fallback",
}

ERRORS: Mapping[str | None, str] = {
    "no_time": "no worker could have answered in what was left of the run",
    "dead_letter": "one dispatcher after the other fell silent over it, so it was given up; see the runbook",
    "content_erased": "what it should have worked on was erased",
}
ITSELF = "the conductor itself"
ENOUGH = "it took the previous answer for final"
EXCERPT = 300
"""Characters of a text that are shown where not all of it was asked for."""
ERASED = "erased"


def moment(at: float) -> str:
    """A point in time."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def seconds(span: float) -> str:
    """A duration in the precision that matters."""
    return f"{span * 1000:.0f} ms" if span < 1 else f"{span:.1f} s"


def cost(usd: float) -> str:
    """Dollars as the audit trail gives them."""
    return dollars(usd * MILLION)


def tokens(usage: Record) -> str:
    """Input and output, and what is special about them."""
    words = f"{usage['input']:,} + {usage['output']:,} tokens"
    notes = [f"{usage[kind]:,} {kind}" for kind in ("cached", "reasoning") if usage[kind]]
    notes += ["estimated"] if usage["estimated"] else []
    return f"{words} ({', '.join(notes)})" if notes else words


def sees(access: Sequence[str | int]) -> str:
    """An access list in words."""
    steps = [str(entry) for entry in access if entry != "user"]
    parts = ["the conversation"] if "user" in access else []
    parts += [f"step{'s' if len(steps) > 1 else ''} {', '.join(steps)}"] if steps else []
    words = " and ".join(parts) or "nothing but its subtask"
    return words if "user" in access else f"{words}, not the conversation" if steps else words


def attempt(record: Record) -> str:
    """One provider call."""
    if record["outcome"] is None:
        return f"{record['worker']}: in flight, {cost(record['held']['usd'])} reserved"
    outcome = record["outcome"] + (f" ({record['error']})" if record.get("error") else "")
    first = record.get("first_delta_seconds")
    parts = [
        f"{record['worker']}: {outcome}",
        tokens(record["usage"]),
        cost(record["cost_usd"]),
        seconds(record["seconds"]) + (f", first words after {seconds(first)}" if first else ""),
        *([f"ended by {record['finish']}"] if record.get("finish") not in (None, "stop") else []),
        *(["refused to answer"] if record.get("refused") else []),
        *([f"called although it was ejected ({record['despite']})"] if record.get("despite") else []),
        *passed_over(record),
    ]
    return " · ".join(parts)


def exchange(record: Record, *, full: bool) -> str:
    """One use of the caller's tools: what was called, and what came back."""
    said = record.get("said")
    if said is None:
        calls = [f"{one['name']}(erased)" for one in record["calls"]]
    else:
        calls = [f"{one['function']['name']}({one['function']['arguments']})" for one in said["tool_calls"]]
    if record["answered_at"] is None:
        return _cut(", ".join(calls), full) + " → waits for the caller"
    came = record.get("results")
    words = ERASED if came is None else ", ".join(_result(one) for one in came if one["role"] == "tool")
    waited = seconds(record["answered_at"] - record["at"])
    return f"{_cut(', '.join(calls), full)} → {_cut(words, full)} (after {waited})"


def _result(message: Record) -> str:
    text = " ".join(part["text"] if part["type"] == "text" else "an image" for part in message["content"])
    return f"failed: {text}" if message["failed"] else text


def _cut(text: str, full: bool) -> str:
    return text if full else excerpt(text, EXCERPT // 2)


def turns(run: Record) -> str | None:
    """How often the caller came back with results of its tools, and whether it is waited for."""
    many = count(len(run["turns"]), "turn")
    if run["state"] == "awaiting_tool":
        return f"{many}, waits for tool results until {moment(run['turns'][-1]['results_until'])}"
    return many if len(run["turns"]) > 1 else None


def passed_over(record: Record) -> list[str]:
    """Who was not called instead, and why."""
    return [f"{one['worker']} passed over ({one['reason']})" for one in record.get("passed_over", [])]


def error(code: str | None) -> str | None:
    """Why a step failed or was skipped, where the code alone says too little."""
    return f"{code} ({ERRORS[code]})" if code in ERRORS else code


def choice(step: Record) -> str | None:
    """Why this worker: the conductor's probability, and whoever it took over from."""
    parts = []
    if step["probability"] is not None:
        parts.append(f"the conductor chose {step['planned_worker']} with probability {step['probability']:.2f}")
    if step["worker"] != (planned := step["planned_worker"]):
        failed = [one["error"] or one["outcome"] for one in step["attempts"] if one["worker"] == planned]
        passed = [one for call in step["attempts"] for one in call.get("passed_over", []) if one["worker"] == planned]
        why = f" after {', '.join(filter(None, failed))}" if any(failed) else ""
        why = why or (f", which was passed over ({passed[0]['reason']})" if passed else "")
        parts.append(f"{step['worker']} took over from {planned}{why}")
    return "; ".join(parts) or None


def proposal(record: Record) -> str:
    """What was proposed and what became of it."""
    who = [_asked(one) for one in record["attempts"]]
    kind = CONDUCTORS.get(record["conductor"], record["conductor"])
    first = f"round {record['round']}, " if record["round"] > 1 else ""
    parts = [f"{first}{MODES.get(record['mode'], record['mode'])}: {kind}" + (f" ({who[0]})" if who else "")]
    taken = record["round"] > 1 and record["state"] == "accepted" and not record["steps"]
    parts.append("conductor failed" if record["outage"] else ENOUGH if taken else record["state"])
    if record["topology"]:
        parts.append(f"{record['topology']} of {count(len(record['steps']), 'step')}")
    return " · ".join(parts)


def _asked(attempt: Record) -> str:
    """Who was asked for a plan: the conductor's worker, and which version of it where there are several."""
    version = attempt.get("version")
    return f"{attempt['worker']}, version {version}" if version else str(attempt["worker"])


def decision(record: Record) -> list[str]:
    """A selector's choice in plain words: how probable it was, by what it chose, and what else it might have done."""
    others = sorted(record["candidates"].items(), key=lambda one: -one[1])
    said = f"{record['action']}, with probability {record['propensity']:.3g} among {count(len(others), 'arm')}"
    reason = "to explore" if record["explored"] else "as the best"
    reason += "" if record["explore"] else ", because nothing was to be left to chance"
    learned = record["version"].partition("-")[0]
    by = f"posterior {learned}" if learned != "0" else "worker cards alone, before any rating"
    likely = [f"{name} {probability:.3g}" for name, probability in others if name != record["action"]][:3]
    return [f"{said}, {reason}; by {by}", *([f"next likely: {', '.join(likely)}"] if likely else [])]


def why(run: Record) -> list[str]:
    """In one or two sentences: why this run was routed as it was."""
    proposals = [one for one in run["proposals"] if one.get("parent") is None]
    last = proposals[-1] if proposals else None
    if last is None:
        return ["no plan was made"]
    said = [CONDUCTORS.get(last["conductor"], str(last["conductor"]))]
    before = [one for one in proposals[:-1] if one["reasons"]]
    if before:
        reasons = "; ".join(dict.fromkeys(reason for one in before for reason in one["reasons"]))
        said[0] += f", because {len(before)} earlier proposal{'s' if len(before) > 1 else ''} did not do: {reasons}"
    decided = [one["decision"] for one in run["proposals"] if one.get("decision")]
    said += decision(decided[-1]) if decided and last["conductor"] == "selector" else []
    if run["rounds"] > 1:
        said.append(f"{run['rounds']} rounds: each was shown the answer of the one before")
    if inner := {one.get("parent") for one in run["proposals"]} - {None}:
        said.append(f"{count(len(inner), 'step')} taken by the conductor itself, each with a workflow of its own")
    if stopped := run["end"].get("stopped"):
        said.append(f"degraded: the last round came to nothing ({stopped}), so the answer before it stands")
    elif run["degraded"] and not run["preview"]:
        said.append("degraded: a fallback decided, or a step that others counted on was lost")
    return said


def limits(run: Record) -> str:
    """What the run may use."""
    bounds = run["limits"]
    rounds = f" in each of {bounds['rounds']} rounds" if bounds.get("rounds", 1) > 1 else ""
    depth = f", nested {bounds['depth']} deep" if bounds.get("depth") else ""
    return (
        f"{count(bounds['steps'], 'step')}{rounds}{depth}, {bounds['fan_out']} at once, "
        f"{bounds['attempts']} attempts a step, {bounds['output_tokens']:,} output tokens a call, "
        f"{bounds['tokens']:,} tokens, {cost(bounds['usd'])}, "
        f"{seconds(bounds['seconds'])}"
    )


def rating(record: Record) -> str:
    """What somebody, or some rule, said of the answer."""
    by = f"{record['source']} {record['version']}" if record["version"] else record["source"]
    said = [f"{record['score']:g} of 1"] if record["score"] is not None else []
    said += [record["label"]] if record["label"] else []
    return f"{record['kind']}, by {by}: {', '.join(said)} · {moment(record['at'])}"


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
