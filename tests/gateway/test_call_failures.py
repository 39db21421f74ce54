"""Operators see why a call failed: in the run, in `baton runs show`, in the metrics, and in the log."""

import logging
from pathlib import Path

import pytest

from app.cli.runs import run_words
from tests.harness.in_process import client_of, pool_text, running_service
from tests.harness.stand_ins import chat_body
from tests.stubs import Fail, ProviderStub

WORDS = "Incorrect API key provided: sk-ab**********yz for 'Zanzibar'."


@pytest.mark.parametrize("stream", [False, True])
async def test_the_cause_is_in_the_run_the_metrics_and_the_log(
    stub: ProviderStub, tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    stub.script("alpha", Fail(status=401, message=WORDS))
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        with caplog.at_level(logging.WARNING, "baton"):
            reply = await client.post("/v1/chat/completions", json=chat_body("What of Zanzibar?", stream=stream))
        assert reply.status_code == 200
        [listed] = (await client.get("/v1/runs")).json()["data"]
        run = (await client.get(f"/v1/runs/{listed['id']}")).json()
        failed, ok = run["steps"][0]["attempts"]
        metrics = runtime.context.telemetry.exposition().decode()
    cause = {name: failed[name] for name in ("reason", "http_status", "provider_code", "error", "excerpt")}
    assert cause == {
        "reason": "authentication",
        "http_status": 401,
        "provider_code": "invalid_api_key",
        "error": "worker_misconfigured",
        "excerpt": "Incorrect API key provided: [...] for '[...]'.",
    }
    assert failed["provider_request_id"]
    assert (ok["outcome"], ok["reason"], ok["excerpt"]) == ("ok", None, None)
    text = run_words.attempt(failed)
    assert "worker_misconfigured: authentication, HTTP 401; invalid_api_key; request " in text
    assert cause["excerpt"] in text
    assert 'baton_call_failures_total{reason="authentication",worker="alpha"} 1.0' in metrics
    [line] = [record for record in caplog.records if record.getMessage() == "A provider call failed."]
    fields = line.__dict__["fields"]
    assert (fields["run"], fields["worker"]) == (run["id"], "alpha")
    assert (fields["reason"], fields["status"]) == ("authentication", 401)
    assert "Zanzibar" not in str(fields)


def test_a_call_of_an_older_journal_is_shown_without_a_reason() -> None:
    assert run_words.failure({"error": "worker_unavailable"}) == "worker_unavailable"
