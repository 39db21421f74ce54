"""`baton offpolicy` over a journal that the real service wrote: what it counts, what it leaves out, what it refuses."""

import asyncio
import json
import math
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.cli.commands import parse
from app.cli.learning import offpolicy
from app.core.plan.arms import tier_for
from app.core.rating.feedback import Feedback
from app.errors import ConfigInvalid
from app.process.wiring import Runtime
from app.store.protocol import RunQuery
from tests.deploy.test_readme import blocks
from tests.gateway.test_damaged_data import change
from tests.harness.in_process import finish, order, pool_text, running_service
from tests.harness.waiting import until
from tests.stubs import ProviderStub, Reply

pytestmark = pytest.mark.long

GUIDE = (Path(__file__).resolve().parents[2] / "deploy" / "docs" / "offpolicy.md").read_text()
[DOCUMENTED] = [block for block in blocks("sh", GUIDE) if "offpolicy" in block]
RUNS = 12
DRAWN = Reply(
    chunks=('{"steps": [{"worker": ', "1", ', "subtask": "Solve.", "access": ["user"]}]}'), logprob=math.log(0.5)
)
BOTH = (
    '{"steps": [{"worker": 0, "subtask": "Draft.", "access": ["user"]}, '
    '{"worker": 1, "subtask": "Solve.", "access": ["user", 0]}]}'
)
"""A plan of two steps, of which one at least is of a worker other than beta."""


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("planner", DRAWN)
        yield running


def pool(stub: ProviderStub, temperature: float = 1.0) -> str:
    asks = '{ kind = "model", worker = "planner"'
    return pool_text(stub).replace(f"conductor = {asks} }}", f"conductor = {asks}, temperature = {temperature} }}", 1)


async def ask(runtime: Runtime, tier: str, score: float | None, **changes: Any) -> str:
    """The worker that one run went to, rated: a run over alpha is worth `score`, any other one nothing."""
    ended = (await finish(await runtime.runs.start(order(runtime, tier, **changes)))).ended
    worker = ended.state.steps[0].worker
    if score is not None:
        value = score if worker == "alpha" else 0.0
        rating = Feedback(
            f"fb_{ended.state.run}", ended.state.run, "tenant", "key", 5.0, "explicit", "user", "1", value
        )
        await runtime.context.store.rate(rating)
    return worker


