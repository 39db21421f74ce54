"""HTTP for every route: connections, parsing, keys, admission, idempotency, errors and event streams."""
