"""`baton audit verify` checks the transparency log, and everything that is sealed in it.

Exit status: 0 clean, 1 something is altered, missing or surplus, 2 the log could not be read.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from app.audit.export import Export
from app.audit.log.findings import RULES, Verification
from app.audit.log.folder import TilesFolder
from app.audit.log.journal import check_journal
from app.audit.log.rows import check_database
from app.audit.log.tree import Checkpoint, Key, LogFormatError, read_checkpoint, read_key
from app.audit.log.verify import LogCheck
from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.terminal import count
from app.errors import ConfigInvalid, StoreUnavailable
from app.process.config import read
from app.store.sealed_rows import SealedRows, in_one_snapshot

MAX_PRINTED_FINDINGS = 100
"""Findings that are printed; `--json` has up to 10,000."""
CLEAN, ALTERED, UNREADABLE = 0, 1, 2
MAX_CHECKPOINT_BYTES = 2**16
"""Most bytes of a checkpoint."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command. Returns the exit status."""
    terminal.log_to_stderr("warning")
    report = Verification()
    check = LogCheck(report, keys=_keys(args.keys, "--key"), held_checkpoints=_read_checkpoints(args.checkpoints))
    check.witnesses = _keys(args.witnesses, "--witness")
    if check.witnesses and not check.held_checkpoints:
        raise ConfigInvalid(["--witness: needs the checkpoint that it has cosigned (--checkpoint)"])
    if args.journal is not None and args.folder is None:
        raise ConfigInvalid(["--journal: needs the folder of saved tiles with which it is compared"])
    if args.saved is not None:
        check.saved_entries = _read_saved_tiles(args.saved).bundle
    began = time.monotonic()
    try:
        if args.folder is not None:
            event_loop.run(_verify_folder(args, check))
        else:
            event_loop.run(_verify_database(args, environ, check))
    except StoreUnavailable as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return UNREADABLE
    if not check.keys:
        report.notes.append("Signatures were checked by the keys that the log itself names; give yours with --key.")
    if not check.held_checkpoints:
        report.notes.append("No checkpoint from outside was given (--checkpoint), so a log that was made anew passes.")
    if args.json:
        terminal.print_json(_json(report, check))
    else:
        _print(report, time.monotonic() - began)
    if report.is_clean:
        return CLEAN
    return ALTERED


def _keys(texts: tuple[str, ...], option: str) -> tuple[Key, ...]:
    """Return the keys of an option, each as its text or as a file with one on each line.

    Raises `ConfigInvalid` for a file without a key: nothing would be compared with it, and everything would pass.
    """
    keys = []
    for text in texts:
        path = Path(text)
        try:
            lines = [text]
            if path.is_file():
                lines = path.read_text().split()
            keys += [read_key(line) for line in lines]
        except (OSError, UnicodeDecodeError, LogFormatError) as error:
            raise ConfigInvalid([f"{option} {text}: {error}"]) from None
        if not lines:
            raise ConfigInvalid([f"{option} {text}: the file has no key"])
    return tuple(keys)


def _read_checkpoints(places: tuple[str, ...]) -> tuple[tuple[str, Checkpoint], ...]:
    """Return the checkpoints of this command, each a file or a folder of files.

    Raises `ConfigInvalid` for a folder without any, such as one that is not mounted: nothing would be compared with it,
    and everything would pass.
    """
    checkpoints = []
    for name in places:
        path = Path(name)
        if not path.exists():
            raise ConfigInvalid([f"--checkpoint {name}: there is no such file"])
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*.txt")) if file.is_file()]
        if not files:
            raise ConfigInvalid([f"--checkpoint {name}: the folder has no checkpoint (*.txt)"])
        for file in files:
            try:
                if file.stat().st_size > MAX_CHECKPOINT_BYTES:
                    raise ConfigInvalid([f"--checkpoint {file}: it is larger than a checkpoint can be"])
                checkpoints.append((file.name, read_checkpoint(file.read_text())))
            except (OSError, UnicodeDecodeError, LogFormatError) as error:
                raise ConfigInvalid([f"--checkpoint {file}: {error}"]) from None
    return tuple(checkpoints)


def _read_saved_tiles(place: str) -> TilesFolder:
    """Return the saved tiles of this command. Raises `ConfigInvalid` for a folder without any, as `_read_checkpoints`
    does."""
    folder = TilesFolder(Path(place))
    if not folder.bundle(0):
        raise ConfigInvalid([f"--saved {place}: the folder has no entries of a log; `baton audit tiles` saves them"])
    return folder


async def _verify_folder(args: Arguments, check: LogCheck) -> None:
    """Check a folder of tiles, and a file of journals against it."""
    folder = TilesFolder(Path(args.folder))
    check.tiles = folder.tile
    check.check(folder.entries(), folder.note())
    if args.journal is not None:
        export, entries = Export(Path(args.journal)), list(folder.entries())
        await check_journal(
            export, entries, check.report, exported_at=export.at, whole=export.is_whole, settled=args.settled
        )


async def _verify_database(args: Arguments, environ: Mapping[str, str], check: LogCheck) -> None:
    """Check the configured database, all in one snapshot."""
    settings = read(environ)
    storage.print_database(settings)

    def check_rows(rows: SealedRows) -> None:
        state = rows.state()
        was_never_sealed = not rows.has_entries() and (state is None or not state["size"])
        if was_never_sealed and not check.held_checkpoints:  # with one, an emptied log is a finding
            raise ConfigInvalid(["Nothing was sealed in this database yet; engines of 0.3.0 and later seal."])
        check_database(check, rows, contents=not args.no_contents, settled=args.settled)

    async with storage.existing_database(settings), storage.open_journals(settings) as archive:
        await in_one_snapshot(archive, check_rows)


def _json(report: Verification, check: LogCheck) -> dict[str, object]:
    first = report.first
    return {
        "clean": report.is_clean,
        "first": first,
        "entries": report.entries,
        "checkpoints": len(check.held_checkpoints),
        "runs": report.runs,
        "events": report.events,
        "rows": report.rows,
        "contents": report.contents,
        "pruned": report.pruned,
        "erased": report.erased,
        "pending": report.pending,
        "rules": dict(report.rules),
        "notes": report.notes,
        "findings": list(report.in_order()),
    }


def _print(report: Verification, seconds: float) -> None:
    console = terminal.stdout()
    for number, finding in enumerate(report.in_order()):
        if number == MAX_PRINTED_FINDINGS:
            console.print(f"... and {report.rules.total() - MAX_PRINTED_FINDINGS:,} more")
            break
        console.print(str(finding), soft_wrap=True)
    for name, number in report.rules.most_common():
        console.print(f"{number:,} x {name}: {RULES[name]}", style="red", soft_wrap=True)
    rate = report.events / max(seconds, 0.001)
    figures = (
        count(report.entries, "entry", "entries"),
        f"{count(report.runs, 'run')} with {count(report.events, 'event')} ({rate:,.0f} a second)",
        f"{count(report.rows, 'other row')}, {count(report.contents, 'text')}",
        f"{count(report.erased, 'run')} erased, {report.pruned:,} pruned",
        f"{report.pending:,} not sealed yet",
    )
    console.print("; ".join(figures), soft_wrap=True)
    for note in report.notes:
        console.print(note, soft_wrap=True)
    if report.first is not None:
        console.print(f"The first bad place: {report.first}", style="bold red", soft_wrap=True)
        return
    console.print("Nothing that was sealed is altered or missing.", style="green")
