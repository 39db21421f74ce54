"""The form of an answer: what validates, what is told of what does not, and what a worker is asked."""

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.message.chat import Form, Message, Text
from app.core.message.response_format import FAULT_CHARS, FAULTS, Flaw, add_form_instructions, faults, schema_fault

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["x"],
    "additionalProperties": False,
}
ASKED = (Message("user", (Text("Where?"),)),)


@pytest.mark.parametrize("text", ['{"x": 1}', ' {"x": 1, "tags": ["a"]}\n'])
def test_what_validates_has_no_faults(text: str) -> None:
    assert faults(Form(POINT), text) == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not JSON"),
        ('```json\n{"x": 1}\n```', "not JSON alone"),
        ('{"x": 1} Here you are.', "not JSON alone"),
        ('{"x": NaN}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", '"x" is a required property'),
        ('{"x": "1"}', "at x: "),
        ('{"x": 1, "tags": ["a", 2]}', "at tags[1]: "),
        ('{"x": 1, "y": 2}', "Additional properties"),
        ("[1]", "at the top: "),
        (r'{"x": "\ud83d"}', "half of a surrogate pair"),
        ('{"x": ' + "[" * 300 + "]" * 300 + "}", "nested too deeply"),
    ],
)
def test_every_fault_names_its_place(text: str, fault: str) -> None:
    [only_fault] = faults(Form(POINT), text)
    assert fault in only_fault


def test_without_a_schema_any_object_will_do() -> None:
    assert faults(Form(), '{"a": [1]}') == ()
    assert faults(Form(), "[1]") == ("it is not a JSON object",)


def test_what_is_told_is_bounded() -> None:
    form = Form({"type": "array", "items": {"type": "integer"}})
    all_faults = faults(form, json.dumps(["x" * 10_000] * 100))
    assert len(all_faults) == FAULTS
    assert all(len(fault) <= FAULT_CHARS for fault in all_faults)


def test_a_pattern_cannot_hold_the_service_up() -> None:
    form = Form({"type": "string", "pattern": "^(?=a)(a|aa|a?)+$"})
    assert schema_fault(form.schema or {}) is None
    began = time.process_time()
    assert faults(form, json.dumps("a" * 4000 + "!"))
    assert time.process_time() - began < 2


INVALID_AT = "it is not a valid JSON schema of draft 2020-12 at "
LOST_REFERENCE = "a reference in it leads to nothing, or out of it"


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "objct"}, INVALID_AT + "type"),
        ({"type": "object", "properties": {"a": 1}}, INVALID_AT + "properties.a"),
        ({"$defs": {"x-y": {"anyOf": [True, {"minimum": "0"}]}}}, INVALID_AT + "$defs.x-y.anyOf[1].minimum"),
        ({"properties": {"What is it?": {"type": "str"}}}, INVALID_AT + "properties"),
        ({"$ref": "http://127.0.0.1:9/elsewhere"}, LOST_REFERENCE),
        ({"$ref": "file:///etc/passwd"}, LOST_REFERENCE),
        ({"items": {"$ref": "#/$defs/missing"}}, LOST_REFERENCE),
        ({"type": "string", "pattern": "("}, INVALID_AT + "pattern"),
    ],
)
def test_a_schema_that_cannot_be_used_is_found_before_it_is(schema: dict[str, object], fault: str) -> None:
    assert schema_fault(schema) == fault


def _doubling(references: Callable[[int], list[dict[str, object]]], **first: object) -> dict[str, object]:
    """Return a schema of 60 parts, each of which leads to the next one twice."""
    parts: dict[str, dict[str, object]] = {f"d{n}": {"$anchor": f"d{n}", "anyOf": references(n + 1)} for n in range(60)}
    return {"$ref": "#/$defs/d0", "$defs": parts | {"d60": {"$anchor": "d60", "type": "null"}}} | first


@pytest.mark.parametrize(
    "schema",
    [
        _doubling(lambda n: [{"$ref": f"#/$defs/d{n}"}] * 2),
        _doubling(lambda n: [{"$ref": f"#d{n}"}, {"allOf": [{"$ref": f"#/%24defs/d{n}"}]}]),
        _doubling(lambda n: [{"$ref": f"urn:x#/$defs/d{n}"}, {"not": {"$dynamicRef": f"#d{n}"}}], **{"$id": "urn:x"}),
        _doubling(lambda n: [{"if": {"$ref": f"#/$defs/d{n}"}, "then": {"$ref": f"#/$defs/d{n}"}}]),
    ],
    ids=["pointers", "anchors", "ids", "conditions"],
)
def test_a_schema_that_would_hold_the_service_up_for_hours_is_refused(schema: dict[str, object]) -> None:
    """A process does nothing else while it validates an answer."""
    assert "by more than" in (schema_fault(schema) or "")


def test_many_references_are_no_fault() -> None:
    """As unions of many models have them, each of which refers to all."""
    union = {"anyOf": [{"$ref": f"#/$defs/{n}"} for n in range(60)]}
    fields = {"allOf": {"enum": [{"not": 5, "anyOf": True}]}, "left": union, "right": union, "then": True}
    models = {str(n): {"type": "object", "properties": fields} for n in range(60)}
    assert schema_fault(union | {"$defs": models}) is None


def test_a_schema_may_refer_to_itself() -> None:
    tree = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    assert schema_fault(tree) is None
    assert faults(Form(tree), '{"n": {"n": {}}}') == ()
    assert faults(Form(tree), '{"n": {"n": 1}}')


def test_a_constrained_worker_is_asked_nothing_more() -> None:
    assert add_form_instructions(Form(POINT), ASKED, constrained=True, flaw=None) == ASKED


def test_any_other_is_told_the_form() -> None:
    first, instruction = add_form_instructions(Form(POINT, description="A place."), ASKED, constrained=False, flaw=None)
    assert first == ASKED[0]
    assert json.dumps(POINT, sort_keys=True) in instruction.text
    assert "A place." in instruction.text
    assert "JSON object" in add_form_instructions(Form(), ASKED, constrained=False, flaw=None)[-1].text


@pytest.mark.parametrize("constrained", [True, False])
def test_a_repair_shows_the_answer_and_its_faults(constrained: bool) -> None:
    flaw = Flaw("{}", faults(Form(POINT), "{}"))
    *_, answer, objection = add_form_instructions(Form(POINT), ASKED, constrained=constrained, flaw=flaw)
    assert (answer.role, answer.text) == ("assistant", "{}")
    assert flaw.faults[0] in objection.text


@given(st.text() | st.from_type(dict).map(str))
def test_no_text_raises(text: str) -> None:
    for each in (text, json.dumps({"x": text}), json.dumps({"x": text + "\ud800"})):
        faults(Form(POINT), each)
        faults(Form(), each)
