"""The management interface of the server behind a conductor, as the pool file names it."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import ConfigInvalid
from app.process.config import Loaded
from app.providers.vllm import Management


@contextmanager
def conductor_server(loaded: Loaded, conductor: str) -> Iterator[Management]:
    """Yield the management interface of a conductor's server. Raises `ConfigInvalid` where it has none."""
    worker = loaded.catalog.workers.get(conductor)
    if worker is None:
        raise ConfigInvalid([f"{conductor}: there is no such worker in the pool file"])
    spec = loaded.catalog.providers[worker.provider]
    if spec.format != "openai":
        raise ConfigInvalid([f"{conductor}: its provider speaks {spec.format}, and only vLLM can be managed"])
    if spec.endpoints:
        raise ConfigInvalid([f"{conductor}: its provider has several endpoints, and only one server can be managed"])
    secret = loaded.secrets.get(worker.provider)
    credentials = loaded.proxy_credentials.get(worker.provider)
    server = Management(
        spec.base_url,
        secret.get_secret_value() if secret is not None else None,
        route=spec.route,
        proxy_credentials=credentials.get_secret_value() if credentials is not None else None,
    )
    try:
        yield server
    finally:
        server.close()
