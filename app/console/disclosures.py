"""The ledger of disclosures: who was sent what, of all runs that the key may see, by day, recipient and end user."""

from typing import Final, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console.api import ApiError, Session
from app.console.pages import Pages, address_fields
from app.console.runs import Field, named_choices
from app.core.console_path import PATH
from app.core.run.recipients import RecipientKind

FIELDS: Final = (
    Field("since", "From day (UTC)", is_day=True),
    Field("until", "Before day (UTC)", is_day=True),
    Field("saw", "Saw", (("", "anything"), ("user", "the caller's words"), ("results", "results of tools"))),
    Field("recipient", "Recipient"),
    Field("recipient_kind", "Called as", named_choices(get_args(RecipientKind))),
    Field("user", "End user"),
    Field("key", "Key (id)"),
    Field("run", "Run"),
)
LIST: Final = f"{PATH}/disclosures"


def routes(pages: Pages) -> list[Route]:
    """Return the list of disclosures with its filters."""

    async def show_disclosures(request: Request, session: Session) -> Response:
        filters = address_fields(request, [*[field.name for field in FIELDS], "after"])
        fault, status, page = "", 200, None
        try:
            page = await pages.api.get(session, "/v1/disclosures", **filters)
        except ApiError as error:
            if error.status != 400:
                raise
            fault, status = error.message, 400
        following = ""
        if page is not None and page["has_more"]:
            following = f"{LIST}?{urlencode({**filters, 'after': page['next']})}"
        return pages.show(
            request,
            "disclosures.html",
            status,
            fields=FIELDS,
            filters=filters,
            fault=fault,
            page=page,
            following=following,
        )

    return [pages.route("/disclosures", show_disclosures)]
