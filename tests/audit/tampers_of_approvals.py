"""Falsifications of approvals: what needs one was executed without it, or it was for something else."""

from tests.audit.forgery import Case, ForgedRun, Tamper, add, case, in_first, put

STEP, QUEUED, INTENDED, ADMITTED = "plan.step", "step.queued", "call.intended", "run.admitted"
ASKED, APPROVED, REFUSED, EXPIRED = "run.awaiting_approval", "run.approved", "run.refused", "run.approval_expired"
SCENE = "approved"


def queued_before(run: ForgedRun) -> None:
    """A step is queued before somebody has approved its plan."""
    run.move(run.all(QUEUED)[0], run.all(ASKED)[0])


def without_approval(run: ForgedRun) -> None:
    run.drop(run.all(APPROVED)[0])


def other_plan(run: ForgedRun) -> None:
    """Another worker stands in the plan than in the one that was approved."""
    run.all(STEP)[-1].body["worker"] = "beta"


def by_another(run: ForgedRun) -> None:
    run.first(APPROVED)["by"] = "key:nobody"


def one_worker_more(run: ForgedRun) -> None:
    """The approval is said to allow a worker that nobody was asked about."""
    run.first(APPROVED)["workers"]["delta"] = "0" * 32


def one_worker_less(run: ForgedRun) -> None:
    """The one that took over is said not to have been allowed."""
    del run.first(APPROVED)["workers"]["gamma"]


def terms_lifted(run: ForgedRun) -> None:
    del run.admitted["approval"]


def needs_none(run: ForgedRun) -> None:
    """The plan is said to have needed no approval."""
    run.admitted["approval"]["workers"] = []


def late(run: ForgedRun) -> None:
    run.first(ASKED)["until"] = run.all(APPROVED)[0].at - 1


def without_text(kind: str) -> Tamper:
    """The text of the reason that a decision names is gone."""
    return lambda run: run.contents.pop(run.first(kind)["reason"])


CASES: tuple[Case, ...] = (
    case("unapproved", "queued before", SCENE, queued_before),
    case("unapproved", "nobody has approved it", SCENE, without_approval),
    case("unapproved", "a worker that is not named", SCENE, one_worker_less),
    case("unapproved", "a fallback that needed one", "not_approved_in_time", lambda run: _gate_all(run)),
    case("approval-wrong", "another plan", SCENE, other_plan),
    case("approval-wrong", "by somebody else", SCENE, by_another),
    case("approval-wrong", "more workers", SCENE, one_worker_more),
    case("approval-wrong", "a higher price", SCENE, in_first(APPROVED, add("max_usd"))),
    case("approval-wrong", "another digest", SCENE, in_first(APPROVED, put(digest="0" * 64))),
    case("approval-wrong", "another question", "refused", in_first(REFUSED, put(digest="0" * 64))),
    case("approval-wrong", "another price asked", SCENE, in_first(ASKED, add("price"))),
    case("approval-wrong", "too late", SCENE, late),
    case("approval-wrong", "no terms", SCENE, terms_lifted),
    case("approval-wrong", "no need", SCENE, needs_none),
    case("content-missing", "no reason of the one who approved", SCENE, without_text(APPROVED)),
    case("content-missing", "no reason of the one who refused", "refused", without_text(REFUSED)),
    case("row-projection", "a later deadline", "not_approved_in_time", in_first(EXPIRED, add("deadline", 60))),
)


def _gate_all(run: ForgedRun) -> None:
    run.admitted["approval"]["reasons"] = ["tier"]
