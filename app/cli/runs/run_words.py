"""The words in which a run is explained: the access list of a step, the outcome of an attempt, the reason of a
choice."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.cli.terminal import clean, count, dollars, duration, excerpt, moment
from app.core.pool.catalog import LIMITS, MILLION, Limit
from app.core.run.kinds import DRIVER_LOST
from app.core.run.state import FALLBACK

Record = Mapping[str, Any]
"""A run, step, proposal or attempt in the form of the audit trail (`runs/audit.py`)."""
CONDUCTORS: Mapping[str, str] = {
    "model": "a model planned it",
    "fixed": "a fixed shape; no model was asked",
    "random": "a plan drawn at random; no model was asked",
    "selector": "the selector chose by what it has learned from ratings",
    "caller": "the request brought its own plan",
    "fallback": "the fallback worker answers alone",
    "replay": "the plan of the run that it repeats, or one that was given for the replay",
}
MODES: Mapping[str, str] = {
    "first": "first proposal",
    "repair": "repair, shown why the first was rejected",
    "fallback": "fallback",
}

ERRORS: Mapping[str | None, str] = {
    "no_time": "no worker could have answered in the time that was left",
    "dead_letter": "several engines in a row stopped while they worked on it, so it was given up; "
    "see BatonDeadLetter in deploy/docs/alerts.md",
    "content_erased": "its input was erased",
    "internal_error": "a bug of Baton's ended it; the engine's log says where",
}
ROUND_FAILED = "degraded: the last round failed ({stopped}), so the previous answer is used"
PLAN_UNFINISHED = "degraded: the run could not finish its plan ({stopped}), so the best answer until then is used"
CONDUCTOR_ITSELF = "the conductor itself"
ANSWER_ACCEPTED = "it accepted the previous answer"
EXCERPT_CHARS = 300
"""Characters of a text that are shown without `--full`."""
ERASED = "erased"


def key(run: Record) -> str:
    """Return the id of a run's API key, after its name where that is known."""
    name = run.get("key_name")
    if not name:
        return clean(str(run["key"]))
    return clean(f"{name} ({run['key']})")


def cost(usd: float) -> str:
    """Return the dollars of the audit trail in words."""
    return dollars(usd * MILLION)


def estimate(forecast: Record) -> str:
    """Return the likely cost and time of a plan with their spread, from its estimate as the API has it."""
    of_cost, of_time = forecast["cost_usd"], forecast["seconds"]
    low, middle, high = [cost(of_cost[name]) for name in ("p10", "p50", "p90")]
    shortest, likely, longest = [duration(of_time[name]) for name in ("p10", "p50", "p90")]
    unpriced = ""
    if forecast["unpriced"]:
        unpriced = f", without {', '.join(forecast['unpriced'])}, whose price is not known"
    return (
        f"{middle} ({low} to {high}) and {likely} ({shortest} to {longest}) to execute, from {_basis(forecast)}; "
        f"at most {cost(of_cost['worst'])}{unpriced}"
    )


def _basis(forecast: Record) -> str:
    """Return what an estimate rests on."""
    if forecast["basis"] == "prices":
        return "prices and usual sizes"
    runs = count(forecast["runs"], "past run")
    unknown = [step["worker"] for step in forecast["steps"] if step["basis"] == "prices"]
    if not unknown:
        return runs
    return f"{runs}, for {', '.join(dict.fromkeys(unknown))} from prices and usual sizes"


def tokens(usage: Record) -> str:
    """Return input and output tokens, with cached, reasoning and estimated ones noted."""
    words = f"{usage['input']:,} + {usage['output']:,} tokens"
    notes = [f"{usage[kind]:,} {kind}" for kind in ("cached", "reasoning") if usage[kind]]
    if usage["estimated"]:
        notes.append("estimated")
    if notes:
        return f"{words} ({', '.join(notes)})"
    return words


