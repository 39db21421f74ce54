"""Errors as callers see them: OpenAI's error object, at most 4 KiB, with nothing of the request in it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from starlette.responses import Response

from app.errors import (
    BatonError,
    InvalidRequest,
    PlanRejected,
    RecordDamaged,
    RunOutOfQuota,
    RunOverBudget,
    UnsupportedMedia,
)

MESSAGE_CHARS = 2_000
"""The most characters of a message; even if each took six bytes when escaped, few are, and a body stays below 4 KiB."""

AWAITING_APPROVAL: Final = "awaiting_approval"
"""The code of the refusal of what is not there before a plan is approved."""
LASTING_CONFLICTS: Final = frozenset({"idempotency_key_reuse", "answer_changed", AWAITING_APPROVAL})
"""Codes of conflicts that stay, however often a client sends the same request again at once."""


def describe(error: BatonError) -> dict[str, Any]:
    """Return the error object: message, type, param, code."""
    return _object(error.message, error.type, error.param, error.public_code)


def _object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    if len(message) > MESSAGE_CHARS:
        message = f"{message[:MESSAGE_CHARS]} ..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def render(error: BatonError) -> Response:
    """Return the reply to a request that failed before its first byte."""
    return _reply(error.status, describe(error), headers_of(error))


def headers_of(error: BatonError) -> dict[str, str]:
    """Return the headers of an error's reply."""
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, UnsupportedMedia):
        headers["accept-encoding"] = "gzip, deflate"
    stays_refused = error.status == 409 and error.public_code in LASTING_CONFLICTS
    if stays_refused or error.status == 504 or isinstance(error, RecordDamaged | RunOverBudget | RunOutOfQuota):
        # Clients send such a request again by themselves, which cannot help, and may cost once more.
        headers["x-should-retry"] = "false"
    return headers


def refuse(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply to a fault that has no class: no such route, no such method, a bug."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _reply(status, _object(message, kind, None, code), headers or {})


def plain(message: str, code: str) -> dict[str, Any]:
    """Return the error object of a fault that has no class."""
    return _object(message, "invalid_request_error", None, code)


def _reply(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    return Response(orjson.dumps(body), status, dict(headers), media_type="application/json")


def plan_error(error: PlanRejected) -> InvalidRequest:
    """Return the error for a caller's own plan that cannot be executed; it names as many faults as fit in."""
    return InvalidRequest(
        f"The plan cannot be executed: {_join_reasons(error.reasons)}", param="baton.plan", code="plan_rejected"
    )


def _join_reasons(reasons: Sequence[str]) -> str:
    """Join as many whole reasons as fit into an error message, and count the others."""
    parts: list[str] = []
    room = MESSAGE_CHARS - 100
    for reason in reasons:
        room -= len(reason) + 2
        if room < 0:
            break
        parts.append(reason)
    left_out = len(reasons) - len(parts)
    if left_out:
        parts.append(f"and {left_out} more")
    return "; ".join(parts)
