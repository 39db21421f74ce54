"""A selector's posterior under the name by which the journal knows it."""

from dataclasses import field

from app.core.rating.posterior import Posterior, digest
from app.core.records import record

POLICY = "selector-3"
"""The version of how choices are made; the tier's name follows in a policy's id."""


@record(frozen=True, slots=True)
class Standing:
    """A posterior as it stands in the database: its number there, and its hash."""

    posterior: Posterior = field(default_factory=Posterior)
    number: int = 0
    hash: str = field(default_factory=lambda: digest(Posterior().to_json()))

    @property
    def version(self) -> str:
        """Return its name in the journal."""
        return f"{self.number}-{self.hash}"


def policy(tier: str) -> str:
    """The id of a tier's policy."""
    return f"{POLICY}/{tier}"
