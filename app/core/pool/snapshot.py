"""A pool as it was, for the audit: the whole catalog as canonical JSON, and its digest.

A run records the digest, the store has the bytes under it, so that a call can be checked after the pool file has
changed. Sets become sorted lists, fields keep their names; there is nothing secret in a catalog (`catalog.py`).
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from app.core.pool.catalog import Catalog

SCALARS: Final = frozenset({str, int, float, bool, NoneType})
"""The types of most values, which stay as they are: to find that out by what they are not takes most of the time."""


def snapshot(catalog: Catalog) -> bytes:
    """Return the catalog's bytes: the same for equal catalogs. The digest itself is not among them."""
    plain = _plain(catalog)
    del plain["digest"]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal_catalog(catalog: Catalog) -> Catalog:
    """Return the catalog with the SHA-256 of its snapshot as its digest."""
    return replace(catalog, digest=hashlib.sha256(snapshot(catalog)).hexdigest())


def restore_catalog(data: bytes) -> Catalog:
    """Return the inverse of `snapshot`, sealed again; fields that this version does not know are left out.

    Raises ValueError, TypeError or KeyError for what is no snapshot.
    """
    catalog: Catalog = _build_value(Catalog, json.loads(data) | {"digest": ""})
    return replace(catalog, digest=hashlib.sha256(data).hexdigest())


def _plain(value: Any) -> Any:
    if type(value) in SCALARS:
        return value
    if isinstance(value, Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value


def _record(kind: Any, value: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    names = [name for name in kind.__struct_fields__ if name in value]
    return kind(**{name: _build_value(hints[name], value[name]) for name in names})


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    """Return the types of a record's fields, by name: to evaluate them took half of the time of restoring a catalog."""
    return get_type_hints(kind)


def _build_value(kind: Any, value: Any) -> Any:
    """Return a value of the type that a field is declared with."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        return _build_value(next(argument for argument in arguments if argument is not type(None)), value)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _record(kind, value)
    if origin is Mapping:
        return {name: _build_value(arguments[1], entry) for name, entry in value.items()}
    if origin is tuple:
        return tuple(_build_value(arguments[0], entry) for entry in value)
    if origin is frozenset:
        return frozenset(value)
    return value
