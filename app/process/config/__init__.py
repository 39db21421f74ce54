"""Configuration: read once at start-up from the environment and one pool file, and converted to core types.

    configure(environ) -> Configuration ..... reads everything; called by `baton` at its start
    read_catalog(path, environ) ............. any pool file, without its secrets
    reload(previous, environ) ............... reads pool and secrets again; if they have faults, those in force stay
    describe(settings), peppers(settings) ... for `baton config`, and for the hashes of API keys

All faults are reported together as `ConfigInvalid(faults)`, each with its place and its remedy. Secrets are `SecretStr`
values in `Configuration.secrets`, by provider name, and in no core type.
"""

import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pydantic import SecretStr

from app.core.pool.catalog import Catalog
from app.errors import ConfigInvalid
from app.process.config.discovery import conductor_entries, discover
from app.process.config.known import read_shipped
from app.process.config.poolfile import Faults, Pool, build, endpoint_secret, merge_entries, parse, secret_names
from app.process.config.secret_files import SUFFIX
from app.process.config.settings import (
    SettingLine,
    Settings,
    conductor_signer,
    content_keys,
    describe,
    log_signers,
    log_witnesses,
    pepper,
    pepper_file,
    pepper_note,
    peppers,
    rate_limits,
    read,
    trusted_signers,
)

__all__ = [
    "Configuration",
    "SettingLine",
    "Settings",
    "conductor_signer",
    "configure",
    "content_keys",
    "describe",
    "endpoint_secret",
    "load",
    "log_signers",
    "log_witnesses",
    "pepper",
    "pepper_file",
    "pepper_note",
    "peppers",
    "rate_limits",
    "read",
    "read_catalog",
    "read_catalog_text",
    "reload",
    "trusted_signers",
]

MAX_POOL_BYTES = 4 * 1024 * 1024
REREAD_SETTINGS = frozenset({"pepper", "webhook_secret", "conductor_key"})
"""Settings that are read again from their files while the process runs."""


class Configuration(Struct, frozen=True):
    """A configuration in force. `origin` says in words where the pool came from; each of `notes` is logged."""

    settings: Settings
    catalog: Catalog
    secrets: Mapping[str, SecretStr]
    origin: str
    notes: tuple[str, ...] = ()
    proxy_credentials: Mapping[str, SecretStr] = {}
    """`user:password` for the proxies of providers, by provider name."""


def configure(environ: Mapping[str, str]) -> Configuration:
    """Read settings and pool. Raises `ConfigInvalid` with the faults of both."""
    try:
        settings = read(environ)
    except ConfigInvalid as error:
        raise ConfigInvalid([*error.faults, *_pool_faults(environ)]) from None
    config = load(settings, environ)
    note = pepper_note(settings)
    if note is not None:
        config = replace(config, notes=(*config.notes, note))
    return config


def load(settings: Settings, environ: Mapping[str, str]) -> Configuration:
    """Read the pool: a file if one is named, else the providers in the environment, else the rehearsal pool."""
    extra = conductor_entries(settings)
    if settings.pool is not None:
        pool = parse(_read_text(settings.pool, "BATON_POOL"), str(settings.pool), environ, extra)
        origin = f"pool file {settings.pool}"
        return Configuration(settings, pool.catalog, pool.secrets, origin, proxy_credentials=pool.proxy_credentials)
    faults: list[str] = []
    offer = discover(settings, environ, faults)
    if faults:
        raise ConfigInvalid(faults)
    if offer is None:
        return _rehearsal(settings, environ)
    pool = _build_without_file(merge_entries(offer.document, extra), environ)
    return Configuration(
        settings, pool.catalog, pool.secrets, f"environment: {', '.join(offer.providers)}", offer.notes
    )


def read_catalog(path: Path, environ: Mapping[str, str]) -> Catalog:
    """Read the catalog of any pool file, whose secrets need not be set here. Raises `ConfigInvalid`."""
    return read_catalog_text(_read_text(path, "the name of the pool file"), str(path), environ)


def read_catalog_text(text: str, source: str, environ: Mapping[str, str]) -> Catalog:
    """Read the catalog of the text of a pool file, which faults call `source`, with the addresses and the conductor
    that the environment gives it. Raises `ConfigInvalid`."""
    variables = dict(environ)
    for name in secret_names(text):
        variables[name] = "none:none"
        variables.pop(name + SUFFIX, None)
    return parse(text, source, variables, conductor_entries(read(environ))).catalog


def reload(previous: Configuration, environ: Mapping[str, str]) -> tuple[Configuration, tuple[str, ...]]:
    """Read the pool again, and the files of secrets. Returns the previous configuration and the faults if there are
    any. All other settings stay as they were at the start."""
    try:
        return load(_with_reread_secrets(previous.settings, environ), environ), ()
    except ConfigInvalid as error:
        return previous, error.faults


def _with_reread_secrets(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return the settings in force, with the secrets that their files have by now."""
    reread = read(environ)
    values = {name: getattr(reread, name) for name in REREAD_SETTINGS & reread.in_files}
    return settings.model_copy(update=values)


def _rehearsal(settings: Settings, environ: Mapping[str, str]) -> Configuration:
    """Return the shipped pool of simulated workers, which `BATON_CONDUCTOR_URL` conducts if it is set."""
    document = tomllib.loads(read_shipped("rehearsal.toml"), parse_float=Decimal)
    document["providers"]["rehearsal"]["options"]["delay"] = settings.rehearsal_delay
    if settings.conductor_url is not None:
        document["tiers"]["baton-ultra"]["conductor"]["worker"] = "conductor"
    pool = _build_without_file(merge_entries(document, conductor_entries(settings)), environ)
    return Configuration(settings, pool.catalog, pool.secrets, "rehearsal")


def _build_without_file(document: Mapping[str, Any], environ: Mapping[str, str]) -> Pool:
    """Build the pool of a document that does not come from a file."""
    return build(document, Faults("environment", {}), environ)


def _read_text(path: Path, named_by: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_POOL_BYTES + 1)
    except OSError as error:
        words = error.strerror or type(error).__name__
        raise ConfigInvalid(
            [f"{path}:1: cannot be read: {words}; correct {named_by} or the file's permissions"]
        ) from None
    if len(raw) > MAX_POOL_BYTES:
        raise ConfigInvalid([f"{path}:1: is larger than {MAX_POOL_BYTES} bytes; correct {named_by}"])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigInvalid([f"{path}:{line}: is not UTF-8; save the file as UTF-8"]) from None


def _pool_faults(environ: Mapping[str, str]) -> list[str]:
    """Return the faults of the pool for an environment whose settings have faults, under harmless settings."""
    path = environ.get("BATON_POOL", "").strip()
    conductor = None
    if environ.get("BATON_CONDUCTOR_URL", "").strip():
        conductor = "http://conductor.invalid"
    settings = Settings(
        pool=Path(path) if path else None, database_url="sqlite:///", conductor_url=conductor, conductor_model="any"
    )
    try:
        load(settings, environ)
    except ConfigInvalid as error:
        return list(error.faults)
    return []
