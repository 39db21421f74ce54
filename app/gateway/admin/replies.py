"""Models of the admin API's replies, for its description."""

from typing import Any, Literal

from app.gateway.openapi.replies import Reply


class Key(Reply):
    """An API key without its secret. Times are seconds since 1970, amounts are dollars."""

    object: Literal["key"]
    id: str
    name: str
    tenant: str
    all_tenants: bool
    role: str | None
    """The role that has exactly its scopes."""
    scopes: list[str]
    tiers: list[str]
    """Empty: every tier."""
    labels: list[str]
    usd: float | None
    rpm: int | None
    tpm: int | None
    concurrency: int | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    previous_until: float | None
    """The time until which the secret from before a rotation works."""
    in_force: bool


class NewKey(Key):
    """A key with its secret, which is shown only this once."""

    key: str | None
    """Null where a repeated request with the same `Idempotency-Key` finds the key that was made."""


class Listed(Reply):
    """A page. `next` is the value of `after` for the page that follows."""

    object: Literal["list"]
    has_more: bool
    next: str | None


class KeyList(Listed):
    """Keys, the newest first."""

    data: list[Key]


class Tenant(Reply):
    """A tenant. `created_at` is null for one that keys have and nobody created."""

    object: Literal["tenant"]
    name: str
    created_at: float | None
    disabled_at: float | None
    keys: int
    """The number of its keys, revoked ones included."""


class TenantList(Listed):
    """Tenants, by name."""

    data: list[Tenant]


class Hold(Reply):
    """A legal hold. Times are seconds since 1970."""

    object: Literal["hold"]
    id: str
    scope: Literal["run", "user", "tenant", "key"]
    name: str
    tenant: str
    """The tenant whose runs it covers; empty for a user's runs in every tenant."""
    reason: str
    placed_at: float
    placed_by: str
    released_at: float | None
    """Null while it is in force."""
    released_by: str | None
    in_force: bool


class HoldList(Listed):
    """Legal holds, the newest first."""

    data: list[Hold]


class ChangeEntry(Reply):
    """One change, with the fields before and after it; digests of secrets are hashed."""

    object: Literal["change"]
    seq: int
    at: float
    actor: str
    via: Literal["key", "oidc", "command", "process"]
    action: str
    target: str
    tenant: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class ChangeList(Listed):
    """Changes, the newest first."""

    data: list[ChangeEntry]


class Spent(Reply):
    """The spending of a tenant, or of a key of it, on the runs that were admitted in a window."""

    tenant: str
    key: str | None
    runs: int
    usd: float
    held_usd: float
    """Reserved for calls that go on."""
    tokens: int


class Spending(Reply):
    """The sums of a window, the highest first."""

    object: Literal["spending"]
    since: float
    until: float
    by: Literal["tenant", "key"]
    data: list[Spent]


class BudgetEntry(Reply):
    """A budget."""

    object: Literal["budget"]
    id: str
    tenant: str
    scope: str
    name: str
    period: str
    usd: float
    zone: str
    soft: float | None
    created_at: float
    slices: int | None


class BudgetList(Listed):
    """Budgets, in the order of their ids."""

    data: list[BudgetEntry]


class BudgetWindow(Reply):
    """One period of an account of a budget. Amounts are dollars."""

    account: str
    start: int
    end: int
    held: float
    spent: float
    overrun: float
    """The part of `spent` that providers billed beyond the worst case of their calls."""
    warned_at: float | None


class BudgetInUse(BudgetEntry):
    """A budget with the latest periods of its accounts, the newest first and the highest of those first."""

    windows: list[BudgetWindow]


class Removed(Reply):
    """The entry that was removed."""

    id: str
    removed: bool


class WorkerEntry(Reply):
    """A worker of the pool in force."""

    object: Literal["worker"]
    name: str
    provider: str
    model: str
    tiers: list[str]
    region: str | None
    retention: str | None
    clearance: list[str]
    rules: list[str]
    """The rules that keep it from requests with some labels."""
    state: Literal["closed", "half_open", "open"] | None
    """The state of its circuit breaker in this process: `open` is ejected. Null where this process makes no calls."""


