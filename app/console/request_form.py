"""The form of a request: from its fields to the body of a chat completion, and from a refusal back to the field.

The body is what the console sends and what the page shows as code. A fault that the API finds is the API's to word;
this module finds only what keeps a field from becoming JSON.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from msgspec import Struct

from app.console.api import ApiError
from app.console.forms import parse_number

Fields = Mapping[str, str]
"""The fields of a form, each with its text."""
EMPTY_FIELDS: Final[Fields] = {
    "question": "",
    "system": "",
    "tier": "",
    "effort": "",
    "usd": "",
    "seconds": "",
    "steps": "",
    "labels": "",
    "tools": "",
    "format": "text",
    "schema": "",
    "max_tokens": "",
    "approval": "",
    "history": "",
}
"""The fields with their first values. `history` holds what was said since the question: calls of tools with their
results, as JSON."""
FORMATS: Final = ("text", "json_object", "json_schema")
PARAMS: Final = (
    ("messages", "question"),
    ("model", "tier"),
    ("reasoning_effort", "effort"),
    ("max_completion_tokens", "max_tokens"),
    ("tool", "tools"),
    ("response_format", "schema"),
    ("baton.budget.seconds", "seconds"),
    ("baton.budget.steps", "steps"),
    ("baton.budget", "usd"),
    ("baton.labels", "labels"),
    ("baton.approval", "approval"),
)
"""The beginning of a refusal's `param`, and the field that it is about; the first that fits counts."""
NEXT_STEPS: Final = {
    "run_over_budget": "Raise the budget of this request, lower the maximum of tokens, or choose another tier.",
    "insufficient_quota": "An operator can raise the budget, or wait for its next window.",
    "no_eligible_worker": "Take away a label or a tool, or choose another tier: the policy lets no worker of this one "
    "take the request.",
    "context_length_exceeded": "Shorten the conversation, or choose another tier.",
    "insufficient_scope": "Sign in with a key that has the scope for it: runs:write to ask, audit:read for the answer "
    "of another key.",
    "model_not_found": "Choose another tier: this key may not use that one.",
    "plan_outdated": "Make the plan anew from its request.",
    "revision_conflict": "Open the latest revision and edit that one.",
    "digest_mismatch": "Open the revision again and look at what has changed.",
}
"""The next step after a refusal, by its code."""
RATING_SOURCE: Final = "console"
"""The source of ratings from every page of the console: of one source the latest rating counts."""


class FormFault(Exception):
    """Fields that cannot be sent, each with the reason."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        self.faults = dict(faults)
        super().__init__("; ".join(faults.values()))


class Refusal(Struct, frozen=True):
    """A refusal of the API as a page shows it: the cause, the next step, and the field that it is about, or ""."""

    message: str
    next_step: str
    field: str
    status: int
    code: str


class Outcome(Struct, frozen=True):
    """The outcome of a form that was sent, as its page shows it."""

    faults: Mapping[str, str] = {}
    """The fault of each field by its name."""
    refusal: Refusal | None = None
    notice: str = ""
    """A sentence about what was done."""
    once: str = ""
    """The token of the form, where the request may have been carried out and is the same when it is sent again."""

    @property
    def status(self) -> int:
        """Return the HTTP status of the page."""
        if self.refusal is not None:
            return self.refusal.status
        if self.faults:
            return 400
        return 200


def read(form: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a form that was sent; what is missing has its first value."""
    return {name: form.get(name, first) for name, first in EMPTY_FIELDS.items()}


def to_body(fields: Fields) -> dict[str, Any]:
    """Return the body of a chat completion, as a stream with the run's steps. Raises `FormFault` with every fault at
    once."""
    faults: dict[str, str] = {}
    if not fields["question"].strip() and not fields["history"]:
        faults["question"] = "Write a question."
    budget = _budget(fields, faults)
    cap = _number(fields, "max_tokens", faults, whole=True)
    tools = _tools(fields["tools"], faults)
    answer_format = _answer_format(fields, faults)
    history = _json(fields, "history", faults)
    if faults:
        raise FormFault(faults)
    body: dict[str, Any] = {"model": fields["tier"], "messages": _messages(fields, history)}
    if fields["effort"]:
        body["reasoning_effort"] = fields["effort"]
    if cap is not None:
        body["max_completion_tokens"] = cap
    if tools:
        body["tools"] = tools
    if answer_format:
        body["response_format"] = answer_format
    return body | {"stream": True, "baton": _baton(fields, budget)}


