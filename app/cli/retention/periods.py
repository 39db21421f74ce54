"""`baton retention show` shows how long texts and runs are kept, by tenant, tier and label."""

from collections.abc import Callable, Mapping
from math import inf

from app.cli import terminal
from app.cli.arguments import Arguments
from app.core.run.retention_classes import RunClass
from app.process.config import Settings, read

DAY_SECONDS = 86_400.0
RULE = """\
Of several classes of a run, the shortest time for texts counts, and the longest for runs.
A run that is deleted goes with its texts. Legal holds keep both: see `baton holds ls`."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command."""
    settings = read(environ)
    classes = settings.classes_of_retention
    if args.json:
        others = [
            {"of": run_class.of, "content": _days(run_class.content), "events": _days(run_class.events)}
            for run_class in classes
        ]
        usual = {"content": settings.retention_content, "events": settings.retention_events}
        terminal.print_json({"default": usual, "classes": others})
        return 0
    table = terminal.table("runs", "texts are kept", "runs are kept")
    for run_class in classes:
        cells = (
            _class_name(run_class.of),
            _in_words(run_class.content, otherwise="-"),
            _in_words(run_class.events, otherwise="-"),
        )
        terminal.add_row(table, cells)
    content, events = settings.retention_content_seconds, settings.retention_events_seconds
    table.add_row("all others", _in_words(content, otherwise="for ever"), _in_words(events, otherwise="for ever"))
    console = terminal.stdout()
    console.print(table)
    console.print(RULE, soft_wrap=True)
    return 0


def retention_text(settings: Settings) -> str:
    """Return how long texts and runs are kept, as one line."""
    texts = _in_words(settings.retention_content_seconds, otherwise="for ever")
    runs = _in_words(settings.retention_events_seconds, otherwise="for ever")
    classes = len(settings.classes_of_retention)
    others = ""
    if classes:
        others = f"; {classes} of BATON_RETENTION_CLASSES: see `baton retention show`"
    return f"texts are kept {texts}, runs {runs}{others}"


def _days(seconds: float | None) -> float | str | None:
    if seconds is None:
        return None
    if seconds == inf:
        return "never"
    return seconds / DAY_SECONDS


def _in_words(seconds: float | None, *, otherwise: str) -> str:
    """Return a time in words. `otherwise` is the text for None."""
    if seconds is None:
        return otherwise
    if seconds == inf:
        return "for ever"
    return f"for {seconds / DAY_SECONDS:g} days"


def _class_name(run_class: RunClass) -> str:
    parts = (("tenant", run_class.tenant), ("tier", run_class.tier), ("label", run_class.label))
    return ", ".join([f"{name} {value}" for name, value in parts if value is not None])
