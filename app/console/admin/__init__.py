"""The pages of the administration, which are on the admin listener alone: each asks the admin API (`/admin/v1`).

sections.py    the sections, which of them a person sees, tables
keys.py  tenants.py  budgets.py  policy.py  pool.py  holds.py  log.py    one section or two each
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console.admin import budgets, holds, keys, log, policy, pool, tenants
from app.console.admin.sections import Administration
from app.console.api import Session
from app.console.pages import Pages


def routes(pages: Pages) -> list[Route]:
    """Return the pages of all sections, and the one that lists them."""
    administration = Administration(pages)

    async def start(request: Request, session: Session) -> Response:
        return await administration.show(request, session, "start.html")

    section_routes: list[Route] = []
    for section in (keys, tenants, budgets, policy, pool, holds, log):
        section_routes += section.routes(administration)
    return [pages.route("/admin", start), *section_routes]
