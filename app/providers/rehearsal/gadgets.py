"""The use of the caller's tools by a rehearsal worker: the tool that fits, its arguments, and the answer that results.

It goes by words alone: a tool fits if its name or description shares a word with the question, or if it calculates and
there is something to calculate.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.core.message.chat import Message, Tool, Toolbox
from app.core.message.response_format import validator
from app.providers.rehearsal.answering import read
from app.providers.rehearsal.expression import symbols
from app.providers.rehearsal.filled_schema import fill_schema, find_numbers
from app.providers.rehearsal.question_families import PLAIN, solve

MOST_CALLS = 4
WORD = re.compile(r"[a-z]{3,}")
SIGN = r"[\d\s.,()+*/^-]"
"""A character of a sum."""
SIGNS_IN_A_ROW = re.compile(rf"(?<!{SIGN}){SIGN}*[\d)]")
"""It begins only where no such character stands before: a search from each of them on would take minutes of a text of
brackets, in which every run of the process stands still."""
SUM = re.compile(r"[-+]?[\d.(].*[\d)]", re.DOTALL)
ENTITY = re.compile(r"\b[A-Z][\w'-]+(?: [A-Z][\w'-]+)*")
QUOTED = re.compile(r"[\"']([^\"']{1,200})[\"']")
CALCULATES = frozenset(("arithmetic", "calc", "calculate", "calculates", "calculator", "compute", "evaluate", "math"))
EXPRESSION = frozenset(("expression", "formula", "equation", "calculation"))
WHOLE = frozenset(("query", "question", "text", "input", "prompt", "request"))
EMPTY = (
    "about all and answer are can current does find for from get gets give given has have how into its look looks more "
    "not number off one our out please return returns some tell that the their them there they this time to tool use "
    "using value was what when where which who will with you your"
)
COMMON = frozenset(EMPTY.split())
"""Words that say nothing about what a tool is for."""

Wish = tuple[str, dict[str, Any]]


def choose_calls(toolbox: Toolbox, messages: Sequence[Message], answer: Callable[[], str]) -> list[Wish]:
    """Return the tools to call now, with their arguments; [] to answer. Where a tool must be called, one is.

    Frameworks ask for an answer with fields by such a tool: one that does not fit the question gets the worker's own
    `answer` as its arguments. Raises WorkerRefused where the schema of a tool's arguments cannot be filled in.
    """
    if not toolbox.tools or toolbox.choice == "none":
        return []
    content = read([message for message in messages if message.role != "tool"])
    question = (content.question or content.subtask).translate(PLAIN)
    if not toolbox.must and messages[-1].role == "tool":
        return []
    tools_by_fit = sorted(toolbox.tools, key=lambda tool: -_score_fit(tool, question))
    if toolbox.choice == "named":
        tools_by_fit = [tool for tool in toolbox.tools if tool.name == toolbox.named]
    best = tools_by_fit[0]
    fits = _score_fit(best, question) > 0
    if not fits and not toolbox.must:
        return []
    if not fits and solve(question) is not None:
        return [(best.name, _filled(best, answer()))]
    calls = [(best.name, arguments) for arguments in _all_arguments(best, question)]
    if toolbox.parallel:
        return calls[:MOST_CALLS]
    return calls[:1]


def latest_results(messages: Sequence[Message]) -> str | None:
    """Return the answer that the last tools have given; None if none were called just now."""
    results = []
    for message in reversed(messages):
        if message.role != "tool":
            break
        value = _value(message.text)
        if message.failed:
            value = f"The tool failed: {value}"
        results.append(value)
    return "; ".join(reversed(results)) or None


def _value(text: str) -> str:
    """Return the value in a tool's result: the one figure in a JSON object, or the text as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    if isinstance(value, dict):
        named_values = [value[name] for name in ("result", "answer", "output", "value") if name in value]
        if named_values:
            value = named_values[0]
        elif len(value) == 1:
            (value,) = value.values()
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _score_fit(tool: Tool, question: str) -> int:
    """Return a score of how well a tool fits a question; 0 if it does not."""
    tool_words = set(WORD.findall(f"{tool.name} {tool.description}".lower().replace("_", " ")))
    score = len((tool_words & set(WORD.findall(question.lower()))) - COMMON)
    solved = solve(question) if tool_words & CALCULATES else None
    if solved is not None and solved.family == "arithmetic":
        return score + 3
    return score


