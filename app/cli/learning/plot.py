"""A plot of accuracy over cost, in characters for the terminal, and as a PNG if matplotlib is installed."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name

from app.cli import terminal
from app.core.pool.catalog import MILLION
from app.lab.comparison import Table

WIDTH, HEIGHT = 64, 16
MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
MIN_LOGARITHMIC_RATIO = 20.0
"""The ratio of costs from which their axis is logarithmic."""


def mark(place: int) -> str:
    """Return the letter of an arm, by its place in the table."""
    if place >= len(MARKS):
        return "?"
    return MARKS[place]


def characters(table: Table) -> str:
    """Return the plot in characters: accuracy upwards, cost to the right, a letter for each arm, `*` for several."""
    standings = table.standings
    across, words = _scale([arm.usd for arm in standings])
    low, high = min(arm.accuracy.value for arm in standings), max(arm.accuracy.value for arm in standings)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for place, arm in enumerate(standings):
        x = round(across(arm.usd) * (WIDTH - 1))
        y = HEIGHT - 1 - round((arm.accuracy.value - low) / ((high - low) or 1.0) * (HEIGHT - 1))
        if rows[y][x] == " ":
            rows[y][x] = mark(place)
        else:
            rows[y][x] = "*"
    labels = {0: f"{high:.3f}", HEIGHT - 1: f"{low:.3f}"}
    lines = [f"{labels.get(n, ''):>6} |{''.join(row).rstrip()}" for n, row in enumerate(rows)]
    return "\n".join([*lines, f"{'':6} +{'-' * WIDTH}", f"{'':8}{words}"])


def _scale(costs: Sequence[float]) -> tuple[Callable[[float], float], str]:
    """Return a function from a cost to its place between 0 and 1, and the label of the axis."""
    bend: Callable[[float], float] = float
    kind = ""
    if _has_wide_range(costs):
        bend, kind = math.log, ", logarithmic"
    low, high = bend(min(costs)), bend(max(costs))
    words = f"{terminal.dollars(min(costs) * MILLION)} to {terminal.dollars(max(costs) * MILLION)} for each task{kind}"
    return (lambda cost: (bend(cost) - low) / ((high - low) or 1.0)), words


def _has_wide_range(costs: Sequence[float]) -> bool:
    return min(costs) > 0 and max(costs) / min(costs) >= MIN_LOGARITHMIC_RATIO


def png(table: Table, path: Path) -> bool:
    """Draw the plot with intervals as a PNG. Returns False if matplotlib is not installed."""
    try:
        pyplot = resolve_name("matplotlib.pyplot")
    except ModuleNotFoundError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for place, arm in enumerate(table.standings):
        below, above = arm.accuracy.value - arm.accuracy.low, arm.accuracy.high - arm.accuracy.value
        form, label = "x", f"{mark(place)}  {arm.arm}"
        if arm.front:
            form = "o"
        axes.errorbar([arm.usd], [arm.accuracy.value], yerr=[[below], [above]], fmt=form, label=label)
        axes.annotate(mark(place), (arm.usd, arm.accuracy.value), xytext=(4, 4), textcoords="offset points")
    if _has_wide_range([arm.usd for arm in table.standings]):
        axes.set_xscale("log")
    axes.set_xlabel("dollars for each task (o: on the Pareto front)")
    axes.set_ylabel(f"accuracy over {table.tasks} tasks, 95 % interval")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return True
