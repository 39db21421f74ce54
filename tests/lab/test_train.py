"""Training: the grammar holds in rollout and loss alike, a run goes on where it was, and the loop learns.

Needs torch, which is no dependency of Baton: `make learn` runs these before it trains.
"""

import csv
import json
import math
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from app.cli.commands import parse  # noqa: E402
from app.core.plan.proposals import read_plan_text  # noqa: E402
from app.errors import ConfigInvalid  # noqa: E402
from app.lab import manifest, train, train_rounds  # noqa: E402
from app.lab.baselines import FIXED, OPTIMUM, UNWORDED  # noqa: E402
from app.lab.evaluate import TRAINED, WITHOUT_TEXT  # noqa: E402
from app.lab.journal_imitation import build_examples  # noqa: E402
from app.lab.lessons import SPLITS, draw_lesson  # noqa: E402
from app.lab.outcome import outcome  # noqa: E402
from app.lab.plan_grammar import FORMS, ROLES, Form  # noqa: E402
from app.lab.plans import PlanStep, to_tokens  # noqa: E402
from app.lab.rollouts import Rollout  # noqa: E402
from app.lab.train_imitation import Regressor  # noqa: E402
from app.lab.train_loop import RECIPES, Recipe, Trainer, greedy, new_conductor  # noqa: E402
from app.lab.train_model import Conductor, config  # noqa: E402
from app.lab.world import DEAR, Setting, Weights  # noqa: E402
from tests.lab.test_journal_imitation import rollout  # noqa: E402
from tests.lab.test_world import any_plan  # noqa: E402

TINY = Recipe(hidden=32, layers=2, heads=1, drill_steps=2, warm_steps=2, steps=2, warm_lessons=8, lessons=8, group=4)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def conductor(seed: int = 0, form: Form = ROLES) -> Conductor:
    """A small one with fresh weights."""
    return Conductor.with_random_weights(config(form, 32, 2, 2), seed, form)


def draw_prompts(count: int, form: Form) -> tuple[list[list[int]], Any]:
    """Prompts of different lengths and pools, and the sizes of the pools."""
    random = Random(count)
    lessons = [draw_lesson(random, "train", standard=0.3) for _ in range(count)]
    return [lesson.prompt(form=form) for lesson in lessons], torch.tensor([len(lesson.pool) for lesson in lessons])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_sampled_plan_is_valid_whatever_the_weights(form: Form) -> None:
    model = conductor(form=form)
    prompts, workers = draw_prompts(12, form)
    written = model.write(prompts, workers, 20, torch.Generator().manual_seed(1)).tolist()
    for group, size in zip(written, workers.tolist(), strict=True):
        for tokens in group:
            plan = form.decode(tokens[: tokens.index(2) + 1])
            assert all(step.worker < size for step in plan)
            assert form.encode(plan) == tokens[: tokens.index(2) + 1]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_loss_sees_the_same_mask_and_the_same_odds_as_the_rollout(form: Form) -> None:
    model = conductor(form=form)
    prompts, workers = draw_prompts(6, form)
    plans = model.write(prompts, workers, 4, torch.Generator().manual_seed(2))
    likeliest = model.write(prompts, workers, 1, None)
    with torch.no_grad():
        scores = model.scores(prompts, plans[:, :, :-1], workers)
        again = model.scores(prompts, likeliest[:, :, :-1], workers)
    for n, size in enumerate(workers.tolist()):
        for group in range(4):
            state = 0
            for place in range(plans.shape[2] - 1):
                state = form.follow(state, int(plans[n, group, place]))
                allowed = {token for token, score in enumerate(scores[n, group, place]) if score > -math.inf}
                assert allowed == set(form.legal(state, size))
    assert torch.allclose(scores.exp().sum(-1), torch.ones(scores.shape[:-1]), atol=1e-5)
    written = likeliest[:, :, 1:] != 0
    assert bool((again.argmax(-1) == likeliest[:, :, 1:])[written].all())


def test_padding_and_company_change_nothing() -> None:
    """A prompt is read the same alone and with longer ones, and a plan alone and in a group of others."""
    model, random = conductor(), Random(5)
    prompts = [draw_lesson(random, "train").prompt() for _ in range(5)]
    tokens = [to_tokens(any_plan(random, 3)) for _ in range(3)]
    longest = max(map(len, tokens))
    plans = torch.tensor([[*token, *[0] * (longest - len(token))] for token in tokens])
    sizes = torch.tensor([3] * 5)
    with torch.no_grad():
        wide = model.scores(prompts, plans.expand(5, 3, -1), sizes)
        for n, tokens_of_prompt in enumerate(prompts):
            for m, plan in enumerate(tokens):
                alone = model.scores([tokens_of_prompt], torch.tensor([[plan]]), sizes[:1])[0, 0]
                together = wide[n, m, : len(plan)]
                assert torch.equal(torch.isfinite(together), torch.isfinite(alone))
                assert torch.allclose(together.exp(), alone.exp(), atol=1e-4)


