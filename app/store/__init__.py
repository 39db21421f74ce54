"""The store: the journal, its contents, the outbox and the keys, in SQLite or Postgres. `protocol/` is the seam."""
