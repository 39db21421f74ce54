"""Sampling parameters and Anthropic's version in a pool file, and the requests that follow."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.core.message.chat import Sampling
from app.core.pool.catalog import Worker
from app.errors import ConfigInvalid
from app.process.config import Configuration, configure
from tests.conformance.wire_formats import FORMATS, connected, request
from tests.harness.in_process import client_of, running_service
from tests.stubs import KEYS, ProviderStub

POOL = """
[providers.near]
format = "anthropic"
base_url = "{url}"
key = "NEAR_KEY"
options = {{ anthropic_version = "2023-01-01" }}
sampling = {{ temperature = "drop", top_p = "refuse", stop = "drop" }}

[workers.old]
provider = "near"
model = "old-1"
price = {{ input = 1, output = 2 }}

[workers.new]
provider = "near"
model = "new-1"
price = {{ input = 1, output = 2 }}
anthropic_version = "2023-06-01"
sampling = {{ temperature = "take", top_p = "{top_p}", seed = "refuse" }}

[tiers.baton-mini]
pool = ["old", "new"]
"""


def load_config(folder: Path, text: str) -> Configuration:
    (folder / "pool.toml").write_text(text)
    return configure({"BATON_POOL": str(folder / "pool.toml"), "NEAR_KEY": KEYS["anthropic"]})


def test_a_workers_table_is_laid_over_its_providers(tmp_path: Path) -> None:
    workers = load_config(tmp_path, POOL.format(url="http://127.0.0.1:9", top_p="drop")).catalog.workers
    old, new = workers["old"], workers["new"]
    assert (old.drops, old.refuses) == ({"temperature", "top_p", "stop"}, {"top_p"})
    assert (new.drops, new.refuses) == ({"top_p", "stop", "seed"}, {"seed"})
    assert (old.api_version, new.api_version) == ("", "2023-06-01")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_sends_parameters_has_such_a_table(tmp_path: Path, name: str) -> None:
    text = f"""
[providers.near]
format = "{name}"
base_url = "http://127.0.0.1:9"
key = "NEAR_KEY"

[workers.sol]
provider = "near"
model = "sol"
price = {{ input = 1, output = 2 }}
sampling = {{ temperature = "drop", top_p = "refuse", presence_penalty = "drop" }}

[tiers.baton-mini]
pool = ["sol"]
"""
    sol = load_config(tmp_path, text).catalog.workers["sol"]
    assert (sol.drops, sol.refuses) == ({"temperature", "presence_penalty", "top_p"}, {"top_p"})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            ('anthropic_version = "2023-01-01"', 'anthropic_versoin = "2023-01-01"'),
            "providers.near.options.anthropic_versoin: is unknown to the format anthropic; use one of",
        ),
        (
            ('anthropic_version = "2023-01-01"', 'logprobs = "yes"'),
            "providers.near.options.logprobs: must be one of true, false; correct it",
        ),
        (
            ('anthropic_version = "2023-01-01"', 'ignore = "sede"'),
            "providers.near.options.ignore: names sede, which is no sampling parameter; remove it",
        ),
        (('seed = "refuse"', 'sede = "refuse"'), "workers.new.sampling.sede: is no sampling parameter"),
        (('seed = "refuse"', 'max_tokens = "drop"'), "workers.new.sampling.max_tokens: is no sampling parameter"),
        (('seed = "refuse"', 'seed = "take"'), "workers.new.sampling.seed: is not in the format anthropic"),
        (('seed = "refuse"', 'seed = "maybe"'), "workers.new.sampling.seed: must be 'take', 'drop' or 'refuse'"),
        (('"2023-06-01"', '"2023 06"'), "workers.new.anthropic_version: is not the name of an API version"),
        (
            ('"anthropic"\nbase', '"gemini"\nbase'),
            "workers.new.anthropic_version: has no effect with the format gemini",
        ),
        (
            ('"anthropic"\nbase', '"rehearsal"\nbase'),
            "providers.near.sampling: has no effect with the format rehearsal",
        ),
        (
            ('options = { anthropic_version = "2023-01-01" }', 'options = { ignore = "temperature" }'),
            "workers.new.sampling.temperature: is left out by the provider's option `ignore`",
        ),
    ],
)
def test_a_table_that_cannot_hold_is_refused(tmp_path: Path, change: tuple[str, str], fault: str) -> None:
    text = POOL.format(url="http://127.0.0.1:9", top_p="drop")
    with pytest.raises(ConfigInvalid) as caught:
        load_config(tmp_path, text.replace(*change))
    assert any(fault in line for line in caught.value.faults), caught.value.faults


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("dealy = 0", "dealy: is unknown to the format rehearsal; use one of chunk_ms, delay, first_ms"),
        ('ignore = "temperature"', "ignore: is unknown to the format rehearsal"),
        ('delay = "slow"', "delay: must be a number that is not negative"),
        ("first_ms = -1", "first_ms: must be a number that is not negative"),
        ('world = "3"', "world: must be one of standard, 2"),
    ],
)
def test_options_of_simulated_workers_are_checked(tmp_path: Path, options: str, fault: str) -> None:
    text = f"""
