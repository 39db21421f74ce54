"""World 2: a policy that learns from verdicts alone; its derivatives, its reading, and its model of workflows."""

import json
from copy import copy
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from app.lab.world2 import tasks as composed
from app.lab.world2.baselines import Setting
from app.lab.world2.bounds import OptimumByCards, _sample_skills, optima_of_partial_knowledge
from app.lab.world2.ceiling import measure_again
from app.lab.world2.constants import DOMAINS
from app.lab.world2.gradients import Value
from app.lab.world2.learning import SPREADS, THRIFT, Learner, LoggedExecution, _RightProbability, posterior_by_card
from app.lab.world2.model_free import Environment, train_advantage_weighted, train_policy_gradient
from app.lab.world2.outcome import cost_shares_of_all_plans, mean_rewards_of_all_plans, rewards_of_all_plans
from app.lab.world2.reading import Reader
from app.lab.world2.rules import size_of
from app.lab.world2.sentences import SentenceReader
from app.lab.world2.shapes import Plan, catalogue
from app.lab.world2.standings import PolicyGroup, Sizes, load_results, run_seed, save_results
from app.lab.world2.workers import draw_pool, worker_profiles


@pytest.fixture(scope="module")
def reader() -> Reader:
    """A reader of labelled texts, which knows no words but theirs."""
    return Reader(composed.draw_tasks("train", "reader", 300))


@pytest.fixture(scope="module")
def learner() -> Learner:
    """A learner without verdicts."""
    return Learner(0, [], texts=120)


@pytest.fixture(scope="module")
def trial() -> Environment:
    """A few tasks over pools of training."""
    return Environment([], 0, texts=120, count=60)


def _chances_of_domains(reader: Reader, task: composed.Task) -> np.ndarray:
    """The chance of each domain (column) for each part of a task (row), over all readings."""
    chances = np.zeros((len(task.parts), len(DOMAINS)))
    for reading in reader.readings(task):
        for part, family in enumerate(reading.families):
            chances[part, reader.families[family].domain] += reading.weight
    return chances


def test_a_reader_finds_the_parts_and_the_confidence_of_texts_that_it_has_not_seen(reader: Reader) -> None:
    texts = parts = right = confident = 0
    for task in composed.draw_tasks("fresh", "reader", 80):
        reading = reader.read(task)
        assert sum(reading.weight for reading in reader.readings(task)) == pytest.approx(1)
        parts += len(task.parts)
        for place, part in zip(reading.families, task.parts, strict=True):
            right += reader.families[place].name == part.family.name
        confident += reading.confidential == task.confidential
        texts += 1
    assert right / parts > 0.85
    assert confident / texts > 0.9


def test_a_reader_is_not_sure_of_families_that_it_never_met(reader: Reader) -> None:
    """The one before gave nearly all its trust to a wrong family, and its plans were worse than without reading."""
    sure = {}
    for split in ("fresh", "families"):
        tasks = composed.draw_tasks(split, "sure", 40)  # type: ignore[arg-type]
        sure[split] = np.mean([_chances_of_domains(reader, task).max(axis=1).mean() for task in tasks])
    assert sure["fresh"] > 0.9
    assert sure["families"] < 0.8


def test_words_that_no_training_text_has_say_nothing_of_confidence(reader: Reader) -> None:
    task = composed.draw_tasks("fresh", "silent", 1)[0]
    question = "add 3 days to 4 weeks and say what it makes in days."
    strange = replace(task, text=f"Zounds! {question} Verily forsooth hitherto.", parts=task.parts[:1])
    confident = sum([reading.weight for reading in reader.readings(strange) if reading.confidential])
    assert 0.2 < confident < 0.4


