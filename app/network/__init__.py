"""Connections to others: HTTP clients, TLS, logins, the traces of requests, retries that are not journaled, and reads
of the database that callers share."""
