"""Some plans need an approval; the run waits for it, and goes on as the approver has decided."""

from typing import Any

import pytest
from msgspec.structs import replace

from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import ApprovalRule, ApprovalTerms, Catalog, ConductorSpec, Limits, Tier, Worker
from app.core.pool.policy import terms_of
from app.core.pool.rules import Match, Rule
from app.core.run import approvals, drafts
from app.core.run.caller_view import spendable_by_steps
from app.core.run.events import Fact, Kind, RunAdmitted, RunApproved, RunRefused
from app.core.run.fold import apply_fact, fold
from app.core.run.progress import AwaitApproval, DropPlan, Finish, Propose, Queue, decide
from app.core.run.state import RunState
from app.errors import EventMalformed
from tests.core.play import admission, number_events

WORKERS = {name: Worker(name, "stub", name) for name in ("ada", "bob", "cyd")}
TIER = Tier("mini", ("ada", "bob", "cyd"), ConductorSpec("fixed"), "bob", {"medium": Limits()})
CATALOG = Catalog({}, WORKERS, {"mini": TIER}, {}, "digest")
SOON, LATE = 10.0, 100_000.0


def run_of(terms: ApprovalTerms, *more: Fact, workers: tuple[str, ...] = ("ada",), price: int = 50) -> RunState:
    """A run with these terms and a plan of one step for each worker, and what is written after that."""
    plain = RunAdmitted.from_json(admission(limits=Limits(fan_out=2, usd=1_000)).to_json())
    admitted = replace(plain, approval=terms)
    steps = [Step(name, access=Access(True), answers=name == workers[-1]) for name in workers]
    planned: list[Fact] = [drafts.plan_opened(Propose(0, 0, "first"), "model", ("ada",), instant=True)]
    planned += [
        drafts.plan_step(Propose(0, 0, "first"), place, drafts.WrittenStep(step, f"ref{place}"))
        for place, step in enumerate(steps)
    ]
    planned.append(drafts.plan_accepted(0, "", [() for _ in steps], price=price))
    return fold(number_events(admitted, *planned, *more))


def waiting(terms: ApprovalTerms, **chosen: Any) -> RunState:
    """Return the run once it has asked for an approval."""
    state = run_of(terms, **chosen)
    (command,) = decide(state, SOON)
    assert command == AwaitApproval(0)
    request = drafts.run_awaiting_approval(
        state, state.proposals[0], SOON + terms.seconds, 30.0, CATALOG, notifies=False
    )
    return run_of(terms, request, **chosen)


@pytest.mark.parametrize(
    ("terms", "needs"),
    [
        (ApprovalTerms(("tier",)), ("tier",)),
        (ApprovalTerms(workers=("ada",)), ("worker:ada",)),
        (ApprovalTerms(workers=("bob",)), ()),
        (ApprovalTerms(above_usd=49), ("price",)),
        (ApprovalTerms(above_usd=50), ()),
    ],
)
def test_a_plan_needs_an_approval_for_its_workers_and_its_price(terms: ApprovalTerms, needs: tuple[str, ...]) -> None:
    state = run_of(terms)
    assert state.proposals[0].needs == needs
    assert decide(state, SOON) == ((AwaitApproval(0),) if needs else (Queue((0,)),))


def test_a_price_that_is_not_known_counts_as_too_high() -> None:
    terms = ApprovalTerms(above_usd=50)
    assert approvals.approval_reasons(terms, [], None, 0, further=False) == ("price",)
    assert approvals.approval_reasons(terms, [], 40, 11, further=False) == ("price",), "what was spent counts"
    assert approvals.approval_reasons(terms, [], 1, 0, further=True) == ("further_plan",)


def test_the_wait_for_an_approval_ends_the_turns_reply_at_the_time_of_the_question() -> None:
    terms = ApprovalTerms(("tier",))
    state = run_of(terms)
    question = drafts.run_awaiting_approval(state, state.proposals[0], LATE, 30.0, CATALOG, notifies=False)
    assert apply_fact(state, question, 5.0).replied_at == 5.0


def test_while_it_waits_only_a_decision_a_wish_or_time_move_it() -> None:
    state = waiting(ApprovalTerms(("tier",)))
    assert (state.state, state.replied, decide(state, SOON)) == ("awaiting_approval", True, ())
    assert decide(replace(state, cancel_asked=True), SOON) == (Finish(Kind.CANCELLED, error="run_cancelled"),)
    assert decide(state, LATE) == (Finish(Kind.EXPIRED, error="approval_expired"),)
    refused = replace(state, refused=True)
    assert decide(refused, SOON) == (Finish(Kind.FAILED, error="approval_refused"),)


