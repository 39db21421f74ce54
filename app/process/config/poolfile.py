"""The pool file: reads TOML into a core `Catalog`, or reports every fault with its line and remedy.

Entries are checked one by one (`entries.py`), then against each other (`crosscheck.py`). A broken entry still counts as
present, and its valid fields are still checked, so that every mistake is reported, and reported once. A pool that was
found in the environment and the rehearsal pool are documents of the same form and are read in the same way.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar, get_args, get_origin

from msgspec import Struct
from msgspec.structs import replace
from pydantic import SecretStr, ValidationError

from app.core.pool.catalog import Catalog, Deadlines, ProviderSpec, ShadowSpec, Tier, Worker, attributes
from app.core.pool.rules import Rule, excluding_rules
from app.core.pool.snapshot import seal_catalog
from app.errors import ConfigInvalid
from app.network import tls
from app.process.config import lines
from app.process.config.crosscheck import CheckedEntries, aliases_in_force, check, shadow_worker, workers_of_tier
from app.process.config.entries import (
    ROUTE_FIELDS,
    Entry,
    EvaluationEntry,
    ProviderEntry,
    RuleEntry,
    ShadowEntry,
    TierEntry,
    WorkerEntry,
    levels,
)
from app.process.config.known import known_providers
from app.process.config.secret_files import secret
from app.process.config.settings import did_you_mean, url_problem

SECTIONS = ("providers", "workers", "tiers", "aliases", "evaluation", "rules")
OPTIONAL = ("providers", "rules")
"""Sections of entries that may be empty."""
NAME = re.compile(r"(?!.*/\.{0,2}(?:/|$))[A-Za-z0-9][A-Za-z0-9._/:@-]{0,99}")
"""Names of entries, such as `meta-llama/Llama-3:free`. They are parts of addresses, such as `/v1/models/{id}`, in which
clients and proxies resolve `.` and `..` between slashes and merge slashes that follow each other."""
UNUSABLE_NAME = (
    "is not a usable name; use letters, digits and . _ / : @ - (at most 100), and no empty part, `.` or `..` beside a /"
)
EntryT = TypeVar("EntryT", bound=Entry)


class Pool(Struct, frozen=True):
    """A catalog, and the secrets of its providers, which are never inside the catalog."""

    catalog: Catalog
    secrets: Mapping[str, SecretStr]
    proxy_credentials: Mapping[str, SecretStr] = {}


@dataclass(slots=True)
class Faults:
    """Collects the faults of a document, each with its line."""

    source: str
    lines: Mapping[lines.Path, int]
    places: list[tuple[int, str]] = field(default_factory=list)

    def add(self, path: Sequence[str | int], what: str) -> None:
        """Note a fault. `what` names the problem, then, after a semicolon, the remedy."""
        name = ".".join(str(part) for part in path)
        self.places.append((lines.line_of(self.lines, path), f"{name}: {what}"))

    def has(self, *path: str) -> bool:
        """Return True if a fault of exactly this path was noted."""
        return any(what.startswith(".".join(path) + ": ") for _, what in self.places)

    def check(self) -> None:
        """Raise `ConfigInvalid` with all faults, in the order of the file, if there are any."""
        if self.places:
            raise ConfigInvalid([f"{self.source}:{line}: {what}" for line, what in sorted(self.places)])


def parse(text: str, source: str, environ: Mapping[str, str], extra: Mapping[str, Any] | None = None) -> Pool:
    """Read the pool of a file's text. `extra` holds entries that are added unless the file has one of that name."""
    try:
        document = _load(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid([_syntax(source, str(error))]) from None
    return build(merge_entries(document, extra or {}), Faults(source, lines.line_numbers(text)), environ)


def _load(text: str) -> dict[str, Any]:
    """Return the tables of a text. Raises `TOMLDecodeError`, also for what only Python cannot read."""
    try:
        return tomllib.loads(text, parse_float=Decimal)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise tomllib.TOMLDecodeError("a number has too many digits") from None


def merge_entries(document: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with the entries of `extra` that it lacks."""
    whole = dict(document)
    for section, entries in extra.items():
        if isinstance(own := whole.get(section, {}), dict):
            whole[section] = {**entries, **own}
    return whole


def build(document: Mapping[str, Any], faults: Faults, environ: Mapping[str, str]) -> Pool:
    """Check the whole document and convert it to core types. Raises `ConfigInvalid` with every fault."""
    for name in document:
        if name not in SECTIONS:
            faults.add([name], f"is no section of a pool file; {did_you_mean(name, list(SECTIONS)) or 'remove it'}")
    draft = CheckedEntries(
        providers=_entries(document, "providers", ProviderEntry, faults),
        workers=_entries(document, "workers", WorkerEntry, faults),
        tiers=_entries(document, "tiers", TierEntry, faults),
        aliases=_aliases(document, faults),
        evaluation=_evaluation(document, faults),
        rules=_entries(document, "rules", RuleEntry, faults),
    )
    for path, what in check(draft):
        faults.add(path, what)
    providers_by_name = known_providers()
    providers = {}
    for name, entry in draft.providers.items():
        if entry is not None:
            default_url = providers_by_name[name].base_url if name in providers_by_name else ""
            providers[name] = _provider(name, entry, default_url, faults, environ)
    secrets = _secrets(draft, faults, environ)
    proxy_credentials = _proxy_credentials(draft, faults, environ)
    faults.check()
    return Pool(_catalog(draft, providers), secrets, proxy_credentials)


def _catalog(draft: CheckedEntries, providers: Mapping[str, ProviderSpec]) -> Catalog:
    rules = []
    for name, rule in draft.rules.items():
        if rule is not None:
            rules.append(rule.core(name))
    workers = {}
    for name, worker in draft.workers.items():
        if worker is not None:
            workers[name] = _worker(name, worker, draft, rules)
    tiers = {}
    used_providers = set()
    for name, tier in draft.tiers.items():
        if tier is not None:
            tiers[name] = _tier(name, tier, draft)
            used_providers.update([draft.provider_of(worker_name) for worker_name in tiers[name].pool])
    catalog = Catalog(
        providers=providers,
        workers=workers,
        tiers=tiers,
        aliases=aliases_in_force(draft),
        digest="",
        evaluation=draft.evaluation.core(),
        rehearsal=all(providers[name].format == "rehearsal" for name in used_providers),
        rules=tuple(rules),
    )
    return seal_catalog(catalog)


def _worker(name: str, entry: WorkerEntry, draft: CheckedEntries, rules: Sequence[Rule]) -> Worker:
    provider = draft.providers[entry.provider]
    assert provider is not None
    worker = entry.core(name, provider.deadlines.core(Deadlines()), provider.sampling)
    return replace(worker, excluding_rules=excluding_rules(rules, attributes(worker)))


def _tier(name: str, entry: TierEntry, draft: CheckedEntries) -> Tier:
    pool = workers_of_tier(entry, draft)
    return Tier(
        name=name,
        pool=tuple(pool),
        conductor=entry.conductor.core(),
        fallback=entry.fallback or pool[0],
        efforts=levels(entry.limits, entry.efforts),
        effort=entry.effort,
        description=entry.description,
        shadow=_shadow(entry.shadow, draft) if entry.shadow is not None else None,
        promotion=entry.promotion.core() if entry.promotion is not None else None,
        approval=entry.approval.core() if entry.approval is not None else None,
    )


def _shadow(entry: ShadowEntry, draft: CheckedEntries) -> ShadowSpec:
    """Return the shadow of a tier; a name that is of no tier is that of a worker."""
    worker = shadow_worker(entry, draft)
    if worker is None:
        return entry.core()
    return replace(entry.core(), tier="", worker=worker)


def _entries(
    document: Mapping[str, Any], section: str, model: type[EntryT], faults: Faults
) -> dict[str, EntryT | None]:
    """Return each entry by name. Its faults are noted, and it is None if too little of it is valid."""
    tables = document.get(section, {})
    if not isinstance(tables, dict):
        faults.add([section], f"must be a table; write [{section}.NAME]")
        return {}
    if not tables and section not in OPTIONAL:
        faults.add([section], f"has no entry; add at least one [{section}.NAME]")
    return {name: _entry(section, name, value, model, faults) for name, value in tables.items()}


def _entry(section: str, name: str, value: object, model: type[EntryT], faults: Faults) -> EntryT | None:
    if not NAME.fullmatch(name):
        faults.add([section, name], UNUSABLE_NAME)
    if not isinstance(value, dict):
        faults.add([section, name], f"must be a table; write [{section}.{name}]")
        return None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        _note_validation_faults(error, [section, name], model, faults)
        return _without_broken_fields(value, {item["loc"][0] for item in error.errors() if item["loc"]}, model)


def _note_validation_faults(error: ValidationError, place: Sequence[str], model: type[Entry], faults: Faults) -> None:
    for item in error.errors(include_input=False, include_url=False):
        path = [part for part in item["loc"] if part != "[key]"]
        faults.add([*place, *path], _fault_text(item, model))


def _evaluation(document: Mapping[str, Any], faults: Faults) -> EvaluationEntry:
    """Read the one section that is a table and not a list of entries."""
    table = document.get("evaluation", {})
    if not isinstance(table, dict):
        faults.add(["evaluation"], "must be a table; write [evaluation], then arms = true")
        return EvaluationEntry()
    try:
        return EvaluationEntry.model_validate(table)
    except ValidationError as error:
        _note_validation_faults(error, ["evaluation"], EvaluationEntry, faults)
        return EvaluationEntry()


def _without_broken_fields(value: Mapping[str, Any], broken: set[int | str], model: type[EntryT]) -> EntryT | None:
    """Return a broken entry without its broken fields, to check it against the others; None if that is not valid."""
    try:
        return model.model_validate({name: field for name, field in value.items() if name not in broken})
    except ValidationError:
        return None


def _fault_text(item: Any, model: type[Entry]) -> str:
    """Return a pydantic error in the words of a fault."""
    kind, message = item["type"], item["msg"]
    if kind == "extra_forbidden":
        fields = _fields(model, item["loc"][:-1])
        return f"is no field here; {did_you_mean(str(item['loc'][-1]), fields) or 'use one of ' + ', '.join(fields)}"
    if kind == "missing":
        return "is missing; every entry of this kind needs it"
    words: str = message.removeprefix("Value error, ").replace("Input should", "must")
    if ";" in words:
        return words
    return f"{words}; correct the value"


def _fields(model: type[Entry], path: Sequence[str | int]) -> list[str]:
    """Return the fields of the model at `path` inside `model`; the keys of tables and the places of lists are
    skipped."""
    here = model
    parts = iter(path)
    for part in parts:
        inner = here.model_fields[str(part)].annotation
        if get_origin(inner) in (dict, list):
            next(parts, "")
        for kind in (inner, *get_args(inner)):
            if isinstance(kind, type) and issubclass(kind, Entry):
                here = kind
                break
    return list(here.model_fields)


def _aliases(document: Mapping[str, Any], faults: Faults) -> dict[str, str] | None:
    table = document.get("aliases")
    if table is None:
        return None
    if not isinstance(table, dict):
        faults.add(["aliases"], 'must be a table; write [aliases], then name = "tier"')
        return {}
    for name, target in table.items():
        if not isinstance(target, str):
            faults.add(["aliases", name], 'must be the name of a tier; write it as "baton-mini"')
        if not NAME.fullmatch(name):
            faults.add(["aliases", name], UNUSABLE_NAME)
    return {name: target for name, target in table.items() if isinstance(target, str)}


def _provider(
    name: str, entry: ProviderEntry, default_url: str, faults: Faults, environ: Mapping[str, str]
) -> ProviderSpec:
    """Return the provider with its base URL in force: its variable's, else the file's, else the default one."""
    if entry.format == "rehearsal":
        for field_name in sorted(ROUTE_FIELDS & entry.model_fields_set):
            faults.add(["providers", name, field_name], "is of no use to simulated workers; remove it")
        return entry.core(name, "")
    variable = base_url_variable(name)
    if entry.endpoints:
        spec = entry.core(name, "")
        _endpoint_faults(name, entry, spec, faults)
        if environ.get(variable, "").strip():
            faults.add(["providers", name, "endpoints"], f"cannot be overridden by {variable}; unset it")
        return spec
    override = environ.get(variable, "").strip()
    base_url = override or entry.base_url or default_url
    problem = url_problem(override) if override else None
    if problem:
        faults.add(["providers", name, "base_url"], f"is overridden by {variable}, which {problem}")
    elif not base_url and not faults.has("providers", name, "base_url"):
        faults.add(["providers", name, "base_url"], f"is missing; give it here or in {variable}")
    spec = entry.core(name, base_url.rstrip("/"))
    for route_field, what in _route_faults(spec):
        faults.add(["providers", name, route_field], what)
    if entry.proxy_credentials is not None and not entry.proxy and not faults.has("providers", name, "proxy"):
        faults.add(["providers", name, "proxy_credentials"], "belong to no proxy; set proxy too, or remove them")
    return spec


def _endpoint_faults(name: str, entry: ProviderEntry, spec: ProviderSpec, faults: Faults) -> None:
    """Note what is wrong with a provider's several endpoints and with how they are reached."""
    path = ["providers", name]
    if entry.base_url:
        faults.add([*path, "base_url"], "is of no use beside endpoints; move it into one of them")
    names = [endpoint.name for endpoint in spec.endpoints]
    for place, own_name in enumerate(names):
        if own_name in names[:place]:
            faults.add([*path, "endpoints", place, "name"], f"{own_name} is the name of another endpoint; names differ")
    for endpoint in spec.endpoints:
        for field_name, what in _route_faults(replace(spec, base_url=endpoint.base_url)):
            if not faults.has(*path, field_name):
                faults.add([*path, field_name], what)


def _route_faults(spec: ProviderSpec) -> Iterator[tuple[str, str]]:
    """Yield the faults of a provider's certificate authorities and client certificate, by field."""
    route = spec.route
    yield from tls.faults(route)
    for name in ("ca", "client_certificate"):
        if getattr(route, name) and spec.base_url.startswith("http://"):
            yield name, "is of no use with a base_url of http://; write https://, or remove it"


def base_url_variable(provider: str) -> str:
    """Return the variable that overrides a provider's base URL: `openai` -> `OPENAI_BASE_URL`."""
    return re.sub(r"[^A-Z0-9]", "_", provider.upper()) + "_BASE_URL"


def _secrets(draft: CheckedEntries, faults: Faults, environ: Mapping[str, str]) -> dict[str, SecretStr]:
    """Return the keys of all providers and endpoints by name, and note why one is missing."""
    keys: dict[str, SecretStr | None] = {}
    for name, entry in draft.providers.items():
        if entry is None:
            continue
        for place, endpoint in enumerate(entry.endpoints):
            if endpoint.key is not None:
                path: list[str | int] = ["providers", name, "endpoints", place, "key"]
                secret_name = endpoint_secret(name, endpoint.core(place).name)
                keys[secret_name] = _provider_key(endpoint.key, path, faults, environ)
        if entry.key is not None:
            keys[name] = _provider_key(entry.key, ["providers", name, "key"], faults, environ)
    return {name: key for name, key in keys.items() if key is not None}


def endpoint_secret(provider: str, endpoint: str) -> str:
    """Return the name under which an endpoint's own key is among the secrets; no provider is called that."""
    return f"{provider} {endpoint}"


def secret_names(text: str) -> set[str]:
    """Return the variables that a pool file names for its secrets; none if it is not valid TOML."""
    try:
        providers = _load(text).get("providers", {})
    except tomllib.TOMLDecodeError:
        return set()
    tables = []
    if not isinstance(providers, dict):
        return set()
    for provider in _tables(list(providers.values())):
        tables += [provider, *_tables(provider.get("endpoints"))]
    names = set()
    for table in tables:
        for field_name in ("key", "proxy_credentials"):
            if isinstance(table.get(field_name), str):
                names.add(table[field_name])
    return names


def _tables(value: object) -> list[dict[str, Any]]:
    """Return the tables of a list; none if the value is no list."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict)]


def _provider_key(
    variable: str, path: Sequence[str | int], faults: Faults, environ: Mapping[str, str]
) -> SecretStr | None:
    """Return the key in a variable, or in the file that it names; None if a fault of it was noted."""
    value = _secret(variable, path, faults, environ)
    if value:
        return SecretStr(value)
    if value is not None:
        faults.add(path, f"the environment variable {variable} is not set; export it, or remove this provider")
    return None


def _secret(variable: str, path: Sequence[str | int], faults: Faults, environ: Mapping[str, str]) -> str | None:
    """Return the secret of a variable or of its file, empty if there is none; None if a fault of it was noted."""
    try:
        return secret(environ, variable).strip()
    except ValueError as error:
        faults.add(path, str(error))
        return None


def _proxy_credentials(draft: CheckedEntries, faults: Faults, environ: Mapping[str, str]) -> dict[str, SecretStr]:
    credentials: dict[str, SecretStr] = {}
    for name, entry in draft.providers.items():
        if entry is None or entry.proxy_credentials is None:
            continue
        path = ["providers", name, "proxy_credentials"]
        value = _secret(entry.proxy_credentials, path, faults, environ)
        if value is not None and re.fullmatch(r"[!-9;-~]+:[!-~]*", value):
            credentials[name] = SecretStr(value)
        elif value is not None:
            words = f"the environment variable {entry.proxy_credentials} does not hold user:password; export it so"
            faults.add(path, words)
    return credentials


def _syntax(source: str, message: str) -> str:
    """Return the fault of a syntax error; tomllib gives the place in words: `... (at line 3, column 5)`."""
    place = re.search(r"\(at line (\d+), column \d+\)", message)
    words = re.sub(r"\s*\(at .*\)$", "", message)
    line = place.group(1) if place else 1
    return f"{source}:{line}: not valid TOML: {words}; correct it first"
