"""Several endpoints of one provider: the least loaded first, those that fail skipped, and the journal says which."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.cli.runs.run_words import attempt
from app.core.pool.catalog import EndpointSpec, ProviderSpec
from app.core.run.events import Kind
from app.errors import ConfigInvalid, WorkerError, WorkerMisconfigured, WorkerUnavailable
from app.process.config import configure, endpoint_secret
from app.process.wiring import Runtime
from app.providers.adapters.openai import OpenAIProvider
from app.providers.endpoints import Endpoints
from app.providers.formats import adapter
from tests.conformance.wire_formats import PATIENT, request, text_of_pieces
from tests.harness.in_process import ask, bodies_of, client_of, events, finish, order, plan_text, running_service
from tests.harness.waiting import until
from tests.stubs import KEYS, Fail, Hang, ProviderStub, Reply, Truncate

POOL = """
[providers.near]
format = "openai"
key = "NEAR_KEY"
endpoints = [
  {{ name = "east", base_url = "{east}", weight = 2 }},
  {{ name = "west", base_url = "{west}", key = "WEST_KEY" }},
]

[workers.alpha]
provider = "near"
model = "model-a"
price = {{ input = 1.00, output = 2.00 }}

[tiers.baton-mini]
pool = ["alpha"]
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha"] }}
"""

CONDUCTED = POOL.replace(
    '{{ kind = "fixed", shape = "single", workers = ["alpha"] }}', '{{ kind = "model", worker = "alpha" }}'
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def two(*stubs: ProviderStub, weights: tuple[float, ...] = (1, 1), tick: Clock | None = None) -> Endpoints:
    """A provider with an endpoint at each stub, called a, b, and so on."""
    endpoints = []
    for name, stub, weight in zip("abc", stubs, weights, strict=False):
        spec = EndpointSpec(name, stub.openai_url, weight)
        provider_spec = ProviderSpec("stub", "openai", spec.base_url)
        endpoints.append((spec, OpenAIProvider(provider_spec, KEYS["openai"])))
    return Endpoints(endpoints, tick=tick or Clock(), chance=lambda: 0.5)


async def call_one_endpoint(endpoints: Endpoints) -> tuple[str, WorkerError | None]:
    """The endpoint of one call, and its error if it failed."""
    chosen, question = endpoints.choose(), request()
    try:
        pieces = [piece async for batch in chosen.stream(question, chosen.render(question), PATIENT) for piece in batch]
    except WorkerError as error:
        return chosen.endpoint, error
    assert text_of_pieces(pieces) == "Hello there."
    return chosen.endpoint, None


def test_calls_in_flight_are_spread_by_weight() -> None:
    endpoints = two(ProviderStub(), ProviderStub(), weights=(3, 1))
    choices = [endpoints.choose() for _ in range(8)]
    assert Counter(call.endpoint for call in choices) == {"a": 6, "b": 2}
    del choices[:]  # calls that were never made are in flight no longer
    assert Counter(endpoints.choose().endpoint for _ in range(8)) == {"a": 6, "b": 2}


async def test_the_least_loaded_endpoint_takes_the_next_call() -> None:
    async with ProviderStub() as near, ProviderStub() as far:
        near.always("model-a", Reply(endless=True, gap=0.01))
        endpoints = two(near, far)
        question = request()
        busy: Any = endpoints.choose()
        stream = busy.stream(question, busy.render(question), PATIENT)
        await anext(stream)
        try:
            assert [(await call_one_endpoint(endpoints))[0] for _ in range(3)] == ["b", "b", "b"]
        finally:
            await stream.aclose()
        await near.requests[0].wait_until_gone()
        assert endpoints.choose().endpoint == "a"
        await endpoints.close()


@pytest.mark.parametrize(
    ("act", "kind"), [(Fail(status=503), WorkerUnavailable), (Fail(status=401), WorkerMisconfigured)]
)
async def test_an_endpoint_that_fails_is_skipped_until_a_probe_succeeds(act: Fail, kind: type[WorkerError]) -> None:
    clock = Clock()
    async with ProviderStub() as near, ProviderStub() as far:
        near.script("model-a", act)
        endpoints = two(near, far, tick=clock)
        name, error = await call_one_endpoint(endpoints)
        assert (name, type(error)) == ("a", kind)
        assert error is not None
        assert error.elsewhere
        assert [(await call_one_endpoint(endpoints))[0] for _ in range(4)] == ["b"] * 4
        clock.now += 600
        probe = endpoints.choose()
        assert probe.endpoint == "a"
        del probe  # it is not called after all
        probe = endpoints.choose()
        assert probe.endpoint == "a"
        assert endpoints.choose().endpoint == "b"  # one probe at a time
        question = request()
        async for _ in probe.stream(question, probe.render(question), PATIENT):
            pass
        assert {(await call_one_endpoint(endpoints))[0] for _ in range(6)} == {"a", "b"}
        await endpoints.close()


async def test_if_all_endpoints_fail_one_is_called_nevertheless_and_the_worker_is_to_blame() -> None:
    async with ProviderStub() as near, ProviderStub() as far:
        for stub in (near, far):
            stub.script("model-a", Fail(status=503), Fail(status=503))
        endpoints = two(near, far)
        errors = [(await call_one_endpoint(endpoints))[1] for _ in range(3)]
        assert [error.elsewhere for error in errors if error] == [True, False, False]
        await endpoints.close()


async def test_a_refused_request_says_nothing_of_its_endpoint() -> None:
    async with ProviderStub() as near, ProviderStub() as far:
        near.always("model-a", Fail(status=400))
        endpoints = two(near, far)
        errors = [(await call_one_endpoint(endpoints))[1] for _ in range(4)]
        assert [error is not None and error.elsewhere for error in errors] == [False] * 4
        assert len(near.requests) == 2
        await endpoints.close()


@pytest.mark.parametrize(("slow", "seconds"), [(Hang(), 0.3), (Reply(endless=True, gap=0.01), 1.5)])
async def test_the_end_of_a_callers_time_says_nothing_of_an_endpoint(
    tmp_path: Path, slow: Hang | Reply, seconds: float
) -> None:
    async with ProviderStub() as east, ProviderStub() as west:
        for stub in (east, west):
            stub.always("model-a", slow)
        pool = POOL.format(east=east.openai_url, west=west.openai_url)
        environ = {"NEAR_KEY": KEYS["openai"], "WEST_KEY": KEYS["openai"]}
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            reply = await ask(client, baton={"budget": {"seconds": seconds}})
            assert reply.is_success == isinstance(slow, Reply), reply.text
            assert figures(runtime, "state") == {"east": 0, "west": 0}


async def test_a_run_goes_on_at_the_other_endpoint_and_the_journal_names_both(tmp_path: Path) -> None:
    """The worker is the tier's only one: it is called again at once, at its other endpoint, and keeps its good name."""
    async with ProviderStub() as east, ProviderStub() as west:
        east.always("model-a", Fail(status=429, retry_after=600))
        pool = POOL.format(east=east.openai_url, west=west.openai_url)
        environ = {"NEAR_KEY": KEYS["openai"], "WEST_KEY": KEYS["openai"]}
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            body = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hi"}]}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == "Hello there."
            run = (await client.get("/v1/runs")).json()["data"][0]["id"]
            attempts = (await client.get(f"/v1/runs/{run}")).json()["steps"][0]["attempts"]
            assert runtime.pool.health.ejected_workers(list(runtime.pool.catalog().workers.values())) == {}
            assert figures(runtime, "state") == {"east": 2, "west": 0}
            assert figures(runtime, "ejections_total", reason="rate_limited") == {"east": 1, "west": None}
            configuration = runtime.pool.configuration
            runtime.pool.install(configuration)
            assert figures(runtime, "state") == {"east": 2, "west": 0}
            changed = replace(configuration.catalog.providers["near"], traceparent=False)
            catalog = replace(configuration.catalog, providers={"near": changed})
            runtime.pool.install(replace(configuration, catalog=catalog))
            assert figures(runtime, "state") == {"east": 0, "west": 0}
        assert [(attempt["endpoint"], attempt["outcome"]) for attempt in attempts] == [
            ("east", "error"),
            ("west", "ok"),
        ]
        assert "endpoint west" in attempt(attempts[1])
        attempts_text = str(attempts)
        assert KEYS["openai"] not in attempts_text
        assert east.url not in attempts_text


