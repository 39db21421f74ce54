"""Workers, tiers and their limits: the pool file as data (D9). Money is in integer micro-dollars everywhere.

There is no provider's secret in here: a provider's key is looked up by its environment variable in `process/config/`
and handed to the adapter that `wiring.py` builds.
"""

import re
from collections.abc import Mapping
from math import inf
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Usage
from app.core.pool.rules import Attributes, ExcludingRule, Rule
from app.core.pool.wire_formats import FORMATS, Auth, WireFormat

MILLION = 1_000_000
FIRST_BYTE_SECONDS = 120.0
"""Seconds to the first byte, where the pool file does not say otherwise."""
PATIENCE_SHARE, PATIENCE_SECONDS = 1 / 9, 10.0
"""The share of a tier's time, and the least seconds, for which a worker may be silent while there is another one."""
TOKENS_A_SECOND = 25.0
"""The speed at which a worker is expected to write a reply that comes in one piece, if its card does not say."""
FAIR_SHARE = 0.25
"""The least share of a worker's own deadline that a call must have been granted before being late counts against it."""
SILENT_SHARE = 0.6
"""The share of a run's time that a worker may be silent for, where another could still take over."""


class Amount(Struct, frozen=True):
    """An amount of micro-dollars and tokens together, as a call holds and spends them (D7)."""

    usd: int = 0
    tokens: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        """Return the sum of both amounts."""
        return Amount(self.usd + other.usd, self.tokens + other.tokens)

    def minus(self, other: "Amount") -> "Amount":
        """Return what is left of this amount without the other one, which is never below 0."""
        return Amount(max(self.usd - other.usd, 0), max(self.tokens - other.tokens, 0))

    def covers(self, other: "Amount") -> bool:
        """Return True if the other amount can be paid from this one."""
        return other.usd <= self.usd and other.tokens <= self.tokens

    def shortage(self, price: "Amount") -> str:
        """Return what does not suffice for a price: `usd`, `tokens`, or an empty string."""
        if price.usd > self.usd:
            return "usd"
        if price.tokens > self.tokens:
            return "tokens"
        return ""


