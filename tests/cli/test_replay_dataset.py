"""`baton replay-dataset` over small files made here, in every format that it reads."""

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.__main__ import main

pytestmark = pytest.mark.long

WORDS = ("river", "stone", "cloud", "lamp", "train", "bread", "glass", "paper")
LARGE, SMALL = "maker/large", "maker/small"
ROWS = 240


def prompts(count: int = ROWS) -> Iterator[tuple[str, bool]]:
    """Prompts, and whether the small model is right: not if the prompt asks for a proof. The large one always is."""
    random = Random(7)
    for number in range(count):
        hard = number % 2 == 0
        words = " ".join(random.sample(WORDS, 3))
        yield f"{'prove the theorem' if hard else 'name the colour'} of {words}", not hard


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def full(path: Path, **more: Mapping[str, Any]) -> Path:
    """Outcomes of all models in the own form; `more` adds models with the outcome that they always have."""
    lines = []
    for prompt, right in prompts():
        outcomes = {LARGE: {"score": 1, "usd": 0.01}, SMALL: {"score": float(right), "usd": 0.001}, **more}
        lines.append({"prompt": prompt, "outcomes": outcomes})
    return write(path, lines)


def baton(*arguments: object) -> tuple[int, str, str]:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(["replay-dataset", *map(str, arguments)], {})
    return status, out.getvalue(), err.getvalue()


