"""Bodies and query parameters of the admin API."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from app.core.pool.budgets import LONGEST_NAME, MOST_SLICES, Period, Scope
from app.gateway.openapi import operations
from app.gateway.openapi.replies import Error
from app.gateway.wire.invalid_values import invalid_request
from app.gateway.wire.parameters import Label, WireModel
from app.gateway.wire.query import EventNumber, Moment, Parameters, Text, Truth, Whole
from app.store.protocol import HoldScope

PAGE = 100
"""The most entries of a page, and the number where none is asked for."""
MONTHS_SECONDS = 92 * 86_400
"""The longest window of a report on spending."""
Role = Literal["owner", "operator", "auditor", "developer", "caller"]
EntryName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@ -]{0,127}$")]
TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}$")]
Dollars = Annotated[float, Field(ge=0.000001, le=1_000_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seconds = Annotated[int, Field(ge=0, le=10 * 366 * 86_400)]
PoolText = Annotated[str, StringConstraints(min_length=1, max_length=1 << 20)]
Limit = Annotated[Whole, Field(ge=1, le=PAGE)]
Model = TypeVar("Model", bound=WireModel)


class KeyRequest(WireModel):
    """A new key. Its secret is in the reply, and nowhere else."""

    name: EntryName
    tenant: TenantName | None = None
    """The tenant of the one who asks, if it is left out."""
    roles: tuple[Role, ...] = ()
    scopes: tuple[str, ...] = ()
    """Without roles and scopes the key is a `caller`."""
    tiers: tuple[str, ...] = ()
    """Tiers that it may use; every tier if it is left out."""
    labels: Annotated[tuple[Label, ...], Field(max_length=64)] = ()
    """Labels that are put on each of its tasks."""
    usd: Dollars | None = None
    """The most that one run may cost, in dollars."""
    rpm: Count | None = None
    """Requests a minute."""
    tpm: Count | None = None
    """Tokens a minute, over all calls of its runs."""
    concurrency: Count | None = None
    """Requests at one time."""
    expires_in: Annotated[Seconds, Field(ge=1)] | None = None
    """Its lifetime in seconds."""
    all_tenants: bool = False
    """True if its scopes reach every tenant."""


class RotateRequest(WireModel):
    """A new secret for a key."""

    overlap_seconds: Seconds = 86_400
    """How long the old secret still works; 0 ends it at once."""


class NoFields(WireModel):
    """Nothing: an empty object, or no body at all."""


class TenantRequest(WireModel):
    """A new tenant."""

    name: TenantName


class BudgetRequest(WireModel):
    """A budget. One of the same tenant, scope, name and period is replaced."""

    scope: Scope
    period: Period
    usd: Annotated[float, Field(ge=0, le=1_000_000_000, allow_inf_nan=False)]
    """The amount that may be spent in each period, in dollars."""
    name: Annotated[str, StringConstraints(max_length=LONGEST_NAME)] = ""
    """The key's id or name, the user or the team; `*` for each that has no budget of its own; empty for the tenant."""
    tenant: TenantName | None = None
    """The tenant of the one who asks, if it is left out."""
    zone: Annotated[str, StringConstraints(max_length=64)] = "UTC"
    """A time zone of the IANA database, by whose clocks periods begin."""
    soft: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of the amount at which a warning is given."""
    slices: Annotated[int, Field(ge=2, le=MOST_SLICES)] | None = None
    """The parts in which each account is held, so that many busy engines do not wait for one row of the database."""


class HoldRequest(WireModel):
    """A legal hold. It covers runs of before and of after its beginning."""

    scope: HoldScope
    name: Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
    """The run's id, the user as requests name it, the tenant's name, or the key's id."""
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2_000)]
    """The reason why nothing of it may be erased."""
    tenant: TenantName | None = None
    """For the scope `user`: the tenant whose runs are held; every tenant's if it is left out."""


class PoolRequest(WireModel):
    """A pool file to compare with the one in force."""

    pool: PoolText
    """The text of the file (TOML)."""


class TrialRequest(PoolRequest):
    """A pool file to apply to past runs."""

    since_seconds: Annotated[Seconds, Field(ge=1)] = 86_400
    """How far back runs are looked at."""


class VersionRequest(WireModel):
    """The version of a conductor."""

    version: Annotated[str, StringConstraints(min_length=1, max_length=256)]


class PromotionRequest(VersionRequest):
    """A version of a conductor that is to conduct all runs."""

    force: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)] | None = None
    """The reason why it is promoted although conditions of a tier's `promotion` do not hold; it is recorded."""


