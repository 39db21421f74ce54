"""A real vLLM makes the embeddings that a selector looks at; when it has gone, the selector goes on without them."""

import json
import sqlite3
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from app.__main__ import main
from app.core.rating.features import Features, features, from_json, sketch_embedding, sketch_to_features
from tests.conformance.test_rehearsal import EASY
from tests.harness.processes import Caller, open_caller, running_process
from tests.vllm.server import VllmServer
from tests.vllm.test_conductor import check_journal, check_usage, write_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DIMENSIONS: Final = 64
"""The tiny model's hidden size."""
DOLLARS: Final = 10


def pool(server: VllmServer) -> str:
    """Two rehearsed workers, one of whom a selector chooses."""
    workers = "".join(
        f"""
[providers.{name}]
format = "rehearsal"
options = {{ delay = 0 }}
[workers.{name}]
provider = "{name}"
model = "sage"
price = {{ input = 1, output = 2 }}
"""
        for name in ("red", "blue")
    )
    return f"""{workers}
[providers.vectors]
format = "embeddings"
base_url = "{server.base_url}"
options = {{ dimensions = {DIMENSIONS} }}
[workers.eye]
provider = "vectors"
model = "{server.model}"
pooled = false
price = {{ input = {DOLLARS}, output = 0 }}
[tiers.baton-mini]
pool = "all"
conductor = {{ kind = "selector", templates = ["answer"], embedder = "eye", patience = 20 }}
limits = {{ steps = 2, attempts = 2, seconds = 60, output_tokens = 1000 }}
"""


def features_of(folder: Path, run: str, ref: str) -> Features:
    """The features that a decision names."""
    with closing(sqlite3.connect(f"file:{folder / 'data' / 'baton.db'}?mode=ro", uri=True)) as database:
        [(body,)] = database.execute("SELECT body FROM contents WHERE run = ? AND ref = ?", (run, ref))
    sight = from_json(json.loads(body))
    assert sight is not None
    return sight


def ask_once(caller: Caller, place: int) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Ask one question, which is answered whatever becomes of the embedding: the run's name, the selector's decision,
    and the journal."""
    question, answer = EASY[place]
    text, reply = caller.ask_whole("baton-mini", question)
    assert answer in text
    name = str(reply["baton"]["run"])
    run, events = caller.run(name), caller.events(name)
    check_journal(events)
    check_usage(reply, run, events)
    assert (run["state"], run["degraded"]) == ("succeeded", False)
    opened = next(event["body"] for event in events if event["kind"] == "plan.opened")
    decision: dict[str, Any] = opened["decision"]
    return name, decision, events


def test_a_selector_looks_at_the_embeddings_of_a_real_server_and_goes_on_when_it_has_gone(
    embedder: AbstractContextManager[VllmServer], tmp_path: Path
) -> None:
    with ExitStack() as service:
        with embedder as server:
            environ = write_environment(tmp_path, pool(server))
            process = service.enter_context(running_process("serve", tmp_path, environ))
            caller = service.enter_context(open_caller(process.url, timeout=120))
            results = [assert_looked_at(server, caller, tmp_path, place) for place in (0, 1, 0)]
        assert dict(results[0].vector) == pytest.approx(dict(results[2].vector), abs=1e-3)
        assert dict(results[0].vector) != pytest.approx(dict(results[1].vector), abs=1e-2)
        name, decision, events = ask_once(caller, 2)
        assert (decision["embedder"], decision["blind"]) == ("eye", "worker_unavailable")
        first = next(event["body"] for event in events if event["kind"] == "call.finished")
        assert (first["outcome"], first["error"]) == ("error", "worker_unavailable")
        assert features_of(tmp_path, name, decision["features"]) == features(EASY[2][0])
    assert main(["audit", "check"], environ) == 0


def assert_looked_at(server: VllmServer, caller: Caller, folder: Path, place: int) -> Features:
    """Ask one question. The selector must have seen the server's own vector, and the journal must have its price."""
    request = {"model": server.model, "input": EASY[place][0]}
    reply = httpx.post(f"{server.base_url}/embeddings", json=request, timeout=60, trust_env=False).json()
    tokens = reply["usage"]["prompt_tokens"]
    name, decision, events = ask_once(caller, place)
    assert decision["embedder"] == "eye"
    assert "blind" not in decision
    assert [event["kind"] for event in events[:4]] == ["run.admitted", "call.intended", "call.finished", "plan.opened"]
    intended, finished = events[1]["body"], events[2]["body"]
    assert (intended["worker"], intended["access"], finished["outcome"]) == ("eye", ["user"], "ok")
    assert (finished["usage"]["input"], finished["usage"]["output"]) == (tokens, 0)
    assert not finished["usage"]["estimated"]
    assert intended["usd_held"] >= finished["usd"] == tokens * DOLLARS > 0
    mine = features_of(folder, name, decision["features"])
    vector = dict(sketch_to_features(sketch_embedding(reply["data"][0]["embedding"]), server.model))
    assert dict(mine.vector) == pytest.approx(vector, abs=1e-3)
    assert mine.words == features(EASY[place][0]).words
    return mine
