"""Every error that Baton raises on purpose.

    BatonError
    ├ CallerError      blame the caller      InvalidRequest 400 · Unauthorized 401 · Forbidden 403 · NotFound 404
    │                                        RunPruned 404 · TooSlow 408 · Conflict, LegalHold 409
    │                                        TooLarge 413 · UnsupportedMedia 415 · OverQuota 429
    ├ Overloaded       blame our size        503, always with Retry-After
    ├ ConfigInvalid    blame the operator    all faults of a file or of the environment at once; never leaves start-up
    ├ PlanRejected     blame the conductor   all reasons at once; 502 only where no fallback is left
    ├ WorkerError      blame the worker      WorkerTimeout 504 · WorkerUnavailable · WorkerRateLimited · WorkerRefused
    │                                        WorkerMalformed · WorkerTruncated · WorkerMisconfigured 502
    ├ RunEnded         a terminal state      RunCancelled 499 · RunExpired 504 · RunOverBudget 429 · RunFailed 502
    │                                        RunRefused 400 · RunRateLimited, RunOutOfQuota 429
    ├ ServiceUnavailable        blame us, never 401   StoreUnavailable 503, as are RunUndecided and
    │                                        ContentKeyUnavailable · QueueUnavailable 503
    │                                        LeaseLost, ArchiveUnavailable (stay inside)
    └ RecordDamaged    blame the database    500, and no request can mend it

    EventMalformed       blame the database    a bug to whoever drives runs, and RecordDamaged over HTTP

A class fixes the HTTP status, OpenAI's `type` and `code`, and whether the same request may be sent again. Its docstring
is its default message: it names the cause and says what to do next. Messages reach callers, so no part of a caller's
input, of a worker's prompt, of a provider's reply or of a key may ever be put into one.
"""

from datetime import UTC, datetime
from typing import ClassVar, Final, Literal, Self

from msgspec import Struct

FailureReason = Literal[
    "authentication",
    "quota",
    "unknown_model",
    "endpoint",
    "refused",
    "context_length",
    "rate_limit",
    "overload",
    "server_error",
    "timeout",
    "connection",
    "truncated",
    "malformed",
    "invalid_answer",
    "internal",
]
"""Why a provider call failed, as journal, metrics, logs and `baton runs show` name it; deploy/docs/failures.md has the
table. It is finer than the error's code, which callers know and which does not change."""


RETRY_SECONDS: Final = 1.0
"""The pause after which a request that got a 503 may be sent again, where nothing better is known."""
QuotaLimit = Literal["requests", "tokens", "concurrency", "waiting_runs"]
"""The limits beyond which a request is refused: of its key, and of runs that wait for an engine."""


class Failure(Struct, frozen=True):
    """The cause of a failed provider call. No key, and nothing of the content of the request, is in it."""

    reason: FailureReason
    status: int | None = None
    """The HTTP status; None if there was no response."""
    code: str = ""
    """The provider's own error code, or empty."""
    request_id: str = ""
    """The provider's id of the request, or empty."""
    excerpt: str = ""
    """The beginning of the provider's message, redacted (`providers/excerpt.py`); of a network error its text."""


class BatonError(Exception):
    """An internal error occurred; send the request again, and report its request id if the error persists."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retryable: bool = False

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """`param` names the field at fault; `retry_after` is in seconds, for a 503 by default `RETRY_SECONDS`; `code`
        refines the class's own code."""
        self.message = message or " ".join((type(self).__doc__ or "").split())
        self.param = param
        self.public_code = code or self.code
        if retry_after is None and self.status == 503:
            retry_after = RETRY_SECONDS
        self.retry_after = retry_after
        super().__init__(self.message)

    def without_frames(self) -> Self:
        """Return this error, without the frames in which it and those before it were raised.

        For an error that is kept by what these frames refer to: only the garbage collector would free both, with all
        that the frames hold, such as the request to a provider.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class CallerError(BatonError):
    """The request cannot be served in this form; change it before you send it again."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(CallerError):
    """The request is not valid; correct the field that is named and send it again."""

    code = "invalid_request"


class Unauthorized(CallerError):
    """Incorrect API key provided; send a valid Baton key as `Authorization: Bearer bt_...`."""

    status = 401
    code = "invalid_api_key"