async def test_the_rate_limit_that_ends_first_is_waited_for_if_all_endpoints_have_one(tmp_path: Path) -> None:
    async with ProviderStub() as east, ProviderStub() as west:
        east.script("model-a", Fail(status=429, retry_after=0.3))
        west.script("model-a", Fail(status=429, retry_after=600))
        pool = POOL.format(east=east.openai_url, west=west.openai_url)
        environ = {"NEAR_KEY": KEYS["openai"], "WEST_KEY": KEYS["openai"]}
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            reply = await ask(client)
        assert reply.json()["choices"][0]["message"]["content"] == "Hello there.", reply.text
        assert (len(east.requests), len(west.requests)) == (2, 1)


async def test_all_runs_in_flight_at_an_endpoint_that_fails_go_on_at_the_other_one(tmp_path: Path) -> None:
    """They are more than the retry budget of a worker has: it is not the worker that has failed."""
    async with ProviderStub() as east, ProviderStub() as west:
        east.always("model-a", Fail(status=503, delay=0.2))
        west.always("model-a", Reply(header_delay=0.2))
        pool = POOL.format(east=east.openai_url, west=west.openai_url)
        environ = {"NEAR_KEY": KEYS["openai"], "WEST_KEY": KEYS["openai"]}
        async with running_service(tmp_path, pool, environ) as runtime:
            runs = [await runtime.runs.start(order(runtime, "baton-mini")) for _ in range(12)]
            outcomes = [await finish(followed_run) for followed_run in runs]
        assert [outcome.ended.state.state for outcome in outcomes] == ["succeeded"] * 12


