"""The providers that Baton knows by name: data of `known.toml`, and the rehearsal pool beside it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Known:
    """One provider of `known.toml`. A `server` has no fixed address: it is found by its base URL's variable.

    `models` are worker entries of a pool file with a `rank` (1 strongest) beside; a server's one entry has no
    model name and stands for any.
    """

    name: str
    format: str
    keys: tuple[str, ...]
    models: tuple[Mapping[str, Any], ...]
    base_url: str = ""
    server: bool = False
    structured: bool = True
    options: Mapping[str, str] = field(default_factory=dict)


def providers() -> dict[str, Known]:
    """All of them, in the order of the file."""
    table = tomllib.loads(shipped("known.toml"), parse_float=Decimal)
    return {
        name: Known(name, **{**entry, "keys": tuple(entry["keys"]), "models": tuple(entry["models"])})
        for name, entry in table.items()
    }


def shipped(name: str) -> str:
    """The text of a data file of this package."""
    return files("app.process.config").joinpath(name).read_text(encoding="utf-8")
