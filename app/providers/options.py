"""The options of an endpoint in the pool file: `ProviderSpec.options`, checked as a whole.

All formats know `ignore`: a comma-separated list of sampling parameters that this endpoint does not take
(OpenAI's and Anthropic's newer models answer 400 to `temperature` and `top_p`). They are left out of the request and
named in the adapter's `unsupported`, so that the gateway can refuse them or record them as ignored. `positional` and
`logprobs` tell a conductor what the server can decode, `open_schemas` the executor: that no decoder leaves a schema for
its open objects and optional fields, as OpenAI's do and vLLM's do not. The adapters let them pass.
"""

from collections.abc import Mapping
from dataclasses import fields

from app.core.message.chat import Sampling
from app.core.pool.catalog import ProviderSpec, WireFormat
from app.errors import ConfigInvalid

SHARED: Mapping[str, tuple[str, ...]] = {
    "ignore": (),
    **dict.fromkeys(("positional", "logprobs", "open_schemas"), ("true", "false")),
}
WITHOUT: Mapping[WireFormat, frozenset[str]] = {
    "responses": frozenset(("stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias")),
    "anthropic": frozenset(("seed", "presence_penalty", "frequency_penalty", "logit_bias")),
    "gemini": frozenset(("logit_bias",)),
}
"""The fields of `Sampling` that a wire format does not have; one that is not listed has all of them."""
SAMPLING = frozenset(item.name for item in fields(Sampling))


def check(spec: ProviderSpec, options: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ConfigInvalid, with every fault, for a name or value that the adapter does not know; () allows any."""
    options = {**SHARED, **options}
    faults = [f"provider {spec.name}: unknown option {name!r}" for name in spec.options if name not in options]
    for name, values in options.items():
        if values and name in spec.options and spec.options[name] not in values:
            faults.append(f"provider {spec.name}: option {name!r} must be one of {', '.join(values)}")
    for name in sorted(_parse_ignored(spec) - SAMPLING):
        faults.append(f"provider {spec.name}: option 'ignore' names {name!r}, which is no sampling parameter")
    if "max_tokens" in _parse_ignored(spec):
        faults.append(f"provider {spec.name}: option 'ignore' may not name max_tokens, which bounds what a call costs")
    if faults:
        raise ConfigInvalid(faults)


def list_unsupported(spec: ProviderSpec) -> frozenset[str]:
    """Return the sampling parameters that this endpoint does not honour."""
    return WITHOUT.get(spec.format, frozenset()) | _parse_ignored(spec)


def _parse_ignored(spec: ProviderSpec) -> frozenset[str]:
    return frozenset(item.strip() for item in spec.options.get("ignore", "").split(",")) - {""}
