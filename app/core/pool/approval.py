"""The rules by which plans need an approval, and the terms that follow from them for one run.

A tier's `[tiers.NAME.approval]` and the `approve` of a rule say what somebody has to approve before any step of a plan
is queued: every plan, a price, workers, labels. A request may ask for an approval of its own plans. What concerns a run
is pinned when it is admitted, so that a later pool file neither lifts nor adds anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from app.core.pool.catalog import Catalog, Tier, Worker, attributes
from app.core.pool.rules import SOURCES, Match
from app.core.records import record

OnExpiry = Literal["refuse", "fallback-plan"]
"""The two ends of a wait for an approval: the run ends, or it goes on with a plan that needs none."""
REQUESTED, TIER = "requested", "tier"
"""The reasons for which every plan of a run needs an approval: its request asks for it, or its tier does."""


@record(frozen=True, slots=True)
class ApprovalTerms:
    """The terms of one run. Money is in micro-dollars, `seconds` is how long a plan waits for a decision."""

    reasons: tuple[str, ...] = ()
    """The reasons why every plan of the run needs an approval: `requested`, `tier`, `label:NAME`; empty if not every
    plan does."""
    above_usd: int | None = None
    """The price above which a plan needs one: what the run has spent, and the worst case of the plan's steps."""
    workers: tuple[str, ...] = ()
    """The workers that no step may call without one."""
    seconds: float = 86_400.0
    on_expiry: OnExpiry = "refuse"
    four_eyes: bool = True
    """True if the key that began the run must not approve its plans."""

    def to_json(self) -> dict[str, Any]:
        """Return the terms in plain JSON values."""
        return {
            "reasons": list(self.reasons),
            "above_usd": self.above_usd,
            "workers": list(self.workers),
            "seconds": self.seconds,
            "on_expiry": self.on_expiry,
            "four_eyes": self.four_eyes,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "ApprovalTerms":
        """Return the inverse of `to_json`; fields of newer releases are ignored."""
        return cls(
            reasons=tuple(body.get("reasons", ())),
            above_usd=body.get("above_usd"),
            workers=tuple(body.get("workers", ())),
            seconds=body.get("seconds", 86_400.0),
            on_expiry=body.get("on_expiry", "refuse"),
            four_eyes=body.get("four_eyes", True),
        )


def terms_of(catalog: Catalog, tier: Tier, labels: frozenset[str], *, requested: bool) -> ApprovalTerms | None:
    """Return the terms of a run of this tier with these labels; None if no plan of it can need an approval."""
    ruled = _ruled(catalog, tier, labels)
    rule = tier.approval
    if rule is None:
        if not (requested or ruled):
            return None
        return ApprovalTerms(reasons=(REQUESTED,) if requested else (), workers=ruled)
    reasons = [REQUESTED] if requested else []
    if rule.always:
        reasons.append(TIER)
    reasons += [f"label:{label}" for label in sorted(rule.labels & labels)]
    asked = {*rule.workers, *ruled}
    named = [name for name in tier.pool if name in asked or _provider(catalog, name) in rule.providers]
    if not (reasons or named or rule.above_usd is not None):
        return None
    return ApprovalTerms(
        reasons=tuple(reasons),
        above_usd=rule.above_usd,
        workers=tuple(named),
        seconds=rule.seconds,
        on_expiry=rule.on_expiry,
        four_eyes=rule.four_eyes,
    )


def _provider(catalog: Catalog, name: str) -> str:
    worker = catalog.workers.get(name)
    return worker.provider if worker is not None else ""


def _ruled(catalog: Catalog, tier: Tier, labels: frozenset[str]) -> tuple[str, ...]:
    """Return the workers of a tier before which a rule asks for an approval of a run with these labels."""
    wanted = [rule.approve for rule in catalog.rules if rule.approve is not None and rule.labels - SOURCES <= labels]
    if not wanted:
        return ()
    known: Iterable[Worker] = [catalog.workers[name] for name in tier.pool if name in catalog.workers]
    return tuple([worker.name for worker in known if _is_named(worker, wanted)])


def _is_named(worker: Worker, matches: Sequence[Match]) -> bool:
    return any([match.fits(attributes(worker)) for match in matches])
