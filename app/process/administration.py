"""The dependencies of the admin API, made of a running process."""

from collections.abc import Sequence

from app.core.pool.catalog import Catalog
from app.gateway.admin.context import AdminContext
from app.process.conductor_server import conductor_server
from app.process.config import read_catalog_text
from app.process.wiring import Runtime

POSTED = "the pool file"
"""The name of a posted pool file in its faults."""


def admin_context(opened: Runtime, *, has_engine: bool) -> AdminContext:
    """The dependencies of the admin API of this process; `has_engine` says that it calls workers."""

    def read_pool(text: str) -> Catalog:
        return read_catalog_text(text, POSTED)

    def versions(conductor: str) -> Sequence[str]:
        with conductor_server(opened.pool.loaded, conductor) as server:
            return server.models()

    state = opened.pool.health.state if has_engine else None
    return AdminContext(opened.gateway, read_pool, versions, state)
