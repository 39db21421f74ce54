"""Query parameters: one model for each route that takes some, and the readers of their texts.

FastAPI reads a request's query string into these models and describes them. A parameter that is unknown or cannot be
read is a 400 that names it (`invalid_values.parameters_error`). Texts are read strictly: a whole number has digits
only, and a truth value is `true`, `false`, `1` or `0`.
"""

import base64
import binascii
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from app.core.plan.workflow import Topology
from app.core.pool.catalog import MILLION
from app.core.rating.economics import GROUPINGS, METADATA, Success, is_grouping
from app.core.run.identifiers import REPLY_ID, run_of_reply
from app.core.run.recipients import RecipientKind
from app.errors import InvalidRequest
from app.gateway.openapi.replies import RunState
from app.gateway.wire.invalid_values import QUERY_FAULT
from app.gateway.wire.parameters import Includable
from app.store.protocol import METADATA_TAG, RunSort, SeenDataFilter

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
PAGE: Final = 100
"""The most runs or items of a page."""
MODEL_PAGE: Final = 1_000
"""The most models of a page."""
EVENT_PAGE: Final = 1_000
"""The most events of a page."""
DISCLOSURE_PAGE: Final = 1_000
"""The most disclosures of a page."""
LARGEST: Final = 10**15 - 1
"""The largest whole number that is read: of fifteen digits."""
TEXT: Final = 512
"""Characters that a parameter may have."""


def _fault(reason: str) -> PydanticCustomError:
    """Return an error whose text contains nothing of the value."""
    return PydanticCustomError(QUERY_FAULT, "{reason}", {"reason": reason})


def parse_whole_number(value: str) -> int:
    """Return a whole number from 0."""
    if not (value.isascii() and value.isdecimal() and len(value) <= 15):
        raise _fault("it must be a whole number from 0, of at most 15 digits")
    return int(value)


def parse_boolean(value: str) -> bool:
    """`true` or `false`, or `1` or `0`."""
    if value not in ("true", "false", "1", "0"):
        raise _fault("it must be true or false")
    return value in ("true", "1")


def moment(value: str) -> float:
    """Return the seconds since 1970, or a time as RFC 3339 writes it; without an offset it is UTC."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = _rfc3339(value)
    if not (math.isfinite(seconds) and 0 <= seconds < 1e11):
        raise _fault("it must be seconds since 1970 or RFC 3339")
    return seconds


def _rfc3339(value: str) -> float:
    try:
        at = datetime.fromisoformat(value.replace(" ", "+"))
        if at.tzinfo is None:
            at = at.replace(tzinfo=UTC)
        return at.timestamp()
    except (ValueError, OverflowError):
        raise _fault("it must be seconds since 1970 or RFC 3339") from None


def micro_dollars(value: str) -> int:
    """Return a decimal number of dollars in micro-dollars, rounded up: the least that a cost must be."""
    return int((_dollars(value) * MILLION).to_integral_value(ROUND_CEILING))


def _dollars(value: str) -> Decimal:
    try:
        amount = Decimal(value)
    except InvalidOperation:
        raise _fault("it must be a decimal number of dollars") from None
    if not amount.is_finite() or not 0 <= amount <= MILLION:
        raise _fault("it must be a decimal number of dollars from 0 to 1,000,000")
    return amount


class Cursor(NamedTuple):
    """The place behind a run in a list of runs that is sorted by `sort`: a time or micro-dollars, and the run's id."""

    first: float
    run: str
    sort: str = "time"


def as_cursor(place: Cursor) -> str:
    """Return a place in a list of runs as text, which says by what the list is sorted unless that is the time."""
    fields: list[object] = [place.first, place.run]
    if place.sort != "time":
        fields.append(place.sort)
    return base64.urlsafe_b64encode(orjson.dumps(fields)).decode().rstrip("=")