[providers.near]
format = "rehearsal"
options = {{ seed = "7", chunk_ms = 0.5, positional = true, {options} }}

[workers.scribe]
provider = "near"
model = "scribe"

[tiers.baton-mini]
pool = ["scribe"]
"""
    with pytest.raises(ConfigInvalid) as caught:
        load_config(tmp_path, text)
    (only_fault,) = caught.value.faults
    assert f"providers.near.options.{fault}" in only_fault


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_worker_drops_is_not_sent(name: str) -> None:
    adapter = FORMATS[name].adapter(FORMATS[name].spec(ProviderStub()), "k")
    plain, lacking = Worker("w", "stub", "m"), Worker("w", "stub", "m", drops=frozenset(("temperature", "stop")))
    sampling = Sampling(temperature=0.25, stop=("END",), max_tokens=99)
    bodies = [adapter.render(request(sampling=sampling)).decode().lower()]
    bodies += [
        adapter.render(request(worker=worker, sampling=sampling)).decode().lower() for worker in (plain, lacking)
    ]
    assert ['"temperature"' in body for body in bodies] == [True, True, False]
    assert "99" in bodies[2]
    assert '"end"' not in bodies[2]


async def test_the_version_of_a_worker_replaces_its_providers() -> None:
    options = {"anthropic_version": "2023-01-01"}
    async with ProviderStub() as stub, connected(FORMATS["anthropic"], stub, options=options) as line:
        await line.pieces(request())
        await line.pieces(request(worker=Worker("w", "stub", "m", api_version="2023-06-01")))
    assert [request.header("anthropic-version") for request in stub.requests] == ["2023-01-01", "2023-06-01"]


async def test_a_refused_parameter_is_a_400_that_names_it_unless_another_worker_takes_it(tmp_path: Path) -> None:
    async def ask(client: Any, **changes: Any) -> Any:
        body = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hi"}], **changes}
        return await client.post("/v1/chat/completions", json=body)

    async with ProviderStub() as stub:
        pool = POOL.format(url=stub.anthropic_url, top_p="take")
        environ = {"NEAR_KEY": KEYS["anthropic"]}
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            assert (await ask(client, temperature=0.5)).status_code == 200  # dropped, and noted
            assert (await ask(client, top_p=0.5)).status_code == 200  # the other worker takes it
            refused = await ask(client, top_p=0.5, seed=7)
            run = (await client.get("/v1/runs")).json()["data"][-1]["id"]
            events = (await client.get(f"/v1/runs/{run}/events")).json()["data"]
    assert [json.loads(request.body).get("temperature") for request in stub.requests_for("old-1")] == [None]
    assert [json.loads(request.body).get("top_p") for request in stub.requests_for("new-1")] == [0.5]
    assert [event["body"]["ignored"] for event in events if event["kind"] == "call.intended"] == [["temperature"]]
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("top_p", "no_eligible_worker")
    assert "old: takes no top_p" in error["message"]
    assert "new: takes no seed" in error["message"]
