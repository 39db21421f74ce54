"""Checks that a reply is OpenAI's, by the official client's types and by the published API description.

The description is a cut that lies beside this checkout on some machines only; without it
`assert_published_schema` says nothing.
"""

import json
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from jsonschema import Draft202012Validator
from pydantic import BaseModel

CUT = Path(__file__).parents[3] / "shared" / "openai-openapi" / "openai-subset.json"
OURS = frozenset(
    {
        "baton",
        "data[].baton",
        "usage.prompt_tokens_details.orchestration_input_tokens",
        "usage.prompt_tokens_details.orchestration_input_cached_tokens",
        "usage.completion_tokens_details.orchestration_output_tokens",
        *(
            f"{at}usage.{details}_tokens_details.orchestration_{name}_tokens"
            for at in ("", "response.")
            for details, name in (("input", "input"), ("input", "input_cached"), ("output", "output"))
        ),
        "response.baton",
    }
)
"""The fields that Baton adds to OpenAI's: the README's extension, and the orchestration's part of `usage`."""


def exactly(kind: Any, value: Mapping[str, Any], ours: Set[str] = OURS) -> None:
    """Fail unless `value` is that type without conversions, and every field beyond it is documented.

    Of a union of models with a `type`, it is the member that has the value's.
    """
    model = _member(kind, value.get("type"))
    found = model.model_validate(value, strict=True)
    strange = set(_extras(found)) - ours
    assert not strange, f"fields that {model.__name__} does not know: {sorted(strange)}"


def _member(kind: Any, named: object) -> type[BaseModel]:
    if isinstance(kind, type):
        return kind
    if get_origin(kind) is Annotated:
        return _member(get_args(kind)[0], named)
    [found] = [argument for argument in get_args(kind) if named in get_args(argument.model_fields["type"].annotation)]
    assert isinstance(found, type)
    return found


def _extras(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{path}{name}"
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for item in value:
            yield from _extras(item, f"{path.removesuffix('.')}[].")


def assert_published_schema(name: str, value: object) -> None:
    """Fail if the published schema of that name is at hand and does not permit `value`."""
    definitions = _definitions()
    if definitions:
        schema = {"$ref": f"#/$defs/{name}", "$defs": definitions}
        faults = [error.message[:300] for error in Draft202012Validator(schema).iter_errors(value)]
        assert not faults, f"not the published {name}: {faults}"


@cache
def _definitions() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CUT.read_text())["$defs"] if CUT.exists() else {}
    return found