class CanaryRequest(VersionRequest):
    """A version of a conductor that is to conduct a share of the runs."""

    share: Annotated[float, Field(gt=0, lt=1)]


class SubjectRequest(WireModel):
    """The subject that is to serve a tier."""

    subject: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Another tier (`tier NAME`), or a worker that answers alone (`worker NAME`); a name alone is that of a tier, or
    else of a worker."""


class TierPromotionRequest(SubjectRequest):
    """The subject that is to serve all runs of a tier."""

    force: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)] | None = None
    """The reason why it is promoted although conditions of the tier's `promotion` do not hold; it is recorded."""


class TierCanaryRequest(SubjectRequest):
    """The subject that is to serve a share of a tier's runs."""

    share: Annotated[float, Field(gt=0, lt=1)]


class KeyFilters(Parameters):
    """The filters of a list of keys."""

    tenant: Text | None = None
    """Keys of this tenant."""
    in_force: Truth | None = None
    """True: keys that are accepted; false: those that were revoked or have expired."""
    limit: Limit = PAGE
    """The most keys of a page."""
    after: Text | None = None
    """`next` of the page before."""


class TenantFilters(Parameters):
    """The filters of a list of tenants."""

    limit: Limit = PAGE
    """The most tenants of a page."""
    after: Text | None = None
    """`next` of the page before."""


class ChangeFilters(Parameters):
    """The filters of a list of changes; several parameters must all hold."""

    tenant: Text | None = None
    """Changes to this tenant, its keys and budgets."""
    target: Text | None = None
    """Changes to this key, tenant, budget or conductor."""
    actor: Text | None = None
    """Changes that this key, person or user has made."""
    action: Text | None = None
    """Changes of this kind, such as `key.revoked`."""
    since: Moment | None = None
    """Changes from this time on."""
    limit: Limit = PAGE
    """The most changes of a page."""
    after: EventNumber | None = None
    """`next` of the page before."""


class BudgetFilters(Parameters):
    """The filters of a list of budgets."""

    tenant: Text | None = None
    """Budgets of this tenant."""
    limit: Limit = PAGE
    """The most budgets of a page."""
    after: Text | None = None
    """`next` of the page before."""


class AccountFilters(Parameters):
    """The account of a budget that is shown."""

    of: Text | None = None
    """The account of this key (by its id), user or team; of a budget of everybody (`*`) each has its own."""


class HoldFilters(Parameters):
    """The filters of a list of legal holds."""

    tenant: Text | None = None
    """Holds on runs of this tenant."""
    in_force: Truth | None = None
    """False: those that were released; true: the others."""
    limit: Limit = PAGE
    """The most holds of a page."""
    after: Text | None = None
    """`next` of the page before."""


class EvidenceFilters(Parameters):
    """The version that a promotion is considered for."""

    version: Text
    """A version that is loaded."""


class SubjectFilters(Parameters):
    """The subject that a promotion is considered for."""

    subject: Text
    """Another tier, or a worker."""


class SpendFilters(Parameters):
    """The window of a report on spending, and what it is grouped by."""

    by: Literal["tenant", "key"] = "tenant"
    """The field by which spending is added up."""
    tenant: Text | None = None
    """Runs of this tenant."""
    since: Moment | None = None
    """Runs admitted from this time on; a day before the end if it is left out."""
    until: Moment | None = None
    """Runs admitted before this time; now if it is left out."""
    limit: Limit = PAGE
    """The most rows, the highest cost first."""


BODIES: Final = (
    KeyRequest,
    RotateRequest,
    NoFields,
    TenantRequest,
    BudgetRequest,
    HoldRequest,
    PoolRequest,
    TrialRequest,
    PromotionRequest,
    CanaryRequest,
    TierPromotionRequest,
    TierCanaryRequest,
)
SCHEMAS: Final[operations.Schemas] = {
    **{model.__name__: partial(operations.request_schema, model, model.__name__) for model in BODIES},
    "Error": partial(operations.event_schema, Error),
}
"""The schemas of bodies, and of errors, which all routes refer to."""


def read(model: type[Model], body: Mapping[str, Any]) -> Model:
    """Return the body as a model; null is the same as a field that is left out. Raises `InvalidRequest`."""
    fields = {name: value for name, value in body.items() if value is not None}
    try:
        return model.model_validate(_with_tuples(fields))
    except ValidationError as error:
        raise invalid_request(error, fields) from None


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with tuples for lists: the models are strict."""
    values: dict[str, Any] = dict(fields)
    for name, value in fields.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return values
