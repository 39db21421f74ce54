"""Notices: messages to the operator's webhook that a background response has ended, without any of its content.

A webhook follows the Standard Webhooks specification, as OpenAI's do: three headers, and an HMAC over id, time and
exact body, so that a receiver with the secret can detect a forged, changed or replayed delivery.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from app.core.pool.budgets import Budget, Window
from app.core.pool.catalog import MILLION
from app.core.run.events import Fact, RunAwaitingApproval, RunAwaitingTool, RunCancelled, RunEnd, RunSucceeded
from app.core.run.identifiers import format_reply_id

PREFIX = "whsec_"
SECRET_BYTES = range(24, 65)
"""Bytes of a secret, as the specification demands."""
CUT_SHORT = frozenset({"length", "content_filter"})
"""Reasons for which a worker stops before its answer is complete."""
SOFT_LIMIT = "budget.soft_limit"
"""The word of a notice that a budget has reached its soft limit."""
APPROVAL_REQUESTED = "approval.requested"
"""The word of a notice that a plan waits for an approval."""
MOST_TRIES = 30
"""Tries of a delivery. The pauses between so many add up to three days, on average."""
KEPT_UNSENT_SECONDS = 3 * 86_400.0
"""Seconds for which a notice is kept where no webhook is configured."""
KEPT_FAILED_SECONDS = 30 * 86_400.0
"""Seconds for which a notice is kept that was given up."""
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 4 * 3_600.0
"""Seconds between two tries, on average: at first, and at last."""


class Notice(Struct, frozen=True):
    """The end of one turn. `word` is the response's last status, `at` when it ended; `tries` counts from 1 once it has
    been taken."""

    run: str
    turn: int
    word: str
    at: float
    tries: int = 0
    about: str | None = None
    """The JSON of its data, where it is not about a run: then `run` is an account, and `turn` the start of a window."""

    @property
    def id(self) -> str:
        """Return the event's id, which is the same at every try, so that a receiver can recognise repetitions."""
        if self.about is not None:
            return f"evt_{hashlib.sha256(f'{self.run} {self.turn} {self.word}'.encode()).hexdigest()[:32]}"
        return _of_turn(f"evt_{self.run.removeprefix('run_')}", self.turn)


class FailedNotice(Struct, frozen=True):
    """A notice that was given up at `failed_at`, with the reason: an HTTP status, or why there was no response."""

    notice: Notice
    failed_at: float
    reason: str


def response_id(run: str, turn: int) -> str:
    """Return the id of a turn's response."""
    return format_reply_id("responses", run, turn)


def _of_turn(name: str, turn: int) -> str:
    return f"{name}_{turn}" if turn else name


def needs_notice(wire: Mapping[str, Any]) -> bool:
    """Return whether the end of a turn is sent to the webhook: it is a background turn, for which no connection is
    open."""
    return wire.get("format") == "responses" and bool(wire.get("background"))


def word(fact: Fact) -> str | None:
    """Return the status of the response after this fact; None if it is not the end of a turn."""
    if isinstance(fact, RunAwaitingTool):
        return "completed"
    if isinstance(fact, RunSucceeded):
        if fact.finish in CUT_SHORT:
            return "incomplete"
        return "completed"
    if isinstance(fact, RunCancelled):
        return "cancelled"
    if isinstance(fact, RunEnd):
        return "failed"
    return None


def kind(notice: Notice) -> str:
    """Return the type of the event that a delivery reports."""
    if notice.about is not None:
        return notice.word
    return f"response.{notice.word}"


def payload(notice: Notice) -> bytes:
    """Return the body of a delivery: the same bytes at every try."""
    about_run = notice.about is None
    event = {
        "id": notice.id,
        "object": "event",
        "created_at": int(notice.at),
        "type": kind(notice),
        "data": {"id": response_id(notice.run, notice.turn)} if about_run else json.loads(notice.about or "{}"),
    }
    return json.dumps(event, separators=(",", ":")).encode()


def soft_limit_data(budget: Budget, account: str, window: Window, spent: int) -> str:
    """Return the JSON that the notice of a budget's soft limit sends as `data`. Money is in dollars."""
    data = {
        "budget": budget.id,
        "account": account,
        "window_start": window.start,
        "window_end": window.end,
        "limit_usd": budget.usd / MILLION,
        "soft_limit": budget.soft,
        "spent_usd": spent / MILLION,
    }
    return json.dumps(data, separators=(",", ":"))


def approval_request_data(run: str, question: RunAwaitingApproval) -> str:
    """Return the JSON that the notice of a plan which waits for an approval sends as `data`. Money is in dollars; `url`
    is a path of this service, under which the plan is shown and decided on."""
    data = {
        "run": run,
        "digest": question.digest,
        "plan": question.plan,
        "reasons": list(question.reasons),
        "worst_case_usd": question.price / MILLION if question.price is not None else None,
        "spent_usd": question.usd / MILLION,
        "discloses": question.discloses,
        "expires_at": question.until,
        "url": f"/v1/approvals/{run}",
    }
    return json.dumps(data, separators=(",", ":"))


def approval_notice_name(run: str) -> str:
    """Return the name under which the notices of a run's approvals are stored, apart from those of its turns."""
    return f"{run}/approval"


def read_secrets(text: str) -> tuple[bytes, ...]:
    """Return the secrets, which are separated by spaces; the message of the ValueError follows the setting's name."""
    secrets = tuple(map(_read_secret, text.split()))
    if not secrets:
        raise ValueError("is empty; write whsec_ and the base64 form of 24 to 64 random bytes")
    return secrets


def _read_secret(text: str) -> bytes:
    try:
        secret = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except ValueError:  # a letter that is not of base64
        secret = b""
    if not text.startswith(PREFIX) or len(secret) not in SECRET_BYTES:
        raise ValueError("is no secret; write whsec_ and the base64 form of 24 to 64 random bytes")
    return secret


def headers(secrets: Iterable[bytes], name: str, body: bytes, now: int) -> dict[str, str]:
    """Return the three headers of a delivery, signed with each secret, since a receiver knows one of them during a
    rotation."""
    signed = b"%s.%d.%s" % (name.encode(), now, body)
    signatures = [base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in secrets]
    return {
        "webhook-id": name,
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def next_try(notice: Notice, now: float, chance: float, retry_after: float = 0.0) -> float | None:
    """Return the time at which a delivery that has failed is tried again, or None if it is given up.

    The pause doubles from 5 s to 4 h, half of it more or less by `chance` (in [0, 1)), so that tries do not come in
    step; `retry_after` is the receiver's Retry-After in seconds, of which at most the longest pause is granted.
    """
    if notice.tries >= MOST_TRIES:
        return None
    pause = min(SHORTEST_PAUSE_SECONDS * 2.0 ** (notice.tries - 1), LONGEST_PAUSE_SECONDS) * (0.5 + chance)
    return now + max(pause, min(retry_after, LONGEST_PAUSE_SECONDS))
