"""`baton train --backend trl|awr` up to the trainer: what it is told for which options, and what is refused."""

import asyncio
import json
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import app.lab
from app.cli import storage
from app.cli.commands import parse
from app.cli.learning import train as command
from app.cli.learning import train_chat
from app.core.rating.calibration import Trial
from app.errors import ConfigInvalid
from app.lab import training_record
from app.lab.rollouts import to_line
from app.lab.world import profiles
from app.process.config import read
from tests.lab.test_rollouts import make_rollout

ROOT = Path(__file__).resolve().parents[2]
URL = ("--url", "http://127.0.0.1:1/v1")
KEY = {"BATON_API_KEY": "bt_trainer_0123456789abcdef"}


class Trainer:
    """In place of the one that needs torch."""

    def __init__(self) -> None:
        self.orders: list[Namespace] = []

    def Order(self, **fields: Any) -> Namespace:
        return Namespace(**{"questions": (), "place": None, **fields})

    def train(self, order: Namespace, say: Any) -> None:
        self.orders.append(order)


def order_of_command(folder: Path, *words: str, backend: str = "trl", environ: dict[str, str] = KEY) -> Namespace:
    """The order of one command."""
    trainer = Trainer()
    options = parse(["train", "--backend", backend, "--model", "m", "--out", str(folder / "out"), *words])
    train_chat.run(options, environ, trainer, lambda _line: None)
    (order,) = trainer.orders
    return order


def rollouts(folder: Path) -> str:
    path = folder / "rollouts.jsonl"
    lines = [make_rollout("a", 1.0), make_rollout("b", 0.0), make_rollout("c", None), make_rollout("d", 1.0)]
    path.write_text("\n".join(map(to_line, lines)))
    return str(path)


def test_the_world_is_asked_about_over_all_its_workers(tmp_path: Path) -> None:
    order = order_of_command(tmp_path, *URL, "--steps", "2", "--questions", "3", "--random-pools", "--dear")
    assert len(order.questions) == 6
    assert len({question.names[0] for question in order.questions}) > 1
    assert {name for question in order.questions for name in question.names} <= set(profiles())
    assert min(len(question.names) for question in order.questions) < 8
    assert (order.place.url, order.place.tier) == ("http://127.0.0.1:1", "baton-world")
    assert order.recipe.weights.cost == 0.60
    prompt = order.questions[0].prompt
    assert [turn["role"] for turn in prompt] == ["system", "user"]
    assert order.questions[0].rule.conversation[0]["content"] in prompt[1]["content"]
    assert not [name for name in profiles() if name in prompt[0]["content"]]
    assert order.origin["pool"]


def test_a_task_set_is_asked_over_the_configured_pool(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"question": "a", "grader": {"kind": "exact", "expected": "b"}}))
    environ = {**KEY, "BATON_DATA_DIR": str(tmp_path)}
    order = order_of_command(tmp_path, *URL, "--tasks", str(tasks), "--steps", "1", "--questions", "2", environ=environ)
    assert order.place.tier == "baton-ultra"
    assert "rehearsal-sage" in order.questions[0].names
    order_over_pool = order_of_command(
        tmp_path, *URL, "--tasks", str(tasks), "--rollouts", rollouts(tmp_path), "--tier", "ultra", environ=environ
    )
    assert {question.rule.conversation[0]["content"] for question in order_over_pool.questions} == {"a"}


@pytest.mark.usefixtures("embedded_database")
def test_prompts_show_what_was_measured(tmp_path: Path) -> None:
    environ = {**KEY, "BATON_DATA_DIR": str(tmp_path)}
    words = ("sage", "v1", "t", "numbers", "sums", 0, "What?", "run_1", 1.0, 1.0, 1, 0.1)

    async def calibrate() -> None:
        async with storage.open_configured_store(read(environ)) as store:
            await store.note_trial(Trial("rehearsal-sage", *words))

    asyncio.run(calibrate())
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"question": "a", "grader": {"kind": "exact", "expected": "b"}}))
    order = order_of_command(tmp_path, *URL, "--tasks", str(tasks), "--steps", "1", "--questions", "1", environ=environ)
    assert "measured pass rates: numbers 100% of 1" in order.questions[0].prompt[0]["content"]


