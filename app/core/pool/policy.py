"""Decides what may be called for a run: the policy filter, the worst case of a call, and the approvals that plans need.

*The policy filter* chooses before planning the workers of the pool that may work on a task (D6). The conductor reads
the whole task and writes the subtasks, so a subtask carries the task's labels: filtering workers after planning alone
would leak. A worker stays in the pool if it may do some step of the run; what it reads in each step is checked when the
plan is accepted and when the step's messages are composed (`app/core/run/visibility.py`).

A label such as `region:eu` or `retention:none` is compared with the region and retention on a worker's card, any other
one with its clearance; then the rules of the pool file apply (`rules.py`). Every exclusion has a reason, which is
journaled and names the rule.

*The worst case* of a call, and the estimated cost of a call without reported usage (D7): a token is at least one byte
of text in every tokenizer in use, so the bytes of the text bound the input from above.

*Approvals.* A tier's `[tiers.NAME.approval]` and the `approve` of a rule say what somebody has to approve before any
step of a plan is queued: every plan, a price, workers, labels. A request may ask for an approval of its own plans. What
concerns a run is pinned when it is admitted, so that a later pool file neither lifts nor adds anything.
"""

import json
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import (
    SAMPLING,
    Document,
    Form,
    Image,
    Message,
    Part,
    Sampling,
    Task,
    Toolbox,
    Usage,
    toolbox_to_json,
)
from app.core.pool.catalog import REQUESTED, TIER, Amount, ApprovalTerms, Card, Catalog, Tier, Worker, attributes
from app.core.pool.rules import SOURCES, Match, Reading

NO_PRICE = "its price is not known, and a budget applies; write `price` in the pool file"
NOT_CLEARED = "not cleared for"
"""The beginning of the reason of a worker that may not read a label."""
EXCLUDED_BY_RULE = "excluded by the rule"
"""The beginning of the reason of a worker that a rule of the pool file excludes."""
EJECTED = "ejected"
"""The beginning of the reason of a worker that is left out because its calls fail."""
UNPAID = "over_budget"
"""The reason of a worker for whose answer, however short it is cut, the run's money does not suffice."""
NOT_APPROVED = "not_approved"
"""The reason of a worker that no approval names."""
NO_LOGPROBS = "tells no log-probabilities"
TOO_LONG = "the conversation is longer than its context"
"""The reason of a worker that could take a shorter request; others come before it."""
PINNED = "another worker is pinned by the request"
NOT_ALLOWED = "not in the request's allow list"
DENIED = "in the request's deny list"
REFUSALS: Mapping[str, str] = {name: f"takes no {name}" for name in SAMPLING}
"""The reason of a worker that refuses a sampling parameter, by parameter."""
BLAMED: Mapping[str, str] = {NO_LOGPROBS: "logprobs", **{reason: name for name, reason in REFUSALS.items()}}
"""The parameter that a reason is about."""
DECIDED_BY: Mapping[str, str] = {
    NOT_CLEARED: "clearance",
    EXCLUDED_BY_RULE: "rule",
    PINNED: "caller",
    NOT_ALLOWED: "caller",
    DENIED: "caller",
    EJECTED: "health",
    NO_PRICE: "budget",
    UNPAID: "budget",
    NOT_APPROVED: "approval",
}
"""Beginnings of reasons, each with who or what decides so."""
ENOUGH = 2
"""Workers that a run keeps although they are ejected: one to call, and one to take over from it."""


class Overrides(Struct, frozen=True):
    """The caller's `baton.pool`: `allow` empty means all; `pin` forces every step onto one worker."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    pin: str | None = None


class Eligible(Struct, frozen=True):
    """The workers that may see this task, in the tier's order, and why the others may not."""

    workers: tuple[Worker, ...]
    excluded: Mapping[str, str] = {}

    @property
    def blamed(self) -> str | None:
        """Return the parameter without which somebody would be eligible, if it is one."""
        return next((BLAMED[reason] for reason in self.excluded.values() if reason in BLAMED), None)


class Needs(Struct, frozen=True):
    """The abilities that a task demands of each worker. `context` is the conversation's likely size, in tokens."""

    images: bool
    documents: bool
    tools: bool
    context: int


