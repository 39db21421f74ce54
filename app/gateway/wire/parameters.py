"""Tables of every top-level field of OpenAI's requests: which are honoured, ignored or refused.

honoured    it is read and acted upon
ignored     it is checked and noted in the journal, and changes nothing, as OpenAI too may do
refused     a 400 names it, unless its value asks for nothing (`neutral`), which is then noted as ignored

`document()` writes the same decisions down for callers:
`python -m app.gateway.wire.parameters > deploy/docs/parameters.md`.

The options of a run that every wire format has stand at the end: the tier, the effort, and the `baton` field.
`order_of` makes an `Order` of them, in the same way for every format.
"""

import json
from collections.abc import Mapping
from decimal import ROUND_FLOOR, Decimal
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, create_model

from app.core.message.chat import Task
from app.core.plan.arms import tier_for
from app.core.plan.published_format import from_lists, is_published
from app.core.pool.catalog import LIMITS, MILLION, Catalog, Limit, Limits, Tier
from app.core.pool.policy import Overrides
from app.core.pool.rules import LABEL_FORM
from app.engine.runs.admission import Order
from app.errors import InvalidRequest, NotFound, PlanRejected
from app.gateway.http.field_names import FIELD_NAME
from app.gateway.wire.invalid_values import invalid_request, unknown_parameter
from app.gateway.wire.unsupported_routes import NOT_OFFERED
from app.store.protocol import KeyRow

