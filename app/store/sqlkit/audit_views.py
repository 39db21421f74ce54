"""Views for auditors who ask SQL: runs, what is left of pruned ones, events and disclosures, without any content and
without the salts of hashes.

A view reads its tables with the rights of its owner, who is the one that owns the tables, so a role that may read the
views and nothing else sees the rows of all tenants, and no text. The views are made by `baton audit views`, not by a
migration, because a table cannot be changed under a view; the command may be given again after each migration.
"""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, text

VIEWS: Final[Mapping[str, str]] = {
    "audit_runs": """
SELECT id, tenant, key, tier, model, code, to_timestamp(created_at) AS created_at, to_timestamp(ended_at) AS ended_at,
  state, error, topology, steps, degraded, spent_usd AS spent_micro_usd, spent_tokens, origin_kind, origin_run,
  salt IS NULL AS erased, to_timestamp(erased_at) AS erased_at, erased_by
FROM runs""",
    "audit_pruned_runs": """
SELECT id, tenant, state, to_timestamp(created_at) AS created_at, to_timestamp(ended_at) AS ended_at,
  to_timestamp(pruned_at) AS pruned_at, events, encode(root, 'hex') AS root, nullif(archive, '') AS archive
FROM pruned_runs""",
    "audit_events": r"""
SELECT run, seq, kind, to_timestamp(at) AS at,
  CASE WHEN position('\x5c7530303030'::bytea in body) = 0 THEN convert_from(body, 'UTF8')
  ELSE regexp_replace(convert_from(body, 'UTF8'), '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g') END::jsonb AS body
FROM events""",
    "audit_disclosures": """
SELECT run, call, to_timestamp(at) AS at, step, kind AS recipient_kind, recipient, provider, model,
  nullif(region, '') AS region, tenant, key,
  (SELECT min(value) FROM tags
   WHERE tags.run = disclosures.run AND tags.name IN ('metadata', 'user') AND tags.name = 'user') AS "user",
  coalesce(labels, '[]')::jsonb AS labels, saw_user,
  string_to_array(nullif(trim(BOTH ',' FROM saw_steps), ''), ',')::bigint[] AS saw_steps, saw_results,
  string_to_array(nullif(trim(BOTH ',' FROM unseen), ''), ',')::bigint[] AS unseen, planned_by, attempt,
  coalesce(passed_over, '[]')::jsonb AS passed_over, bytes, input_tokens, output_tokens, outcome
FROM disclosures""",
}
"""The queries of the views by name. An escaped NUL, for which jsonb has no text, is shown as U+FFFD: one event with it
would fail every query of all. The name of the tag is given twice for the index `tags_of_callers`: without the list
Postgres looks through all users in the order of their names. Contents, salts, digests of keys and the texts of
conversations are in none."""


def make(conn: Connection, role: str | None) -> None:
    """Make the views anew, and let a role read them, if one is given. The role must exist."""
    drop(conn)
    for name, query in VIEWS.items():
        conn.execute(text(f"CREATE VIEW {name} AS {query}"))
        conn.execute(text(f"REVOKE ALL ON {name} FROM PUBLIC"))
    if role is not None:
        quoted: str = conn.execute(text("SELECT quote_ident(:role)"), {"role": role}).scalar_one()
        conn.execute(text(f"GRANT SELECT ON {', '.join(VIEWS)} TO {quoted}"))


def drop(conn: Connection) -> None:
    """Drop the views, with what was granted on them."""
    for name in VIEWS:
        conn.execute(text(f"DROP VIEW IF EXISTS {name}"))
