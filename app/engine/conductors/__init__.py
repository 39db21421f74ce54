"""The engine's knowledge of conductors: ratings, versions, and whether each is alive."""
