"""Connections to others: HTTP clients, TLS, logins, the traces of requests, and retries that are not journaled."""