def cursor(value: str) -> Cursor:
    """Return the inverse of `as_cursor`."""
    try:
        place = Cursor(*orjson.loads(base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))))
    except (ValueError, TypeError, binascii.Error):
        raise _fault("it must be `next` or `last_id` of the page before") from None
    read = isinstance(place.first, float | int) and isinstance(place.run, str) and isinstance(place.sort, str)
    if not read or not 0 <= place.first <= LARGEST or not RUN_ID.fullmatch(place.run):
        raise _fault("it must be `next` or `last_id` of the page before")
    return place


def time_cursor(value: str) -> Cursor:
    """Return the place of a cursor in a list of runs that is sorted by time."""
    place = cursor(value)
    if place.sort != "time":
        raise _fault("it is a place in a list that is sorted otherwise; it must be `next` of the page before")
    return place


def parse_cursor(value: str) -> Cursor | str:
    """Return the place behind a run in a list of runs: a cursor's, or the id of the run itself."""
    if REPLY_ID.fullmatch(value):
        return run_of_reply(value)
    return cursor(value)


def metadata_field(value: str) -> str:
    """Return a field of metadata with its value, as FIELD=VALUE."""
    if "=" not in value[1:]:
        raise _fault("it must be FIELD=VALUE")
    return value


def micro_dollars_at_most(value: str) -> int:
    """Return a decimal number of dollars in micro-dollars, rounded down: the most that a cost may be."""
    return int((_dollars(value) * MILLION).to_integral_value(ROUND_FLOOR))


Whole = Annotated[int, BeforeValidator(parse_whole_number)]
EventNumber = Annotated[Whole, Field(ge=0, le=LARGEST)]
Truth = Annotated[bool, BeforeValidator(parse_boolean)]
TimeCursor = Annotated[Any, BeforeValidator(time_cursor), WithJsonSchema({"type": "string"})]
"""A `Cursor`. FastAPI gives a parameter whose type is a tuple as a list, so the type is not named here."""
Moment = Annotated[
    float,
    BeforeValidator(moment),
    WithJsonSchema({"type": "string", "description": "Seconds since 1970, or RFC 3339.", "maxLength": TEXT}),
]
_DOLLARS = WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1_000_000})
MicroDollars = Annotated[int, BeforeValidator(micro_dollars), _DOLLARS]
MicroDollarsAtMost = Annotated[int, BeforeValidator(micro_dollars_at_most), _DOLLARS]
Text = Annotated[str, Field(max_length=TEXT)]
MetadataField = Annotated[str, BeforeValidator(metadata_field), Field(max_length=TEXT)]
TraceId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Parameters(BaseModel):
    """Query parameters of one route; others are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def is_printable(cls, value: object) -> object:
        """Refuse texts that are too long for any parameter or hold control characters."""
        if isinstance(value, str) and (len(value) > TEXT or not value.isprintable()):
            raise _fault("it is too long or holds control characters")
        return value

    @field_validator("until", "rated_until", check_fields=False)
    @classmethod
    def is_after_since(cls, value: float | None, others: ValidationInfo) -> float | None:
        """Refuse a period that ends before it begins: nothing could ever be in it."""
        first = others.data.get(str(others.field_name).replace("until", "since"))
        if value is not None and first is not None and value < first:
            raise _fault("it must not be earlier than the beginning of the period")
        return value


class RunAttributes(Parameters):
    """The attributes by which runs are selected; several parameters must all hold."""

    tier: Text | None = None
    """Runs of this tier."""
    key: Text | None = None
    """Runs that this API key began, by the key's id."""
    worker: Text | None = None
    """Runs in which this worker was sent something, as a worker, a conductor or an embedder."""
    label: Text | None = None
    """Runs with this label."""
    topology: Topology | None = None
    """Runs whose latest plan has this shape."""
    model: Text | None = None
    """Runs whose request asked for this model id, as it was written."""
    user: Text | None = None
    """Runs whose request named this end user, by `user` or by `safety_identifier`."""
    metadata: MetadataField | None = None
    """Runs whose request had this field in its metadata: FIELD=VALUE."""
    tenant: Text | None = None
    """Runs of this tenant; only a key of all tenants may ask for another one than its own."""


