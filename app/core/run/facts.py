"""A fact and its JSON, by the fields of its record: the machinery under the records of `events.py`.

A field without a default must be there when a journal is read; one with a default may be missing. Fields of the JSON
that the record does not have are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from app.core.message.chat import Usage, usage_from_json, usage_to_json
from app.core.plan.workflow import Access, access_from_list
from app.core.pool.approval import ApprovalTerms
from app.core.pool.catalog import Limits
from app.core.records import record
from app.core.run.kinds import Kind

Json = Mapping[str, Any]
"""A JSON object."""
PassedOver = tuple[tuple[str, str], ...]
"""Workers that were not called, each with the reason."""
Code = Callable[[Any], Any] | None
"""The function that writes or reads the value of a field; None where the value is JSON as it is."""


@record(frozen=True, slots=True)
class NamedCall:
    """One tool call: the id under which the caller knows it, and the tool's name."""

    id: str
    name: str


class Written(NamedTuple):
    """One field as it is written. It is left out while it has its default, if it is `optional`, or while the field that
    is named in `along` is None."""

    name: str
    key: str
    encode: Code
    optional: bool
    default: Any
    along: str


class Read(NamedTuple):
    """One field as it is read; `default` is MISSING where there is none."""

    key: str
    decode: Code
    default: Any


def optional(default: Any, *, key: str = "", along: str = "") -> Any:
    """A field that is left out of the JSON while it has its default; with `along`, while that other field is None.

    `key` is the name of the JSON field where that is no name in Python.
    """
    return field(default=default, metadata={"optional": True, "key": key, "along": along})


class Fact:
    """The base of the records in `events.py`. `kind` is the kind of event that a class stands for."""

    __slots__ = ()
    kind: ClassVar[Kind]
    written: ClassVar[tuple[Written, ...]]
    read: ClassVar[tuple[Read, ...]]

    def to_json(self) -> dict[str, Any]:
        """The body of the event, in plain JSON values."""
        body: dict[str, Any] = {}
        for name, key, encode, leaves_out, default, along in self.written:
            value = getattr(self, name)
            if leaves_out and value == default:
                continue
            if along and getattr(self, along) is None:
                continue
            body[key] = value if encode is None else encode(value)
        return body

    @classmethod
    def from_json(cls, body: Json) -> Self:
        """The inverse of `to_json`. Raises KeyError for a field that is missing and has no default."""
        values = []
        for key, decode, default in cls.read:
            if key in body:
                values.append(decode(body[key]) if decode is not None else body[key])
            elif default is not MISSING:
                values.append(default)
            else:
                raise KeyError(key)
        return cls(*values)


F = TypeVar("F", bound=Fact)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def fact(kind: Kind) -> Callable[[type[F]], type[F]]:
    """Make a class the record of the facts of this kind."""

    def made(cls: type[F]) -> type[F]:
        cls = record(frozen=True, slots=True)(cls)
        hints = get_type_hints(cls)
        cls.kind = kind
        own = fields(cls)  # type: ignore[arg-type]
        cls.written = tuple([_written(one, hints[one.name]) for one in own])
        cls.read = tuple([_read(one, hints[one.name]) for one in own])
        return cls

    return made


def _key(one: "Field[Any]") -> str:
    return one.metadata.get("key") or one.name


def _written(one: "Field[Any]", hint: Any) -> Written:
    along: str = one.metadata.get("along", "")
    return Written(
        name=one.name,
        key=_key(one),
        encode=_codes(hint)[0],
        optional="optional" in one.metadata and not along,
        default=one.default,
        along=along,
    )


def _read(one: "Field[Any]", hint: Any) -> Read:
    default = one.default if one.default_factory is MISSING else one.default_factory()
    return Read(_key(one), _codes(hint)[1], default)


def _codes(hint: Any) -> tuple[Code, Code]:
    """The functions that write and read a value of this type."""
    if hint is Usage:
        return usage_to_json, usage_from_json
    if hint is Access:
        return Access.as_list, access_from_list
    if hint is Limits:
        return Limits.to_json, Limits.from_json
    if ApprovalTerms in (hint, *get_args(hint)):
        return ApprovalTerms.to_json, ApprovalTerms.from_json
    if hint == tuple[NamedCall, ...]:
        return _calls_to_json, _calls_from_json
    if hint == PassedOver:
        return _passed_to_json, _passed_from_json
    if get_origin(hint) is tuple:
        return list, tuple
    if get_origin(hint) is frozenset:
        return sorted, frozenset
    is_object = any(get_origin(one) is Mapping for one in (hint, *get_args(hint)))
    return (dict, None) if is_object else (None, None)


def _calls_to_json(calls: tuple[NamedCall, ...]) -> list[dict[str, str]]:
    return [{"id": one.id, "name": one.name} for one in calls]


def _calls_from_json(calls: list[dict[str, str]]) -> tuple[NamedCall, ...]:
    return tuple([NamedCall(one["id"], one.get("name", "")) for one in calls])


def _passed_to_json(workers: PassedOver) -> list[dict[str, str]]:
    return [{"worker": worker, "reason": reason} for worker, reason in workers]


def _passed_from_json(workers: list[dict[str, str]]) -> PassedOver:
    return tuple([(one["worker"], one["reason"]) for one in workers])
