"""A record is a frozen dataclass, and `changed` is `dataclasses.replace`, but for their time."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from subprocess import run

import pytest

from app.core.message.chat import Sampling, Task, Toolbox
from app.core.plan.workflow import Access
from app.core.pool.breaker import Breaker
from app.core.records import copy_with
from app.core.run.progress import Propose
from app.core.run.state import Call, Exchange, Proposal, RunState, StepState, Turn
from app.stepqueue.protocol import Ticket
from app.store.protocol import Entry, Outbox

ROOT = Path(__file__).parents[2]
CHANGED = (Access, Breaker, Call, Entry, Exchange, Outbox, Proposal, Propose, RunState, Sampling)
CHANGED += (StepState, Task, Ticket, Toolbox, Turn)


@pytest.mark.parametrize("cls", CHANGED)
def test_a_changed_record_is_the_replaced_one(cls: type) -> None:
    names = [field.name for field in fields(cls)]
    assert not hasattr(cls, "__post_init__")
    record = cls(*(f"the {name}" for name in names))
    for name in names:
        assert copy_with(record, **{name: "new"}) == replace(record, **{name: "new"})
    assert copy_with(record) == record
    assert copy_with(record) is not record


def test_a_field_that_there_is_not_is_told() -> None:
    with pytest.raises(AttributeError):
        copy_with(Access(), stepz=())


def test_records_are_compared_and_hashed_by_value() -> None:
    assert Access(steps=(1,)) == Access(steps=(1,)) != Access(steps=(2,))
    assert len({Access(steps=(1,)), Access(steps=(1,)), Access()}) == 2


def test_the_type_checker_lets_nobody_assign_to_a_record(tmp_path: Path) -> None:
    assigns = tmp_path / "assigns.py"
    assigns.write_text("from app.core.plan.workflow import Access\n\nAccess().user = True\n")
    result = run([sys.executable, "-m", "mypy", "--strict", str(assigns)], cwd=ROOT, capture_output=True, text=True)
    assert 'assigns.py:3: error: Property "user" defined in "Access" is read-only' in result.stdout
