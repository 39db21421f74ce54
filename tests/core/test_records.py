"""`changed` is `dataclasses.replace`, but for its time."""

from dataclasses import fields, replace

import pytest

from app.consequences import Consequences
from app.core.breaker import Breaker
from app.core.chat import Sampling, Task, Toolbox
from app.core.commands import Propose
from app.core.records import changed
from app.core.state import Call, Exchange, Proposal, RunState, StepState, Turn
from app.core.workflow import Access
from app.stepqueue.protocol import Ticket
from app.store.protocol import Entry, Outbox

CHANGED = (Access, Breaker, Call, Consequences, Entry, Exchange, Outbox, Proposal, Propose, RunState, Sampling)
CHANGED += (StepState, Task, Ticket, Toolbox, Turn)


@pytest.mark.parametrize("cls", CHANGED)
def test_a_changed_record_is_the_replaced_one(cls: type) -> None:
    names = [field.name for field in fields(cls)]
    assert not hasattr(cls, "__post_init__")
    assert set(names) == set(cls.__slots__)
    record = cls(*(f"the {name}" for name in names))
    for name in names:
        assert changed(record, **{name: "new"}) == replace(record, **{name: "new"})
    assert changed(record) == record
    assert changed(record) is not record


def test_a_field_that_there_is_not_is_told() -> None:
    with pytest.raises(AttributeError):
        changed(Access(), stepz=())