async def output_of(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Return the text that the command prints."""
    environ = {"BATON_POOL": str(folder / "pool.toml"), "BATON_DATA_DIR": str(folder), "BATON_PEPPER": "p" * 32}
    options = parse(["offpolicy", *arguments])
    capsys.readouterr()
    assert await asyncio.to_thread(offpolicy.run, options, environ, time.time) == status
    return capsys.readouterr().out


async def test_a_models_choices_are_weighed_by_their_probabilities(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_service(tmp_path, pool(stub)) as runtime:
        workers = [await ask(runtime, "baton-ultra", 1.0) for _ in range(RUNS)]
        while "alpha" not in workers:  # whom the model chooses by a place among three, which are in an order by chance
            workers.append(await ask(runtime, "baton-ultra", 1.0))
        runs = len(workers)
        unrated = (await finish(await runtime.runs.start(order(runtime, "baton-ultra")))).ended.state.run
        await ask(runtime, "baton-ultra", None, origin_kind="replay", origin_run=unrated)  # no caller sees its answer
        await ask(runtime, "baton-mini", 1.0)
        printed = await output_of(tmp_path, capsys, "--policy", "always alpha", "--policy", "uniform", "--json")
        alpha, uniform = json.loads(printed)
        assert (alpha["tier"], alpha["layer"], alpha["shape"]) == ("baton-ultra", "model", '[["user"]]')
        assert alpha["rows"] == runs
        right = workers.count("alpha")
        assert alpha["ips"]["value"] == pytest.approx(2 * right / runs, abs=1e-4)
        assert uniform["ips"]["value"] == pytest.approx(2 * right / runs / 3, abs=1e-4)
        assert alpha["ess"] == pytest.approx(right)
        assert {alpha["verdict"], uniform["verdict"]} == {"refused"}
        assert (alpha["clusters"], alpha["unrated"]) == (1, 1), "all runs ask the same, and one was not rated"
        assert alpha["needed"] > runs

        words = await output_of(tmp_path, capsys)
        assert f'baton-ultra, model, plans of the shape [["user"]]: {runs} decisions' in words
        assert "rows of that policy, and 100 are needed; about " in words
        assert "runs of baton-ultra with an answer and no score: 1;" in words
        assert "rated, but not usable: 1, because no answer, or a plan without probabilities" in words
        assert "always beta" in words or "always gamma" in words
        assert "There are no rated runs" in await output_of(tmp_path, capsys, "--tier", "baton-mini", status=1)


async def test_a_selectors_choices_are_weighed_by_what_was_journaled(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = 'conductor = { kind = "fixed", shape = "single", workers = ["alpha"] }'
    chosen = (
        'conductor = { kind = "selector", templates = ["answer"], explore = 1.0, cost = 0.5, full_usd = "0.000001" }'
    )
    async with running_service(tmp_path, pool(stub).replace(single, chosen, 1)) as runtime:
        workers = [await ask(runtime, "baton-mini", 1.0) for _ in range(RUNS)]
        await ask(runtime, "baton-mini", 1.0, explore=False)
        arguments = ("--policy", "always answer alpha", "--policy", "greedy", "--policy", "current", "--json")
        alpha, greedy, current = json.loads(await output_of(tmp_path, capsys, *arguments))
        words = await output_of(tmp_path, capsys)
        nobody = await output_of(tmp_path, capsys, "--policy", "always alpha", status=1)
        assert "The arms are: answer alpha, answer beta, answer gamma" in nobody
        for line in DOCUMENTED.splitlines():
            assert await output_of(tmp_path, capsys, *shlex.split(line)[2:])
    assert (alpha["layer"], alpha["shape"], alpha["rows"]) == ("selector", "", RUNS)
    halved = 0.5 * workers.count("alpha") / RUNS
    assert alpha["ips"]["value"] == pytest.approx(3 * halved)
    assert alpha["logged"]["value"] == pytest.approx(halved)
    assert {greedy["rows"], current["rows"]} == {RUNS}
    assert "because nothing was left to chance" in words


async def test_a_plan_without_a_run_has_no_answer_that_could_be_rated(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_service(tmp_path, pool(stub)) as runtime:
        await ask(runtime, "baton-ultra", 1.0)
        await finish(await runtime.runs.start(order(runtime, "baton-ultra", preview=True)))
        printed = await output_of(tmp_path, capsys, "--policy", "uniform", "--json")
    assert json.loads(printed)[0]["unrated"] == 0


async def test_a_plan_that_nobody_approved_did_not_earn_what_the_fallback_did(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = "[tiers.baton-ultra]\n"
    rule = 'approval = { workers = ["alpha", "gamma"], seconds = 0.01, on_expiry = "fallback-plan" }\n'
    stub.always("planner", Reply(chunks=(BOTH,), logprob=math.log(0.5)))
    async with running_service(tmp_path, pool(stub).replace(tier, tier + rule)) as runtime:
        run = (await finish(await runtime.runs.start(order(runtime, "baton-ultra")))).ended.state.run

        async def has_answer() -> bool:
            return (await runtime.context.store.run(run)).state == "succeeded"

        await until(has_answer)
        rating = Feedback(f"fb_{run}", run, "tenant", "key", 5.0, "explicit", "user", "1", 1.0)
        await runtime.context.store.rate(rating)
        words = await output_of(tmp_path, capsys, status=1)
    assert "rated, but not usable: 1, because no answer, or a plan without probabilities" in words


async def test_a_choice_without_a_probability_is_counted_and_the_others_are_judged(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that reports the probabilities before its grammar's mask gives what the mask leaves next to none."""
    async with running_service(tmp_path, pool(stub)) as runtime:
        await ask(runtime, "baton-ultra", 1.0)
        stub.always("planner", replace(DRAWN, logprob=-20.0))
        await ask(runtime, "baton-ultra", 1.0)
        printed = await output_of(tmp_path, capsys, "--policy", "uniform", "--json")
        words = await output_of(tmp_path, capsys, "--policy", "uniform")
    assert json.loads(printed)[0]["rows"] == 1
    assert "rated, but not usable: 1, because no answer, or a plan without probabilities" in words


async def test_a_run_that_cannot_be_read_is_counted_and_the_others_are_judged(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_service(tmp_path, pool(stub), audits=False) as runtime:
        for _ in range(2):
            await ask(runtime, "baton-ultra", 1.0)
        damaged = (await runtime.context.store.runs(RunQuery(limit=1)))[0].id
        change(tmp_path, f"UPDATE events SET body = 'no json' WHERE run = '{damaged}' AND seq = 3")
        printed = await output_of(tmp_path, capsys, "--policy", "uniform", "--json")
        words = await output_of(tmp_path, capsys, "--policy", "uniform")
    assert json.loads(printed)[0]["rows"] == 1
    assert "rated, but not usable: 1, because its journal cannot be read" in words


async def test_an_arms_plans_are_judged_by_the_temperature_of_its_own_conductor(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model conducts another tier, at a temperature of 0."""
    stub.always("judge", DRAWN)
    arms = '[evaluation]\narms = true\nconductors = ["judge"]\n'
    judge = (
        '[workers.judge]\nprovider = "stub"\nmodel = "judge"\nprice = { input = 1.00, output = 2.00 }\n'
        '[tiers.baton-judged]\npool = ["alpha", "beta"]\nfallback = "beta"\n'
        'conductor = { kind = "model", worker = "judge" }\n'
    )
    async with running_service(tmp_path, pool(stub) + arms + judge) as runtime:
        model = "baton-ultra:conductor:judge"
        arm = tier_for(runtime.pool.catalog(), model)
        assert arm is not None
        base = replace(order(runtime, "baton-ultra"), tier=arm, model=model)
        state = (await finish(await runtime.runs.start(base))).ended.state
        rating = Feedback(f"fb_{state.run}", state.run, "tenant", "key", 5.0, "explicit", "user", "1", 1.0)
        await runtime.context.store.rate(rating)
        words = await output_of(tmp_path, capsys, status=1)
    assert "because the model decodes at a temperature other than 1" in words


async def test_what_a_model_decodes_greedily_was_not_drawn(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_service(tmp_path, pool(stub, 0.0)) as runtime:
        await ask(runtime, "baton-ultra", 1.0)
        words = await output_of(tmp_path, capsys, status=1)
    assert "because the model decodes at a temperature other than 1" in words


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="--policy: write greedy"):
        offpolicy.run(parse(["offpolicy", "--policy", "best"]), {"BATON_DATA_DIR": str(tmp_path)}, lambda: 0.0)
