"""Rules about the texts of a journal: all that it names are stored, no others, and each has its hash."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from app.audit.audited_run import AuditedRun
from app.audit.report import Violation
from app.core.run.kinds import Kind

REFS = ("task", "subtask", "output", "logprobs", "said", "results", "answer", "why", "why_withheld")
"""Fields of events that name a content."""
OTHER_REFS: Mapping[str, tuple[str, ...]] = {
    "run.admitted": ("plan",),
    "run.resumed": ("request",),
    "run.approved": ("reason",),
    "run.refused": ("reason",),
}
"""Fields that name a content in events of one kind, and something else, or nothing, in others."""


def check_contents(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    bodies = b"".join(stored.body for stored in run.record.events)
    for ref in run.record.contents:
        if ref.encode() not in bodies:
            yield run.violation("content-foreign", 0, f"content {ref[:12]} is named by no event")
    if run.is_erased:
        if run.record.contents:
            yield run.violation("content-foreign", 0, "the salt was erased, and content is left")
        return
    # The opposite, a salt that is gone without a date, is no violation: archives of pruned runs leave salts out.
    if run.record.row.get("erased_at") is not None or run.record.row.get("erased_by") is not None:
        yield run.violation("content-foreign", 0, "its row says that its content was erased, and has its salt")
    for ref, body in run.record.contents.items():
        if content_ref(run.record.row["salt"], body) != ref:
            yield run.violation("content-altered", 0, f"content {ref[:12]} does not have its hash")
    yield from _check_presence(run)
    yield from _check_lengths(run)


def content_ref(salt: bytes, body: bytes) -> str:
    """Return the ref that a body must have."""
    return hashlib.sha256(salt + body).hexdigest()


def named_refs(kind: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the refs of the contents that an event names."""
    for name in (*REFS, *OTHER_REFS.get(kind, ())):
        ref = body.get(name)
        if isinstance(ref, str) and ref:
            yield ref
    decision = body.get("decision")
    features = decision.get("features") if isinstance(decision, dict) else None
    if isinstance(features, str) and features:
        yield features


def _check_presence(run: AuditedRun) -> Iterator[Violation]:
    for event in run.events:
        for ref in named_refs(event.kind, event.body):
            if ref not in run.record.contents:
                words = f"content {ref[:12]} is not stored, and the run was not erased"
                yield run.violation("content-missing", event.seq, words)


def _check_lengths(run: AuditedRun) -> Iterator[Violation]:
    for event in run.events_of(Kind.STEP_DONE):
        body, chars = run.record.contents.get(event.body["output"], b""), event.body["chars"]
        if len(body.decode("utf-8", "replace")) != chars:
            yield run.violation("chars-wrong", event.seq, f"step {event.body['n']} did not say {chars} characters")
