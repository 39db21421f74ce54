"""Models of the replies of `/v1/models`. They document, as those of `replies.py` do."""

from typing import Literal

from app.gateway.openapi.replies import Reply


class PriceRange(Reply):
    """Dollars per million tokens, over the workers of the pool."""

    min: float
    max: float


class Prices(Reply):
    """Prices of the tier's workers."""

    input: PriceRange
    cached: PriceRange
    output: PriceRange


class TierLimits(Reply):
    """Limits of one run, which the executor enforces whatever the conductor proposes."""

    steps: int
    """Steps of one round."""
    fan_out: int
    """Steps that may run at the same time."""
    rounds: int
    """Workflows, one after the other."""
    depth: int
    """Levels of nested workflows; 0: none."""
    attempts: int
    """Provider calls for one step, retries and replacements included."""
    output_tokens: int
    """Of one call."""
    tokens: int
    """Input and output over all calls of the run."""
    usd: float
    """Dollars over all calls of the run."""
    seconds: float
    """From a request to its reply; each turn of a run that calls the caller's tools has as many."""
    tool_wait: float
    """Seconds for which a run waits for the results of the caller's tools before it expires."""


class TierExtension(Reply):
    """The tier that a model id stands for."""

    tier: str
    alias: bool
    description: str
    conductor: str
    pool: list[str]
    effort: str
    efforts: dict[str, TierLimits]
    prices: Prices
    catalog: str
    rehearsal: bool


class Model(Reply):
    """A tier, or an alias of one, as OpenAI's model object."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    baton: TierExtension


class ModelList(Reply):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[Model]