def test_what_is_not_approved_in_time_may_be_replaced_by_what_needs_no_approval() -> None:
    falls_back = ApprovalTerms(workers=("ada",), on_expiry="fallback-plan")
    assert decide(waiting(falls_back), LATE) == (DropPlan(0),)
    for terms in (
        replace(falls_back, reasons=("tier",)),
        replace(falls_back, workers=("ada", "bob", "cyd")),
    ):
        (end,) = decide(waiting(terms), LATE)
        assert isinstance(end, Finish), "nothing of it needs no approval"
    state = waiting(falls_back)
    dropped = drafts.plan_dropped(state, DropPlan(0), LATE)
    approval_request = state.approval_question
    assert approval_request is not None
    gone = run_of(falls_back, approval_request, *dropped)
    assert (gone.state, gone.turn.deadline) == ("admitted", LATE + approval_request.seconds)
    assert [command.mode for command in decide(gone, LATE) if isinstance(command, Propose)] == ["fallback"]


def test_an_approval_gives_the_turn_its_time_back_and_caps_what_is_spent() -> None:
    terms = ApprovalTerms(("tier",), above_usd=5)
    state = waiting(terms)
    approval_request = state.approval_question
    assert approval_request is not None
    assert spendable_by_steps(state).usd == 5, "what needs no approval"
    approval = RunApproved(
        0, approval_request.digest, "", "key:boss", LATE + 30, {"ada": approval_request.workers["ada"]}, 70
    )
    after = run_of(terms, approval_request, approval)
    assert (after.state, after.turn.deadline, spendable_by_steps(after).usd) == ("running", LATE + 30, 70)
    assert decide(after, LATE) == (Queue((0,)),)
    for other in (replace(approval, digest="other"), RunRefused(0, "other", "key:boss")):
        with pytest.raises(EventMalformed, match="does not fit"):
            run_of(terms, approval_request, other)


def test_only_workers_that_are_approved_as_they_are_may_be_called() -> None:
    terms, everybody = ApprovalTerms(workers=("cyd",)), list(WORKERS.values())
    marks = approvals.fingerprints(CATALOG, ["ada", "bob"])
    approval = approvals.Approval("digest", marks, 5)
    left, others = approvals.exclude_unapproved(everybody, terms, approval, CATALOG)
    assert ([worker.name for worker in left], others) == (["ada", "bob"], (("cyd", "not_approved"),))
    moved = [replace(everybody[0], model="another"), everybody[1]]
    assert [worker.name for worker in approvals.exclude_unapproved(moved, terms, approval, CATALOG)[0]] == ["bob"]
    assert [worker.name for worker in approvals.exclude_unapproved(everybody, terms, None, CATALOG)[0]] == [
        "ada",
        "bob",
    ]
    free = [replace(everybody[0], priced=False), everybody[1]]
    assert [
        worker.name for worker in approvals.exclude_unapproved(free, ApprovalTerms(above_usd=9), None, CATALOG)[0]
    ] == ["bob"]
    assert approvals.exclude_unapproved(free, terms, None, CATALOG)[0] == free, "nothing here depends on a price"


def test_terms_follow_from_the_tier_the_rules_and_the_request() -> None:
    assert terms_of(CATALOG, TIER, frozenset({"phi"}), requested=False) is None
    assert terms_of(CATALOG, TIER, frozenset(), requested=True) == ApprovalTerms(("requested",))
    rule = ApprovalRule(labels=frozenset({"phi"}), providers=("stub",), seconds=9.0, four_eyes=False)
    terms = terms_of(CATALOG, replace(TIER, approval=rule), frozenset({"phi", "x"}), requested=False)
    assert terms == ApprovalTerms(("label:phi",), workers=("ada", "bob", "cyd"), seconds=9.0, four_eyes=False)
    ruled = replace(CATALOG, rules=(Rule("r", frozenset({"phi"}), approve=Match(worker=frozenset({"bob"}))),))
    assert terms_of(ruled, TIER, frozenset({"phi"}), requested=False) == ApprovalTerms(workers=("bob",))
    assert terms_of(ruled, TIER, frozenset(), requested=False) is None
    assert ApprovalTerms.from_json((terms or ApprovalTerms()).to_json()) == terms
