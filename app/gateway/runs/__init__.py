"""`/v1/runs` and `/v1/models`: the audit trail, feedback, cancellation, and what can be asked for."""
