"""Rows of legal holds, and the runs that they cover.

Whoever erases content or deletes rows asks `find_by_run` or `refuse` in the same transaction, after `lock`: on Postgres
it holds a lock together with others that whoever places a hold takes alone, so an erasure either is committed before
the hold is placed or sees it. In SQLite writers exclude each other anyway. The lock is taken before any other.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import asdict, replace
from sqlalchemy import ColumnElement, Connection, and_, exists, func, insert, literal, or_, select, update

from app.errors import Conflict, LegalHold, NotFound
from app.store.protocol import USER_TAG, Actor
from app.store.protocol.holds import Hold, HoldQuery
from app.store.rows import end_users
from app.store.rows.admin_events import note
from app.store.rows.positions import follows
from app.store.sqlkit.sealing import Decrypt
from app.store.sqlkit.tables import HOLDS, KEYS, RUNS, TAGS, TENANTS

LOCK: Final = 0x6261746F6E686F6C
"""The number of the advisory lock of all holds: `batonhol` in ASCII."""
HOLD = HOLDS.c
IN_FORCE = HOLD.released_at.is_(None)


def lock(conn: Connection) -> None:
    """Have nobody place a hold until the end of the transaction, which erases or deletes something."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock_shared(literal(LOCK))))


def place(conn: Connection, hold: Hold, by: Actor) -> Hold:
    """Store a hold, after all erasures that are under way, and log it with its author. One of its id that is in force
    already stays as it is. Raises `NotFound`, and `Conflict` if that one was released."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(literal(LOCK))))
    earlier_hold = conn.execute(select(HOLDS).where(HOLD.id == hold.id)).one_or_none()
    if earlier_hold is not None and earlier_hold.released_at is not None:
        raise Conflict("The hold of this request was released; use a new Idempotency-Key.", code="hold_released")
    if earlier_hold is not None:
        return Hold(**earlier_hold._mapping)
    stored_hold = replace(hold, tenant=_tenant(conn, hold), placed_by=by.id)
    conn.execute(insert(HOLDS).values(_fields(stored_hold) | {"id": stored_hold.id}))
    note(conn, by, "hold.placed", stored_hold.id, tenant=stored_hold.tenant, before=None, after=_fields(stored_hold))
    return stored_hold


def _tenant(conn: Connection, hold: Hold) -> str:
    """Return the tenant whose runs a hold covers; empty for a user's in every tenant. Raises `NotFound`."""
    if hold.scope == "user" and not hold.tenant:
        return ""
    if hold.scope in ("user", "tenant"):
        tenant_name = hold.tenant if hold.scope == "user" else hold.name
        for column in (TENANTS.c.name, KEYS.c.tenant, RUNS.c.tenant):
            if conn.execute(select(column).where(column == tenant_name).limit(1)).first() is not None:
                return tenant_name
        raise NotFound("There is no tenant of this name.")
    table = RUNS if hold.scope == "run" else KEYS
    tenant: str | None = conn.execute(select(table.c.tenant).where(table.c.id == hold.name)).scalar_one_or_none()
    if tenant is None or hold.tenant not in ("", tenant):
        raise NotFound(f"There is no {hold.scope} of this id.")
    return tenant


def release(conn: Connection, id_: str, at: float, by: Actor) -> Hold:
    """End a hold and log it with its author. One that was released already stays as it is. Raises `NotFound`."""
    row = conn.execute(select(HOLDS).where(HOLD.id == id_).with_for_update()).one_or_none()
    if row is None:
        raise NotFound("There is no legal hold of this id.")
    hold = Hold(**row._mapping)
    if hold.released_at is not None:
        return hold
    released_hold = replace(hold, released_at=at, released_by=by.id)
    conn.execute(update(HOLDS).where(HOLD.id == id_).values(released_at=at, released_by=by.id))
    note(conn, by, "hold.released", id_, tenant=hold.tenant, before=_fields(hold), after=_fields(released_hold))
    return released_hold


def _fields(hold: Hold) -> dict[str, Any]:
    return {name: value for name, value in asdict(hold).items() if name != "id"}