def test_a_run_goes_on_where_it_was_interrupted() -> None:
    whole = Trainer(TINY, Weights())
    for _ in range(whole.total):
        whole.advance()
    parts = [Trainer(TINY, Weights()), Trainer(TINY, Weights())]
    for _ in range(3):
        parts[0].advance()
    parts[1].restore(parts[0].state())
    while parts[1].step < parts[1].total:
        parts[1].advance()
    assert parts[1].executed == whole.executed
    for name, tensor in whole.conductor.weights.items():
        assert torch.equal(tensor, parts[1].conductor.weights[name])
        assert torch.equal(whole.averaged.weights[name], parts[1].averaged.weights[name])
    for other in (Trainer(replace(TINY, seed=9), Weights()), Trainer(TINY, DEAR)):
        with pytest.raises(ConfigInvalid, match="another recipe, seed, start or reward"):
            other.restore(parts[0].state())


@pytest.mark.timeout(180)
def test_the_average_follows_the_weights_and_is_what_is_kept(tmp_path: Path) -> None:
    name = "model.norm.weight"
    recipe = replace(TINY, average=0.75, drill_steps=40)
    trainer = Trainer(recipe, Weights())
    expected = trainer.averaged.weights[name].clone()
    for step in range(trainer.total):
        trainer.advance()
        expected += (1 - min(0.75, step / (step + 10))) * (trainer.conductor.weights[name].detach() - expected)
    assert torch.allclose(trainer.averaged.weights[name], expected, atol=1e-6)
    assert not torch.equal(trainer.averaged.weights[name], trainer.conductor.weights[name])
    train.train(train.Order(tmp_path, recipe, Weights(), lessons=24), lambda words: None)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["trainer"]
    assert torch.equal(saved[name], state["averaged"][name])


def test_seeds_differ_and_equal_seeds_do_not() -> None:
    def first(seed: int) -> Any:
        return Trainer(replace(TINY, seed=seed), Weights()).conductor.weights["model.norm.weight"]

    def initial_embedding(seed: int) -> Any:
        return Trainer(replace(TINY, seed=seed), Weights()).conductor.weights["model.embed_tokens.weight"]

    assert torch.equal(first(1), first(1))
    assert torch.equal(initial_embedding(1), initial_embedding(1))
    assert not torch.equal(initial_embedding(1), initial_embedding(2))


def test_it_learns_to_read_cards() -> None:
    """Drills alone: better than any choice by chance among three to six workers."""
    trainer = Trainer(Recipe(drill_steps=1_000, warm_lessons=48), Weights())
    first = [trainer.advance()["imitation"] for _ in range(10)]
    last = [trainer.advance()["imitation"] for _ in range(110)][-10:]
    assert sum(last) / 10 > sum(first) / 10 + 0.4


def short(out: Path) -> Namespace:
    """A training of a few steps that leaves its results in `out`."""
    return Namespace(
        out=str(out),
        seed=3,
        drill_steps=2,
        warm_steps=2,
        steps=2,
        lessons=24,
        threads=1,
        dear=False,
        gap=None,
        recipe="roles",
    )


@pytest.mark.timeout(600)  # it trains, searches and exports twice
def test_a_whole_run_leaves_curve_card_report_and_model(tmp_path: Path) -> None:
    options = short(tmp_path)
    lines: list[str] = []
    assert train.run(options, lines.append)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["recipe"]["seed"] == 3
    assert [table["split"] for table in card["tables"]] == list(SPLITS)
    assert len(card["model_sha256"]) == 64
    assert [worker["name"] for worker in card["pool"]][:2] == ["atlas", "birch"]
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert rows[-1]["step"] == "6"
    assert train.CAVEAT in (tmp_path / "report.txt").read_text()
    assert not train.run(Namespace(**{**vars(options), "gap": 2.0}), lines.append)
    assert any("going on from step 6" in line for line in lines)


