"""The training of a conductor of words, dry: a few steps leave a folder that `serve` and `deploy` take."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from app.conductor import cards
from app.lab import manifest
from tests.vllm.server import OFFLINE, PYTHON, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
DRY = "--verdicts 0 --lessons 10 --steps 3 --judged 4 --processes 2"


COMMAND = [str(PYTHON), "-W", "ignore", "-m", "app.lab.world2.words"]
"""The command, with an interpreter that has torch."""
ENVIRON = os.environ | OFFLINE | {"PYTHONPATH": str(ROOT)}


def words(*arguments: str, input_text: str = "") -> str:
    """Run the command, and return what it prints."""
    argv = [*COMMAND, *arguments]
    process = subprocess.run(
        argv, input=input_text, cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=400, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def test_a_few_steps_leave_a_folder_that_is_served_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "words"
    words("--out", str(out), *DRY.split())
    card, golden = manifest.read(out)
    assert (card.kind, card.prompt, card.template, card.grammar) == ("model", "cards", cards.TEMPLATE, "xgrammar")
    assert set(card.evaluation) == {"fresh tasks", "unseen phrasings", "unseen families", "unseen workers"}
    curve = [line.split(",") for line in (out / "curve.csv").read_text().splitlines()]
    assert [row[0] for row in curve] == ["step", "1", "2", "3"]
    assert all(-1 <= float(row[-1]) <= 0 for row in curve[1:]), "the teacher thinks no plan better than its best"
    pairs = []
    for example in golden:
        pairs.append([message["content"] for message in example.messages])
    assert json.loads(words("--plan", str(out), input_text=json.dumps(pairs))) == [prompt.plan for prompt in golden]


def test_a_training_that_is_killed_leaves_a_folder_that_can_be_served(tmp_path: Path) -> None:
    out = tmp_path / "words"
    argv = [*COMMAND, "--out", str(out), *DRY.replace("--steps 3", "--steps 40").split()]
    with subprocess.Popen(argv, cwd=ROOT, env=ENVIRON, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "step 4 of 40" in line)  # it has sat its first exam
        process.kill()
    card, golden = manifest.read(out)
    assert (card.kind, list(card.evaluation), len(golden)) == ("model", ["exam"], 12)
