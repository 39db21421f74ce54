"""The step queue carries tickets and the live parts of answers. It may lose everything at any time (D1)."""
