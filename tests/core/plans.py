"""Plans for the tests of the parser: drawn from a JSON schema, and broken in every way that text can be broken."""

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from hypothesis import strategies as st

from app.core.plan.proposals import PlanReader, by_ordinal
from app.core.plan.workflow import Step

NAMES = ("ada", "bob", "cyd")
ODDITIES = (
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    "\x00",
    "\ud800",
    "\n",
    "null",
    "-1",
    "1e999",
    "<think>",
    "</think>",
    "é",
    "“",
)


def values_of_schema(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Any JSON value that this schema permits; knows the words of JSON Schema that `plan.schema` uses."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] == "object":
        return st.fixed_dictionaries({name: values_of_schema(inner) for name, inner in schema["properties"].items()})
    if schema["type"] == "string":
        pattern = schema.get("pattern")
        return st.from_regex(pattern.replace("$", r"\Z")) if pattern else st.text(max_size=20)
    least, most = schema.get("minItems", 0), schema.get("maxItems", 7)
    if "prefixItems" in schema:
        places = [values_of_schema(place) for place in schema["prefixItems"]]
        return st.integers(least, most).flatmap(lambda size: st.tuples(*places[:size]).map(list))
    return st.lists(values_of_schema(schema["items"]), min_size=least, max_size=most)


def step(worker: Any = 0, subtask: Any = "Solve it.", access: Any = ("user",)) -> dict[str, Any]:
    """One step as JSON."""
    return {"worker": worker, "subtask": subtask, "access": list(access) if isinstance(access, tuple) else access}


def text_of(*steps: Mapping[str, Any]) -> str:
    """A plan's text."""
    return json.dumps({"steps": list(steps)})


def read(*pieces: str, most: int = 5) -> list[Step]:
    """All steps of a text that comes in pieces; raises `PlanRejected`."""
    reader = PlanReader(by_ordinal(NAMES), most)
    return [step for piece in pieces for step in reader.feed(piece)] + reader.finish()


def mutant(text: str, random: Random) -> str:
    """The text with one to four pieces cut, doubled, swapped, inserted or replaced."""
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(text))
        end = min(len(text), start + random.randint(0, 12))
        piece = random.choice(("", random.choice(ODDITIES), text[start:end] * 2, text[end : end + 8]))
        text = text[:start] + piece + text[end:]
    return text


def lists(models: Any, subtasks: Any, access: Any) -> str:
    """The published three-list form."""
    return f"model_id = {models!r}\nsubtasks = {subtasks!r}\naccess_list = {access!r}"
