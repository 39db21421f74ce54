"""Fine-tuning on two rounds: second plans keep their grammar, a checkpoint goes on, and doubt is told from trust.

Needs torch, which is no dependency of Baton: `make learn` runs these before it trains.
"""

import json
from argparse import Namespace
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import asdict, replace

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from app.errors import ConfigInvalid  # noqa: E402
from app.lab import export, second_round, train_rounds  # noqa: E402
from app.lab.lessons import draw_lesson  # noqa: E402
from app.lab.plans import LONGEST, SLOTS, TOKENS, legal_again  # noqa: E402
from app.lab.second_round import DOUBT, TAKE, TRUST  # noqa: E402
from app.lab.train_loop import Recipe, Trainer, cut_at_end, greedy  # noqa: E402
from app.lab.train_model import masks  # noqa: E402
from app.lab.train_rounds import Rounds, both_rounds  # noqa: E402
from app.lab.world import Weights  # noqa: E402

TRAINED = Path(__file__).parents[1] / "vllm" / "trained"
TINY = Recipe(hidden=32, layers=2, heads=1, drill_steps=0, warm_steps=3, steps=3, warm_lessons=8, lessons=4, group=4)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def new_rounds(recipe: Recipe = TINY) -> Rounds:
    return Rounds(recipe, Weights(), Trainer(recipe, Weights()).conductor.weights)


def test_second_plans_have_a_grammar_of_their_own() -> None:
    table, random, trainer = masks(), Random(1), new_rounds()
    for workers in range(1, SLOTS + 1):
        for place in range(1, LONGEST):
            allowed = {token for token in range(TOKENS) if table[SLOTS + workers, place, token]}
            assert allowed == set(legal_again(place, workers))
    lessons = [draw_lesson(random, "train") for _ in range(8)]
    prompts = [second_round.second_prompt(lesson.prompt(), lesson, (second_round.BEFORE,), DOUBT) for lesson in lessons]
    sizes = torch.tensor([len(lesson.pool) + SLOTS for lesson in lessons])
    written = trainer.conductor.write(prompts, sizes, 20, torch.Generator().manual_seed(1)).tolist()
    plans = [second_round.second_plan_of(cut_at_end(tokens)) for group in written for tokens in group]
    assert len(set(plans)) > 20


def test_it_begins_with_the_checkpoint_and_goes_on_where_it_was_interrupted() -> None:
    trainer = new_rounds()
    for name, tensor in trainer.base.weights.items():
        assert torch.equal(tensor, trainer.conductor.weights[name])
    parts = [new_rounds(), new_rounds()]
    for _ in range(trainer.total):
        trainer.advance()
    for _ in range(4):
        parts[0].advance()
    parts[1].restore(parts[0].state())
    for _ in range(2):
        parts[1].advance()
    assert parts[1].executed == trainer.executed > 0
    changed = 0
    for name, tensor in trainer.conductor.weights.items():
        assert torch.equal(tensor, parts[1].conductor.weights[name])
        changed += not torch.equal(tensor, trainer.base.weights[name])
    assert changed > 5


@pytest.mark.timeout(180)
def test_it_learns_to_take_an_answer_that_is_trusted_sooner_than_one_that_is_doubted() -> None:
    """From a checkpoint whose answers are mostly right: of a fresh model nothing is worth taking."""
    saved_recipe = Recipe(**json.loads((TRAINED / "card.json").read_text())["recipe"])
    recipe = replace(
        saved_recipe, drill_steps=0, warm_steps=30, steps=0, warm_lessons=32, warm_draws=12, warm_rate=1e-3
    )
    trainer = Rounds(recipe, Weights(), export.load_conductor(TRAINED).weights)
    while trainer.step < trainer.total:
        trainer.advance()
    lessons = [draw_lesson(Random(n), "held-out tasks") for n in range(80)]
    chosen = both_rounds(trainer.conductor, lessons)
    shares = {}
    for place, sign in enumerate(second_round.SIGNS):
        shares[sign] = sum(seconds[place] == TAKE for _, seconds in chosen)
    assert shares[TRUST] > shares[DOUBT] + 10
    for (first, seconds), lesson in zip(chosen, lessons, strict=True):
        assert all(step.worker < len(lesson.pool) for plan in (first, *seconds) for step in plan)


@pytest.mark.timeout(180)
def test_the_command_goes_on_from_a_folder_and_compares(tmp_path: Path) -> None:
    base = Trainer(TINY, Weights())
    card = {"recipe": asdict(TINY), "weights": asdict(Weights()), "model_sha256": "0" * 64}
    (tmp_path / "card.json").write_text(json.dumps(card))
    torch.save(dict(base.state()["weights"]), tmp_path / "model.pt")
    options = Namespace(
        checkpoint=str(tmp_path), out=str(tmp_path / "out"), seed=2, warm_steps=2, steps=2, lessons=24, threads=1
    )
    lines: list[str] = []
    train_rounds.run(options, lines.append)
    saved_card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert (saved_card["rounds"], saved_card["from"], saved_card["recipe"]["seed"]) == (2, "0" * 64, 2)
    table = saved_card["tables"]["held-out tasks"]
    lessons = train_rounds.draw_exam("held-out tasks", 24, 1)
    plans = greedy(base.conductor, lessons)
    worth = [
        train_rounds.outcome(plan, lesson.problem.kind, train_rounds.Setting(lesson.pool)).reward
        for plan, lesson in zip(plans, lessons, strict=True)
    ]
    assert table["arms"][train_rounds.BEFORE]["reward"] == pytest.approx(sum(worth) / 24)
    both = table["arms"][train_rounds.BOTH]
    assert table["ahead"]["reward"]["value"] == pytest.approx(both["reward"] - sum(worth) / 24)
    assert (tmp_path / "out" / "report.txt").read_text().count("two rounds are ahead of the checkpoint: reward") == 4
    (tmp_path / "card.json").write_text(json.dumps(card | {"model_sha256": "1" * 64}))
    with pytest.raises(ConfigInvalid, match="another recipe, seed, start or reward"):
        train_rounds.run(options, lines.append)
    with pytest.raises(ConfigInvalid, match="--from"):
        train_rounds.run(Namespace(**{**vars(options), "checkpoint": str(tmp_path / "absent")}), lines.append)
    with pytest.raises(ConfigInvalid, match="--from"):
        train_rounds.run(Namespace(**{**vars(options), "checkpoint": None}), lines.append)
