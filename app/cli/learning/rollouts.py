"""`baton rollouts` writes journaled runs as rollouts for training and evaluation, if their callers have agreed."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import content_reads
from app.core.pool.catalog import Catalog
from app.core.pool.snapshot import restore_catalog
from app.errors import ConfigInvalid, EventMalformed
from app.lab.journal_rollouts import RolloutFilter, SkippedRun, rollout
from app.lab.rollouts import Rollout, to_line
from app.process.config import Settings, read


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Write the file and print why runs were left out. Returns 1 if there is no rollout: nothing is written then, and
    an earlier file stays as it was."""
    terminal.log_to_stderr("warning")
    settings, selection = read(environ), rollout_filter(args)
    path = Path(args.file).resolve()  # so that a link to a file stays
    if path.exists() and not path.is_file():
        raise ConfigInvalid([f"{path}: cannot be written: it is no file"])
    if not path.parent.is_dir():
        raise ConfigInvalid([f"{path}: cannot be written: there is no such folder"])
    storage.print_database(settings)
    rollouts, skip_counts = event_loop.run(collect(settings, selection, args.start(now())))
    if rollouts:
        _write(path, rollouts)
    counts = Counter(rollout.split for rollout in rollouts)
    rated_count = sum(rollout.score is not None for rollout in rollouts)
    if args.json:
        summary = {
            "file": str(path),
            "rollouts": len(rollouts),
            "train": counts["train"],
            "held_out": counts["held-out"],
        }
        terminal.print_json({**summary, "rated": rated_count, "left_out": dict(skip_counts.most_common())})
        return int(not rollouts)
    console = terminal.stdout()
    summary_line = f"No run fits; {path} was not written."
    if rollouts:
        summary_line = (
            f"Wrote {terminal.count(len(rollouts), 'rollout')} to {path} ({counts['train']:,} to train, "
            f"{counts['held-out']:,} held out; {rated_count:,} rated); it holds callers' texts."
        )
    console.print(summary_line, soft_wrap=True)
    for reason, count in skip_counts.most_common():
        console.print(f"left out: {count:,}, because {reason}", soft_wrap=True)
    return int(not rollouts)


def _write(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write a file that only its owner can read, completely or not at all."""
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.writelines(f"{to_line(rollout)}\n" for rollout in rollouts)
        part.replace(path)
    except OSError as error:
        raise ConfigInvalid([f"{path}: cannot be written: {error.strerror}"]) from None
    finally:
        part.unlink(missing_ok=True)


def rollout_filter(args: Arguments) -> RolloutFilter:
    """Return the choice of runs. Raises `ConfigInvalid` if the options do not say who has agreed."""
    if (args.consent is None) is not args.everybody:
        raise ConfigInvalid(["say whose runs may be learned from: --consent LABEL, or --everybody if all have agreed"])
    return RolloutFilter(
        consent=args.consent,
        without=frozenset(args.without),
        held_out=args.held_out,
        tier=args.tier,
        tenant=args.tenant,
        rated=args.rated,
    )


async def collect(
    settings: Settings, selection: RolloutFilter, since: float | None
) -> tuple[list[Rollout], Counter[str]]:
    """Return the rollouts of the configured database, oldest first, and the number of runs left out, by reason."""
    rollouts: list[Rollout] = []
    skip_counts: Counter[str] = Counter()
    async with storage.open_configured_store(settings) as store, storage.open_journals(settings) as archive:
        catalogs: dict[str, Catalog] = {
            digest: restore_catalog(body) for digest, body in (await archive.catalogs()).items()
        }
        async for record in archive.records(since=since):
            try:
                ratings = await store.feedback(str(record.row["id"]))
                rollouts.append(rollout(record, catalogs, ratings, selection))
            except SkippedRun as reason:
                skip_counts[str(reason)] += 1
            except EventMalformed:
                skip_counts["its journal cannot be read"] += 1
        await content_reads.record_read(
            store, "", selection.tenant or "", f"rollouts of {terminal.count(len(rollouts), 'run')}"
        )
    return rollouts, skip_counts
