"""Hypothesis over request bodies: bytes, JSON of any shape, and valid requests with something broken in them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.fuzz.cases import CASES, SEED, check_error
from tests.fuzz.conftest import FuzzTarget
from tests.harness.bad_bodies import CANARY
from tests.harness.exact_replies import exactly

pytestmark = pytest.mark.timeout(max(60, CASES // 10))
CHAT, LEGACY = "/v1/chat/completions", "/v1/completions"
VALID: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "baton-mini",
        "messages": [
            {"role": "system", "content": CANARY},
            {"role": "user", "content": [{"type": "text", "text": CANARY}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
            {"role": "assistant", "content": None, "refusal": CANARY},
            {"role": "user", "content": CANARY, "name": "ann"},
        ],
        "temperature": 0.5,
        "stop": ["a", "b"],
        "seed": -1,
        "logit_bias": {"1": 2},
        "logprobs": False,
        "metadata": {"a": CANARY},
        "user": CANARY,
        "baton": {
            "budget": {"usd": 0.5, "seconds": 3, "steps": 2},
            "pool": {"allow": ["alpha"], "deny": [], "pin": None},
            "labels": ["phi"],
            "plan": {"steps": [{"worker": "alpha", "subtask": CANARY, "access": ["user"]}]},
        },
        "n": 1,
        "store": True,
    },
    LEGACY: {"model": "baton-mini", "prompt": [CANARY], "max_tokens": 5, "echo": False, "baton": {"labels": []}},
}
TYPES = {CHAT: ChatCompletion, LEGACY: Completion}

odd_numbers = st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**400, 1e308, float("nan"), float("inf")])
odd_texts = st.sampled_from(["\x00", "\ud800", "\U0010ffff", "", " ", "\u2028", "x" * 70_000, CANARY * 200])
odd = odd_numbers | odd_texts
names = st.sampled_from(["role", "type", "text", "content", "user", "steps", "usd", "model", "auto", "none"])
plain = st.characters(exclude_categories=["Cs"], exclude_characters="\x00")
texts = names | st.text(plain, max_size=20)
numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5), max_leaves=20
)


def paths(value: object, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if isinstance(value, dict):
        return [here, *(path for name, inner in value.items() for path in paths(inner, (*here, name)))]
    if isinstance(value, list):
        return [here, *(path for place, inner in enumerate(value) for path in paths(inner, (*here, place)))]
    return [here]


def change_body(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with one place changed."""
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = change_body(value[path[0]], path[1:], change)
    return copy


@st.composite
def broken(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """A valid request with up to three places replaced or grown, as JSON that may be damaged once more."""
    value: Any = valid
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(paths(value)))
        fresh = draw(odd if draw(st.integers(0, 9)) == 9 else values)
        grown = draw(st.booleans())
        value = change_body(value, path, lambda old, fresh=fresh, grown=grown: _grow(old, fresh) if grown else fresh)
    text = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 9:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=4)) + text[at + draw(st.integers(0, 4)) :]
    return text


def _grow(old: Any, fresh: Any) -> Any:
    if isinstance(old, list):
        return [*old, fresh]
    return {**old, (fresh if isinstance(fresh, str) else "more"): fresh} if isinstance(old, dict) else [old, fresh]


def check(fuzzed: FuzzTarget, path: str, body: bytes) -> None:
    """Fails unless the reply is a completion, or a small refusal in which nothing of the body stands."""
    reply = fuzzed.send(path, body)
    if reply.status_code == 200 and reply.headers["content-type"] == "application/json":
        exactly(TYPES[path], reply.json())
    elif reply.status_code == 200:
        assert reply.text.endswith("data: [DONE]\n\n")
    else:
        check_error(reply.status_code, reply.content, reply.headers["content-type"])
        assert CANARY.encode() not in reply.content


FUZZED = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize("path", VALID)
def test_the_valid_requests_are_valid(fuzzed: FuzzTarget, path: str) -> None:
    assert fuzzed.send(path, json.dumps(VALID[path]).encode()).status_code == 200


@seed(SEED)
@settings(FUZZED, max_examples=CASES // 20)
@given(body=st.binary(max_size=300))
def test_bytes(fuzzed: FuzzTarget, body: bytes) -> None:
    check(fuzzed, CHAT, body)


@seed(SEED)
@settings(FUZZED, max_examples=CASES // 10)
@given(value=values | odd, path=st.sampled_from(sorted(VALID)))
def test_json_of_any_shape(fuzzed: FuzzTarget, value: Any, path: str) -> None:
    check(fuzzed, path, json.dumps(value).encode("utf-8", "surrogatepass"))


@seed(SEED)
@settings(FUZZED, max_examples=CASES // 2)
@given(body=broken(VALID[CHAT]))
def test_chat_requests_with_something_broken(fuzzed: FuzzTarget, body: bytes) -> None:
    check(fuzzed, CHAT, body)


@seed(SEED)
@settings(FUZZED, max_examples=CASES // 10)
@given(body=broken(VALID[LEGACY]))
def test_legacy_requests_with_something_broken(fuzzed: FuzzTarget, body: bytes) -> None:
    check(fuzzed, LEGACY, body)
