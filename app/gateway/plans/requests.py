"""The bodies of `/v1/plans`: a request to plan for, a revision, and the order to execute one."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from app.core.plan.edits import Edit, apply_edits
from app.core.plan.proposals import MAX_SUBTASK_CHARS
from app.core.plan.published_format import from_lists, is_published
from app.errors import InvalidRequest, PlanRejected
from app.gateway.chat.request import StreamOptions
from app.gateway.wire.parameters import WireModel, WorkerName, drop_nulls, read_fields

REASON: Final = re.compile(r"step (\d+): (worker|subtask|access|tools)\b")
"""A reason of the plan's reader that is about one field of one step."""
EDIT: Final = re.compile(r"edits\[\d+\]\.(?:step|to)")
"""The beginning of a reason that is about one edit."""
FIELDS: Final = ("worker", "subtask", "access", "tools")
Number = Annotated[int, Field(ge=0, le=1_000)]


class PlanEdit(WireModel):
    """One edit of a plan: change a step, add one before that place, remove it, or move it. Steps are counted from 0,
    after the edits before this one."""

    op: Literal["change", "add", "remove", "move"]
    step: Number
    to: Number | None = None
    """The new place of a step that is moved."""
    worker: WorkerName | None = None
    subtask: Annotated[str, StringConstraints(max_length=MAX_SUBTASK_CHARS)] | None = None
    access: Annotated[list[int | Literal["user"]], Field(max_length=256, fail_fast=True)] | None = None
    tools: bool | None = None


class PlanRevisionRequest(WireModel):
    """A new revision: edits of the one that it names, or a whole new plan in its place."""

    revision: Annotated[int, Field(ge=1)]
    """The revision that the author has seen: the latest one."""
    edits: Annotated[list[PlanEdit], Field(min_length=1, max_length=64, fail_fast=True)] | None = None
    plan: dict[str, Any] | None = None
    """A plan as in the `baton.plan` of a request: `steps`, or the three published lists."""


class PlanRunRequest(WireModel):
    """The revision to execute, and how to send the answer."""

    revision: Annotated[int, Field(ge=1)] | None = None
    """By default the latest one."""
    digest: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] | None = None
    """The digest of the revision as it was shown: the plan is executed only if it has this one."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_steps: bool = False
    """With `stream: true`: send the events of the steps too, as `baton.stream_steps` of a request does."""


def read_revision(body: Mapping[str, Any]) -> PlanRevisionRequest:
    """Return the body of a new revision."""
    request = read_fields(PlanRevisionRequest, drop_nulls(body))
    if (request.edits is None) == (request.plan is None):
        raise InvalidRequest("Send edits of the plan, or a whole plan, and not both.", param="plan")
    return request


def read_run(body: Mapping[str, Any]) -> PlanRunRequest:
    """Return the body of an order to execute a plan."""
    request = read_fields(PlanRunRequest, drop_nulls(body))
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    return request


def apply_revision(request: PlanRevisionRequest, before: Mapping[str, Any], pool: tuple[str, ...]) -> dict[str, Any]:
    """Return the new revision's plan, yet to be checked. Raises `InvalidRequest` for edits that fit no step, and for
    lists that cannot be read."""
    try:
        if request.plan is not None:
            if is_published(request.plan):
                return from_lists(request.plan, pool)
            return request.plan
        return {"steps": apply_edits(before["steps"], [_edit(edit) for edit in request.edits or ()])}
    except PlanRejected as rejection:
        raise invalid_plan_error(rejection.reasons[0], "; ".join(rejection.reasons)) from None


def _edit(edit: PlanEdit) -> Edit:
    fields: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(edit, name)
        if value is not None:
            fields[name] = value
    return Edit(edit.op, edit.step, fields, edit.to)


def invalid_plan_error(first: str, message: str) -> InvalidRequest:
    """Return the refusal of a plan, which names the field that the first reason is about."""
    param = "plan"
    field = REASON.search(first)
    edit = EDIT.match(first)
    if edit is not None:
        param = edit[0]
    elif field is not None:
        param = f"plan.steps[{field[1]}].{field[2]}"
    return InvalidRequest(f"The plan is not valid: {message[:1_800]}", param=param, code="invalid_plan")
