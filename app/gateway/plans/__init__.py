"""Plans over HTTP: made, shown, edited, and executed as they stand."""
