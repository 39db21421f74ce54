"""Plans as conductors and callers write them: their schema, and the only parser that turns plan text into steps.

A plan is `{"steps": [{"worker": 2, "subtask": "...", "access": ["user", 0]}, ...]}`. From a conductor `worker` is an
ordinal of the brief; from a caller it is a worker's name. `"tools": true` lets a step call the caller's tools, as the
answering step may in any case. The published three-list format is read too (`published_format.py`). In a run's further
rounds an access list may hold `"previous"`, the answer of the round before, and a plan without steps takes that answer
for final. All faults are reported at once, and nothing is repaired silently: a plan is valid or it is rejected. Text is
untrusted and of any size, so the reader has a bound and never recurses over it by itself.

Where a conductor is asked for its reasons, each step has `"why"` (why this worker) and `"withheld"` (why its access
list leaves out what it does), and `"shape"` stands behind the list. Reasons decide nothing: one that is too long is
cut, one that is no text that can be stored is dropped, and none rejects a plan.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from app.core.plan.published_format import read_lists
from app.core.plan.workflow import PREVIOUS, Access, Step
from app.errors import PlanRejected

SCHEMA = "steps-1"
"""The name of the form of plans; what was trained to write another one is not put into service."""
MAX_PLAN_CHARS = 64_000
"""Characters of the text of a plan; a longer one is rejected."""
MAX_SUBTASK_CHARS = 4_000
"""Characters of one subtask; a plan with a longer one is rejected."""
REASON_CHARS = 200
"""Characters that the schema allows for one reason."""
MAX_REASON_CHARS = 400
"""Characters of a reason that are kept of a model that does not follow the schema."""
SUBSETS_BELOW = 6
"""Entries of access lists that are enumerated; beyond, 2^n subsets would make the grammar large."""
FIELDS = frozenset({"worker", "subtask", "access"})
"""The fields that each step has."""
OPTIONAL = frozenset({"tools"})
"""Further fields that a step may have, beside those of the reasons."""
START = re.compile(r'\{\s{0,99}"steps"\s{0,99}:\s{0,99}\[')
"""The opening of a plan, up to the first of its steps."""
WHY, WITHHELD, SHAPE = "why", "withheld", "shape"
"""The fields of the reasons: why this worker, why no more access; and, behind the steps, why this shape."""

Resolve = Callable[[object], str | None]
"""From what a plan writes in `worker` to a worker's name; None if there is no such eligible worker."""


def schema(
    workers: int,
    max_steps: int,
    subtask_chars: int,
    *,
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
        _step_schema(
            workers,
            [*before, *range(place)],
            subtask_chars,
            positional=positional,
            tools=tools,
            reasons=reasons,
        )
        for place in range(max_steps)
    ]
    steps: dict[str, Any] = {"type": "array"}
    if positional:
        steps |= {"prefixItems": places, "items": False, "minItems": 0 if further else 1, "maxItems": max_steps}
    else:
        steps |= {"items": places[-1]}
    properties = {"steps": steps}
    if reasons:
        properties[SHAPE] = _reason_schema(positional=positional)
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


def _reason_schema(*, positional: bool) -> dict[str, Any]:
    if not positional:
        return {"type": "string"}
    return {"type": "string", "pattern": f"^[^\\u0000-\\u001f\\u007f]{{0,{REASON_CHARS}}}$"}


def _step_schema(
    workers: int, may_see: Sequence[str | int], subtask_chars: int, *, positional: bool, tools: bool, reasons: bool
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
        properties |= dict.fromkeys((WHY, WITHHELD), _reason_schema(positional=positional))
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
    value: object, place: int, resolve: Resolve, *, further: bool = False, reasoned: bool = False
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
    access = _check_access(value.get("access", []), place, reasons, further=further)
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


def _check_access(value: object, place: int, reasons: list[str], *, further: bool) -> Access:
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


def read_plan(value: object, resolve: Resolve, max_steps: int, *, further: bool = False) -> tuple[Step, ...]:
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
        step, faults = check_step(entry, place, resolve, further=further)
        reasons += faults
        if step is not None:
            steps.append(step)
    if reasons:
        raise PlanRejected(reasons)
    if not steps:
        return ()
    return (*steps[:-1], replace(steps[-1], answers=True))


class PlanReader:
    """Reads a conductor's text as it streams and gives each step as soon as it is known whether it is the last.

    That is one token after its object closed, at the comma or at the bracket: the executor of the answering step must
    know that it answers, since the caller's `max_tokens` and `stop` are for the answer alone.

    Prose, thinking blocks and code fences around the plan are passed over; a second plan is not looked for. When a step
    is invalid, no later one is given, and `finish` raises `PlanRejected` with the reasons of all of them.
    """

    _LONGEST_START = 320
    _SHAPE = re.compile(r',\s{0,99}"shape"\s{0,99}:\s{0,99}(?=")')

    def __init__(self, resolve: Resolve, max_steps: int, *, further: bool = False, reasoned: bool = False) -> None:
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
            plan = read_lists(self._text, further=self._further)
            return list(read_plan(plan, self._resolve, self._max_steps, further=self._further))
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
        while opening := START.search(self._text, max(self._after, self._sought)):
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
        step, faults = check_step(value, place, self._resolve, further=self._further, reasoned=self._reasoned)
        self._reasons += faults
        self._waiting = step


def read_plan_text(text: str, names: Sequence[str], max_steps: int) -> tuple[Step, ...] | None:
    """Return the plan in the whole text of a conductor, over workers of these names; None if it is no valid plan."""
    reader = PlanReader(by_ordinal(names), max_steps)
    try:
        return (*reader.feed(text), *reader.finish())
    except PlanRejected:
        return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as it was written. Raises `PlanRejected` for a repeated key: which of its values was meant is
    not ours to choose."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise PlanRejected(["has the same key twice"])
    return value
