"""Rules about replays: an output that was taken over without a call is that of the run which is replayed, with its
labels; and recorded tool results are given to nobody else.

Most of them need two runs. What a replay says of the earlier run is collected while the runs are read, and compared
when all of them were.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from app.audit.audited_run import AuditedRun, Event, Step, read_run
from app.audit.labels import labels_of
from app.audit.report import Report, Violation
from app.core.run.kinds import Kind
from app.store.archive import Record
from app.store.journal_file import Source

ORIGIN_NOT_STORED = "the run of an output that was taken over is not stored"
ERASED = "erased"


def check_replays(run: AuditedRun) -> Iterator[Violation]:
    """Apply the rules that need one run only: a replay takes over outputs of the run that it repeats, and of no
    other."""
    for event in run.events_of(Kind.STEP_DONE, Kind.STEP_RESULTS):
        if not (origin := event.body.get("origin_run")):
            continue
        if run.admission.get("origin_kind") != "replay" or run.admission.get("origin_run") != origin:
            yield run.violation(
                "kept-wrong", event.seq, f"step {event.body['n']} takes over what is no part of its origin"
            )
    for step in run.steps.values():
        yield from _check_reused_step(run, step)


def _check_reused_step(run: AuditedRun, step: Step) -> Iterator[Violation]:
    completion = step.completion
    if completion is None or not completion.body.get("origin_run"):
        return
    called = [call for call in run.calls.values() if call.step == step.n]
    if called or completion.body["call"] or len(step.events) > 1:
        yield run.violation(
            "kept-wrong", completion.seq, f"step {step.n} was executed, and its output is said to be taken over"
        )
    verdicts = run.proposals[step.plan.body["proposal"]].verdicts  # of a plan that may have been dropped since
    if not verdicts or verdicts[0].kind is not Kind.PLAN_ACCEPTED or verdicts[0].seq > completion.seq:
        yield run.violation("kept-wrong", completion.seq, f"step {step.n} is done before its plan is accepted")


class ReusedOutput(Struct, frozen=True):
    """An output that a replay has taken over, as the replay names it."""

    run: str
    completion: Event
    text: bytes | None
    """The output as the replay has it; None if it was erased."""
    worker: str
    """The worker to which the replay's plan gives the step, if it is none of the replay's pool; else empty."""


@dataclass(slots=True)
class ReusedOutputs:
    """The claims of all replays, by the run that they are about."""

    by_origin: defaultdict[str, list[ReusedOutput]] = field(default_factory=lambda: defaultdict(list))

    def add(self, run: AuditedRun) -> None:
        """Note the claims of one run."""
        for event in run.events_of(Kind.STEP_DONE):
            if origin := event.body.get("origin_run"):
                output, step = event.body["output"], run.steps.get(event.body["n"])
                text = run.record.contents.get(output) if output else b""
                worker = str(step.plan.body["worker"]) if step is not None else ""
                if worker in run.admission["pool"]:
                    worker = ""
                self.by_origin[str(origin)].append(ReusedOutput(run.id, event, text, worker))

    async def compare(self, source: Source, report: Report, now: float) -> Iterator[Violation]:
        """Compare every claim with the run that it is about."""
        violations: list[Violation] = []
        for name in sorted(self.by_origin):
            records = [record async for record in source.records(run=name)]
            if not records:
                report.unverifiable[ORIGIN_NOT_STORED] += len(self.by_origin[name])
                continue
            violations += _compare_with_origin(records[0], self.by_origin[name], report, now)
        return iter(violations)


def _compare_with_origin(record: Record, claims: list[ReusedOutput], report: Report, now: float) -> Iterator[Violation]:
    earlier = read_run(record, now)
    if not earlier.has_admission:
        return
    labels = labels_of(earlier).outputs
    for claim in claims:
        body = claim.completion.body
        step = earlier.steps.get(body.get("origin_step", -1))
        says = f"step {body['n']} has not the output of step {body.get('origin_step')} of {earlier.id}"
        if step is None or step.completion is None:
            yield Violation(claim.run, claim.completion.seq, "kept-altered", says)
            continue
        if not _is_same_output(step.completion.body, body):
            yield Violation(claim.run, claim.completion.seq, "kept-altered", says)
        if claim.worker and claim.worker != step.plan.body["worker"]:
            stranger = f"step {body['n']} is given to a worker outside the pool, which step {step.n} was not given to"
            yield Violation(claim.run, claim.completion.seq, "kept-altered", stranger)
        if not labels.get(step.n, frozenset()) <= set(body.get("labels") or ()):
            lost = f"step {body['n']} has not all labels of step {step.n} of {earlier.id}"
            yield Violation(claim.run, claim.completion.seq, "kept-altered", lost)
        text = record.contents.get(step.completion.body["output"]) if step.completion.body["output"] else b""
        if text is None or claim.text is None:
            report.unverifiable[ERASED] += 1
        elif text != claim.text:
            yield Violation(claim.run, claim.completion.seq, "kept-altered", says)


def _is_same_output(then: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Return True if an output is named by its ref in the earlier run, and ended in the same way."""
    same = [then[name] == now[name] for name in ("chars", "finish")]
    return all(same) and then["output"] == now.get("origin_output", "")