@pytest.mark.timeout(600)  # it searches twice, with words and without
def test_plans_in_words_are_trained_examined_and_left_to_be_served_by_the_same_command(tmp_path: Path) -> None:
    options = Namespace(
        out=str(tmp_path), seed=3, drill_steps=2, warm_steps=2, steps=2, lessons=16, threads=1, dear=False, gap=None,
        recipe="words",
    )  # fmt: skip
    assert train.run(options, lambda words: None)
    table = json.loads((tmp_path / "card.json").read_text())["tables"][0]
    arms = {row["arm"]: row["reward"] for row in table["rows"]}
    assert arms[OPTIMUM] > arms[UNWORDED] > arms[FIXED]
    assert {TRAINED, WITHOUT_TEXT} <= arms.keys()
    report = (tmp_path / "report.txt").read_text()
    assert "valid plans: 64 of 64, with" in report
    with pytest.raises(ConfigInvalid) as journal:
        train.run(options, lambda words: None, journal_runs(runs=2))
    assert journal.value.faults[0].startswith("--warm-start: ")
    with pytest.raises(ConfigInvalid) as round_two:
        train_rounds.run(Namespace(**vars(options), checkpoint=str(tmp_path)), lambda words: None)
    assert round_two.value.faults[0].startswith("--rounds 2: ")
    card, golden = manifest.read(tmp_path / "served")
    assert card.prompt == "worded"
    steps = read_plan_text(golden[0].plan or "", [str(n) for n in range(golden[0].workers)], golden[0].steps)
    assert steps
    assert all(step.subtask.startswith("Please ") for step in steps)


def test_a_size_is_data_and_the_larger_one_has_25_to_30_million_parameters() -> None:
    models = {name: new_conductor(recipe).model for name, recipe in RECIPES.items()}
    counts = {name: model.num_parameters() for name, model in models.items()}
    assert counts["roles"] < 200_000 > counts["words"]
    assert 25_000_000 < counts["words-large"] < 30_000_000
    assert models["words-large"].config.head_dim == 64
    assert [parse(["train", "--recipe", name]).recipe for name in RECIPES] == list(RECIPES)


def test_greedy_plans_name_workers_of_the_pool() -> None:
    random = Random(8)
    lessons = [draw_lesson(random, "random pools") for _ in range(20)]
    for lesson, plan in zip(lessons, greedy(conductor(), lessons), strict=True):
        assert all(step.worker < len(lesson.pool) for step in plan)


# From journaled runs.

GOOD, BAD = (PlanStep(5, "plan"), PlanStep(4, "reason", True, (0,))), (PlanStep(0, "solve"),)


def journal_runs(*, swapped: bool = False, runs: int = 160) -> list[Rollout]:
    """Runs of the standard pool: to each task a plan that is mostly right and one that is mostly wrong, rated so."""
    random, rollouts = Random(4), []
    for problem in (draw_lesson(random, "train", standard=1.0).problem for _ in range(runs // 2)):
        rollouts += [rollout(problem, GOOD, float(not swapped)), rollout(problem, BAD, float(swapped))]
    return rollouts


def taught(runs: list[Rollout]) -> float:
    """The exact mean reward of greedy plans after a warm start from runs, for their tasks; without runs, before it."""
    recipe = Recipe(drill_steps=30, warm_steps=50, warm_lessons=32, steps=0, hidden=48, layers=2, unknown=0.3)
    examples, _ = build_examples(runs or journal_runs(), Weights())
    trainer = Regressor(recipe, Weights(), examples)
    while runs and trainer.step < trainer.total:
        trainer.advance()
    lessons = [run.lesson(Random(9)) for run in examples[::4]]
    plans = greedy(trainer.conductor, lessons)
    settings = [Setting(lesson.pool, Weights()) for lesson in lessons]
    worth = [
        outcome(plan, lesson.problem.kind, place).reward
        for plan, lesson, place in zip(plans, lessons, settings, strict=True)
    ]
    return sum(worth) / len(worth)


@pytest.mark.timeout(240)
def test_good_journaled_plans_beat_a_fresh_model_and_the_weights_say_which_are_good() -> None:
    fresh, good, swapped = taught([]), taught(journal_runs()), taught(journal_runs(swapped=True))
    assert good > fresh + 0.1
    assert good > swapped + 0.1, "the same plans with the advantages swapped"


@pytest.mark.timeout(180)
def test_a_run_from_the_journal_goes_on_with_policy_gradients_and_says_so(tmp_path: Path) -> None:
    options = Namespace(
        out=str(tmp_path), seed=3, drill_steps=2, warm_steps=2, steps=2, lessons=24, threads=1, dear=False, gap=None,
        beta=0.3, recipe="roles",
    )  # fmt: skip
    lines: list[str] = []
    foreign = replace(journal_runs(runs=2)[0], completion="{}")
    train.run(options, lines.append, [*journal_runs(runs=40), foreign])
    assert "left out: 1, because its plan is none that the small conductor can write" in lines
    card = json.loads((tmp_path / "card.json").read_text())
    assert len(card["recipe"]["remembered"]) == 64
    assert card["plans_carried_out"] > 0, "by the policy gradients; the warm start carries out nothing"
    with pytest.raises(ConfigInvalid, match="another recipe"):
        train.run(options, lines.append, journal_runs(runs=42))
