"""The write path: entries are gathered into a batch, applied in memory, and committed as a group."""
