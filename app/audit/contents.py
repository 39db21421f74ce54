"""Rules about the texts of a journal: all that it names are stored, no others, and each has its hash."""

import hashlib
from collections.abc import Iterator

from app.audit.account import Account
from app.audit.report import Violation
from app.core.run.kinds import Kind

REFS = ("task", "subtask", "output", "logprobs", "said", "results", "request", "answer", "why", "why_withheld")
"""Fields that name a content. The request of an intent is the hash of the bytes that were sent, which are not
stored."""
OTHER_REFS = frozenset({("run.admitted", "plan"), ("run.approved", "reason"), ("run.refused", "reason")})
"""Fields that name a content in events of one kind, and something else, or nothing, in others."""


def contents(run: Account) -> Iterator[Violation]:
    """Apply all rules of this module."""
    named = b"".join(stored.body for stored in run.record.events)
    for ref in run.record.contents:
        if ref.encode() not in named:
            yield run.says("content-foreign", 0, f"content {ref[:12]} is named by no event")
    if run.erased:
        if run.record.contents:
            yield run.says("content-foreign", 0, "the salt was erased, and content is left")
        return
    for ref, body in run.record.contents.items():
        if address(run.record.row["salt"], body) != ref:
            yield run.says("content-altered", 0, f"content {ref[:12]} does not have its hash")
    for seq, ref in _named(run):
        if ref not in run.record.contents:
            yield run.says("content-missing", seq, f"content {ref[:12]} is not stored, and the run was not erased")
    yield from _lengths(run)


def address(salt: bytes, body: bytes) -> str:
    """Return the ref that a body must have."""
    return hashlib.sha256(salt + body).hexdigest()


def _named(run: Account) -> Iterator[tuple[int, str]]:
    """Yield every ref of a content in the journal, with the number of its event."""
    for fact in run.facts:
        for name in REFS:
            ref = fact.body.get(name)
            if isinstance(ref, str) and ref and fact.kind is not Kind.CALL_INTENDED:
                yield fact.seq, ref
        for kind, name in OTHER_REFS:
            if fact.kind == kind and fact.body.get(name):
                yield fact.seq, fact.body[name]
        decision = fact.body.get("decision")
        if isinstance(decision, dict) and isinstance(decision.get("features"), str):
            yield fact.seq, decision["features"]


def _lengths(run: Account) -> Iterator[Violation]:
    for fact in run.of(Kind.STEP_DONE):
        body, chars = run.record.contents.get(fact.body["output"], b""), fact.body["chars"]
        if len(body.decode("utf-8", "replace")) != chars:
            yield run.says("chars-wrong", fact.seq, f"step {fact.body['n']} did not say {chars} characters")
