"""The outcome of a world."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """One seed's."""

    seed: int
    violations: list[str] = field(default_factory=list)
    """Each begins with who found it: `witness`, `oracle.<check>` or `audit.<rule>`."""
    trace: str = ""
    """Hash of everything that happened, in order."""
    hits: Counter[str] = field(default_factory=Counter)
    """Faults that happened, by name."""
    places: set[tuple[str, str]] = field(default_factory=set)
    """Which fault struck which await of the product."""
    states: Counter[str] = field(default_factory=Counter)
    """How the runs ended."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How their calls did."""
    actions: Counter[str] = field(default_factory=Counter)
    """What was done beside the calls: turns begun elsewhere, steps nested, notices told, contents erased."""
    seconds: float = 0.0
    """Virtual."""
    turns: int = 0
    calls: int = 0
    lines: list[str] = field(default_factory=list)
    """The story, if it was asked for."""

    @property
    def found_by(self) -> set[str]:
        """Return the checks that objected."""
        return {violation.partition(":")[0] for violation in self.violations}
