"""The comparison of two runs: figures, aligned steps, and who saw what in one run and not in the other."""

from collections.abc import Sequence

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.rating.alignment import side_by_side
from app.core.rating.comparison import Comparison, Recipient, compare, compare_unreadable, figures, pair_differences
from app.core.rating.feedback import Feedback
from app.core.run.events import Event, Fact, PlanAccepted, PlanOpened, PlanRejected, PlanStep, RunSucceeded, StepQueued
from tests.core.play import admission, intent, number_events, outcome, step_done, step_failed


def open_plan(proposal: int, base: int) -> Fact:
    return PlanOpened(proposal=proposal, base=base, mode="first" if not proposal else "repair", conductor="model")


def plan_step(n: int, worker: str, *access: str | int, proposal: int = 0, answers: bool = False) -> Fact:
    step_access = Access("user" in access, tuple(place for place in access if isinstance(place, int)))
    return PlanStep(proposal=proposal, n=n, worker=worker, subtask=f"subtask-{n}", access=step_access, answers=answers)


def chain(second_worker: str = "bob", usd: int = 300, base: int = 0) -> tuple[Event, ...]:
    """A run of two steps, the second of which sees the caller's words and the first one's output. With a `base` so many
    proposals of one step each were rejected before."""
    written: list[Fact] = [admission()]
    for n in range(base):
        written += [
            open_plan(n, n),
            plan_step(n, "cyd", "user", proposal=n),
            PlanRejected(n, "", ("bad",), outage=False),
        ]
    written += [open_plan(base, base), plan_step(base, "ada", "user", proposal=base)]
    written += [plan_step(base + 1, second_worker, "user", base, proposal=base, answers=True)]
    written += [PlanAccepted(base, "", 2, "chain"), StepQueued(base), intent("c1", base), outcome("c1", base, usd=100)]
    written += [step_done(base, "c1"), StepQueued(base + 1)]
    written += [intent("c2", base + 1, access=("user", base), worker=second_worker)]
    written += [outcome("c2", base + 1, Usage(7, 0, 5), usd=usd), step_done(base + 1, "c2")]
    written += [RunSucceeded(step=base + 1, usd=100 + usd, answer=f"ref-{base + 1}", finish="stop")]
    return number_events(*written)


def make_feedback(kind: str, source: str, score: float, at: float) -> Feedback:
    return Feedback(f"fb_{at}", "run", "acme", "", at, kind, source, "1", score)  # type: ignore[arg-type]


def compare_runs(first: Sequence[Event], second: Sequence[Event]) -> Comparison:
    return compare(figures(first), figures(second), lambda left, right: left == right)


def test_equal_runs_have_no_difference() -> None:
    comparison = compare_runs(chain(), chain())
    assert comparison.same_answer is True
    assert not comparison.only_first
    assert not comparison.only_second
    assert all(step.same_output and step.same_subtask for step in comparison.steps)
    assert comparison.difference("usd") == 0.0


def test_steps_are_aligned_by_their_place_whatever_was_rejected_before() -> None:
    comparison = compare_runs(chain(), chain(base=1))
    assert [step.place for step in comparison.steps] == ["1.0", "1.1"]
    assert [(step.first.n, step.second.n) for step in comparison.steps if step.first and step.second] == [
        (0, 1),
        (1, 2),
    ]
    assert not comparison.only_first
    assert not comparison.only_second


def test_who_saw_what_in_one_run_only_is_named() -> None:
    comparison = compare_runs(chain(), chain("cyd", usd=900))
    assert comparison.only_first == (Recipient("bob", "worker", "1.1", ("user", "1.0")),)
    assert comparison.only_second == (Recipient("cyd", "worker", "1.1", ("user", "1.0")),)
    body = comparison.to_json()
    assert body["difference"]["cost_usd"] == 0.0006
    assert body["disclosures"]["both"] == 1
    assert body["disclosures"]["only_second"] == [
        {"recipient": "cyd", "role": "worker", "step": "1.1", "saw": ["user", "1.0"]}
    ]
    assert body["steps"][1]["second"]["planned_worker"] == "cyd"


def test_a_planning_call_is_a_disclosure_to_the_conductor() -> None:
    first = number_events(admission(), open_plan(0, 0), intent("p", None, worker="planner"), outcome("p", None))
    second = number_events(admission())
    assert compare_runs(first, second).only_first == (Recipient("planner", "conductor", "", ("user",)),)


def test_without_texts_nothing_is_said_of_answers_and_outputs() -> None:
    comparison = compare(figures(chain()), figures(chain()), compare_unreadable)
    assert comparison.same_answer is None
    assert comparison.steps[1].same_output is None


def test_steps_that_failed_have_no_output_that_could_be_the_same() -> None:
    failed = number_events(
        *[event.fact for event in chain()[:10]], intent("c2", 1), outcome("c2", 1, kind="error"), step_failed(1)
    )
    for second in (failed, chain()):
        assert compare_runs(failed, second).steps[1].same_output is None
        aligned = side_by_side(figures(failed), figures(second), same=lambda left, right: left == right)
        assert aligned.pairs[1].same_output is None
        assert "output" not in aligned.pairs[1].differs()


def test_the_scores_of_two_runs_are_compared_where_they_are_of_one_kind() -> None:
    thumbs, grade = make_feedback("explicit", "user", 1.0, 1.0), make_feedback("grader", "numeric", 0.0, 2.0)
    rated, graded, both = figures(chain(), [thumbs]), figures(chain(), [grade]), figures(chain(), [thumbs, grade])
    assert compare(rated, graded).difference("score") is None
    assert compare(rated, both).difference("score") == 0.0
    assert compare(both, graded).difference("score") == 0.0
    [metric] = [
        metric
        for metric in pair_differences([compare(rated, graded), compare(rated, both)])
        if metric.metric == "score"
    ]
    assert (metric.pairs, metric.first, metric.second) == (1, 1.0, 1.0)


def test_scores_are_the_latest_of_each_source_and_those_of_graders_count_first() -> None:
    ratings = [
        make_feedback("explicit", "user", 0.2, 1),
        make_feedback("grader", "number", 0.0, 2),
        make_feedback("grader", "number", 1.0, 3),
    ]
    run_figures = figures(chain(), [*ratings, make_feedback("grader", "judge", 0.5, 4)])
    assert run_figures.scores == {"explicit": 0.2, "grader": 0.75}
    assert run_figures.score == 0.75
    assert figures(chain(), ratings[:1]).score == 0.2
    assert figures(chain()).score is None


def test_many_pairs_are_summed_up_by_their_differences() -> None:
    pairs = [compare_runs(chain(), chain(usd=usd)) for usd in (100, 200, 500)]
    [usd] = [metric for metric in pair_differences(pairs) if metric.metric == "usd"]
    assert (usd.pairs, usd.first, usd.second, usd.lower, usd.higher) == (3, 400.0, 1100 / 3, 2, 1)
    assert usd.differences == (-200.0, -100.0, 200.0)
    assert usd.to_json()["difference"] == round(-100 / 3 / 1e6, 9)
    assert not [metric for metric in pair_differences(pairs) if metric.metric == "score"], "nobody has rated these"
