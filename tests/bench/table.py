"""The table of budgets: what is printed, and what counts as met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its budget (None: for information). `measured` None: not measured, and `note` says why."""

    what: str
    budget: float | None
    unit: str
    measured: float | None
    note: str = ""
    better: Literal["lower", "higher"] = "lower"

    @property
    def verdict(self) -> str:
        """met, MISSED, or `-` where there is no figure or no budget."""
        if self.measured is None or self.budget is None:
            return "-"
        met = self.measured <= self.budget if self.better == "lower" else self.measured >= self.budget
        return "met" if met else "MISSED"

    def cells(self) -> tuple[str, ...]:
        """As text."""
        sign = "<=" if self.better == "lower" else ">="
        budget = "-" if self.budget is None else f"{sign} {self.budget:,g} {self.unit}"
        measured = "-" if self.measured is None else f"{self.measured:,.2f} {self.unit}"
        return (self.what, budget, measured, self.verdict, self.note)


def rendered(rows: Sequence[Row]) -> str:
    """A Markdown table with aligned columns."""
    lines = [("what", "budget", "measured", "verdict", "note"), *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    made = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([made[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *made[1:]])
