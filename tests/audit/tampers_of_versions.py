"""Falsifications about the versions of a conductor and what serves tiers: of who was asked, or of who was in force."""

from msgspec.structs import replace

from app.audit.versions import CLOCK_SKEW_SECONDS, NOTICE_SECONDS
from app.core.pool.conductor_versions import Change, ChangeKind
from tests.audit.forgery import Case, ForgedRun, Tamper, case, put

INTENDED = "call.intended"


def claim_version(version: str, **fields: object) -> Tamper:
    """Somebody else is said to have been asked for the plan."""
    return lambda run: run.first(INTENDED, n=None).update(version=version, model=version, **fields)


def of_a_step(run: ForgedRun) -> None:
    """A step's worker is said to be a version."""
    next(intent.body for intent in run.all(INTENDED) if intent.body["n"] is not None)["version"] = "planner@1"


def served_by(subject: str) -> Tamper:
    """The run is said to have been served by something else than its tier's own definition."""
    return lambda run: run.events[0].body.update(served_by=subject)


def moved(seconds: float) -> Tamper:
    """Date all changes of versions back by so many seconds."""

    def move(run: ForgedRun) -> None:
        run.changes = [replace(change, at=change.at - seconds) for change in run.changes]

    return move


def only(*kinds: ChangeKind, share: float = 0.0, earlier: float = 2 * NOTICE_SECONDS) -> Tamper:
    """Nothing but these changes was made, some time before the plan."""

    def make(run: ForgedRun) -> None:
        at = run.events[0].at - earlier
        changes = (
            Change(f"{n}", at + n / 10, "me", "planner", kind, "planner@1", share) for n, kind in enumerate(kinds)
        )
        run.changes = list(changes)

    return make


def of_another(run: ForgedRun) -> None:
    """All changes are said to have been made to another conductor."""
    run.changes = [replace(change, conductor="alpha") for change in run.changes]


CASES: tuple[Case, ...] = tuple(
    case("version-not-in-force", name, scenes, tamper)
    for name, scenes, tamper in (
        ("a version that was never in force", "versioned conducted nested", claim_version("planner@9")),
        ("the pool file's own model, long after a version was promoted",
         "conducted bettered", only("loaded", "promoted")),
        ("the pool file's own model is said to have been asked",
         "versioned", lambda run: (only("promoted")(run), put(version="")(run.first(INTENDED, n=None)))),
        ("a version long after its rollback", "versioned", moved(2 * NOTICE_SECONDS)),
        ("a version before its promotion", "versioned", moved(-2 * CLOCK_SKEW_SECONDS)),
        ("a version that was only loaded and shadowed", "versioned", only("loaded", "shadowed")),
        ("a version that was canary for no run", "versioned", only("loaded", "canary")),
        ("a version long after its canary was ended", "versioned", only("loaded", "canary", "rolled_back", share=1.0)),
        ("a version of another conductor", "versioned", of_another),
        ("a step by a version", "versioned single", of_a_step),
        ("a subject in a tier's place that nobody has put there", "versioned single", served_by("tier next")),
    )
)  # fmt: skip
