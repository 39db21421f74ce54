"""The options of an endpoint in the pool file: `ProviderSpec.options`, checked as a whole, where the file is read and
again where an adapter is made. Those of one format alone are in `app/core/pool/wire_formats.py`.

All formats know `ignore`: a comma-separated list of sampling parameters that this endpoint does not take
(OpenAI's and Anthropic's newer models answer 400 to `temperature` and `top_p`). They are left out of the request and
named in the adapter's `unsupported`, so that the gateway can refuse them or record them as ignored. `positional` and
`logprobs` tell a conductor what the server can decode, `open_schemas` the executor: that no decoder leaves a schema for
its open objects and optional fields, as OpenAI's do and vLLM's do not. The adapters let them pass.
"""

from collections.abc import Iterator, Mapping

from app.core.message.chat import SAMPLING
from app.core.pool.catalog import ProviderSpec
from app.core.pool.wire_formats import FORMATS, WireFormat
from app.errors import ConfigInvalid

SHARED: Mapping[str, tuple[str, ...]] = {
    "ignore": (),
    **dict.fromkeys(("positional", "logprobs", "open_schemas"), ("true", "false")),
}
NUMBERS = ("delay", "first_ms", "chunk_ms")
"""The options of simulated workers that are numbers: a factor, and milliseconds."""


def check(spec: ProviderSpec) -> None:
    """Raise ConfigInvalid, with every fault, for a name or value that the provider's format does not know."""
    problems = [f"provider {spec.name}: option {name} {what}" for name, what in faults(spec.format, spec.options)]
    if problems:
        raise ConfigInvalid(problems)


def faults(wire_format: WireFormat, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each option that is wrong, and what is wrong with it, with the remedy after a semicolon."""
    options = {**SHARED, **FORMATS[wire_format].options}
    if wire_format == "rehearsal":
        del options["ignore"]  # simulated workers ignore what they always ignore
    for name, value in given.items():
        if name not in options:
            yield name, f"is unknown to the format {wire_format}; use one of {', '.join(sorted(options))}"
        elif options[name] and value not in options[name]:
            yield name, f"must be one of {', '.join(options[name])}; correct it"
        elif name in NUMBERS and not _is_amount(value):
            yield name, "must be a number that is not negative; correct it"
    for name in sorted(_parse_ignored(given).difference(SAMPLING)):
        yield "ignore", f"names {name}, which is no sampling parameter; remove it"
    if "max_tokens" in _parse_ignored(given):
        yield "ignore", "may not name max_tokens, which bounds what a call costs; remove it"


def _is_amount(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def list_unsupported(spec: ProviderSpec) -> frozenset[str]:
    """Return the sampling parameters that this endpoint does not honour."""
    return FORMATS[spec.format].lacks | _parse_ignored(spec.options)


def _parse_ignored(given: Mapping[str, str]) -> frozenset[str]:
    return frozenset(item.strip() for item in given.get("ignore", "").split(",")) - {""}