def find_eligible(catalog: Catalog, tier: Tier, task: Task, least: Reading, overrides: Overrides) -> Eligible:
    """Filter the tier's pool by the caller's overrides, by labels and clearances, and by what the task needs.

    `least` is what every worker of the run reads in any of its steps.
    """
    needs = Needs(
        images=task.has_images,
        documents=task.has_documents,
        tools=task.needs_tools,
        context=estimate_input(task),
    )
    workers: list[Worker] = []
    excluded: dict[str, str] = {}
    for name in tier.pool:
        worker = catalog.workers[name]
        reason = _find_override(name, overrides) or exclusion(worker, least) or _find_missing_ability(worker, needs)
        if not reason and task.logprobs is not None and not catalog.providers[worker.provider].gives_logprobs:
            reason = NO_LOGPROBS
        if not reason and worker.refuses:
            reason = _find_refusal(worker, task.sampling)
        if reason:
            excluded[name] = reason
        else:
            workers.append(worker)
    return Eligible(tuple(workers), excluded)


def exclude_unpriced(choice: Eligible) -> Eligible:
    """Return the choice without the workers of unknown price, for a run that has a budget: their cost could not be
    held."""
    unknown = {worker.name: NO_PRICE for worker in choice.workers if not worker.priced}
    workers = tuple(worker for worker in choice.workers if worker.name not in unknown)
    if unknown:
        return Eligible(workers, {**choice.excluded, **unknown})
    return choice


def exclude_by_request(choice: Eligible, names: Sequence[str], overrides: Overrides) -> Eligible:
    """Return the choice with those of these further workers that the request excludes. What follows from the run may
    have them in its pool."""
    chosen = {worker.name for worker in choice.workers}
    excluded = dict(choice.excluded)
    for name in names:
        reason = _find_override(name, overrides)
        if reason is not None and name not in chosen:
            excluded.setdefault(name, reason)
    return replace(choice, excluded=excluded)


def exclude_ejected(choice: Eligible, ejected: Mapping[str, str]) -> Eligible:
    """Return the choice without the ejected workers, as long as `ENOUGH` remain; `ejected` gives their reasons, the
    worst of them first."""
    reasons = select_dispensable(choice.workers, ejected)
    workers = tuple(worker for worker in choice.workers if worker.name not in reasons)
    excluded = dict(choice.excluded)
    for name, reason in reasons.items():
        excluded[name] = f"{EJECTED}: {reason}"
    return Eligible(workers, excluded)


def select_dispensable(workers: Sequence[Worker], ejected: Mapping[str, str]) -> Mapping[str, str]:
    """Return those of the ejected workers, the worst first, that can be left out so that `ENOUGH` remain."""
    names = list(ejected)[: max(len(workers) - ENOUGH, 0)]
    return {name: ejected[name] for name in names}


def exclude_unable(
    workers: Sequence[Worker], results: Sequence[Message]
) -> tuple[list[Worker], tuple[tuple[str, str], ...]]:
    """Return the workers that can read these results of tools, and why the others cannot."""
    task = Task(results)
    needs = Needs(images=task.has_images, documents=task.has_documents, tools=False, context=0)
    if not (needs.images or needs.documents):
        return list(workers), ()
    reasons = [(worker.name, _find_missing_ability(worker, needs)) for worker in workers]
    unable = tuple([(name, reason) for name, reason in reasons if reason])
    return [worker for worker in workers if worker.name not in dict(unable)], unable


def unknown_names(tier: Tier, overrides: Overrides) -> tuple[str, ...]:
    """Return the names in the overrides that the tier's pool does not hold, sorted."""
    names = {*overrides.allow, *overrides.deny}
    if overrides.pin:
        names.add(overrides.pin)
    return tuple(sorted(names.difference(tier.pool)))


def translate_overrides(tier: Tier, other: Tier, overrides: Overrides) -> Overrides | None:
    """Return a request's choice of workers as it applies to the tier while it is served by a subject (`other`). None if
    the request allows none of the subject's workers, or names one that is in neither pool: then it is the tier's own
    definition that it is about."""
    pool = frozenset(other.pool)
    unknown = frozenset(unknown_names(tier, overrides)) - pool
    if unknown or (overrides.allow and not overrides.allow & pool):
        return None
    if overrides.pin is not None and overrides.pin not in pool:
        return None
    return Overrides(overrides.allow & pool, overrides.deny & pool, overrides.pin)


