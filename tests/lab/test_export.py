"""Exported folders: the weights come back, the model is the trainer's, and a folder that was changed is refused.

Needs torch, which is no dependency of Baton: `make learn` runs these before it trains.
"""

import json
from pathlib import Path
from random import Random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from app.errors import ConfigInvalid  # noqa: E402
from app.lab import export, manifest, prompt, train  # noqa: E402
from app.lab.evaluate import draw_exam  # noqa: E402
from app.lab.lessons import SPLITS, draw_lesson  # noqa: E402
from app.lab.manifest import Manifest  # noqa: E402
from app.lab.plan_grammar import FORMS, Form  # noqa: E402
from app.lab.plans import Plan, to_text, to_tokens  # noqa: E402
from app.lab.tokenizer import tokenizer  # noqa: E402
from app.lab.train_loop import greedy  # noqa: E402
from app.lab.world import Weights  # noqa: E402
from tests.lab.test_train import short  # noqa: E402

TRAINED = Path(__file__).parents[1] / "vllm" / "trained"
pytestmark = pytest.mark.timeout(600)  # the short training ends with a whole search


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a very short training."""
    out = tmp_path_factory.mktemp("run")
    torch.set_num_threads(1)
    train.run(short(out), lambda _: None)
    return out


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its export."""
    out = tmp_path_factory.mktemp("exported") / "one"
    export.export(export.read_training(run), out, "tiny")
    return out


def test_the_shipped_checkpoint_is_read_as_it_was_measured() -> None:
    """Its golden plans and its figures come out of its weights."""
    card, golden = manifest.read(TRAINED)
    conductor = export.load_conductor(TRAINED)
    assert export.golden_prompts(conductor) == golden
    assert export.evaluate_split(conductor, "random pools", Weights()) == card.evaluation["random pools"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_tokenizer_makes_the_tokens_of_the_trainer(form: Form, tmp_path: Path) -> None:
    tokenizer(form).save_pretrained(tmp_path)
    saved_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    random = Random(3)
    for split in (*SPLITS, "train"):
        for _ in range(20):
            lesson = draw_lesson(random, split)
            messages = [{"role": "user", "content": prompt.as_text(lesson.problem.text, lesson.pool, lesson.order)}]
            assert saved_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) == lesson.prompt(
                form=form
            )
            plan = form.encode(draw_plan(random, form))
            assert saved_tokenizer.decode(plan) == form.text(plan)
    assert saved_tokenizer.eos_token_id == saved_tokenizer.pad_token_id == prompt.pad(form)


def draw_plan(random: Random, form: Form) -> Plan:
    """Any plan of a form."""
    tokens, state = [0], form.follow(0, 0)
    while tokens[-1] != 2:
        tokens.append(random.choice(list(form.legal(state, 3))))
        state = form.follow(state, tokens[-1])
    return form.decode(tokens)


def test_the_exported_model_is_the_trained_one_but_for_rounding(run: Path, folder: Path) -> None:
    trained, shipped = export.read_training(run), export.load_conductor(folder)
    assert shipped.weights.keys() == trained.weights.keys()
    for name, tensor in shipped.weights.items():
        assert torch.equal(tensor, trained.weights[name].to(torch.bfloat16).float())


def test_training_leaves_a_folder_to_serve_as_it_is(run: Path, folder: Path) -> None:
    card, golden = manifest.read(run / "served")
    assert card.name.rpartition("@")[2] == manifest.read(folder)[0].name.rpartition("@")[2]
    assert card.evaluation["random pools"]["tasks"] == export.TASKS
    assert all(known_prompt.plan and known_prompt.tokens for known_prompt in golden)
    assert manifest.describe(run / "served", None, None) == card, "describing it again changes nothing"


