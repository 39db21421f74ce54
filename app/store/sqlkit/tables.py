"""The schema for both dialects. A test compares it with what the migrations make.

Money, tokens and counters are BIGINT; times are seconds since 1970 in double precision; event bodies are JSON as the
exact bytes that were written (never jsonb, which normalizes them, so that no hash of them could be checked).
There are no foreign keys: a run's rows are only ever written under the lock of its row in `runs`.

Thousands of leases and claims are renewed all the time, so `lease_until` and `until` are in no index: Postgres then
renews them in place, in the room that pages keep free for it, and writes no index at all. A search for lapsed leases
reads all open runs: an index that could tell more would have to be written with every renewal.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    false,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from app.core.run.events import TERMINAL
from app.core.run.kinds import ENDED
from app.store.protocol import ERASED_TAGS

METADATA = MetaData()

RUNS = Table(
    "runs",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("code", Text, nullable=False),
    Column("salt", LargeBinary),  # NULL once the content is erased
    Column("thread", Text),  # where the texts of its answers belong (`rows/texts.py`); NULL where none are shared
    Column("budgets", Text),  # a JSON array of the accounts in which its holds are reserved; NULL where there are none
    Column("origin_kind", Text),  # how it follows from another run (core/run/kinds.py); NULL where it follows from none
    Column("origin_run", Text),
    Column("erased_at", Double),  # when its content was erased; NULL also where 0.2 or older erased it
    Column("erased_by", Text),  # protocol.ErasedBy
    Column("created_at", Double, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("driver", Text, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("cap_usd", BigInteger, nullable=False),
    Column("cap_tokens", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("claims", BigInteger, nullable=False),  # last claim number given out; never used twice within a run
    Column("held_usd", BigInteger, nullable=False),
    Column("held_tokens", BigInteger, nullable=False),
    Column("spent_usd", BigInteger, nullable=False),
    Column("spent_tokens", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("topology", Text),
    Column("degraded", Boolean, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("ended_at", Double),  # set by the store with the terminal event: NULL means "not ended"
    Column("error", Text),
    Column("notify_turn", BigInteger),  # the turn whose end is to become a notice; NULL where none is
    # Counts the changes of this row and of the run's tickets, apart from renewals (`lease_until`, `until`): a writer
    # that knows the row at some revision may write if it still has it. A trigger counts for processes of 0.1.
    Column("revision", BigInteger, nullable=False, server_default=text("0")),
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 70},
)
UNHAPPY = tuple(sorted(ENDED - {"succeeded"}))
"""End states rare enough for an index of their own; the others are found along the time index after a few rows."""

_OPEN = text("ended_at IS NULL")
_ENDED = text("ended_at IS NOT NULL")
_UNHAPPY = text(f"state IN ({', '.join(repr(state) for state in UNHAPPY)})")
Index("runs_by_time", RUNS.c.created_at, RUNS.c.id)
Index("runs_by_tenant", RUNS.c.tenant, RUNS.c.created_at, RUNS.c.id)
Index("runs_open", RUNS.c.id, postgresql_where=_OPEN, sqlite_where=_OPEN)
# Only runs that have ended are listed by cost, and each gets its entries when it ends.
Index("runs_by_cost", RUNS.c.spent_usd, RUNS.c.id, postgresql_where=_ENDED, sqlite_where=_ENDED)
Index("runs_by_tenant_cost", RUNS.c.tenant, RUNS.c.spent_usd, RUNS.c.id, postgresql_where=_ENDED, sqlite_where=_ENDED)
_FOLLOWS = text("origin_run IS NOT NULL")
Index(
    "runs_by_origin", RUNS.c.origin_run, RUNS.c.created_at, RUNS.c.id, postgresql_where=_FOLLOWS, sqlite_where=_FOLLOWS
)
Index("runs_unhappy", RUNS.c.state, RUNS.c.created_at, RUNS.c.id, postgresql_where=_UNHAPPY, sqlite_where=_UNHAPPY)

EVENTS = Table(
    "events",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
_TERMINAL = text(f"kind IN ({', '.join(repr(kind.value) for kind in TERMINAL)})")
# The second fence behind the check in `writing/batch.py`: two ends of one run cannot both be stored (I-13).
Index("events_one_end", EVENTS.c.run, unique=True, postgresql_where=_TERMINAL, sqlite_where=_TERMINAL)

# Who was sent what: one row for each recipient of a call, derived from the call's intent and outcome in the transaction
# that writes them (`rows/disclosures.py`). The end user's name stands in `tags` alone, where it is erased.
DISCLOSURES = Table(
    "disclosures",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("call", Text, primary_key=True),
    Column("at", Double, nullable=False),  # when its intent was written: before anything was sent
    Column("step", BigInteger),  # NULL for planning calls and embeddings
    Column("kind", Text, nullable=False),  # worker, conductor, embedder or shadow
    Column("recipient", Text, nullable=False),  # the worker by its name
    Column("provider", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("region", Text, nullable=False),  # empty where it is not known
    Column("tenant", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("labels", Text),  # a JSON array, sorted; NULL where what it read has no labels
    Column("saw_user", Boolean, nullable=False),
    Column("saw_steps", Text, nullable=False),  # their numbers between commas, such as `,0,2,`
    Column("saw_results", Boolean, nullable=False),
    Column("unseen", Text, nullable=False),  # steps on the access list that ended without words, written likewise
    Column("planned_by", Text, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("passed_over", Text),  # a JSON array of the workers that it replaces, each with the reason
    Column("bytes", BigInteger, nullable=False),
    Column("outcome", Text),  # NULL until the call has ended
    Column("input_tokens", BigInteger),
    Column("output_tokens", BigInteger),
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 90},
)
Index("disclosures_by_recipient", DISCLOSURES.c.recipient, DISCLOSURES.c.at, DISCLOSURES.c.call)
Index("disclosures_by_tenant", DISCLOSURES.c.tenant, DISCLOSURES.c.at, DISCLOSURES.c.call)
Index("disclosures_by_time", DISCLOSURES.c.at, DISCLOSURES.c.call)
_LABELLED = text("labels IS NOT NULL")
Index(
    "disclosures_labelled",
    DISCLOSURES.c.at,
    DISCLOSURES.c.call,
    postgresql_where=_LABELLED,
    sqlite_where=_LABELLED,
)

CONTENTS = Table(
    "contents",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("ref", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

# Contents that are stored in parts, because other runs of a conversation have some of them too: see `rows/texts.py`. A
# process of 0.2 knows the table `contents` alone, so these tables are used from `forms.since` on.
SHARED_CONTENTS = Table(
    "shared_contents",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("ref", Text, primary_key=True),
    Column("head", Text),  # the last of the texts with which it begins
    Column("tail", Text),  # the text with which it ends
    Column("owner", BigInteger, nullable=False),  # the number of the lock of its texts' owner
    Column("size", BigInteger, nullable=False),  # bytes of the whole
    Column("body", LargeBinary, nullable=False),  # what is between head and tail
)
Index("shared_contents_by_head", SHARED_CONTENTS.c.head)
Index("shared_contents_by_tail", SHARED_CONTENTS.c.tail)

TEXTS = Table(
    "texts",
    METADATA,
    Column("id", Text, primary_key=True),  # a hash of its owner, of the texts before it and of itself
    Column("before", Text),  # the text that it follows; NULL for the first
    Column("spoken", Boolean, nullable=False),  # True if it stands for a message of the assistant's with this text
    Column("body", LargeBinary, nullable=False),
    Column("tenant", Text),  # NULL where 0.2 or older stored it
)
Index("texts_by_before", TEXTS.c.before)

# A key for each tenant whose contents are encrypted, itself encrypted under a master key: see `sealing.py`.
CONTENT_KEYS = Table(
    "content_keys",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("master", Text, nullable=False),
    Column("wrapped", LargeBinary, nullable=False),
    Column("retired_at", Double),  # NULL while it is in use
    sqlite_with_rowid=False,
)
Index("content_keys_by_tenant", CONTENT_KEYS.c.tenant)

FORMS = Table(
    "forms",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("since", Double, nullable=False),  # when processes may begin to write this form of storage
)

TICKETS = Table(
    "tickets",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("tier", Text, nullable=False),
    Column("driver", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("claim", BigInteger, nullable=False),
    Column("holder", Text),  # NULL when nobody holds it
    Column("until", Double, nullable=False),  # end of the claim if it is held, else when it becomes due
    Column("rung_at", Double, nullable=False),  # last ring in vain, long ago if nobody rings; 0 after a take or release
    Column("lost", BigInteger, nullable=False, server_default=text("0")),  # claims that lapsed without a word
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 50},
)
Index("tickets_by_ring", TICKETS.c.rung_at)

TAGS = Table(
    "tags",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("value", Text, primary_key=True),
    Column("run", Text, primary_key=True),
    sqlite_with_rowid=False,
)
# The tags that are erased with a run's content are found by the run; no other tag is in this index.
_ERASED = text(f"name IN ({', '.join(repr(name) for name in ERASED_TAGS)})")
Index("tags_of_callers", TAGS.c.run, postgresql_where=_ERASED, sqlite_where=_ERASED)

ONCE = Table(
    "once",
    METADATA,
    Column("id", Text, primary_key=True),  # a hash of tenant and Idempotency-Key
    Column("fingerprint", LargeBinary, nullable=False),
    Column("until", Double, nullable=False),
    Column("run", Text, nullable=False),  # empty where no run came of the request
    Column("status", BigInteger, nullable=False),  # 0 where the reply is written from the run's journal
    Column("reply", LargeBinary, nullable=False),
    Column("tenant", Text),  # NULL where 0.2 or older stored it
    sqlite_with_rowid=False,
)
Index("once_by_until", ONCE.c.until)

NOTICES = Table(
    "notices",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("turn", BigInteger, primary_key=True, autoincrement=False),
    Column("word", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("tries", BigInteger, nullable=False),
    Column("due", Double, nullable=False),  # when it may be tried (again); while it is taken, the end of that claim
    Column("failed_at", Double),  # when it was given up; NULL while it is tried
    Column("reason", Text),  # why, if it was given up
    Column("about", Text),  # the JSON that is sent, for one that is not about a run's turn
    sqlite_with_rowid=False,
)
Index("notices_by_due", NOTICES.c.due)

FEEDBACK = Table(
    "feedback",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("key", Text, nullable=False),  # empty where a program found it
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),  # explicit, grader or implicit
    Column("source", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("score", Double),
    Column("label", Text, nullable=False),
    Column("comment", Text, nullable=False),  # empty once the run's content is erased
    sqlite_with_rowid=False,
)
Index("feedback_by_run", FEEDBACK.c.run)
Index("feedback_by_time", FEEDBACK.c.at, FEEDBACK.c.id)

# Results of workers at the built-in tasks (core/rating/calibration.py). They hold no caller's content.
TRIALS = Table(
    "trials",
    METADATA,
    Column("worker", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("task", Text, primary_key=True),
    Column("domain", Text, nullable=False),
    Column("family", Text, nullable=False),
    Column("level", BigInteger, nullable=False),
    Column("question", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("score", Double, nullable=False),
    Column("usd", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),
    sqlite_with_rowid=False,
)

# Posteriors of selectors (core/rating/posterior.py). Their number guards the write: its writer has read the one before.
POLICIES = Table(
    "policies",
    METADATA,
    Column("policy", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

CONDUCTOR_CHANGES = Table(
    "conductor_changes",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Column("conductor", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("share", Double, nullable=False),
    Column("note", Text, nullable=False),
    sqlite_with_rowid=False,
)
Index("conductor_changes_by_time", CONDUCTOR_CHANGES.c.at, CONDUCTOR_CHANGES.c.id)

# Snapshots of pools, for the audit. `catalog` of an admission or an intent is such a digest (core/pool/snapshot.py).
CATALOGS = Table(
    "catalogs",
    METADATA,
    Column("digest", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

KEYS = Table(
    "keys",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("scopes", Text, nullable=False),  # JSON arrays, sorted
    Column("tiers", Text, nullable=False),
    Column("labels", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("max_usd", BigInteger),
    Column("rpm", BigInteger),
    Column("concurrency", BigInteger),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("tpm", BigInteger),
    Column("all_tenants", Boolean, nullable=False, server_default=false()),
    Column("previous_digest", LargeBinary),
    Column("previous_until", Double),
    Column("pepper", Text),  # mark of the pepper under which `digest` was made; NULL where 0.2 or older made it
)

Index("keys_by_time", KEYS.c.created_at, KEYS.c.id)
Index("keys_by_tenant", KEYS.c.tenant, KEYS.c.created_at, KEYS.c.id)

# What may be spent over several runs (core/pool/budgets.py), and what is held and spent of it.
BUDGETS = Table(
    "budgets",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("scope", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("period", Text, nullable=False),
    Column("usd", BigInteger, nullable=False),
    Column("zone", Text, nullable=False),
    Column("soft", Double),
    Column("created_at", Double, nullable=False),
    Column("slices", Integer),  # NULL: its accounts are held as a whole
    sqlite_with_rowid=False,
)
Index("budgets_by_tenant", BUDGETS.c.tenant, BUDGETS.c.scope, BUDGETS.c.name)

BUDGET_WINDOWS = Table(
    "budget_windows",
    METADATA,
    Column("account", Text, primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("budget", Text, nullable=False),
    Column("end", BigInteger, nullable=False),
    Column("held", BigInteger, nullable=False),
    Column("spent", BigInteger, nullable=False),
    Column("overrun", BigInteger, nullable=False),  # the part of `spent` that exceeded the holds of its calls
    Column("warned_at", Double),
    # Of a slice: the amount that it may hold and spend. Of an account: the sum of its slices', a part of its `held`.
    Column("escrow", BigInteger, nullable=False, server_default=text("0")),
    Column("whole", Text),  # the account that a slice belongs to; NULL in the row of an account itself
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 50},
)
Index("budget_windows_by_budget", BUDGET_WINDOWS.c.budget, BUDGET_WINDOWS.c.start)

# The holds of calls whose outcome is not known yet: a call is settled in the window of its hold.
BUDGET_HOLDS = Table(
    "budget_holds",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("call", Text, primary_key=True),
    Column("account", Text, primary_key=True),
    Column("start", BigInteger, nullable=False),
    Column("usd", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
TENANTS = Table(
    "tenants",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("disabled_at", Double),  # when gateways stopped to accept its keys; NULL while they are accepted
)

# Who changed keys, tenants and conductors, and how. A trigger refuses to alter or delete a row.
ADMIN_EVENTS = Table(
    "admin_events",
    METADATA,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("via", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("tenant", Text, nullable=False),  # empty for what all tenants share
    Column("before", LargeBinary),  # JSON without secrets; NULL where there was nothing before
    Column("after", LargeBinary),
    sqlite_autoincrement=True,
)
Index("admin_events_by_target", ADMIN_EVENTS.c.target, ADMIN_EVENTS.c.seq)
Index("admin_events_by_tenant", ADMIN_EVENTS.c.tenant, ADMIN_EVENTS.c.seq)

# Legal holds. While one is in force, nobody erases or deletes what is stored of the runs that it covers.
HOLDS = Table(
    "holds",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("scope", Text, nullable=False),  # run, user, tenant or key
    Column("name", Text, nullable=False),
    Column("tenant", Text, nullable=False),  # empty for a user's runs in every tenant
    Column("reason", Text, nullable=False),
    Column("placed_at", Double, nullable=False),
    Column("placed_by", Text, nullable=False),
    Column("released_at", Double),  # NULL while it is in force
    Column("released_by", Text),
    sqlite_with_rowid=False,
)

Index("holds_by_tenant", HOLDS.c.tenant, HOLDS.c.placed_at, HOLDS.c.id)

# The requests, tokens and open runs of API keys, tenants and users that have limits (core/pool/rates.py). A window is
# read and written under its row's lock.
RATE_WINDOWS = Table(
    "rate_windows",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("until", Double, nullable=False),  # when nothing in it counts any more
    sqlite_with_rowid=False,
)
Index("rate_windows_by_until", RATE_WINDOWS.c.until)

# The transparency log (core/transparency/): its entries, the hashes above them, and the states that are still to be
# sealed. Triggers fill the queue, so that processes of earlier releases do so too; `xid` is the transaction that did.
LOG_LEAVES = Table(
    "log_leaves",
    METADATA,
    Column("place", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("subject", Text, nullable=False),  # the run that it concerns, else the same as `id`
    Column("events", BigInteger, nullable=False),  # events of the run that are sealed so far
    Column("entry", LargeBinary, nullable=False),
    Column("salt", LargeBinary),  # NULL once its run was pruned
    Column("frontier", LargeBinary),  # what is needed to go on with the root of the run's events
    sqlite_with_rowid=False,
)
Index("log_leaves_by_subject", LOG_LEAVES.c.subject)

LOG_TILES = Table(
    "log_tiles",
    METADATA,
    Column("level", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("body", LargeBinary, nullable=False),
)

LOG_QUEUE = Table(
    "log_queue",
    METADATA,
    Column("n", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("kind", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("xid", BigInteger, nullable=False),  # 0 in SQLite, where one transaction at a time writes
    Column("at", Double, nullable=False),
)
Index("log_queue_by_xid", LOG_QUEUE.c.xid, LOG_QUEUE.c.n)

# One row: how far the log has come. Whoever seals holds its lock.
LOG_STATE = Table(
    "log_state",
    METADATA,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    Column("xid", BigInteger, nullable=False),  # no entry of the queue with a lower one is still to come
    Column("catch_up", Text),  # the last run from before the log that was queued; NULL once all are
    Column("signer", Text),  # the key that was made where no setting names one
    Column("verifiers", Text),  # the keys by which checkpoints are signed
    Column("checkpoint", Text),
    Column("sealed_at", Double),
)

# What is left of runs whose rows were deleted: enough to say so, and to prove a copy of the journal right.
PRUNED_RUNS = Table(
    "pruned_runs",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("pruned_at", Double, nullable=False),
    Column("events", BigInteger, nullable=False),
    Column("root", LargeBinary, nullable=False),  # the Merkle root of its events (core/run/journal_hash.py)
    Column("archive", Text, nullable=False),  # where its journal was archived; empty if nowhere
    sqlite_with_rowid=False,
)

# One row that the readiness probe writes to: proof that a write transaction goes through, schema included.
PULSE = Table(
    "pulse",
    METADATA,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("beats", BigInteger, nullable=False),
    Column("server", Text),  # identity and timeline of the Postgres on which this database was last (generation.py)
)


def insert_into(conn: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT in the dialect of the connection, which may say what becomes of a row that exists already."""
    if conn.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
