"""Rules about replays: an output that was taken over without a call is that of the run which is replayed, with its
labels; and recorded tool results are given to nobody else.

Most of them need two runs. What a replay says of the earlier run is collected while the runs are read, and compared
when all of them were.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from app.audit.account import Account, Fact, Step, account
from app.audit.labels import labels_of
from app.audit.report import Report, Violation
from app.core.run.kinds import Kind
from app.store.archive import Record
from app.store.journal_file import Source

GONE = "the run of an output that was taken over is not stored"
ERASED = "erased"


def replays(run: Account) -> Iterator[Violation]:
    """Apply the rules that need one run only: a replay takes over outputs of the run that it repeats, and of no
    other."""
    for fact in run.of(Kind.STEP_DONE, Kind.STEP_RESULTS):
        if not (origin := fact.body.get("origin_run")):
            continue
        if run.admitted.get("origin_kind") != "replay" or run.admitted.get("origin_run") != origin:
            yield run.says("kept-wrong", fact.seq, f"step {fact.body['n']} takes over what is no part of its origin")
    for step in run.steps.values():
        yield from _without_calls(run, step)


def _without_calls(run: Account, step: Step) -> Iterator[Violation]:
    done = step.done
    if done is None or not done.body.get("origin_run"):
        return
    called = [call for call in run.calls.values() if call.step == step.n]
    if called or done.body["call"] or len(step.facts) > 1:
        yield run.says("kept-wrong", done.seq, f"step {step.n} was executed, and its output is said to be taken over")
    accepted = run.proposals[step.plan.body["proposal"]].accepted
    if accepted is None or accepted.seq > done.seq:
        yield run.says("kept-wrong", done.seq, f"step {step.n} is done before its plan is accepted")


@dataclass(frozen=True, slots=True)
class Claim:
    """An output that a replay has taken over, as the replay names it."""

    run: str
    done: Fact
    text: bytes | None
    """The output as the replay has it; None if it was erased."""


@dataclass(slots=True)
class Claims:
    """The claims of all replays, by the run that they are about."""

    about: defaultdict[str, list[Claim]] = field(default_factory=lambda: defaultdict(list))

    def add(self, run: Account) -> None:
        """Note the claims of one run."""
        for fact in run.of(Kind.STEP_DONE):
            if origin := fact.body.get("origin_run"):
                output = fact.body["output"]
                text = run.record.contents.get(output) if output else b""
                self.about[str(origin)].append(Claim(run.run, fact, text))

    async def compare(self, source: Source, report: Report, now: float) -> Iterator[Violation]:
        """Compare every claim with the run that it is about."""
        found: list[Violation] = []
        for name in sorted(self.about):
            records = [record async for record in source.records(run=name)]
            if not records:
                report.unverifiable[GONE] += len(self.about[name])
                continue
            found += _compared(records[0], self.about[name], report, now)
        return iter(found)


def _compared(record: Record, claims: list[Claim], report: Report, now: float) -> Iterator[Violation]:
    earlier = account(record, now)
    if not earlier.begun:
        return
    labels = labels_of(earlier).outputs
    for claim in claims:
        body = claim.done.body
        step = earlier.steps.get(body.get("origin_step", -1))
        says = f"step {body['n']} has not the output of step {body.get('origin_step')} of {earlier.run}"
        if step is None or step.done is None:
            yield Violation(claim.run, claim.done.seq, "kept-altered", says)
            continue
        if not _equal(step.done.body, body):
            yield Violation(claim.run, claim.done.seq, "kept-altered", says)
        if not labels.get(step.n, frozenset()) <= set(body.get("labels") or ()):
            lost = f"step {body['n']} has not all labels of step {step.n} of {earlier.run}"
            yield Violation(claim.run, claim.done.seq, "kept-altered", lost)
        text = record.contents.get(step.done.body["output"]) if step.done.body["output"] else b""
        if text is None or claim.text is None:
            report.unverifiable[ERASED] += 1
        elif text != claim.text:
            yield Violation(claim.run, claim.done.seq, "kept-altered", says)


def _equal(then: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Return True if an output is named by its ref in the earlier run, and ended in the same way."""
    same = [then[name] == now[name] for name in ("chars", "finish")]
    return all(same) and then["output"] == now.get("origin_output", "")