class Price(Struct, frozen=True):
    """Micro-dollars per million tokens.

    `written` is for input that the provider writes to its cache, and `reasoning` for the part of the output that is
    reasoning; None: as other input and output. A call with more than `long_after` input tokens costs `long` altogether.
    """

    input: int = 0
    output: int = 0
    cached: int = 0
    written: int | None = None
    reasoning: int | None = None
    long_after: int = 0
    long: "Price | None" = None

    def cost(self, usage: Usage) -> int:
        """Return the cost of `usage` in micro-dollars, rounded up so that a sum is never below the bill."""
        if self.long is not None and usage.input > self.long_after:
            return self.long.cost(usage)
        uncached_tokens = max(usage.input - usage.cached, 0)
        exact = uncached_tokens * self.input + usage.cached * self.cached + usage.output * self.output
        if usage.written and self.written is not None:
            exact += min(usage.written, uncached_tokens) * (self.written - self.input)
        if self.reasoning is not None:
            exact += usage.reasoning * (self.reasoning - self.output)
        return -(-exact // MILLION)

    def worst(self, input_tokens: int, output_tokens: int) -> int:
        """Return the most that a call with at most so many tokens can cost, in micro-dollars, at any of its rates."""
        rates = (self.input, self.cached, self.written or 0)
        exact = input_tokens * max(rates) + output_tokens * max(self.output, self.reasoning or 0)
        usual = -(-exact // MILLION)
        if self.long is None or input_tokens <= self.long_after:
            return usual
        return max(usual, self.long.worst(input_tokens, output_tokens))


class CalibrationResult(Struct, frozen=True):
    """The number of built-in tasks of a domain that a worker has solved, out of those it tried (`calibration.py`)."""

    domain: str
    passed: float
    tried: int


class Card(Struct, frozen=True):
    """The description of a worker for conductors, and its properties for the policy."""

    strengths: tuple[str, ...] = ()
    context: int = 128_000
    max_output: int = 8_192
    modalities: frozenset[str] = frozenset({"text"})
    tools: bool = False
    region: str | None = None
    retention: str | None = None
    clearance: frozenset[str] = frozenset()
    speed: float | None = None
    """Output tokens per second, where known."""
    measured: tuple[CalibrationResult, ...] = ()
    """The results of a calibration; never written by hand."""

    @property
    def cleared(self) -> frozenset[str]:
        """Return the labels of what it may see: its clearance, and `region:` and `retention:` with what the card says
        of each. Of a region or retention that is not known nothing follows."""
        where = (("region", self.region), ("retention", self.retention))
        return self.clearance.union(f"{what}:{value}" for what, value in where if value)


class Deadlines(Struct, frozen=True):
    """Seconds for one call: to connect, to the first byte, between two reads, for all of it, and the least that it
    takes."""

    connect: float = 5.0
    first: float = FIRST_BYTE_SECONDS
    gap: float = 60.0
    total: float = 1_800.0
    exact: bool = False
    """True if `first` holds as it is for a reply that comes in one piece, too."""
    quickest: float = 0.0
    """The seconds within which it answers nothing, as the pool file states them. With less time left it is not called,
    until this process knows how long its calls take."""

    def patience(self, seconds: float, writing: float) -> float:
        """Return the seconds of silence after which another worker is asked, in a tier whose runs may take `seconds`.

        They are a ninth of those, so 20 s of 180 s; then the `writing` of a reply that comes in one piece. A `first`
        that the pool file sets is taken as it is.
        """
        first = (
            self.first
            if self.first != FIRST_BYTE_SECONDS
            else min(max(seconds * PATIENCE_SHARE, PATIENCE_SECONDS), FIRST_BYTE_SECONDS)
        )
        return first + writing

    def within(self, remaining_seconds: float, *, live: bool, spare: bool, patience: float = inf) -> "Deadlines":
        """Return these deadlines, cut to the `remaining_seconds` of a run. `spare` says that another worker could take
        over from one that hangs, and does so after `patience` seconds of silence.

        A reply that is not `live` says nothing until it is complete, so its first byte may take as long as all of it.
        """
        own = self.first if live else self.total
        first = min(own, remaining_seconds * SILENT_SHARE) if spare else min(own, remaining_seconds)
        exact = spare and patience < first
        if exact:
            first = patience
        return Deadlines(
            min(self.connect, remaining_seconds),
            first,
            min(self.gap, remaining_seconds),
            min(self.total, remaining_seconds),
            exact,
        )

    def fair(self, call_deadlines: "Deadlines", seconds: float, silence: float, patience: float = inf) -> bool:
        """Return whether a call that exceeded `call_deadlines` counts against the worker, whose own deadlines these
        are.

        It does not if a run had so little time left that hardly any was granted, or ended while the worker was still
        talking. `seconds` is what the call took, `silence` how long nothing had come at its end, `patience` as in
        `within`.
        """
        if call_deadlines.first < min(FAIR_SHARE * self.first, patience):
            return False
        return not (
            call_deadlines.total <= seconds and call_deadlines.total < self.total and silence < FAIR_SHARE * self.gap
        )


class Route(Struct, frozen=True):
    """Settings of the connections to a provider; empty ones are not used.

    `proxy` is the address of an HTTP proxy, `proxy_credentials_variable` the environment variable that holds its
    `user:password`. The others are absolute paths of files in PEM form: `ca` replaces the certificate authorities that
    the machine trusts, and the client certificate is shown to servers that ask for one.
    """

    proxy: str = ""
    proxy_credentials_variable: str | None = None
    ca: str = ""
    client_certificate: str = ""
    client_key: str = ""


class EndpointSpec(Struct, frozen=True):
    """One of several endpoints of a provider. `weight` is its share of the calls, relative to the others'."""

    name: str
    base_url: str
    weight: float = 1.0
    key_variable: str | None = None
    """None: the provider's."""


DIRECT = Route()
"""No proxy, the machine's certificate authorities and no client certificate."""


class ProviderSpec(Struct, frozen=True):
    """A wire format plus an endpoint. `streams` is false for servers that only answer whole replies."""

    name: str
    format: WireFormat
    base_url: str = ""
    key_variable: str | None = None
    streams: bool = True
    structured: bool = True
    """True if it constrains decoding to a JSON schema (`response_format: json_schema`)."""
    options: Mapping[str, str] = {}
    route: Route = DIRECT
    endpoints: tuple[EndpointSpec, ...] = ()
    """Empty where there is one, at `base_url`."""
    auth: Auth = "key"
    """How its requests are authenticated; see `providers/authentication.py`."""
    region: str = ""
    """The region that AWS's signatures name."""
    api_version: str = ""
    """The `api-version` in the query of each request, as Azure wants it; empty: none."""
    traceparent: bool = True
    """True if the headers of the trace are sent with each request."""

    @property
    def gives_logprobs(self) -> bool:
        """Return whether the operator declares that its models return log-probabilities."""
        return FORMATS[self.format].has_logprobs and self.options.get("logprobs") == "true"

    @property
    def json_mode(self) -> bool:
        """Return whether its models can be held to any JSON object (`response_format: json_object`)."""
        return self.structured and FORMATS[self.format].has_json_mode

    @property
    def keeps_open(self) -> bool:
        """Return whether the operator declares that its decoders also follow schemas with open objects and optional
        fields."""
        return self.structured and self.options.get("open_schemas") == "true"

    def for_call(self, model: str, *, with_tools: bool) -> "ProviderSpec":
        """Return it as it is for a call of this model: not `structured` where the model takes no form beside tools."""
        form_or_tools = FORMATS[self.format].form_or_tools
        if with_tools and form_or_tools and re.search(form_or_tools, model):
            return replace(self, structured=False)
        return self


class Worker(Struct, frozen=True):
    """One model of the pool. `model` is the provider's name for it."""

    name: str
    provider: str
    model: str
    price: Price = Price()
    card: Card = Card()
    deadlines: Deadlines = Deadlines()
    drops: frozenset[str] = frozenset()
    """Sampling parameters that are left out of its requests, in addition to those that its wire format lacks."""
    refuses: frozenset[str] = frozenset()
    """Sampling parameters that keep a task from this worker: a task that has one is given to other workers only."""
    api_version: str = ""
    """The version of the API that its requests name, for formats that have one; empty: its provider's."""
    excluding_rules: tuple[ExcludingRule, ...] = ()
    """The rules of the pool file that keep it from requests with certain labels."""
    priced: bool = True
    """False if the pool file names no price: it is not called for a run to which budgets apply."""
    declassifies: frozenset[str] = frozenset()
    """The labels that its output loses, although it has read them: the pool file trusts it to leave out what they stand
    for."""

    def writing_seconds(self, tokens: int) -> float:
        """Return the seconds in which it is expected to write so many tokens."""
        return tokens / (self.card.speed or TOKENS_A_SECOND)


def attributes(worker: Worker) -> Attributes:
    """Return the attributes of a worker that rules know."""
    card = worker.card
    return Attributes(worker.name, worker.provider, card.region, card.retention, card.clearance)


Unit = Literal["count", "usd", "seconds"]
"""`count`: a whole number; `usd`: micro-dollars, which are dollars wherever people read or write them."""


class Limit(Struct, frozen=True):
    """Everything that the rest of the service knows of one limit, but for the code that enforces it.

    It is read by the pool file's entries, the `budget` of a request, `GET /v1/models` with its description in OpenAPI,
    and `baton runs show`.
    """

    about: str
    words: str
    """The words after its value; `{s}` is the ending of the plural."""
    unit: Unit = "count"
    least: float = 1
    most: float | None = None
    """The range in a pool file; `least` itself is allowed only for counts and dollars."""
    budget: float | None = None
    """The largest value that a request's `budget` may name; None: a request cannot narrow it."""
    unsaid: float | None = None
    """A value that `baton runs show` does not mention."""
    name: str = ""
    """The name of its field in `Limits`."""


class Limits(Struct, frozen=True):
    """The limits of one run. Every figure is enforced by the executor, whatever the conductor proposes.

    This is the one place where a limit is declared; `LIMITS` has the same by name.
    """

    steps: Annotated[int, Limit(about="Steps of one round.", words="step{s} a round", most=32, budget=1_000)] = 5
    fan_out: Annotated[int, Limit(about="Steps that may run at the same time.", words="step{s} at once", most=32)] = 4
    rounds: Annotated[
        int,
        Limit(
            about="Workflows, one after the other: after each but the last the conductor is shown the answer and "
            "accepts it or plans again.",
            words="round{s}",
            most=8,
            budget=1_000,
            unsaid=1,
        ),
    ] = 1
    depth: Annotated[
        int,
        Limit(
            about="Levels of nested workflows, which the conductor opens for a step that it takes itself; 0: none. "
            "Their steps count to the limit of their round.",
            words="level{s} of nested workflows",
            least=0,
            most=4,
            unsaid=0,
        ),
    ] = 0
    attempts: Annotated[
        int,
        Limit(
            about="Provider calls for one step in one turn, retries and replacements included. Calls that a rate limit "
            "refused come on top, at most as many.",
            words="attempt{s} a step",
            most=16,
        ),
    ] = 4
    output_tokens: Annotated[int, Limit(about="Output tokens of one call.", words="output token{s} a call")] = 4_096
    floor_tokens: Annotated[
        int,
        Limit(
            about="Output tokens to which a call may be cut where the money that is left does not pay for more; a "
            "call that would have to be cut further is given to a cheaper worker, or is not made.",
            words="output token{s} a call where money is short",
            unsaid=256,
        ),
    ] = 256
    tokens: Annotated[
        int,
        Limit(about="Input and output tokens over all calls of the run, the conductor's included.", words="token{s}"),
    ] = 100_000_000
    usd: Annotated[
        int,
        Limit(
            about="Dollars over all calls of the run.",
            words="",
            unit="usd",
            least=0,
            budget=1_000_000,
        ),
    ] = 2 * MILLION
    seconds: Annotated[
        float,
        Limit(
            about="Seconds from a request to its reply; each turn of a run that calls the caller's tools has as many.",
            words="",
            unit="seconds",
            least=0,
            most=86_400,
            budget=86_400,
        ),
    ] = 300.0
    tool_wait: Annotated[
        float,
        Limit(
            about="Seconds for which a run waits for the results of the caller's tools before it expires.",
            words=" for tool results",
            unit="seconds",
            least=0,
            most=604_800,
        ),
    ] = 600.0

    @property
    def floor(self) -> int:
        """Return the output tokens below which no call is cut: `floor_tokens`, or all of a call's where those are
        fewer."""
        return min(self.floor_tokens, self.output_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the limits by name, as `run.admitted` records them: those in `NEWER_LIMITS` only where they have not
        their default, because release 0.1.0 cannot read a journal that names a limit which it does not know."""
        limits = {name: getattr(self, name) for name in Limits.__struct_fields__}
        for name, default in NEWER_LIMITS.items():
            if limits[name] == default:
                del limits[name]
        return limits

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Limits":
        """Return the inverse of `to_json`. It ignores limits that it does not know, which a newer process may have
        written; one that an older process did not know has its default."""
        return cls(**{name: body[name] for name in Limits.__struct_fields__ if name in body})


FIRST_LIMITS = frozenset(
    ("steps", "fan_out", "rounds", "depth", "attempts", "output_tokens", "tokens", "usd", "seconds", "tool_wait")
)
"""The limits that release 0.1.0 knows."""
NEWER_LIMITS: Mapping[str, float] = {
    name: getattr(Limits(), name) for name in Limits.__struct_fields__ if name not in FIRST_LIMITS
}
"""All other limits, with their defaults."""
LIMITS: Mapping[str, Limit] = {
    name: replace(hint.__metadata__[0], name=name) for name, hint in get_type_hints(Limits, include_extras=True).items()
}
"""Every limit by its name."""


Template = Literal[
    "answer", "reason", "plan-solve", "plan-reason", "answer-check", "reason-check", "plan-reason-check", "judge",
    "mixture",
]  # fmt: skip
"""Templates that a selector may fill with workers; `plan/templates.py` defines each."""


SELECTOR_ROUNDS = 2
"""The most rounds of a selector: one for the answer, and one for what becomes of it."""


class SelectorSpec(Struct, frozen=True):
    """The templates and helpers of a selector, and how it weighs cost and explores."""

    templates: tuple[Template, ...] = ("answer", "plan-reason", "answer-check")
    planners: tuple[str, ...] = ()
    checkers: tuple[str, ...] = ()
    """Names of the workers that may plan and check; if empty, those whose card says so."""
    explore: float = 0.05
    """The share of requests that is spread evenly over all arms."""
    decay: float = 0.995
    """The share by which a rating counts a day later."""
    cost: float = 0.2
    """The share of a right answer's worth that a full cost takes away."""
    full_usd: int = 50_000
    """Micro-dollars of a full cost."""
    embedder: str | None = None
    """The worker whose embeddings are features in addition to the words."""
    patience: float = 1.0
    """Seconds that an embedding may take."""
    trusted: tuple[str, ...] = ()
    """The tenants from whose ratings all tenants learn."""
    peers: float = 0.02
    """The largest share of a tenant's choices that the ratings of one other tenant may decide."""
    raters: tuple[tuple[str, float], ...] = ()
    """The weights of sources of ratings; a source that is not named has 1."""
    daily: int = 0
    """The most ratings of one API key that count on one day; 0: all of them."""


class ConductorSpec(Struct, frozen=True):
    """The policy that plans for a tier. `worker` is the served model for `model`, and for a `selector` whose plan is
    one of its arms; `shape` and `workers` are for `fixed`."""

    kind: Literal["model", "fixed", "random", "selector"]
    worker: str | None = None
    shape: Literal["single", "chain", "fan_out", "self_consistency"] = "single"
    workers: tuple[str, ...] = ()
    width: int = 3
    """Branches of `fan_out` and `self_consistency`."""
    whole: bool = False
    """True if a shape with more steps than a run may have is refused; else it is cut."""
    again: bool = False
    """True if a fixed conductor has the answer checked in all further rounds that the limits allow."""
    temperature: float = 0.0
    prompt: Literal["general", "compact", "worded", "cards"] = "general"
    """The form of a model's prompt: words that any chat model understands, or the tokens of a model that was trained
    here."""
    share: float = 0.4
    """The share of a run's time for all plans of the first round together; in a further round, the share of the time
    that was left when its plan was requested. The rest is for the steps."""
    reasons: bool = False
    """True if a model is asked for the reasons of its plan, which are shown to auditors and to nobody else."""
    message_chars: int = 8_000
    """Characters of one message of the conversation that a model with the general prompt is shown; of a longer one it
    is shown the beginning and the end, and the length and the outline of what is left out. 0: all of every message."""
    probe: float = 2.5
    """Seconds that a probe for one token may take before a conductor that sends nothing else counts as unavailable; 0
    disables the probe."""
    selector: SelectorSpec | None = None


ShadowMode = Literal["plan", "whole"]


class ShadowSpec(Struct, frozen=True):
    """The other tier, conductor or worker under which a share of a tier's runs is repeated after they have ended.

    Exactly one of `tier`, `conductor` and `worker` is named: another tier, a version of the tier's own conductor, or
    one worker that answers alone.
    """

    share: float
    """The share of the tier's runs, above 0 and up to 1."""
    tier: str = ""
    conductor: str = ""
    worker: str = ""
    mode: ShadowMode = "whole"
    """`plan`: the shadow is planned, and nothing of it is executed."""
    usd_per_day: int = MILLION
    """Micro-dollars that all shadows of the tier may spend in a day (UTC)."""
    max_waiting: int = 100
    """Runs that may wait for their shadow; further ones get none."""
    except_tenants: frozenset[str] = frozenset()
    except_keys: frozenset[str] = frozenset()
    """Tenants, and public ids of API keys, whose runs get no shadow."""

    @property
    def subject(self) -> str:
        """Return the name of what is tried, with its kind: `tier baton-ultra`, `conductor mine-1a2b3c` or `worker
        old`."""
        kinds = {"tier": self.tier, "conductor": self.conductor, "worker": self.worker}
        return next(f"{kind} {name}" for kind, name in kinds.items() if name)


class PromotionSpec(Struct, frozen=True):
    """The conditions under which another conductor may take over a tier's runs, and under which it keeps them.

    Each difference is that of the candidate less the live one; a condition holds if the unfavourable end of its
    interval does. None: there is no such condition.
    """

    min_pairs: int = 200
    """Comparisons below which nothing is decided."""
    min_success_difference: float | None = None
    """The least difference of the shares of successes: -0.02 allows two points less."""
    max_cost_increase: float | None = None
    """The most by which the mean cost may rise, as a share of the live one's."""
    max_latency_increase: float | None = None
    """The most by which the mean time may rise, as a share of the live one's."""
    max_degraded: float | None = None
    """The largest share of degraded runs."""
    min_answered_difference: float = -0.02
    """The least difference of the shares of runs with an answer. This one is not in the way of a promotion until it is
    breached."""
    watch_hours: float = 72.0
    """Hours after a promotion for which it is watched, and rolled back once a condition is breached."""


OnExpiry = Literal["refuse", "fallback-plan"]
"""The two ends of a wait for an approval: the run ends, or it goes on with a plan that needs none."""


class ApprovalRule(Struct, frozen=True):
    """The rule by which plans of a tier need an approval: `[tiers.NAME.approval]`. Money is in micro-dollars."""

    always: bool = False
    above_usd: int | None = None
    workers: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    labels: frozenset[str] = frozenset()
    seconds: float = 86_400.0
    on_expiry: OnExpiry = "refuse"
    four_eyes: bool = True

    def names(self, worker: Worker) -> bool:
        """Return True if a plan needs an approval before this worker is called, because it or its provider is named."""
        return worker.name in self.workers or worker.provider in self.providers


REQUESTED, TIER = "requested", "tier"
"""The reasons for which every plan of a run needs an approval: its request asks for it, or its tier does."""


class ApprovalTerms(Struct, frozen=True):
    """The terms of one run. Money is in micro-dollars, `seconds` is how long a plan waits for a decision."""

    reasons: tuple[str, ...] = ()
    """The reasons why every plan of the run needs an approval: `requested`, `tier`, `label:NAME`; empty if not every
    plan does."""
    above_usd: int | None = None
    """The price above which a plan needs one: what the run has spent, and the worst case of the plan's steps."""
    workers: tuple[str, ...] = ()
    """The workers that no step may call without one."""
    seconds: float = 86_400.0
    on_expiry: OnExpiry = "refuse"
    four_eyes: bool = True
    """True if the key that began the run must not approve its plans."""

    def to_json(self) -> dict[str, Any]:
        """Return the terms in plain JSON values."""
        return {
            "reasons": list(self.reasons),
            "above_usd": self.above_usd,
            "workers": list(self.workers),
            "seconds": self.seconds,
            "on_expiry": self.on_expiry,
            "four_eyes": self.four_eyes,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "ApprovalTerms":
        """Return the inverse of `to_json`; fields of newer releases are ignored."""
        return cls(
            reasons=tuple(body.get("reasons", ())),
            above_usd=body.get("above_usd"),
            workers=tuple(body.get("workers", ())),
            seconds=body.get("seconds", 86_400.0),
            on_expiry=body.get("on_expiry", "refuse"),
            four_eyes=body.get("four_eyes", True),
        )


class Tier(Struct, frozen=True):
    """The model as callers choose it. `efforts` maps each effort level to its limits and holds `effort`."""

    name: str
    pool: tuple[str, ...]
    conductor: ConductorSpec
    fallback: str
    efforts: Mapping[str, Limits]
    effort: str = "medium"
    description: str = ""
    shadow: ShadowSpec | None = None
    promotion: PromotionSpec | None = None
    approval: ApprovalRule | None = None
    """None: no plan of the tier needs an approval of its own accord."""
    served_by: str = ""
    """The subject whose pool and conductor these are, in place of the tier's own (`serving.py`); empty in the pool
    file."""

    @property
    def learns_as(self) -> str:
        """Return the tier in whose name its selector learns: the one whose conductor this is."""
        kind, _, name = self.served_by.partition(" ")
        return name if kind == "tier" else self.name


class Evaluation(Struct, frozen=True):
    """The settings of evaluation: whether arms of tiers are served (`arms.py`), and which models may conduct in them in
    addition to a tier's own."""

    arms: bool = False
    conductors: tuple[str, ...] = ()


class Catalog(Struct, frozen=True):
    """The whole pool file. `digest` is the SHA-256 of its snapshot (`snapshot.py`), recorded with each run."""

    providers: Mapping[str, ProviderSpec]
    workers: Mapping[str, Worker]
    tiers: Mapping[str, Tier]
    aliases: Mapping[str, str]
    digest: str
    evaluation: Evaluation = Evaluation()
    rehearsal: bool = False
    """True when no real provider is configured and the answers come from simulated workers."""
    rules: tuple[Rule, ...] = ()
    """The rules of the pool file, as the auditor reads them; `Worker.excluding_rules` are compiled from them."""

    def tier(self, model: str) -> Tier | None:
        """Return the tier of this name, with aliases resolved once. `arms.tier_for` says what a caller's model id
        means."""
        return self.tiers.get(self.aliases.get(model, model))
