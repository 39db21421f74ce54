"""Row-level security: on Postgres a request of a caller of one tenant sees and changes the rows of this tenant alone.

What is read or changed for a caller is a transaction that names the tenant in the setting `baton.tenant`, until its end
and no longer, so that it works behind a PgBouncer that pools transactions, too. The policies of the tables (migrations
0029 and 0032), which FORCE applies to their owner as well, show such a transaction the rows of this tenant alone, even
to a query without any condition on the tenant, and refuse it rows of another. A transaction that names no tenant sees
all rows: that of an engine, a sweeper or a migration, and that of a caller of all tenants.

The transaction takes the role `baton_reader_...` that `baton migrate` makes for the database. This role cannot log in;
it may read the tables of `READABLE`, and change those of `CHANGEABLE` in the ways that requests to the admin API need.
A read is a transaction that may not write. Where the database's user may not create roles, the transaction keeps that
user, whom the policies bind in the same way, unless it is exempt from all policies as superusers are. `baton migrate`
and `baton doctor` say what is in force.

A run's own entries (a next turn, a cancellation, feedback, an erasure) are no such transactions: many are committed
together, and each names its tenant, which the committing statement compares with that of the run's row.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from msgspec import Struct
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

T = TypeVar("T")

PREFIX: Final = "baton_reader_"
READABLE: Final = (
    "runs",
    "pruned_runs",
    "feedback",
    "events",
    "contents",
    "shared_contents",
    "tags",
    "texts",
    "once",
    "disclosures",
    "keys",
    "tenants",
    "budgets",
    "budget_windows",
    "admin_events",
    "holds",
)
"""The tables that callers' requests read. Each has a policy."""
CHANGEABLE: Final[Mapping[str, str]] = {
    "keys": "INSERT, UPDATE",
    "budgets": "INSERT, UPDATE, DELETE",
    "budget_windows": "UPDATE",
    "admin_events": "INSERT",
    "once": "INSERT, UPDATE",
    "notices": "INSERT",
    "log_queue": "INSERT",
}
"""The tables that callers' requests change apart from entries of runs, with the rights that this takes. To the queues
of notices and of the transparency log rows are only added, and nobody reads them for a caller."""
NUMBERED: Final = ("admin_events_seq_seq", "log_queue_n_seq")
"""The sequences that number rows of these tables."""
TENANT: Final = "baton.tenant"
"""The setting that the policies compare with a row's tenant."""
NAME: Final = f"""
SELECT '{PREFIX}' || CASE WHEN octet_length(current_database()) > 48 THEN md5(current_database())
ELSE current_database() END
"""
ROLE: Final = f"""
SELECT role.rolname FROM pg_class AS runs
CROSS JOIN LATERAL aclexplode(runs.relacl) AS granted JOIN pg_roles AS role ON role.oid = granted.grantee
WHERE runs.oid = to_regclass('runs') AND runs.relrowsecurity AND granted.privilege_type = 'SELECT'
AND starts_with(role.rolname, '{PREFIX}') AND NOT role.rolsuper AND NOT role.rolbypassrls
AND pg_has_role(current_user, role.oid,
  CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END)
ORDER BY role.rolname LIMIT 1
"""
"""The role of readers that this user may take; no row if there is none."""
BOUND_USER: Final = """
SELECT current_user::text FROM pg_class
WHERE oid = to_regclass('runs') AND relforcerowsecurity AND row_security_active(oid)
"""
"""This user, if the policies bind it; no row if they do not."""
NO_TENANT: Final = "\x7f"
"""The setting for a tenant whose name is empty, since an empty setting would restrict nothing."""
READS_ONLY: Final = "set_config('transaction_read_only', 'on', true)"
_TAKE: Final = f"SELECT set_config('role', :role, true), set_config('{TENANT}', :tenant, true)"
TAKE_TO_WRITE: Final = text(_TAKE)
TAKE: Final = text(f"{_TAKE}, {READS_ONLY}")
MARK: Final = "/* for a caller */"
"""A comment that distinguishes a statement prepared for callers' reads from the service's own."""


class RowSecurity(Struct, frozen=True):
    """The state of row-level security in a database."""

    reader: str
    """The role of reads for callers; empty if it is not in force."""
    reason: str = ""
    """Why it is not in force."""


def read_as(conn: Connection, work: Callable[[Connection], T], *, reader: str, tenant: str) -> T:
    """Run work that reads, in a transaction that ends with it, as the role `reader` for a tenant."""
    conn.execute(TAKE, {"role": reader, "tenant": tenant or NO_TENANT})
    return work(conn)


def write_as(conn: Connection, work: Callable[[Connection], T], *, reader: str, tenant: str) -> T:
    """Run work that writes, in a transaction that ends with it, as the role `reader` for a tenant."""
    conn.execute(TAKE_TO_WRITE, {"role": reader, "tenant": tenant or NO_TENANT})
    return work(conn)


def begin(reader: str, tenant: str) -> str:
    """Return the text that begins a transaction as this role for this tenant, in one exchange and without
    parameters."""
    role, name = _literal(reader), _literal(tenant or NO_TENANT)
    return f"BEGIN; SELECT set_config('role', {role}, true), set_config('{TENANT}', {name}, true), {READS_ONLY}"


def _literal(value: str) -> str:
    """Return a string as SQL that holds no character of it, so that nothing has to be escaped."""
    return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"


def reader_of(conn: Connection) -> str | None:
    """Return the role by which this database's user reads for callers; None if row-level security is not in force."""
    return _role_of_readers(conn) or conn.execute(text(BOUND_USER)).scalar_one_or_none()


def _role_of_readers(conn: Connection) -> str | None:
    role: str | None = conn.execute(text(ROLE)).scalar_one_or_none()
    return role


def enforce(conn: Connection) -> RowSecurity:
    """Make the reader's role and give it what it may read, as far as that is missing and this user may do it.

    It is part of a migration's transaction. A refusal undoes nothing else.
    """
    if (reader := _role_of_readers(conn)) is not None:  # tables that are new with this migration
        _grant(conn, f'"{reader}"')
        return state(conn)
    name: str = conn.execute(text(f"SELECT quote_ident(({NAME}))")).scalar_one()
    role = conn.execute(text(f"SELECT 1 FROM pg_roles WHERE rolname = ({NAME})")).first()
    try:
        with conn.begin_nested():
            if role is None:
                conn.execute(text(f"CREATE ROLE {name} NOLOGIN"))
            conn.execute(text(f"GRANT {name} TO CURRENT_USER"))
            _grant(conn, name)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != "42501":
            raise
    return state(conn)


def _grant(conn: Connection, role: str) -> None:
    """Give a role, whose name is quoted where it must be, the rights on tables that this module names."""
    conn.execute(text(f"GRANT SELECT ON {', '.join(READABLE)} TO {role}"))
    for table, rights in CHANGEABLE.items():
        conn.execute(text(f"GRANT {rights} ON {table} TO {role}"))
    conn.execute(text(f"GRANT USAGE ON SEQUENCE {', '.join(NUMBERED)} TO {role}"))


def state(conn: Connection) -> RowSecurity:
    """Return the state of row-level security for the reads of this database's user."""
    reader = reader_of(conn)
    if reader is not None:
        return RowSecurity(reader)
    name, user = conn.execute(text(f"SELECT ({NAME}), current_user")).one()
    return RowSecurity(
        "",
        f'the user {user} may not create or take the role "{name}"; let a superuser run CREATE ROLE "{name}" NOLOGIN; '
        f'GRANT "{name}" TO "{user}"; then run `baton migrate` again',
    )
