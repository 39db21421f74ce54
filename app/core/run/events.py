"""The events of a run: one record for each kind, and `Event`, which is such a record with its place in the journal.

A *fact* is a frozen record of one kind. Whoever writes to a run constructs facts; the store numbers them and keeps
their JSON; whoever reads a journal gets events whose `fact` is the record again. Attributes have the names of the JSON
fields. A field without a default must be there when a journal is read; one with a default may be missing, as it is in
journals of older releases, so a field that is new needs one. Fields of the JSON that the record does not have are
ignored, as they come from newer releases.

`seq` starts at 1 and has no gaps, because every write to a run takes its numbers under that run's row lock. So a prefix
of a journal is never stale. Facts hold ids, hashes, sizes and figures. The text of callers and workers is in the
content store under its salted hash, which is called its *ref* here. Money is in micro-dollars, points in time are in
seconds since 1970, durations in seconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

import orjson
from msgspec import NODEFAULT, Struct, structs

from app.core.message.chat import Usage, usage_from_json, usage_to_json
from app.core.plan.workflow import Access, access_from_list
from app.core.pool.breaker import Verdict
from app.core.pool.catalog import ApprovalTerms, Limits
from app.core.run.identifiers import Trace
from app.core.run.kinds import COPIES, Mode, OnDisconnect, OriginKind
from app.core.run.kinds import TERMINAL as TERMINAL
from app.core.run.kinds import Kind as Kind
from app.errors import EventMalformed

# -- a fact and its JSON, by the fields of its record

Json = Mapping[str, Any]
"""A JSON object."""
PassedOver = tuple[tuple[str, str], ...]
"""Workers that were not called, each with the reason."""
Converter = Callable[[Any], Any] | None
"""The function that turns the value of a field into JSON, or back; None where the value is JSON as it is."""


class NamedCall(Struct, frozen=True):
    """One tool call: the id under which the caller knows it, and the tool's name."""

    id: str
    name: str


class InJson(Struct, frozen=True):
    """The place of a field in the JSON, where that is not simply the field under its own name."""

    key: str = ""
    """The name of the JSON field, where that is no name in Python."""
    present_with: str = ""
    """The field without which (where that is None) the JSON leaves this one out."""
    is_left_out: bool = False
    """True if the JSON leaves the field out while it has its default."""


T = TypeVar("T")
LeftOut = Annotated[T, InJson(is_left_out=True)]
"""A field that the JSON leaves out while it has its default."""


class FieldEncoding(NamedTuple):
    """The writing of one field to JSON. It is left out while it has its default, if it is `optional`, or while the
    field that is named in `present_with` is None."""

    name: str
    key: str
    encode: Converter
    optional: bool
    default: Any
    present_with: str


class FieldDecoding(NamedTuple):
    """The reading of one field from JSON; `default` is NODEFAULT where there is none."""

    key: str
    decode: Converter
    default: Any