def tags_of(attributes: RunAttributes) -> tuple[tuple[str, str], ...]:
    """Return the tags that the store's query for these runs needs."""
    tags = (("worker", attributes.worker), ("label", attributes.label), (METADATA_TAG, attributes.metadata))
    return tuple([(name, value) for name, value in tags if value is not None])


class RunFilters(RunAttributes):
    """The filters of a list of runs; several parameters must all hold."""

    state: RunState | None = None
    """Runs in this state."""
    request_id: Text | None = None
    """Runs that a request with this `x-request-id` began, or continued with tool results."""
    trace_id: TraceId | None = None
    """Runs that a request of this trace began, or continued: 32 hexadecimal digits."""
    since: Moment | None = None
    """Runs that began at this time or later: seconds since 1970, or RFC 3339."""
    until: Moment | None = None
    """Runs that began before this time: seconds since 1970, or RFC 3339."""
    min_cost_usd: MicroDollars | None = None
    """Runs that cost this many dollars or more."""
    max_cost_usd: MicroDollarsAtMost | None = None
    """Runs that cost this many dollars or less."""
    origin_kind: Literal["none", "plan", "replay", "shadow"] | None = None
    """Runs that follow from another one in this way; `none`: those that follow from no other."""
    origin_run: Text | None = None
    """Runs that follow from this run: replays of it, shadows, and runs of its plan."""
    degraded: Truth | None = None
    """`true`: runs in which a fallback decided, a step was lost, or time or money ran short; `false`: the others."""
    preview: Truth | None = None
    """`true`: plans that were made by `POST /v1/plans` or an edit, and not executed; `false`: the other runs."""
    outcome: Literal["ok", "error", "truncated", "cancelled", "unknown", "open"] | None = None
    """Runs with a call of this outcome; `open`: one that has not ended. Together with `worker`: a call of that one."""
    error: Text | None = None
    """Runs that ended with the error of this code."""
    rated: Literal["good", "bad"] | None = None
    """Runs whose ratings have a mean score of 0.5 or more (`good`), or of less."""
    rated_since: Moment | None = None
    """With `rated`: only ratings that were given at this time or later count."""
    rated_until: Moment | None = None
    """With `rated`: only ratings that were given before this time count."""
    queue: Literal["untaken"] | None = None
    """`untaken`: runs of which something waits that no engine has taken yet: the run itself, or a step of it. Only a
    key of all tenants may ask."""
    sort: RunSort = "time"
    """`time`: by the time of their admission; `cost`: by what they cost, and only runs that have ended."""
    order: Literal["asc", "desc"] = "desc"
    """`desc`: the newest, or the most expensive, first."""
    limit: Annotated[Whole, Field(ge=1, le=PAGE)] = 20
    """The most runs of a page."""
    after: Annotated[Any, BeforeValidator(parse_cursor), WithJsonSchema({"type": "string"})] = None
    """`next` of the page before, or its `last_id`."""
    before: Annotated[Any, BeforeValidator(parse_cursor), WithJsonSchema({"type": "string"})] = None
    """`previous` of the page behind, or its `first_id`: the runs in front of it. Not together with `after`."""
    include: Annotated[list[Literal["count", "workers", "preview", "key_name"]], Field(max_length=4)] = []
    """`count`: how many runs the filters select, counted up to 10,000; `workers`: the workers of each run; `preview`:
    whether each run was only planned; `key_name`: the name of each run's key. It may be given several times."""


class LiveFilters(RunFilters):
    """The filters of a page that is followed; several parameters must all hold."""

    seconds: Annotated[Whole, Field(ge=0, le=86_400)] | None = None
    """The time after which the stream ends; without it, it goes on until the client disconnects."""


