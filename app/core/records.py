"""Records that are made and copied quickly, and the bytes of contents: how they are held for long, and by which ref
they are named. All of it is done thousands of times a second."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["content_ref", "copy_with", "record", "trim_capacity"]
Record = TypeVar("Record")


def _values(names: list[str]) -> Callable[[object], tuple[Any, ...]]:
    """Return a function that reads these fields of a record."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, slots: bool) -> Callable[[type[Record]], type[Record]]:
        """`dataclass(frozen=True, slots=True)`, but that only the type checker watches over it.

        A frozen dataclass sets each of its fields by a call, so that a step's state took 1.0 us to make; this takes
        0.2. That was a sixth of the processor's time of a workflow.
        """

        def decorate(cls: type[Record]) -> type[Record]:
            cls = dataclass(slots=slots, unsafe_hash="__hash__" not in cls.__dict__)(cls)
            cls.__values__ = staticmethod(_values([field.name for field in fields(cls)]))
            return cls

        return decorate


def copy_with(original: Record, /, **changes: Any) -> Record:
    """`dataclasses.replace` in a seventh of its time (0.6 us instead of 4.0 for a step): for records with nothing to do
    after their initialisation, which a test looks for. An unknown field is an AttributeError."""
    cls: Any = type(original)
    copy: Record = cls(*cls.__values__(original))
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


def trim_capacity(body: bytes) -> bytes:
    """Return a copy of the bytes without spare capacity. The result of `orjson.dumps` occupies at least 4 KiB, and up
    to eight times its length, for as long as it is referenced, so this is for bytes that live as long as a run or a
    call."""
    return bytes(memoryview(body))


def content_ref(salt: bytes, body: bytes) -> str:
    """Return the ref of a body within its run: the SHA-256 of the run's salt and the body, as 64 hex digits."""
    return hashlib.sha256(salt + body).hexdigest()
