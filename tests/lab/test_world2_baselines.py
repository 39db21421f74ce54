"""World 2: the baselines are what they say, the intervals are clustered, and a few rules do not close the gap."""

from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import numpy as np
import pytest

from app.errors import ConfigInvalid
from app.lab.world2 import tasks as composed
from app.lab.world2 import texts
from app.lab.world2.__main__ import main
from app.lab.world2.baselines import (
    ByCluster,
    Optimum,
    RandomPlan,
    Setting,
    clairvoyant_rewards,
    domain_plans,
    list_fixed_policies,
    true_domain_plans,
)
from app.lab.world2.evolution import (
    FIRST,
    RETAINED,
    SHORT,
    EvolvedPrompt,
    evolve_prompt,
    parse_prompt,
    reflect_on_traces,
    write_prompt,
)
from app.lab.world2.product_selector import ProductSelector
from app.lab.world2.standings import (
    RESAMPLES,
    Figures,
    SeedResults,
    Sizes,
    best_domain_plan,
    bootstrap_pools_and_tasks,
    load_results,
    report,
    save_results,
)
from app.lab.world2.workers import draw_pool

TESTED = 24


@pytest.fixture(scope="module")
def settings() -> list[Setting]:
    """Two small pools."""
    random, all_settings = Random(3), []
    while len(all_settings) < 2:
        chosen = draw_pool(random)
        if len(chosen) == 3:
            training = composed.draw_tasks("train", "small", 20)
            all_settings.append(Setting(chosen, training, training[:8]))
    return all_settings


def mean_reward(setting: Setting, chosen: np.ndarray, tasks: list[composed.Task]) -> float:
    """The mean expected reward of chosen plans."""
    return float(setting.table(tasks)[np.arange(len(tasks)), chosen].mean())


def test_nothing_is_above_the_optimum_and_the_best_fixed_plan_is_the_best_constant(settings: list[Setting]) -> None:
    for setting in settings:
        tasks = setting.training
        rewards = {
            policy.name: mean_reward(setting, policy.choose(setting, tasks), tasks) for policy in list_fixed_policies()
        }
        assert max(rewards, key=rewards.__getitem__) == "best fixed plan"
        best = mean_reward(setting, Optimum().choose(setting, tasks), tasks)
        for policy in (*domain_plans(0), ProductSelector(0, 20), RandomPlan(0)):
            assert mean_reward(setting, policy.choose(setting, tasks), tasks) <= best + 1e-6
        assert best <= clairvoyant_rewards(setting, tasks).mean() + 1e-6


