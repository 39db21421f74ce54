"""Chat, models and errors: streamed and whole say the same, and errors are the clients' own."""

from collections.abc import Awaitable, Callable
from typing import Any

from tests.clients.reports import Report

Driven = Callable[[str], Awaitable[Report]]


async def test_chat(driven: Driven) -> None:
    report = await driven("chat")
    usage = {
        "prompt_tokens": 40,
        "completion_tokens": 9,
        "total_tokens": 49,
        "prompt_tokens_details": {
            "cached_tokens": 30,
            "orchestration_input_tokens": 0,
            "orchestration_input_cached_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": 4, "orchestration_output_tokens": 0},
    }
    expected = {"text": "Four.", "finish": "stop", "tokens": ["Fo", "ur", "."], "usage": usage}
    assert report == expected | {"streamed": expected, "helped": "Four."}


async def test_models(driven: Driven) -> None:
    report = await driven("models")
    assert {"baton-mini", "baton-ultra", "baton-broken"} <= set(report["ids"])
    assert report["one"] == "baton-mini"


def error(name: str, status: int, code: str, param: str | None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"class": name, "status": status, "type": kind, "code": code, "param": param, "request": True}


async def test_errors(driven: Driven) -> None:
    report = await driven("errors")
    stream = report.pop("stream")
    assert report == {
        "model": error("NotFoundError", 404, "model_not_found", "model"),
        "value": error("BadRequestError", 400, "empty_array", "messages"),
        "unknown": error("BadRequestError", 400, "unknown_parameter", "foo"),
        "key": error("AuthenticationError", 401, "invalid_api_key", None),
        "route": error("NotFoundError", 404, "unknown_url", None),
        "failed": error("BadRequestError", 400, "worker_refused", None, "invalid_request_error"),
    }
    assert (stream["class"], stream["code"]) == ("APIError", "worker_truncated")
