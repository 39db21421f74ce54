"""The pane of one step or plan: what it saw and did not see, its instruction, answer, calls and alternatives; and where
something is missing, why, from data."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.console import drawing
from app.console.templating import describe_erasure
from app.core.plan.workflow import CONDUCTOR

Data = Mapping[str, Any]
OUTCOME_FIELDS: Final = ("reason", "http_status", "excerpt", "seconds", "first_delta_seconds", "finish")
"""The fields of a call's outcome that the pane shows."""
MAX_CHARS: Final = 20_000
"""Characters of one text that the pane shows; the rest is counted."""
NO_ALTERNATIVES: Final[Mapping[str, str]] = {
    "caller": "There were no alternatives: the plan is the caller's own.",
    "fixed_plan": "There were no alternatives: the plan is the tier's fixed one.",
    "random_plan": "The worker was drawn at random: each that may do the step was as likely.",
    "selector": "The selector's decision on this plan is not shown here: the API's record of the run has all of them.",
    "fallback": "There were no alternatives: a fallback planned, because no plan of the conductor could be used.",
    "repeated_plan": "There were no alternatives: the plan is that of the run which is repeated.",
}
"""The reasons why there are no alternatives of a worker, by who chose it."""
MAX_MESSAGES: Final = 50
"""Messages of a step that the pane shows; those before are counted."""


def pane(views: Data, pane_step: str) -> dict[str, Any] | None:
    """Return the pane of the chosen step or plan at the instant of the views; None if nothing is chosen. The views have
    the `content` of the step."""
    name = pane_step
    if pane_step.isdecimal():
        name = f"step:{pane_step}"
    whole, graph = views["run"], views["graph"]
    node = next((node for node in graph["nodes"] if node["id"] == name), None)
    if node is None or node["kind"] == "caller":
        if not pane_step:
            return None
        return {"missing": drawing.name_of(name), "node": None}
    sources: list[dict[str, Any]] = []
    withheld: list[dict[str, Any]] = []
    for edge in graph["edges"]:
        if edge["target"] == name and edge["kind"] == "granted":
            sources.append(_source(edge))
        elif edge["target"] == name and edge["kind"] == "withheld":
            withheld.append(_source(edge))
    values = {
        "missing": None,
        "node": node,
        "name": drawing.name_of(name),
        "saw": sources,
        "withheld": withheld,
        "attempts": _attempts(node, whole),
    }
    if node["kind"] == "plan":
        proposal = next(proposal for proposal in whole["proposals"] if proposal["number"] == node["number"])
        return values | {"proposal": proposal, "explained": None, "content": None, "not_shown": None}
    record = next(record for record in whole["steps"] if record["n"] == node["number"])
    kept_from = record["kept_from"] if node["state"] == "done" else None
    answer = _answer(node, whole, views["content"]["content"])
    own = {"answer": answer, "kept_from": kept_from, "is_nested": node["worker"] == CONDUCTOR}
    return values | {"proposal": None, **views["content"], **own}


def steps(views: Data) -> list[dict[str, Any]]:
    """Return the nodes of steps in the graph."""
    return [node for node in views["graph"]["nodes"] if node["kind"] == "step"]


def _source(edge: Data) -> dict[str, Any]:
    source = None
    if edge["what"] in ("output", "answer", "task"):
        source = drawing.name_of(edge["source"])
    return {
        "what": drawing.CONTENT_TEXTS[edge["what"]],
        "of": source,
        "why": drawing.reason(edge),
        "sent": edge["sent"],
    }


def _attempts(node: Data, whole: Data) -> Sequence[Data]:
    """Return the node's calls until the instant, with what was known of each by then."""
    owners = whole["proposals"]
    if node["kind"] == "step":
        owners = whole["steps"]
    calls: dict[str, Data] = {}
    for owner in owners:
        for call in (*owner["attempts"], *owner.get("embedding_attempts", ())):
            calls[call["id"]] = call
    attempts = []
    for attempt in node["attempts"]:
        call = calls.get(attempt["id"], {})
        outcome = dict.fromkeys(OUTCOME_FIELDS)
        if attempt["outcome"] is not None:
            outcome = {name: call.get(name) for name in OUTCOME_FIELDS}
        attempts.append({**attempt, **outcome, "passed_over": call.get("passed_over", [])})
    return attempts


def version(views: Data, step: int) -> list[Any] | None:
    """Return a mark of a step as it is now: its content is the same until the mark changes. None if the views have no
    such step."""
    now = next((record for record in views["state"]["steps"] if record["n"] == step), None)
    if now is None:
        return None
    return [now["state"], len(now["calls"]), now["tool_calls"]]