class LogFilters(Parameters):
    """An earlier checkpoint, whose log must be the beginning of the newest one's."""

    size: EventNumber | None = None
    """The number of its entries."""
    root: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Its root in hexadecimal."""


class OverviewPeriod(Parameters):
    """The period of an overview that ends now."""

    period: Literal["hour", "day", "week", "month"] = "day"
    """The length of the period; a month has 30 days."""
    tenant: Text | None = None
    """Runs of this tenant; only a key of all tenants may ask for another one than its own."""


class OverviewFilters(OverviewPeriod):
    """The period of an overview."""

    until: Moment | None = None
    """The end of the period; by default now."""


class LiveOverviewFilters(OverviewPeriod):
    """The period of an overview that is followed; it ends now."""

    seconds: Annotated[Whole, Field(ge=0, le=86_400)] | None = None
    """The time after which the stream ends; without it, it goes on until the client disconnects."""


def period_of(since: float | None, until: float | None, now: float, seconds: float) -> tuple[float, float]:
    """Return the beginning and the end of the period of a report: by default it ends now, and is so many seconds long.

    Raises `InvalidRequest` for one that is empty.
    """
    if until is None:
        until = now
    if since is None:
        since = until - seconds
    if since >= until:
        message = "Invalid value for 'since': it must be earlier than 'until', which is now by default."
        raise InvalidRequest(message, param="since", code="invalid_value")
    return since, until


def grouping(value: str) -> str:
    """Return the name of a grouping of a report."""
    if not (is_grouping(value) and value.isprintable() and len(value) <= TEXT):
        raise _fault(f"it must be one of {', '.join(GROUPINGS)} and {METADATA}FIELD")
    return value


Grouping = Annotated[
    str,
    AfterValidator(grouping),
    WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(GROUPINGS)}|metadata\\..+)$", "maxLength": TEXT}),
]


class ReportFilters(RunAttributes):
    """The runs that a report is about, and what it says of them."""

    by: Annotated[list[Grouping], Field(min_length=1, max_length=8)] = ["tier"]
    """The attributes by which runs are grouped: `tier`, `tenant`, `key`, `user`, `worker`, `topology`, `week`,
    `metadata.FIELD`. It may be given several times."""
    success: Success = "feedback"
    """The judge of a query's success: callers' feedback, graders, or signals in what callers did."""
    threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """The least score of a success."""
    time_zone: Text = "UTC"
    """The time zone of weeks, by its IANA name."""
    since: Moment | None = None
    """Runs that began at this time or later; by default a week before `until`."""
    until: Moment | None = None
    """Runs that began before this time; by default now."""
    format: Literal["json", "csv", "parquet"] = "json"
    """`json`: all figures; `csv` and `parquet`: the table of one part."""
    part: Literal["summary", "groups", "dearest", "failures"] = "groups"
    """The part that is written as a table."""


class CallId(NamedTuple):
    """A call by its run and its own id."""

    run: str
    call: str


def as_place(at: float, call: str) -> str:
    """Return a place in a list of disclosures as text."""
    return base64.urlsafe_b64encode(orjson.dumps([at, call])).decode().rstrip("=")


def parse_call_cursor(value: str) -> CallId | tuple[float, str]:
    """Return the place behind a row in a list of disclosures: that of `next`, or the id of the row itself."""
    run, dot, call = value.partition(".")
    if dot and RUN_ID.fullmatch(run) and RUN_ID.fullmatch(call):
        return CallId(run, call)
    try:
        at, name = orjson.loads(base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)))
    except (ValueError, TypeError, binascii.Error):
        raise _fault("it must be `next` or `last_id` of the page before") from None
    read = isinstance(at, float | int) and isinstance(name, str)
    if not read or not 0 <= at <= LARGEST or not RUN_ID.fullmatch(name):
        raise _fault("it must be `next` or `last_id` of the page before")
    return float(at), name


def parse_seen(value: str) -> str:
    """Something that a recipient may have seen: `user`, `results`, `step:N` or `label:X`."""
    kind, _, name = value.partition(":")
    is_step = kind == "step" and name.isascii() and name.isdecimal() and len(name) <= 6
    if value not in ("user", "results") and not is_step and not (kind == "label" and name):
        raise _fault("it must be `user`, `results`, `step:` and a number, or `label:` and a label")
    return value


def saw_of(values: Sequence[str]) -> SeenDataFilter:
    """Return the filter of the store for values that `parse_seen` has read."""
    pairs = [value.partition(":")[::2] for value in values]
    return SeenDataFilter(
        user="user" in values,
        results="results" in values,
        steps=tuple([int(name) for kind, name in pairs if kind == "step"]),
        labels=tuple([name for kind, name in pairs if kind == "label"]),
    )


Seen = Annotated[
    str,
    AfterValidator(parse_seen),
    WithJsonSchema({"type": "string", "pattern": "^(user|results|step:[0-9]{1,6}|label:.+)$"}),
]
SEVERAL = Field(max_length=50)
"""The most values of one repeated parameter."""


class DisclosureFilters(Parameters):
    """The filters of a list of disclosures. Different parameters must all hold; of a repeated one any value may."""

    recipient: Annotated[list[Text], SEVERAL] = []
    """Rows of this worker, whatever it was called for."""
    recipient_kind: Annotated[list[RecipientKind], SEVERAL] = []
    """`worker`, `conductor`, `embedder` or `shadow`."""
    provider: Annotated[list[Text], SEVERAL] = []
    """Rows of this provider."""
    saw: Annotated[list[Seen], SEVERAL] = []
    """Rows of recipients that saw this: `user` (the caller's words), `step:N` (the output of a step), `results` (of the
    caller's tools), `label:X` (anything with a label)."""
    since: Moment | None = None
    """Calls that were made at this time or later: seconds since 1970, or RFC 3339."""
    until: Moment | None = None
    """Calls that were made before this time: seconds since 1970, or RFC 3339."""
    tenant: Annotated[list[Text], SEVERAL] = []
    """Rows of this tenant; only a key of all tenants may ask for another one than its own."""
    user: Annotated[list[Text], SEVERAL] = []
    """Rows of runs whose request named this end user."""
    run: Annotated[list[Text], SEVERAL] = []
    """Rows of this run."""
    key: Annotated[list[Text], SEVERAL] = []
    """Rows of runs that this API key began, by the key's id."""
    order: Literal["asc", "desc"] = "desc"
    """`desc`: the newest first."""
    limit: Annotated[Whole, Field(ge=1, le=DISCLOSURE_PAGE)] = 100
    """The most rows of a page."""
    after: Annotated[Any, BeforeValidator(parse_call_cursor), WithJsonSchema({"type": "string"})] = None
    """`next` of the page before, or its `last_id`."""
    format: Literal["json", "jsonl", "csv"] | None = None
    """The form of the reply; by default the one that `Accept` asks for, or else JSON."""


class ApprovalFilters(Parameters):
    """The filters of a list of approvals. Other parameters are ignored."""

    model_config = ConfigDict(extra="ignore")

    status: Literal["waiting", "decided", "all"] = "waiting"
    """`waiting`: plans that wait; `decided`: those that were approved or refused, and those that nobody decided before
    the wait was over or the run was cancelled. Runs of earlier releases are listed only while they wait."""
    words: Truth = True
    """`false`: without instructions and reasons, so that no content is read."""
    limit: Annotated[Whole, Field(ge=1, le=PAGE)] = 20
    """At most so many, the newest runs first."""
    after: TimeCursor = None
    """`next` of the page before."""


class ShadowFilters(Parameters):
    """The tier and the time that a report on shadows is about."""

    tier: Text | None = None
    """The tier whose runs are compared with their shadows; by default the pool file's first one that has a shadow."""
    since: Moment | None = None
    """Shadows that began at this time or later; by default a week before `until`."""
    until: Moment | None = None
    """Shadows that began before this time; by default now."""


class EventFilters(Parameters):
    """The events of a run's journal that are read."""

    after: EventNumber = 0
    """The number of the last event that is not wanted any more: `next` or `last_id` of the page before."""
    limit: Annotated[Whole, Field(ge=1, le=EVENT_PAGE)] = 500
    """The most events of a page."""


def seconds(value: str) -> float:
    """Return the seconds since a run's admission."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e9:
        raise _fault("it must be a number of seconds")
    return number


class InstantOptions(Parameters):
    """The instant at which a run is shown: by default the present."""

    at: Annotated[Whole, Field(ge=1, le=LARGEST)] | None = None
    """The number of an event: the run after exactly the events up to this one."""
    t: Annotated[float, BeforeValidator(seconds), WithJsonSchema({"type": "number", "minimum": 0})] | None = None
    """Seconds since the admission: the run as it was then."""


class GraphOptions(InstantOptions):
    """The instant at which a run's graph is drawn, and what is in it."""

    words: Truth = True
    """`false`: the graph without the first words of subtasks, so that no content is read."""


class ViewsOptions(GraphOptions):
    """The instant at which a run and its views are shown, and what is in them."""

    step: Annotated[Whole, Field(ge=0, le=LARGEST)] | None = None
    """The number of a step that is read in full, with the explanation of the run."""


class ComparedRuns(Parameters):
    """Two runs."""

    a: Annotated[str, Field(max_length=TEXT, description="The id of a run, or of a reply of it.")]
    b: Annotated[str, Field(max_length=TEXT, description="The id of the other run.")]


class ModelFilters(Parameters):
    """The models that are listed. Other parameters are accepted: clients send their version, for example."""

    model_config = ConfigDict(extra="ignore")

    limit: Annotated[Whole, Field(ge=1, le=MODEL_PAGE)] = MODEL_PAGE
    """The most models of a page."""
    after_id: Text | None = None
    """Models behind this one: `last_id` of the page before."""
    before_id: Text | None = None
    """Models before this one: `first_id` of the page behind."""


class StreamOptions(Parameters):
    """The beginning of a stream."""

    starting_after: EventNumber | None = None
    """The number of the last event that was received: the stream goes on behind it."""


class JournalStreamOptions(StreamOptions):
    """The beginning and the length of a stream of a run's journal."""

    seconds: Annotated[Whole, Field(ge=0, le=600)] = 600
    """Seconds for which the stream is kept open; 0: it ends behind what there is."""


class ResponseOptions(StreamOptions):
    """The way in which a response is retrieved."""

    stream: Truth = False
    """`true`: as server-sent events, which go on while the response is in progress."""
    include: list[Includable] = []
    """Checked, and without effect."""
    include_list: Annotated[list[Includable], Field(alias="include[]")] = []
    """Checked, and without effect."""
    include_obfuscation: Text | None = None
    """Accepted, and without effect."""
    beta: Text | None = None
    """Accepted, and without effect: OpenAI's client sends it with `beta.responses`."""


class ItemFilters(Parameters):
    """The input items of a response that are listed."""

    order: Literal["asc", "desc"] = "desc"
    """`desc`: newest first."""
    limit: Annotated[Whole, Field(ge=1, le=PAGE)] = 20
    """The most items of a page."""
    after: Text | None = None
    """The id of the last item of the page before."""
    include: list[Includable] = []
    """Checked, and without effect."""
    include_list: Annotated[list[Includable], Field(alias="include[]")] = []
    """Checked, and without effect."""
    beta: Text | None = None
    """Accepted, and without effect: OpenAI's client sends it with `beta.responses`."""
