"""The management interfaces of the servers behind a conductor, as the pool file names them: one for each endpoint."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from app.errors import ConfigInvalid
from app.process.config import Loaded
from app.process.config.poolfile import endpoint_secret
from app.providers.vllm import Management


@contextmanager
def conductor_servers(loaded: Loaded, conductor: str) -> Iterator[tuple[Management, ...]]:
    """Yield the management interfaces of a conductor's servers, at least one. `ConfigInvalid` where it has none."""
    worker = loaded.catalog.workers.get(conductor)
    if worker is None:
        raise ConfigInvalid([f"{conductor}: there is no such worker in the pool file"])
    spec = loaded.catalog.providers[worker.provider]
    if spec.format != "openai":
        raise ConfigInvalid([f"{conductor}: its provider speaks {spec.format}, and only vLLM can be managed"])
    own = loaded.secrets.get(worker.provider)
    keyed = [(spec.base_url, own)]
    if spec.endpoints:
        names = [endpoint_secret(spec.name, endpoint.name) for endpoint in spec.endpoints]
        keyed = [
            (endpoint.base_url, loaded.secrets.get(name, own))
            for endpoint, name in zip(spec.endpoints, names, strict=True)
        ]
    credentials = loaded.proxy_credentials.get(worker.provider)
    with ExitStack() as opened:
        servers = []
        for base_url, secret in keyed:
            server = Management(
                base_url,
                secret.get_secret_value() if secret is not None else None,
                route=spec.route,
                proxy_credentials=credentials.get_secret_value() if credentials is not None else None,
            )
            servers.append(opened.enter_context(closing(server)))
        yield tuple(servers)


def served_by_all(servers: Sequence[Management]) -> list[str]:
    """Return the models that each of these servers has."""
    first, *others = [server.models() for server in servers]
    common = set(first).intersection(*others)
    return [name for name in first if name in common]
