"""`GET /`: the name of this service and where its API is, as a page for browsers and as JSON for other clients.

The page loads nothing but its own style sheet, runs no script, and its Content-Security-Policy forbids everything else.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from app.gateway.openapi import operations
from app.gateway.openapi.docs_page import HEADERS, MAX_AGE
from app.gateway.openapi.replies import Service

PAGE: Final = Path(__file__).with_suffix(".html")
STYLE: Final = Path(__file__).with_suffix(".css")
POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page shows nothing but its style sheet and an empty icon, and asks nobody."""
REPLIES: Final[operations.Responses] = {
    200: {**operations.replies()[200], "content": {"text/html": {"schema": {"type": "string"}}}}
}
SERVICE: Final = {"object": "service", "name": "Baton", "api": "/v1", "docs": "/docs", "openapi": "/openapi.json"}


def routes() -> APIRouter:
    """The page, and its style sheet, which is no part of the description."""
    router = APIRouter(tags=["probes"])

    @router.get(
        "/",
        operation_id="get_service",
        summary="Say what this service is.",
        response_model=Service,
        responses=REPLIES,
    )
    async def get_service(request: Request) -> Response:
        """A page for browsers, which ask for `text/html`; JSON for everybody else."""
        if _wants_page(request.headers.get("accept", "")):
            headers = {**HEADERS, "content-security-policy": POLICY, "vary": "Accept"}
            return FileResponse(PAGE, headers=headers, media_type="text/html")
        body = orjson.dumps({**SERVICE, "version": version("baton")})
        return Response(body, headers={"vary": "Accept"}, media_type="application/json")

    @router.get("/root_page.css", include_in_schema=False)
    async def get_style() -> Response:
        headers = {**HEADERS, "cache-control": f"public, max-age={MAX_AGE}"}
        return FileResponse(STYLE, headers=headers, media_type="text/css")

    return router


def _wants_page(accept: str) -> bool:
    """True if the header names HTML itself; `*/*` does not."""
    for wanted in accept.lower().split(","):
        kind, *parameters = (part.strip().replace(" ", "") for part in wanted.split(";"))
        if kind == "text/html":
            return not any(parameter in ("q=0", "q=0.0", "q=0.00", "q=0.000") for parameter in parameters)
    return False
