"""The table of an evaluation for a terminal."""

from rich.console import Group
from rich.table import Table as RichTable

from app.cli import terminal
from app.cli.learning import plot
from app.core.plan.arms import ORACLE
from app.core.pool.catalog import MILLION
from app.lab.comparison import LAMBDAS, ArmResult, Table
from app.lab.paired_statistics import FEW_TASKS, Interval


def draw(table: Table) -> Group:
    """Return two tables: accuracy and cost of the arms, then their effort."""
    rewards = "/".join(f"{share:g}" for share in LAMBDAS)
    first = _columns(
        "", "arm", "accuracy", "against the reference", "p (Holm)", "$ a task", "front", "for equal $", rewards
    )
    second = _columns("", "arm", "conductor", "workers", "wall", "path", "calls", "steps", "plans", "outage", "failed")
    second.add_column("degraded", justify="right")
    second.add_column("invalid", justify="right")
    for place, standing in enumerate(table.standings):
        first.add_row(plot.mark(place), standing.arm, *_value_cells(standing, table.reference))
        if standing.arm != ORACLE:
            second.add_row(plot.mark(place), standing.arm, *_effort(standing))
    return Group(_head(table), first, "\nmeans for each task, and counts of rows", second, "")


def _columns(*names: str) -> RichTable:
    table = terminal.table()
    for name in names:
        if name in ("", "arm"):
            table.add_column(name)
        else:
            table.add_column(name, justify="right")
    return table


def _head(table: Table) -> str:
    note = ""
    if table.missing:
        note = f" ({table.missing} without a row of every arm left out)"
    too_few = ""
    if table.tasks < FEW_TASKS:
        too_few = f"fewer than {FEW_TASKS} tasks: the intervals are too narrow; the p-values hold\n"
    weights = " or ".join(f"{share:g}" for share in LAMBDAS)
    return (
        f"{table.tasks} tasks{note}; 95 % intervals over tasks, paired, {table.resamples:,} resamples; "
        f"reference: {table.reference}\n{too_few}"
        f"reward: a right answer, less {weights} of its cost in parts of {terminal.dollars(table.full_usd * MILLION)}; "
        "failures and outages are wrong; the oracle is a ceiling that cannot be served\n"
    )


def _value_cells(arm: ArmResult, reference: str) -> tuple[str, ...]:
    ahead, p_value, front = _span(arm.ahead, "{:+.3f}"), "", ""
    if arm.arm == reference:
        ahead = "reference"
    if arm.p is not None:
        p_value = f"{arm.p:.4f}"
    if arm.front:
        front = "*"
    return (
        _span(arm.accuracy, "{:.3f}"),
        ahead,
        p_value,
        terminal.dollars(arm.usd * MILLION),
        front,
        _span(arm.bought, "{:+.3f}"),
        "/".join(f"{reward:.3f}" for reward in arm.rewards),
    )


def _span(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    return f"{form} [{form}, {form}]".format(interval.value, interval.low, interval.high)


def _effort(arm: ArmResult) -> tuple[str, ...]:
    counts = (arm.plans, arm.outages, arm.failures, arm.degraded, arm.invalid)
    return (
        f"{arm.conductor_tokens:.0f}",
        f"{arm.worker_tokens:.0f}",
        f"{arm.wall:.2f} s",
        f"{arm.path:.2f} s",
        f"{arm.calls:.2f}",
        f"{arm.steps:.2f}",
        *map(str, counts),
    )