def permits(worker: Worker, reading: Reading) -> bool:
    """Return True if a worker may read this: the decision of `exclusion`, without the sentence that gives its
    reason."""
    labels = reading.labels
    if not labels <= worker.card.clearance:
        for label in labels - worker.card.clearance:
            if not _is_granted(worker.card, label):
                return False
    if worker.excluding_rules:
        labels = labels | reading.sources
        for rule in worker.excluding_rules:
            if rule.labels <= labels:
                return False
    return True


def exclusion(worker: Worker, reading: Reading) -> str:
    """Return the reason why a worker may not read this; empty if it may."""
    if permits(worker, reading):
        return ""
    missing = [label for label in reading.labels - worker.card.clearance if not _is_granted(worker.card, label)]
    if missing:
        return f"{NOT_CLEARED} {', '.join(sorted(missing))}"
    labels = reading.labels | reading.sources
    return next(f"{EXCLUDED_BY_RULE} {rule.name}" for rule in worker.excluding_rules if rule.labels <= labels)


def decided_by(reason: str) -> str:
    """Return who or what decided that a worker is left out for this reason; empty where its own abilities did."""
    for beginning, decider in DECIDED_BY.items():
        if reason.startswith(beginning):
            return decider
    return ""


def _is_granted(card: Card, label: str) -> bool:
    """Return True for `region:` and `retention:` with what the card says of each."""
    kind, _, value = label.partition(":")
    if kind == "region":
        return bool(value) and value == card.region
    return kind == "retention" and bool(value) and value == card.retention


def _find_override(name: str, overrides: Overrides) -> str | None:
    if overrides.pin is not None and name != overrides.pin:
        return PINNED
    if overrides.allow and name not in overrides.allow:
        return NOT_ALLOWED
    if name in overrides.deny:
        return DENIED
    return None


def _find_refusal(worker: Worker, sampling: Sampling) -> str | None:
    """Return the reason for the first parameter of the request that the worker refuses; None if it refuses none."""
    for name in sorted(worker.refuses):
        if getattr(sampling, name) not in (None, ()):
            return REFUSALS[name]
    return None


def _find_missing_ability(worker: Worker, needs: Needs) -> str | None:
    if needs.images and "image" not in worker.card.modalities:
        return "cannot see images"
    if needs.documents and "pdf" not in worker.card.modalities:
        return "cannot read PDFs"
    if needs.tools and not worker.card.tools:
        return "cannot call tools"
    if needs.context >= worker.card.context:
        return TOO_LONG
    return None


# -- the worst case of a call


PER_MESSAGE = 16
"""Tokens of the frame of one message, and of one tool call."""
PER_IMAGE = 6_000
"""Above what the three wire formats bill for the largest image at high detail."""
PER_PAGE = 6_000
"""Above what providers bill for the text and the picture of a page of a PDF. The number of its pages is estimated by
`PAGE_CHARS`, so what is reserved for a PDF is likely to be enough, and no bound."""
PAGE_CHARS = 100_000
"""Characters of a PDF in base64 for each of its pages."""
MOST_PAGES = 100
"""The most that Anthropic takes in one request; other providers take more."""


def input_bound(messages: Sequence[Message], extra_bytes: int = 0) -> int:
    """Return an upper bound of the input tokens; `extra_bytes` is for schemas and the like that the provider adds."""
    bound = PER_MESSAGE * (len(messages) + 1) + extra_bytes
    for message in messages:
        bound += len(message.name or "")
        for part in message.parts:
            bound += _of_part(part)
        if message.calls or message.keepsake:
            bound += _of_tools(message)
    return bound


def _of_part(part: Part) -> int:
    if isinstance(part, Image):
        return PER_IMAGE
    if isinstance(part, Document):
        return PER_PAGE * min(1 + len(part.url) // PAGE_CHARS, MOST_PAGES)
    return len(part.text.encode())


def definition_bytes(toolbox: Toolbox, form: Form | None) -> int:
    """Return about the number of bytes that the definitions of tools and the schema of the answer add to a request."""
    if form is None:
        return tool_bytes(toolbox)
    return tool_bytes(toolbox) + len(json.dumps(form.schema, default=dict))


def tool_bytes(toolbox: Toolbox) -> int:
    """Return about the number of bytes that the definitions of tools add to a request."""
    if not toolbox.tools:
        return 0
    return len(json.dumps(toolbox_to_json(toolbox)))


def _of_tools(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments.encode()) + PER_MESSAGE for call in message.calls)
    if not message.keepsake:
        return calls
    return calls + len(json.dumps(message.keepsake))


