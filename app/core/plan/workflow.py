"""Workflows as data: ordered steps, the last of which answers, and the form in which conductors and callers write them.

A step lives in a run under one number `n` that counts on over proposals and rounds, so that a step can be named for
ever. In a plan, and in an access list as a conductor writes it, steps are counted from 0 within that plan;
`Access.shift` translates.

*Plans* have a schema that a conductor decodes under, and the only parser that turns plan text into steps. A plan is
`{"steps": [{"worker": 2, "subtask": "...", "access": ["user", 0]}, ...]}`. From a conductor `worker` is an ordinal of
the brief; from a caller it is a worker's name. `"tools": true` lets a step call the caller's tools, as the answering
step may in any case. The published three-list format (`model_id`, `subtasks`, `access_list`) is read too. In a run's
further rounds an access list may hold `"previous"`, the answer of the round before, and a plan without steps takes that
answer for final. All faults are reported at once, and nothing is repaired silently: a plan is valid or it is rejected.
Text is untrusted and of any size, so the reader has a bound and never recurses over it by itself.

Where a conductor is asked for its reasons, each step has `"why"` (why this worker) and `"withheld"` (why its access
list leaves out what it does), and `"shape"` stands behind the list. Reasons decide nothing: one that is too long is
cut, one that is no text that can be stored is dropped, and none rejects a plan.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from app.core.records import copy_with, record
from app.errors import PlanRejected

Topology = Literal["single", "chain", "fan-out", "tree", "debate"]
CONDUCTOR = "@conductor"
"""The worker of a step that the conductor itself takes: it opens a workflow for it. No worker can have this name."""
FINAL = re.compile(r"(?P<sentence>[^.;:!?]*)final answer", re.IGNORECASE)
DENIAL = re.compile(r"\b(?:not|no|never|without|don't)\b", re.IGNORECASE)
PREVIOUS = "previous"
"""The entry of an access list by which the plan of a further round names the answer of the round before."""


@record(frozen=True, slots=True)
class Access:
    """The access list of a step: it sees the caller's conversation, if listed, and the listed earlier steps, and
    nothing else.

    A plan may also say `previous`, for the answer of the round before; in the run's own numbers that is a step like
    any other.
    """

    user: bool = True
    steps: tuple[int, ...] = ()
    previous: bool = False

    def shift(self, by: int, previous: int | None = None) -> "Access":
        """Return the list with plan positions turned into the run's step numbers; `previous` is the number of the step
        that gave the answer of the round before."""
        before = (previous,) if self.previous and previous is not None else ()
        return Access(self.user, (*before, *(n + by for n in self.steps)))

    def as_list(self) -> list[str | int]:
        """Return the form of plans and of the audit trail: `["user", 0, 1]`."""
        entries: list[str | int] = []
        if self.user:
            entries.append("user")
        if self.previous:
            entries.append(PREVIOUS)
        return entries + list(self.steps)


def access_from_list(entries: Sequence[str | int]) -> Access:
    """Return the inverse of `Access.as_list`; trusts its input."""
    steps = tuple(entry for entry in entries if isinstance(entry, int))
    return Access("user" in entries, steps, PREVIOUS in entries)


@record(frozen=True, slots=True)
class Step:
    """One subtask for one worker. An empty subtask means: answer the conversation as it stands."""

    worker: str
    subtask: str = ""
    access: Access = Access()
    answers: bool = False
    """True if its output is the answer: for a workflow's last step and for no other."""
    probability: float | None = None
    """The conductor's probability of this worker, where its decoder reports it."""
    tools: bool = False
    """True if it may call the caller's tools; the answering step always may."""
    why: str = ""
    """The conductor's reason for this worker, which is not trusted and decides nothing; empty where it gave none."""
    why_withheld: str = ""
    """Its reason for what the access list leaves out."""


def asks_for_answer(subtask: str) -> bool:
    """Return True if a subtask asks for the final answer to the task, as conductors are told to write it; an empty
    subtask is the task itself."""
    if not subtask:
        return True
    match = FINAL.search(subtask)
    if match is None:
        return False
    denial = DENIAL.search(subtask, match.start("sentence"), match.end())
    return denial is None


@record(frozen=True, slots=True)
class Workflow:
    """A validated proposal; steps are counted from 0."""

    steps: tuple[Step, ...]

    @property
    def topology(self) -> Topology:
        """Return the shape of the access lists."""
        return topology([step.access.steps for step in self.steps])


