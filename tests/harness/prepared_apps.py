"""The gateway's application, whose routes are made once and serve one test after another.

To make them takes 25 ms of a core, which was a tenth of what all tests took. The state of an application is its
context, the keys that it knows, the counters of its admission, and the histories by which it estimates plans; each
test gets all of that anew.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from fastapi import FastAPI
from msgspec.structs import force_setattr, replace

from app.gateway import app as gateway_app
from app.gateway.http.admission import Admission
from app.gateway.http.callers import Keys
from app.gateway.http.context import Bounds, GatewayContext
from app.gateway.plans import route as plan_routes
from app.gateway.runs import approvals
from app.gateway.runs.forecasts import Histories

FREE: dict[Hashable, list["PreparedApp"]] = defaultdict(list)
"""The applications that serve nobody now, by that part of the context which their routes were made with."""
LENT: list["PreparedApp"] = []
"""The applications that were lent to the present test."""


@dataclass
class PreparedApp:
    """An application, and all of its state."""

    app: FastAPI
    context: GatewayContext
    keys: Keys
    admission: Admission
    histories: Histories
    bounds: Bounds
    origins: frozenset[str]
    """Both as its routes were made with."""

    def serve(self, context: GatewayContext) -> None:
        """Begin as a new application over that context would."""
        for name in GatewayContext.__struct_fields__:
            force_setattr(self.context, name, getattr(context, name))
        force_setattr(self.bounds, "pending", context.bounds.pending)
        self.forget()

    def leave(self) -> None:
        """Let everything of the test be freed, and be free for another one."""
        self.forget()
        for name in GatewayContext.__struct_fields__:
            force_setattr(self.context, name, None)
        FREE[made_with(self.bounds, self.origins)].append(self)

    def forget(self) -> None:
        """Forget all keys, counters and histories."""
        self.keys.__init__(self.context)  # type: ignore[misc]
        self.admission.__init__(self.context)  # type: ignore[misc]
        self.histories.__init__(self.context)  # type: ignore[misc]


@contextmanager
def app_over(context: GatewayContext) -> Iterator[FastAPI]:
    """`create_app(context)`, for as long as this is open. The context does not change meanwhile."""
    prepared = _serving(context)
    try:
        yield prepared.app
    finally:
        prepared.leave()


def lent_app(context: GatewayContext) -> FastAPI:
    """`create_app(context)`, until the present test has ended. The context does not change meanwhile."""
    prepared = _serving(context)
    LENT.append(prepared)
    return prepared.app


def take_back() -> None:
    """End what was lent to a test."""
    while LENT:
        LENT.pop().leave()


def made_with(bounds: Bounds, origins: frozenset[str]) -> Hashable:
    """That part of the context which the routes of an application are made with: the counter is no part of it."""
    figures = [getattr(bounds, name) for name in Bounds.__struct_fields__ if name != "pending"]
    return (*figures, origins)


def _serving(context: GatewayContext) -> PreparedApp:
    free = FREE[made_with(context.bounds, context.origins)]
    prepared = free.pop() if free else _prepare(context)
    prepared.serve(context)
    return prepared


def _prepare(context: GatewayContext) -> PreparedApp:
    own = replace(context)
    keys, admission, histories = Keys(own), Admission(own), Histories(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_app, "Keys", lambda _context: keys)
        patch.setattr(gateway_app, "Admission", lambda _context: admission)
        for routes in (plan_routes, approvals):
            patch.setattr(routes, "Histories", lambda _context: histories)
        return PreparedApp(gateway_app.create_app(own), own, keys, admission, histories, own.bounds, own.origins)
