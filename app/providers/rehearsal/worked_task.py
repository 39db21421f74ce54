"""The parts of a task that a template writes and reads, and what working it out gives."""

from collections.abc import Mapping

Slots = Mapping[str, str]
"""The texts of a task that differ from one task of its family to the next, by the names of their slots."""
WorkedTask = tuple[str, str, int]
"""The answer, a slip (a plausible wrong answer), and the level."""