Decision = Literal["honoured", "ignored", "refused"]
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""The values of `include` on `/v1/responses`."""


class Parameter(Struct, frozen=True):
    """One row. `note` is for callers; `neutral` holds the values that a refused parameter may have all the same."""

    decision: Decision
    note: str
    neutral: tuple[object, ...] = ()


def _honour(note: str) -> Parameter:
    return Parameter("honoured", note)


def _ignore(note: str) -> Parameter:
    return Parameter("ignored", note)


def _refuse(note: str, *neutral: object) -> Parameter:
    return Parameter("refused", note, neutral)


PARAMETERS: Final[Mapping[str, Parameter]] = {
    "model": _honour("A tier or an alias of one; `GET /v1/models` lists those that the key may use."),
    "messages": _honour("At most 2,048. Texts, files as `data:` URLs, images also by reference, tool calls, results."),
    "stream": _honour("Server-sent events; the whole reply is the same text and usage."),
    "stream_options": _honour("`include_usage`; `include_obfuscation` changes nothing."),
    "max_tokens": _honour(
        "Caps the final answer, not the orchestration, which the budget caps. More than the `output_tokens` of the "
        "tier and effort (`GET /v1/models`) count as those."
    ),
    "max_completion_tokens": _honour("The newer name of `max_tokens`; not both."),
    "temperature": _honour("0 to 2. Passed to every step."),
    "top_p": _honour("0 to 1. Passed to every step."),
    "stop": _honour("At most 4 texts. Passed to the answering step."),
    "seed": _honour("Passed to every step."),
    "presence_penalty": _honour("-2 to 2. Passed to the answering step."),
    "frequency_penalty": _honour("-2 to 2. Passed to the answering step."),
    "logit_bias": _honour("-100 to 100. Passed to the answering step; token ids are those of its worker, so pin one."),
    "logprobs": _honour(
        "Of the answer; those of words before calls of tools are in a stream as it comes, and not stored. Only workers "
        "whose provider has the option `logprobs` may take part; without one, a 400."
    ),
    "top_logprobs": _honour("0 to 20, with `logprobs`; 0 asks for nothing."),
    "reasoning_effort": _honour(
        "The tier's limits for that effort; where the pool file has none for it, those of the nearest one that it has, "
        "the lower of two. `none` counts as `minimal`."
    ),
    "user": _honour("Kept with the task."),
    "metadata": _honour("Kept with the task: at most 16 entries of at most 64 and 512 characters."),
    "baton": _honour(
        "Baton's extension: budget, pool, labels (which messages and parts may have, too), plan, stream_steps, "
        "on_disconnect, explore, shadow, approval."
    ),
    # Tools and formats of the answer.
    "tools": _honour(
        "At most 128 functions and custom tools. `strict` is passed to workers whose provider decodes by schemas; "
        "Baton itself checks that arguments are a JSON object, and not against the schema. The grammar of a custom "
        "tool is described to the worker in words; no decoder enforces it. Only workers with `tools` may take part."
    ),
    "tool_choice": _honour("`none`, `auto`, `required`, a tool, or `allowed_tools`. Binds the answering step."),
    "parallel_tool_calls": _honour("`false`: at most one call of each step in a reply."),
    "functions": _refuse("Deprecated by OpenAI in favour of `tools`.", []),
    "function_call": _refuse("Deprecated by OpenAI in favour of `tool_choice`.", "none"),
    "response_format": _honour(
        "JSON, or JSON by a schema of at most 64 KiB: the whole answer validates, or the run fails with "
        "`answer_off_form`. For `json_object` no message is added where the conversation mentions JSON and the worker "
        "has a JSON mode. An answer cut off by `max_tokens` is passed on, as OpenAI does. The answer is streamed as it "
        "comes under a `strict` schema, by a worker whose decoder enforces it. A provider with the option "
        "`open_schemas` streams under any schema that does not combine others (`oneOf`, `allOf`, `not`, `if`)."
    ),
    # What changes nothing about the answer.
    "store": _ignore("Every run is journaled; how long its content is kept is the operator's choice."),
    "service_tier": _ignore("Baton has one service tier; replies say `default`."),
    "safety_identifier": _ignore("Kept with the task as `user` is: runs are found, and erased, by either."),
    "prompt_cache_key": _ignore("Providers cache by prefix."),
    "prompt_cache_retention": _ignore("Providers decide."),
    "prompt_cache_options": _ignore("Providers decide."),
    "verbosity": _ignore("Say it in the conversation."),
    # What cannot be had.
    "n": _refuse("A run gives one answer: send the request again for another.", 1),
    "modalities": _refuse("Answers are text.", ["text"]),
    "audio": _refuse("Answers are text."),
    "prediction": _refuse("Workers are sent no prediction."),
    "web_search_options": _refuse("No worker searches the web on Baton's behalf."),
    "moderation": _refuse("Answers are not moderated on the way."),
}

SHARED: Final = (
    *("model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "stop", "seed", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "user", "baton"),
)
COMPLETIONS: Final[Mapping[str, Parameter]] = {
    "prompt": _honour(
        "One text, or a list of one text, which becomes the user's message. Several texts, and tokens, are refused."
    ),
    **{name: PARAMETERS[name] for name in SHARED},
    "n": PARAMETERS["n"],
    "best_of": _refuse("A run gives one answer.", 1),
    "echo": _refuse("The prompt is not repeated before the answer.", False),
    "suffix": _refuse("No worker is shown a text that follows the answer.", ""),
    "logprobs": _refuse("Use `/v1/chat/completions` for them."),
}
"""The parameters of the legacy route."""


RESPONSES: Final[Mapping[str, Parameter]] = {
    "model": PARAMETERS["model"],
    "input": _honour(
        "A text, or items: messages, calls of functions and of custom tools, searches for tools, their outputs, "
        "additional tools, compactions, references to items of stored responses; reasoning items are left out."
    ),
    "instructions": _honour(
        "A message before the conversation; not carried over to the next response. A run that goes on with the results "
        "of its calls keeps those that it began with."
    ),
    "previous_response_id": _honour("Goes on with that response's conversation, or its waiting run."),
    "tools": _honour(
        "At most 128 functions, also in namespaces, and custom tools. `strict` has the effect that it has in a chat "
        "completion. The grammar of a custom tool is described to the worker in words; no decoder enforces it. Workers "
        "see a `tool_search` with `execution: client` as a function, and get a deferred tool once a search has "
        "returned it. Without `execution: client` they get deferred tools at once, and the reply shows a search for "
        "each that is called. A `web_search` that states its `external_web_access`, as Codex's does, is left out and "
        "noted (with `BATON_WEB_SEARCH=refuse`, a 400 if it is true). Other hosted tools are refused."
    ),
    "tool_choice": PARAMETERS["tool_choice"],
    "parallel_tool_calls": PARAMETERS["parallel_tool_calls"],
    "text": _honour("`format` as `response_format` of a chat completion; `verbosity` is repeated and has no effect."),
    "reasoning": _honour("`effort`: the tier's limits for it; the others change nothing, and `mode: pro` is refused."),
    "max_output_tokens": PARAMETERS["max_tokens"],
    "temperature": PARAMETERS["temperature"],
    "top_p": PARAMETERS["top_p"],
    "top_logprobs": _honour("0 to 20, of the answer's tokens; 0 asks for nothing."),
    "include": _honour(
        "`message.output_text.logprobs`, as `logprobs` of a chat completion; OpenAI's others change nothing, and any "
        "other is a 400."
    ),
    "metadata": PARAMETERS["metadata"],
    "user": PARAMETERS["user"],
    "store": _honour("false: the response cannot be retrieved. Its run is journaled all the same."),
    "background": _honour("The reply comes at once; the run goes on if the connection is lost."),
    "stream": _honour("Server-sent events in OpenAI's order; see `GET /v1/responses/{id}?stream=true`."),
    "stream_options": _honour("`include_obfuscation` changes nothing."),
    "baton": PARAMETERS["baton"],
    "service_tier": PARAMETERS["service_tier"],
    "safety_identifier": _ignore("The reply repeats it. Runs are found, and erased, by it as by `user`."),
    "prompt_cache_key": _ignore("The reply repeats it. Providers cache by prefix."),
    "prompt_cache_retention": _ignore("The reply repeats it. Providers decide."),
    "prompt_cache_options": PARAMETERS["prompt_cache_options"],
    "truncation": _ignore("The reply repeats it. The conversation is passed on whole."),
    "max_tool_calls": _ignore("The reply repeats it. There are no built-in tools to count."),
    "client_metadata": _ignore("Codex's own. Send `metadata` to have something kept with the task."),
    "access_programs": _refuse("Baton has no access programs."),
    "context_management": _refuse("The conversation is passed on as it is.", []),
    "conversation": _refuse("Send `previous_response_id`, or the whole conversation."),
    "image": _refuse("Answers are text."),
    "moderation": PARAMETERS["moderation"],
    "prompt": _refuse("Baton keeps no prompts: send the text."),
}
"""The parameters of `POST /v1/responses`."""


COMPACTION: Final[Mapping[str, Parameter]] = {
    "model": PARAMETERS["model"],
    "input": _honour("As of a response. The messages of the user come back word for word."),
    "instructions": _honour("A message before the conversation, for the writing of the notes."),
    "previous_response_id": _honour("The conversation up to that response is put before `input`."),
    "baton": PARAMETERS["baton"],
    "service_tier": _ignore("Baton has one service tier."),
    "prompt_cache_key": _ignore("Providers cache by prefix."),
    "prompt_cache_retention": _ignore("Providers decide."),
    "prompt_cache_options": PARAMETERS["prompt_cache_options"],
    "image": _refuse("Images are passed on as they are."),
}
"""The parameters of `POST /v1/responses/compact`."""


INPUT_TOKENS: Final[Mapping[str, Parameter]] = {
    **{name: RESPONSES[name] for name in ("model", "input", "instructions", "previous_response_id", "tools")},
    **{name: RESPONSES[name] for name in ("tool_choice", "parallel_tool_calls", "text", "reasoning", "truncation")},
    "conversation": RESPONSES["conversation"],
    "personality": _refuse("Write it into the instructions."),
}
"""The parameters of `POST /v1/responses/input_tokens`."""


def sort_fields(body: Mapping[str, Any], table: Mapping[str, Parameter]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a body that a request's model reads, and the names of those that are noted as ignored.
    Raises `InvalidRequest` for a field that is not in the table, and for one that is refused with its value."""
    fields = drop_nulls(body)
    for name in fields:
        if name not in table:
            raise unknown_parameter(name if FIELD_NAME.fullmatch(name) else None)
    read: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in fields.items():
        row = table[name]
        if row.decision == "refused":
            _check_neutral(name, value, row)
        else:
            read[name] = value
        if row.decision != "honoured":
            ignored.append(name)
    return read, tuple(sorted(ignored))


