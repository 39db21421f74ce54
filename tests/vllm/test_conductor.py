"""The whole service over a real vLLM server: the tiny random model conducts, and answers as a worker too.

What it writes is nonsense, which is the point: at temperature 1 it samples whatever the schema permits, and still
every plan must be one that can be executed and explained.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from app.core.plan.proposals import REASON_CHARS
from tests.conformance.test_rehearsal import EASY
from tests.harness.processes import KEY, Caller, environment, open_caller, running_process
from tests.vllm.cable import cable
from tests.vllm.server import CONTEXT, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RUNS: Final = 16
REASONED: Final = 4
"""Runs whose conductor is asked for its reasons."""
SECONDS: Final = 400
"""The time limit of runs. A plan gets two fifths of it, and its first token a ninth; one that is late is rejected, and
four plans at once take long on a busy machine."""
WORKERS: Final = ("red", "green", "blue")
SAGE: Final = "sage"
SUBTASK_CHARS: Final = 600
MOST_WITHOUT_TEXT: Final = 3
"""Tokens: the end, and special ones before it. Each is one of a thousand, so more are not seen."""


def pool(server: VllmServer, conductor_url: str = "") -> str:
    """Three workers and the conductor are the one vLLM model under several names; the fourth worker is rehearsed."""
    urls = dict.fromkeys(WORKERS, server.base_url) | {"conductor": conductor_url or server.base_url}
    served = "".join(
        f"""
[providers.{name}]
format = "openai"
base_url = "{url}"
options = {{ positional = true, logprobs = true }}
[workers.{name}]
provider = "{name}"
model = "{server.model}"
price = {{ input = 1, output = 2 }}
context = {CONTEXT}
pooled = {str(name in WORKERS).lower()}
"""
        for name, url in urls.items()
    )
    return f"""{served}
[providers.rehearsal]
format = "rehearsal"
options = {{ delay = 0 }}
[workers.{SAGE}]
provider = "rehearsal"
model = "sage"
price = {{ input = 1, output = 2 }}
[tiers.baton-mini]
pool = {list(WORKERS)}
conductor = {{ kind = "fixed", workers = ["red"] }}
limits = {{ steps = 1, output_tokens = 24 }}
[tiers.baton-ultra]
pool = "all"
conductor = {{ kind = "model", worker = "conductor", temperature = 1.0 }}
fallback = "{SAGE}"
limits = {{ steps = 3, output_tokens = 48, attempts = 2, seconds = {SECONDS} }}
efforts.low = {{ steps = 2, output_tokens = 12 }}
efforts.medium = {{}}
[tiers.baton-reasons]
pool = "all"
conductor = {{ kind = "model", worker = "conductor", temperature = 1.0, reasons = true }}
fallback = "{SAGE}"
limits = {{ steps = 2, output_tokens = 12, seconds = {SECONDS} }}
"""


def write_environment(folder: Path, text: str, **more: str) -> dict[str, str]:
    """The environment of a service with this pool file."""
    (folder / "pool.toml").write_text(text)
    return environment(folder, BATON_POOL=str(folder / "pool.toml"), BATON_BOOTSTRAP_KEY=KEY, **more)


@pytest.fixture(scope="module")
def by_file(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A service whose pool file names the server several times over."""
    folder = tmp_path_factory.mktemp("file")
    environ = write_environment(folder, pool(vllm_server))
    with running_process("serve", folder, environ) as process, open_caller(process.url, timeout=SECONDS) as caller:
        yield caller


