"""`GET /v1/models`: tiers and their aliases as OpenAI's model objects, with limits, pool and prices in `baton`.

A request with the header `anthropic-version` gets them in Anthropic's form.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from app.core.plan.arms import is_arm, list_arm_ids, tier_for
from app.core.pool.catalog import MILLION, Card, Catalog, Limits, Tier
from app.core.pool.serving import serve_tier
from app.errors import InvalidRequest
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import message_replies, model_replies, operations, replies
from app.gateway.wire import query
from app.gateway.wire.parameters import resolve_tier
from app.store.protocol import KeyRow

EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
"""The effort levels of Anthropic's API."""
ANY_ERROR: Final = (replies.Error, message_replies.AnthropicError)
ANTHROPIC_VERSION: Final = {
    "name": "anthropic-version",
    "in": "header",
    "required": False,
    "description": "With this header, replies and errors have Anthropic's form.",
    "schema": {"type": "string"},
}


def routes(context: GatewayContext, keys: Keys) -> APIRouter:
    """Return the model routes; any valid key may ask, and sees the tiers that it may use."""
    router = APIRouter(prefix="/v1/models", tags=["models"])
    anybody = Annotated[Caller, keys.needs()]
    created = int(context.now())

    @router.get(
        "",
        operation_id="list_models",
        summary="List the models.",
        response_model=model_replies.ModelList | message_replies.AnthropicModelList,
        responses=operations.replies(400, 401, 500, 503, bodies=ANY_ERROR),
        openapi_extra={"parameters": [ANTHROPIC_VERSION]},
    )
    async def list_models(
        request: Request, caller: anybody, filters: Annotated[query.ModelFilters, Query()]
    ) -> Response:
        """The tiers that the key may use, and their aliases, with limits, pool and prices."""
        catalog, describe_model = context.catalog(), _description(request)
        names, has_more = _page(list(_usable_models(catalog, caller.key)), filters)
        page: dict[str, Any] = {}
        if describe_model is describe:
            page["object"] = "list"
        page["data"] = [describe_model(catalog, _serving_tier(context, catalog, name), name, created) for name in names]
        page |= {"first_id": None, "last_id": None, "has_more": has_more}
        if names:
            page |= {"first_id": names[0], "last_id": names[-1]}
        return json_reply(page)

    @router.get(
        "/{model:path}",
        operation_id="get_model",
        summary="Describe a model.",
        response_model=model_replies.Model | message_replies.AnthropicModel,
        responses=operations.replies(401, 404, 500, 503, bodies=ANY_ERROR),
        openapi_extra={"parameters": [ANTHROPIC_VERSION]},
    )
    async def get_model(
        model: Annotated[str, Path(description="A tier or an alias of one.", examples=["baton-mini"])],
        request: Request,
        caller: anybody,
    ) -> Response:
        """One tier with limits, pool and prices."""
        catalog = context.catalog()
        resolve_tier(catalog, caller.key, model)
        description = _description(request)(catalog, _serving_tier(context, catalog, model), model, created)
        return json_reply(description)

    return router


def _usable_models(catalog: Catalog, key: KeyRow) -> Iterator[str]:
    """Yield the ids of the models that a key may use: tiers, then their aliases, then their arms."""
    usable = [tier for tier in catalog.tiers.values() if not key.tiers or tier.name in key.tiers]
    for tier in usable:
        yield tier.name
    for alias in catalog.aliases:
        if catalog.tier(alias) in usable:
            yield alias
    for tier in usable:
        yield from list_arm_ids(catalog, tier)


def _page(names: list[str], filters: query.ModelFilters) -> tuple[list[str], bool]:
    """Return the names of a page, and whether more follow in the direction of reading; raises `InvalidRequest`."""
    for param, name in (("after_id", filters.after_id), ("before_id", filters.before_id)):
        if name is not None and name not in names:
            raise InvalidRequest(f"There is no model of the id in '{param}'.", param=param, code="invalid_value")
    if filters.after_id is not None:
        names = names[names.index(filters.after_id) + 1 :]
    if filters.before_id is not None and filters.before_id in names:
        names = names[: names.index(filters.before_id)]
        return names[-filters.limit :], len(names) > filters.limit
    return names[: filters.limit], len(names) > filters.limit


