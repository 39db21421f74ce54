"""Declares `baton policy`, `baton audit` and `baton disclosures` with their options."""

import click

from app.cli.declarations import (
    AS_JSON,
    COUNT,
    SINCE,
    SPAN,
    Group,
    Moment,
    argument,
    flag,
    group,
    in_order,
    option,
    repeatable,
)


def define(root: Group) -> None:
    """Define the commands."""
    _define_policy(root)
    _define_audit(root)


def _define_policy(root: Group) -> None:
    policy = group(root, "policy", "Show who may see which requests, and what a change would allow.")

    @policy.add("check", "audit.policy", "baton policy check", "baton policy check pool.toml --json")
    @argument("file", "A pool file; without one, the configured pool is read.", required=False)
    @AS_JSON
    def check() -> None:
        """List who may see requests with each label, by tier, and rules that have no effect."""

    @policy.add("diff", "audit.policy", "baton policy diff old.toml new.toml")
    @argument("old", "The pool file in force.")
    @argument("new", "The pool file that is to replace it.")
    @AS_JSON
    def diff() -> None:
        """Prove that a new pool file shows nothing to more recipients, or name who would see what.

        Enumerates every set of labels for every tier and recipient. Exits with 0 if nothing is shown to more
        recipients, else with 1.
        """

    @policy.add("try", "audit.policy", "baton policy try new.toml --since 7d")
    @argument("file", "The pool file to try.")
    @in_order(SINCE, AS_JSON)
    def try_() -> None:
        """Apply a pool file to the labels of past runs: list whose calls it would have refused.

        Exits with 0 if it would have refused none, else with 1; so too if the journal of a run cannot be read.
        """


CHOSEN = in_order(option("--run", help="Only the run of this id."), SINCE)


def _define_audit(root: Group) -> None:
    audit = group(root, "audit", "Check the journal against what Baton promises.")

    @audit.add("check", "audit.check", "baton audit check --since 7d", "baton audit check export.jsonl --json")
    @argument("file", "An export; without one, the configured database is read.", required=False)
    @option("--against", metavar="FILE", help="An earlier export or archive: report what is missing of it, or differs.")
    @AS_JSON
    @CHOSEN
    def check() -> None:
        """Report every contradiction that the journal shows.

        Exits with 0 if there is none, with 1 if there are some, and with 2 if the journal could not be read.
        """

    @audit.add("export", "audit.check", "baton audit export export.jsonl --since 30d")
    @argument("file", "The file to write; only its owner can read it.")
    @in_order(CHOSEN, AS_JSON)
    def export() -> None:
        """Write the journal, with callers' texts, to a file of JSON lines."""

    @audit.add("tiles", "audit.check", "baton audit tiles /srv/baton-log")
    @argument("folder", "The folder to write to.")
    @AS_JSON
    def tiles() -> None:
        """Write the transparency log to a folder: entries, hashes and the signed checkpoint, without any content.

        The layout is that of https://c2sp.org/tlog-tiles, so that other programs can check it, too.
        """

    _define_verify(audit)

    @audit.add(
        "changes", "audit.changes", "baton audit changes --since 7d", "baton audit changes --target 3f0c9a1e5b7d2c48"
    )
    @option("--tenant", help="Only changes to this tenant and its keys.")
    @option("--target", help="Only changes to this key (by its id), tenant, budget, hold, conductor or run.")
    @option("--actor", help="Only changes that this key, person or user has made.")
    @option(
        "--action",
        help="Only changes of this kind, such as retention.set; content.erased, run.pruned: who removed what.",
    )
    @option("--since", type=SPAN, metavar="SPAN", help="Only changes of the last 30m, 12h, 7d, ...")
    @option("--limit", type=COUNT, default=50, help="The most changes to list.")
    @AS_JSON
    def changes() -> None:
        """List who changed keys, tenants, budgets, holds, conductors and retention, the newest first."""

    @audit.add("log", "audit.transparency_log", "baton audit log", "baton audit log --new-key log.example.com/baton")
    @option("--new-key", metavar="NAME", help="Make a key for a log of this name, and print it. Nothing is stored.")
    @AS_JSON
    def log() -> None:
        """Show the state of the transparency log: its origin, its size, and the keys that sign its checkpoints."""

    @audit.add("rules", "audit.check", "baton audit rules")
    @AS_JSON
    def rules() -> None:
        """List the rules by name, with the promise that each stands for."""

    _define_reads(audit)
    _define_disclosures(root)


