"""The pure part: records and decisions. Nothing here waits, reads a clock, draws a random number or logs."""
