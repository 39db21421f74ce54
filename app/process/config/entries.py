"""The pool file's tables as pydantic models: each checks itself alone and becomes its core type.

Numbers come from `tomllib` with `parse_float=Decimal`, so that no price ever passes through a binary fraction.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from msgspec.structs import replace
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from app.core.message.chat import SAMPLING
from app.core.pool.catalog import (
    LIMITS,
    MILLION,
    ApprovalRule,
    Card,
    ConductorSpec,
    Deadlines,
    EndpointSpec,
    Evaluation,
    Limit,
    Limits,
    OnExpiry,
    Price,
    PromotionSpec,
    ProviderSpec,
    Route,
    SelectorSpec,
    ShadowMode,
    ShadowSpec,
    Template,
    Worker,
)
from app.core.pool.rules import Match, Rule
from app.core.pool.wire_formats import Auth, WireFormat
from app.process.config.settings import url_problem

ALL = "*"
"""The entry that stands for all workers, in place of `pool = "all"`; no worker can have this name."""
EFFORTS: tuple["Effort", ...] = ("minimal", "low", "medium", "high", "xhigh", "max")
MAX_PRICE = Decimal(10_000)
"""USD; more, for a million tokens or for a run, is taken for a slip of the decimal point."""
MAX_COUNT = 1_000_000_000_000
"""The most of any count, where no lower bound holds: at the highest price the cost of so many tokens fits into the 64
bits of JSON and of the database."""

Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
PARAMETERS = tuple(name for name in SAMPLING if name != "max_tokens")
"""The sampling parameters that a worker may lack; `max_tokens` bounds what a call costs."""
Modality = Literal["text", "image", "pdf", "audio", "video"]


def _dollars(value: object) -> int:
    """Convert USD, a number or a decimal string, to micro-dollars, exactly or not at all."""
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise ValueError('must be an amount in USD; write it as 0.15 or "0.15"')
    try:
        amount = Decimal(value)
    except InvalidOperation:
        raise ValueError('is not an amount in USD; write it as 0.15 or "0.15"') from None
    if not amount.is_finite():
        raise ValueError("is not a finite amount; give USD as a plain number")
    if amount < 0:
        raise ValueError("is negative; give USD, or 0 for what costs nothing")
    if amount > MAX_PRICE:
        raise ValueError("is above $10,000; check the decimal point (prices are for a million tokens)")
    micro = amount * MILLION
    if micro != micro.to_integral_value():
        raise ValueError("is finer than a micro-dollar; round it up to six decimals")
    return int(micro)


def _number(value: object) -> object:
    if isinstance(value, Decimal):
        return float(value)
    return value


def _option(value: object) -> object:
    """Return an option as a string, as adapters take it; a TOML boolean or number may be written plainly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Decimal):
        return str(value)
    return value


def _base_url(value: str) -> str:
    if not value:
        return ""
    problem = url_problem(value)
    if problem:
        raise ValueError(problem)
    return value.rstrip("/")


def _proxy(value: str) -> str:
    if not value:
        return ""
    problem = url_problem(value)
    if problem is not None and "credentials" in problem:
        problem = "holds credentials; put user:password into a variable of its own and name it in proxy_credentials"
    parts = urlsplit(value)
    if problem is None and (parts.scheme != "http" or parts.path not in ("", "/")):
        problem = "is not the address of an HTTP proxy; write it as http://host:port"
    if problem:
        raise ValueError(problem)
    return value.rstrip("/")


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("is not the name of an environment variable; never write a key itself into this file")
    return value


def _pool(value: object) -> object:
    if value == "all":
        return [ALL]
    return value


def _distinct(value: list[str]) -> list[str]:
    twice = sorted({name for name in value if value.count(name) > 1})
    if twice:
        raise ValueError(f"lists {', '.join(twice)} more than once; name each once")
    return value


def _message_chars(value: int) -> int:
    if 0 < value < LEAST_MESSAGE_CHARS:
        raise ValueError(f"must be 0, for all of every message, or at least {LEAST_MESSAGE_CHARS}")
    return value


def _parameter(value: str) -> str:
    if value not in PARAMETERS:
        raise ValueError(f"is no sampling parameter; use one of {', '.join(PARAMETERS)}")
    return value


