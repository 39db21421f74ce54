"""Declares the commands of operators: processes of the service, its database, its settings, and checks of them."""

import click

from app.cli.declarations import (
    AS_JSON,
    HOST,
    POOL,
    PORT,
    Group,
    argument,
    flag,
    in_order,
    option,
    repeatable,
)


def define(root: Group) -> None:
    """Define the commands."""
    _processes(root)
    _database(root)
    _checks(root)


def _processes(root: Group) -> None:
    announcement = flag("--json", help="Announce the started process as one line of JSON.")

    @root.add("serve", "operations.serve", "baton serve", "baton serve --port 9000 --pool pool.toml")
    @in_order(HOST, PORT, POOL, announcement)
    def serve() -> None:
        """Run the whole service in this process."""

    @root.add("gateway", "operations.serve", "baton gateway --host 0.0.0.0 --pool pool.toml")
    @in_order(HOST, PORT, POOL, announcement)
    def gateway() -> None:
        """Answer HTTP requests, while engines (`baton dispatcher`) carry out the runs. Needs Postgres and Redis."""

    @root.add("dispatcher", "operations.serve", "baton dispatcher --pool pool.toml")
    @in_order(POOL, announcement)
    def dispatcher() -> None:
        """Run an engine, which plans and carries out runs. Start as many as you need. Needs Postgres and Redis."""


def _database(root: Group) -> None:
    @root.add(
        "migrate",
        "operations.migrate",
        "baton migrate",
        "baton migrate --status",
        "baton migrate --sql",
        "baton migrate --to 0012",
    )
    @flag("--status", help="Only show the current revision, this version's, and those between; exit with 1 if any.")
    @flag("--sql", help="Print the SQL that would run, and run nothing.")
    @option("--to", default="head", metavar="REVISION", help="The revision to bring the schema to.")
    @flag("--down", help="Allow --to to be an earlier revision, which drops what later ones have added.")
    @AS_JSON
    def migrate() -> None:
        """Bring the database to this version's schema."""

    @root.add(
        "restored",
        "operations.after_restore",
        "baton restored --dry-run",
        "baton restored --log engine-1.log --log engine-2.log",
        "baton restored --keep-open --json",
    )
    @repeatable(
        "--log", "logs", metavar="FILE", help="The log of an engine, which shows what it did after the restore point."
    )
    @flag("--keep-open", help="Let engines go on with the runs that are open, and do again what they had done.")
    @flag("--dry-run", help="Only print what would be done.")
    @AS_JSON
    def restored() -> None:
        """Put a database that was restored from a back-up into service.

        Run it while no gateway and no engine runs. It ends the runs that were open at the restore point, because nobody
        can tell what they have done since, gives their open calls the outcome `unknown`, empties the queue in Redis,
        and lists what was billed, as far as the logs tell, and is missing from the journal.
        """


def _checks(root: Group) -> None:
    @root.add("top", "operations.top", "baton top", "baton top --once --period hour", "baton top --json")
    @option(
        "--period", type=click.Choice(["hour", "day", "week", "month"]), default="day", help="The length of the period."
    )
    @option("--tenant", metavar="TENANT", help="Only runs of this tenant (default: of every tenant).")
    @flag("--once", help="Print it once, as is done where standard output is not a terminal.")
    @AS_JSON
    def top() -> None:
        """Show what runs, what it costs and what fails, every two seconds.

        Reads the configured database: `GET /v1/overview` knows the breakers and the conductors as well.
        """

    @root.add("config", "operations.config", "baton config", "baton config --pool pool.toml --json")
    @in_order(POOL, AS_JSON)
    def config() -> None:
        """List all settings with value and meaning."""

    @root.add("doctor", "operations.doctor", "baton doctor", "baton doctor --all --pool pool.toml")
    @flag("--all", "every", help="Ask every worker of the pool (default: the cheapest of each provider).")
    @in_order(POOL, AS_JSON)
    def doctor() -> None:
        """Check settings, database, Redis, conductors and keys.

        Asks each real model that it checks for one token, which costs a fraction of a cent.
        """

    @root.add("probe", "operations.probe", "baton probe", "baton probe --port 9000")
    @option("--host", default="127.0.0.1", metavar="ADDRESS", help="The address of the gateway.")
    @option(
        "--port",
        "baton_port",
        type=click.IntRange(1, 65_535),
        metavar="PORT",
        help="The port of the gateway (BATON_PORT).",
    )
    @AS_JSON
    def probe() -> None:
        """Check that the gateway on this machine is ready.

        Exits with 0 if it is, else with 1; for health checks of containers.
        """

    @root.add("completion", "commands.completion", 'eval "$(baton completion bash)"')
    @argument("shell", "The shell.", type=click.Choice(["bash", "zsh", "fish"]))
    def completion() -> None:
        """Print a script that completes commands and options."""
