"""From the journal to a conductor of real weights: rollouts are imitated, GRPO goes on from there with a reward that
the executor gives, and the adapter is loaded into the running vLLM and plans for the service.

The model is tiny and its weights are random, so what it learns is the form of a plan; that is asked for without a
grammar, which would give it away.
"""

import csv
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import pytest

from app.__main__ import main
from app.core.plan.proposals import read_plan_text
from app.lab import chat_export, manifest, world_file
from app.lab.rollouts import Rollout, from_lines
from app.lab.training_questions import Rule, draw_rules
from app.lab.world import Profile, profiles
from tests.harness.processes import KEY, Caller, environment, open_caller, run_command, running_process
from tests.vllm.server import OFFLINE, PYTHON, RANK, ROOT, VllmServer, build_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RUNS: Final = 72
PROMPTS: Final = 12
SUBTASK: Final = "Solve the task step by step."
POOL: Final = tuple(profiles()[name] for name in ("birch", "cedar", "ember"))


def write_environment(folder: Path, pool: str) -> dict[str, str]:
    (folder / "pool.toml").write_text(pool)
    return environment(folder, BATON_POOL=str(folder / "pool.toml"), BATON_BOOTSTRAP_KEY=KEY)


def plan(random: Random, pool: tuple[Profile, ...]) -> dict[str, Any]:
    return {"steps": [{"worker": random.choice(pool).name, "subtask": SUBTASK, "access": ["user"]}]}


@pytest.fixture(scope="module")
def journaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pool, tasks, and rollouts of runs that the real service carried out and the command graded."""
    folder = tmp_path_factory.mktemp("journal")
    environ = write_environment(folder, world_file.pool_file(POOL))
    random = Random(0)
    rules = draw_rules(RUNS, 0)
    tasks = [{"question": _text(rule), "grader": json.loads(rule.written)} for rule in rules]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    plans = [plan(random, POOL) for _ in rules]
    with running_process("serve", folder, environ) as process, open_caller(process.url) as caller:

        def one(place: int) -> None:
            more = {"extra_body": {"baton": {"plan": plans[place]}}}
            caller.ask_whole(world_file.TIER, _text(rules[place]), **more)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(one, range(RUNS)))
    for words in (
        ("grade", "--tasks", "tasks.jsonl"),
        ("rollouts", "rollouts.jsonl", "--everybody", "--held-out", "0.2"),
    ):
        result = run_command(folder, environ, *words)
        assert result.returncode == 0, result.stderr
    return folder


def _text(rule: Rule) -> str:
    return rule.conversation[0]["content"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the server's model: its weights follow from a seed."""
    return build_model(tmp_path_factory.mktemp("base"))