def topology(inputs: Sequence[Sequence[int]]) -> Topology:
    """Name the shape of a graph given as each step's earlier inputs.

    `single` is one step; `chain` follows one line; `fan-out` has independent steps that one last step joins; `debate`
    has at least two layers of two or more steps, each of a later layer reading several of the layer before; anything
    else is a `tree`.
    """
    if len(inputs) == 1:
        return "single"
    last = len(inputs) - 1
    if all(not step_inputs for step_inputs in inputs[:last]) and len(inputs[last]) == last and last > 1:
        return "fan-out"
    depths = _depths(inputs)
    if max(depths) == last:
        return "chain"
    layers: list[list[int]] = [[] for _ in range(max(depths) + 1)]
    for n, depth in enumerate(depths):
        layers[depth].append(n)
    wide_layers = [layer for layer in layers if len(layer) > 1]
    if len(wide_layers) < 2:
        return "tree"
    for layer in wide_layers[1:]:
        if any(len(inputs[n]) < 2 for n in layer):
            return "tree"
    return "debate"


def _depths(inputs: Sequence[Sequence[int]]) -> list[int]:
    depths: list[int] = []
    for step_inputs in inputs:
        if step_inputs:
            depths.append(1 + max(depths[n] for n in step_inputs))
        else:
            depths.append(0)
    return depths


# -- plans, as conductors and callers write them


SCHEMA = "steps-1"
"""The name of the form of plans; what was trained to write another one is not put into service."""
MAX_PLAN_CHARS = 64_000
MAX_SUBTASK_CHARS = 4_000
REASON_CHARS = 200
"""Characters that the schema allows for one reason."""
MAX_REASON_CHARS = 400
"""Characters of a reason that are kept of a model that does not follow the schema."""
SUBSETS_BELOW = 6
"""Entries of access lists that are enumerated; beyond, 2^n subsets would make the grammar large."""
FIELDS = frozenset({"worker", "subtask", "access"})
OPTIONAL = frozenset({"tools"})
WHY, WITHHELD, SHAPE = "why", "withheld", "shape"
"""The fields of the reasons: why this worker, why no more access; and, behind the steps, why this shape."""

Resolve = Callable[[object], str | None]
"""From what a plan writes in `worker` to a worker's name; None if there is no such eligible worker."""


def schema(
    workers: int,
    max_steps: int,
    subtask_chars: int,
    positional: bool = True,
    tools: bool = False,
    further: bool = False,
    reasons: bool = False,
) -> dict[str, Any]:
    """Return the JSON schema of a plan over `workers` ordinals; with `tools`, each step says whether it may call them,
    and if it is for a `further` round it may be empty and its steps may see the previous answer. With `reasons` each
    step and the plan have the fields of reasons, behind everything that is carried out.

    With `positional` each place of the list has its own schema, so that a step can list only earlier ones and every
    decodable plan is valid (measured against vLLM's guidance and xgrammar backends). Servers that know no `prefixItems`
    (strict mode of hosted APIs) get one schema for all places; what it lets through too much, `check_step` rejects.
    The order of `properties` is the order of decoding: the worker comes first and streams first.
    """
    before: list[str | int] = ["user", PREVIOUS] if further else ["user"]
    places = [
        _step_schema(workers, [*before, *range(place)], subtask_chars, positional, tools, reasons)
        for place in range(max_steps)
    ]
    steps: dict[str, Any] = {"type": "array"}
    if positional:
        steps |= {"prefixItems": places, "items": False, "minItems": 0 if further else 1, "maxItems": max_steps}
    else:
        steps |= {"items": places[-1]}
    properties = {"steps": steps}
    if reasons:
        properties[SHAPE] = _reason_schema(positional)
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


def _reason_schema(positional: bool) -> dict[str, Any]:
    if not positional:
        return {"type": "string"}
    return {"type": "string", "pattern": f"^[^\\u0000-\\u001f\\u007f]{{0,{REASON_CHARS}}}$"}


