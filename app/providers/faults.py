"""The error class of each failure of a provider: one table from HTTP status, one from the provider's error code.

Sources: the error pages of OpenAI, Anthropic (`error.type`) and Google (`google.rpc.Code`), RFC 9110 (Retry-After). A
message built here names the worker, its provider and the status, and nothing that the provider or the caller wrote. The
`failure` of an error built here has the provider's code and message as they came; `http.py` redacts both before anybody
else receives the error.
"""

import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from app.core.pool.breaker import Verdict
from app.errors import (
    Failure,
    FailureReason,
    WorkerError,
    WorkerMalformed,
    WorkerMisconfigured,
    WorkerRateLimited,
    WorkerRefused,
    WorkerTimeout,
    WorkerTruncated,
    WorkerUnavailable,
)

VERDICTS: Mapping[type, Verdict] = {
    WorkerTimeout: "failing",
    WorkerUnavailable: "failing",
    WorkerMalformed: "failing",
    WorkerTruncated: "failing",
    WorkerRateLimited: "rate_limited",
    WorkerMisconfigured: "misconfigured",
}
"""The verdict that each error gives on the worker, and on the endpoint that was called; others, such as a request that
was refused, say nothing of either."""
DAY = 86_400.0
_SECONDS = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*s?\s*", re.ASCII)
_STATUS = re.compile(r"[45]\d\d", re.ASCII)

CLASSES: dict[int, type[WorkerError]] = {
    401: WorkerMisconfigured,
    402: WorkerMisconfigured,
    403: WorkerMisconfigured,
    404: WorkerMisconfigured,
    405: WorkerMisconfigured,
    407: WorkerMisconfigured,
    408: WorkerTimeout,
    409: WorkerUnavailable,
    410: WorkerMisconfigured,
    424: WorkerUnavailable,
    425: WorkerUnavailable,
    429: WorkerRateLimited,
    499: WorkerUnavailable,
    504: WorkerTimeout,
    522: WorkerTimeout,
    524: WorkerTimeout,
}
"""By status; others by hundreds: 2xx malformed, 3xx misconfigured (none is followed), 4xx refused, 5xx unavailable. 424
is Bedrock's answer where the model failed, which says nothing against the request."""

REASONS: dict[int, FailureReason] = {
    401: "authentication",
    402: "quota",
    403: "authentication",
    404: "unknown_model",
    407: "authentication",
    410: "unknown_model",
    503: "overload",
    529: "overload",
}
"""By status, where the class has several reasons; any other status has the reason of its class."""

SHOULD_RETRY = {"true": True, "false": False}
"""The values of the header `x-should-retry`, by which OpenAI, Anthropic and others say whether a refused call may be
tried again. The header counts before the status."""

