"""Prints the reference of all commands: `python -m app.cli.commands > deploy/docs/commands.md`."""

from app.cli.commands.reference import document

print(document())
