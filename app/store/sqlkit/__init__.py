"""The database itself: engines, connections, tables, prepared statements, and whether it is available."""