def test_vectors_of_words_stand_in_for_words_that_were_never_met() -> None:
    """A reader with vectors reads a word as its neighbours: here two words of each domain that are each other's."""
    training = composed.draw_tasks("train", "vectors", 150)
    families = tuple(sorted({part.family for task in training for part in task.parts}, key=lambda family: family.name))
    cues = ("coins", "monday", "program", "lamp", "letters")
    neighbours = ("ducats", "sabbath", "subroutine", "lantern switch", "glyphs")

    def vectors(sentences: list[str]) -> np.ndarray:
        rows = []
        for sentence in sentences:
            met = [cue in sentence or other in sentence for cue, other in zip(cues, neighbours, strict=True)]
            met = met if any(met) else [name in sentence for name in DOMAINS]
            rows.append(np.array(met, dtype=float) / max(1.0, np.linalg.norm(met)))
        return np.array(rows)

    evidence = SentenceReader(training, families, vectors).evidence(["say glyphs", "say ducats"])  # type: ignore[arg-type]
    best = [DOMAINS[families[place].domain] for place in evidence.argmax(axis=1)]
    assert best == ["language", "numbers"]


def test_derivatives_are_those_of_small_differences() -> None:
    random = np.random.default_rng(0)
    start, places = random.normal(size=(4, 6)), np.array([0, 3, 3, 5])

    def result(value: Value) -> Value:
        result_value = value.at(places)
        chances = (result_value.column() * np.array([[1.0, 2.0]]) - 0.5).logistic()
        return (1 - chances * result_value.exponential().column()).mean_of_rows()

    first = Value(start)
    result(first).backward(np.ones(4))
    assert first.gradient is not None
    for row, place in [(0, 0), (1, 3), (2, 3), (3, 5), (0, 1)]:
        step = np.zeros((4, 6))
        step[row, place] = 1e-6
        above, below = result(Value(start + step)).array.sum(), result(Value(start - step)).array.sum()
        assert first.gradient[row, place] == pytest.approx((above - below) / 2e-6, abs=1e-6)


def test_what_a_learner_fits_is_what_it_then_expects_of_every_shape(learner: Learner) -> None:
    """The chances whose derivatives are taken are those by which plans are chosen, for any figures."""
    random = Random(3)
    noise, learner = np.random.default_rng(2), copy(learner)
    learner.figures = {name: array + noise.normal(0, 0.2, array.shape) for name, array in learner.figures.items()}
    chosen = draw_pool(random)
    names = [worker.name for worker in worker_profiles(unseen=False)]
    members = [names.index(worker.name) for worker in chosen]
    rewards = learner.estimate_rewards(chosen)
    for name, steps in catalogue().items():
        (task,) = composed.draw_tasks("train", name, 1)
        reading = learner.reader.read(task)
        plan = Plan(name, tuple(random.randrange(len(chosen)) for _ in steps))
        row = LoggedExecution(name, reading, tuple(members[worker] for worker in plan.workers), passed=True)
        fitted = _RightProbability(
            learner._values_by_row(1), steps, len(reading.families), learner._columns([row])
        ).right()
        expected = rewards.right(name, learner.task_as_read(task, reading)).mean(axis=0)[plan.workers]
        assert fitted.array[0] == pytest.approx(float(expected)), name


def test_verdicts_teach_what_workers_can_do_beyond_their_cards(learner: Learner) -> None:
    """After 300 executions that pass for one worker and fail for all others, that one is believed in; their cards are
    of few questions."""
    chosen = tuple([worker for worker in worker_profiles(unseen=False) if worker.card.questions == 8][:3])
    learner = copy(learner)
    learner._executions = []
    names = [worker.name for worker in worker_profiles(unseen=False)]
    places = [names.index(worker.name) for worker in chosen]
    reading = learner.reader.read(composed.draw_tasks("train", "one", 1)[0])
    before = np.diag(learner.covariance)
    for at in range(300):
        worker = at % len(places)
        learner._executions.append(LoggedExecution("solve", reading, (places[worker],), passed=worker == 1))
    learner.fit(6)
    believed = [worker.ability for worker in learner.estimate_rewards(chosen).pool]
    assert believed.index(max(believed)) == 1
    assert np.diag(learner.covariance).sum() < before.sum()
    abilities_drawn = [learner.sample_beliefs().rewards(chosen).pool[1].ability for _ in range(2)]
    assert abilities_drawn[0] != abilities_drawn[1]
    exported = json.loads(json.dumps(learner.policy().as_json()))
    assert exported["format"] == "world-2 policy 2"
    assert len(exported["workers"][chosen[1].name]) == len(DOMAINS)


