"""Models of the replies of `/v1/models`. They document, as those of `replies.py` do."""

from typing import Any, Final, Literal

from pydantic import Field, create_model

from app.core.pool.catalog import LIMITS
from app.gateway.openapi.replies import Reply


class PriceRange(Reply):
    """Dollars per million tokens, over the workers of the pool."""

    min: float
    max: float


class Prices(Reply):
    """Prices of the tier's workers, as far as they are known; 0 where none is."""

    input: PriceRange
    cached: PriceRange
    output: PriceRange
    unpriced: list[str]
    """The workers whose price is not known."""


_FIELDS: Final[dict[str, Any]] = {
    limit.name: (int if limit.unit == "count" else float, Field(description=limit.about)) for limit in LIMITS.values()
}
_Limits: Final[Any] = create_model("_Limits", __base__=Reply, **_FIELDS)


class TierLimits(_Limits):  # type: ignore[misc]  # its fields are those of `catalog.LIMITS`
    """Limits of one run, which the executor enforces whatever the conductor proposes."""


class TierExtension(Reply):
    """The tier that a model id stands for."""

    tier: str
    alias: bool
    served_by: str | None
    """The subject whose conductor, pool and prices these are, because an operator has put it in the place of the tier's
    own definition, for more than a share of the runs; null where that serves."""
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
    """The models that the key may use; all of them, unless the request says how many."""

    object: Literal["list"]
    data: list[Model]
    first_id: str | None
    last_id: str | None
    has_more: bool
