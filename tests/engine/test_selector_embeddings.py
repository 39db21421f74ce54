"""A selector that looks at embeddings: the call for one is journaled like any other, and no run fails without it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.core.pool.catalog import SelectorSpec
from app.core.rating.features import SKETCH, features, from_json
from app.core.run.events import Event, Kind
from app.process.wiring import Runtime
from tests.harness.embedding_server import DIMENSIONS, Embeddings, Fault, embeddings
from tests.harness.in_process import WORKER, events, running_service
from tests.stubs import ProviderStub

POOL = """
[providers.stub]
format = "openai"
base_url = "{url}"

[providers.vectors]
format = "embeddings"
base_url = "{vectors}"
options = {{ dimensions = {dimensions} }}

{workers}

[workers.eye]
provider = "vectors"
model = "eye-1"
pooled = false
price = {{ input = 10, output = 0 }}
clearance = ["internal"]
region = "us"
retention = "none"

[tiers.baton-mini]
pool = "all"
conductor = {{ kind = "selector", templates = ["answer"], embedder = "eye", patience = {patience} }}
limits = {{ steps = 2, attempts = 2, seconds = 30, output_tokens = 1000 }}
"""
QUESTION = "Please tell me of oceans"


@pytest.fixture
async def served() -> AsyncIterator[Embeddings]:
    async with embeddings() as running:
        yield running


@pytest.fixture
async def runtime(
    request: pytest.FixtureRequest, stub: ProviderStub, served: Embeddings, tmp_path: Path
) -> AsyncIterator[Runtime]:
    """The service. It is patient, as a busy machine needs it, unless the provider of embeddings will be silent."""
    patience = 1.5 if "hang" in request.node.name else 25
    cleared = 'clearance = ["internal", "secret"]\nregion = "eu"\nretention = "none"\n'
    workers = "".join(WORKER.format(name=name) + cleared for name in ("alpha", "beta"))
    pool = POOL.format(url=stub.vllm_url, vectors=served.url, workers=workers, dimensions=DIMENSIONS, patience=patience)
    async with running_service(tmp_path, pool) as running:
        yield running


async def ask(client: httpx.AsyncClient, text: str = QUESTION, model: str = "baton-mini", **baton: Any) -> str:
    request_body = {"model": model, "messages": [{"role": "user", "content": text}], "baton": baton}
    reply = await client.post("/v1/chat/completions", json=request_body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"]
    return str(reply.headers["x-baton-run"])


async def decision_of(runtime: Runtime, run: str) -> tuple[dict[str, Any], list[Event], Any]:
    """The decision, the journal, and the features that were looked at."""
    journal = await events(runtime, run)
    decision = next(event.body["decision"] for event in journal if event.kind is Kind.PLAN_OPENED)
    contents = await runtime.context.store.contents(run, [decision["features"]])
    return decision, journal, from_json(orjson.loads(contents[decision["features"]]))


async def test_an_embedding_stands_beside_the_words_and_its_call_in_the_journal(
    runtime: Runtime, client: httpx.AsyncClient, served: Embeddings
) -> None:
    decision, journal, looked_at = await decision_of(runtime, await ask(client))
    request_body = {"model": "eye-1", "input": QUESTION, "encoding_format": "float"}
    assert served.requests == [{"key": None, **request_body}]
    assert decision["embedder"] == "eye"
    assert "blind" not in decision
    assert looked_at.words == features(QUESTION).words
    assert 0 < len(looked_at.vector) <= min(SKETCH, DIMENSIONS)
    assert sum(value * value for _, value in looked_at.vector) == pytest.approx(1, abs=1e-3)
    kinds_and_workers = [(event.kind, event.body.get("worker")) for event in journal][:4]
    assert kinds_and_workers[:2] == [(Kind.ADMITTED, None), (Kind.CALL_INTENDED, "eye")], "the intent before the socket"
    assert [kind for kind, _ in kinds_and_workers[2:]] == [Kind.CALL_FINISHED, Kind.PLAN_OPENED]
    assert journal[1].body["usd_held"] > 0
    assert (journal[2].body["outcome"], journal[2].body["usd"]) == ("ok", 5 * 10), "five words at ten dollars a million"
    (proposal,) = (await client.get(f"/v1/runs/{journal[0].run}")).json()["proposals"]
    (call,) = proposal["embedding_attempts"]
    assert (call["worker"], call["outcome"], proposal["attempts"]) == ("eye", "ok", [])


FAULTS: dict[Fault, str] = {
    "500": "worker_unavailable",
    "hang": "worker_timeout",
    "garbage": "worker_malformed",
    "page": "worker_malformed",
    "short": "worker_malformed",
    "words": "worker_malformed",
    "nothing": "worker_malformed",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_without_an_embedding_the_words_do_and_the_journal_says_why(
    runtime: Runtime, client: httpx.AsyncClient, served: Embeddings, fault: Fault
) -> None:
    served.fault = fault
    decision, journal, looked_at = await decision_of(runtime, await ask(client))
    assert looked_at == features(QUESTION)
    assert (decision["embedder"], decision["blind"]) == ("eye", FAULTS[fault])
    outcome = next(event.body for event in journal if event.kind is Kind.CALL_FINISHED)
    assert (outcome["outcome"], outcome["error"]) == ("error", FAULTS[fault])
    assert outcome["seconds"] < 15, "no run waits longer than the selector's patience"


@pytest.mark.long
async def test_an_endpoint_that_keeps_failing_is_left_alone(
    runtime: Runtime, client: httpx.AsyncClient, served: Embeddings
) -> None:
    served.fault = "500"
    for _ in range(12):
        decision, journal, _ = await decision_of(runtime, await ask(client))
    assert decision["blind"].startswith("conductor_")
    assert next(event.body["worker"] for event in journal if event.kind is Kind.CALL_INTENDED) != "eye"
    assert len(served.requests) < 12


@pytest.mark.parametrize(("barred", "allowed"), [("secret", "internal"), ("region:eu", "retention:none")])
async def test_what_it_is_not_cleared_for_is_not_sent_to_it(
    runtime: Runtime, client: httpx.AsyncClient, served: Embeddings, barred: str, allowed: str
) -> None:
    decision, _, looked_at = await decision_of(runtime, await ask(client, labels=[allowed, barred]))
    assert served.requests == []
    assert looked_at == features(QUESTION)
    assert decision["blind"] == "not_cleared"
    decision, _, _ = await decision_of(runtime, await ask(client, labels=[allowed]))
    assert len(served.requests) == 1
    assert "blind" not in decision


async def test_what_was_rated_is_learned_of_the_embedding_too(
    runtime: Runtime, client: httpx.AsyncClient, served: Embeddings
) -> None:
    run = await ask(client)
    await client.post(f"/v1/runs/{run}/feedback", json={"score": 0})
    tier = runtime.pool.catalog().tiers["baton-mini"]
    spec = tier.conductor.selector
    assert isinstance(spec, SelectorSpec)
    await runtime.ratings.learn(tier, spec)
    _, _, looked_at = await decision_of(runtime, run)
    weights = runtime.ratings._beliefs.of("baton-mini", "acme").published.posterior.weights["base"]
    assert all(weights[place][0] != 0 for place in weights if place >= 1_000_000 or place < 1024)
    assert len([place for place in weights if place > 10_000]) == len(looked_at.vector)