def content(views: Data, number: int) -> dict[str, Any]:
    """Return the texts and the explanation of the step that the views have in full."""
    explanation, step = views["explanation"], views["step"]
    own = next((words for words in explanation["steps"] if words["n"] == number), None)
    choice = explanation["shape"]["choice"]
    plan = next(node["proposal"] for node in steps(views) if node["number"] == number)
    if choice is not None and choice["proposal"] != plan:
        choice = None
    not_shown = None
    if step is None:
        not_shown = "The texts of this step need a key with the scope audit:read."
    no_choice = ""
    if own is not None and choice is None:
        no_choice = why_no_alternatives(own)
    return {
        "content": _cut_content(step),
        "not_shown": not_shown,
        "explained": own,
        "choice": choice,
        "no_choice": no_choice,
    }


def _cut_content(content: Data | None) -> dict[str, Any] | None:
    if content is None:
        return None
    messages = content["messages"]
    latest, earlier = None, 0
    if messages is not None:
        latest = [_message(message) for message in messages[-MAX_MESSAGES:]]
        earlier = max(len(messages) - MAX_MESSAGES, 0)
    calls = []
    for exchange in content["exchanges"]:
        if exchange["said"] and exchange["results"] is None:
            calls.append(_message(exchange["said"]))
    return {
        "erased": content["erased"],
        "subtask": cut(content["subtask"]),
        "messages": latest,
        "earlier_messages": earlier,
        "output": cut(content["output"]),
        "outputs": {call["id"]: cut(call.get("output")) for call in content["attempts"]},
        "called": calls,
    }


def _message(message: Data) -> dict[str, Any]:
    """Return one message as a person reads it: its texts, and a word for everything that is no text."""
    parts = []
    for part in message["content"]:
        if part["type"] == "text":
            parts.append(part["text"])
        elif part["type"] == "file":
            parts.append("[a file]")
        else:
            parts.append("[an image]")
    for call in message.get("tool_calls", ()):
        parts.append(f"calls {call['function']['name']}({call['function']['arguments']})")
    return {"role": message["role"], "text": cut("\n".join(parts))}


def cut(text: str | None) -> dict[str, Any] | None:
    """Return the beginning of a text with the number of characters behind it; None for a text that is not there."""
    if text is None:
        return None
    return {"text": text[:MAX_CHARS], "more": max(len(text) - MAX_CHARS, 0)}


def _answer(node: Data, whole: Data, content: Data | None) -> dict[str, Any]:
    """Return the step's answer at the instant, or the reason why there is none."""
    if node["state"] == "done" and content is not None and content["output"] is not None:
        if content["output"]["text"]:
            return {"text": content["output"], "why": None}
        return {"text": None, "why": "The worker answered without words."}
    return {"text": None, "why": why_no_answer(node, whole, content)}


def why_no_alternatives(explanation: Data) -> str:
    """Return the reason why there are no alternatives of a step's worker to show, from who chose it and what was
    recorded."""
    by = explanation["chosen_by"]
    if by != "conductor":
        return NO_ALTERNATIVES.get(by, "No alternatives are recorded.")
    if explanation["probability"] is None:
        return "The conductor's server reports no probabilities, so none of alternatives is recorded."
    return "Of a model's plan the probability of each chosen worker is recorded, not those of the other workers."


def _after_calls(calls: int) -> str:
    if not calls:
        return "before anything was sent"
    return f"after {drawing.call_count(calls)}"


def why_no_answer(node: Data, whole: Data, content: Data | None) -> str:
    """Return the reason why a step has no answer to show, from its state and its calls."""
    error, calls = node["error"] or "no reason is recorded", len(node["attempts"])
    match node["state"]:
        case "waiting":
            return "The step waits for the steps that it reads, or for its plan."
        case "queued":
            return "The step waits for a free slot; nothing has been sent yet."
        case "running":
            if calls:
                return "The worker has not finished yet."
            return "The step is running; no call has been made yet."
        case "awaiting_tool":
            return "The worker has called tools of the caller, whose results have not come yet."
        case "failed":
            return f"The step failed {_after_calls(calls)}: {error}."
        case "skipped":
            return f"The step was skipped: {error}."
    if content is None:
        return "The answer is content, which this key may not read."
    if content["erased"]:
        return f"The answer was {describe_erasure(whole['erasure'])}."
    return "The step has no answer."
