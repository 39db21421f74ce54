"""A selector's posterior under the name by which the journal knows it."""

from msgspec import Struct

from app.core.rating.posterior import Posterior, digest

POLICY = "selector-3"
"""The version of how choices are made; the tier's name follows in a policy's id."""


class PublishedPosterior(Struct, frozen=True):
    """A posterior as it stands in the database: its number there, and its hash."""

    posterior: Posterior = Posterior()
    number: int = 0
    hash: str = digest(Posterior().to_json())

    @property
    def version(self) -> str:
        """Return its name in the journal."""
        return f"{self.number}-{self.hash}"


def policy(tier: str) -> str:
    """Return the id of a tier's policy."""
    return f"{POLICY}/{tier}"


LEAST_RATINGS = 20
"""The ratings from which on a tenant's beliefs may decide for another one."""
OWN_RATINGS = 100
"""The ratings of its own after which a tenant lets the others decide half as often as before the first."""


class Beliefs(Struct, frozen=True):
    """The posterior by which a tenant's requests are decided, and those of the tenants that may decide in its place.

    `ratings` counts the tenant's own. With `share` as the most that one other tenant may decide, each of them decides
    at most that share of the requests, whatever it has rated: so it cannot change the expected reward by more.
    """

    published: PublishedPosterior = PublishedPosterior()
    ratings: int = 0
    peers: tuple[PublishedPosterior, ...] = ()

    def lent(self, share: float) -> float:
        """Return the probability with which one of the peers, drawn evenly, decides a request."""
        return min(1.0, share * len(self.peers)) * OWN_RATINGS / (OWN_RATINGS + self.ratings)