class Forbidden(CallerError):
    """This API key lacks the scope for this request; ask an administrator for a key that has it."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class NotFound(CallerError):
    """Nothing with this name exists, or this API key may not see it; check the name and the key."""

    status = 404
    code = "not_found"


class RunPruned(NotFound):
    """The run was deleted because its time was over; only a hash of its journal is left."""

    code = "run_pruned"


class TooSlow(CallerError):
    """The request body did not arrive in time, so nothing was started; send the request again."""

    status = 408
    code = "request_timeout"
    retryable = True


class Conflict(CallerError):
    """The request conflicts with an earlier one; use another Idempotency-Key, or send the same body."""

    status = 409
    code = "conflict"


class LegalHold(Conflict):
    """A legal hold is in force, so nothing of this is erased; ask the operator."""

    code = "legal_hold"

    @classmethod
    def of(cls, hold: str) -> "LegalHold":
        """Return the refusal that names the hold by its id."""
        return cls(
            f"The legal hold {hold} is in force, so nothing of this is erased; ask the operator. A tenant's own list "
            "of holds does not have one on a user of all tenants."
        )


class TooLarge(CallerError):
    """The request body is too large; shorten it, or send images by reference."""

    status = 413
    code = "request_too_large"


class UnsupportedMedia(CallerError):
    """The body is not JSON; send it as UTF-8 with `Content-Type: application/json`, and without a content encoding or
    in gzip or deflate."""

    status = 415
    code = "unsupported_media_type"


class OverQuota(CallerError):
    """This API key has reached one of its limits; wait for the seconds that Retry-After names."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str | None = None, *, limit: QuotaLimit, retry_after: float) -> None:
        """`limit` is the one that was reached, for metrics; `retry_after` is in seconds."""
        super().__init__(message, retry_after=retry_after)
        self.limit = limit


class Overloaded(BatonError):
    """The service is at capacity and started nothing; send the request again after Retry-After seconds."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"
    retryable = True


class ConfigInvalid(BatonError):
    """The configuration is not valid; correct each of the faults, which are listed with their remedies."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(faults))


class PlanRejected(BatonError):
    """The plan is not valid; correct each of the reasons that are listed."""

    status = 502
    code = "plan_rejected"

    def __init__(self, reasons: list[str] | tuple[str, ...]) -> None:
        """`reasons` holds every fault that was found, not only the first."""
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class WorkerError(BatonError):
    """A worker model failed, and the run tries other eligible workers before it fails; send the request again."""

    status = 502
    type = "upstream_error"
    code = "worker_failed"
    reason: ClassVar[FailureReason] = "server_error"
    """The reason where nothing finer is known."""

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        failure: Failure | None = None,
    ) -> None:
        """`failure` is the cause, where the provider named one."""
        super().__init__(message, param=param, code=code, retry_after=retry_after)
        self.failure = failure or Failure(self.reason)
        self.elsewhere = False
        """True if one endpoint of the worker's provider failed while another one is healthy."""


class WorkerTimeout(WorkerError):
    """The worker did not answer within its deadline; send the request again, or allow it more time."""

    status = 504
    code = "worker_timeout"
    reason = "timeout"
    retryable = True


class WorkerUnavailable(WorkerError):
    """The worker's provider could not be reached or reported an internal error; send the request again later."""

    code = "worker_unavailable"
    retryable = True


class WorkerRateLimited(WorkerError):
    """The worker's provider limits the rate of requests; send the request again later."""

    code = "worker_rate_limited"
    reason = "rate_limit"
    retryable = True


class WorkerRefused(WorkerError):
    """The worker's provider refused the request; another worker may accept it."""

    code = "worker_refused"
    reason = "refused"


class WorkerMalformed(WorkerError):
    """The worker's provider sent a reply that violates its wire format; send the request again."""

    code = "worker_malformed"
    reason = "malformed"
    retryable = True


class WorkerTruncated(WorkerError):
    """The worker's stream ended early, so its answer may be incomplete; send the request again."""

    code = "worker_truncated"
    reason = "truncated"
    retryable = True


class WorkerMisconfigured(WorkerError):
    """The worker's provider rejects the key or does not know the model; an operator must correct the pool."""

    code = "worker_misconfigured"
    reason = "endpoint"


class RunEnded(BatonError):
    """The run ended without an answer; `GET /v1/runs/{id}` says why."""

    status = 502
    code = "run_ended"

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        run: str = "",
    ) -> None:
        """`run` is the id of the run, which the message names."""
        super().__init__(message, param=param, code=code, retry_after=retry_after)
        if run:
            text = self.message.replace("{id}", run)
            if run not in text:
                text = f"{text} The run is {run}."
            self.message = text
            self.args = (self.message,)


class RunCancelled(RunEnded):
    """The run was cancelled before it had an answer; send the request again if you still want one."""

    status = 499
    type = "cancelled_error"
    code = "run_cancelled"


