"""A pool as it was, for the audit: the whole catalog as canonical JSON, and its digest.

A run records the digest, the store has the bytes under it, so that a call can be checked after the pool file has
changed. Sets become sorted lists, fields keep their names; there is nothing secret in a catalog (`catalog.py`).
"""

import hashlib
import json

import msgspec
from msgspec.structs import replace

from app.core.pool.catalog import Catalog


def snapshot(catalog: Catalog) -> bytes:
    """Return the catalog's bytes: the same for equal catalogs. The digest itself is not among them."""
    plain = msgspec.to_builtins(catalog, order="sorted")
    del plain["digest"]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal_catalog(catalog: Catalog) -> Catalog:
    """Return the catalog with the SHA-256 of its snapshot as its digest."""
    return replace(catalog, digest=hashlib.sha256(snapshot(catalog)).hexdigest())


def restore_catalog(data: bytes) -> Catalog:
    """Return the inverse of `snapshot`, sealed again; fields that this version does not know are left out.

    Raises ValueError for what is no snapshot, or has values that this version does not know.
    """
    plain = json.loads(data)
    if not isinstance(plain, dict):
        raise ValueError("a snapshot is a JSON object")
    catalog = msgspec.convert(plain | {"digest": ""}, Catalog)
    return replace(catalog, digest=hashlib.sha256(data).hexdigest())
