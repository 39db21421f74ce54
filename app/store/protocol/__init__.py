"""The store's seam: several protocols of a few verbs each, and `Store`, which has all of them.

Code that needs one of them should ask for that one. `journal.py` has the rules of writing to a run; start there.
"""

from typing import Protocol

from app.store.protocol.admin_events import (
    ABOUT_RUNS,
    CONTENT_ERASED,
    CONTENT_READ,
    PROCESS,
    RUN_PRUNED,
    Actor,
    AdminEvent,
    AdminEventQuery,
    AdminEvents,
)
from app.store.protocol.availability import Availability
from app.store.protocol.budgets import BudgetAccounts, Budgets, BudgetUse
from app.store.protocol.conductor_versions import ConductorVersions
from app.store.protocol.content_keys import ContentKeys
from app.store.protocol.contents import ContentReads, Contents, Reader
from app.store.protocol.disclosures import Disclosure, DisclosureQuery, Disclosures, RebuildBatch, SeenDataFilter
from app.store.protocol.entries import (
    MOVED,
    UNDECIDED,
    AppendResult,
    Entry,
    Lease,
    NewRun,
    Outbox,
    Projection,
    SharedContent,
    TicketMove,
)
from app.store.protocol.holds import EVERY_HOLD, Hold, HoldQuery, Holds, HoldScope
from app.store.protocol.idempotency import TAKEN, IdempotencyRecord, IdempotencyRecords
from app.store.protocol.journal import (
    APPROVAL_TAG,
    ASKED,
    BRIEF,
    ERASED_TAGS,
    FIRST_REVISION,
    METADATA_TAG,
    PLAN_TAG,
    REQUEST_TAG,
    SHOWN_ONCE,
    TAG_BYTES,
    TRACE_TAG,
    USER_TAG,
    Journal,
    Place,
    RatingFilter,
    RunJournal,
    RunQuery,
    RunRow,
    RunSort,
    StepInput,
    metadata_tag,
)
from app.store.protocol.keys import EVERY_KEY, KeyQuery, KeyRow, Keys
from app.store.protocol.learning import Learning
from app.store.protocol.leases import Backlog, LapsedRuns, LeasesAndOutbox, TicketClaim, TicketRow
from app.store.protocol.notices import Notices
from app.store.protocol.rates import RateWindows
from app.store.protocol.reports import Reports
from app.store.protocol.retention import ContentPage, ContentQuery, PrunedRun, PruneQuery, Retention
from app.store.protocol.run_lists import CallGroup, EjectedWorker, Period, RunDetails, RunFigures, RunGroup, RunLists
from app.store.protocol.tenancy import Tenancy, TenantAdministration, TenantStore
from app.store.protocol.tenants import SpendQuery, SpendRow, TenantRow, Tenants
from app.store.protocol.transparency_log import LogState, Proof, ProvenLeaf, SealingResult, TransparencyLog, WithLog

__all__ = [
    "ABOUT_RUNS",
    "APPROVAL_TAG",
    "ASKED",
    "BRIEF",
    "CONTENT_ERASED",
    "CONTENT_READ",
    "ERASED_TAGS",
    "EVERY_HOLD",
    "EVERY_KEY",
    "FIRST_REVISION",
    "METADATA_TAG",
    "MOVED",
    "PLAN_TAG",
    "PROCESS",
    "REQUEST_TAG",
    "RUN_PRUNED",
    "SHOWN_ONCE",
    "TAG_BYTES",
    "TAKEN",
    "TRACE_TAG",
    "UNDECIDED",
    "USER_TAG",
    "Actor",
    "AdminEvent",
    "AdminEventQuery",
    "AdminEvents",
    "AppendResult",
    "Availability",
    "Backlog",
    "BudgetAccounts",
    "BudgetUse",
    "Budgets",
    "CallGroup",
    "ConductorVersions",
    "ContentKeys",
    "ContentPage",
    "ContentQuery",
    "ContentReads",
    "Contents",
    "Disclosure",
    "DisclosureQuery",
    "Disclosures",
    "EjectedWorker",
    "Entry",
    "Hold",
    "HoldQuery",
    "HoldScope",
    "Holds",
    "IdempotencyRecord",
    "IdempotencyRecords",
    "Journal",
    "KeyQuery",
    "KeyRow",
    "Keys",
    "LapsedRuns",
    "Learning",
    "Lease",
    "LeasesAndOutbox",
    "LogState",
    "NewRun",
    "Notices",
    "Outbox",
    "Period",
    "Place",
    "Projection",
    "Proof",
    "ProvenLeaf",
    "PruneQuery",
    "PrunedRun",
    "RateWindows",
    "RatingFilter",
    "Reader",
    "RebuildBatch",
    "Reports",
    "Retention",
    "RunDetails",
    "RunFigures",
    "RunGroup",
    "RunJournal",
    "RunLists",
    "RunQuery",
    "RunRow",
    "RunSort",
    "SealingResult",
    "SeenDataFilter",
    "SharedContent",
    "SpendQuery",
    "SpendRow",
    "StepInput",
    "Store",
    "Tenancy",
    "TenantAdministration",
    "TenantRow",
    "TenantStore",
    "Tenants",
    "TicketClaim",
    "TicketMove",
    "TicketRow",
    "TransparencyLog",
    "WithLog",
    "metadata_tag",
]


class Store(
    RunJournal,
    LeasesAndOutbox,
    Contents,
    Retention,
    Holds,
    IdempotencyRecords,
    Notices,
    Learning,
    Reports,
    Disclosures,
    ConductorVersions,
    Keys,
    Budgets,
    BudgetAccounts,
    Tenants,
    AdminEvents,
    RateWindows,
    Availability,
    ContentKeys,
    WithLog,
    Tenancy,
    Protocol,
):
    """Everything that a store promises, for code that wires the parts together."""
