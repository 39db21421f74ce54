"""The rules of a pool file: which workers may be shown a request that carries certain labels (D6).

A rule applies to every request that carries all of its labels; without labels, to every request. A worker may then be
shown the request only if it matches the rule's `allow`, and only if it does not match its `deny`. Rules only take away:
each worker must also be cleared for every label by its card, and a request with more labels is never shown to more
workers. So every decision is defined, and a change of the rules can be compared by enumerating the labels.

A rule may also name sources among its labels. A source says where words that are read come from. Baton sets it itself:
nobody needs a clearance for it, and what is derived from the words does not inherit it.
"""

from collections.abc import Iterable

from msgspec import Struct

ATTRIBUTES = ("worker", "provider", "region", "retention", "clearance")
"""The attributes of workers that a rule can ask for."""
CALLER, TOOL, CONDUCTOR, STEP = "source:caller", "source:tool", "source:conductor", "source:step"
"""The sources: the caller's conversation, results of the caller's tools, subtasks that a model wrote, and outputs of
steps."""
SOURCES = frozenset({CALLER, TOOL, CONDUCTOR, STEP})
LABEL_FORM = r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}$"
"""The form of the labels that keys and requests may have, as a regular expression."""
LABEL_WORDS = "1 to 64 letters, digits and _.:/-, the first a letter or digit"
NOTHING: frozenset[str] = frozenset()


class Reading(Struct, frozen=True):
    """The labels of everything that somebody reads, and the sources of its words."""

    labels: frozenset[str] = NOTHING
    sources: frozenset[str] = NOTHING

    def __or__(self, other: "Reading") -> "Reading":
        """Return the reading of both."""
        return Reading(self.labels | other.labels, self.sources | other.sources)


class Attributes(Struct, frozen=True):
    """The attributes of a worker that rules know: one value of each but `clearance`, which has any number."""

    worker: str
    provider: str
    region: str | None
    retention: str | None
    clearance: frozenset[str]

    def of(self, attribute: str) -> frozenset[str]:
        """Return the values of an attribute; empty if the worker's card does not say."""
        value = getattr(self, attribute)
        if isinstance(value, frozenset):
            return value
        if not value:
            return frozenset()
        return frozenset({value})


class Match(Struct, frozen=True):
    """Values of attributes. A worker matches if it has one of the values of each attribute that has any."""

    worker: frozenset[str] = frozenset()
    provider: frozenset[str] = frozenset()
    region: frozenset[str] = frozenset()
    retention: frozenset[str] = frozenset()
    clearance: frozenset[str] = frozenset()

    def fits(self, worker: Attributes) -> bool:
        """Return True if the worker matches."""
        for attribute in ATTRIBUTES:
            values = getattr(self, attribute)
            if values and values.isdisjoint(worker.of(attribute)):
                return False
        return True


class Rule(Struct, frozen=True):
    """One rule. Without `allow` every worker is allowed, without `deny` none is denied."""

    name: str
    labels: frozenset[str] = frozenset()
    allow: Match | None = None
    deny: Match | None = None
    approve: Match | None = None
    """The workers that are called for such a request only after somebody has approved the plan."""

    def permits(self, worker: Attributes) -> bool:
        """Return True if the worker may be shown a request to which the rule applies."""
        if self.allow is not None and not self.allow.fits(worker):
            return False
        return self.deny is None or not self.deny.fits(worker)


class ExcludingRule(Struct, frozen=True):
    """A rule that keeps one worker from all requests that carry these labels."""

    name: str
    labels: frozenset[str]


def excluding_rules(rules: Iterable[Rule], worker: Attributes) -> tuple[ExcludingRule, ...]:
    """Return the rules that keep one worker from requests: those that it does not satisfy."""
    return tuple(ExcludingRule(rule.name, rule.labels) for rule in rules if not rule.permits(worker))
