"""Commands of operators: processes of the service, its database, its settings, and checks of them."""

import click

from app.cli.commands.declarations import Group, argument


def define(root: Group) -> None:
    """Define the commands."""

    @root.add("serve", "process", "baton serve", "BATON_PORT=9000 BATON_POOL=pool.toml baton serve")
    def serve() -> None:
        """Run the whole service in this process."""

    @root.add("gateway", "process", "baton gateway")
    def gateway() -> None:
        """Answer HTTP requests; dispatchers execute the runs. Needs Postgres and Redis."""

    @root.add("dispatcher", "process", "baton dispatcher")
    def dispatcher() -> None:
        """Plan and execute runs. Start as many of these as you need. Needs Postgres and Redis."""

    @root.add("migrate", "schema", "baton migrate")
    def migrate() -> None:
        """Bring the database to this version's schema."""

    @root.add("config", "settings", "baton config")
    def config() -> None:
        """List all settings with value and meaning."""

    @root.add("doctor", "doctor", "baton doctor")
    def doctor() -> None:
        """Check settings, database, Redis, conductors and keys.

        Asks each real model that it checks for one token, which costs a fraction of a cent.
        """

    @root.add("probe", "probe", "baton probe")
    def probe() -> None:
        """Check that the gateway on this machine is ready.

        Exits with 0 if it is, else with 1; for health checks of containers.
        """

    @root.add("completion", "completion", 'eval "$(baton completion bash)"')
    @argument("shell", "The shell.", type=click.Choice(["bash", "zsh", "fish"]))
    def completion() -> None:
        """Print a script that completes commands and options."""
