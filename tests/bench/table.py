"""The tables that are printed: one tree against the budgets, or two trees against each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

TOLERANCE = 0.10
"""Share by which a figure may be worse than that of the other tree."""


class Row(Struct, frozen=True):
    """One figure and its budget (None: for information). `measured` is the median of `rounds`; None: not measured, and
    `note` gives the reason."""

    what: str
    budget: float | None
    unit: str
    measured: float | None
    note: str = ""
    better: Literal["lower", "higher"] = "lower"
    rounds: tuple[float, ...] = ()

    @property
    def verdict(self) -> str:
        """met, MISSED, or `-` where there is no figure or no budget."""
        if self.measured is None or self.budget is None:
            return "-"
        met = self.measured <= self.budget if self.better == "lower" else self.measured >= self.budget
        return "met" if met else "MISSED"

    @property
    def shown(self) -> str:
        """The figure with its unit."""
        return "-" if self.measured is None else f"{self.measured:,.2f} {self.unit}"

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        sign = "<=" if self.better == "lower" else ">="
        budget = "-" if self.budget is None else f"{sign} {self.budget:,g} {self.unit}"
        return (self.what, budget, self.shown, self.verdict, self.note)


class Comparison(Struct, frozen=True):
    """One figure of this tree and of another one, measured in alternating rounds."""

    this: Row
    other: Row

    @property
    def ratio(self) -> float | None:
        """The median over the rounds of this tree's figure divided by the other's; None if a figure is missing or an
        added latency was not above zero."""
        pairs = list(zip(self.this.rounds, self.other.rounds, strict=False))
        if not pairs or any(min(pair) <= 0 for pair in pairs):
            return None
        return statistics.median(this / other for this, other in pairs)

    @property
    def verdict(self) -> str:
        """WORSE or better by more than the tolerance, `same` within it, `-` without a ratio."""
        if self.ratio is None:
            return "-"
        cost = self.ratio if self.this.better == "lower" else 1 / self.ratio
        if cost > 1 + TOLERANCE:
            return "WORSE"
        return "better" if cost < 1 - TOLERANCE else "same"

    def cells(self) -> tuple[str, ...]:
        """Return the comparison as text."""
        what, budget, _, met, note = self.this.cells()
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return (what, budget, self.this.shown, met, self.other.shown, ratio, self.verdict, note or self.other.note)


def render_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with aligned columns: one tree against its budgets."""
    return table(("what", "budget", "measured", "verdict", "note"), [row.cells() for row in rows])


def compare_rows(rows: Sequence[Comparison]) -> str:
    """Return a Markdown table with aligned columns: this tree against another one."""
    titles = ("what", "budget", "this tree", "budget met", "other tree", "this / other", "verdict", "note")
    return table(titles, [row.cells() for row in rows])


def table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table with aligned columns."""
    lines = [titles, *rows]
    widths = []
    for column in range(len(titles)):
        widths.append(max(len(line[column]) for line in lines))
    formatted_lines = [_line(line, widths) for line in lines]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([formatted_lines[0], rule, *formatted_lines[1:]])


def _line(cells: tuple[str, ...], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "| " + " | ".join(padded) + " |"
