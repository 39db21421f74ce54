"""The list of runs."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console.api import Session
from app.console.pages import Pages


def routes(pages: Pages) -> list[Route]:
    """The list of runs with its filters."""

    async def show_runs(request: Request, session: Session) -> Response:
        found = await pages.api.get(session, "/v1/runs", after=request.query_params.get("after"))
        return pages.show(request, "runs.html", runs=found["data"], following=found.get("next"))

    return [pages.route("/runs", show_runs)]
