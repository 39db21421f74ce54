"""The request of `POST /v1/chat/completions`: from checked JSON values to an `Order`.

`PARAMETERS` decides what becomes of every top-level field: read, noted as ignored (where OpenAI too may ignore it), or
refused with a 400 that names it. Nothing is dropped silently. A null stands for an absent field. Values never occur in
an error; names do, if they look like a name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_FLOOR, Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, ValidationError

from app.core.chat import Image, Message, Part, Sampling, Task, Text
from app.core.policy import Overrides
from app.core.pool import MILLION, Catalog, Limits, Tier
from app.errors import InvalidRequest, NotFound
from app.order import Order
from app.store.protocol import KeyRow

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
IMAGE = r"^(https?://[!-~]+|data:image/(png|jpe?g|gif|webp);base64,[A-Za-z0-9+/=_-]+)$"

IGNORED: Final = "ignored"
READ: Final = "read"
PARAMETERS: Mapping[str, str | tuple[object, ...]] = {
    **dict.fromkeys(("model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop"), READ),
    **dict.fromkeys(("seed", "presence_penalty", "frequency_penalty", "stream", "stream_options", "user"), READ),
    **dict.fromkeys(("metadata", "reasoning_effort", "baton"), READ),
    **dict.fromkeys(("store", "service_tier", "parallel_tool_calls", "safety_identifier", "verbosity"), IGNORED),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), IGNORED),
    # Known to OpenAI, not honoured here yet: refused unless the value asks for nothing.
    "n": (1,),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
}
"""`READ`, `IGNORED`, or the values that a refused parameter may have all the same."""

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}$")]
WorkerName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
TokenCap = Annotated[int, Field(ge=1, le=10_000_000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class _Wire(BaseModel):
    """Types as they stand in JSON, without conversions; unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TextPart(_Wire):
    """A text part."""

    type: Literal["text"]
    text: str


class RefusalPart(_Wire):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(_Wire):
    """A picture inline or by reference."""

    url: Annotated[str, StringConstraints(pattern=IMAGE)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(_Wire):
    """An image part."""

    type: Literal["image_url"]
    image_url: ImageUrl


AnyPart = Annotated[TextPart | ImagePart | RefusalPart, Discriminator("type")]


class WireMessage(_Wire):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[AnyPart], Field(min_length=1, max_length=512, fail_fast=True)] | None = None
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    refusal: str | None = None


class Budget(_Wire):
    """What this run may use at most; it can only narrow the limits of the effort level."""

    usd: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None
    steps: Annotated[int, Field(ge=1, le=1_000)] | None = None


class PoolChoice(_Wire):
    """Which workers of the tier's pool may be used."""

    allow: Annotated[list[WorkerName], Field(max_length=256, fail_fast=True)] = []
    deny: Annotated[list[WorkerName], Field(max_length=256, fail_fast=True)] = []
    pin: WorkerName | None = None


class Extension(_Wire):
    """The `baton` field of a request."""

    budget: Budget | None = None
    pool: PoolChoice | None = None
    labels: Annotated[list[Label], Field(max_length=16, fail_fast=True)] = []
    plan: dict[str, Any] | None = None
    stream_steps: bool = False


class StreamOptions(_Wire):
    """`include_obfuscation` is accepted and not needed: see IGNORED."""

    include_usage: bool = False
    include_obfuscation: bool = False


MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class ChatRequest(_Wire):
    """The fields that are read. Defaults are plain values: pydantic would copy a record for each request."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=2_048, fail_fast=True)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: TokenCap | None = None
    max_completion_tokens: TokenCap | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4, fail_fast=True)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    baton: Extension | None = None


NOTHING_ASKED: Final = Extension()
WHOLE_POOL: Final = PoolChoice()


def read_request(body: Mapping[str, Any]) -> tuple[ChatRequest, tuple[str, ...]]:
    """The request, and the names of parameters that are ignored; raises `InvalidRequest` naming the field at fault."""
    given = {name: value for name, value in body.items() if value is not None}
    ignored = tuple(sorted(name for name, value in given.items() if _decide(name, value) == IGNORED))
    given = {name: value for name, value in given.items() if PARAMETERS[name] is READ}
    try:
        request = ChatRequest.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given) from None
    if request.stream_options and not request.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise InvalidRequest("Send max_tokens or max_completion_tokens, not both.", param="max_tokens")
    return request, ignored


def _decide(name: str, value: object) -> str:
    """`READ` or `IGNORED`; raises for what is unknown or cannot be honoured."""
    decision = PARAMETERS.get(name)
    if decision is None:
        param = name if NAME.fullmatch(name) else None
        shown = f": {param}" if param else ""
        raise InvalidRequest(f"Unrecognized request argument{shown}.", param=param, code="unknown_parameter")
    if isinstance(decision, str):
        return decision
    if not any(type(value) is type(neutral) and value == neutral for neutral in decision):
        raise InvalidRequest(
            f"'{name}' is not supported with this value yet; leave it out.", param=name, code="unsupported_parameter"
        )
    return IGNORED


SAID_BY_PYDANTIC = frozenset(
    {"missing", "string_type", "int_type", "float_type", "bool_type", "list_type", "dict_type", "model_type"}
    | {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "literal_error"}
    | {"too_long", "too_short", "string_too_long", "string_too_short", "int_from_float", "model_attributes_type"}
)
"""Kinds of errors whose texts hold no input."""


def _refusal(error: ValidationError, given: Mapping[str, Any]) -> InvalidRequest:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(found, key=lambda one: len(one["loc"]))
    param = _path(deepest["loc"], given)
    kind = deepest["type"]
    if kind == "extra_forbidden":
        return InvalidRequest(f"Unknown or unsupported field '{param}'.", param=param, code="unknown_parameter")
    said = deepest["msg"] if kind in SAID_BY_PYDANTIC else "This is not a valid value"
    return InvalidRequest(f"Invalid value for '{param}': {said}.", param=param, code="invalid_value")


def _path(loc: Sequence[int | str], given: object) -> str:
    """A location as callers write it, without pydantic's names of union members and without names that are none."""
    path, value = "", given
    for place, entry in enumerate(loc):
        last = place == len(loc) - 1
        if isinstance(entry, int) and isinstance(value, list) and entry < len(value):
            path, value = f"{path}[{entry}]", value[entry]
        elif isinstance(entry, str) and isinstance(value, dict) and (entry in value or last):
            if not NAME.fullmatch(entry):
                break
            path, value = f"{path}.{entry}" if path else entry, value.get(entry)
    return path[:256]