@pytest.fixture(scope="module")
def by_url(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A service that was told nothing but where the server is."""
    folder = tmp_path_factory.mktemp("url")
    urls = {"BATON_CONDUCTOR_URL": vllm_server.base_url, "BATON_CONDUCTOR_MODEL": vllm_server.model}
    urls |= {"VLLM_BASE_URL": vllm_server.base_url, "VLLM_MODELS": vllm_server.model}
    environ = environment(folder, BATON_BOOTSTRAP_KEY=KEY, **urls)
    with running_process("serve", folder, environ) as process, open_caller(process.url, timeout=120) as caller:
        yield caller


def ask(caller: Caller, tier: str, question: str, streams: bool, **more: Any) -> tuple[str, dict[str, Any]]:
    return (caller.ask_streaming if streams else caller.ask_whole)(tier, question, **more)


def check_usage(reply: dict[str, Any], run: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """OpenAI's identity over what is visible; visible and orchestration are the journal's sum over all calls."""
    usage, total = reply["usage"], run["total_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] + usage["prompt_tokens_details"]["orchestration_input_tokens"] == total["input"]
    rest = usage["completion_tokens_details"]["orchestration_output_tokens"]
    assert usage["completion_tokens"] + rest == total["output"]
    spent = [event["body"]["usage"] for event in events if event["kind"] == "call.finished"]
    assert (sum(usage["input"] for usage in spent), sum(usage["output"] for usage in spent)) == (
        total["input"],
        total["output"],
    )
    assert run["spent"] == {"usd": run["cost_usd"], "tokens": total["input"] + total["output"]}
    assert run["held"] == {"usd": 0.0, "tokens": 0}


def check_call(attempt: dict[str, Any]) -> None:
    """It went well, and its tokens are the server's own figures."""
    assert (attempt["outcome"], attempt["error"]) == ("ok", None)
    assert attempt["usage"]["input"] > 0
    assert attempt["usage"]["output"] > 0
    assert attempt["usage"]["estimated"] is False
    assert attempt["request"]


def check_replacement(step: dict[str, Any], attempts: list[dict[str, Any]]) -> None:
    """Nobody was replaced, or one worker by another, because all that it wrote were tokens without a text."""
    replaced = attempts[:-1]
    assert len(replaced) <= 1, attempts
    assert all(
        attempt["finish"] == "stop" and attempt["usage"]["output"] <= MOST_WITHOUT_TEXT for attempt in replaced
    ), attempts
    assert step["worker"] == attempts[-1]["worker"]
    assert step["worker"] not in [attempt["worker"] for attempt in replaced]


def check_journal(events: list[dict[str, Any]]) -> None:
    """Numbered without gaps, one end, and one outcome for each intent, which comes first."""
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    kinds = [event["kind"] for event in events]
    assert (kinds[0], kinds[-1]) == ("run.admitted", "run.succeeded")
    assert "plan.rejected" not in kinds
    places = {}
    for kind in ("call.intended", "call.finished"):
        places[kind] = {event["body"]["call"]: event["seq"] for event in events if event["kind"] == kind}
    assert places["call.intended"]
    assert places["call.intended"].keys() == places["call.finished"].keys()
    assert kinds.count("call.intended") == kinds.count("call.finished") == len(places["call.intended"])
    assert all(at < places["call.finished"][call] for call, at in places["call.intended"].items())


def check_plan(run: dict[str, Any], workers: tuple[str, ...]) -> None:
    """One proposal of the model, accepted, whose every choice has its probability."""
    (proposal,) = run["proposals"]
    assert (proposal["mode"], proposal["conductor"], proposal["state"]) == ("first", "model", "accepted")
    (planning,) = proposal["attempts"]
    check_call(planning)
    assert planning["finish"] == "stop"
    assert sorted(proposal["order"]) == sorted(workers)
    assert run["topology"] == proposal["topology"]
    assert 1 <= len(run["steps"]) <= run["limits"]["steps"]
    for step in run["steps"]:
        assert 0 < step["probability"] <= 1
        assert step["planned_worker"] in workers
        assert step["access"]
        assert all(source == "user" or source < step["n"] for source in step["access"])
        assert len(set(step["access"])) == len(step["access"])


def check_step(caller: Caller, run: dict[str, Any], n: int, question: str) -> str:
    """It was executed as it was planned: the worker saw its subtask and its access list. Returns what it said.

    The model may end its answer with the first token. Such an answer is empty, and then another worker is asked once.
    """
    step = caller.read(f"/v1/runs/{run['id']}/steps/{n}")
    attempts = step["attempts"]
    assert (step["state"], attempts[0]["worker"]) == ("done", step["planned_worker"])
    for attempt in attempts:
        check_call(attempt)
        assert attempt["access"] == step["access"]
    check_replacement(step, attempts)
    assert 1 <= len(step["subtask"]) <= SUBTASK_CHARS
    text = "".join(part["text"] for message in step["messages"] for part in message["content"])
    assert step["subtask"] in text
    assert (question in text) is ("user" in step["access"])
    output: str = step["output"]
    return output


def test_every_plan_of_a_real_model_is_executed_and_explained(by_file: Caller) -> None:
    def one(place: int) -> tuple[dict[str, Any], int]:
        question, streams = EASY[place][0], bool(place % 4)
        answer, reply = ask(by_file, "baton-ultra", question, streams)
        run, events = by_file.run(reply["baton"]["run"]), by_file.events(reply["baton"]["run"])
        check_journal(events)
        check_plan(run, (*WORKERS, SAGE))
        outputs = [check_step(by_file, run, step["n"], question) for step in run["steps"]]
        assert answer == outputs[run["end"]["step"]]
        assert (run["state"], run["degraded"], reply["baton"]["degraded"]) == ("succeeded", False, False)
        check_usage(reply, run, events)
        return run, reply.get("deltas", 0)

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(one, range(RUNS)))
    runs = [run for run, _ in results]
    assert len({step["worker"] for run in runs for step in run["steps"]}) > 1
    assert max(len(run["steps"]) for run in runs) > 1
    # An answer that was there before its plan was accepted comes at once, so not every stream has several deltas.
    assert max(deltas for _, deltas in results) > 1
    assert by_file.read("/v1/runs", tier="baton-ultra", degraded="true")["data"] == []


