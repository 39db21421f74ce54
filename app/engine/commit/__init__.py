"""Commits: the writer of a run, the transition that follows from a state, its tickets, and retries while the database
is away."""
