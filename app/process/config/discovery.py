"""The pool for a process without a pool file, made from the provider keys and server URLs in the environment.

The result is a document in the form of a pool file, and is checked like one. If the environment has no provider, the
rehearsal pool is used, so that Baton answers on a machine without any key.
"""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from app.process.config.known import KnownProvider, known_providers
from app.process.config.poolfile import base_url_variable
from app.process.config.secret_files import secret
from app.process.config.settings import Settings, url_problem

MINI_POOL, ULTRA_POOL = 4, 6
"""Pools stay small: a prompted conductor over a large mixed pool does worse than over a small strong one."""
WEAK_RANK = 3
"""Models of this rank or weaker stay out of the strong pool while others are left."""
BATON_KEY_PREFIX = "bt_"

MINI_LIMITS: Mapping[str, Any] = {"steps": 1, "attempts": 3, "usd": "0.50", "seconds": 180}
MINI_EFFORTS: Mapping[str, Any] = {
    "minimal": {"output_tokens": 2_048, "usd": "0.10", "seconds": 60},
    "low": {"output_tokens": 4_096, "usd": "0.25", "seconds": 120},
    "medium": {"output_tokens": 8_192},
    "high": {"output_tokens": 16_384, "usd": "1", "seconds": 300},
    "max": {"output_tokens": 32_768, "usd": "2", "seconds": 600},
}
ULTRA_LIMITS: Mapping[str, Any] = {"steps": 5, "fan_out": 4, "attempts": 4, "usd": "2", "seconds": 300}
ULTRA_EFFORTS: Mapping[str, Any] = {
    "minimal": {"steps": 1, "output_tokens": 4_096, "usd": "0.50", "seconds": 120},
    "low": {"steps": 3, "output_tokens": 8_192, "usd": "1", "seconds": 180},
    "medium": {"output_tokens": 8_192},
    "high": {"output_tokens": 16_384, "usd": "5", "seconds": 600},
    "max": {"output_tokens": 32_768, "usd": "10", "seconds": 1_200},
}


class DiscoveredPool(Struct, frozen=True):
    """A pool document, the providers that it was made from, and notes for the operator."""

    document: Mapping[str, Any]
    providers: tuple[str, ...]
    notes: tuple[str, ...]


class Candidate(Struct, frozen=True):
    """A worker that the environment offers, with the properties that decide its place in the tiers."""

    name: str
    entry: Mapping[str, Any]
    rank: int
    conducts: bool

    @property
    def cost(self) -> Decimal:
        """Return the price in USD of three million input and one million output tokens, a usual mix."""
        price = self.entry["price"]
        return Decimal(3 * price["input"] + price["output"])


def discover(settings: Settings, environ: Mapping[str, str], faults: list[str]) -> DiscoveredPool | None:
    """Return the pool that the environment offers, or None if it has no provider. Adds its faults to `faults`."""
    present: dict[str, Any] = {}
    candidates: list[Candidate] = []
    notes: list[str] = []
    for provider in known_providers().values():
        key = _key(provider, environ, notes, faults)
        is_offered = bool(key)
        if provider.server:
            is_offered = _has_server_url(provider, environ, faults)
        if not is_offered:
            continue
        _check_url(provider, settings, environ, faults)
        present[provider.name] = _provider(provider, key)
        candidates += _models(provider, environ, notes)
    if not candidates:
        return None
    document = {
        "providers": present,
        "workers": {candidate.name: candidate.entry for candidate in candidates},
        "tiers": _tiers(candidates, settings),
    }
    return DiscoveredPool(document, tuple(present), tuple(notes))


def conductor_entries(settings: Settings) -> dict[str, Any]:
    """Return entries for the provider and the worker `conductor`, or nothing without `BATON_CONDUCTOR_URL`.

    It is taken to be free, since it is usually the operator's own server: without a price it would not be asked for any
    run that has a budget.
    """
    if settings.conductor_url is None:
        return {}
    provider: dict[str, Any] = {
        "format": "openai",
        "base_url": settings.conductor_url,
        "options": {"positional": "true", "logprobs": "true"},
    }
    if settings.conductor_key is not None:
        provider["key"] = "BATON_CONDUCTOR_KEY"
    worker = {
        "provider": "conductor",
        "model": settings.conductor_model,
        "price": {"input": 0, "output": 0},
        "strengths": ["planning"],
        "pooled": False,
    }
    return {"providers": {"conductor": provider}, "workers": {"conductor": worker}}


def _key(provider: KnownProvider, environ: Mapping[str, str], notes: list[str], faults: list[str]) -> str | None:
    """Return the variable that holds this provider's key. A key for Baton itself is ignored: it is for clients."""
    for variable in provider.keys:
        try:
            value = secret(environ, variable).strip()
        except ValueError as error:
            faults.append(f"{variable}: {error}")
            continue
        if value.startswith(BATON_KEY_PREFIX):
            notes.append(f"{variable} holds a key for Baton itself and was not used for {provider.name}")
        elif value:
            return variable
    return None


