"""A plan schema as a conductor's server gets it, and a checker that shares nothing with it.

`proposals.py` builds the product's schema. This one is written by hand, because it asks a question about vLLM and not
about Baton: which words of JSON Schema does the grammar really enforce? A random model samples whatever is permitted,
so each answer is a test: duplicates in `access` came up at once when it was an array of an enum, and `uniqueItems` is
refused.
"""

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

# Bounded and free of control characters in both backends. (With maxLength, xgrammar permits raw control characters.)
# The escapes belong to the regex: a literal NUL in it stops xgrammar. That one may also write bytes that are no UTF-8;
# each arrives as U+FFFD and can make the text longer than the bound.
CLEAN_TEXT = r"^[^\u0000-\u001f\u007f]{1,%d}$"


def access_lists(position: int) -> list[list[str | int]]:
    """All that a step at this position may see: every non-empty choice, in order, so that nothing is listed twice."""
    sources: list[str | int] = ["user", *range(position)]
    return [list(chosen) for size in range(1, len(sources) + 1) for chosen in combinations(sources, size)]


def step_schema(position: int, workers: Sequence[int], subtask: dict[str, Any]) -> dict[str, Any]:
    """The order of `properties` is the order in which they are written: the worker's choice comes first."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["worker", "subtask", "access"],
        "properties": {
            "worker": {"type": "integer", "enum": list(workers)},
            "subtask": subtask,
            "access": {"enum": access_lists(position)},
        },
    }


def plan_schema(steps: int, workers: Sequence[int], subtask: dict[str, Any]) -> dict[str, Any]:
    """`prefixItems` gives each position its own access lists; `items: false` ends the array."""
    positions = [step_schema(position, workers, subtask) for position in range(steps)]
    array = {"type": "array", "prefixItems": positions, "items": False, "minItems": 1, "maxItems": steps}
    return {"type": "object", "additionalProperties": False, "required": ["steps"], "properties": {"steps": array}}


def check_plan(text: str, steps: int, workers: Sequence[int], longest: int) -> list[dict[str, Any]]:
    """Raise AssertionError or ValueError unless `text` is strict JSON of a valid plan; return its steps."""
    plan = json.loads(text)
    assert list(plan) == ["steps"]
    assert 1 <= len(plan["steps"]) <= steps
    for position, step in enumerate(plan["steps"]):
        assert list(step) == ["worker", "subtask", "access"]
        assert type(step["worker"]) is int
        assert step["worker"] in workers
        assert 1 <= len(step["subtask"]) <= longest
        access = step["access"]
        assert access
        assert len(set(access)) == len(access)
        assert all(source == "user" or (type(source) is int and 0 <= source < position) for source in access)
    result: list[dict[str, Any]] = plan["steps"]
    return result
