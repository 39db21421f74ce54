"""What every route shares: connections, parsing, keys, admission, idempotency, errors and event streams."""