async def test_a_plan_is_asked_for_again_at_the_other_endpoint(tmp_path: Path) -> None:
    """Both calls are journaled; the conductor has not failed, so that no fallback decides."""
    async with ProviderStub() as east, ProviderStub() as west:
        east.always("model-a", Fail(status=503))
        west.script("model-a", Reply(chunks=(plan_text((0, "Solve it.", ["user"])),)))
        pool = CONDUCTED.format(east=east.openai_url, west=west.openai_url)
        environ = {"NEAR_KEY": KEYS["openai"], "WEST_KEY": KEYS["openai"]}
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            answer = (await ask(client)).json()
            run = answer["baton"]["run"]
            [proposal] = (await client.get(f"/v1/runs/{run}")).json()["proposals"]
            calls = bodies_of(await events(runtime, run), Kind.CALL_INTENDED)
            workers = list(runtime.pool.catalog().workers.values())
            assert runtime.pool.health.ejected_workers(workers) == {}
        assert answer["choices"][0]["message"]["content"] == "Hello there."
        assert not answer["baton"]["degraded"]
        assert [(call["n"], call["endpoint"]) for call in calls] == [(None, "east"), (None, "west"), (0, "west")]
        assert [(call["endpoint"], call["outcome"]) for call in proposal["attempts"]] == [
            ("east", "error"),
            ("west", "ok"),
        ]


async def test_a_plan_that_broke_off_is_not_asked_for_again_at_the_other_endpoint(tmp_path: Path) -> None:
    """Its steps may be in progress."""
    async with ProviderStub() as east, ProviderStub() as west:
        plan = plan_text((0, "Solve it.", ["user"]), (0, "Check it.", ["user", 0]))
        east.script("model-a", Reply(chunks=(plan[:-30],), fault=Truncate()))
        pool = CONDUCTED.format(east=east.openai_url, west=west.openai_url)
        environ = {"NEAR_KEY": KEYS["openai"], "WEST_KEY": KEYS["openai"]}
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            answer = (await ask(client)).json()
            calls = bodies_of(await events(runtime, answer["baton"]["run"]), Kind.CALL_INTENDED)
        assert answer["baton"]["degraded"]
        assert [call["endpoint"] for call in calls if call["n"] is None] == ["east"]


