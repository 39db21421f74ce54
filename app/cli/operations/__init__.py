"""Commands that start the service, care for its database, and check it."""
