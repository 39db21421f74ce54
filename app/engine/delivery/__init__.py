"""Delivery: followers, callers and webhooks receive what they need of a run, in this process and in others."""
