"""Rules about the texts of a journal: all that it names are stored, no others, and each has its hash."""

import hashlib
from collections.abc import Iterator

from app.audit.audited_run import AuditedRun
from app.audit.report import Violation
from app.core.run.kinds import Kind

REFS = ("task", "subtask", "output", "logprobs", "said", "results", "request", "answer", "why", "why_withheld")
"""Fields that name a content. The request of an intent is the hash of the bytes that were sent, which are not
stored."""
OTHER_REFS = frozenset({("run.admitted", "plan"), ("run.approved", "reason"), ("run.refused", "reason")})
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
    for seq, ref in _named_refs(run):
        if ref not in run.record.contents:
            yield run.violation("content-missing", seq, f"content {ref[:12]} is not stored, and the run was not erased")
    yield from _check_lengths(run)


def content_ref(salt: bytes, body: bytes) -> str:
    """Return the ref that a body must have."""
    return hashlib.sha256(salt + body).hexdigest()


def _named_refs(run: AuditedRun) -> Iterator[tuple[int, str]]:
    """Yield every ref of a content in the journal, with the number of its event."""
    for event in run.events:
        for name in REFS:
            ref = event.body.get(name)
            if isinstance(ref, str) and ref and event.kind is not Kind.CALL_INTENDED:
                yield event.seq, ref
        for kind, name in OTHER_REFS:
            if event.kind == kind and event.body.get(name):
                yield event.seq, event.body[name]
        decision = event.body.get("decision")
        if isinstance(decision, dict) and isinstance(decision.get("features"), str):
            yield event.seq, decision["features"]


def _check_lengths(run: AuditedRun) -> Iterator[Violation]:
    for event in run.events_of(Kind.STEP_DONE):
        body, chars = run.record.contents.get(event.body["output"], b""), event.body["chars"]
        if len(body.decode("utf-8", "replace")) != chars:
            yield run.violation("chars-wrong", event.seq, f"step {event.body['n']} did not say {chars} characters")
