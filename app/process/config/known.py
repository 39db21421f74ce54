"""The providers that Baton knows by name, read from `known.toml`, and the text of the rehearsal pool."""

import tomllib
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Any

from msgspec import Struct


class KnownProvider(Struct, frozen=True):
    """One provider of `known.toml`. A `server` has no fixed address; its base URL's variable names it.

    `models` are worker entries of a pool file with an additional `rank` (1 is the strongest). A server has one entry
    without a model name, which applies to any model.
    """

    name: str
    format: str
    keys: tuple[str, ...]
    models: tuple[Mapping[str, Any], ...]
    base_url: str = ""
    server: bool = False
    structured: bool = True
    options: Mapping[str, str] = {}


@cache
def known_providers() -> Mapping[str, KnownProvider]:
    """Return all known providers by name, in the order of the file, which is read once."""
    table = tomllib.loads(read_shipped("known.toml"), parse_float=Decimal)
    providers = {}
    for name, entry in table.items():
        fields = entry | {"keys": tuple(entry["keys"]), "models": tuple(entry["models"])}
        providers[name] = KnownProvider(name, **fields)
    return providers


def read_shipped(name: str) -> str:
    """Return the text of a data file of this package."""
    return files("app.process.config").joinpath(name).read_text(encoding="utf-8")