def _has_server_url(provider: KnownProvider, environ: Mapping[str, str], faults: list[str]) -> bool:
    """Return True if the URL of a server is set. Adds a fault if its models are not listed."""
    variable = base_url_variable(provider.name)
    url = environ.get(variable, "").strip()
    if url and not environ.get(_models_variable(provider), "").strip(", \t"):
        faults.append(
            f"{_models_variable(provider)}: is not set; list the models that {variable} serves, separated by commas"
        )
    return bool(url)


def _check_url(provider: KnownProvider, settings: Settings, environ: Mapping[str, str], faults: list[str]) -> None:
    variable = base_url_variable(provider.name)
    url = environ.get(variable, "").strip()
    if url and (problem := url_problem(url)):
        faults.append(f"{variable}: {problem}")
    elif url and _is_own_address(url, settings):
        faults.append(f"{variable}: is Baton's own address; unset it where Baton runs, it is for clients")


def _models(provider: KnownProvider, environ: Mapping[str, str], notes: list[str]) -> Iterator[Candidate]:
    """Yield the provider's models: the listed ones, or all known ones."""
    by_name = {entry["model"]: entry for entry in provider.models}
    names: list[str] = []
    for name in environ.get(_models_variable(provider), "").split(","):
        if name.strip() and name.strip() not in names:
            names.append(name.strip())
    if not names and not provider.server:
        names = list(by_name)
    for name in names:
        entry = by_name.get(name) or _card_of_unknown_model(provider)
        if name not in by_name and not provider.server:
            notes.append(
                f"the price of {provider.name}/{name} is not known; the highest price of {provider.name} is used"
            )
        yield _candidate(provider, name, entry)


def _card_of_unknown_model(provider: KnownProvider) -> Mapping[str, Any]:
    """Return a card for an unknown model, with the highest price of its provider, so that no budget is exceeded
    unnoticed."""
    dearest = max((entry["price"] for entry in provider.models), key=lambda price: 3 * price["input"] + price["output"])
    smallest = min(entry["context"] for entry in provider.models)
    output = min(entry["max_output"] for entry in provider.models)
    return {"rank": 2, "price": dearest, "context": smallest, "max_output": output, "strengths": ["general"]}


def _candidate(provider: KnownProvider, model: str, entry: Mapping[str, Any]) -> Candidate:
    fields = {key: value for key, value in entry.items() if key != "rank"}
    return Candidate(
        name=f"{provider.name}/{model}",
        entry={**fields, "provider": provider.name, "model": model},
        rank=entry["rank"],
        conducts=provider.format == "openai" and provider.structured,
    )


def _provider(provider: KnownProvider, key: str | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "format": provider.format,
        "base_url": provider.base_url,
        "structured": provider.structured,
        "options": dict(provider.options),
    }
    if not key:
        return entry
    return entry | {"key": key}


def _tiers(candidates: Sequence[Candidate], settings: Settings) -> dict[str, Any]:
    """Return `baton-mini` over the cheapest general workers and `baton-ultra` over the strongest workers."""
    general = [candidate for candidate in candidates if "general" in candidate.entry["strengths"]] or list(candidates)
    cheap = sorted(general, key=lambda candidate: (candidate.cost, candidate.rank, candidate.name))[:MINI_POOL]
    strong = sorted(candidates, key=lambda candidate: (candidate.rank, candidate.cost, candidate.name))
    if sum(candidate.rank < WEAK_RANK for candidate in strong) > 1:
        strong = [candidate for candidate in strong if candidate.rank < WEAK_RANK]
    return {
        "baton-mini": {
            "description": "One worker, one call: fast and cheap.",
            "pool": [candidate.name for candidate in cheap],
            "conductor": {"kind": "fixed", "shape": "single", "workers": [cheap[0].name]},
            "fallback": cheap[min(1, len(cheap) - 1)].name,
            "limits": MINI_LIMITS,
            "efforts": MINI_EFFORTS,
        },
        "baton-ultra": {
            "description": "A conductor plans up to five steps over the strongest workers.",
            "pool": [candidate.name for candidate in strong[:ULTRA_POOL]],
            "conductor": _conductor(strong, settings),
            "fallback": strong[0].name,
            "limits": ULTRA_LIMITS,
            "efforts": ULTRA_EFFORTS,
        },
    }


def _conductor(strong: Sequence[Candidate], settings: Settings) -> dict[str, Any]:
    """Return the configured conductor, else the strongest worker that can follow a schema, else a fixed chain."""
    if settings.conductor_url is not None:
        return {"kind": "model", "worker": "conductor"}
    first_able = next((candidate for candidate in strong if candidate.conducts), None)
    if first_able is not None:
        return {"kind": "model", "worker": first_able.name}
    return {"kind": "fixed", "shape": "chain", "workers": [candidate.name for candidate in strong[:3]]}


def _models_variable(provider: KnownProvider) -> str:
    return base_url_variable(provider.name).removesuffix("_BASE_URL") + "_MODELS"


def _is_own_address(url: str, settings: Settings) -> bool:
    """Return True if a base URL leads back to this process, which would call itself without end."""
    if url_problem(url):
        return False
    parts = urlsplit(url)
    return parts.port == settings.port and parts.hostname in {settings.host, "127.0.0.1", "localhost", "::1"}