def replay_dataset(*arguments: object) -> dict[str, Any]:
    status, out, err = baton(*arguments, "--json")
    assert (status, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def read_refusal(*arguments: object) -> str:
    status, _, err = baton(*arguments)
    assert status == 2
    return err


def test_routers_are_compared_over_seeds_where_all_outcomes_are_known(tmp_path: Path) -> None:
    file = full(tmp_path / "own.jsonl")
    report = replay_dataset(file, "--seeds", 2)
    assert (report["cheapest"], report["best"], report["prompts"], report["feedback"]) == (
        SMALL,
        LARGE,
        ROWS,
        "full information",
    )
    policies = report["policies"]
    assert policies["mean scores"]["mean"]["apgr"] == pytest.approx(0.5)
    perfect = policies["perfect choice"]
    assert perfect["mean"]["apgr"] > 0.7
    assert perfect["mean"]["regret"] == 0
    for name in ("selector", "kNN", "k-means", "logistic regression", "matrix factorisation"):
        assert len(policies[name]["seeds"]) == 2
        assert 0.55 < policies[name]["worst"]["apgr"] <= policies[name]["mean"]["apgr"] <= perfect["mean"]["apgr"], name
    selector = policies["selector"]["mean"]
    assert 0 < selector["learning_regret"] < 0.5
    assert selector["cost_95"] < policies["mean scores"]["mean"]["cost_95"]
    # Whatever the prompt, its choice by reward is the large model, which costs a fifth of a right answer's worth.
    assert policies["mean scores"]["mean"]["regret"] == pytest.approx(0.5 * (0.98 - 0.8), abs=0.01)
    assert policies["kNN"]["mean"]["learning_regret"] is None
    assert report == replay_dataset(file, "--seeds", 2)

    status, out, _ = baton(file, "--seeds", 1)
    assert status == 0
    assert "APGR, mean (worst)" in out
    assert "240 prompts, 1 seeds" in out


def test_the_responses_of_routellm_are_read_from_its_csv_files(tmp_path: Path) -> None:
    """They have no costs: the axis is the share of calls that go to the better model."""
    with (tmp_path / "responses.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["prompt", SMALL, LARGE, f"{SMALL}_response", f"{LARGE}_response"])
        for prompt, right in prompts():
            lines.writerow([f"{prompt},\nin two lines", right, True, "some text", "another"])
    report = replay_dataset(tmp_path, "--seeds", 1)
    assert (report["cost_unit"], report["prompts"], report["cheapest"]) == ("calls", ROWS, SMALL)
    assert sorted(report["models"]) == [LARGE, SMALL]
    assert report["models"][SMALL]["score"] == 0.5
    priced = replay_dataset(tmp_path, "--seeds", 1, "--cost", f"{SMALL}=0.001", "--cost", f"{LARGE}=0.01")
    assert priced["models"][LARGE]["cost"] == 0.01


def test_cached_results_of_routerarena_are_joined_by_prompt(tmp_path: Path) -> None:
    """A call that failed is no wrong answer: its prompt is left out. A score a little below 0 counts as 0."""
    for model, price in ((LARGE, 0.02), (SMALL, 0.002)):
        lines = []
        for number, (prompt, right) in enumerate(prompts()):
            score = 1.0 if right or model == LARGE else -0.03
            evaluated = {"score": score, "metric": "meteor_score", "inference_cost": price}
            line = {"global_index": f"task_{number}", "question": prompt, "llm_selected": model, "success": number != 3}
            lines.append(line | {"evaluation_result": evaluated})
        write(tmp_path / f"{model.replace('/', '_')}.jsonl", lines)
    report = replay_dataset(tmp_path, "--seeds", 1)
    assert report["prompts"] == ROWS - 1
    assert report["left_out"] == {"the call failed": 2}
    assert report["models"][LARGE]["cost"] == pytest.approx(0.02)
    assert report["models"][SMALL]["score"] == pytest.approx(119 / 239)


def test_a_model_dearer_than_the_best_one_is_left_out(tmp_path: Path) -> None:
    report = replay_dataset(full(tmp_path / "own.jsonl", dear={"score": 0.5, "usd": 1.0}), "--seeds", 1)
    assert {name: model["routed"] for name, model in report["models"].items()} == {
        LARGE: True,
        SMALL: True,
        "dear": False,
    }


def log_lines(number: int, prompt: str, right: bool, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A line of LiteLLM's log and one of OpenRouter's about the same call."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    score = float(right or model == LARGE)
    litellm = {"id": f"call-{number}", "call_type": "acompletion", "status": "success", "model": model}
    litellm |= {"response_cost": 0.01 if model == LARGE else 0.001, "messages": messages}
    litellm |= {"metadata": {"requester_metadata": {"score": score}}}
    openrouter = {"id": f"gen-{number}", "model": model, "total_cost": 0.01 if model == LARGE else 0.001}
    openrouter |= {"tokens_prompt": 12, "input": {"messages": messages}}
    return litellm, {"data": openrouter}


def logs(folder: Path, count: int = 600) -> tuple[Path, Path, Path]:
    """Return random calls, as LiteLLM and OpenRouter log them, and scores for the latter."""
    random = Random(3)
    litellm, openrouter, scores = [], [], []
    for number, (prompt, right) in enumerate(prompts(count)):
        model = random.choice((LARGE, SMALL))
        lines = log_lines(number, prompt, right, model)
        litellm.append(lines[0])
        openrouter.append(lines[1])
        scores.append({"id": f"gen-{number}", "score": float(right or model == LARGE)})
    litellm.append({"id": "failed", "model": SMALL, "status": "failure", "messages": []})
    return (
        write(folder / "litellm.jsonl", litellm),
        write(folder / "openrouter.jsonl", openrouter),
        write(folder / "scores.jsonl", scores),
    )


def test_a_log_gets_off_policy_estimates_and_is_said_to_be_one(tmp_path: Path) -> None:
    litellm, openrouter, scores = logs(tmp_path)
    few = ("--seeds", 2, "--ratings", 200, "--held-out", 300)
    report = replay_dataset(litellm, *few)
    assert report["feedback"] == "one outcome for each prompt"
    assert report["left_out"] == {"the call failed": 1}
    assert any("off-policy" in note for note in report["notes"])
    assert any("without a propensity" in note for note in report["notes"])
    small, large = report["policies"][f"always {SMALL}"], report["policies"][f"always {LARGE}"]
    assert small["mean"] == pytest.approx(0.5 * 0.98, abs=0.1)
    assert large["mean"] == pytest.approx(0.8, abs=0.1)
    assert report["policies"]["selector"]["mean"] > 0.8
    assert "apgr" not in json.dumps(report)

    assert replay_dataset(openrouter, "--scores", scores, *few)["policies"] == report["policies"]
    status, out, _ = baton(litellm, "--seeds", 1, "--ratings", 50, "--held-out", 50)
    assert status == 0
    assert "bandit feedback" in out
    assert "refused, for example: the log is worth" in out
    assert "there is no score" in read_refusal(openrouter)


def test_rows_of_litellms_spend_logs_have_their_prompts_in_the_body_of_the_request(tmp_path: Path) -> None:
    """Its `messages` column is filled for realtime calls alone."""
    litellm, openrouter, _ = logs(tmp_path)
    rows, lines = [], []
    for line in litellm.read_text().splitlines()[:-1]:
        payload = json.loads(line)
        row = {"request_id": payload["id"], "model": payload["model"], "status": "success"}
        row |= {"spend": payload["response_cost"], "messages": {}, "response": {}}
        row |= {"proxy_server_request": {"model": "group", "messages": payload["messages"], "temperature": 0}}
        rows.append(row | {"metadata": {"spend_logs_metadata": payload["metadata"]["requester_metadata"]}})
    for line, row in zip(openrouter.read_text().splitlines(), rows, strict=True):
        lines.append(json.loads(line) | row["metadata"]["spend_logs_metadata"])
    few = ("--seeds", 1, "--ratings", 200, "--held-out", 300)
    expected = replay_dataset(litellm, *few)["policies"]
    assert replay_dataset(write(tmp_path / "spend.jsonl", rows), *few)["policies"] == expected
    beside = write(tmp_path / "beside.jsonl", lines)
    assert replay_dataset(beside, *few)["policies"] == expected, "a score beside OpenRouter's data counts"


def test_lines_of_one_conversation_are_one_value(tmp_path: Path) -> None:
    """A log of 1,200 calls about 30 questions, each of which has further turns, knows no more than 30 questions say."""
    random, lines = Random(3), []
    for number, (prompt, right) in enumerate(prompts(1_200)):
        first = {"role": "user", "content": f"question {number % 30}"}
        model = random.choice((LARGE, SMALL))
        cost = 0.01 if model == LARGE else 0.001
        messages = [first, {"role": "assistant", "content": "An answer."}, {"role": "user", "content": prompt}]
        lines.append({"messages": messages, "model": model, "score": right or model == LARGE, "usd": cost})
    policies = replay_dataset(write(tmp_path / "log.jsonl", lines), "--seeds", 2)["policies"]
    for report in policies[f"always {LARGE}"]["seeds"]:
        assert (report["rows"], report["clusters"]) == (600, 15)
        assert report["verdict"] == "undecided"


def test_a_known_propensity_needs_no_assumption(tmp_path: Path) -> None:
    random, lines = Random(5), []
    for prompt, right in prompts(60):
        model, chance = (LARGE, 0.25) if random.random() < 0.25 else (SMALL, 0.75)
        cost = 0.01 if model == LARGE else 0.001
        line = {"prompt": prompt, "model": model, "score": right or model == LARGE, "usd": cost, "propensity": chance}
        lines.append(line)
    assert len(replay_dataset(write(tmp_path / "log.jsonl", lines), "--seeds", 1)["notes"]) == 1


GOOD = '{"prompt": "p", "outcomes": {"a": {"score": 1}, "b": {"score": 0}}}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", GOOD + "no json\n", "x.jsonl:2: the line is no JSON; write one JSON object on each line"),
        ("x.jsonl", GOOD + "[1]\n", "x.jsonl:2: the line is no JSON object; give"),
        ("x.jsonl", '{"prompt": "p"}\n', 'x.jsonl:1: there is no "model"; give "prompt" with "outcomes"'),
        (
            "x.jsonl",
            GOOD.replace("1", "7", 1),
            "x.jsonl:1: the score is 7; give a number from 0 to 1, or true or false",
        ),
        ("x.jsonl", GOOD.replace("1", "1" * 400, 1), "1; give a number from 0 to 1, or true or false"),
        ("x.jsonl", GOOD.replace('"p"', '""'), "x.jsonl:1: there is no prompt; have the proxy store prompts"),
        ("x.jsonl", '{"outcomes": 3, "prompt": "p"}\n', 'x.jsonl:1: "outcomes" must be an object'),
        (
            "x.jsonl",
            '{"prompt": "p", "model": "a", "score": 1, "usd": -1}\n',
            "the cost is -1; give a number from 0 to 1e+12",
        ),
        (
            "x.jsonl",
            '{"prompt": "p", "model": "a", "score": 1, "usd": 1e308}\n',
            "the cost is 1e+308; give a number from 0 to 1e+12",
        ),
        ("x.jsonl", '{"prompt": "p", "model": "a", "score": 1, "propensity": 0}\n', "give a probability above 0"),
        ("x.jsonl", "[" * 200_000, "x.jsonl:1: the line is no JSON; write one JSON object on each line"),
        ("x.jsonl", GOOD, "usable prompts: 1, and 20 are needed (outcomes: 1 of a, 1 of b). Give more lines"),
        ("x.csv", "prompt;a\nx;1\n", "x.csv:1: the first line must name the columns, with commas between them: prompt"),
        ("X.CSV", "question,a\nx,1\n", "X.CSV:1: the first line must name the columns"),
        ("x.csv", "prompt,a,a,b\nx,1,0,1\n", "x.csv:1: 2 columns are named a; give each a name of its own"),
        ("x.csv", "\N{BYTE ORDER MARK}prompt,a\n" + "x,1\n" * 30, "all outcomes are of a; give those of a second"),
        ("x.csv", "prompt,a,b\nx,1\n", "x.csv:2: the line has not 3 fields with a prompt; quote texts with commas"),
        ("x.csv", "prompt,a,b\nx,1,maybe\n", "x.csv:2, column b: the score is 'maybe'; give a number from 0 to 1"),
        ("x.csv", "prompt,a\n" + "x,1\n" * 30, "all outcomes are of a; give those of a second model, too"),
        ("x.csv", "prompt,a,b,c\n" + "x,1,0,1\n" * 30, "the cost of a is not recorded; give it with --cost a=DOLLARS"),
        ("x.csv", "prompt,a,a_usd,b,b_usd\n" + "x,1,1,0,2\n" * 30, "a is the best model and the cheapest one"),
    ],
)
def test_garbage_is_refused_with_line_and_remedy(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    assert message in read_refusal(tmp_path / name)


def test_an_id_of_two_prompts_is_refused_and_loses_none(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.csv").write_text(f"id,prompt,a,b\n7,the {name} question,1,0\n")
    message = f"{tmp_path}/second.csv: the id 7 is that of another prompt in {tmp_path}/first.csv"
    assert message in read_refusal(tmp_path)


def test_two_scores_of_a_model_for_one_id_are_refused_and_the_same_line_twice_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = '{"id": "7", "prompt": "p", "model": "a", "score": 1}\n'
    path.write_text(line + line)
    assert "usable prompts: 1, and 20 are needed" in read_refusal(path)
    path.write_text(line + line.replace('"score": 1', '"score": 0'))
    message = f"{path}: for the id 7 {path} has another outcome of a; leave out one"
    assert message in read_refusal(path)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for text in ("pr\xe9mpt,a\nx,1\n", "prompt,a\n" + "x,1\n" * 5_000 + "\xe9,1\n"):
        path.write_text(text, encoding="latin-1")
        assert "this is no CSV in UTF-8" in read_refusal(path)


def test_files_that_are_not_there_and_wrong_options_are_refused(tmp_path: Path) -> None:
    assert "No such file" in read_refusal(tmp_path / "missing.csv")
    assert "has no file that ends in .csv or .jsonl" in read_refusal(tmp_path)
    assert "half a pair of surrogates" in read_refusal(
        full(tmp_path / "full.jsonl", **{"\ud800": {"score": 1, "usd": 1}})
    )
    assert "write MODEL=DOLLARS" in read_refusal(tmp_path, "--cost", "x")
    assert "a share from 0 to 1" in read_refusal(tmp_path, "--cost-weight", "2")
    assert "there is no model none" in read_refusal(full(tmp_path / "own.jsonl"), "--cost", "none=1")