def _version(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
        raise ValueError("is not the name of an API version; write it as 2023-06-01")
    return value


Dollars = Annotated[int, BeforeValidator(_dollars)]
Number = Annotated[float, BeforeValidator(_number)]
Names = Annotated[list[str], AfterValidator(_distinct)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[Number, Field(gt=0, le=86_400, allow_inf_nan=False)]


Parameters = dict[Annotated[str, AfterValidator(_parameter)], Literal["take", "drop", "refuse"]]
"""How each sampling parameter is treated: it is sent, left out, or keeps a task that has it from the worker."""
CHOICES = SelectorSpec()
"""A selector's defaults."""
CHOOSING = frozenset(SelectorSpec.__struct_fields__)
_MODEL = frozenset({"worker", "share", "probe", "temperature", "prompt", "reasons", "message_chars"})
LEAST_MESSAGE_CHARS = 1_000
USES: Mapping[str, frozenset[str]] = {
    "model": _MODEL,
    "fixed": frozenset({"shape", "workers", "width", "again", "temperature"}),
    "selector": _MODEL | CHOOSING,
}
"""The settings of each kind of conductor."""


class Entry(BaseModel):
    """A table of the file: exact types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class DeadlinesEntry(Entry):
    """Seconds for one call to connect, to begin, between two reads, in all, and at the least; what is left out is
    inherited."""

    connect: Seconds | None = None
    first: Seconds | None = None
    gap: Seconds | None = None
    total: Seconds | None = None
    quickest: Seconds | None = None

    def core(self, inherited: Deadlines) -> Deadlines:
        """Return these deadlines over the inherited ones."""
        return replace(inherited, **self.model_dump(exclude_none=True))


ROUTE_FIELDS = frozenset({"proxy", "proxy_credentials", "ca", "client_certificate", "client_key"})
"""The settings of how a provider is reached."""


class EndpointEntry(Entry):
    """One of a provider's `endpoints`. Without `name` it is called by its place, from 1; without `key` it has the
    provider's."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = ""
    base_url: Annotated[str, AfterValidator(_base_url), Field(min_length=1)]
    weight: Annotated[Number, Field(gt=0, le=1_000, allow_inf_nan=False)] = 1.0
    key: Annotated[str, AfterValidator(_variable)] | None = None

    def core(self, place: int) -> EndpointSpec:
        """Return the core record; `place` counts from 0."""
        return EndpointSpec(self.name or str(place + 1), self.base_url, self.weight, self.key)


class ProviderEntry(Entry):
    """`[providers.NAME]`. `key` and `proxy_credentials` are names of environment variables; see `Route` for the rest of
    what says how a provider is reached."""

    format: WireFormat
    base_url: Annotated[str, AfterValidator(_base_url)] = ""
    key: Annotated[str, AfterValidator(_variable)] | None = None
    streams: bool = True
    structured: bool = True
    options: dict[str, Annotated[str, BeforeValidator(_option)]] = {}
    sampling: Parameters = {}
    endpoints: list[EndpointEntry] = []
    auth: Auth = "key"
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] | None = None
    api_version: Annotated[str, AfterValidator(_version)] = ""
    traceparent: bool = True
    deadlines: DeadlinesEntry = DeadlinesEntry()
    proxy: Annotated[str, AfterValidator(_proxy)] = ""
    proxy_credentials: Annotated[str, AfterValidator(_variable)] | None = None
    ca: str = ""
    client_certificate: str = ""
    client_key: str = ""

    def core(self, name: str, base_url: str) -> ProviderSpec:
        """Return the core record; `base_url` is the one in force, overrides applied."""
        return ProviderSpec(
            name=name,
            format=self.format,
            base_url=base_url,
            key_variable=self.key,
            streams=self.streams,
            structured=self.structured,
            options=dict(self.options),
            route=Route(self.proxy, self.proxy_credentials, self.ca, self.client_certificate, self.client_key),
            auth=self.auth,
            region=self.region or "",
            api_version=self.api_version,
            traceparent=self.traceparent,
            endpoints=tuple(endpoint.core(place) for place, endpoint in enumerate(self.endpoints)),
        )


class RatesEntry(Entry):
    """USD per million tokens. Without `cached`, cached input is counted like any input, so never too low; likewise
    `cache_write`, for input that the provider writes to its cache, and `reasoning`, for that part of the output."""

    input: Dollars
    output: Dollars
    cached: Dollars | None = None
    cache_write: Dollars | None = None
    reasoning: Dollars | None = None

    def core(self) -> Price:
        """Return the prices in micro-dollars per million tokens."""
        cached = self.cached
        if cached is None:
            cached = self.input
        return Price(self.input, self.output, cached, self.cache_write, self.reasoning)


class LongEntry(RatesEntry):
    """The prices of a call with more input tokens than `above`."""

    above: Count


class PriceEntry(RatesEntry):
    """The prices of a worker; `long` has those of long prompts, where they are others."""

    long: LongEntry | None = None

    def core(self) -> Price:
        """Return the prices in micro-dollars per million tokens."""
        price = super().core()
        if self.long is None:
            return price
        return replace(price, long_after=self.long.above, long=self.long.core())


class WorkerEntry(Entry):
    """`[workers.NAME]`: where it is, what it costs, and its card. `pooled = false` keeps it out of `pool = "all"`."""

    provider: str
    model: Annotated[str, Field(min_length=1, max_length=200)]
    price: PriceEntry | None = None
    pooled: bool = True
    strengths: Names = []
    context: Count = 128_000
    max_output: Count = 8_192
    modalities: list[Modality] = ["text"]
    tools: bool = False
    region: str | None = None
    retention: str | None = None
    clearance: Names = []
    declassifies: Names = []
    speed: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = None
    sampling: Parameters = {}
    anthropic_version: Annotated[str, AfterValidator(_version)] = ""
    deadlines: DeadlinesEntry = DeadlinesEntry()

    def core(self, name: str, inherited: Deadlines, sampling: Mapping[str, str]) -> Worker:
        """Return the core record; `inherited` are its provider's deadlines, `sampling` its provider's table."""
        table = {**sampling, **self.sampling}
        card = Card(
            strengths=tuple(self.strengths),
            context=self.context,
            max_output=self.max_output,
            modalities=frozenset(self.modalities) | {"text"},
            tools=self.tools,
            region=self.region,
            retention=self.retention,
            clearance=frozenset(self.clearance),
            speed=self.speed,
        )
        price = Price()
        if self.price is not None:
            price = self.price.core()
        return Worker(
            name=name,
            provider=self.provider,
            model=self.model,
            price=price,
            card=card,
            deadlines=self.deadlines.core(inherited),
            drops=frozenset(parameter for parameter, treatment in table.items() if treatment != "take"),
            refuses=frozenset(parameter for parameter, treatment in table.items() if treatment == "refuse"),
            api_version=self.anthropic_version,
            priced=self.price is not None,
            declassifies=frozenset(self.declassifies),
        )


def _limit(limit: Limit) -> Any:
    """Return the type of one limit in the pool file."""
    if limit.unit == "usd":
        return Dollars | None
    if limit.unit == "seconds":
        return Annotated[Number, Field(gt=limit.least, le=limit.most, allow_inf_nan=False)] | None
    return Annotated[int, Field(ge=int(limit.least), le=limit.most or MAX_COUNT)] | None


_FIELDS: Final[dict[str, Any]] = {limit.name: (_limit(limit), None) for limit in LIMITS.values()}
_Limits: Final[Any] = create_model("_Limits", __base__=Entry, **_FIELDS)


class LimitsEntry(_Limits):  # type: ignore[misc]  # its fields are those of `catalog.LIMITS`
    """The limits of one run; what is left out is inherited. `usd` is in dollars."""

    def core(self, inherited: Limits) -> Limits:
        """Return these limits over the inherited ones."""
        return replace(inherited, **self.model_dump(exclude_none=True))


class ConductorEntry(Entry):
    """`conductor = { kind = "model", worker = ... }`, `{ kind = "fixed", shape = ..., workers = [...] }`, or
    `{ kind = "selector", templates = [...] }`."""

    kind: Literal["model", "fixed", "selector"]
    worker: str | None = None
    shape: Literal["single", "chain", "fan_out", "self_consistency"] = "single"
    workers: Names = []
    width: Annotated[int, Field(ge=1, le=16)] = 3
    again: bool = False
    temperature: Annotated[Number, Field(ge=0, le=2, allow_inf_nan=False)] = 0.0
    prompt: Literal["general", "compact", "worded", "cards"] = "general"
    reasons: bool = False
    message_chars: Annotated[int, Field(ge=0, le=MAX_COUNT), AfterValidator(_message_chars)] = 8_000
    share: Annotated[Number, Field(gt=0, le=1, allow_inf_nan=False)] = 0.4
    probe: Annotated[Number, Field(ge=0, le=60, allow_inf_nan=False)] = 2.5
    templates: Annotated[list[Template], AfterValidator(_distinct), Field(min_length=1)] = list(CHOICES.templates)
    planners: Names = []
    checkers: Names = []
    explore: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] = CHOICES.explore
    decay: Annotated[Number, Field(ge=0.5, le=1, allow_inf_nan=False)] = CHOICES.decay
    cost: Annotated[Number, Field(ge=0, lt=1, allow_inf_nan=False)] = CHOICES.cost
    full_usd: Dollars = CHOICES.full_usd
    embedder: str | None = None
    patience: Annotated[Number, Field(gt=0, le=60, allow_inf_nan=False)] = CHOICES.patience
    trusted: Names = []
    peers: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] = CHOICES.peers
    raters: dict[str, Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)]] = {}
    daily: Annotated[int, Field(ge=0, le=MAX_COUNT)] = CHOICES.daily

    @model_validator(mode="after")
    def _fits_kind(self) -> "ConductorEntry":
        if self.kind == "model" and self.worker is None:
            raise ValueError('needs `worker`, the model that plans; or use kind = "fixed"')
        if misplaced := sorted(self.model_fields_set - USES[self.kind] - {"kind"}):
            other = next(kind for kind, fields in USES.items() if set(misplaced) & fields)
            raise ValueError(f'does not use {", ".join(misplaced)}; remove it, or use kind = "{other}"')
        if self.reasons and (self.prompt != "general" or self.worker is None):
            raise ValueError('asks for reasons, which only a `worker` with prompt = "general" gives; remove reasons')
        return self

    def core(self) -> ConductorSpec:
        """Return the core record."""
        fields = self.model_dump()
        choices = {name: fields.pop(name) for name in CHOOSING}
        for name in ("templates", "planners", "checkers", "trusted"):
            choices[name] = tuple(choices[name])
        choices["raters"] = tuple(sorted(self.raters.items()))
        fields["workers"] = tuple(self.workers)
        fields["selector"] = None
        if self.kind == "selector":
            fields["selector"] = SelectorSpec(**choices)
        return ConductorSpec(**fields)


