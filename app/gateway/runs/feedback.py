"""`POST /v1/runs/{id}/feedback`: what the caller says a run's answer was worth.

A rating is added and never altered; where one source rates a run again, its latest rating counts. It may come whenever
the run has ended, and as often as somebody changes their mind, up to the bound of `rows/feedback.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints
from starlette.responses import Response

from app.core.rating.feedback import Feedback
from app.errors import Conflict, InvalidRequest
from app.gateway.http.callers import Caller
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.runs import audit
from app.gateway.wire.parameters import Label, WireModel, drop_nulls, read_fields
from app.store.protocol import RunRow

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,63}$")]
THUMBS: Mapping[str, float] = {"up": 1.0, "down": 0.0}


class FeedbackRequest(WireModel):
    """A score, a thumb (up is 1, down is 0) or a label, or a label with one of the others."""

    score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    thumbs: Literal["up", "down"] | None = None
    label: Label | None = None
    comment: Annotated[str, StringConstraints(max_length=4_000)] = ""
    source: Name = "user"
    version: Name | Literal[""] = ""


async def take(context: GatewayContext, row: RunRow, caller: Caller, body: Mapping[str, Any], name: str) -> Response:
    """Store the rating under this id, unless one of it is stored already, and show it.

    Raises `InvalidRequest` for a body that rates nothing, and `Conflict` for a run that has not ended.
    """
    rating_request = _read_request(body)
    if row.ended_at is None:
        raise Conflict("The run goes on; send feedback when it has ended.", code="run_not_ended")
    score = rating_request.score
    if rating_request.thumbs is not None:
        score = THUMBS[rating_request.thumbs]
    feedback = Feedback(
        id=name,
        run=row.id,
        tenant=row.tenant,
        key=caller.key.id,
        at=context.now(),
        kind="explicit",
        source=rating_request.source,
        version=rating_request.version,
        score=score,
        label=rating_request.label or "",
        comment=rating_request.comment,
    )
    stored = await context.store.of_tenant(caller.tenant).rate(feedback)
    context.telemetry.count("baton_feedback_total", row.tier, stored.kind)
    return json_reply({"object": "run.feedback", "run": row.id, **audit.rating(stored)})


def _read_request(body: Mapping[str, Any]) -> FeedbackRequest:
    rating_request = read_fields(FeedbackRequest, drop_nulls(body))
    if rating_request.score is not None and rating_request.thumbs is not None:
        raise InvalidRequest("Give a score or a thumb, not both.", param="thumbs")
    if rating_request.score is None and rating_request.thumbs is None and rating_request.label is None:
        raise InvalidRequest("Give a score from 0 to 1, a thumb (up or down) or a label.", param="score")
    return rating_request