def _step_schema(
    workers: int, may_see: Sequence[str | int], subtask_chars: int, positional: bool, tools: bool, reasons: bool
) -> dict[str, Any]:
    subtask: dict[str, Any] = {"type": "string"}
    access: dict[str, Any] = {"type": "array", "items": {"enum": list(may_see)}}
    if positional:
        subtask["pattern"] = f"^[^\\u0000-\\u001f\\u007f]{{1,{subtask_chars}}}$"
        access |= {"minItems": 1, "maxItems": len(may_see)}
    if positional and len(may_see) <= SUBSETS_BELOW:
        access = {"enum": _subsets(may_see)}
    properties = {
        "worker": {"type": "integer", "enum": list(range(workers))},
        "subtask": subtask,
        "access": access,
    }
    if tools:
        properties["tools"] = {"type": "boolean"}
    if reasons:
        properties |= dict.fromkeys((WHY, WITHHELD), _reason_schema(positional))
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


def _subsets(entries: Sequence[str | int]) -> list[list[str | int]]:
    """Return all non-empty subsets, each in the order of `entries`: no decoder knows `uniqueItems`, so a schema lists
    them."""
    subsets = []
    for chosen in range(1, 1 << len(entries)):
        subsets.append([entry for bit, entry in enumerate(entries) if chosen >> bit & 1])
    return subsets


def by_ordinal(names: Sequence[str]) -> Resolve:
    """Return the reader of workers as a conductor names them."""

    def resolve(value: object) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
            return names[value]
        return None

    return resolve


def by_name(names: Sequence[str]) -> Resolve:
    """Return the reader of workers as a caller names them."""
    allowed_names = frozenset(names)

    def resolve(value: object) -> str | None:
        if isinstance(value, str) and value in allowed_names:
            return value
        return None

    return resolve


def check_step(
    value: object, place: int, resolve: Resolve, further: bool = False, reasoned: bool = False
) -> tuple[Step | None, list[str]]:
    """Return one step of a plan, or every reason why it is none. `place` counts from 0, and the reasons name it. In a
    `further` round it may see the previous answer; a `reasoned` one may give the conductor's reasons."""
    if not isinstance(value, Mapping):
        return None, [f"step {place}: must be an object with worker, subtask and access"]
    optional_fields = OPTIONAL | {WHY, WITHHELD} if reasoned else OPTIONAL
    allowed_fields = FIELDS | optional_fields
    reasons = [f"step {place}: unknown field" for _ in set(value) - allowed_fields]
    reasons += [f"step {place}: {field} is missing" for field in sorted(FIELDS - set(value))]
    worker = resolve(value.get("worker"))
    if "worker" in value and worker is None:
        reasons.append(f"step {place}: worker is not an eligible worker")
    subtask = value.get("subtask", "")
    if not isinstance(subtask, str):
        reasons.append(f"step {place}: subtask must be a string")
    elif len(subtask) > MAX_SUBTASK_CHARS:
        reasons.append(f"step {place}: subtask is longer than {MAX_SUBTASK_CHARS} characters")
    elif not _sendable(subtask):
        reasons.append(f"step {place}: subtask holds NUL or unpaired surrogate characters")
    access = _check_access(value.get("access", []), place, reasons, further)
    tools = value.get("tools", False)
    if not isinstance(tools, bool):
        reasons.append(f"step {place}: tools must be true or false")
    if subtask == "" and not access.user:
        reasons.append(f"step {place}: a step without a subtask must be able to see user")
    if reasons or worker is None:
        return None, reasons
    step = Step(worker, str(subtask), access, tools=bool(tools))
    if reasoned:
        step = replace(step, why=reason(value.get(WHY)), why_withheld=reason(value.get(WITHHELD)))
    return step, []


def reason(value: object) -> str:
    """Return a conductor's reason as it is stored: cut to a bound, and empty for what is no text that can be stored."""
    if isinstance(value, str) and _sendable(value):
        return value[:MAX_REASON_CHARS]
    return ""


def _check_access(value: object, place: int, reasons: list[str], further: bool) -> Access:
    if not isinstance(value, list):
        reasons.append(f'step {place}: access must be a list of "user" and earlier steps')
        return Access()
    steps: list[int] = []
    user = previous = False
    for entry in value:
        if entry == "user":
            user = True
        elif entry == PREVIOUS and further:
            previous = True
        elif not isinstance(entry, int) or isinstance(entry, bool) or entry < 0:
            reasons.append(f'step {place}: access may hold only "user" and numbers of earlier steps')
        elif entry >= place:
            reasons.append(f"step {place}: access lists a step that is not an earlier one (forward access or a cycle)")
        elif entry not in steps:
            steps.append(entry)
    return Access(user, tuple(sorted(steps)), previous)