class RunExpired(RunEnded):
    """The run reached its time limit; raise `baton.budget.seconds` or `reasoning_effort`, or ask for less."""

    status = 504
    type = "timeout_error"
    code = "run_expired"


class RunOverBudget(RunEnded):
    """The run reached its budget; raise `baton.budget` or `reasoning_effort`, or ask for less."""

    status = 429
    type = "budget_error"
    code = "run_over_budget"
    budget: str = ""
    """The id of the budget over several runs that has not enough left; empty if it is the run's own."""
    until: float | None = None
    """The end of the window of that budget, in seconds since 1970."""


class BudgetExhausted(RunOverBudget):
    """A budget has not enough left for the run; ask an operator to raise it, or send the request again in its next
    window."""

    type = "insufficient_quota"
    code = "insufficient_quota"
    until: float

    def __init__(self, budget: str, until: float, *, left: int = 0, run: str = "") -> None:
        """`budget` is the id of the budget, `until` the end of its window in seconds since 1970, and `left` the
        micro-dollars that a smaller call could hold in it."""
        end = datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        super().__init__(
            f"The budget {budget} has not enough left for this run; its window ends at {end}. Ask an operator to raise "
            "it, or send the request again after that time.",
            run=run,
        )
        self.left = left
        self.budget = budget
        self.until = until


class RunFailed(RunEnded):
    """No eligible worker could complete the run; `GET /v1/runs/{id}` lists every attempt."""

    code = "run_failed"


class RunRefused(RunEnded):
    """Every worker that was asked refused the request; `GET /v1/runs/{id}` says what each of them objected to. Change
    the request before you send it again."""

    status = 400
    type = "invalid_request_error"
    code = "worker_refused"


class RunTooLong(RunRefused):
    """The prompt is too long: it exceeds the maximum context length of every worker that was asked. Shorten or compact
    the conversation; `GET /v1/runs/{id}` lists every attempt."""

    code = "context_length_exceeded"


class RunOutOfQuota(RunEnded):
    """The accounts of this service at the providers of all workers have no quota left; an operator must add some.
    `GET /v1/runs/{id}` lists every attempt."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"


class RunRateLimited(RunEnded):
    """The providers of all workers limit the rate of requests now; `GET /v1/runs/{id}` lists every attempt."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retryable = True


class ServiceUnavailable(BatonError):
    """A part of the service is unavailable; send the request again after Retry-After seconds."""

    status = 503
    code = "unavailable"
    retryable = True


class StoreUnavailable(ServiceUnavailable):
    """The database is unavailable, so nothing was started; send the request again shortly."""

    code = "store_unavailable"


class ContentKeyUnavailable(StoreUnavailable):
    """The key under which the content is encrypted cannot be used; BATON_CONTENT_KEYS names the master keys."""


class RunUndecided(StoreUnavailable):
    """The database became unavailable before it confirmed the run, so the run may or may not exist; ask for it
    later."""

    code = "store_undecided"

    def __init__(self, run: str) -> None:
        """`run` is the id under which the run is found if it exists."""
        self.run = run
        message = (
            f"The database became unavailable while run {run} was written, so the run may or may not exist. Ask "
            f"GET /v1/runs/{run} later; a request with an Idempotency-Key can simply be sent again."
        )
        super().__init__(message)


class RunLost(ServiceUnavailable):
    """The database has moved to another server, which did not have this run yet, so the run and its answer are lost;
    send the request again."""

    code = "run_lost"


class QueueUnavailable(ServiceUnavailable):
    """The step queue is unavailable; running work continues from the database, so send the request again shortly."""

    code = "queue_unavailable"


class ArchiveUnavailable(ServiceUnavailable):
    """The archive of pruned runs cannot be written, so none is pruned; check BATON_ARCHIVE and its credentials."""

    code = "archive_unavailable"


class LeaseLost(ServiceUnavailable):
    """Another process owns this run or step now, so this process must stop writing to it."""

    code = "lease_lost"


class RecordDamaged(BatonError):
    """Stored data is damaged and cannot be read; no request can mend it, so report it to the operator."""

    code = "record_damaged"


class EventMalformed(Exception):
    """A stored event is not one of its kind, or does not fit those before it: somebody altered one, the database is
    damaged, or its kind is newer."""

    def __init__(self, run: str, seq: int, problem: str = "cannot be read") -> None:
        causes = "it was altered, the database is damaged, or a newer release of Baton wrote it."
        found = f"The event {seq} of the run {run} {problem}: {causes}"
        super().__init__(f"{found} `baton audit check` says what else is wrong.")
