"""The database itself: its tables and migrations, prepared statements, and how work is run on SQLite and Postgres."""