def _serving_tier(context: GatewayContext, catalog: Catalog, name: str) -> Tier:
    """Return the tier of a model id, as it is served now; an arm is what it says."""
    tier = tier_for(catalog, name)
    assert tier is not None
    if is_arm(catalog, name):
        return tier
    return serve_tier(catalog, tier, context.serves(tier.name)) or tier


def describe(catalog: Catalog, tier: Tier, name: str, created: int) -> dict[str, Any]:
    """Return a model object for the name of a tier that there is, an alias of one, or an arm."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "baton": {
            "tier": tier.name,
            "alias": name != tier.name,
            "served_by": tier.served_by or None,
            "description": tier.description,
            "conductor": tier.conductor.kind,
            "pool": list(tier.pool),
            "effort": tier.effort,
            "efforts": {effort: _limits(limits) for effort, limits in tier.efforts.items()},
            "prices": _prices(catalog, tier),
            "catalog": catalog.digest,
            "rehearsal": catalog.rehearsal,
        },
    }


def describe_for_anthropic(catalog: Catalog, tier: Tier, name: str, created: int) -> dict[str, Any]:
    """Return a model as Anthropic's model object."""
    model = describe(catalog, tier, name, created)
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    cards = [catalog.workers[worker].card for worker in tier.pool]
    most_of_tier = max(limits.output_tokens for limits in tier.efforts.values())
    most_of_workers = max(card.max_output for card in cards)
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": at,
        "lifecycle": "active",
        "max_input_tokens": max(card.context for card in cards),
        "max_tokens": min(most_of_tier, most_of_workers),
        "capabilities": _capabilities(tier, cards),
        "baton": model["baton"],
    }


def _capabilities(tier: Tier, cards: list[Card]) -> dict[str, Any]:
    """Return the capabilities of a tier in Anthropic's shape. Thinking may be asked for, and none is returned."""
    modalities = frozenset().union(*(card.modalities for card in cards))
    thinking = _support(False)
    thinking["types"] = {name: _support(False) for name in ("adaptive", "between_tools", "disabled", "enabled")}
    return {
        "batch": _support(False),
        "citations": _support(False),
        "code_execution": _support(False),
        "context_management": _supports(
            True, clear_thinking_20251015=True, clear_tool_uses_20250919=False, compact_20260112=False
        ),
        "effort": _supports(len(tier.efforts) > 1, **{name: name in tier.efforts for name in EFFORTS}),
        "image_input": _support("image" in modalities),
        "pdf_input": _support("pdf" in modalities),
        "server_tools": _supports(False, code_execution=False, web_search=False),
        "structured_outputs": _support(True),
        "thinking": thinking,
    }


def _support(supported: bool) -> dict[str, Any]:
    return {"supported": supported}


def _supports(supported: bool, **parts: bool) -> dict[str, Any]:
    return _support(supported) | {name: _support(part) for name, part in parts.items()}


def _description(request: Request) -> Callable[[Catalog, Tier, str, int], dict[str, Any]]:
    if "anthropic-version" in request.headers:
        return describe_for_anthropic
    return describe


def _limits(limits: Limits) -> dict[str, Any]:
    return asdict(limits) | {"usd": limits.usd / MILLION}


def _prices(catalog: Catalog, tier: Tier) -> dict[str, Any]:
    """Return the range of prices over the pool, in dollars per million tokens, and the workers whose price is not
    known."""
    workers = [catalog.workers[name] for name in tier.pool]
    prices = [worker.price for worker in workers if worker.priced]
    return {
        "input": _range([price.input for price in prices]),
        "cached": _range([price.cached for price in prices]),
        "output": _range([price.output for price in prices]),
        "unpriced": [worker.name for worker in workers if not worker.priced],
    }


def _range(prices: Sequence[int]) -> dict[str, float]:
    return {"min": min(prices, default=0) / MILLION, "max": max(prices, default=0) / MILLION}
