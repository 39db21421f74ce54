"""`baton conductor shadow` lets a version plan for finished runs and compares it with the live conductor.

Each planning request is made again from the journal, as the auditor does, and sent to the version. Its plan is compared
with the one that was carried out, and never executed: no caller waits for it, and no run is changed. Requests whose
texts were erased, repairs and further rounds are left out.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import orjson
from msgspec import Struct

from app.audit.audited_run import AuditedRun, Call, Proposal, read_run
from app.audit.request_rebuilding import RebuildError, UnknownTemplate, rebuild_request, text_of
from app.core.plan import proposals
from app.core.plan.workflow import Step
from app.core.pool.catalog import Catalog
from app.core.pool.snapshot import restore_catalog
from app.providers.protocol import Request
from app.providers.vllm import Management
from app.store.journal_file import Source


@dataclass(slots=True)
class PlanComparison:
    """The plans of a version, compared with those of the live conductor."""

    plans: int = 0
    valid: int = 0
    same: int = 0
    steps_live: int = 0
    steps: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first_workers: Counter[str] = field(default_factory=Counter)
    """The number of the version's plans that give each worker the first step."""

    def as_json(self) -> str:
        """Return the comparison as JSON, for the record of the change."""
        counts = {name: getattr(self, name) for name in ("plans", "valid", "same", "steps_live", "steps")}
        return json.dumps(counts | {"first": dict(self.first_workers), "left_out": dict(self.left_out)})


class Case(Struct, frozen=True):
    """A planning request as it was sent, and the plan that it led to."""

    request: Request
    names: tuple[str, ...]
    steps: int
    live: tuple[Step, ...]


async def read_cases(
    source: Source, conductor: str, live: str, since: float, now: float, comparison: PlanComparison
) -> AsyncIterator[Case]:
    """Yield the first plan of each of a conductor's runs since then that the `live` version has planned; the empty one
    is the pool file's own model. `comparison` counts those that are left out."""
    catalogs = await source.catalogs()
    async for record in source.records(since=since):
        run = read_run(record, now, False)
        if not run.has_admission or not run.proposals:
            continue
        proposal = run.proposals[0]
        calls = [call for call in run.calls.values() if call.step is None and call.proposal == 0]
        if not calls or calls[0].intent.body["worker"] != conductor:
            continue
        call = calls[0]
        if call.intent.body.get("version", "") != live:  # by a canary, in a shadow, or before the latest promotion
            comparison.left_out["planned by a version that is not live"] += 1
            continue
        if proposal.acceptance is None:
            comparison.left_out["rejected"] += 1
            continue
        try:
            yield _case(run, call, proposal, catalogs)
        except (RebuildError, UnknownTemplate, KeyError, TypeError, ValueError) as reason:
            comparison.left_out[str(reason) or "unknown template"] += 1


def _case(run: AuditedRun, call: Call, proposal: Proposal, catalogs: Mapping[str, bytes]) -> Case:
    catalog: Catalog = restore_catalog(catalogs[call.intent.body["catalog"]])
    request = rebuild_request(run, call, catalog, catalog.workers[call.intent.body["worker"]])
    names = tuple(proposal.opening.body["order"])
    limit = int(run.limits["steps"])
    text = ""
    if call.outcome is not None:
        text = text_of(run, call.outcome.body["output"])
    return Case(request, names, limit, proposals.read_plan_text(text, names, limit) or ())


def compare(server: Management, version: str, case: Case, comparison: PlanComparison) -> None:
    """Ask the version for its plan, and note the differences."""
    comparison.plans += 1
    schema = None
    if case.request.form is not None:
        schema = case.request.form.schema
    messages = [{"role": message.role, "content": message.text} for message in case.request.messages]
    text = server.plan(version, messages, schema or {}, case.request.sampling.max_tokens or 0)
    plan = proposals.read_plan_text(text, case.names, case.steps)
    comparison.steps_live += len(case.live)
    if plan is None:
        return
    comparison.valid += 1
    comparison.same += plan == case.live
    comparison.steps += len(plan)
    comparison.first_workers[plan[0].worker] += 1


def summary(note: str) -> str:
    """Return a record of comparisons in one line."""
    counts = orjson.loads(note)
    return f"{counts['valid']} of {counts['plans']} plans valid, {counts['same']} the same as the live conductor's"