def _sendable(text: str) -> bool:
    return re.search("[\x00\ud800-\udfff]", text) is None


def read_plan(value: object, resolve: Resolve, max_steps: int, further: bool = False) -> tuple[Step, ...]:
    """Return a whole plan that is given as a JSON value (a caller's, say). Raises `PlanRejected` with every fault."""
    if not isinstance(value, Mapping) or not isinstance(value.get("steps"), list):
        raise PlanRejected(["the plan must be an object whose field steps is a list"])
    reasons = ["the plan has an unknown field beside steps"] if set(value) - {"steps"} else []
    entries = value["steps"]
    if not entries and not further:
        reasons.append("the plan has no steps")
    if len(entries) > max_steps:
        reasons.append(f"the plan has {len(entries)} steps; at most {max_steps} are allowed here")
    steps: list[Step] = []
    for place, entry in enumerate(entries[: max(2 * max_steps, 32)]):
        step, faults = check_step(entry, place, resolve, further)
        reasons += faults
        if step is not None:
            steps.append(step)
    if reasons:
        raise PlanRejected(reasons)
    if not steps:
        return ()
    return (*steps[:-1], copy_with(steps[-1], answers=True))


class PlanReader:
    """Reads a conductor's text as it streams and gives each step as soon as it is known whether it is the last.

    That is one token after its object closed, at the comma or at the bracket: the executor of the answering step must
    know that it answers, since the caller's `max_tokens` and `stop` are for the answer alone.

    Prose, thinking blocks and code fences around the plan are passed over; a second plan is not looked for. When a step
    is invalid, no later one is given, and `finish` raises `PlanRejected` with the reasons of all of them.
    """

    _START = re.compile(r'\{\s{0,99}"steps"\s{0,99}:\s{0,99}\[')
    _LONGEST_START = 320
    _SHAPE = re.compile(r',\s{0,99}"shape"\s{0,99}:\s{0,99}(?=")')

    def __init__(self, resolve: Resolve, max_steps: int, further: bool = False, reasoned: bool = False) -> None:
        """`further`: the plan is for a round after the first. `reasoned`: the conductor was asked for its reasons."""
        self._resolve = resolve
        self._max_steps = max_steps
        self._further = further
        self._reasoned = reasoned
        self.why = ""
        """The reason for the shape of the plan, after `finish`; empty where there is none."""
        self._text = ""
        self._after = self._sought = 0
        self._at = 0
        self._opened: int | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._started = self._closed = False
        self._comma = False
        self._place = 0
        self._waiting: Step | None = None
        self._reasons: list[str] = []

    @property
    def text(self) -> str:
        """Return all that was fed, up to the bound."""
        return self._text

    def feed(self, text: str) -> list[Step]:
        """Return the steps that this text completed."""
        self._text += text[: MAX_PLAN_CHARS + 1 - len(self._text)]
        if not self._started and not self._find_start():
            return []
        steps: list[Step] = []
        while self._at < len(self._text) and not self._closed:
            self._between(self._text[self._at])
            entry = self._scan(self._text[self._at])
            if self._waiting is not None and (self._closed or (self._text[self._at] == "," and not self._depth)):
                steps.append(replace(self._waiting, answers=self._closed))
                self._waiting = None
            self._at += 1
            if entry is not None:
                self._add(entry)
        return [] if self._reasons else steps

    def finish(self) -> list[Step]:
        """Return the steps that only the whole text shows (three lists). Raises `PlanRejected` if the text is no valid
        plan."""
        if len(self._text) > MAX_PLAN_CHARS:
            self._reasons.append(f"the plan is longer than {MAX_PLAN_CHARS} characters")
        if not self._started and not self._reasons:
            plan = read_lists(self._text, self._further)
            return list(read_plan(plan, self._resolve, self._max_steps, self._further))
        if self._started and not self._closed:
            self._reasons.append("the plan breaks off before its list of steps is closed")
        elif self._started and not self._ends(self._text[self._at :].lstrip()):
            self._reasons.append("the plan has an unknown field beside steps, or breaks off after them")
        if self._closed and not self._place and not self._further:
            self._reasons.append("the plan has no steps")
        if self._reasons:
            raise PlanRejected(self._reasons)
        return []

    def _ends(self, tail: str) -> bool:
        """Return whether the plan ends rightly behind its list of steps, and keep the reason for its shape."""
        if tail.startswith("}"):
            return True
        match = self._SHAPE.match(tail) if self._reasoned else None
        if match is None:
            return False
        try:
            self.why = reason(json.JSONDecoder(strict=False).raw_decode(tail, match.end())[0])
        except (ValueError, RecursionError):  # the text breaks off in the reason, behind all that is carried out
            self.why = ""
        return True

    def _find_start(self) -> bool:
        """Return whether the plan has begun: at its first opening outside of a thinking block."""
        while opening := self._START.search(self._text, max(self._after, self._sought)):
            thought = self._text.find("<think>", self._after, opening.start())
            if thought < 0:
                self._started = True
                self._at = opening.end()
                return True
            ends = self._text.find("</think>", thought)
            if ends < 0:
                return False
            self._after = ends + len("</think>")
        self._sought = max(len(self._text) - self._LONGEST_START, 0)
        return False

    def _between(self, char: str) -> None:
        """Outside of its entries the list has commas and spaces; anything else there would be passed over."""
        if self._depth or self._in_string or char in " \t\r\n":
            return
        goes_on = "{[]}"
        if self._comma:
            goes_on = "{[}"
        elif self._place:
            goes_on = ",]}"
        reason = "the plan's list of steps is not valid JSON"
        if char not in goes_on and reason not in self._reasons:
            self._reasons.append(reason)
        self._comma = char == ","

    def _scan(self, char: str) -> str | None:
        """Take one character; the text of an object when it closes."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return None
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._opened = self._at if self._opened is None else self._opened
            self._depth += 1
        elif char in "}]":
            return self._close(char)
        return None

    def _close(self, char: str) -> str | None:
        if self._depth == 0:
            self._closed = True
            if char == "}":
                self._reasons.append("the plan's list of steps is not closed by a bracket")
            return None
        self._depth -= 1
        if self._depth or self._opened is None:
            return None
        entry, self._opened = self._text[self._opened : self._at + 1], None
        return entry

    def _add(self, entry: str) -> None:
        place, self._place = self._place, self._place + 1
        if place >= self._max_steps:
            if place == self._max_steps:
                self._reasons.append(f"the plan has more than {self._max_steps} steps")
            return
        try:
            value = json.loads(entry, strict=False, object_pairs_hook=_without_duplicates)
        except PlanRejected as rejected:
            self._reasons += [f"step {place}: {reason}" for reason in rejected.reasons]
            return
        except (ValueError, RecursionError):
            self._reasons.append(f"step {place}: is not valid JSON")
            return
        step, faults = check_step(value, place, self._resolve, self._further, self._reasoned)
        self._reasons += faults
        self._waiting = step


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as it was written. Raises `PlanRejected` for a repeated key: which of its values was meant is
    not ours to choose."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise PlanRejected(["has the same key twice"])
    return value


_LABELS: Mapping[str, re.Pattern[str]] = {
    "model_id": re.compile(r"model[_ ]ids?\W{0,4}[:=]", re.IGNORECASE),
    "subtasks": re.compile(r"subtasks?\W{0,4}[:=]", re.IGNORECASE),
    "access_list": re.compile(r"access(?:[_ ]list)?\W{0,4}[:=]", re.IGNORECASE),
}


def read_lists(text: str, further: bool = False) -> dict[str, Any]:
    """Return the plan of a text with the three lists, in Baton's own form, which is yet to be checked. Raises
    `PlanRejected`.

    In a further round `"all"` means the previous answer, too. Three empty lists are the empty plan.
    """
    body = text.rpartition("</think>")[2].replace("“", '"').replace("”", '"')
    lists = {label: _list_after(pattern, body) for label, pattern in _LABELS.items()}
    missing = [label for label, values in lists.items() if values is None]
    if missing:
        raise PlanRejected([f"no plan found: neither a steps object nor the list {', '.join(missing)}"])
    models, subtasks, access = (lists[label] or [] for label in _LABELS)
    return _join_lists(models, subtasks, access, further)


def _join_lists(
    workers: Sequence[object], subtasks: Sequence[object], access: Sequence[object], further: bool
) -> dict[str, Any]:
    """Return a plan in Baton's own form. Raises `PlanRejected` if the lists are not equally long."""
    if not len(workers) == len(subtasks) == len(access):
        raise PlanRejected([f"the lists differ in length: {len(workers)}, {len(subtasks)}, {len(access)}"])
    steps = []
    for place, (worker, subtask, access_value) in enumerate(zip(workers, subtasks, access, strict=True)):
        step_access = _convert_access(access_value, place, further)
        steps.append({"worker": worker, "subtask": subtask, "access": step_access})
    return {"steps": steps}