def _check_neutral(name: str, value: object, row: Parameter) -> None:
    """Raise `InvalidRequest` for a refused field, unless its value asks for nothing."""
    if any(type(value) is type(neutral) and value == neutral for neutral in row.neutral):
        return
    code, which = "unsupported_parameter", ""
    if row.neutral:
        code, which = "unsupported_value", " with this value"
    raise InvalidRequest(f"'{name}' is not supported{which}. {row.note} Leave it out.", param=name, code=code)


def drop_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body without those that are null: a null stands for an absent field."""
    return {name: value for name, value in body.items() if value is not None}


def document() -> str:
    """Return the decisions as a Markdown page."""
    tables = [
        *_table(PARAMETERS),
        NEWER,
        *_table(RESPONSES),
        COMPACT,
        *_table(COMPACTION),
        COUNT,
        *_table(INPUT_TOKENS),
        LEGACY,
        *_table(COMPLETIONS),
    ]
    absent = [f"| `/v1/{family}` | {reason[0].upper()}{reason[1:]}. |" for family, reason in NOT_OFFERED.items()]
    return "\n".join([INTRODUCTION, *tables, ABSENT, *absent])


def _table(decisions: Mapping[str, Parameter]) -> list[str]:
    lines = ["| parameter | | |", "|---|---|---|"]
    for name, row in decisions.items():
        decision: str = row.decision
        if row.neutral:
            values = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
            decision = f"refused unless {values}"
        lines.append(f"| `{name}` | {decision} | {row.note} |")
    return lines


Body = TypeVar("Body", bound=BaseModel)


def read_fields(model: type[Body], fields: Mapping[str, Any]) -> Body:
    """Return the fields of a body as their model. Raises `InvalidRequest` that names the field at fault."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error, fields) from None