def test_executions_are_shared_among_pools_and_half_of_the_tried_ones_ask_one_worker_alone(learner: Learner) -> None:
    learner = copy(learner)
    learner._executions, learner._random = [], Random(5)
    learner._seen_pools = [draw_pool(Random(1))]
    learner._execute_until(40)
    names = [worker.name for worker in worker_profiles(unseen=False)]
    ours = {names.index(worker.name) for worker in learner._seen_pools[0]}
    assert 10 <= sum([set(row.members) <= ours for row in learner._executions]) <= 32
    learner._executions = []
    for _ in range(200):
        learner._execute(learner._seen_pools[0], [Plan("plan reason check", (0, 1, 2))])
    alone = [row.members for row in learner._executions if row.shape == "reason"]
    whole = [row for row in learner._executions if row.shape == "plan reason check"]
    planner = [worker.name for worker in worker_profiles(unseen=False)].index(learner._seen_pools[0][0].name)
    assert 50 <= len(alone) <= 100
    assert 50 <= len(whole) <= 100
    assert sum([members == (planner,) for members in alone]) <= 8


def test_cards_alone_tell_who_is_good_at_what_and_many_questions_tell_more(learner: Learner) -> None:
    """Workers that training never meets: world 1 ended here in a KeyError."""
    spreads = (SPREADS["abilities"], SPREADS["edges"])
    card = worker_profiles(unseen=True)[0].card
    edges = []
    for questions in (8, 60):
        changed_card = replace(card, questions=questions, right=(questions, *[questions // 2] * 4))
        edges.append(posterior_by_card(changed_card, learner.figures, spreads)[1])
        assert edges[-1].argmax() == 0
    assert edges[1][0] > edges[0][0] > 0
    setting = Setting(draw_pool(Random(0), unseen_workers=True), [], [])
    tasks = composed.draw_tasks("fresh", "unseen", 2)
    assert len(learner.policy().choose(setting, tasks)) == 2


def test_bounds_lie_below_the_optimum_and_a_card_of_many_questions_is_nearly_the_truth() -> None:
    chosen = draw_pool(Random(1), unseen_workers=True)
    tasks = composed.draw_tasks("train", "bounds", 4)
    setting = Setting(chosen, [], [])
    table = setting.table(tasks)
    for policy in (OptimumByCards(), *optima_of_partial_knowledge()):
        reached = table[np.arange(len(tasks)), policy.choose(setting, tasks)]
        assert (reached <= table.max(axis=1) + 1e-6).all()
    silent = optima_of_partial_knowledge()[0].choose(
        setting, [replace(tasks[0], confidential=True), replace(tasks[0], confidential=False)]
    )
    assert silent[0] == silent[1]
    measured_again = Setting(measure_again(chosen, 1_000, Random(2)), [], [])
    reached = table[np.arange(len(tasks)), OptimumByCards().choose(measured_again, tasks)]
    assert (table.max(axis=1) - reached).mean() < 0.005


def test_what_may_be_true_of_a_worker_has_the_spread_that_its_card_leaves() -> None:
    """Over workers that are drawn by the world's own rules, the truth is as far from the posterior's mean as the
    posterior says, so that the optimum by cards is a bound and not a guess."""
    off, spreads = [], []
    for worker in (*worker_profiles(unseen=False), *worker_profiles(unseen=True)):
        abilities, skills = _sample_skills(worker.card, np.random.default_rng(0))
        truth = np.array([worker.ability, *[worker.ability + edge for edge in worker.edges]])
        samples = np.column_stack([abilities, skills])
        off.append(((truth - samples.mean(axis=0)) ** 2).mean())
        spreads.append(samples.var(axis=0).mean())
    assert np.mean(off) == pytest.approx(np.mean(spreads), rel=0.2)


@pytest.mark.parametrize("learn", [train_advantage_weighted, train_policy_gradient])
def test_what_learns_without_a_model_gets_better_by_verdicts(learn: object, trial: Environment) -> None:
    ((budget, policy),) = learn(trial, 1_000)  # type: ignore[operator]
    assert budget == 1_000
    reached = {}
    for name, plans in (
        ("learned", policy.best),
        ("chance", lambda case: policy.copy().sample_plan(case, Random(0))),
    ):
        got = []
        for case in trial.held_out:
            plan = plans(case)
            got.append(float(case.rewards.table(plan.shape, case.task)[plan.workers]))
        reached[name] = np.mean(got)
    assert reached["learned"] > reached["chance"]


def test_a_kept_seed_is_given_only_the_policies_that_it_lacks(tmp_path: Path) -> None:
    names = []

    class First:
        def __init__(self, name: str) -> None:
            self.name = name

        def choose(self, setting: Setting, tasks: list[composed.Task]) -> np.ndarray:
            return np.zeros(len(tasks), dtype=np.int64)

    def group(name: str) -> PolicyGroup:
        return PolicyGroup((name,), lambda sizes, seed: names.append(name) or [First(name)])  # type: ignore[func-returns-value]

    sizes = Sizes(pools=1, training=1, validation=1, tested=1)
    save_results(run_seed(0, sizes, [group("a")]), tmp_path / "seed-0.npz", sizes)
    results = run_seed(0, sizes, [group("b"), group("a")], load_results(0, tmp_path / "seed-0.npz", sizes))
    assert names == ["a", "b"]
    assert set(results.splits["fresh tasks"]) == {"a", "b"}


def test_a_plan_is_chosen_for_all_readings_at_once(learner: Learner) -> None:
    """If a text may be confidential, the plan is the best one on average, and not for the likelier case."""
    policy, setting = learner.policy(), Setting(draw_pool(Random(2)), [], [])
    task = composed.draw_tasks("fresh", "readings", 1)[0]
    rewards = policy.beliefs.rewards(setting.pool)
    total, readings = np.zeros(len(setting.plans)), []
    for reading in learner.reader.readings(task):
        readings.append((reading.weight, policy.beliefs.task_as_read(task, reading)))
        total += reading.weight * rewards_of_all_plans(rewards, readings[-1][1])
    assert len({reading.confidential for _, reading in readings}) == 2, (
        "the text leaves open whether it is confidential"
    )
    assert mean_rewards_of_all_plans(rewards, readings) == pytest.approx(total, abs=1e-6)
    assert policy.choose(setting, [task])[0] == total.argmax()


def test_to_a_thrifty_policy_a_dollar_is_more_than_its_price(learner: Learner) -> None:
    policy, setting = learner.thrifty_policy(), Setting(draw_pool(Random(2)), [], [])
    task = composed.draw_tasks("fresh", "readings", 2)[1]
    rewards = policy.beliefs.rewards(setting.pool)
    readings = [
        (reading.weight, policy.beliefs.task_as_read(task, reading)) for reading in learner.reader.readings(task)
    ]
    believed, costs = mean_rewards_of_all_plans(rewards, readings), cost_shares_of_all_plans(rewards, size_of(task))
    (chosen,) = policy.choose(setting, [task])
    assert chosen == (believed - THRIFT * costs).argmax()
    (best,) = learner.policy().choose(setting, [task])
    assert best == believed.argmax()
    assert costs[chosen] < costs[best], "what is believed to be best is dearer"


def test_what_a_pool_asks_for_its_workers_tells_nothing_of_their_skills(learner: Learner) -> None:
    """Held-out pools have prices of their own; a worker is as able at any of them."""
    (profile, *_) = worker_profiles(unseen=True)
    dearer = replace(profile, card=replace(profile.card, price=2 * profile.card.price))
    beliefs = learner.posterior_mode()
    assert beliefs.worker(dearer).ability == beliefs.worker(profile).ability
