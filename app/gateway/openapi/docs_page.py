"""`GET /docs`: the API's description as a page, by Swagger UI, whose files come with this package.

FastAPI's own page would load them from a content delivery network. Here the page loads nothing from elsewhere, and its
Content-Security-Policy forbids the browser to. Nobody needs a key to read it; a request that is sent from it needs one.
"""

from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

FILES: Final = Path(__file__).parent / "swagger_ui"
ASSETS: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
}
"""The files that the page loads, with their media types."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page runs and shows nothing but `ASSETS`, and asks only this service."""
HEADERS: Final = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
MAX_AGE: Final = 3_600
"""Seconds for which a browser may keep an asset."""


def routes() -> APIRouter:
    """Return the page and its assets; they are no part of the description."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def get_docs() -> Response:
        headers = {**HEADERS, "content-security-policy": POLICY}
        return FileResponse(FILES / "index.html", headers=headers, media_type="text/html")

    for name in ASSETS:
        _asset(router, name)
    return router


def _asset(router: APIRouter, name: str) -> None:
    @router.get(f"/docs/{name}")
    async def get_asset() -> Response:
        headers = {**HEADERS, "cache-control": f"public, max-age={MAX_AGE}"}
        return FileResponse(FILES / name, headers=headers, media_type=ASSETS[name])
