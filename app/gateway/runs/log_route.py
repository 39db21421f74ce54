"""`GET /v1/log/checkpoint` and `GET /v1/log/tile/...`: the transparency log as https://c2sp.org/tlog-tiles has it.

Hashes tell nothing about what they stand for. Entries have the ids of tenants, keys and runs, so the bundles of entries
are for keys of all tenants.
"""

from base64 import b64encode
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from app.core.transparency.merkle import HASH_BYTES
from app.core.transparency.tiles import WIDTH, Tile, bundle, parse_tile
from app.errors import Forbidden, InvalidRequest, NotFound
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations, overview_replies
from app.gateway.runs import log_check
from app.gateway.wire import query
from app.store.protocol import Proof, ProvenLeaf, TransparencyLog

BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain"
IMMUTABLE: Final = "private, max-age=31536000, immutable"
"""A tile of a size never changes."""
TilePath = Annotated[
    str,
    Path(
        alias="tile",
        description="The level (or `entries`) and the number of a tile, with its width if it is partial.",
        examples=["0/x001/234.p/17"],
    ),
]


def routes(context: GatewayContext, keys: Keys) -> APIRouter:
    """Return the routes of the log."""
    router = APIRouter(prefix="/v1/log", tags=["log"])
    _add_checkpoint_routes(router, context, keys)
    _add_tile_route(router, context, keys)
    return router


def _add_checkpoint_routes(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    reader = Annotated[Caller, keys.needs("audit:read")]

    @router.get(
        "/checkpoint",
        operation_id="get_log_checkpoint",
        summary="Read the signed checkpoint of the transparency log.",
        response_class=Response,
        responses=operations.replies(*operations.READING, files=(TEXT,)),
    )
    async def get_log_checkpoint(_caller: reader) -> Response:
        """The origin, the size and the root of the log, as a signed note. 404 before the first one."""
        state = await context.store.log.state()
        if state.checkpoint is None:
            raise NotFound("The log has no checkpoint yet.")
        headers = {"cache-control": "no-store"}
        return Response(state.checkpoint, media_type=f"{TEXT}; charset=utf-8", headers=headers)

    @router.get(
        "/verify",
        operation_id="verify_log",
        summary="Check the newest checkpoint.",
        response_model=overview_replies.LogCheck,
        responses=operations.replies(*operations.READING),
    )
    async def verify_log(filters: Annotated[query.LogFilters, Query()], _caller: reader) -> Response:
        """Its signature, that its root is that of the stored hashes, and that an earlier checkpoint's log is its
        beginning. The service checks itself: who does not trust it uses `baton audit verify`. 404 before the first
        checkpoint."""
        earlier = None
        if filters.size is not None and filters.root is not None:
            earlier = filters.size, bytes.fromhex(filters.root)
        elif filters.size is not None or filters.root is not None:
            missing = "size" if filters.size is None else "root"
            raise InvalidRequest("Give the size and the root of the earlier checkpoint, or neither.", param=missing)
        report = await log_check.check(context.store.log, earlier)
        return json_reply(report)


def _add_tile_route(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    @router.get(
        "/tile/{tile:path}",
        operation_id="get_log_tile",
        summary="Read a tile of hashes, or a bundle of entries.",
        response_class=Response,
        responses=operations.replies(*operations.READING, files=(BYTES,)),
    )
    async def get_log_tile(path: TilePath, caller: Annotated[Caller, keys.needs("audit:read")]) -> Response:
        """`LEVEL/NUMBER` has up to 256 hashes of 32 bytes. `entries/NUMBER`, for keys of all tenants, has up to 256
        entries, each behind its length in two bytes."""
        tile = parse_tile(f"tile/{path}")
        if tile is None:
            raise NotFound("No tile has this path.")
        if tile.level is None and caller.tenant is not None:
            raise Forbidden("Only a key of all tenants may read the entries of the log.")
        return Response(await _body(context.store.log, tile), media_type=BYTES, headers={"cache-control": IMMUTABLE})


async def _body(log: TransparencyLog, tile: Tile) -> bytes:
    """Return the bytes of a tile or bundle of exactly this width. Raises `NotFound`."""
    if tile.level is None:
        entries = (await log.entries(tile.number))[: tile.width]
        count, body = len(entries), bundle(entries)
    else:
        body = (await log.tile(tile.level, tile.number))[: tile.width * HASH_BYTES]
        count = len(body) // HASH_BYTES
    if count < tile.width:
        kind = "tile of this width"
        if tile.width == WIDTH:
            kind = "full tile"
        raise NotFound(f"The log has no such {kind} yet.")
    return body


def proof_of_run(run: str, events: int, proof: Proof) -> dict[str, Any]:
    """Return the JSON of `GET /v1/runs/{run}/proof`. `events` is the number of the run's events."""
    leaves = [_leaf_to_json(leaf) for leaf in proof.leaves]
    return {"object": "run.proof", "run": run, "events": events, "checkpoint": proof.checkpoint, "leaves": leaves}


def _leaf_to_json(leaf: ProvenLeaf) -> dict[str, Any]:
    salt = None
    if leaf.salt is not None:
        salt = _base64(leaf.salt)
    return {
        "index": leaf.place,
        "entry": leaf.entry.decode(errors="replace"),  # an altered one may be no text, and has no proof then
        "salt": salt,
        "proof": [_base64(step) for step in leaf.proof],
    }


def _base64(value: bytes) -> str:
    return b64encode(value).decode()
