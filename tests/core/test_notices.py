"""Notices: ids, words, bodies, signatures that the official client accepts, and when a try follows a failed one."""

import base64
import time

import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from app.core.run.events import TERMINAL, Kind, RunFailed, RunSucceeded
from app.core.run.notices import (
    LONGEST_PAUSE_SECONDS,
    MOST_TRIES,
    Notice,
    headers,
    needs_notice,
    next_try,
    payload,
    read_secrets,
    response_id,
    word,
)
from tests.core.test_arrows import DRAFTS

OLD = "whsec_" + base64.b64encode(b"o" * 24).decode()
NEW = "whsec_" + base64.b64encode(b"n" * 64).decode()
NOTICE = Notice("run_0123", 2, "completed", 1_700_000_000.75, tries=1)


@pytest.fixture
def client() -> OpenAI:
    return OpenAI(api_key="unused")


def sign_headers(secrets: str, body: bytes, now: float | None = None) -> dict[str, str]:
    return headers(read_secrets(secrets), NOTICE.id, body, int(time.time() if now is None else now))


@pytest.mark.parametrize("secret", [OLD, NEW])
def test_the_official_client_takes_it_under_either_secret_of_a_rotation(client: OpenAI, secret: str) -> None:
    body = payload(NOTICE)
    event = client.webhooks.unwrap(body, sign_headers(f"{NEW} {OLD}", body), secret=secret)
    assert event.type == "response.completed"
    assert (event.id, event.created_at, event.data.id) == ("evt_0123_2", 1_700_000_000, "resp_run_0123_2")
    assert event.to_dict() == {
        "id": "evt_0123_2",
        "object": "event",
        "created_at": 1_700_000_000,
        "type": "response.completed",
        "data": {"id": "resp_run_0123_2"},
    }


@pytest.mark.parametrize("change", ["body", "id", "timestamp", "secret", "old", "early"])
def test_what_was_changed_or_kept_is_refused_by_the_official_client(client: OpenAI, change: str) -> None:
    body, age = payload(NOTICE), {"old": -301, "early": 310}.get(change, 0)
    headers_sent = sign_headers(NEW, body, time.time() + age)
    if change == "body":
        body = body.replace(b"completed", b"cancelled")
    elif change in ("id", "timestamp"):
        headers_sent[f"webhook-{change}"] += "0" if change == "id" else ""
        headers_sent["webhook-timestamp"] = str(int(headers_sent["webhook-timestamp"]) - (change == "timestamp"))
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.unwrap(body, headers_sent, secret=OLD if change == "secret" else NEW)


def test_the_specification_s_own_example() -> None:
    """https://github.com/standard-webhooks/standard-webhooks, the libraries' shared test vector."""
    secrets = read_secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    expected_headers = headers(secrets, "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', 1614265330)
    assert expected_headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "hunter2",
        OLD.removeprefix("whsec_"),
        "whsec_",
        "whsec_?" + "a" * 39,
        "whsec_" + base64.b64encode(b"n" * 23).decode(),
        "whsec_" + base64.b64encode(b"n" * 65).decode(),
        f"{OLD} whsec_short",
        f"{OLD},{NEW}",
    ],
)
def test_a_secret_that_is_none_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match="write whsec_ and the base64 form") as refused:
        read_secrets(text)
    assert all(part not in str(refused.value) for part in text.split() if part != "whsec_")


def test_ids_differ_by_turn_and_are_those_of_the_response() -> None:
    assert [response_id("run_1", turn) for turn in (0, 1)] == ["resp_run_1", "resp_run_1_1"]
    assert [Notice("run_1", turn, "completed", 0.0).id for turn in (0, 1)] == ["evt_1", "evt_1_1"]
    assert Notice("run_1", 0, "completed", 0.0, tries=9).id == "evt_1", "it is the same at every try"


def test_every_end_has_a_word() -> None:
    words = {kind: word(draft) for kind, draft in DRAFTS.items()}
    assert {kind for kind, word_of_end in words.items() if word_of_end} == {*TERMINAL, Kind.AWAITING}
    assert {kind.value: word_of_end for kind, word_of_end in words.items() if word_of_end} == {
        "run.awaiting_tool": "completed",
        "run.succeeded": "completed",
        "run.failed": "failed",
        "run.cancelled": "cancelled",
        "run.expired": "failed",
        "run.over_budget": "failed",
    }
    assert [word(RunSucceeded(step=0, finish=end)) for end in ("stop", "length", "content_filter", None)] == [
        "completed",
        "incomplete",
        "incomplete",
        "completed",
    ]
    assert word(RunFailed(finish="length")) == "failed"


def test_only_background_responses_are_told() -> None:
    assert needs_notice({"format": "responses", "background": True})
    assert not needs_notice({"format": "responses"})
    assert not needs_notice({"format": "responses", "background": False})
    assert not needs_notice({"format": "chat", "background": True})
    assert not needs_notice({})


def test_pauses_grow_and_come_to_three_days() -> None:
    now, pauses = NOTICE.at, []
    for tries in range(1, 100):
        again = next_try(Notice("run_1", 0, "failed", NOTICE.at, tries), now, 0.5)
        if again is None:
            break
        pauses.append(again - now)
        now = again
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert abs(sum(pauses) / 86_400 - 3) < 0.1
    assert len(pauses) == MOST_TRIES - 1


def test_an_old_notice_that_is_sent_again_is_tried_as_often_as_a_new_one() -> None:
    now = NOTICE.at + 20 * 86_400
    assert next_try(Notice("run_1", 0, "failed", NOTICE.at, tries=1), now, 0.5) == now + 5


def test_pauses_are_spread_and_heed_the_receiver_within_bounds() -> None:
    def pause(tries: int, chance: float, wait_seconds: float = 0.0) -> float:
        again = next_try(Notice("run_1", 0, "failed", 100.0, tries), 100.0, chance, wait_seconds)
        assert again is not None
        return again - 100.0

    assert pause(3, 0.0) == 10.0
    assert 29.9 < pause(3, 0.999) < 30.0
    assert pause(1, 0.5, wait_seconds=120.0) == 120.0
    assert pause(1, 0.5, wait_seconds=1.0) == 5.0
    assert pause(1, 0.5, wait_seconds=1e9) == LONGEST_PAUSE_SECONDS
    assert pause(MOST_TRIES - 1, 0.5) == LONGEST_PAUSE_SECONDS