def test_a_real_model_gives_a_bounded_reason_wherever_the_schema_asks_for_one(by_file: Caller) -> None:
    def one(place: int) -> list[dict[str, Any]]:
        _, reply = ask(by_file, "baton-reasons", EASY[place][0], streams=False)
        run = by_file.run(reply["baton"]["run"])
        check_plan(run, (*WORKERS, SAGE))
        explained = by_file.read(f"/v1/runs/{run['id']}/explain")
        steps = [reason for step in explained["steps"] for reason in (step["reason"], step["withheld"]["reason"])]
        return [explained["shape"]["reason"], *steps]

    with ThreadPoolExecutor(4) as threads:
        reasons = [reason for reasons in threads.map(one, range(REASONED)) for reason in reasons]
    assert {reason["state"] for reason in reasons} <= {"given", "none"}, "a reason may be empty"
    texts = [reason["text"] for reason in reasons if reason["state"] == "given"]
    assert len(texts) > len(reasons) / 2
    assert max(map(len, texts)) <= REASON_CHARS


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("tier", "effort"), [("baton-mini", "medium"), ("baton-ultra", "minimal"), ("baton-ultra", "low")]
)
def test_a_service_that_knows_two_urls_conducts_and_works_with_them(
    by_url: Caller, tier: str, effort: str, streams: bool
) -> None:
    answer_text, reply = ask(by_url, tier, EASY[0][0], streams, max_tokens=24, reasoning_effort=effort)
    run, events = by_url.run(reply["baton"]["run"]), by_url.events(reply["baton"]["run"])
    check_journal(events)
    check_usage(reply, run, events)
    if tier == "baton-ultra":
        check_plan(run, ("vllm/conductor",))
    answer = by_url.read(f"/v1/runs/{run['id']}/steps/{run['end']['step']}")
    assert answer_text == answer["output"]
    assert 0 < answer["attempts"][0]["usage"]["output"] <= 24
    assert all(step["worker"] == "vllm/conductor" for step in run["steps"])


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_mini_asks_one_worker_once(by_file: Caller, streams: bool) -> None:
    _, reply = ask(by_file, "baton-mini", EASY[1][0], streams)
    run, events = by_file.run(reply["baton"]["run"]), by_file.events(reply["baton"]["run"])
    check_journal(events)
    check_usage(reply, run, events)
    (step,) = run["steps"]
    assert (step["attempts"][0]["worker"], step["access"]) == ("red", ["user"])
    check_replacement(step, step["attempts"])
    assert reply["usage"]["completion_tokens_details"]["orchestration_output_tokens"] == 0


@pytest.mark.parametrize("cut_after", [None, 600, 2400], ids=["is-gone", "breaks-off-early", "breaks-off-later"])
async def test_a_conductor_that_fails_is_replaced_by_the_fallback(
    vllm_server: VllmServer, tmp_path: Path, cut_after: int | None
) -> None:
    """Whatever had begun of the plan is skipped, and the fallback worker answers alone."""
    port = urlsplit(vllm_server.base_url).port
    assert port is not None
    async with cable(port) as line:
        environ = write_environment(tmp_path, pool(vllm_server, line.base_url))
        with running_process("serve", tmp_path, environ) as process, open_caller(process.url, timeout=60) as caller:
            line.cut_after = cut_after
            if cut_after is None:
                await line.pull()
            question, answer = EASY[5]
            answer_text, reply = await asyncio.to_thread(caller.ask_whole, "baton-ultra", question)
            run = await asyncio.to_thread(caller.run, reply["baton"]["run"])
    assert answer in answer_text
    assert (run["state"], run["degraded"], reply["baton"]["degraded"]) == ("succeeded", True, True)
    first, last = run["proposals"]
    assert (first["state"], first["outage"]) == ("rejected", True)
    assert first["attempts"][0]["outcome"] in ("error", "truncated")
    assert (last["mode"], last["state"]) == ("fallback", "accepted")
    assert [step["worker"] for step in run["steps"] if step["proposal"] == 1] == [SAGE]
    assert all(step["state"] in ("done", "skipped") for step in run["steps"])