class MatchEntry(Entry):
    """Values of workers' attributes; a worker matches if it has one of the values of each attribute that is named."""

    worker: Names = []
    provider: Names = []
    region: Names = []
    retention: Names = []
    clearance: Names = []

    @model_validator(mode="after")
    def _check_has_condition(self) -> "MatchEntry":
        empty = sorted([name for name in self.model_fields_set if not getattr(self, name)])
        if empty:
            raise ValueError(f"names no value of {', '.join(empty)}; name at least one")
        if not self.model_fields_set:
            raise ValueError("names no value; name at least one")
        return self

    def core(self) -> Match:
        """Return the core record."""
        return Match(**{name: frozenset(values) for name, values in self.model_dump().items()})


def _match(entry: MatchEntry | None) -> Match | None:
    if entry is None:
        return None
    return entry.core()


class RuleEntry(Entry):
    """`[rules.NAME]`: requests with all of `labels` are shown to workers that match `allow` and not `deny`, only; to
    those that match `approve` only after somebody has approved the plan."""

    labels: Names = []
    allow: MatchEntry | None = None
    deny: MatchEntry | None = None
    approve: MatchEntry | None = None

    @model_validator(mode="after")
    def _decides(self) -> "RuleEntry":
        if self.allow is None and self.deny is None and self.approve is None:
            raise ValueError("decides nothing; give it `allow`, `deny` or `approve`")
        return self

    def core(self, name: str) -> Rule:
        """Return the core record."""
        return Rule(name, frozenset(self.labels), _match(self.allow), _match(self.deny), _match(self.approve))