def test_the_manifest_says_what_it_is_and_the_golden_plans_are_its_own(folder: Path) -> None:
    card, golden = manifest.read(folder)
    weights = (folder / "model.safetensors").read_bytes()
    assert card.name == card.base == f"tiny@{manifest.sha256(weights)[:12]}"
    assert (card.kind, card.prompt, card.template) == ("model", "compact", "compact-1")
    assert card.tokenizer_sha256 == manifest.tokenizer_sha256(folder)
    lessons = draw_exam("held-out tasks", 12, export.GOLDEN_SEED)
    plans = greedy(export.load_conductor(folder), lessons)
    expected = [export.prompt.over_ordinals(plan, lesson.order) for plan, lesson in zip(plans, lessons, strict=True)]
    assert [example.plan for example in golden[:12]] == [to_text(to_tokens(plan)) for plan in expected]
    assert [example.tokens for example in golden[:12]] == [lesson.prompt() for lesson in lessons]
    assert card.evaluation["held-out tasks"]["tasks"] == export.TASKS


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer.json", lambda text: text.replace("january", "februar"), "tokenizer.json is not the file"),
        ("golden.jsonl", lambda text: text.replace("answer", "anser"), "golden.jsonl is not the file"),
        ("baton.json", lambda text: text.replace("steps-1", "steps-2"), "plans of schema steps-2"),
        ("baton.json", lambda text: text.replace("compact-1", "compact-2"), "the prompt compact (compact-2)"),
        ("baton.json", lambda text: text.replace('"tiny@', '"tiny@0'), "is not that of its weights"),
        ("baton.json", lambda text: text.replace('"adapter"', "").replace('"model"', '"mule"', 1), "kind"),
    ],
)
def test_a_folder_that_was_changed_is_refused(
    folder: Path, tmp_path: Path, name: str, change: object, message: str
) -> None:
    assert callable(change)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = (tmp_path / name).read_text()
    (tmp_path / name).write_text(change(before))
    assert (tmp_path / name).read_text() != before
    with pytest.raises(ConfigInvalid) as refused:
        manifest.read(tmp_path)
    assert message in "\n".join(refused.value.faults)


def test_an_adapter_is_the_base_under_what_training_has_changed(run: Path, folder: Path, tmp_path: Path) -> None:
    """At full rank nothing of the projections is lost but by rounding, and its golden plans are the merged model's."""
    base, trained = export.load_conductor(folder), export.read_training(run)
    base.model.requires_grad_(False)
    random = torch.Generator().manual_seed(2)
    changed = {
        name: tensor + (0.05 * torch.randn(tensor.shape, generator=random) if name.endswith("_proj.weight") else 0)
        for name, tensor in base.weights.items()
    }
    tuned = export.TrainingResult(trained.recipe, trained.weighing, changed, trained.card)
    adapter = export.export_adapter(tuned, folder, tmp_path / "full", "tuned", trained.recipe.hidden)
    card, golden = manifest.read(tmp_path / "full")
    assert (adapter, card.kind, card.base) == (card, "adapter", manifest.read(folder)[0].name)
    assert card.tokenizer_sha256 == manifest.tokenizer_sha256(folder)
    parts = load_file(tmp_path / "full" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    down, up = (parts[f"base_model.model.{name}.lora_{half}.weight"].float() for half in "AB")
    difference = changed[f"{name}.weight"] - base.weights[f"{name}.weight"]
    assert torch.allclose(up @ down, difference, atol=2e-2)
    lessons = draw_exam("held-out tasks", 12, export.GOLDEN_SEED)
    base.load(changed)
    whole = greedy(base, lessons)
    expected = [
        to_text(to_tokens(export.prompt.over_ordinals(plan, lesson.order)))
        for plan, lesson in zip(whole, lessons, strict=True)
    ]
    assert sum(example.plan == text for example, text in zip(golden, expected, strict=False)) >= 10
    with pytest.raises(ConfigInvalid) as refused:
        export.export_adapter(tuned, tmp_path / "full", tmp_path / "other", "tuned", 4)
    assert "config.json" in refused.value.faults[0] or "adapter" in refused.value.faults[0]


def test_a_folder_that_is_in_use_is_not_written_to(run: Path, folder: Path) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        export.export(export.read_training(run), folder, "tiny")
    assert "is not empty" in refused.value.faults[0]


def test_the_files_are_those_that_libraries_look_for(folder: Path) -> None:
    assert json.loads((folder / "card.json").read_text())["recipe"]["seed"] == 3
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert Manifest.model_validate_json((folder / "baton.json").read_text()).files.keys() == {
        "card.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "golden.jsonl",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
