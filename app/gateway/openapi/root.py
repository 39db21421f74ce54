"""`GET /`: the name of this service and where its API is. The console, which stands before it, leads browsers on."""

from importlib.metadata import version
from typing import Final

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from app.gateway.openapi import operations
from app.gateway.openapi.replies import Service

SERVICE: Final = {"object": "service", "name": "Baton", "api": "/v1", "docs": "/docs", "openapi": "/openapi.json"}


def routes() -> APIRouter:
    """Return the route, for which nobody needs a key."""
    router = APIRouter(tags=["probes"])

    @router.get(
        "/",
        operation_id="get_service",
        summary="Say what this service is.",
        response_model=Service,
        responses=operations.replies(),
    )
    async def get_service() -> Response:
        """The addresses of the API and of its description; browsers are led to `/console`."""
        body = orjson.dumps({**SERVICE, "version": version("baton")})
        return Response(body, headers={"vary": "Accept"}, media_type="application/json")

    return router
