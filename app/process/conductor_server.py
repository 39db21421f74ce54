"""The management interfaces of the servers behind a conductor, as the pool file names them: one for each endpoint."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from app.errors import ConfigInvalid
from app.process.config import Configuration
from app.process.config.poolfile import endpoint_secret
from app.process.config.secret_files import secret_text
from app.providers.vllm import Management


@contextmanager
def conductor_servers(configuration: Configuration, conductor: str) -> Iterator[tuple[Management, ...]]:
    """Yield the management interfaces of a conductor's servers, at least one. `ConfigInvalid` where it has none."""
    worker = configuration.catalog.workers.get(conductor)
    if worker is None:
        raise ConfigInvalid([f"{conductor}: there is no such worker in the pool file"])
    spec = configuration.catalog.providers[worker.provider]
    if spec.format != "openai":
        raise ConfigInvalid([f"{conductor}: its provider speaks {spec.format}, and only vLLM can be managed"])
    provider_key = configuration.secrets.get(worker.provider)
    urls_and_keys = [(spec.base_url, provider_key)]
    if spec.endpoints:
        urls_and_keys = []
        for endpoint in spec.endpoints:
            name = endpoint_secret(spec.name, endpoint.name)
            urls_and_keys.append((endpoint.base_url, configuration.secrets.get(name, provider_key)))
    credentials = secret_text(configuration.proxy_credentials.get(worker.provider))
    with ExitStack() as stack:
        servers = []
        for base_url, key in urls_and_keys:
            server = Management(base_url, secret_text(key), route=spec.route, proxy_credentials=credentials)
            servers.append(stack.enter_context(closing(server)))
        yield tuple(servers)


def find_common_models(servers: Sequence[Management]) -> list[str]:
    """Return the models that each of these servers has."""
    first, *others = [server.models() for server in servers]
    common = set(first).intersection(*others)
    return [name for name in first if name in common]
