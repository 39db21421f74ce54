"""The provider seam under faults (F-21 to F-25): each failure has its class, its deadline, and no secret to tell."""

import json
from typing import Any

import pytest

from app.core.message.chat import Piece, Usage
from app.errors import (
    WorkerError,
    WorkerMalformed,
    WorkerMisconfigured,
    WorkerRateLimited,
    WorkerRefused,
    WorkerTimeout,
    WorkerTruncated,
    WorkerUnavailable,
)
from app.providers import http
from app.providers.adapters import anthropic
from app.providers.adapters.embeddings import Vector
from app.providers.adapters.gemini import Candidate
from app.providers.adapters.openai import Completion
from app.providers.faults import error_by_status, error_in_reply
from tests.conformance.failures import failure
from tests.conformance.wire_formats import (
    Format,
    Line,
    connected,
    ending,
    request,
    text_of_pieces,
)
from tests.stubs import (
    Drop,
    DuplicateFinish,
    Fail,
    Garbage,
    HugeLine,
    ProviderStub,
    Raw,
    Reply,
    Reset,
    Stall,
    StreamError,
    Truncate,
    WrongSchema,
)

pytestmark = pytest.mark.faults


# --- HTTP errors


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (301, WorkerMisconfigured),
        (400, WorkerRefused),
        (401, WorkerMisconfigured),
        (403, WorkerMisconfigured),
        (404, WorkerMisconfigured),
        (408, WorkerTimeout),
        (413, WorkerRefused),
        (422, WorkerRefused),
        (424, WorkerUnavailable),
        (429, WorkerRateLimited),
        (500, WorkerUnavailable),
        (502, WorkerUnavailable),
        (503, WorkerUnavailable),
        (504, WorkerTimeout),
        (529, WorkerUnavailable),
    ],
)
async def test_status_decides_the_class(line: Line, status: int, expected: type[WorkerError]) -> None:
    error, _ = await failure(line, Fail(status=status, message="provider-body-canary"))
    assert type(error) is expected
    assert str(status) in str(error)


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_retry_after_in_seconds(line: Line, status: int) -> None:
    error, _ = await failure(line, Fail(status=status, retry_after=7))
    assert error.retry_after == 7


async def test_retry_after_as_a_date(line: Line) -> None:
    error, _ = await failure(line, Fail(status=429, retry_after=30, as_date=True))
    assert error.retry_after == pytest.approx(30, abs=2)


async def test_no_retry_after_is_none(line: Line) -> None:
    assert (await failure(line, Fail(status=429)))[0].retry_after is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "0"}, 0),
        ({"retry-after": "999999999"}, 86_400),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT", "date": "Wed, 21 Oct 2026 07:29:00 GMT"}, 0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT"}, None),
    ],
)
def test_retry_after_headers(headers: dict[str, str], expected: float | None) -> None:
    assert error_by_status("w at p", 429, headers, None).retry_after == expected


@pytest.mark.parametrize(("status", "by_itself"), [(400, False), (401, False), (429, True), (500, True)])
@pytest.mark.parametrize(("word", "expected"), [("true", True), ("false", False), ("", None), ("perhaps", None)])
def test_what_a_provider_says_of_another_try_counts_before_the_status(
    status: int, by_itself: bool, word: str, expected: bool | None
) -> None:
    error = error_by_status("w at p", status, {"x-should-retry": word}, None)
    assert error.retryable is (by_itself if expected is None else expected)