@pytest.mark.parametrize("split", ["fresh", "families"])
def test_regular_expressions_and_a_plan_for_each_domain_do_not_solve_the_world(
    settings: list[Setting], split: composed.Split
) -> None:
    """In world 1 three regular expressions and one plan for each domain closed 92 % of what a conductor closes, and on
    families that neither had met 93 %."""
    fresh = composed.draw_tasks(split, "small", TESTED)
    ways = closed = 0.0
    for setting in settings:
        low = mean_reward(setting, list_fixed_policies()[-1].choose(setting, fresh), fresh)
        ways += mean_reward(setting, Optimum().choose(setting, fresh), fresh) - low
        closed += mean_reward(setting, domain_plans(0)[0].choose(setting, fresh), fresh) - low
    assert ways > 0.03
    assert closed < 0.7 * ways


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--tested", "0"], ["--training", "1"]], ids=" ".join)
def test_numbers_that_leave_nothing_to_compare_are_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["world2", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2


def test_adapting_to_a_task_is_worth_more_than_knowing_its_domain(settings: list[Setting]) -> None:
    """In world 1 everything beyond the domain was worth 0.012."""
    fresh = composed.draw_tasks("fresh", "small", TESTED)
    for setting in settings:
        best = mean_reward(setting, Optimum().choose(setting, fresh), fresh)
        assert best - mean_reward(setting, true_domain_plans().choose(setting, fresh), fresh) > 0.012


def test_classifiers_see_domains_in_texts_that_they_have_not_read() -> None:
    training = composed.draw_tasks("train", "classes", 120)
    fresh = composed.draw_tasks("fresh", "classes", 60)
    truth = texts.domains(fresh)
    for learn in (texts.naive_bayes, texts.nearest_neighbours, lambda _: texts.by_regex):
        assert (learn(training)(fresh) == truth).mean() > 0.55
    assert len(set(texts.clusters(training, 10, 0)(fresh).tolist())) > 5


def test_what_learns_from_verdicts_is_the_same_for_the_same_seed(settings: list[Setting]) -> None:
    fresh = composed.draw_tasks("fresh", "small", 5)
    for make in (
        lambda: EvolvedPrompt(settings, 0, 600),
        lambda: ProductSelector(0, 30),
        lambda: ByCluster(0),
    ):
        assert make().choose(settings[0], fresh).tolist() == make().choose(settings[0], fresh).tolist()


def test_a_prompt_is_evolved_within_its_executions(settings: list[Setting], monkeypatch: pytest.MonkeyPatch) -> None:
    executed, really = [], Setting.sample_reward

    def count_and_execute(*request: Any) -> float:
        executed.append(request)
        return really(*request)

    monkeypatch.setattr(Setting, "sample_reward", count_and_execute)
    assert evolve_prompt(settings, 1, 2_000) != (FIRST,)
    assert 1_600 < len(executed) <= 2_000


def test_reflection_learns_from_what_went_wrong_and_mends_what_the_feedback_names() -> None:
    well = {"task": "add two numbers", "rule": 0, "score": 0.9, "feedback": ""}
    wrong = {"task": "add two days", "rule": 0, "score": 0.0, "feedback": f"{RETAINED} {SHORT}"}
    cues, cued, discreet, long = ["add", "days", "numbers"], set(), 0, 0
    for seed in range(60):
        rules = reflect_on_traces((FIRST,), [well, wrong], cues, Random(seed))
        assert parse_prompt(write_prompt(rules)) == rules
        cued |= {rule.cue for rule in rules}
        discreet += any(rule.first.discreet and rule.others.discreet for rule in rules)
        long += any(rule.first.long and rule.others.long for rule in rules)
    assert cued == {"", "days"}, "a cue is a word of the task that went wrong, and of none that went well"
    assert min(discreet, long) > 5


def test_an_interval_over_pools_and_tasks_is_wider_than_one_over_tasks_alone() -> None:
    """World 1 drew lessons again where pools differed; what differs by pool must widen the interval."""
    random = np.random.default_rng(0)
    by_pool = random.normal(0, 1, size=(4, 1)) + random.normal(0, 0.1, size=(4, 50))
    clustered = bootstrap_pools_and_tasks(by_pool, np.random.default_rng(1)).std()
    alone = bootstrap_pools_and_tasks(by_pool.reshape(1, -1), np.random.default_rng(1)).std()
    assert clustered > 5 * alone
    assert len(bootstrap_pools_and_tasks(by_pool, np.random.default_rng(1))) == RESAMPLES


def write_half(file: BinaryIO, **_: object) -> None:
    file.write(b"half")
    raise OSError("The disk is full.")


def test_the_report_has_every_seed_and_the_worst_first_also_if_they_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(reward: float) -> Figures:
        return Figures(*[np.full((2, 3), value) for value in (reward, reward, 0.001)])

    reports = []
    for seed, best in enumerate((0.9, 0.7, 0.8)):
        splits = ("fresh tasks", "unseen phrasings", "unseen families", "unseen pools and prices", "unseen workers")
        rows = {"plan by domain (kNN)": figures(0.6), "plan by domain (k-means)": figures(0.5)}
        rows |= {"searched optimum": figures(best), "learned from 10 verdicts": figures(0.55 + best / 6)}
        assert best_domain_plan(rows) == "plan by domain (kNN)"
        reports.append(SeedResults(seed, {split: dict(rows) for split in splits}))  # type: ignore[misc]
    reports[0].splits["fresh tasks"]["only here"] = figures(0.4)
    for result in reports:
        save_results(result, tmp_path / f"{result.seed}.npz", Sizes())
    with pytest.raises(ConfigInvalid, match="other sizes"):
        load_results(0, tmp_path / "0.npz", Sizes(tested=200))
    with monkeypatch.context() as full_disk:
        full_disk.setattr("app.lab.world2.standings.np.savez", write_half)
        with pytest.raises(OSError, match="full"):
            save_results(reports[0], tmp_path / "0.npz", Sizes())
    text = report([load_results(seed, tmp_path / f"{seed}.npz", Sizes()) for seed in range(3)], Sizes())
    assert text == report(reports, Sizes())
    assert "only here" not in text, "a policy of which a seed is missing has no mean over seeds"
    rewards = [line.split("|")[2].strip() for line in text.split("### ")[1].splitlines() if "%" in line]
    assert len(rewards) == 4
    assert rewards == sorted(rewards)
    gaps, shares = text.split("### The gap by seed")[1].split("### The share of the gap by seed")
    assert [line.split("|")[1].strip() for line in gaps.strip().splitlines()[-3:]] == ["1", "2", "0"]
    learned = [line.split("|")[1:3] for line in shares.strip().splitlines()[-3:]]
    listed = []
    for row in learned:
        listed.append([cell.strip() for cell in row])
    assert listed == [["0", "33 %"], ["2", "42 %"], ["1", "67 %"]]
    assert "| plan by domain (k-means) | 0.500 | 0.500 | -0.100 [-0.100, -0.100] | -50 % | 0.500 | 1.00 |" in text
