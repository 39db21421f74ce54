"""From `baton train` to `baton conductor deploy` without a step by hand: what training leaves is taken as it is.

Torch is not needed: a model that answers what it is told to stands for the trained one, and the server is a stub.
`make test-vllm` has both for real.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.cli.commands import parse
from app.cli.learning import train_chat
from app.conductor.prompt import TOOLS
from app.errors import ConfigInvalid
from app.lab import chat_export, manifest
from app.lab.manifest import Manifest
from app.lab.rollouts import Rollout, to_line
from app.lab.training_questions import Question, draw_rules
from app.lab.world import VERSION
from tests.cli.test_conductor import PLAN, Bench, write_adapter
from tests.harness.vllm_stub import tokens, vllm_stub
from tests.lab.test_rollouts import make_rollout
from tests.lab.test_teach import KEY, URL

SECRET = "My name is Ada, and my question is this:"


class ScriptedModel:
    """In place of a trained model; `ahead` is by how much it is sure of what it writes."""

    def __init__(self, text: str = PLAN, ahead: float = 9.0) -> None:
        self.text, self.ahead = text, ahead

    def tokens(self, messages: Any) -> list[int]:
        return tokens(messages[0]["content"])

    def likeliest(self, messages: Any, most: int) -> tuple[str, float]:
        assert most == 1_024
        return self.text, self.ahead


class Trainer:
    """In place of the one that needs torch: adapters as peft leaves them, then what every backend does at its end."""

    def __init__(self, base: Path, model: ScriptedModel) -> None:
        self.base, self.model = base, model
        self.manifest: Manifest | None = None

    def Order(self, **options: Any) -> Namespace:
        return Namespace(**options)

    def train(self, order: Namespace, say: Any) -> None:
        folder = order.out / "adapter"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"trained")
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
        base = chat_export.base_of(self.base)
        facts = {"title": "mine", "evaluation": {"imitation": {"loss": [2.0, 1.0]}}}
        self.manifest = chat_export.describe(folder, base, order.shown, self.model, order.recipe.completion, **facts)
        for line in chat_export.next_steps(folder, base, self.manifest):
            say(line)


def plain(folder: Path) -> Path:
    """A chat model as it comes: weights and tokenizer, no manifest."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    for name in manifest.TOKENIZER:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    return folder


def write_rollouts(folder: Path) -> str:
    """Rollouts over two workers, three steps allowed, one of them with a caller's tools."""
    records = []
    for place, lesson in enumerate([make_rollout("a", 1.0), make_rollout("b", 0.0), make_rollout("c", 1.0)]):
        system = f"Cards, in order {place}" + (TOOLS.format(tools="- pay: pays") if place == 2 else "")
        prompt = ({"role": "system", "content": system}, {"role": "user", "content": SECRET})
        more: dict[str, Any] = {"prompt": prompt, "workers": ("sage", "abacus"), "most": 3}
        records.append(to_line(Rollout(**{**{name: getattr(lesson, name) for name in lesson.__slots__}, **more})))
    (folder / "rollouts.jsonl").write_text("\n".join(records))
    return str(folder / "rollouts.jsonl")


class School:
    """A base without a manifest, served by a stub as `baton conductor serve` would serve it once it is described."""

    def __init__(self, folder: Path, stub: Any) -> None:
        self.folder, self.stub = folder, stub
        self.base = plain(folder / "Qwen-tiny")
        self.name = manifest.version("Qwen-tiny", manifest.sha256(b"weights"))
        self.bench = Bench(folder, stub, write_adapter(folder / "other", None))
        stub.models += [self.name]

    def train(self, model: ScriptedModel, base: Path | None = None) -> tuple[Manifest, list[str]]:
        """`baton train --backend awr`, with what it says."""
        lines: list[str] = []
        words = ["train", "--backend", "awr", "--model", str(self.base), "--out", str(self.folder / "out")]
        options = parse([*words, "--warm-start", write_rollouts(self.folder)])
        trainer = Trainer(base or self.base, model)
        train_chat.run(options, {}, trainer, lines.append)
        assert trainer.manifest is not None
        self.stub.plans[trainer.manifest.name] = lambda _: PLAN
        return trainer.manifest, lines


@pytest.fixture
def school(tmp_path: Path, embedded_database: None) -> Iterator[School]:
    with vllm_stub() as stub:
        yield School(tmp_path, stub)


