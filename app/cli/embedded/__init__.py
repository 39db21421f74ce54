"""The service inside one command, for commands that start runs."""