def _all_arguments(tool: Tool, question: str) -> list[dict[str, Any]]:
    """Return one set of arguments, or one for each thing that is named where the tool takes one at a time."""
    properties = _schemas_of((tool.parameters or {}).get("properties", {}))
    required = [name for name in (tool.parameters or {}).get("required", properties) if name in properties]
    numbers = find_numbers(question)
    base = {name: _argument(name, properties[name], question, numbers) for name in required}
    names = _proper_names(question)
    places = [name for name in required if _kind(properties[name]) == "string" and _is_entity(name, properties[name])]
    sets = [base]
    if len(places) == 1 and len(names) > 1:
        sets = [base | {places[0]: name} for name in names]
    check = validator(tool.parameters or {})
    if all(map(check.is_valid, sets)):
        return sets
    return [_filled(tool, question)]


def _filled(tool: Tool, text: str) -> dict[str, Any]:
    """Return arguments that validate, with the text in them. Raises WorkerRefused if none are found."""
    arguments: dict[str, Any] = json.loads(fill_schema({"type": "object", **(tool.parameters or {})}, text))
    return arguments


def _schema_of(schema: object) -> Mapping[str, Any]:
    """Return a schema as an object; one that is true or false, as JSON Schema allows, says nothing about a value."""
    if isinstance(schema, dict):
        return schema
    return {}


def _schemas_of(properties: Mapping[str, object]) -> dict[str, Mapping[str, Any]]:
    return {name: _schema_of(schema) for name, schema in properties.items()}


def _argument(name: str, schema: Mapping[str, Any], question: str, numbers: list[float]) -> Any:
    schema = _schema_of((schema.get("anyOf") or [schema])[0])
    if schema.get("enum"):
        for value in schema["enum"]:
            if str(value).lower() in question.lower():
                return value
        return schema["enum"][0]
    kind = _kind(schema)
    if kind in ("integer", "number"):
        number = numbers.pop(0) if numbers else 0.0
        if kind == "integer" or number.is_integer():
            return int(number)
        return number
    if kind == "array":
        return [_argument(name, _schema_of(schema.get("items")), question, numbers)]
    if kind == "object":
        inner = _schemas_of(schema.get("properties", {}))
        return {key: _argument(key, inner.get(key, {}), question, numbers) for key in schema.get("required", inner)}
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    return _text(name, schema, question)


def _text(name: str, schema: Mapping[str, Any], question: str) -> str:
    words = set(WORD.findall(f"{name} {schema.get('description', '')}".lower().replace("_", " ")))
    calculation = _find_sum(symbols(question)) if words & EXPRESSION else None
    if calculation is not None:
        return " ".join(calculation.split())
    quoted = QUOTED.search(question)
    if quoted is not None:
        return quoted[1]
    names = _proper_names(question)
    if names and name.lower() not in WHOLE:
        return names[0]
    return question.strip()


def _find_sum(text: str) -> str | None:
    """Return the first sum in a text; None if it has none."""
    for signs in SIGNS_IN_A_ROW.findall(text):
        match = SUM.search(signs)
        if match is not None:
            return match.group()
    return None


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a value; of several types the first that is not null."""
    kind = schema.get("type", "string")
    if not isinstance(kind, list):
        return str(kind)
    for hint in kind:
        if hint != "null":
            return str(hint)
    return "null"


def _is_entity(name: str, schema: Mapping[str, Any]) -> bool:
    return not schema.get("enum") and name.lower() not in WHOLE | EXPRESSION


def _proper_names(question: str) -> list[str]:
    """Return proper names: capitalised words that do not begin a sentence."""
    names: list[str] = []
    end = 0
    for match in ENTITY.finditer(question):
        before = question[max(end - 1, 0) : match.start()].rstrip()
        end = match.end()
        if before[-1:] not in ("", ".", "!", "?", ":"):
            names.append(match.group())
    return names
