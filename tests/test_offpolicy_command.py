"""`baton offpolicy` over a journal that the real service wrote: what it counts, what it leaves out, what it refuses."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.command import offpolicy
from app.command.parser import parser
from app.core.feedback import Feedback
from app.errors import ConfigInvalid
from app.wiring import House
from tests.api.house import finish, open_house, order, pool_text
from tests.stubs import ProviderStub, Reply

RUNS = 12
DRAWN = Reply(
    chunks=('{"steps": [{"worker": ', "1", ', "subtask": "Solve.", "access": ["user"]}]}'), logprob=math.log(0.5)
)


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("planner", DRAWN)
        yield running


def pool(stub: ProviderStub, temperature: float = 1.0) -> str:
    asks = '{ kind = "model", worker = "planner"'
    return pool_text(stub).replace(f"conductor = {asks} }}", f"conductor = {asks}, temperature = {temperature} }}", 1)


async def ask(opened: House, tier: str, score: float | None) -> str:
    """The worker that one run went to, rated: a run over alpha is worth `score`, any other one nothing."""
    ended = (await finish(await opened.drivers.start(order(opened, tier)))).ended
    worker = ended.state.steps[0].worker
    if score is not None:
        value = score if worker == "alpha" else 0.0
        given = Feedback(f"fb_{ended.state.run}", ended.state.run, "tenant", "key", 5.0, "explicit", "user", "1", value)
        await opened.means.store.rate(given)
    return worker


async def told(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What the command prints."""
    environ = {"BATON_POOL": str(folder / "pool.toml"), "BATON_DATA_DIR": str(folder), "BATON_PEPPER": "p" * 32}
    asked = parser().parse_args(["offpolicy", *arguments])
    capsys.readouterr()
    assert await asyncio.to_thread(offpolicy.run, asked, environ, lambda: 2e9) == status
    return capsys.readouterr().out


async def test_a_models_choices_are_weighed_by_their_probabilities(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_house(tmp_path, pool(stub)) as opened:
        workers = [await ask(opened, "baton-ultra", 1.0) for _ in range(RUNS)]
        await ask(opened, "baton-ultra", None)
        await ask(opened, "baton-mini", 1.0)
        printed = await told(tmp_path, capsys, "--policy", "always alpha", "--policy", "uniform", "--json")
        alpha, uniform = json.loads(printed)
        assert (alpha["tier"], alpha["layer"], alpha["shape"]) == ("baton-ultra", "model", '[["user"]]')
        assert alpha["rows"] == RUNS
        right = workers.count("alpha")
        assert alpha["ips"]["value"] == pytest.approx(2 * right / RUNS, abs=1e-4)
        assert uniform["ips"]["value"] == pytest.approx(2 * right / RUNS / 3, abs=1e-4)
        assert alpha["ess"] == pytest.approx(right)
        assert {alpha["verdict"], uniform["verdict"]} == {"refused"}

        words = await told(tmp_path, capsys)
        assert f'baton-ultra, model, plans of the shape [["user"]]: {RUNS} decisions' in words
        assert "rows of that policy, and 100 are needed" in words
        assert "rated, and of no use: 1, because no answer, or a plan without probabilities" in words
        assert "always beta" in words or "always gamma" in words
        assert "There are no rated runs" in await told(tmp_path, capsys, "--tier", "baton-mini", status=1)


async def test_what_a_model_decodes_greedily_was_not_drawn(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_house(tmp_path, pool(stub, 0.0)) as opened:
        await ask(opened, "baton-ultra", 1.0)
        words = await told(tmp_path, capsys, status=1)
    assert "because the model decodes at another temperature than 1" in words


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="--policy: write greedy"):
        offpolicy.run(
            parser().parse_args(["offpolicy", "--policy", "best"]), {"BATON_DATA_DIR": str(tmp_path)}, lambda: 0.0
        )
