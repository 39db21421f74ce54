"""The step queue: a doorbell for tickets and a wire for live deltas. It may lose everything at any time (D1)."""