def test_what_training_leaves_is_deployed_as_it_is(school: School, capsys: pytest.CaptureFixture[str]) -> None:
    trained, lines = school.train(ScriptedModel())
    assert (trained.kind, trained.base, trained.steps, trained.workers) == ("adapter", school.name, 3, 2)
    assert (trained.prompt, trained.reward, trained.evaluation["imitation"]["loss"]) == ("general", "reward-1", [2, 1])
    assert trained.commit
    assert lines[-3:] == [
        f"baton conductor describe {school.base} --title Qwen-tiny",
        f"baton conductor serve {school.base} --adapters",
        f"baton conductor deploy conductor {school.folder}/out/adapter",
    ]
    assert school.bench.deploy("out/adapter") == 0
    assert '"prompts": 24, "valid": 24, "known": 24, "agreed": 24' in capsys.readouterr().out
    assert trained.name in school.stub.models
    assert school.bench.run("describe", str(school.base), "--title", "Qwen-tiny") == 0
    assert manifest.read(school.base)[0].name == trained.base, "the command that it names makes the base that it means"


def test_golden_prompts_hold_nobodys_words(school: School) -> None:
    school.train(ScriptedModel())
    _, golden = manifest.read(school.folder / "out" / "adapter")
    assert len(golden) == 24
    assert {prompt.messages[0]["content"] for prompt in golden} == {"Cards, in order 0", "Cards, in order 1"}
    assert not any(SECRET in turn["content"] for prompt in golden for turn in prompt.messages)
    assert len({prompt.messages[1]["content"] for prompt in golden}) > 12
    assert all("<question>\nuser: " in prompt.messages[1]["content"] for prompt in golden)


@pytest.mark.parametrize(
    "model",
    [
        ScriptedModel(ahead=0.5),
        ScriptedModel(PLAN.replace(":", ": ")),
        ScriptedModel(PLAN.replace("1", "2")),
        ScriptedModel(PLAN.replace("Solve it.", "S" * 601)),
        ScriptedModel("I would ask worker 1."),
    ],
    ids=["a near thing", "blanks", "a worker who is not there", "too long for the schema", "no plan"],
)
def test_a_plan_is_expected_only_if_a_server_must_write_it(school: School, model: ScriptedModel) -> None:
    school.train(model)
    _, golden = manifest.read(school.folder / "out" / "adapter")
    assert {prompt.plan for prompt in golden} == {None}
    assert all(prompt.tokens for prompt in golden)


def test_a_base_that_is_described_gives_its_name_and_its_golden_prompts(school: School) -> None:
    base = school.folder / "other"
    card, theirs = manifest.read(base)
    trained, lines = school.train(ScriptedModel(), base)
    assert (trained.base, trained.steps, trained.workers) == (card.name, card.steps, card.workers)
    golden = manifest.read(school.folder / "out" / "adapter")[1]
    assert [prompt.messages for prompt in golden] == [known_prompt.messages for known_prompt in theirs]
    assert not any(line.startswith("baton conductor describe") for line in lines)
    assert school.bench.deploy("out/adapter") == 0


def test_an_adapter_of_other_weights_than_the_servers_is_refused(
    school: School, capsys: pytest.CaptureFixture[str]
) -> None:
    (school.base / "model.safetensors").write_bytes(b"others")
    trained, _ = school.train(ScriptedModel())
    assert school.bench.deploy("out/adapter") == 2
    assert f"not to {trained.base}, the base of {trained.name}" in capsys.readouterr().err


def test_describing_again_keeps_what_training_knew(school: School) -> None:
    trained, _ = school.train(ScriptedModel())
    folder = school.folder / "out" / "adapter"
    assert school.bench.run("describe", str(folder)) == 0
    assert manifest.read(folder)[0] == trained
    assert school.bench.run("describe", str(folder), "--base", str(school.folder / "other"), "--title", "new") == 0
    again, golden = manifest.read(folder)
    assert (again.base, again.steps) == (manifest.read(school.folder / "other")[0].name, 5)
    assert again.name == trained.name.replace("mine", "new")
    assert (again.evaluation, again.reward, again.commit) == (trained.evaluation, trained.reward, trained.commit)
    assert len(golden) == 24
    (folder / "adapter_model.safetensors").write_bytes(b"trained again")
    assert school.bench.run("describe", str(folder), "--base", str(school.folder / "other")) == 0
    other, golden = manifest.read(folder)
    assert (other.evaluation, len(golden)) == ({}, 10), "the old figures are not those of new weights"