def worst_case(worker: Worker, input_tokens: int, output_tokens: int) -> Amount:
    """Return the amount to reserve before a call, at the highest of the rates that it may be billed at: nobody promises
    that cached input is the cheaper one."""
    return Amount(worker.price.worst(input_tokens, output_tokens), input_tokens + output_tokens)


def affordable_output(worker: Worker, input_tokens: int, max_tokens: int, *, floor: int, left: Amount) -> int:
    """Return the largest number of output tokens, of at most `max_tokens`, whose worst case can be paid from what is
    left.

    0 if even `floor` tokens do not fit. A call that wants less than the floor is never cut.
    """
    low, high = min(floor, max_tokens), max_tokens
    if not left.covers(worst_case(worker, input_tokens, low)):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if left.covers(worst_case(worker, input_tokens, middle)):
            low = middle
        else:
            high = middle - 1
    return low


def estimate_input(task: Task) -> int:
    """Return the likely tokens of a conversation with the tools that are on offer: four bytes a token."""
    return input_bound(task.messages, tool_bytes(task.toolbox)) // 4


def estimate_usage(messages: Sequence[Message], toolbox: Toolbox, text: str) -> Usage:
    """Return the likely usage of a complete call whose provider reported none: four bytes a token, marked as
    estimated. The definitions of tools are part of the input."""
    input_tokens = -(-input_bound(messages, tool_bytes(toolbox)) // 4)
    return Usage(input=input_tokens, output=-(-len(text.encode()) // 4), estimated=True)


def usage_of_cancelled(messages: Sequence[Message], toolbox: Toolbox, output_tokens: int, text: str) -> Usage:
    """Return the likely usage of a streamed call that was cancelled: its input, and what had been received by then. A
    provider stops when its connection is closed, so that the rest is not billed."""
    likely = estimate_usage(messages, toolbox, text)
    return Usage(input=likely.input, output=min(likely.output, output_tokens), estimated=True)


def usage_of_broken(input_tokens: int, output_tokens: int, text: str, unheard: int) -> Usage:
    """Return an upper bound for a call that broke off: all of its input, and what was received at one token a byte.

    `unheard` is what the worker may have written without our hearing of it: everything, if its reply was to come whole.
    """
    received = len(text.encode()) + PER_MESSAGE
    return Usage(input=input_tokens, output=min(max(received, unheard), output_tokens), estimated=True)


# -- approvals of plans


def terms_of(catalog: Catalog, tier: Tier, labels: frozenset[str], *, requested: bool) -> ApprovalTerms | None:
    """Return the terms of a run of this tier with these labels; None if no plan of it can need an approval."""
    rule_workers = _find_workers_under_rules(catalog, tier, labels)
    rule = tier.approval
    reasons = [REQUESTED] if requested else []
    if rule is None:
        if not (requested or rule_workers):
            return None
        return ApprovalTerms(reasons=tuple(reasons), workers=rule_workers)
    if rule.always:
        reasons.append(TIER)
    reasons += [f"label:{label}" for label in sorted(rule.labels & labels)]
    listed_names = {*rule.workers, *rule_workers}
    gated_workers = [name for name in tier.pool if name in listed_names or _provider(catalog, name) in rule.providers]
    if not (reasons or gated_workers or rule.above_usd is not None):
        return None
    return ApprovalTerms(
        reasons=tuple(reasons),
        above_usd=rule.above_usd,
        workers=tuple(gated_workers),
        seconds=rule.seconds,
        on_expiry=rule.on_expiry,
        four_eyes=rule.four_eyes,
    )


def _provider(catalog: Catalog, name: str) -> str:
    worker = catalog.workers.get(name)
    return worker.provider if worker is not None else ""


def _find_workers_under_rules(catalog: Catalog, tier: Tier, labels: frozenset[str]) -> tuple[str, ...]:
    """Return the workers of a tier before which a rule asks for an approval of a run with these labels."""
    matches = [rule.approve for rule in catalog.rules if rule.approve is not None and rule.labels - SOURCES <= labels]
    if not matches:
        return ()
    names: list[str] = []
    for name in tier.pool:
        worker = catalog.workers.get(name)
        if worker is not None and _fits_any(worker, matches):
            names.append(worker.name)
    return tuple(names)


def _fits_any(worker: Worker, matches: Sequence[Match]) -> bool:
    return any([match.fits(attributes(worker)) for match in matches])