class EvaluationEntry(Entry):
    """`[evaluation]`: whether the arms of tiers are models too, and which workers may conduct there beside a tier's
    own."""

    arms: bool = False
    conductors: Names = []

    def core(self) -> Evaluation:
        """Return the core record."""
        return Evaluation(self.arms, tuple(self.conductors))


class ShadowEntry(Entry):
    """`[tiers.NAME.shadow]`, or `shadow = "NAME"` with the name of a tier or of a worker."""

    tier: str | None = None
    conductor: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    worker: str | None = None
    share: Annotated[Number, Field(gt=0, le=1, allow_inf_nan=False)] = 0.05
    mode: ShadowMode = "whole"
    usd_per_day: Dollars = MILLION
    max_waiting: Annotated[int, Field(ge=1, le=10_000)] = 100
    except_tenants: Names = []
    except_keys: Names = []

    @model_validator(mode="after")
    def _names_one(self) -> "ShadowEntry":
        missing = (self.tier, self.conductor, self.worker).count(None)
        if missing != 2:
            raise ValueError("must name one of tier, conductor and worker; name what is to be tried")
        return self

    def core(self) -> ShadowSpec:
        """Return the core record."""
        return ShadowSpec(
            share=self.share,
            tier=self.tier or "",
            conductor=self.conductor or "",
            worker=self.worker or "",
            mode=self.mode,
            usd_per_day=self.usd_per_day,
            max_waiting=self.max_waiting,
            except_tenants=frozenset(self.except_tenants),
            except_keys=frozenset(self.except_keys),
        )