def train(journaled: Path, *words: str) -> str:
    """`baton train` by the interpreter that has torch; what it says."""
    environ = {**write_environment(journaled, (journaled / "pool.toml").read_text()), **OFFLINE, "OMP_NUM_THREADS": "1"}
    argv = [str(PYTHON), "-W", "ignore", "-m", "app", "train", *words]
    process = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def trained(journaled: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `--backend trl` leaves after a warm start and three steps of GRPO."""
    out = tmp_path_factory.mktemp("trained") / "out"
    assert "3 steps of policy gradients" in train(journaled, *order(journaled, model, out))
    return out


def order(journaled: Path, model: Path, out: Path) -> list[str]:
    """The words of the command that trains into a folder, or goes on there."""
    where = f"--backend trl --model {model} --lora {RANK} --out {out} --tier {world_file.TIER}"
    options = f"--tasks {journaled}/tasks.jsonl --steps 3 --questions 2 --group 6 --micro 6 --completion 64 --rate 3e-4"
    imitated = f"--warm-start {journaled}/rollouts.jsonl --epochs 18 --batch 4 --imitation-rate 0.015"
    return f"{where} {options} {imitated} --every 1".split()


def test_an_interrupted_training_goes_on_from_its_last_checkpoint(
    trained: Path, journaled: Path, model: Path, tmp_path: Path
) -> None:
    """The training is killed before the third step's checkpoint was written."""
    copied = tmp_path / "out"
    shutil.copytree(trained, copied)
    shutil.rmtree(copied / "checkpoints" / "checkpoint-3")
    shutil.rmtree(copied / "adapter")
    output = train(journaled, *order(journaled, model, copied))
    assert "going on from checkpoint-2" in output
    rows = [list(csv.DictReader((folder / "curve.csv").read_text().splitlines())) for folder in (trained, copied)]
    assert [row["step"] for row in rows[1]] == ["0", "1", "2", "3"]
    done = [(row["reward"], row["held_out"]) for row in rows[0][:3]]
    assert done == [(row["reward"], row["held_out"]) for row in rows[1][:3]], "what was done stays done"
    card = json.loads((copied / "card.json").read_text())
    assert sum(card["plans_carried_out"].values()) == 2 * 6, "only the last step was carried out anew"


def test_plans_are_rewarded_by_the_executor_and_move_the_adapter(trained: Path) -> None:
    start, *rows = csv.DictReader((trained / "curve.csv").read_text().splitlines())
    assert (start["step"], start["reward"]) == ("0", ""), "the held-out questions before the first step"
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert all(float(row["executor_seconds"]) > 0 for row in rows)
    shares = []
    for row in rows:
        shares.append({name: float(row[name]) for name in ("malformed", "wrong", "right", "outage")})
    assert all(sum(share.values()) == pytest.approx(1.0) for share in shares)
    assert all(share["outage"] == 0 for share in shares)
    assert max(share["right"] + share["wrong"] for share in shares) >= 0.5, "the warm start teaches the form"
    assert max(float(row["grad_norm"]) for row in rows) > 1e-4
    card = json.loads((trained / "card.json").read_text())
    assert sum(card["plans_carried_out"].values()) == 3 * 2 * 6
    assert card["imitated"]["loss"][1] < 0.2 * card["imitated"]["loss"][0], "on conversations that it has not met"
    looks = [float(row["held_out"]) for row in rows]
    assert all(-0.2 <= look <= 1.0 for look in looks), "a look at the held-out questions after each step"
    evaluation = manifest.read(trained / "adapter")[0].evaluation
    assert evaluation["held-out questions"] == {
        "questions": (RUNS - RUNS // 10) // 10,
        "reward": pytest.approx(max(looks), abs=1e-5),
        "best_of": 3,
        "start": pytest.approx(float(start["held_out"]), abs=1e-5),
    }
    assert evaluation["fresh questions"]["questions"] == RUNS // 10
    assert -0.2 <= evaluation["fresh questions"]["reward"] <= 1.0
    assert len({card["questions"], card["held_out_questions"], card["fresh_questions"]}) == 3
    assert {worker["name"] for worker in card["pool"]} == {worker.name for worker in POOL}
    assert set(card["weights_sha256"]) >= {"adapter_config.json", "adapter_model.safetensors"}
    assert set(card["base_sha256"]) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert card["software"]["trl"]
    assert all(float(row["told"]) <= float(row["right"]) + float(row["wrong"]) for row in rows)
    raw = (trained / "adapter" / "adapter_model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}, (
        "bfloat16 would drift"
    )


def test_the_adapter_is_deployed_as_it_is_and_plans_for_the_service(
    trained: Path, journaled: Path, vllm_server: VllmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder that training leaves goes to `baton conductor deploy`, which asks the golden prompts of training."""
    pool = world_file.pool_file(POOL, conductor=vllm_server.base_url, model=vllm_server.model)
    environ = write_environment(tmp_path, pool)
    name = manifest.read(trained / "adapter")[0].name
    assert main(["migrate"], environ) == 0, capsys.readouterr().err
    assert main(["conductor", "deploy", "planner", str(trained / "adapter")], environ) == 0, capsys.readouterr().err
    output = capsys.readouterr().out
    report = json.loads(re.search(r"\{.*\}", output)[0])  # type: ignore[index]
    assert report["prompts"] == report["valid"] == chat_export.COUNT
    assert report["agreed"] >= 0.9 * report["known"], output
    try:
        rollouts = list(from_lines((journaled / "rollouts.jsonl").read_text().splitlines()))[:PROMPTS]
        assert sum(_proposes(vllm_server, name, rollout) for rollout in rollouts) >= PROMPTS / 2
        assert not any(_proposes(vllm_server, vllm_server.model, rollout) for rollout in rollouts)
        assert main(["conductor", "promote", "planner", name], environ) == 0
        with running_process("serve", tmp_path, environ) as process, open_caller(process.url, timeout=120) as caller:
            _conducts(caller)
    finally:
        root = vllm_server.base_url.removesuffix("/v1")
        httpx.post(f"{root}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60, trust_env=False)


def test_the_manifest_tells_what_training_knew(trained: Path) -> None:
    card, golden = manifest.read(trained / "adapter")
    _start, *rows = csv.DictReader((trained / "curve.csv").read_text().splitlines())
    evaluation = card.evaluation["policy gradients"]
    assert evaluation["steps"] == len(rows)
    assert evaluation["right"] == pytest.approx(sum(float(row["right"]) for row in rows) / len(rows), abs=1e-5)
    assert card.evaluation["imitation"] == json.loads((trained / "card.json").read_text())["imitated"]
    assert (card.kind, card.prompt, card.reward) == ("adapter", "general", "reward-1")
    assert all(prompt.tokens for prompt in golden)


def _proposes(server: VllmServer, name: str, rollout: Rollout) -> bool:
    """Return True if a model of the server writes a plan without a schema."""
    request_body = {
        "model": name,
        "messages": [dict(turn) for turn in rollout.prompt],
        "temperature": 0,
        "max_tokens": 64,
    }
    reply = httpx.post(f"{server.base_url}/chat/completions", json=request_body, timeout=60, trust_env=False)
    return read_plan_text(reply.json()["choices"][0]["message"]["content"], rollout.workers, 4) is not None


def _conducts(caller: Caller) -> None:
    """Its plans are the ones that are carried out."""
    lines: list[str] = []
    for rule in draw_rules(6, 9):
        _, reply = caller.ask_whole(world_file.TIER, _text(rule))
        run = caller.run(reply["baton"]["run"])
        (proposal,) = run["proposals"]
        assert (proposal["conductor"], proposal["state"], run["degraded"]) == ("model", "accepted", False)
        (step,) = run["steps"]
        assert step["access"] == ["user"]
        lines.append(caller.read(f"/v1/runs/{run['id']}/steps/{step['n']}")["subtask"])
    assert sum(text.startswith("Solve the task step") for text in lines) >= len(lines) / 2


def test_advantage_weighted_regression_learns_from_the_same_journal(
    journaled: Path, model: Path, tmp_path: Path
) -> None:
    where = f"--backend awr --model {model} --lora 4 --out {tmp_path}/awr"
    imitated = f"--warm-start {journaled}/rollouts.jsonl --epochs 2 --imitation-rate 0.01"
    train(journaled, *f"{where} {imitated}".split())
    card = json.loads((tmp_path / "awr" / "card.json").read_text())
    assert card["backend"] == "imitation"
    assert 2 < card["imitated"]["effective"] < card["imitated"]["examples"]
    assert card["imitated"]["loss"][1] < card["imitated"]["loss"][0]
