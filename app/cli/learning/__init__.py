"""Commands that rate, measure, compare and train."""