def check_kinds(tools: object, *kinds: str) -> None:
    """Raise `InvalidRequest` for the first tool whose type is not among `kinds`: the caller's side would not run it.

    A value that is not a tool, or has no type, passes: the models of requests refuse it.
    """
    if not isinstance(tools, list):
        return
    for place, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            param, expected = f"tools[{place}].type", " or ".join(map(repr, kinds))
            raise InvalidRequest(
                f"Invalid value for '{param}': it should be {expected}. Nobody here would run a tool of another type: "
                "leave it out, or offer a function that your side runs.",
                param=param,
                code="unsupported_value",
            )


INTRODUCTION: Final = """\
# Parameters of `POST /v1/chat/completions`, of `/v1/responses`, of the legacy, and what is not served

Every parameter that OpenAI documents has a row; any other is a 400 (`unknown_parameter`).

* *honoured*: read and acted upon. What is passed to a worker whose wire format has no place for it is left out and
  noted in that call's record (`call.intended`, `ignored`).
* *ignored*: checked, noted in the run's record (`ignored` of `GET /v1/runs/{id}`), and without effect.
* *refused*: a 400 that names it, unless its value asks for nothing.

`app/gateway/wire/parameters.py` decides, and writes this page.
"""
NEWER: Final = """
## `POST /v1/responses`
"""
COMPACT: Final = """
## `POST /v1/responses/compact`

A run of the tier writes notes of the conversation. The output has the messages of the user and one `compaction` item,
whose `encrypted_content` holds the notes, encoded and not encrypted; send the whole output as the beginning of the next
request's `input`. An item that another server made is a 400 `invalid_encrypted_content`.
"""
COUNT: Final = """
## `POST /v1/responses/input_tokens`

An estimate of the tokens of the input, with its tools; nothing is sent to a worker.
"""
LEGACY: Final = """
## `POST /v1/completions`

The legacy route: a run like any other, whose only message is the prompt.
"""

ABSENT: Final = """
## What is not served

Every route of these families is a 404 (`unknown_url`) with this message, whatever the body. Point a second client at
whoever has it. `app/gateway/wire/unsupported_routes.py` decides.

| family | |
|---|---|"""


