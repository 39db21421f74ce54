"""The transparency log: its tree, its tiles, its signed checkpoints and its entries."""
