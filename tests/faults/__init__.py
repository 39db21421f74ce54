"""The fault suite: real processes, servers and lines, broken on purpose, and what must be true all the same."""