async def test_an_endpoint_is_probed_also_by_runs_whose_output_is_cut(tmp_path: Path) -> None:
    async with ProviderStub() as east, ProviderStub() as west:
        east.script("model-a", Fail(status=429, retry_after=0.05))
        pool = POOL.format(east=east.openai_url, west=west.openai_url)
        environ = {"NEAR_KEY": KEYS["openai"], "WEST_KEY": KEYS["openai"]}
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            await ask(client)
            await until(lambda: figures(runtime, "state")["east"] == 1)
            for _ in range(3):
                body = (await ask(client, baton={"budget": {"usd": 0.004}})).json()
                [attempt] = (await client.get(f"/v1/runs/{body['baton']['run']}")).json()["steps"][0]["attempts"]
                assert attempt["max_tokens"] < 2_000
            assert figures(runtime, "state") == {"east": 0, "west": 0}


def figures(runtime: Runtime, name: str, **labels: str) -> dict[str, float | None]:
    """The value of a metric of each endpoint."""
    registry, near = runtime.context.telemetry.registry, {"provider": "near", **labels}
    return {
        endpoint: registry.get_sample_value(f"baton_endpoint_{name}", {**near, "endpoint": endpoint})
        for endpoint in ("east", "west")
    }


# --- the pool file


ENVIRON = {"NEAR_KEY": "sk-near", "WEST_KEY": "sk-west"}
GOOD = POOL.format(east="http://127.0.0.1:9/east", west="http://127.0.0.1:9/west")


def write_pool(folder: Path, text: str) -> dict[str, str]:
    (folder / "pool.toml").write_text(text)
    return ENVIRON | {"BATON_POOL": str(folder / "pool.toml")}


def test_endpoints_of_a_pool_file(tmp_path: Path) -> None:
    configuration = configure(write_pool(tmp_path, GOOD))
    spec = configuration.catalog.providers["near"]
    assert spec.endpoints == (
        EndpointSpec("east", "http://127.0.0.1:9/east", 2.0),
        EndpointSpec("west", "http://127.0.0.1:9/west", 1.0, "WEST_KEY"),
    )
    assert configuration.secrets["near"].get_secret_value() == "sk-near"
    assert configuration.secrets[endpoint_secret("near", "west")].get_secret_value() == "sk-west"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('name = "west"', 'name = "east"', "endpoints.1.name: east is the name of another endpoint"),
        ("weight = 2", "weight = 0", "endpoints.0.weight: must be greater than 0"),
        ("weight = 2", "wieght = 2", "endpoints.0.wieght: is no field here; did you mean weight?"),
        ('key = "WEST_KEY"', 'key = "sk-live-1"', "endpoints.1.key: is not the name of an environment variable"),
        ('key = "WEST_KEY"', 'key = "EAST_KEY"', "endpoints.1.key: the environment variable EAST_KEY is not set"),
        ("http://127.0.0.1:9/east", "ftp://east", "endpoints.0.base_url: is not an HTTP URL"),
        ("endpoints = [", 'base_url = "http://127.0.0.1:9"\nendpoints = [', "base_url: is of no use beside endpoints"),
        ("endpoints = [", 'ca = "/etc/ca.pem"\nendpoints = [', "ca: "),
    ],
)
def test_endpoints_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, fault: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        configure(write_pool(tmp_path, GOOD.replace(old, new)))
    assert any(f"providers.near.{fault}" in line for line in caught.value.faults), caught.value.faults


def test_no_variable_moves_a_provider_with_several_endpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        configure(write_pool(tmp_path, GOOD) | {"NEAR_BASE_URL": "http://127.0.0.1:9"})
    assert "providers.near.endpoints: cannot be overridden by NEAR_BASE_URL" in caught.value.faults[0]


async def test_the_bytes_do_not_depend_on_the_endpoint() -> None:
    """The auditor renders them again without knowing where they went."""
    spec = configure_spec()
    single_endpoint = replace(spec, base_url=spec.endpoints[0].base_url, endpoints=())
    assert adapter(spec).render(request()) == adapter(single_endpoint).render(request())


def configure_spec() -> ProviderSpec:
    """A provider at OpenAI, which has spellings of its own, and at a compatible server."""
    places = (EndpointSpec("own", "https://api.openai.com/v1"), EndpointSpec("other", "http://127.0.0.1:9/v1"))
    return ProviderSpec("near", "openai", endpoints=places)
