"""Delivery: what callers and webhooks receive of a run, in this process and in others."""
