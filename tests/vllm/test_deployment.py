"""A LoRA adapter into a real vLLM, beside a running service: loaded, checked, shadowed, canary, live, and back again.

The commands are the operator's own. That everything else is refused is shown with a stub
(`tests/cli/test_conductor.py`).
"""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from app.__main__ import main
from app.core.plan.proposals import by_ordinal, read_plan
from app.engine.conductors.versions import LOOK_SECONDS
from app.lab import manifest
from app.lab.evaluate import draw_exam
from app.lab.plans import STEPS
from tests.harness.processes import Caller, open_caller, running_process
from tests.vllm.server import OFFLINE, PYTHON, ROOT, TRAINED, VllmServer
from tests.vllm.test_conductor import write_environment
from tests.vllm.test_trained import SPLIT, pool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RUNS, CANARIES = 4, 16


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the checkpoint with a manifest of its own."""
    out = tmp_path_factory.mktemp("adapter") / "shaken"
    subprocess.run(
        [str(PYTHON), "-W", "ignore", "-m", "tests.vllm.adapter", str(TRAINED), str(out)],
        env=os.environ | OFFLINE | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=200,
        check=True,
    )
    return out


def models(caller: Caller, seed: int, runs: int = RUNS) -> set[str]:
    """The models that conducted some fresh tasks, none of which fell back."""
    names = set()
    for lesson in draw_exam(SPLIT, runs, seed):
        _, reply = caller.ask_whole("baton-ultra", lesson.problem.text)
        run = caller.run(reply["baton"]["run"])
        assert (run["state"], run["degraded"]) == ("succeeded", False)
        names.add(run["proposals"][0]["attempts"][0]["model"])
    return names


def test_an_adapter_goes_into_service_and_out_again(
    trained_server: VllmServer, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = write_environment(tmp_path, pool(trained_server))

    def conductor(*words: str) -> str:
        """A verb of `baton conductor` that succeeds, and what it says."""
        capsys.readouterr()
        assert main(["conductor", *words], environ) == 0, capsys.readouterr().err
        if words[0] in ("canary", "promote", "rollback"):
            time.sleep(LOOK_SECONDS + 1.0)  # until the gateway has looked
        return capsys.readouterr().out

    name = manifest.read(adapter)[0].name
    with running_process("serve", tmp_path, environ) as process, open_caller(process.url, timeout=120) as caller:
        assert models(caller, 21) == {trained_server.model}
        output = conductor("deploy", "conductor", str(adapter))
        checked = re.search(r'"prompts": (\d+), "valid": (\d+), "known": (\d+), "agreed": (\d+)', output)
        assert checked, output
        prompts, valid, known_prompts, agreed = map(int, checked.groups())
        assert prompts == valid == known_prompts == 24
        assert agreed >= 23
        output = conductor("shadow", "conductor", name)
        assert f"{RUNS} of {RUNS} plans valid" in output
        assert models(caller, 22) == {trained_server.model}, "a shadow conducts nothing"
        conductor("canary", "conductor", name, "0.5")
        assert models(caller, 23, CANARIES) == {trained_server.model, name}
        conductor("promote", "conductor", name)
        assert models(caller, 24) == {name}
        conductor("rollback", "conductor")
        assert models(caller, 25) == {trained_server.model}
        conductor("unload", "conductor", name)
        listed = httpx.get(f"{trained_server.base_url}/models", trust_env=False).json()["data"]
        assert name not in {model["id"] for model in listed}
        assert main(["audit", "check"], environ) == 0


def test_the_adapter_plans_otherwise_than_its_base_somewhere(adapter: Path) -> None:
    """Or the test above would not notice if it was never applied."""
    theirs, own = (manifest.read(folder)[1] for folder in (TRAINED, adapter))
    assert [prompt.messages for prompt in theirs] == [prompt.messages for prompt in own]
    assert 2 <= sum(prompt.plan != other.plan for prompt, other in zip(theirs, own, strict=True)) <= 22
    for prompt in own:
        assert prompt.plan
        assert read_plan(json.loads(prompt.plan), by_ordinal([str(n) for n in range(prompt.workers)]), STEPS)