def _messages(fields: Fields, history: Any) -> list[Any]:
    """Return the conversation: the system prompt, the question, and what was said since."""
    messages: list[Any] = []
    if fields["system"].strip():
        messages.append({"role": "system", "content": fields["system"]})
    if fields["question"].strip():
        messages.append({"role": "user", "content": fields["question"]})
    if isinstance(history, list):
        messages += history
    return messages


def _baton(fields: Fields, budget: Mapping[str, float]) -> dict[str, Any]:
    """Return Baton's own field of the request."""
    baton: dict[str, Any] = {"stream_steps": True}
    labels = fields["labels"].replace(",", " ").split()
    if budget:
        baton["budget"] = budget
    if labels:
        baton["labels"] = labels
    if fields["approval"]:
        baton["approval"] = "required"
    return baton


def refusal(error: ApiError) -> Refusal:
    """Return a refusal with its next step and the field that it is about."""
    return Refusal(error.message, _next_step(error), _field_of_param(error.param), error.status, error.code)


def _next_step(error: ApiError) -> str:
    if error.retry_after is not None:
        return f"Send it again in {error.retry_after} seconds."
    if error.code in NEXT_STEPS:
        return NEXT_STEPS[error.code]
    if error.status >= 500:
        return "Try again in a moment."
    return ""


def _field_of_param(param: str) -> str:
    for start, name in PARAMS:
        if param.startswith(start):
            return name
    return ""


def _budget(fields: Fields, faults: dict[str, str]) -> dict[str, float]:
    """Return the limits of the budget that are filled in."""
    limits: dict[str, float] = {}
    for name in ("usd", "seconds", "steps"):
        value = _number(fields, name, faults, whole=name == "steps")
        if value is not None:
            limits[name] = value
    return limits


def _number(fields: Fields, name: str, faults: dict[str, str], *, whole: bool) -> float | None:
    text = fields[name].strip()
    if not text:
        return None
    try:
        value = parse_number(text)
    except ValueError:
        value = None
    if whole and not isinstance(value, int):
        faults[name] = "Write a whole number."
        return None
    if value is None:
        faults[name] = "Write a number, such as 0.05."
    return value


def _json(fields: Fields, name: str, faults: dict[str, str]) -> Any:
    text = fields[name].strip()
    if not text:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        faults[name] = f"This is not JSON: {error}."
        return None


def _tools(text: str, faults: dict[str, str]) -> list[Any]:
    """Return the tools as OpenAI's API has them; functions may come without the object around each."""
    value = _json({"tools": text}, "tools", faults)
    if value is None:
        return []
    if not isinstance(value, list):
        value = [value]
    tools: list[Any] = []
    for tool in value:
        if not isinstance(tool, dict):
            faults["tools"] = "Write a list of functions, each a JSON object with a name and its parameters."
            return []
        if "type" in tool and ("function" in tool or "custom" in tool):
            tools.append(tool)
        else:
            tools.append({"type": "function", "function": tool})
    return tools


def _answer_format(fields: Fields, faults: dict[str, str]) -> dict[str, Any] | None:
    kind = fields["format"]
    if kind not in FORMATS[1:]:
        return None
    if kind == "json_object":
        return {"type": kind}
    schema = _json(fields, "schema", faults)
    if not isinstance(schema, dict):
        faults.setdefault("schema", "Write the JSON schema of the answer, as an object.")
        return None
    if isinstance(schema.get("schema"), dict) and "name" in schema:
        return {"type": kind, "json_schema": schema}
    return {"type": kind, "json_schema": {"name": "answer", "schema": schema}}
