"""Routes that read the request themselves take nothing that FastAPI would have read for them."""

from typing import Annotated

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.security import APIKeyHeader, SecurityScopes
from starlette.requests import Request
from starlette.responses import Response

from app.gateway.http.direct import Direct


async def plain() -> str:
    return "plain"


async def asking(number: int) -> int:
    return number


async def nested(value: Annotated[str, Depends(plain)]) -> str:
    return value


async def of_path(request: Request, name: str) -> Response:
    return Response(name)


async def without_request() -> Response:
    return Response()


@pytest.mark.parametrize("dependency", [asking, nested])
def test_what_a_dependency_would_have_to_be_given_is_refused_at_start_up(dependency: object) -> None:
    async def endpoint(request: Request, value: Annotated[object, Depends(dependency)]) -> Response:  # type: ignore[arg-type]
        return Response()

    with pytest.raises(TypeError, match="dependency"):
        APIRouter(route_class=Direct).add_api_route("/x", endpoint)


@pytest.mark.parametrize("endpoint", [of_path, without_request])
def test_so_is_what_an_endpoint_would(endpoint: object) -> None:
    with pytest.raises(TypeError, match="endpoint"):
        APIRouter(route_class=Direct).add_api_route("/x/{name}", endpoint)  # type: ignore[arg-type]


async def test_a_dependency_gets_the_scopes_that_its_route_declares() -> None:
    scheme = APIKeyHeader(name="x-api-key", auto_error=False)

    async def caller(
        request: Request, scopes: SecurityScopes, key: Annotated[str | None, Security(scheme)]
    ) -> tuple[str, ...]:
        return request.method, *scopes.scopes, str(key)

    async def endpoint(request: Request, value: Annotated[tuple[str], Security(caller, scopes=["write"])]) -> Response:
        return Response(" ".join(value))

    router = APIRouter(route_class=Direct)
    router.add_api_route("/x", endpoint)
    app = FastAPI()
    app.router.routes += router.routes
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/x", headers={"x-api-key": "bt"})).text == "GET write None"
    assert app.openapi()["paths"]["/x"]["get"]["security"] == [{"APIKeyHeader": ["write"]}]