def test_a_large_model_in_parts_has_one_name(tmp_path: Path) -> None:
    folder = plain(tmp_path / "parts")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigInvalid, match=r"has no model\.safetensors"):
        chat_export.base_of(folder)
    parts = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (folder / manifest.PARTS).write_text(json.dumps({"weight_map": parts}))
    for name in parts.values():
        (folder / name).write_bytes(name.encode())
    made_ = manifest.describe(folder, None, None, title="seven")
    assert made_.name == made_.base
    assert chat_export.base_of(folder).name == made_.name
    assert manifest.read(folder)[0] == made_
    (folder / "model-2.safetensors").write_bytes(b"others")
    with pytest.raises(ConfigInvalid, match=r"model-2\.safetensors is not the file"):
        manifest.read(folder)
    assert manifest.describe(folder, None, None, title="seven").name != made_.name


def test_a_model_of_the_librarys_cache_has_its_own_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen2.5-7B-Instruct" / "snapshots" / "a0b1c2"
    assert manifest.title_of(snapshot) == "Qwen2.5-7B-Instruct"
    assert manifest.title_of(tmp_path / "a run") == "a-run"


def test_questions_of_the_world_reach_as_far_as_its_pools(tmp_path: Path) -> None:
    class Kept(Trainer):
        def train(self, order: Namespace, say: Any) -> None:
            self.order = order

    trainer = Kept(tmp_path, ScriptedModel())
    words = ["train", "--backend", "trl", "--model", "m", "--out", str(tmp_path / "out"), *URL, "--steps", "4"]
    train_chat.run(parse([*words, "--random-pools"]), KEY, trainer, lambda _: None)
    shown = trainer.order.shown
    assert (shown.steps, shown.workers) == (4, max(len(question.workers) for question in trainer.order.questions))
    assert len(shown.golden) == 24
    assert len({prompt.workers for prompt in shown.golden}) > 2
    assert trainer.order.origin["questions"] == VERSION


def test_a_long_question_is_shown_in_parts_as_in_the_service(tmp_path: Path) -> None:
    class Kept(Trainer):
        def train(self, order: Namespace, say: Any) -> None:
            self.order = order

    task = {"question": "Words and words.\n" * 1_000, "grader": {"kind": "exact", "expected": "4"}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    trainer = Kept(tmp_path, ScriptedModel())
    words = ["train", "--backend", "trl", "--model", "m", "--out", str(tmp_path / "out"), *URL, "--steps", "4"]
    environ = {**KEY, "BATON_DATA_DIR": str(tmp_path)}
    train_chat.run(parse([*words, "--tasks", str(tmp_path / "tasks.jsonl")]), environ, trainer, lambda _: None)
    [prompt] = {question.prompt[1]["content"] for question in trainer.order.questions}
    assert " characters are left out here, in " in prompt


def test_questions_that_judge_are_neither_learned_nor_imitated(tmp_path: Path) -> None:
    class Kept(Trainer):
        def train(self, order: Namespace, say: Any) -> None:
            self.order = order

    texts = [rule.conversation[0]["content"] for rule in draw_rules(200, 1)]
    tasks = [json.dumps({"question": text, "grader": {"kind": "exact", "expected": "x"}}) for text in texts]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    (tmp_path / "rollouts.jsonl").write_text("\n".join([to_line(make_rollout(text, 1.0)) for text in texts]))
    trainer = Kept(tmp_path, ScriptedModel())
    sources = ["--tasks", str(tmp_path / "tasks.jsonl"), "--warm-start", str(tmp_path / "rollouts.jsonl")]
    words = ["train", "--backend", "trl", "--model", "m", "--out", str(tmp_path / "out"), *URL, *sources]
    for source in (sources, sources[2:]):
        train_chat.run(parse([*words[: -len(sources)], *source]), KEY, trainer, lambda _: None)
        order = trainer.order
        asked, fresh, learned = map(_texts, (order.asked, order.fresh, order.questions))
        assert asked
        assert fresh
        assert not asked & fresh
        assert not learned & (asked | fresh)
        imitated = {example.prompt[0]["content"] for example in order.examples}
        assert imitated == set(texts) - asked - fresh


def _texts(questions: Sequence[Question]) -> set[str]:
    return {question.rule.conversation[0]["content"] for question in questions}