def page(conn: Connection, query: HoldQuery) -> tuple[Hold, ...]:
    """Return the holds of a query, the newest first. Raises `NotFound` if its tenant has no hold `after`."""
    of_tenant = [] if query.tenant is None else [HOLD.tenant == query.tenant]
    conditions: list[ColumnElement[bool]] = [*of_tenant]
    if query.id is not None:
        conditions.append(HOLD.id == query.id)
    if query.in_force is not None:
        conditions.append(IN_FORCE if query.in_force else ~IN_FORCE)
    statement = select(HOLDS).where(*conditions).order_by(HOLD.placed_at.desc(), HOLD.id.desc()).limit(query.limit)
    if query.after is not None:
        statement = statement.where(follows(conn, HOLD.placed_at, HOLD.id, query.after, of_tenant))
    return tuple([Hold(**row._mapping) for row in conn.execute(statement)])


def count_released(conn: Connection) -> int:
    """Return the number of holds that were ever released."""
    return conn.execute(select(func.count()).select_from(HOLDS).where(HOLD.released_at.is_not(None))).scalar_one()


def covers() -> ColumnElement[bool]:
    """Return the condition that a hold in force covers a run, as far as columns and tags tell.

    A run of an earlier release has no tag of its user: `find_by_run` looks into its task as well.
    """
    tags = select(TAGS.c.run).where(TAGS.c.name == USER_TAG, TAGS.c.value == HOLD.name, TAGS.c.run == RUNS.c.id)
    tagged = exists(tags.correlate(RUNS, HOLDS))
    return and_(
        IN_FORCE,
        or_(
            and_(HOLD.scope == "run", HOLD.name == RUNS.c.id),
            and_(HOLD.scope == "tenant", HOLD.name == RUNS.c.tenant),
            and_(HOLD.scope == "key", HOLD.name == RUNS.c.key),
            and_(HOLD.scope == "user", HOLD.tenant.in_(("", RUNS.c.tenant)), tagged),
        ),
    )


def find_by_run(conn: Connection, runs: Sequence[str], decrypt: Decrypt) -> Mapping[str, str]:
    """Return the runs among these that a hold covers, each with the id of one that does. Raises `UnknownKeys`."""
    if not runs or conn.execute(select(HOLD.id).where(IN_FORCE).limit(1)).first() is None:
        return {}
    join = select(RUNS.c.id, func.min(HOLD.id)).select_from(RUNS).join(HOLDS, covers())
    query = join.where(RUNS.c.id.in_(runs)).group_by(RUNS.c.id)
    holds = {run: hold for run, hold in conn.execute(query)}
    other_runs = [run for run in runs if run not in holds]
    return holds | _of_users(conn, other_runs, decrypt)


def _of_users(conn: Connection, runs: Sequence[str], decrypt: Decrypt) -> dict[str, str]:
    """Return the runs among these that a hold on a user covers, by the content of their tasks."""
    of_users: defaultdict[str, dict[str, str]] = defaultdict(dict)
    query = select(HOLD.id, HOLD.name, HOLD.tenant).where(IN_FORCE, HOLD.scope == "user")
    for id_, user, tenant in conn.execute(query):
        of_users[user][tenant] = id_
    users_by_run = end_users.of_runs(conn, of_users, runs, decrypt)
    holds: dict[str, str] = {}
    if not users_by_run:
        return {}
    for run, tenant in conn.execute(select(RUNS.c.id, RUNS.c.tenant).where(RUNS.c.id.in_(users_by_run))):
        for user in users_by_run[run]:
            hold = of_users[user].get(tenant, of_users[user].get(""))
            if hold is not None:
                holds[run] = hold
    return holds


def refuse(conn: Connection, runs: Sequence[str], decrypt: Decrypt) -> None:
    """Raise `LegalHold` if a hold covers one of these runs."""
    for hold in find_by_run(conn, runs, decrypt).values():
        raise LegalHold.of(hold)


def refuse_tenant(conn: Connection, tenant: str) -> None:
    """Raise `LegalHold` if a hold may cover any run of this tenant. One on a key of another tenant does if that key has
    begun a run of this one."""
    begun = exists(select(RUNS.c.id).where(RUNS.c.tenant == tenant, RUNS.c.key == HOLD.name).correlate(HOLDS))
    may_cover = or_(HOLD.tenant.in_(("", tenant)), and_(HOLD.scope == "key", begun))
    hold = conn.execute(select(HOLD.id).where(IN_FORCE, may_cover).order_by(HOLD.id).limit(1)).scalar_one_or_none()
    if hold is not None:
        raise LegalHold.of(hold)