# -- options of a run that every format has

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""A level of effort as requests name it, in ascending order."""
EFFORTS: Final[tuple[str, ...]] = get_args(Effort)

Label = Annotated[str, StringConstraints(pattern=LABEL_FORM)]
WorkerName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
MOST_TOOLS: Final = 128
"""The most tools on offer at once."""
MOST_LISTED: Final = 1_024
"""Entries of `tools`, where deferred ones are among them."""
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""The name of a tool or of a schema, as OpenAI allows it."""
ToolText = Annotated[str, StringConstraints(max_length=65_536)]
"""The description of a tool, or the grammar of its text."""


class WireModel(BaseModel):
    """Types as they stand in JSON, without conversions; unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


NARROWED: Final = tuple(limit for limit in LIMITS.values() if limit.budget is not None)
"""The limits that a request may narrow."""


def _budget(limit: Limit) -> Any:
    """Return the type of one limit in a request's budget."""
    if limit.unit == "count":
        return Annotated[int, Field(ge=1, le=limit.budget)] | None
    return Annotated[float, Field(gt=0, le=limit.budget)] | None


_FIELDS: Final[dict[str, Any]] = {
    limit.name: (_budget(limit), Field(default=None, description=limit.about)) for limit in NARROWED
}
_Budget: Final[Any] = create_model("_Budget", __base__=WireModel, **_FIELDS)


class Budget(_Budget):  # type: ignore[misc]  # its fields are those of `NARROWED`
    """Limits of this run; they can only narrow those of the effort level."""


class PartOptions(WireModel):
    """The `baton` field of a message, of a part of one, or of a tool's result."""

    labels: Annotated[list[Label], Field(max_length=64, fail_fast=True)] | None = None


def labels_on(*holders: BaseModel) -> frozenset[str]:
    """Return the labels that stand on messages, parts and results, and on whatever is inside them."""
    labels: frozenset[str] = frozenset()
    for holder in holders:
        fields = holder.__dict__
        options = fields.get("baton")
        if options is not None:
            labels = labels.union(options.labels or ())
        inner = fields.get("content") or fields.get("output") or fields.get("source")
        if inner is None or inner.__class__ is str:  # most messages are plain text
            continue
        if not isinstance(inner, list):
            inner = [inner]
        labels |= labels_on(*inner)
    return labels


class PoolChoice(WireModel):
    """The workers of the tier's pool that may be used."""

    allow: Annotated[list[WorkerName], Field(min_length=1, max_length=256, fail_fast=True)] | None = None
    deny: Annotated[list[WorkerName], Field(max_length=256, fail_fast=True)] | None = None
    pin: WorkerName | None = None

    def overrides(self) -> Overrides:
        """Return the choice in the form in which an order has it."""
        return Overrides(frozenset(self.allow or ()), frozenset(self.deny or ()), self.pin)


class BatonOptions(WireModel):
    """The `baton` field of a request."""

    budget: Budget | None = None
    pool: PoolChoice | None = None
    labels: Annotated[list[Label], Field(max_length=16, fail_fast=True)] | None = None
    plan: dict[str, Any] | None = None
    stream_steps: bool | None = None
    on_disconnect: Literal["cancel", "finish"] | None = None
    explore: bool | None = None
    """False: a selector takes what it holds for best, and leaves nothing to chance."""
    shadow: bool | None = None
    """False: the request is not tried a second time, under what its tier is compared with."""
    approval: Literal["required"] | None = None
    """`required`: no step of the run begins before somebody has approved its plan."""


NO_OPTIONS: Final = BatonOptions()
WHOLE_POOL: Final = PoolChoice()


def resolve_tier(catalog: Catalog, key: KeyRow, model: str) -> Tier:
    """Return the tier that a model id means for this key; raises `NotFound` (`model_not_found`) if there is none that
    the key may use."""
    tier = tier_for(catalog, model)
    if tier is None or (key.tiers and tier.name not in key.tiers):
        raise NotFound(
            "The model does not exist or this key may not use it; GET /v1/models lists those that it may.",
            param="model",
            code="model_not_found",
        )
    return tier


