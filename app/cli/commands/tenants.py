"""Declares `baton tenants` with its options."""

from app.cli.commands.declarations import AS_JSON, Group, argument, group


def define(root: Group) -> None:
    """Define the commands."""
    tenants = group(root, "tenants", "List, create, disable and enable tenants.")

    @tenants.add("ls", "tenants", "baton tenants ls")
    @AS_JSON
    def ls() -> None:
        """List the tenants that were created, or that have keys."""

    @tenants.add("add", "tenants", "baton tenants add acme")
    @argument("tenant", "The tenant's name.")
    @AS_JSON
    def add() -> None:
        """Create a tenant. A key that is made for a tenant needs no such command."""

    @tenants.add("disable", "tenants", "baton tenants disable acme")
    @argument("tenant", "The tenant's name.")
    @AS_JSON
    def disable() -> None:
        """Accept none of a tenant's keys; gateways follow within five seconds. Runs that have begun go on."""

    @tenants.add("enable", "tenants", "baton tenants enable acme")
    @argument("tenant", "The tenant's name.")
    @AS_JSON
    def enable() -> None:
        """Accept a tenant's keys again."""