def resolve_tier(catalog: Catalog, key: KeyRow, model: str) -> Tier:
    """The tier that a model id means for this key; `NotFound` (`model_not_found`) if there is none that it may use."""
    tier = catalog.tier(model)
    if tier is None or (key.tiers and tier.name not in key.tiers):
        raise NotFound(
            "The model does not exist or this key may not use it; GET /v1/models lists those that it may.",
            param="model",
            code="model_not_found",
        )
    return tier


def to_order(request: ChatRequest, ignored: tuple[str, ...], tier: Tier, key: KeyRow) -> Order:
    """What the request asks of a run."""
    effort = nearest_effort(tier, request.reasoning_effort)
    extension = request.baton or NOTHING_ASKED
    pool = extension.pool or WHOLE_POOL
    return Order(
        task=_task(request),
        tier=tier,
        model=request.model,
        effort=effort,
        limits=narrowed(tier.efforts[effort], extension.budget, key.max_usd),
        tenant=key.tenant,
        key=key.id,
        labels=key.labels.union(extension.labels),
        overrides=Overrides(frozenset(pool.allow), frozenset(pool.deny), pool.pin),
        plan=extension.plan,
        streams=request.stream,
        stream_steps=request.stream and extension.stream_steps,
        ignored=ignored,
    )


def nearest_effort(tier: Tier, asked: str | None) -> str:
    """The tier's level for an asked effort: the same, else the next lower one that it has, else its lowest."""
    if asked is None or asked in tier.efforts:
        return asked or tier.effort
    known = [level for level in EFFORTS if level in tier.efforts]
    below = [level for level in known if EFFORTS.index(level) < EFFORTS.index(asked)]
    return below[-1] if below else (known or [tier.effort])[0]


def narrowed(limits: Limits, budget: Budget | None, max_usd: int | None) -> Limits:
    """`limits` narrowed by the request's budget and the key's cap; dollars become micro-dollars, rounded down."""
    if max_usd is None and budget is None:
        return limits
    budget = budget or Budget()
    caps = [limits.usd]
    if max_usd is not None:
        caps.append(max_usd)
    if budget.usd is not None:
        caps.append(int((Decimal(repr(budget.usd)) * MILLION).to_integral_value(ROUND_FLOOR)))
    return replace(
        limits,
        usd=min(caps),
        seconds=min(limits.seconds, budget.seconds or limits.seconds),
        steps=min(limits.steps, budget.steps or limits.steps),
    )


def _task(request: ChatRequest) -> Task:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=stop,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
    )
    messages = tuple(_message(message, place) for place, message in enumerate(request.messages))
    return Task(messages, sampling, request.user, request.metadata)


def _message(message: WireMessage, place: int) -> Message:
    content = message.content
    if isinstance(content, str):
        return Message(message.role, (Text(content),), message.name)
    if content is None:
        if message.role != "assistant" or message.refusal is None:
            raise _bad_content(f"messages[{place}].content", "must be a text or a list of parts")
        return Message(message.role, (Text(message.refusal),), message.name)
    parts = tuple(_part(part, message.role) for part in content)
    if None in parts:
        param = f"messages[{place}].content[{parts.index(None)}]"
        raise _bad_content(param, "a message of this role cannot hold such a part")
    return Message(message.role, tuple(part for part in parts if part is not None), message.name)


def _part(part: TextPart | ImagePart | RefusalPart, role: str) -> Part | None:
    """A part, or None where the role cannot hold it."""
    if isinstance(part, TextPart):
        return Text(part.text)
    if isinstance(part, ImagePart):
        return Image(part.image_url.url, part.image_url.detail) if role == "user" else None
    return Text(part.refusal) if role == "assistant" else None


def _bad_content(param: str, said: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': {said}.", param=param, code="invalid_value")