class RequestOptions(Struct, frozen=True):
    """The parts of a request that its order needs besides the task, in the same form for every wire format."""

    model: str
    wire: Mapping[str, Any]
    """The wire format of the reply, and its options of that format, such as `stream_options`."""
    effort: str | None = None
    extension: BatonOptions | None = None
    """The `baton` field."""
    streams: bool = False
    ignored: tuple[str, ...] = ()
    on_messages: frozenset[str] = frozenset()
    """The labels that stand on messages and their parts, and those of the run whose conversation this one continues."""


def order_of(task: Task, tier: Tier, key: KeyRow, options: RequestOptions) -> Order:
    """Return the order of a run for a request."""
    effort = nearest_effort(tier, options.effort)
    extension = options.extension or NO_OPTIONS
    pool = extension.pool or WHOLE_POOL
    streams_steps = options.streams and extension.stream_steps is True
    wire = dict(options.wire)
    if streams_steps:
        wire["steps"] = True
    on_all = key.labels.union(extension.labels or ())
    return Order(
        task=task,
        tier=tier,
        model=options.model,
        effort=effort,
        limits=narrow_limits(tier.efforts[effort], extension.budget, key.max_usd),
        capped=is_capped(extension.budget, key.max_usd),
        tenant=key.tenant,
        key=key.id,
        labels=on_all | options.on_messages,
        on_messages=options.on_messages - on_all,
        overrides=pool.overrides(),
        plan=_parse_own_plan(extension.plan, tier),
        streams=options.streams,
        stream_steps=streams_steps,
        ignored=options.ignored,
        explore=extension.explore is not False,
        shadow=extension.shadow is not False,
        approval=extension.approval == "required",
        on_disconnect=extension.on_disconnect,
        wire=wire,
    )


def _parse_own_plan(plan: Mapping[str, Any] | None, tier: Tier) -> Mapping[str, Any] | None:
    """Return the caller's own plan, in Baton's own form; it may come in the published one."""
    if plan is None or not is_published(plan):
        return plan
    try:
        return from_lists(plan, tier.pool)
    except PlanRejected as rejected:
        message = f"The plan is not valid: {'; '.join(rejected.reasons)[:1_800]}"
        raise InvalidRequest(message, param="baton.plan", code="invalid_plan") from None


def nearest_effort(tier: Tier, effort: str | None) -> str:
    """Return the tier's level for the effort that a request asks for: the same one, or the next lower one that the tier
    has, or else its lowest. Without an effort it is the tier's own.

    Raises `InvalidRequest` if no tier can have the level.
    """
    if effort is None:
        return tier.effort
    if effort in tier.efforts:
        return effort
    if effort not in EFFORTS:
        raise InvalidRequest(f"There is no effort {effort!r}; the levels are {', '.join(EFFORTS)}.", param="effort")
    levels = [level for level in EFFORTS if level in tier.efforts]
    lower = [level for level in levels if EFFORTS.index(level) < EFFORTS.index(effort)]
    if lower:
        return lower[-1]
    if levels:
        return levels[0]
    return tier.effort


def narrow_limits(limits: Limits, budget: Budget | None, max_usd: int | None) -> Limits:
    """Return `limits` narrowed by the request's budget and the key's cap. Dollars become micro-dollars, rounded
    down."""
    lower: dict[str, Any] = {}
    if budget is not None:
        for limit in NARROWED:
            value = getattr(budget, limit.name)
            if value is None:
                continue
            if limit.unit == "usd":
                value = _micro_dollars(value)
            lower[limit.name] = min(getattr(limits, limit.name), value)
    if max_usd is not None:
        lower["usd"] = min(lower.get("usd", limits.usd), max_usd)
    if not lower:
        return limits
    return replace(limits, **lower)


def is_capped(budget: Budget | None, max_usd: int | None) -> bool:
    """Return True if the request's budget or the key's cap says what the run may cost."""
    return max_usd is not None or (budget is not None and budget.usd is not None)


def _micro_dollars(dollars: float) -> int:
    return int((Decimal(repr(dollars)) * MILLION).to_integral_value(ROUND_FLOOR))


if __name__ == "__main__":
    print(document())
