"""Workers, tiers and their limits: the pool file as data (D9). Money is in integer micro-dollars everywhere.

There is no provider's secret in here: a provider's key is looked up by its environment variable in `config.py` and
handed to the adapter that `wiring.py` builds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from app.core.chat import Usage

WireFormat = Literal["openai", "anthropic", "gemini", "rehearsal"]
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Micro-dollars per million tokens."""

    input: int = 0
    output: int = 0
    cached: int = 0

    def cost(self, usage: Usage) -> int:
        """What `usage` costs in micro-dollars, rounded up so that a sum is never below the bill."""
        fresh = max(usage.input - usage.cached, 0)
        exact = fresh * self.input + usage.cached * self.cached + usage.output * self.output
        return -(-exact // MILLION)


@dataclass(frozen=True, slots=True)
class Card:
    """What a conductor is told about a worker, and what policy asks of it."""

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


@dataclass(frozen=True, slots=True)
class ProviderSpec:
    """A wire format plus an endpoint. `streams` is false for servers that only answer whole replies."""

    name: str
    format: WireFormat
    base_url: str = ""
    key_variable: str | None = None
    streams: bool = True
    structured: bool = True
    """Whether it constrains decoding to a JSON schema (`response_format: json_schema`)."""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """One model of the pool. `model` is the provider's name for it."""

    name: str
    provider: str
    model: str
    price: Price = Price()
    card: Card = Card()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Every figure is enforced by the executor, whatever the conductor proposes."""

    steps: int = 5
    fan_out: int = 4
    rounds: int = 1
    attempts: int = 4
    """Provider calls for one step, retries and replacements included."""
    output_tokens: int = 4_096
    """For one call."""
    tokens: int = 400_000
    """Input plus output over all calls of the run, the conductor's included."""
    usd: int = 2 * MILLION
    """Micro-dollars."""
    seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class ConductorSpec:
    """Which policy plans for a tier. `worker` is the served model for `model`; `shape` and `workers` are for
    `fixed`."""

    kind: Literal["model", "fixed"]
    worker: str | None = None
    shape: Literal["single", "chain", "fan_out", "self_consistency"] = "single"
    workers: tuple[str, ...] = ()
    width: int = 3
    """Branches of `fan_out` and `self_consistency`."""
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Tier:
    """What a caller picks as the model. `efforts` maps each effort level to its limits and holds `effort`."""

    name: str
    pool: tuple[str, ...]
    conductor: ConductorSpec
    fallback: str
    efforts: Mapping[str, Limits]
    effort: str = "medium"
    description: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The whole pool file. `digest` is the SHA-256 of its source, kept with each run."""

    providers: Mapping[str, ProviderSpec]
    workers: Mapping[str, Worker]
    tiers: Mapping[str, Tier]
    aliases: Mapping[str, str]
    digest: str
    rehearsal: bool = False
    """True when no real provider is configured and the answers come from simulated workers."""

    def tier(self, model: str) -> Tier | None:
        """The tier that a caller's model id means, aliases resolved once."""
        return self.tiers.get(self.aliases.get(model, model))