def _define_reads(audit: Group) -> None:
    @audit.add("views", "audit.views", "baton audit views --role baton_auditor")
    @option("--role", help="A role of the database that may read the views from now on.")
    @flag("--drop", help="Drop the views.")
    @AS_JSON
    def views() -> None:
        """Make SQL views in Postgres, without texts: audit_runs, audit_pruned_runs, audit_events, audit_disclosures."""

    @audit.add(
        "reads", "audit.content_reads", "baton audit reads --since 7d", "baton audit reads --run run_0199 --json"
    )
    @option("--run", metavar="RUN", help="Only readings of this run, by its whole id.")
    @option("--tenant", help="Only readings of this tenant's runs.")
    @option("--actor", help="Only readings by this key (by its id) or user.")
    @option("--since", type=SPAN, metavar="SPAN", help="Only readings of the last 30m, 12h, 7d, ...")
    @option("--limit", type=COUNT, default=50, help="The most readings to list.")
    @AS_JSON
    def reads() -> None:
        """List who has read texts of callers and workers, the newest first."""


def _define_disclosures(root: Group) -> None:
    @root.add(
        "disclosures",
        "audit.disclosures",
        "baton disclosures --recipient luna --saw user --since 7d",
        "baton disclosures --saw step:0 --saw label:phi --since 2026-11-17 --until 2026-11-18",
        "baton disclosures --recipient-kind conductor --csv --limit 100000",
        "baton disclosures rebuild",
    )
    @argument(
        "action",
        "rebuild: derive the rows of calls that were made before the ledger was kept.",
        required=False,
        type=click.Choice(["rebuild"]),
    )
    @repeatable("--recipient", metavar="WORKER", help="Only what was sent to this worker.")
    @repeatable(
        "--recipient-kind",
        type=click.Choice(["worker", "conductor", "embedder", "shadow"]),
        help="Only what was sent to a recipient of this kind.",
    )
    @repeatable("--provider", help="Only what was sent to this provider.")
    @repeatable(
        "--saw", metavar="WHAT", help="Only recipients that saw this: user, step:N, results (of tools), or label:X."
    )
    @option(
        "--since",
        type=Moment(),
        metavar="TIME",
        help="Only calls from this time on: 7d (ago), 2026-11-17, 2026-11-17T08:00Z.",
    )
    @option("--until", type=Moment(), metavar="TIME", help="Only calls before this time.")
    @repeatable("--tenant", help="Only runs of this tenant.")
    @repeatable("--user", help="Only runs whose request named this end user.")
    @repeatable("--run", metavar="RUN", help="Only this run, by its whole id.")
    @repeatable("--key", metavar="ID", help="Only runs that the key of this id began.")
    @option("--limit", type=COUNT, default=100, help="The most rows to print.")
    @flag("--reverse", help="The oldest first.")
    @flag("--json", help="Print each row as a line of JSON.")
    @flag("--csv", help="Print the rows as CSV.")
    def disclosures() -> None:
        """List which workers were sent what, and by whose decision, the newest first."""


def _define_verify(audit: Group) -> None:
    @audit.add(
        "verify",
        "audit.verify",
        "baton audit verify --checkpoint held/ --key log.pub",
        "baton audit verify --checkpoint held/ --witness witness.pub",
        "baton audit verify tiles/ --journal export.jsonl --checkpoint monday.txt",
        "baton audit verify --settled --saved tiles/ --json",
    )
    @argument("folder", "Saved tiles; without them, the configured database is read.", required=False)
    @repeatable(
        "--checkpoint",
        "checkpoints",
        metavar="FILE",
        help="A checkpoint from outside, or a folder of them.",
    )
    @repeatable("--key", "keys", metavar="KEY", help="A verifier key of the log, or a file of such keys.")
    @repeatable(
        "--witness",
        "witnesses",
        metavar="KEY",
        help="A key of a witness that must have cosigned the newest checkpoint.",
    )
    @option("--journal", metavar="FILE", help="An export of the journal to compare with the saved tiles.")
    @option("--saved", metavar="FOLDER", help="Tiles that were saved before, to find the entry that was altered.")
    @flag("--settled", help="Nothing writes, or wrote between the copies: whatever is not sealed is a finding.")
    @flag("--no-contents", help="Leave out texts and the ledger of disclosures, which take the longest.")
    @AS_JSON
    def verify() -> None:
        """Check what is stored against the transparency log, and the log against checkpoints that are held outside.

        Names the first bad place, and says what is altered, missing or surplus. Exits with 0 if nothing is, with 1 if
        something is, and with 2 if the log could not be read.
        """
