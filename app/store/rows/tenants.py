"""Rows of tenants."""

from typing import Any

from sqlalchemy import Connection, func, select, union, update

from app.store.protocol import Actor, TenantRow
from app.store.rows.admin_events import note
from app.store.sqlkit.tables import KEYS, TENANTS, insert_into


def page(conn: Connection, name: str | None, after: str | None, limit: int | None) -> tuple[TenantRow, ...]:
    """Return every tenant, or the one of this name, by name: those that were created, and those that only keys have."""
    created, of_keys = select(TENANTS.c.name), select(KEYS.c.tenant.label("name"))
    if name is not None:
        created, of_keys = created.where(TENANTS.c.name == name), of_keys.where(KEYS.c.tenant == name)
    if after is not None:
        created, of_keys = created.where(TENANTS.c.name > after), of_keys.where(KEYS.c.tenant > after)
    names = union(created, of_keys).order_by("name").limit(limit).subquery()
    keys = select(func.count()).where(KEYS.c.tenant == names.c.name).scalar_subquery()
    tables = names.outerjoin(TENANTS, TENANTS.c.name == names.c.name)
    query = select(names.c.name, TENANTS.c.created_at, TENANTS.c.disabled_at, keys).select_from(tables)
    return tuple([TenantRow(*row) for row in conn.execute(query.order_by(names.c.name))])


def add(conn: Connection, name: str, at: float, by: Actor) -> bool:
    """Create a tenant, and log it with its author. False if it was created already."""
    insertion = insert_into(conn, TENANTS).values(name=name, created_at=at).on_conflict_do_nothing()
    if conn.execute(insertion).rowcount != 1:
        return False
    after = {"created_at": at, "disabled_at": None}
    note(conn, by, "tenant.created", name, tenant=name, before=None, after=after)
    return True


def switch(conn: Connection, name: str, at: float, by: Actor, *, enabled: bool) -> bool:
    """Disable a tenant or enable it again. One that is disabled already keeps its time. False if there is none."""
    row = _lock_tenant(conn, name)
    if row is None and conn.execute(select(KEYS.c.id).where(KEYS.c.tenant == name).limit(1)).first() is None:
        return False
    if row is None:
        add(conn, name, at, by)
        row = _lock_tenant(conn, name)
    if (row.disabled_at is None) == enabled:
        return True
    disabled_at = None if enabled else at
    conn.execute(update(TENANTS).where(TENANTS.c.name == name).values(disabled_at=disabled_at))
    before = {"created_at": row.created_at, "disabled_at": row.disabled_at}
    after = before | {"disabled_at": disabled_at}
    action = "tenant.enabled" if enabled else "tenant.disabled"
    note(conn, by, action, name, tenant=name, before=before, after=after)
    return True


def _lock_tenant(conn: Connection, name: str) -> Any:
    return conn.execute(select(TENANTS).where(TENANTS.c.name == name).with_for_update()).one_or_none()