def _convert_access(access_value: object, place: int, further: bool) -> object:
    """Return the access list of the step at this place in Baton's own form, as the published one writes it."""
    if access_value in ("all", ["all"]):
        return Access(True, tuple(range(place)), previous=further).as_list()
    if isinstance(access_value, list):
        return ["user", *access_value]
    return access_value


def _list_after(label: re.Pattern[str], text: str) -> list[Any] | None:
    match = label.search(text)
    if match is None:
        return None
    start = text.find("[", match.end())
    if start < 0:
        return None
    end = _closing(text, start)
    if end < 0:
        return None
    return _literal(text[start:end])


def _closing(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the list begun at `start`, or -1. Brackets in strings do not
    count."""
    depth, quote, at = 0, "", start
    while at < len(text):
        char = text[at]
        if quote:
            at += char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[]":
            depth += 1 if char == "[" else -1
            if not depth:
                return at + 1
        at += 1
    return -1


def _literal(text: str) -> list[Any] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape that Python does not know, as in "\\d"
            value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list) else None


# -- the published form as a JSON value: three lists of equal length (arXiv 2512.04388)
#
#     {"model_id": [1, 0], "subtasks": ["Plan it.", "Solve it."], "access_list": [[], ["all"]], "models": ["a", "b"]}
#
# A number in `model_id` is the place of a worker in `models`, or in the pool where `models` is missing; the worker's
# name may stand in its place. In this form each step sees the caller's conversation; `[]` adds nothing to that,
# `["all"]` every earlier step, and numbers these earlier steps. `read_lists` reads the same form from a conductor's
# text.

LISTS = ("model_id", "subtasks", "access_list")
MODELS = "models"


def is_published(value: object) -> bool:
    """Return True if a plan is given as three lists."""
    return isinstance(value, Mapping) and "steps" not in value and any(name in value for name in LISTS)


def from_lists(value: Mapping[str, Any], pool: Sequence[str]) -> dict[str, Any]:
    """Return a plan in Baton's own form, which is yet to be checked. Raises `PlanRejected` with every fault."""
    reasons = ["the plan has an unknown field beside its lists"] if set(value) - {*LISTS, MODELS} else []
    reasons += [f"{name} must be a list" for name in LISTS if not isinstance(value.get(name), list)]
    models = value.get(MODELS, list(pool))
    if not isinstance(models, list):
        reasons.append("models must be a list of workers' names")
    if reasons:
        raise PlanRejected(reasons)
    ids, subtasks, access = (value[name] for name in LISTS)
    workers = [_resolve_model_id(model, models, place, reasons) for place, model in enumerate(ids)]
    plan = _join_lists(workers, subtasks, access, further=False)
    if reasons:
        raise PlanRejected(reasons)
    return plan


def _resolve_model_id(model: object, models: Sequence[Any], place: int, reasons: list[str]) -> object:
    if isinstance(model, bool) or not isinstance(model, int):
        return model
    if 0 <= model < len(models):
        return models[model]
    reasons.append(f"step {place}: model_id is not the place of a worker")
    return None


def to_lists(steps: Sequence[Step], pool: Sequence[str]) -> dict[str, Any]:
    """Return a plan as three lists. Raises `PlanRejected` for what this form cannot say: a step that does not see the
    caller's conversation, and one that may call tools although it does not answer."""
    reasons = []
    for place, step in enumerate(steps):
        if not step.access.user:
            reasons.append(f"step {place}: access does not list user, which the three lists cannot say")
        if step.tools and not step.answers:
            reasons.append(f"step {place}: tools is true, which the three lists cannot say")
    if reasons:
        raise PlanRejected(reasons)
    models = list(dict.fromkeys([*pool, *[step.worker for step in steps]]))
    return {
        "model_id": [models.index(step.worker) for step in steps],
        "subtasks": [step.subtask for step in steps],
        "access_list": [_publish_access(step, place) for place, step in enumerate(steps)],
        MODELS: models,
    }


def _publish_access(step: Step, place: int) -> list[str | int]:
    earlier_steps = list(step.access.steps)
    if earlier_steps and earlier_steps == list(range(place)):
        return ["all"]
    return [*earlier_steps]