def sees(access: Sequence[str | int]) -> str:
    """Return an access list in words."""
    steps = [str(entry) for entry in access if entry != "user"]
    if not steps:
        if "user" in access:
            return "the conversation"
        return "nothing but its subtask"
    earlier = f"steps {', '.join(steps)}"
    if len(steps) == 1:
        earlier = f"step {steps[0]}"
    if "user" in access:
        return f"the conversation and {earlier}"
    return f"{earlier}, not the conversation"


def attempt(record: Record) -> str:
    """Return one provider call in words."""
    if record["outcome"] is None:
        return f"{record['worker']}: in flight, {cost(record['held']['usd'])} reserved"
    outcome, seconds = record["outcome"], duration(record["seconds"])
    if record.get("error"):
        outcome += f" ({failure(record)})"
    if record.get("first_delta_seconds"):
        seconds += f", first words after {duration(record['first_delta_seconds'])}"
    parts = [f"{record['worker']}: {outcome}", tokens(record["usage"]), cost(record["cost_usd"]), seconds]
    parts += _peculiarities(record)
    return " · ".join([*parts, *describe_passed_over_workers(record)])


def _peculiarities(record: Record) -> list[str]:
    """Return what is true of only some calls."""
    parts = []
    if record.get("endpoint"):
        parts.append(f"endpoint {record['endpoint']}")
    if record.get("finish") not in (None, "stop"):
        parts.append(f"ended by {record['finish']}")
    if record.get("wanted_tokens"):
        parts.append(f"cut to {record['max_tokens']:,} output tokens by the budget")
    if record.get("left_out"):
        parts.append(f"{record['left_out']:,} characters of the conversation not shown to it")
    if record.get("out_of_time"):
        parts.append("cut off because the time was over")
    if record.get("refused"):
        parts.append("refused to answer")
    if record.get("despite"):
        parts.append(f"called although it was ejected ({record['despite']})")
    return parts


def failure(record: Record) -> str:
    """Return why a call failed: its code, the reason behind it, and what the provider said of it."""
    parts = []
    reason = record.get("reason")
    if reason and record.get("http_status") is not None:
        reason += f", HTTP {record['http_status']}"
    if reason:
        parts.append(reason)
    if record.get("provider_code"):
        parts.append(record["provider_code"])
    if record.get("provider_request_id"):
        parts.append(f"request {record['provider_request_id']}")
    if record.get("excerpt"):
        parts.append(f'"{excerpt(record["excerpt"], EXCERPT_CHARS)}"')
    if not parts:
        return str(record["error"])
    return f"{record['error']}: {'; '.join(parts)}"


def exchange(record: Record, *, waits: bool, full: bool) -> str:
    """Return one use of the caller's tools in words: the calls and their results, or that the step `waits` for them."""
    assistant_message = record.get("said")
    if assistant_message is None:
        calls = [f"{call['name']}(erased)" for call in record["calls"]]
    else:
        calls = [
            f"{call['function']['name']}({call['function']['arguments']})" for call in assistant_message["tool_calls"]
        ]
    shown_calls = _cut(", ".join(calls), full)
    if record["answered_at"] is None and waits:
        return f"{shown_calls} → waits for the caller"
    if record["answered_at"] is None:
        return f"{shown_calls} → not answered"
    results = ERASED
    if record.get("results") is not None:
        messages = [message for message in record["results"] if message["role"] == "tool"]
        results = ", ".join(map(_result, messages))
    wait = duration(record["answered_at"] - record["at"])
    return f"{shown_calls} → {_cut(results, full)} (after {wait})"


def _result(message: Record) -> str:
    parts = []
    for part in message["content"]:
        if part["type"] == "text":
            parts.append(part["text"])
        else:
            parts.append("an image")
    text = " ".join(parts)
    if message["failed"]:
        return f"failed: {text}"
    return text