WORDS: dict[str, int] = {
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "invalid_prompt": 400,
    "invalid_image": 400,
    "invalid_image_url": 400,
    "invalid_base64_image": 400,
    "image_content_policy_violation": 400,
    "failed_to_download_image": 400,
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "API_KEY_INVALID": 401,
    "UNAUTHENTICATED": 401,
    "billing_error": 402,
    "billing_not_active": 402,
    "insufficient_quota": 402,
    "permission_error": 403,
    "unsupported_country_region_territory": 403,
    "FAILED_PRECONDITION": 403,
    "PERMISSION_DENIED": 403,
    "model_not_found": 404,
    "not_found_error": 404,
    "NOT_FOUND": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "RESOURCE_EXHAUSTED": 429,
    "api_error": 500,
    "server_error": 500,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "ABORTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status that means the same as a provider's error code."""

_TOO_LONG = re.compile(
    r"context[_ ](?:length|window|limit|size)|(?:input|prompt) (?:is too long|token count)"
    r"|prompt exceeds max length|`inputs`.* must (?:be <=|have less than)"
    r"|maximum (?:prompt|model) length|maximum (?:number of )?(?:input )?tokens|model token limit"
    r"|too many (?:input )?tokens",
    re.IGNORECASE,
)
"""The words in which providers refuse a request because it is longer than the model's context."""


_NO_CREDIT = re.compile(r"credit balance is too low|insufficient (?:balance|credits?|funds)", re.IGNORECASE)
"""The words in which some providers answer 400 to an account without credit (Anthropic among them)."""


def fault(
    kind: type[WorkerError],
    sender: str,
    note: str,
    retry_after: float | None = None,
    failure: Failure | None = None,
) -> WorkerError:
    """Return an error of that class; `sender` is the worker and its provider, `note` our own words."""
    return kind(f"{kind().message.rstrip('.')} ({sender}: {note}).", retry_after=retry_after, failure=failure)


def malformed_reply(sender: str, note: str) -> WorkerError:
    """Return the error of a provider that broke its wire format."""
    return fault(WorkerMalformed, sender, note)


def error_by_status(sender: str, status: int, headers: Mapping[str, str], document: object) -> WorkerError:
    """Return the error of an answer that is not 200; `document` is its parsed body, or anything else if it had none."""
    error = _error(document)
    kind = _kind(status)
    if 400 <= status < 500 and _blames_settings(error):
        kind = WorkerMisconfigured
    kind = _correct_for_moderation(kind, error)
    failure = _failure(kind, status, error)
    answer = fault(kind, sender, f"HTTP {status}", _retry_after(headers, error), failure)
    answer.retryable = SHOULD_RETRY.get(headers.get("x-should-retry", ""), answer.retryable)
    return answer


def _blames_settings(error: Mapping[str, Any]) -> bool:
    """Return True if the error's code or message blames the key, the account or the model, whatever the status says."""
    for code in _codes(error):
        if code in WORDS and _kind(WORDS[code]) is WorkerMisconfigured:
            return True
    return _NO_CREDIT.search(_message(error)) is not None


def error_in_reply(sender: str, document: object) -> WorkerError:
    """Return the error that an event of a 200 stream, or a 200 document, carries."""
    error = _error(document)
    status = _status_in(error)
    kind = _correct_for_moderation(_kind(status), error)
    failure = _failure(kind, status, error)
    return fault(kind, sender, f"error {status} inside the answer", _retry_after({}, error), failure)


def _status_in(error: Mapping[str, Any]) -> int:
    """Return the HTTP status that an error object gives, as a number or by its code; 500 if it gives none."""
    for name in ("code", "status"):
        status = _parse_status(error.get(name))
        if status:
            return status
    for code in _codes(error):
        if code in WORDS:
            return WORDS[code]
    return 500


def _failure(kind: type[WorkerError], status: int, error: Mapping[str, Any]) -> Failure:
    """Return the cause as the provider names it, its words not redacted yet."""
    codes, message = list(_codes(error)), _message(error)
    reason = _reason(kind, status, codes, message)
    return Failure(reason=reason, status=status, code=codes[0] if codes else "", excerpt=message)


def _reason(kind: type[WorkerError], status: int, codes: list[str], message: str) -> FailureReason:
    """Return the finest reason within the class: by the provider's codes and message, or else by the status."""
    if kind is WorkerRefused and any(_TOO_LONG.search(text) for text in (*codes, message)):
        return "context_length"
    if kind is WorkerMisconfigured and _NO_CREDIT.search(message):
        return "quota"
    statuses = [WORDS[code] for code in codes if code in WORDS]
    statuses.append(status)
    for known in statuses:
        if _kind(known) is kind and known in REASONS:
            return REASONS[known]
    return kind.reason


def _kind(status: int) -> type[WorkerError]:
    if status in CLASSES:
        return CLASSES[status]
    if status >= 500:
        return WorkerUnavailable
    if status >= 400:
        return WorkerRefused
    if status >= 300:
        return WorkerMisconfigured
    return WorkerMalformed


def _correct_for_moderation(kind: type[WorkerError], error: Mapping[str, Any]) -> type[WorkerError]:
    """Return the class, corrected for OpenRouter, which answers 403 to text that a model's moderation rejects: that is
    the request's own fault, not the key's."""
    metadata = error.get("metadata")
    flagged = isinstance(metadata, dict) and "flagged_input" in metadata
    if flagged and kind is WorkerMisconfigured:
        return WorkerRefused
    return kind


def _error(document: object) -> dict[str, Any]:
    """Return the error object. They nest it under `error`, Google sometimes inside a list; some compatible servers do
    not nest it."""
    if isinstance(document, list) and document:
        document = document[0]
    if not isinstance(document, dict):
        return {}
    inner = document.get("error")
    if isinstance(inner, dict):
        return inner
    return document


def _message(error: Mapping[str, Any]) -> str:
    for name in ("message", "detail", "error"):
        text = error.get(name)
        if isinstance(text, str):
            return text
    return ""


def _codes(error: Mapping[str, Any]) -> Iterator[str]:
    """Yield the error's codes, the most specific one first."""
    for detail in _details(error):
        if isinstance(detail.get("reason"), str):
            yield detail["reason"]
    for name in ("code", "type", "status"):
        if isinstance(error.get(name), str):
            yield error[name]


def _details(error: Mapping[str, Any]) -> list[dict[str, Any]]:
    details = error.get("details")
    if not isinstance(details, list):
        return []
    return [detail for detail in details if isinstance(detail, dict)]


def _parse_status(value: object) -> int:
    """Return a status of 4xx or 5xx that is given as a number or as digits; 0 for anything else."""
    if type(value) not in (str, int):
        return 0
    text = str(value)
    if not _STATUS.fullmatch(text):
        return 0
    return int(text)


def _retry_after(headers: Mapping[str, str], error: dict[str, Any]) -> float | None:
    """Return the seconds to wait, at most a day. `retry-after-ms` is finer than Retry-After; Google puts them into the
    body."""
    milliseconds = _seconds(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return min(milliseconds / 1000, DAY)
    for value in (headers.get("retry-after"), *(detail.get("retryDelay") for detail in _details(error))):
        seconds = _seconds(value)
        if seconds is not None:
            return min(seconds, DAY)
    seconds = _until(headers.get("retry-after"), headers.get("date"))
    if seconds is None:
        return None
    return min(seconds, DAY)


def _seconds(value: object) -> float | None:
    if not isinstance(value, str):
        return None
    match = _SECONDS.fullmatch(value)
    if match is None:
        return None
    return float(match[1])


def _until(date: str | None, now: str | None) -> float | None:
    """Return the seconds until a date by the provider's own clock, its Date header: clocks differ, and this module does
    not read ours."""
    try:
        wait = parsedate_to_datetime(date or "") - parsedate_to_datetime(now or "")
        return max(wait.total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