@pytest.mark.parametrize(
    ("status", "document"),
    [
        (400, {"error": {"code": 400, "status": "INVALID_ARGUMENT", "details": [{"reason": "API_KEY_INVALID"}]}}),
        (400, [{"error": {"code": 400, "status": "FAILED_PRECONDITION"}}]),
        (429, {"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}),
        (400, {"type": "error", "error": {"type": "billing_error"}}),
    ],
)
def test_what_only_an_operator_can_mend_is_misconfigured(status: int, document: Any) -> None:
    assert type(error_by_status("w at p", status, {}, document)) is WorkerMisconfigured


def test_words_that_moderation_keeps_out_are_the_requests_own_fault() -> None:
    """Else a caller could have a worker ejected for everybody."""
    metadata = {"reasons": ["violence"], "flagged_input": "...", "provider_name": "p", "model_slug": "m"}
    flagged = {"error": {"code": 403, "message": "Flagged", "metadata": metadata}}
    assert type(error_by_status("w at p", 403, {}, flagged)) is WorkerRefused
    assert type(error_in_reply("w at p", flagged)) is WorkerRefused
    assert type(error_by_status("w at p", 403, {}, {"error": {"code": 403, "metadata": None}})) is WorkerMisconfigured
    assert type(error_by_status("w at p", 503, {}, flagged)) is WorkerUnavailable


@pytest.mark.parametrize(
    "document", [None, [], "x", {"error": None}, {"error": {"code": [], "details": "x"}}, {"a": 1}]
)
def test_an_error_without_sense_goes_by_its_status(document: Any) -> None:
    assert type(error_by_status("w at p", 429, {}, document)) is WorkerRateLimited
    assert type(error_in_reply("w at p", document)) is WorkerUnavailable


async def test_a_wrong_key_is_misconfigured(form: Format) -> None:
    async with ProviderStub() as stub, connected(form, stub, key="wrong-key") as line:
        error, _ = await failure(line)
    assert type(error) is WorkerMisconfigured


async def test_an_unknown_model_is_misconfigured(form: Format) -> None:
    async with ProviderStub(models=["other"]) as stub, connected(form, stub) as line:
        error, _ = await failure(line)
    assert type(error) is WorkerMisconfigured


async def test_a_proxys_error_page(line: Line) -> None:
    error, _ = await failure(line, Fail(status=502, html=True))
    assert type(error) is WorkerUnavailable


async def test_a_web_page_with_status_200(line: Line) -> None:
    page = "<html>provider-body-canary</html>"
    error, _ = await failure(line, Raw(body=page, content_type="text/html; charset=utf-8"))
    assert type(error) is WorkerMalformed


# --- streams that break


async def test_truncation_is_never_success(line: Line) -> None:
    error, text = await failure(line, Reply(fault=Truncate(after=2)))
    assert type(error) is WorkerTruncated
    assert text == "Hello there"


@pytest.mark.parametrize("after", [0, 1, "close"])
@pytest.mark.parametrize("clean", [True, False])
async def test_truncation_anywhere_before_the_marker(line: Line, after: Any, clean: bool) -> None:
    error, _ = await failure(line, Reply(fault=Truncate(after=after, clean=clean)))
    assert type(error) is WorkerTruncated


async def test_rst_in_the_middle_of_a_chunk(line: Line) -> None:
    error, text = await failure(line, Reply(fault=Reset(after=1), gap=0.01))
    assert type(error) is WorkerTruncated
    assert text == "Hello"


async def test_rst_before_any_header(line: Line) -> None:
    error, _ = await failure(line, Drop())
    assert type(error) is WorkerUnavailable


@pytest.mark.parametrize(
    ("status", "expected"),
    [(529, WorkerUnavailable), (500, WorkerUnavailable), (429, WorkerRateLimited), (401, WorkerMisconfigured)],
)
async def test_an_error_inside_a_200_stream(line: Line, status: int, expected: type[WorkerError]) -> None:
    act = Reply(fault=StreamError(after=1, status=status, message="provider-body-canary"))
    error, text = await failure(line, act)
    assert type(error) is expected
    assert text == "Hello"


async def test_an_error_inside_a_whole_200_answer(line: Line) -> None:
    error, _ = await failure(line, Reply(streams="json", fault=StreamError(after=0, status=529)))
    assert type(error) is WorkerUnavailable


@pytest.mark.parametrize("reason", ["eos", "eos_token", "stop_sequence"])
async def test_other_servers_words_for_a_complete_answer(openai: Line, reason: Any) -> None:
    openai.stub.script("model-a", Reply(finish=reason))
    assert ending(await openai.pieces(request())).finish == "stop"


@pytest.mark.parametrize("reason", ["error", "network_error"])
async def test_a_server_that_gave_up_says_so_in_its_finish_reason(openai: Line, reason: Any) -> None:
    error, _ = await failure(openai, Reply(finish=reason))
    assert type(error) is WorkerUnavailable


def test_an_error_in_place_of_a_vector_is_the_one_that_it_names() -> None:
    with pytest.raises(WorkerRateLimited) as caught:
        Vector(3, "w").read_whole(b'{"error": {"code": 429, "message": "Slow down."}}', [])
    assert caught.value.failure.excerpt == "Slow down."


def test_an_error_of_a_choice_is_the_one_that_it_names() -> None:
    """OpenRouter gives the error of the provider behind it in the choice that it broke off."""
    choice = {"index": 0, "delta": {}, "finish_reason": "error", "error": {"code": 429, "message": "Slow down."}}
    with pytest.raises(WorkerRateLimited) as caught:
        Completion("w").event(json.dumps({"choices": [choice]}).encode(), [])
    assert caught.value.failure.excerpt == "Slow down."


def test_usage_is_kept_although_a_later_event_has_none() -> None:
    reading, pieces = Completion("w"), list[Piece]()
    counts = {"prompt_tokens": 5, "completion_tokens": 1}
    for usage in (counts, {}):
        choice = {"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}
        reading.event(json.dumps({"choices": [choice], "usage": usage}).encode(), pieces)
    assert reading.end().usage == Usage(input=5, output=1)
    candidate = Candidate("w")
    for metadata in ({"promptTokenCount": 5, "candidatesTokenCount": 1}, {}):
        document = {"candidates": [{"finishReason": "STOP"}], "usageMetadata": metadata}
        candidate.event(json.dumps(document).encode(), pieces)
    assert candidate.end().usage == Usage(input=5, output=1)


def test_input_that_was_counted_at_the_start_of_a_message_is_not_zero_at_its_end() -> None:
    reading, pieces = anthropic.Reply("w"), list[Piece]()
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}
    delta = {"stop_reason": "end_turn"}
    stop = {"type": "message_delta", "delta": delta, "usage": {"input_tokens": 0, "output_tokens": 7}}
    for document in (start, stop, {"type": "message_stop"}):
        reading.event(json.dumps(document).encode(), pieces)
    assert reading.end().usage == Usage(input=5, output=7)


async def test_a_complete_answer_needs_no_done(openai: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's format: after its `finish_reason` the answer is whole, however the connection ends."""
    monkeypatch.setattr(http, "TAIL", 0.1)
    faults: list[Any] = [Truncate("end"), Truncate("end", clean=False), Stall("end")]
    openai.stub.script("model-a", *(Reply(fault=fault) for fault in faults))
    for _ in faults:
        pieces = await openai.pieces(request())
        assert text_of_pieces(pieces) == "Hello there."
        assert ending(pieces).finish == "stop"


@pytest.mark.parametrize("fault", [Garbage("end"), WrongSchema("end"), StreamError("end")])
async def test_what_follows_a_complete_answer_cannot_spoil_it(openai: Line, fault: Any) -> None:
    openai.stub.script("model-a", Reply(fault=fault))
    pieces = await openai.pieces(request())
    assert (text_of_pieces(pieces), ending(pieces).finish) == ("Hello there.", "stop")


async def test_a_duplicate_finish_is_one_end(line: Line) -> None:
    line.stub.script("model-a", Reply(fault=DuplicateFinish()))
    pieces = await line.pieces(request())
    assert (text_of_pieces(pieces), ending(pieces).finish) == ("Hello there.", "stop")


# --- garbage


@pytest.mark.parametrize("fault", [Garbage(), WrongSchema(), Garbage(line="NaN"), Garbage(line='{"choices": [1e400]}')])
async def test_garbage_in_a_stream(line: Line, fault: Any) -> None:
    error, text = await failure(line, Reply(fault=fault))
    assert type(error) is WorkerMalformed
    assert text == "Hello"


@pytest.mark.parametrize("fault", [Garbage(), WrongSchema()])
async def test_garbage_as_a_whole_answer(line: Line, fault: Any) -> None:
    error, _ = await failure(line, Reply(streams="json", fault=fault))
    assert type(error) is WorkerMalformed


@pytest.mark.long
async def test_a_line_of_50_megabytes(line: Line) -> None:
    error, _ = await failure(line, Reply(fault=HugeLine()))
    assert type(error) is WorkerMalformed


@pytest.mark.long
async def test_a_whole_answer_of_50_megabytes(line: Line) -> None:
    error, _ = await failure(line, Reply(streams="json", fault=HugeLine()))
    assert type(error) is WorkerMalformed


@pytest.mark.parametrize(
    "text", ["a\ud83d", "\udc00b", "\x00nul", "\ud800\ud800", "back\\ud800slash", "pair \U0001f30d"]
)
async def test_surrogates_and_nul_come_out_as_text_that_can_be_encoded(line: Line, text: str) -> None:
    line.stub.script("model-a", Reply(chunks=("x", text)))
    answer = text_of_pieces(await line.pieces(request()))
    answer.encode()
    assert answer == "x" + "".join("�" if "\ud800" <= letter <= "\udfff" else letter for letter in text)


async def test_a_broken_pair_over_two_chunks(line: Line) -> None:
    line.stub.script("model-a", Reply(chunks=("a\ud83c", "\udf0db")))
    assert text_of_pieces(await line.pieces(request())) == "a��b"


COUNTS = [-1, 1 << 60, 0.5, "12", True, [], None, 1e300]


@pytest.mark.parametrize("count", COUNTS)
async def test_usage_that_cannot_be_true_is_no_usage(line: Line, count: Any) -> None:
    names = (
        "prompt_tokens completion_tokens total_tokens input_tokens output_tokens cache_read_input_tokens "
        "promptTokenCount candidatesTokenCount thoughtsTokenCount prompt_tokens_details"
    )
    line.stub.script("model-a", Reply(raw_usage=dict.fromkeys(names.split(), count)))
    pieces = await line.pieces(request())
    assert text_of_pieces(pieces) == "Hello there."
    assert ending(pieces).usage is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_cache_hit_tokens": 4}, (10, 4, 5, 0)),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "total_tokens": 35,
                "completion_tokens_details": {"reasoning_tokens": 20},
            },
            (10, 0, 25, 20),
        ),
        ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 99}}, (10, 10, 5, 0)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": "none"}, (10, 0, 5, 0)),
    ],
)
async def test_usage_as_compatible_servers_write_it(
    openai: Line, usage: dict[str, Any], expected: tuple[int, ...]
) -> None:
    openai.stub.script("model-a", Reply(raw_usage=usage))
    reported = ending(await openai.pieces(request())).usage
    assert reported is not None
    assert (reported.input, reported.cached, reported.output, reported.reasoning) == expected