def _cut(text: str, full: bool) -> str:
    if full:
        return text
    return excerpt(text, EXCERPT_CHARS // 2)


def turns(run: Record) -> str | None:
    """Return the number of turns and, if the run waits for tool results, until when; None for a single turn."""
    many = count(len(run["turns"]), "turn")
    if run["state"] == "awaiting_tool":
        return f"{many}, waits for tool results until {moment(run['turns'][-1]['results_until'])}"
    if len(run["turns"]) <= 1:
        return None
    return many


def requests(run: Record) -> str:
    """Return the ids of the HTTP requests that began the run and its turns; empty where none is known."""
    return ", ".join(turn["request_id"] for turn in run["turns"] if turn["request_id"])


def replies(run: Record) -> str:
    """Return the ids of the replies to the run's turns; empty for a run that was not requested over HTTP."""
    return ", ".join(turn["reply_id"] for turn in run["turns"] if turn["reply_id"])


def describe_passed_over_workers(record: Record) -> list[str]:
    """Return the workers that were passed over for a call, each with the reason."""
    return [f"{worker['worker']} passed over ({worker['reason']})" for worker in record.get("passed_over", [])]


def error(code: str | None) -> str | None:
    """Return an error code, with an explanation if the code alone says too little."""
    if code in ERRORS:
        return f"{code} ({ERRORS[code]})"
    return code


def output_origin(step: Record) -> str | None:
    """Return the step of an earlier run whose output was taken over."""
    source = step.get("kept_from")
    if not source:
        return None
    return f"the output of step {source['step']} of {source['run']}; nobody was called"


def choice(step: Record) -> str | None:
    """Return why this worker did the step: the conductor's probability, and the worker that it replaced."""
    parts = []
    if step["probability"] is not None:
        parts.append(f"the conductor chose {step['planned_worker']} with probability {step['probability']:.2f}")
    planned_worker = step["planned_worker"]
    if step["worker"] != planned_worker:
        parts.append(f"{step['worker']} took over from {planned_worker}{_replacement_reason(step, planned_worker)}")
    return "; ".join(parts) or None


def _replacement_reason(step: Record, planned_worker: str) -> str:
    """Return why the planned worker was replaced: its failures, or the reason why it was passed over."""
    failures: list[str] = []
    reasons: list[str] = []
    for call in step["attempts"]:
        if call["worker"] == planned_worker and call["outcome"] not in (None, "ok"):
            failures.append(call["error"] or call["outcome"])
        reasons += [worker["reason"] for worker in call.get("passed_over", []) if worker["worker"] == planned_worker]
    if failures:
        return f" after {', '.join(failures)}"
    if not reasons:
        return ""
    return f", which was passed over ({reasons[0]})"


def proposal(record: Record) -> str:
    """Return a proposal in words: who made it, its state, and its topology."""
    mode = MODES.get(record["mode"], record["mode"])
    kind = CONDUCTORS.get(record["conductor"], record["conductor"])
    head = f"{mode}: {kind}"
    if record["round"] > 1:
        head = f"round {record['round']}, {head}"
    if record["attempts"]:
        head += f" ({_planner(record['attempts'][0])})"
    parts = [head]
    if record["reasons"] == [DRIVER_LOST]:
        parts.append("engine lost")
    elif record["outage"]:
        parts.append("conductor failed")
    elif record["round"] > 1 and record["state"] == "accepted" and not record["steps"]:
        parts.append(ANSWER_ACCEPTED)
    else:
        parts.append(record["state"])
    if record["topology"]:
        parts.append(f"{record['topology']} of {count(len(record['steps']), 'step')}")
    return " · ".join(parts)


def _planner(attempt: Record) -> str:
    """Return the worker that was asked for a plan, with its version if it has several."""
    version = attempt.get("version")
    if version:
        return f"{attempt['worker']}, version {version}"
    return str(attempt["worker"])


def decision(record: Record) -> list[str]:
    """Return a selector's choice in words: its probability, its basis, and the likeliest alternatives."""
    others = sorted(record["candidates"].items(), key=lambda candidate: -candidate[1])
    choice_text = f"{record['action']}, with probability {record['propensity']:.3g} among {count(len(others), 'arm')}"
    reason = "as the best"
    if record["explored"]:
        reason = "to explore"
    if not record["explore"]:
        reason += ", because exploring was not allowed"
    version = record["version"].partition("-")[0]
    by = f"posterior {version}"
    if version == "0":
        by = "worker cards alone, before any rating"
    likely = [f"{name} {probability:.3g}" for name, probability in others if name != record["action"]][:3]
    masked_arms = record.get("masked", {})
    sentences = [f"{choice_text}, {reason}; by {by}"]
    if likely:
        sentences.append(f"next likely: {', '.join(likely)}")
    if masked_arms:
        sentences.append(f"left out, because the budget does not bear them: {', '.join(masked_arms)}")
    return sentences


def why(run: Record) -> list[str]:
    """Return one or two sentences that say why this run was routed as it was."""
    own, decisions, parents = [], [], set()
    for plan in run["proposals"]:
        if plan.get("parent") is None:
            own.append(plan)
        else:
            parents.add(plan["parent"])
        if plan.get("decision"):
            decisions.append(plan["decision"])
    if not own:
        return ["no plan was made"]
    last = own[-1]
    sentence, rejections = CONDUCTORS.get(last["conductor"], str(last["conductor"])), _rejections(own[:-1])
    if rejections and last["conductor"] == FALLBACK:
        sentence += f", because {rejections}"
    elif rejections:
        sentence += f"; {rejections}"
    sentences = [sentence]
    if decisions and last["conductor"] == "selector":
        sentences += decision(decisions[-1])
    if run["rounds"] > 1:
        sentences.append(f"{run['rounds']} rounds: each was shown the previous answer")
    if parents:
        steps = count(len(parents), "step")
        sentences.append(f"{steps} taken by the conductor itself, each with a workflow of its own")
    return sentences + _degradation(run)


def _degradation(run: Record) -> list[str]:
    """Return the sentence that says why a run is degraded; none where it is not."""
    stop_reason = run["end"].get("stopped")
    if stop_reason:
        sentence = ROUND_FAILED
        if max([plan["round"] for plan in run["proposals"]]) == 1:
            sentence = PLAN_UNFINISHED
        return [sentence.format(stopped=stop_reason)]
    if run["degraded"] and not run["preview"]:
        return [
            "degraded: a fallback decided, a step that others needed was lost, or a text was cut off because the time "
            "was over"
        ]
    return []


def _rejections(proposals: Sequence[Record]) -> str:
    """Return why earlier proposals were not used, each reason once; empty if there is none."""
    rejections = [proposal for proposal in proposals if proposal["reasons"]]
    if not rejections:
        return ""
    reasons: dict[str, None] = {}
    for proposal in rejections:
        reasons |= dict.fromkeys(proposal["reasons"])
    return f"{count(len(rejections), 'earlier proposal')} could not be used: {'; '.join(reasons)}"


def limits(run: Record) -> str:
    """Return the run's limits in words."""
    texts = []
    for limit in LIMITS.values():
        value = run["limits"].get(limit.name, limit.unsaid)
        if value != limit.unsaid:
            texts.append(_limit(limit, value))
    return ", ".join(texts)


def _limit(limit: Limit, value: float) -> str:
    if limit.unit == "usd":
        return cost(value) + limit.words
    if limit.unit == "seconds":
        return duration(value) + limit.words
    plural = "s"
    if value == 1:
        plural = ""
    return f"{value:,} {limit.words.format(s=plural)}"


def rating(record: Record) -> str:
    """Return a rating in words."""
    by = record["source"]
    if record["version"]:
        by = f"{by} {record['version']}"
    texts = []
    if record["score"] is not None:
        texts.append(f"{record['score']:g} of 1")
    if record["label"]:
        texts.append(record["label"])
    return f"{record['kind']}, by {by}: {', '.join(texts)} · {moment(record['at'])}"