def test_what_is_imitated_depends_on_the_backend(tmp_path: Path) -> None:
    path = rollouts(tmp_path)
    regressed = order_of_command(tmp_path, "--warm-start", path, backend="awr")
    assert len(regressed.examples) == 3
    assert len({example.weight for example in regressed.examples}) == 2
    assert not regressed.questions
    warm = order_of_command(tmp_path, *URL, "--warm-start", path, "--steps", "1")
    assert [example.weight for example in warm.examples] == [1.0, 1.0]
    assert warm.questions


@pytest.mark.parametrize(
    ("words", "backend", "message"),
    [
        (["--warm-start", "absent.jsonl"], "awr", "--warm-start absent.jsonl"),
        ([], "awr", "--warm-start FILE"),
        (["--vllm", "server"], "trl", "--vllm-url"),
        (["--rollouts", "x"], "trl", "--tasks"),
        (["--tasks", "absent.jsonl"], "trl", "absent.jsonl"),
        (["--tier", "absent", *URL], "trl", "--tier"),
        (["--warm-start", "journal"], "awr", "--consent"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, words: list[str], backend: str, message: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(message)):
        order_of_command(tmp_path, *words, backend=backend)


def test_a_url_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="BATON_API_KEY"):
        order_of_command(tmp_path, *URL, "--steps", "1", environ={})


def test_a_folder_is_gone_on_with_only_by_the_same_order(tmp_path: Path) -> None:
    training_record.same_or_new(tmp_path / "x", {"seed": 1})
    training_record.same_or_new(tmp_path / "x", {"seed": 1})
    with pytest.raises(ConfigInvalid, match="another training run"):
        training_record.same_or_new(tmp_path / "x", {"seed": 2})


@pytest.mark.parametrize("words", [["--warm-start", "journal"], ["--gap", "0.8"], ["--dear"]], ids=" ".join)
def test_what_a_second_round_does_not_look_at_is_refused(words: list[str]) -> None:
    options = parse(["train", "--rounds", "2", "--from", "trained/seed-0", *words])
    with pytest.raises(ConfigInvalid, match=f"{words[0]}: has no effect with --rounds 2"):
        command.run(options, {}, lambda: 0.0)


def test_the_small_conductor_is_given_the_rollouts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Any] = []

    def trainer(options: Namespace, say: Any, runs: Any) -> bool:
        orders.append((options.beta, runs))
        return True

    modules = {
        "app.lab.train:run": trainer,
        "app.cli.learning.train_chat:imitation_rollouts": train_chat.imitation_rollouts,
    }
    monkeypatch.setattr(command, "import_object", modules.__getitem__)
    for words in ([], ["--warm-start", rollouts(tmp_path), "--beta", "0.1"]):
        assert command.run(parse(["train", *words]), {}, lambda: 0.0) == 0
    assert [(beta, len(runs)) for beta, runs in orders] == [(0.3, 0), (0.1, 4)]


def test_a_module_that_needs_an_extra_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "app.lab.train", raising=False)
    monkeypatch.delattr(app.lab, "train", raising=False)
    for name in ("app.lab.train", "app.lab.train:run"):
        with pytest.raises(ConfigInvalid, match="torch is not installed"):
            command.import_object(name)


def test_the_commands_of_the_page_are_understood() -> None:
    """They are run by `make test-vllm`, with a smaller model, but for those of a GPU, one of which is given to
    `tests/bench/grpo.py`."""
    page = (ROOT / "deploy" / "docs" / "training.md").read_text().partition("## Real weights")[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("baton ")]
    commands += [shlex.split(line)[5:] for line in lines if line.startswith("python -m tests.bench.grpo profile ")]
    assert {words[0] for words in commands} == {"grade", "rollouts", "train"}
    assert len([parse(words) for words in commands]) == 9