class WorkerList(Listed):
    """Workers, in the order of the pool file."""

    data: list[WorkerEntry]


class PolicyRule(Reply):
    """A rule: of the requests with all of these labels, which workers it keeps away."""

    name: str
    labels: list[str]
    excludes: list[str]


class Policy(Reply):
    """The rules in force, by the pool with this digest."""

    object: Literal["policy"]
    catalog: str
    labels: list[str]
    rules: list[PolicyRule]


class PolicyTable(Reply):
    """The policy of a pool file: for each tier and set of labels who may be shown such requests."""

    object: Literal["policy.table"]
    rules: list[str]
    shown: list[dict[str, Any]]
    declassifies: dict[str, list[str]]
    """The labels that each declassifying worker takes away."""
    without_effect: list[str]
    """The rules that exclude nobody, in words."""


class PolicyTrial(Reply):
    """A pool file applied to past runs."""

    object: Literal["policy.trial"]
    runs: int
    """The number of runs that were looked at."""
    all: bool
    """False if there are more runs in that time."""
    refused: list[dict[str, Any]]
    """Runs with calls that the file would have refused, with the reason for each worker."""
    damaged: list[str]
    """Runs whose journal cannot be read, so that nobody knows what would have been refused."""


class PolicyDifference(Reply):
    """A comparison of a pool file with the one in force: a witness for each tier and recipient that it widens."""

    object: Literal["policy.difference"]
    widens: bool
    witnesses: list[dict[str, Any]]


class ConductorVersion(Reply):
    """The versions of a conductor. The empty version is the model that the pool file names."""

    object: Literal["conductor"]
    name: str
    live: str
    canary: str
    share: float
    """The share of the runs that the canary conducts."""
    loaded: list[str]
    before: list[str]


class TierEvidence(Reply):
    """The conditions of one tier for a promotion."""

    tier: str
    source: str
    """`shadow`, `canary` or `none`: the runs that were compared."""
    conditions: list[dict[str, Any]]
    """Each with its limit, whether it holds, what was found, and on how many pairs or runs."""
    left_out: int
    """Shadows that are no evidence, because the pool file has changed what they or their runs were served by."""
    promotable: bool


class PromotionEvidence(Reply):
    """The evidence for the promotion of a version. Without tiers no condition is stated."""

    object: Literal["conductor.evidence"]
    name: str
    version: str
    tiers: list[TierEvidence]


class TierService(Reply):
    """The subject that serves a tier. The empty subject is the tier's own definition."""

    object: Literal["tier"]
    name: str
    live: str
    """Such as `tier baton-next` or `worker old-gpt`."""
    canary: str
    share: float
    """The share of the runs that the canary serves."""
    before: list[str]
    """The subjects that served the tier before, the latest one last; an empty text stands for its own definition."""
    missing: list[str]
    """Subjects that the pool file no longer has, each with the reason; the tier's own definition serves for them."""


class TierServiceEvidence(Reply):
    """The evidence for the promotion of a subject. Without tiers no condition is stated."""

    object: Literal["tier.evidence"]
    name: str
    subject: str
    tiers: list[TierEvidence]


class LoginGrant(Reply):
    """A rule by which people have a role: who has the value in the claim."""

    claim: str
    value: str
    role: str
    tenant: str | None
    """Null: in all tenants."""


class Logins(Reply):
    """The rules by which people log in at the OpenID provider. The first one that fits counts."""

    object: Literal["logins"]
    enabled: bool
    """False if no provider is configured: then only keys are accepted."""
    session_seconds: float
    grants: list[LoginGrant]


class TierServiceList(Listed):
    """The tiers of the pool file."""

    data: list[TierService]


class ConductorList(Listed):
    """The conductors of the pool file."""

    data: list[ConductorVersion]
