"""Each kind of failure of a provider call has its reason, in every wire format, and reveals nothing private."""

from pathlib import Path
from typing import get_args

import orjson
import pytest

from app.core.pool.catalog import Deadlines
from app.errors import FailureReason, WorkerError
from app.providers.excerpt import EXCERPT_CHARS, REMOVED, SEARCHED_BYTES, excerpt, label
from app.providers.faults import error_by_status
from tests.conformance.upstream_failures import KINDS
from tests.conformance.wire_formats import QUESTION, Format, Line, connected, request
from tests.stubs import Fail, Hang, ProviderStub

QUICK = Deadlines(connect=10, first=0.3, gap=10, total=20)
PATIENT = Deadlines(connect=10, first=10, gap=10, total=20)
BODY = orjson.dumps(
    {
        "model": "gpt-4o-mini-2024-07-18",
        "messages": [{"role": "user", "content": "Tell me the maximum number of Zürich-canary 078-05-1120, 你好世界."}],
        "max_tokens": 64,
    }
)


async def read_call_error(line: Line, deadlines: Deadlines = PATIENT) -> WorkerError:
    """The error of one call."""
    with pytest.raises(WorkerError) as caught:
        await line.pieces(request(), deadlines)
    return caught.value


async def test_every_kind_has_its_reason_code_and_status(form: Format) -> None:
    async with ProviderStub() as stub, connected(form, stub) as line:
        for kind in KINDS:
            stub.script("model-a", kind.act)
            error = await read_call_error(line, QUICK if isinstance(kind.act, Hang) else PATIENT)
            reason_code_status = error.failure.reason, error.public_code, error.failure.status
            assert reason_code_status == (kind.reason, kind.code, kind.http), kind.name


async def test_the_providers_words_and_its_id_of_the_request_are_kept(form: Format) -> None:
    quoted = f"Invalid value: '{QUESTION}'. Key {form.key} cannot be used for {QUESTION[:9]}."
    async with ProviderStub() as stub, connected(form, stub) as line:
        stub.script("model-a", Fail(status=400, message=quoted))
        failure = (await read_call_error(line)).failure
    assert failure.excerpt == f"Invalid value: '{REMOVED}'. Key {REMOVED} cannot be used for {REMOVED}."
    assert failure.request_id or form.name == "gemini"
    assert failure.code in ("invalid_request_error", "INVALID_ARGUMENT")


async def test_a_refused_connection_is_no_server_error(form: Format) -> None:
    async with ProviderStub() as stub:
        adapter = connected(form, stub)
    async with adapter as line:
        failure = (await read_call_error(line)).failure
    assert (failure.reason, failure.status) == ("connection", None)
    assert failure.excerpt


@pytest.mark.parametrize(
    ("status", "document", "reason"),
    [
        (429, {"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}, "quota"),
        (403, {"error": {"code": "billing_not_active"}}, "quota"),
        (400, {"error": {"details": [{"reason": "API_KEY_INVALID"}], "status": "INVALID_ARGUMENT"}}, "authentication"),
        (404, {"error": {"code": "model_not_found"}}, "unknown_model"),
        (400, {"error": {"code": "context_length_exceeded", "type": "invalid_request_error"}}, "context_length"),
        (
            400,
            {"error": {"message": "The input token count (9) exceeds the maximum number of tokens"}},
            "context_length",
        ),
        (400, {"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}, "context_length"),
        (400, {"error": "This model's maximum prompt length is 8 but yours has 9 tokens."}, "context_length"),
        (400, {"message": "The prompt (length 9) is longer than the maximum model length of 8."}, "context_length"),
        (400, {"message": "The input (9 tokens) is longer than the model's context length (8)."}, "context_length"),
        (400, {"message": "Your request exceeded model token limit: 8 (requested: 9)"}, "context_length"),
        (422, {"error": "Input validation error: `inputs` must have less than 8 tokens. Given: 9"}, "context_length"),
        (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 8. Given: 5 and 4"}, "context_length"),
        (400, {"error": {"code": "1261", "message": "Prompt exceeds max length"}}, "context_length"),
        (403, {"error": {"metadata": {"flagged_input": "..."}}}, "refused"),
        (500, {"error": {"type": "overloaded_error"}}, "overload"),
        (500, None, "server_error"),
        (503, None, "overload"),
        (301, None, "endpoint"),
    ],
)
def test_the_providers_code_is_finer_than_its_status(status: int, document: object, reason: str) -> None:
    assert error_by_status("w at p", status, {}, document).failure.reason == reason


@pytest.mark.parametrize(
    ("message", "excerpt_expected"),
    [
        (
            "This model's maximum context length is 128000 tokens.",
            "This model's maximum context length is 128000 tokens.",
        ),
        ("The model `gpt-4o-mini-2024-07-18` does not exist.", "The model `gpt-4o-mini-2024-07-18` does not exist."),
        ("Incorrect API key provided: sk-proj-ab***********yz.", "Incorrect API key provided: [...]"),
        ("Key the-secret-key is unknown.", "Key [...] is unknown."),
        ("Invalid 'Zürich-canary 078-05-1120' at messages[0].", "Invalid '[...]' at messages[0]."),
        ("You sent: Tell me the maximum number of Zür", "You sent: [...]"),
        ("错误 世界", "错误 [...]"),
        ("dG9rZW4tb2YtYS1jYWxsZXItMTIzNDU2Nzg5MA==", "[...]"),
    ],
)
def test_an_excerpt_has_nothing_of_the_request_and_no_key(message: str, excerpt_expected: str) -> None:
    assert excerpt(message, BODY, ["Bearer the-secret-key"]) == excerpt_expected


def test_an_excerpt_is_bounded_and_of_a_huge_request_only_ordinary_words_are_kept() -> None:
    assert len(excerpt("too many tokens " * 1_000, BODY, [])) <= EXCERPT_CHARS
    assert excerpt("too\0many \x1b\ntokens", BODY, []) == "too many tokens"
    huge = BODY + b" " * SEARCHED_BYTES
    assert excerpt("The maximum is 128000 tokens, said Wolfgang.", huge, []) == "The maximum is [...] tokens, [...]."


def test_a_code_or_id_that_repeats_the_request_is_left_out() -> None:
    assert label("canary", BODY, []) == ""
    assert label("the-secret-key", BODY, ["Bearer the-secret-key"]) == ""
    assert label("a code with words", BODY, []) == ""
    assert label("model", BODY, [], {"model"}) == "model"
    assert label("req_011CSHoEeqs5C35K2UUqR7Fy", BODY, []) == "req_011CSHoEeqs5C35K2UUqR7Fy"


def test_the_documented_table_is_this_one() -> None:
    page = (Path(__file__).parents[2] / "deploy" / "docs" / "failures.md").read_text()
    missing = [kind.row for kind in KINDS if f"\n{kind.row}\n" not in page]
    assert not missing, "\n".join(missing)
    assert all(f"\n| `{reason}` |" in page for reason in get_args(FailureReason))