class Fact(Struct, frozen=True):
    """The base of the records in `events.py`. `kind` is the kind of event that a class stands for."""

    kind: ClassVar[Kind]
    encodings: ClassVar[tuple[FieldEncoding, ...]]
    decodings: ClassVar[tuple[FieldDecoding, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return the body of the event, in plain JSON values."""
        body: dict[str, Any] = {}
        for name, key, encode, is_optional, default, present_with in self.encodings:
            value = getattr(self, name)
            if is_optional and value == default:
                continue
            if present_with and getattr(self, present_with) is None:
                continue
            body[key] = value if encode is None else encode(value)
        return body

    @classmethod
    def from_json(cls, body: Json) -> Self:
        """Return the inverse of `to_json`. Raises KeyError for a field that is missing and has no default."""
        values = []
        for key, decode, default in cls.decodings:
            if key in body:
                values.append(body[key] if decode is None else decode(body[key]))
            elif default is not NODEFAULT:
                values.append(default)
            else:
                raise KeyError(key)
        return cls(*values)


F = TypeVar("F", bound=Fact)


def fact(kind: Kind) -> Callable[[type[F]], type[F]]:
    """Make a class the record of the facts of this kind."""

    def complete(cls: type[F]) -> type[F]:
        hints = get_type_hints(cls, include_extras=True)
        cls.kind = kind
        fields = [(field, *_read_hint(hints[field.name])) for field in structs.fields(cls)]
        cls.encodings = tuple([_encoding(*field) for field in fields])
        cls.decodings = tuple([_decoding(*field) for field in fields])
        return cls

    return complete


def _read_hint(hint: Any) -> tuple[Any, InJson]:
    """Return the type of a field, and its place in the JSON."""
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, InJson):
            return hint.__origin__, note
    return hint, InJson()


def _encoding(field: structs.FieldInfo, hint: Any, place: InJson) -> FieldEncoding:
    to_json, _ = _converters(hint)
    return FieldEncoding(
        name=field.name,
        key=place.key or field.name,
        encode=to_json,
        optional=place.is_left_out,
        default=field.default,
        present_with=place.present_with,
    )


def _decoding(field: structs.FieldInfo, hint: Any, place: InJson) -> FieldDecoding:
    default = field.default
    if field.default_factory is not NODEFAULT:
        default = field.default_factory()
    _, from_json = _converters(hint)
    return FieldDecoding(place.key or field.name, from_json, default)


def _converters(hint: Any) -> tuple[Converter, Converter]:
    """Return the functions that turn a value of this type into JSON and back."""
    if hint is Usage:
        return usage_to_json, usage_from_json
    if hint is Access:
        return Access.as_list, access_from_list
    if hint is Limits:
        return Limits.to_json, Limits.from_json
    if ApprovalTerms in (hint, *get_args(hint)):
        return ApprovalTerms.to_json, ApprovalTerms.from_json
    if hint == tuple[NamedCall, ...]:
        return _calls_to_json, _calls_from_json
    if hint == PassedOver:
        return _encode_passed_over, _decode_passed_over
    if get_origin(hint) is tuple:
        return list, tuple
    if get_origin(hint) is frozenset:
        return sorted, frozenset
    if Mapping in [get_origin(part) for part in (hint, *get_args(hint))]:
        return dict, None
    return None, None


def _calls_to_json(calls: tuple[NamedCall, ...]) -> list[dict[str, str]]:
    return [{"id": call.id, "name": call.name} for call in calls]


def _calls_from_json(calls: list[dict[str, str]]) -> tuple[NamedCall, ...]:
    return tuple([NamedCall(call["id"], call.get("name", "")) for call in calls])


def _encode_passed_over(workers: PassedOver) -> list[dict[str, str]]:
    return [{"worker": worker, "reason": reason} for worker, reason in workers]


def _decode_passed_over(workers: list[dict[str, str]]) -> PassedOver:
    return tuple([(worker["worker"], worker["reason"]) for worker in workers])


# -- the run


@fact(Kind.ADMITTED)
class RunAdmitted(Fact, frozen=True):
    """The task by its ref, and everything that bounds the run, pinned as it was at this moment."""

    task: str
    tier: str
    limits: Limits
    deadline: float
    """When the first turn is over at the latest."""
    pool: tuple[str, ...]
    conductor: str
    preview: bool
    """True if the run ends with its plan, and nothing of it is executed."""
    rehearsal: bool
    streams: bool
    """True if deltas of the answer are sent as they come."""
    model: str = ""
    """The model id of the request: the tier, an alias of it, or an arm."""
    effort: str = ""
    excluded: Mapping[str, str] = {}
    """Workers of the tier that may not take part, each with the reason."""
    labels: frozenset[str] = frozenset()
    catalog: str = ""
    """The digest of the pool file."""
    ignored: tuple[str, ...] = ()
    """Parameters of the request that have no effect."""
    on_disconnect: OnDisconnect = "cancel"
    wire: Mapping[str, Any] = {}
    """The wire format of the reply and the request's options for it."""
    explore: bool = True
    """True if a selector may explore with this run; else it takes the best arm, and nothing is left to chance."""
    gateway: LeftOut[str] = ""
    """The address of the gateway that the request came to, and that follows the run."""
    plan: LeftOut[str] = ""
    """Ref of the caller's own plan, or of what a replay takes over; empty where a conductor plans."""
    recorded_labels: LeftOut[frozenset[str]] = frozenset()
    """The labels of tool results and outputs that a replay takes over. They do not choose the workers of the run; the
    time for which texts with a label are kept holds for it, too."""
    request_id: LeftOut[str] = ""
    """The id of the HTTP request (`x-request-id`); empty where there was none."""
    tenant: LeftOut[str] = ""
    """The tenant of the run, for the logs and metrics of engines."""
    key_name: LeftOut[str] = ""
    """The name that the API key had at that moment, for the logs of engines."""
    traceparent: LeftOut[str] = ""
    """The span of the request in W3C Trace Context; empty where the request belongs to no trace."""
    tracestate: LeftOut[str] = ""
    budgets: LeftOut[tuple[str, ...]] = ()
    """The accounts of budgets in which each of its holds is reserved in addition to the run's own limit."""
    capped: LeftOut[bool] = False
    """True if the request or its API key says what the run may cost."""
    origin_kind: LeftOut[OriginKind] = ""
    origin_run: LeftOut[str] = ""
    """The id of the run from which this one follows; empty where `origin_kind` is."""
    shadow: LeftOut[bool] = True
    """False if the request wants no shadow of the run."""
    approval: LeftOut[ApprovalTerms | None] = None
    """The conditions under which plans of the run wait for an approval; None if none has to."""
    served_by: LeftOut[str] = ""
    """The subject that serves the run in place of its tier's own definition, such as `tier baton-next`
    (`app/core/pool/serving.py`); empty where the tier's own does."""

    @property
    def is_from_0_1_0(self) -> bool:
        """Return True if release 0.1.0 has admitted the run: all later ones name its tenant."""
        return not self.tenant

    @property
    def trace(self) -> Trace:
        """Return the span of the request."""
        return Trace(self.traceparent, self.tracestate)

    @property
    def needs_prices(self) -> bool:
        """Return True if only workers whose price is known may be called, because their cost could not be held
        otherwise."""
        return self.capped or bool(self.budgets)

    @property
    def tried_version(self) -> str:
        """Return the version of the conductor that this run tries as a shadow or a replay, whichever is in force; empty
        in other runs."""
        if self.origin_kind not in COPIES:
            return ""
        return str(self.wire.get("conductor", ""))


@fact(Kind.CANCEL_ASKED)
class RunCancelAsked(Fact, frozen=True):
    """A request to cancel the run. `by` is `caller`, `client` (it disconnected) or `operator`."""

    by: str = ""


@fact(Kind.AWAITING)
class RunAwaitingTool(Fact, frozen=True):
    """The end of a turn with calls of the caller's tools: who waits, until when, and what the turn used."""

    turn: int
    until: float
    """When the wait for results is over."""
    steps: tuple[int, ...] = ()
    usd: int = 0
    usage: Usage = Usage()
    visible: Usage = Usage()


@fact(Kind.RESUMED)
class RunResumed(Fact, frozen=True):
    """The next turn as its request wants it."""

    turn: int
    deadline: float
    streams: bool
    at: float
    """When the request came."""
    request: str = ""
    """Ref of its sampling and tools; empty: those of the task."""
    on_disconnect: OnDisconnect = "cancel"
    wire: Mapping[str, Any] = {}
    once: str = ""
    """The id of the idempotency claim that the request makes, or empty."""
    gateway: LeftOut[str] = ""
    """The address of the gateway that the request came to, and that follows the turn."""
    request_id: LeftOut[str] = ""
    """The id of the HTTP request (`x-request-id`)."""
    traceparent: LeftOut[str] = ""
    """The span of the request that brought the results; empty where it belongs to no trace."""
    tracestate: LeftOut[str] = ""

    @property
    def trace(self) -> Trace:
        """Return the span of the request."""
        return Trace(self.traceparent, self.tracestate)


@fact(Kind.AWAITING_APPROVAL)
class RunAwaitingApproval(Fact, frozen=True):
    """An accepted plan waits for an approval, and the run is let go of until there is a decision, or until `until`."""

    turn: int
    proposal: int
    digest: str
    """The SHA-256 of what is to be approved: `approvals.subject_digest`."""
    plan: str
    """The digest of the plan, with the refs of its instructions."""
    until: float
    """When the wait is over."""
    seconds: float
    """The seconds that the turn has left; its deadline counts on from the decision."""
    reasons: tuple[str, ...]
    """The reasons why the plan needs an approval."""
    price: int | None
    """The worst case of the plan's steps, one call each, in micro-dollars; None where it is not known."""
    workers: Mapping[str, str]
    """The workers that an approval can allow, each with its fingerprint."""
    catalog: str
    """The digest of the pool file then."""
    discloses: Mapping[str, Any]
    """The access that each planned worker would have: `user` for the caller's words, and numbers of steps for their
    outputs."""
    usd: int = 0
    """The cost of the run so far."""
    notifies: LeftOut[bool] = False
    """True if the operator's webhook is sent the question."""


@fact(Kind.APPROVED)
class RunApproved(Fact, frozen=True):
    """The plan may be carried out by these workers and for this price."""

    proposal: int
    digest: str
    """The subject that was approved."""
    binding: str
    """`approvals.binding_digest` of this decision."""
    by: str
    """The id of the API key, or the name of the person, that decided."""
    deadline: float
    workers: Mapping[str, str]
    max_usd: int
    """The most that the run may cost in all, in micro-dollars."""
    reason: str = ""
    """Ref of the reason that was given, or empty."""


@fact(Kind.REFUSED)
class RunRefused(Fact, frozen=True):
    """The plan must not be carried out, and the run ends."""

    proposal: int
    digest: str
    by: str
    reason: str = ""
    """Ref of the reason that was given, or empty."""


@fact(Kind.APPROVAL_EXPIRED)
class RunApprovalExpired(Fact, frozen=True):
    """Nobody has decided in time; the run goes on with a fallback plan that needs no approval."""

    proposal: int
    deadline: float


class RunEnd(Fact, frozen=True):
    """The end of a run: which step answered, and what the run used. Its subclasses are the five terminal kinds."""

    step: int | None = None
    """The step whose output is the answer."""
    stopped: LeftOut[str] = ""
    """Why the last round has no answer, so that the answer is one of an earlier round."""
    usd: int = 0
    usage: Usage = Usage()
    visible: Usage = Usage()
    degraded: bool = False
    answer: Annotated[str, InJson(present_with="step")] = ""
    """Ref of the answer; this and the next two are there if a step answered."""
    finish: Annotated[str | None, InJson(present_with="step")] = None
    """Why the worker stopped: `stop`, `length` and so on."""
    fell_back: Annotated[bool, InJson(present_with="step")] = False
    """True if the last step said nothing, so that the last one that said something answers."""
    error: LeftOut[str] = ""
    unread: LeftOut[bool] = False
    """True if the run was ended by a process that could not read its journal."""
    retry_after: LeftOut[float | None] = None
    """Seconds after which the first of the workers that all limit the rate of requests can be called again."""
    budget: LeftOut[str] = ""
    """The id of the budget that had not enough left, where that is why the run is over budget."""
    budget_until: LeftOut[float | None] = None
    """The end of the window of that budget."""


@fact(Kind.SUCCEEDED)
class RunSucceeded(RunEnd, frozen=True):
    """The run has an answer, or it was a preview and has its plan."""


@fact(Kind.FAILED)
class RunFailed(RunEnd, frozen=True):
    """The run has no answer; `error` says why."""


@fact(Kind.CANCELLED)
class RunCancelled(RunEnd, frozen=True):
    """The run was cancelled."""


@fact(Kind.EXPIRED)
class RunExpired(RunEnd, frozen=True):
    """The deadline passed before there was an answer."""


@fact(Kind.OVER_BUDGET)
class RunOverBudget(RunEnd, frozen=True):
    """The budget did not suffice for an answer."""


# -- its plans


@fact(Kind.PLAN_OPENED)
class PlanOpened(Fact, frozen=True):
    """A conductor is asked for proposal number `proposal`, whose steps are numbered from `base`."""

    proposal: int
    base: int
    mode: Mode
    conductor: str
    round: int = 1
    order: tuple[str, ...] = ()
    """The workers in the order in which the conductor is shown them."""
    instant: bool = False
    """True if the conductor plans without a call."""
    decision: LeftOut[Mapping[str, Any] | None] = None
    """The decision of a selector, in the form of `rating.decision`."""
    parent: LeftOut[int | None] = None
    """The step that the plan is nested in."""
    room: Annotated[int, InJson(present_with="parent")] = 0
    """How many steps a nested plan may have."""
    ejected: LeftOut[Mapping[str, str] | None] = None
    """Workers of the run's pool that are left out because they fail, each with the reason."""
    waits: LeftOut[bool] = False
    """True if no step begins before the plan is accepted: the run's money or time does not bear every plan."""
    reasons: LeftOut[bool] = False
    """True if the conductor is asked for the reasons of its plan."""


@fact(Kind.PLAN_STEP)
class PlanStep(Fact, frozen=True):
    """One step of the open proposal; all step numbers are the run's own."""

    proposal: int
    n: int
    worker: str
    subtask: str
    """Ref of its text."""
    access: Access
    answers: bool
    """True if its output is the answer of its workflow."""
    probability: LeftOut[float | None] = None
    """The conductor's probability of this worker, where its decoder reports one."""
    tools: LeftOut[bool] = False
    """True if it may call the caller's tools; the answering step always may."""
    complete: LeftOut[bool] = False
    """True if it asks for the whole answer although another step answers: see `StepState.complete`."""
    parent: LeftOut[int | None] = None
    """The step that it is nested in."""
    inherits: Annotated[bool, InJson(present_with="parent")] = False
    """True if its plan listed `user`, which inside a step is the parent's task."""
    declassified: LeftOut[frozenset[str]] = frozenset()
    """The labels that the subtask lost, because its writer declassifies them."""
    why: LeftOut[str] = ""
    """Ref of the conductor's reason for this worker; empty where it gave none."""
    why_withheld: LeftOut[str] = ""
    """Ref of its reason for what the access list leaves out."""


@fact(Kind.PLAN_ACCEPTED)
class PlanAccepted(Fact, frozen=True):
    """The open proposal is the workflow from now on."""

    proposal: int
    call: str
    """The planning call whose text this plan is, or empty."""
    steps: int
    topology: str
    """Empty for the empty plan."""
    why: LeftOut[str] = ""
    """Ref of the conductor's reason for the shape of its plan; empty where it gave none."""
    price: LeftOut[int | None] = None
    """The worst case of its steps, one call each, in micro-dollars; where the run has terms of approval."""


@fact(Kind.PLAN_REJECTED)
class PlanRejected(Fact, frozen=True):
    """The open proposal is no workflow, for all of these reasons."""

    proposal: int
    call: str
    reasons: tuple[str, ...]
    outage: bool
    """True if the conductor failed, in contrast to a bad plan."""
    budget: LeftOut[str] = ""
    """The id of the budget that had not enough left for its call."""
    budget_until: LeftOut[float | None] = None
    """The end of the window of that budget."""


# -- calls


@fact(Kind.CALL_INTENDED)
class CallIntended(Fact, frozen=True):
    """A provider call is about to be made: which worker, the hash of the exact bytes, and what is reserved."""

    call: str
    n: int | None
    """The step, or None for a planning call."""
    worker: str
    access: Access
    usd_held: int
    tokens_held: int
    attempt: int = 1
    """Which attempt of its step it is, counted from 1; for a planning call the number of proposals so far."""
    provider: str = ""
    model: str = ""
    """The provider's name for the model."""
    request: str = ""
    """Ref of the exact bytes that are sent."""
    bytes: int = 0
    max_tokens: int = 0
    catalog: str = ""
    """The digest of the pool file that the call goes by."""
    template: str = ""
    """The name of the form in which the messages were composed."""
    usd_left: LeftOut[int | None] = None
    """Of a planning call: the money that is left according to its brief."""
    seconds_left: LeftOut[int | None] = None
    """Of a planning call: the seconds that are left according to its brief."""
    rejected: Annotated[str, InJson(present_with="usd_left")] = ""
    """Of a planning call: ref of the rejected text that it is to repair."""
    left_out: LeftOut[int] = 0
    """Of a planning call: characters of the conversation that the conductor was not shown."""
    version: LeftOut[str] = ""
    """Of a planning call: the version of the conductor's model, where there are several."""
    passed_over: LeftOut[PassedOver] = ()
    despite: LeftOut[str] = ""
    """Why its worker is ejected, if it is called nevertheless because nobody else is left."""
    repairs: LeftOut[str] = ""
    """The call before it, if that had an answer without the form that was asked for."""
    ignored: LeftOut[tuple[str, ...]] = ()
    """Sampling parameters that the provider does not support."""
    endpoint: LeftOut[str] = ""
    """The name of the provider's endpoint that is called, where it has several."""
    wanted_tokens: LeftOut[int] = 0
    """The output tokens that it would have got if the money that was left had paid for them; 0: it has them."""
    watched: LeftOut[bool] = False
    """True if the reply is a stream although nobody receives it as it comes: another worker takes over from one that is
    silent."""
    budgets: LeftOut[tuple[str, ...]] = ()
    """The accounts of budgets in which the hold is reserved as well."""
    planned_by: LeftOut[str] = ""
    """The kind of conductor that planned the step; `tier` for a planning call. Empty in journals of 0.2 and older. This
    and the next five are what the ledger of disclosures has besides the access list (`visibility.py`)."""
    region: LeftOut[str] = ""
    """The region on the worker's card, where it is known."""
    labels: LeftOut[frozenset[str]] = frozenset()
    """The labels of all that the worker reads."""
    unseen: LeftOut[tuple[int, ...]] = ()
    """The steps of the access list that ended without words, so that nothing of them is shown."""
    results: LeftOut[bool] = False
    """True if results of the caller's tools are shown."""
    origin: LeftOut[OriginKind] = ""
    """The kind of origin that the run has (`RunAdmitted.origin_kind`)."""


@fact(Kind.CALL_FINISHED)
class CallFinished(Fact, frozen=True):
    """The outcome of a call; each intent has exactly one."""

    call: str
    n: int | None
    outcome: str
    """One of `OUTCOMES`."""
    usage: Usage
    usd: int
    seconds: float
    first: float = 0.0
    """Seconds to the first delta; 0 if none came."""
    finish: str = ""
    """Why the worker stopped: `stop`, `length` and so on."""
    output: str = ""
    """Ref of the text, or empty."""
    logprobs: LeftOut[str] = ""
    """Ref of the tokens with their log-probabilities, or empty."""
    refused: LeftOut[bool] = False
    """True if the text is the model's refusal."""
    error: LeftOut[str | None] = None
    """The code of the error of a call that did not succeed."""
    blamed: LeftOut[Verdict] = "silent"
    """The verdict on the worker that follows from the error; `silent`: none."""
    retry_after: LeftOut[float | None] = None
    """Seconds for which the provider asked to be left alone."""
    reason: LeftOut[str] = ""
    """The cause of the error, which is finer than its code: a `FailureReason` (`errors.py`)."""
    http_status: LeftOut[int | None] = None
    """The HTTP status of a response that was an error, or that broke off."""
    provider_code: LeftOut[str] = ""
    """The provider's own code of the error."""
    request_id: LeftOut[str] = ""
    """The provider's id of a request that failed."""
    excerpt: LeftOut[str] = ""
    """The beginning of the provider's error message, without anything of the request and without keys."""
    out_of_time: LeftOut[bool] = False
    """True if the time of the run was over before the text was complete, and what there was of it is the answer."""

    @property
    def is_empty_answer(self) -> bool:
        """Return True if it ended with neither text nor tool calls, and not because the model or its provider
        refused."""
        is_answer = self.outcome == "ok" and self.finish in ("stop", "length")
        return is_answer and not (self.output or self.refused)


# -- steps


@fact(Kind.STEP_QUEUED)
class StepQueued(Fact, frozen=True):
    """A ticket for the step is in the outbox."""

    n: int


@fact(Kind.STEP_AWAITING)
class StepAwaitingTool(Fact, frozen=True):
    """A worker has called tools of the caller's."""

    n: int
    call: str
    said: str
    """Ref of the worker's message."""
    chars: int
    """Characters of the text beside the calls."""
    calls: tuple[NamedCall, ...]


@fact(Kind.STEP_RESULTS)
class StepToolResults(Fact, frozen=True):
    """The caller has sent the results of a step's tool calls."""

    n: int
    results: str
    """Ref of the results."""
    ids: tuple[str, ...] = ()
    """The calls that they answer."""
    labels: LeftOut[frozenset[str]] = frozenset()
    """The labels that the caller put on them."""
    origin_run: LeftOut[str] = ""
    """The run whose recorded results a replay was given; empty where a caller sent them."""


@fact(Kind.STEP_DONE)
class StepDone(Fact, frozen=True):
    """The step has its output."""

    n: int
    call: str
    """The call that gave the output."""
    output: str
    """Ref of its text, or empty."""
    chars: int
    finish: str
    """Why the worker stopped: `stop`, `length` and so on."""
    from_step: Annotated[int | None, InJson(key="from", is_left_out=True)] = None
    """`from` in JSON: the nested step whose answer this is."""
    logprobs: LeftOut[str] = ""
    """Ref of the tokens with their log-probabilities, or empty."""
    refusal: LeftOut[bool] = False
    """True if the output is what the model said instead of an answer."""
    stop_sequence: LeftOut[int | None] = None
    """The place, among those of the request, of the stop sequence at which the worker stopped; None if it stopped
    otherwise, or if its provider does not say."""
    declassified: LeftOut[frozenset[str]] = frozenset()
    """The labels that the output lost, because its worker declassifies them."""
    origin_run: LeftOut[str] = ""
    """The run from which a replay has taken the output over without a call; empty where a call gave it."""
    origin_step: LeftOut[int | None] = None
    """The number of the step in that run."""
    origin_output: LeftOut[str] = ""
    """The ref of the output in that run, or empty."""
    labels: LeftOut[frozenset[str]] = frozenset()
    """The labels of an output that was taken over."""


@fact(Kind.STEP_FAILED)
class StepFailed(Fact, frozen=True):
    """The step has no output; `error` says why."""

    n: int
    error: str
    deliveries: LeftOut[int | None] = None
    """The number of engines that fell silent while they executed it, if it is given up for that reason."""
    left: LeftOut[float | None] = None
    """Seconds that were left of the run, if no worker could be called."""
    passed_over: LeftOut[PassedOver] = ()
    despite: LeftOut[str] = ""
    retry_after: LeftOut[float | None] = None
    """Seconds after which the first of its workers can be called again, if all of them limit the rate of requests."""
    budget: LeftOut[str] = ""
    """The id of the budget that had not enough left for its call."""
    budget_until: LeftOut[float | None] = None
    """The end of the window of that budget."""


@fact(Kind.STEP_SKIPPED)
class StepSkipped(Fact, frozen=True):
    """The step is not executed, for this reason."""

    n: int
    reason: str


# -- events

_ENDS: tuple[type[RunEnd], ...] = (RunSucceeded, RunFailed, RunCancelled, RunExpired, RunOverBudget)
FACT_CLASSES: tuple[type[Fact], ...] = (
    RunAdmitted,
    RunCancelAsked,
    PlanOpened,
    PlanStep,
    PlanAccepted,
    PlanRejected,
    StepQueued,
    CallIntended,
    CallFinished,
    StepAwaitingTool,
    StepToolResults,
    StepDone,
    StepFailed,
    StepSkipped,
    RunAwaitingTool,
    RunResumed,
    RunAwaitingApproval,
    RunApproved,
    RunRefused,
    RunApprovalExpired,
    *_ENDS,
)
"""The record of each kind."""
_READERS: Mapping[Kind, Callable[[Json], Fact]] = {event.kind: event.from_json for event in FACT_CLASSES}
ENDS: Mapping[Kind, type[RunEnd]] = {event.kind: event for event in _ENDS}
"""The records of the terminal kinds."""


_KINDS: Mapping[str, Kind] = {kind.value: kind for kind in Kind}


class Event(Struct, eq=False):
    """A committed fact. `at` is in seconds since 1970; order is by `seq`, never by `at`.

    An event that was read has a `body`, and makes its `fact` when it is first asked for: most journals that are sent or
    shown are never folded. An event that was just written has its fact, and makes its body when it is asked for.
    """

    run: str
    seq: int
    kind: Kind
    at: float
    _body: Json | None = None
    _fact: Fact | None = None

    @classmethod
    def of(cls, run: str, seq: int, at: float, fact: Fact) -> "Event":
        """Return the event that a written fact has become."""
        return cls(run, seq, fact.kind, at, None, fact)

    @classmethod
    def stored(cls, run: str, seq: int, kind: str, at: float, body: str | bytes) -> "Event":
        """Return an event as it is stored: `body` is its JSON. Raises EventMalformed for what is none, and for an
        unknown kind."""
        try:
            return cls(run, seq, _KINDS[kind], at, orjson.loads(body))
        except (KeyError, ValueError) as error:
            raise EventMalformed(run, seq) from error

    @property
    def fact(self) -> Fact:
        """Return the record. Raises EventMalformed for a body that is not one of its kind."""
        if self._fact is None:
            try:
                self._fact = _READERS[self.kind](self.body)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise EventMalformed(self.run, self.seq) from error
        return self._fact

    @property
    def body(self) -> Json:
        """Return the JSON of the fact, with all that a newer process may have added: for storing, sending and
        showing."""
        if self._body is None:
            self._body = self.fact.to_json()
        return self._body

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        mine = (self.run, self.seq, self.kind, self.at, self.body)
        return mine == (other.run, other.seq, other.kind, other.at, other.body)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Event({self.run!r}, {self.seq}, {self.kind.value!r}, {self.at}, {self.body!r})"


def read_facts(events: Iterable[Event]) -> list[tuple[int, float, Fact]]:
    """Return the number, the time and the fact of each event. Raises what `Event.fact` raises."""
    return [(event.seq, event.at, event.fact) for event in events]


def facts(events: Iterable[Event], kind: type[F]) -> Iterator[F]:
    """Yield the facts of one class, in the order of their events."""
    for event in events:
        if event.kind is kind.kind and isinstance(event.fact, kind):
            yield event.fact


def facts_with_times(events: Iterable[Event], kind: type[F]) -> Iterator[tuple[float, F]]:
    """Yield the facts of one class, each with the time of its event before it, in the order of their events."""
    for event in events:
        if event.kind is kind.kind and isinstance(event.fact, kind):
            yield event.at, event.fact
