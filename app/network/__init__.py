"""How the service speaks to what is outside of it: its HTTP client and its retry policies."""