class PromotionEntry(Entry):
    """`[tiers.NAME.promotion]`: the conditions of a promotion; what is left out and has no default is no
    condition."""

    min_pairs: Annotated[int, Field(ge=2, le=1_000_000)] = 200
    min_success_difference: Annotated[Number, Field(ge=-1, le=1, allow_inf_nan=False)] | None = None
    max_cost_increase: Annotated[Number, Field(gt=-1, le=1_000, allow_inf_nan=False)] | None = None
    max_latency_increase: Annotated[Number, Field(gt=-1, le=1_000, allow_inf_nan=False)] | None = None
    max_degraded: Annotated[Number, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    min_answered_difference: Annotated[Number, Field(ge=-1, le=0, allow_inf_nan=False)] = -0.02
    watch_hours: Annotated[Number, Field(gt=0, le=720, allow_inf_nan=False)] = 72.0

    def core(self) -> PromotionSpec:
        """Return the core record."""
        return PromotionSpec(**self.model_dump())


def _shadow(value: object) -> object:
    """Return `shadow = "NAME"` in full."""
    if isinstance(value, str):
        return {"tier": value}
    return value


class ApprovalEntry(Entry):
    """`[tiers.NAME.approval]`: which plans of the tier somebody has to approve before a step of them begins, for how
    long a plan waits, and what becomes of it then."""

    always: bool = False
    above_usd: Annotated[int, BeforeValidator(_dollars)] | None = None
    workers: Names = []
    providers: Names = []
    labels: Names = []
    seconds: Annotated[Number, Field(gt=0, le=2_592_000, allow_inf_nan=False)] = 86_400.0
    on_expiry: OnExpiry = "refuse"
    four_eyes: bool = True

    def core(self) -> ApprovalRule:
        """Return the core record."""
        return ApprovalRule(
            always=self.always,
            above_usd=self.above_usd,
            workers=tuple(self.workers),
            providers=tuple(self.providers),
            labels=frozenset(self.labels),
            seconds=float(self.seconds),
            on_expiry=self.on_expiry,
            four_eyes=self.four_eyes,
        )


class TierEntry(Entry):
    """`[tiers.NAME]`; the name is the model id that callers use. Without `fallback`, the pool's first worker is it."""

    pool: Annotated[Names, BeforeValidator(_pool), Field(min_length=1)]
    conductor: ConductorEntry = ConductorEntry(kind="fixed")
    fallback: str | None = None
    effort: Effort = "medium"
    description: str = ""
    limits: LimitsEntry = LimitsEntry()
    efforts: dict[Effort, LimitsEntry] = {}
    shadow: Annotated[ShadowEntry | None, BeforeValidator(_shadow)] = None
    promotion: PromotionEntry | None = None
    approval: ApprovalEntry | None = None


def levels(limits: LimitsEntry, efforts: Mapping[Effort, LimitsEntry]) -> dict[str, Limits]:
    """Return limits for every level that a caller may ask for; a missing one takes the nearest defined, the lower of
    two."""
    inherited = limits.core(Limits())
    defined = [place for place, level in enumerate(EFFORTS) if level in efforts]
    if not defined:
        return dict.fromkeys(EFFORTS, inherited)
    limits_by_level: dict[str, Limits] = {}
    for index, level in enumerate(EFFORTS):
        nearest = min(defined, key=lambda place: (abs(place - index), place))
        limits_by_level[level] = efforts[EFFORTS[nearest]].core(inherited)
    return limits_by_level
