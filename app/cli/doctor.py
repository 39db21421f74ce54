"""`baton doctor` checks everything that the configuration needs, with one line and a remedy for each check."""

from collections.abc import Callable, Mapping

from rich.text import Text

from app.cli import checks, event_loop, terminal
from app.cli.asked import Asked
from app.cli.checks import Verdict
from app.errors import BatonError, ConfigInvalid
from app.process.config import Loaded, configure
from app.process.wiring import open_runtime

STYLES: Mapping[str, str] = {"ok": "green", "fail": "bold red", "skip": "dim"}


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Run all checks. Returns 1 if one failed."""
    terminal.log_to_stderr("error")
    try:
        loaded = configure(environ)
    except ConfigInvalid as error:
        return _report([Verdict("settings", "fail", fault) for fault in error.faults])
    _report(checks.of_settings(loaded))
    if not loaded.catalog.rehearsal:
        terminal.err().print("Each real model is asked for one token now, which costs a fraction of a cent.")
    with terminal.err().status("checking"):
        verdicts = event_loop.run(_check(loaded))
    return _report(verdicts)


async def _check(loaded: Loaded) -> list[Verdict]:
    """Check the schema first, because without it all other checks of the database fail for the same reason."""
    schema = await checks.of_schema(loaded)
    try:
        async with open_runtime(loaded) as opened:
            return [*schema, *await checks.of_house(loaded, opened)]
    except BatonError as error:
        return [*schema, Verdict("start", "fail", terminal.clean(error.message))]


def _report(verdicts: list[Verdict]) -> int:
    console = terminal.out()
    for one in verdicts:
        line = Text.assemble((f"{one.status:<4}", STYLES[one.status]), f"  {one.name}: {one.words}")
        console.print(line, soft_wrap=True)
        if one.remedy:
            console.print(Text(f"      -> {one.remedy}"), soft_wrap=True)
    return int(any(one.status == "fail" for one in verdicts))
