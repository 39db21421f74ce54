"""A selector learns in the rehearsal world; the whole proof, over HTTP, is `python -m tests.lab.selector`."""

from random import Random

from app.core.rating.posterior import Posterior
from app.lab.outcome import outcome
from app.lab.world import CLASSES
from tests.lab import bandit

RUNS, EXAM = 700, 150


def test_the_arms_can_express_the_optimum_and_nothing_better() -> None:
    best = []
    for kind in CLASSES:
        best.append(max(bandit.reward(arm, kind) for arm in bandit.every_arm()))
    assert abs(sum(best) / len(best) - 0.8324) < 0.0005
    single = sum(outcome(bandit.single(), kind, bandit.setting()).reward for kind in CLASSES) / len(CLASSES)
    assert 0.60 < single < 0.61


def test_ratings_lead_a_good_part_of_the_way_to_the_optimum() -> None:
    exam = bandit.problems(EXAM, 1_000_003)
    untaught, taught = Posterior(), bandit.play(Posterior(), bandit.problems(RUNS, 0), Random(0))
    before, after = (
        bandit.share(bandit.value(policy, exam), exam, bandit.best_by_class()) for policy in (untaught, taught)
    )
    assert before < -0.5, "cards alone know nothing"
    assert after > 0.5
    assert taught.ratings == RUNS
