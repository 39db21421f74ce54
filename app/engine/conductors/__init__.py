"""What the engine knows of conductors: ratings, versions, and whether each is alive."""
