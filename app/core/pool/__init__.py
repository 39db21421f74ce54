"""The pool: workers, tiers, who may take part, what a call may cost, and which workers are healthy."""
