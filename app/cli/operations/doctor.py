"""`baton doctor` checks everything that the configuration needs, with one line and a remedy for each check."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import asdict, replace
from rich.text import Text

from app.cli import event_loop, terminal
from app.cli.arguments import Arguments
from app.cli.operations import doctor_checks
from app.cli.operations.doctor_checks import Verdict
from app.errors import BatonError, ConfigInvalid
from app.process.config import Configuration, configure
from app.process.wiring import open_runtime
from app.store.sqlkit import revisions

STYLES: Mapping[str, str] = {"ok": "green", "fail": "bold red", "skip": "dim"}


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Run all checks. Returns 1 if one failed."""
    terminal.log_to_stderr("error")
    report = _Report(as_json=args.json)
    try:
        config = configure(environ)
    except ConfigInvalid as error:
        report.add([Verdict("settings", "fail", fault) for fault in error.faults])
        return report.end()
    report.add(doctor_checks.check_settings(config, environ))
    if not config.catalog.rehearsal:
        terminal.stderr().print("Each real model is asked for one token now, which costs a fraction of a cent.")
    with terminal.stderr().status("checking"):
        verdicts = event_loop.run(_check(config, every=args.every))
    report.add(verdicts)
    return report.end()


async def _check(config: Configuration, *, every: bool) -> list[Verdict]:
    """Check the schema first, because without it all other checks of the database would fail for the same reason.

    An SQLite file that nobody has made yet is not made: the parts are opened over a temporary folder instead.
    """
    if revisions.exists(config.settings.database_url):
        return await _check_runtime(config, config, every=every)
    with TemporaryDirectory(prefix="baton-doctor-") as folder:
        place = {"data_dir": Path(folder), "database_url": f"sqlite:///{folder}/baton.db"}
        elsewhere = replace(config, settings=config.settings.model_copy(update=place))
        return [doctor_checks.missing_database(config), *await _check_runtime(config, elsewhere, every=every)]


async def _check_runtime(config: Configuration, effective: Configuration, *, every: bool) -> list[Verdict]:
    schema = await doctor_checks.check_schema(config)
    has_database = effective is config and all(verdict.status != "fail" for verdict in schema)
    try:
        async with open_runtime(effective) as runtime:
            return [*schema, *await doctor_checks.check_parts(config, runtime, every=every, has_database=has_database)]
    except BatonError as error:
        return [*schema, Verdict("start", "fail", terminal.clean(error.message))]


class _Report:
    """Prints verdicts as they come, or all of them as JSON at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._verdicts: list[Verdict] = []

    def add(self, verdicts: list[Verdict]) -> None:
        """Add verdicts, and print them unless they are printed as JSON."""
        self._verdicts += verdicts
        if not self._as_json:
            _print(verdicts)

    def end(self) -> int:
        """Return the exit status: 1 if a check failed."""
        if self._as_json:
            terminal.print_json([asdict(verdict) for verdict in self._verdicts])
        return int(any(verdict.status == "fail" for verdict in self._verdicts))


def _print(verdicts: list[Verdict]) -> None:
    console = terminal.stdout()
    for verdict in verdicts:
        line = Text.assemble((f"{verdict.status:<4}", STYLES[verdict.status]), f"  {verdict.name}: {verdict.words}")
        console.print(line, soft_wrap=True)
        if verdict.remedy:
            console.print(f"      -> {verdict.remedy}", soft_wrap=True)
