"""Routes to providers in a pool file; every fault in one is reported at once."""

from pathlib import Path

import pytest
import trustme

from app.core.pool.catalog import DIRECT, Route
from app.errors import ConfigInvalid
from app.process.config import Configuration, configure
from tests.harness.authority import Authority

POOL = """
[providers.far]
format = "openai"
base_url = "{base_url}"
{route}

[workers.alpha]
provider = "far"
model = "model-a"

[tiers.baton-mini]
pool = ["alpha"]
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), trustme.CA())


def load_config(folder: Path, route: str, base_url: str = "https://far.example/v1", **environ: str) -> Configuration:
    path = folder / "pool.toml"
    path.write_text(POOL.format(route=route, base_url=base_url))
    return configure({"BATON_POOL": str(path), **environ})


def faults(folder: Path, route: str, base_url: str = "https://far.example/v1", **environ: str) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        load_config(folder, route, base_url, **environ)
    return [fault.partition("providers.far.")[2] for fault in caught.value.faults]


def test_a_route_is_read_with_its_credentials_apart(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.client()
    route = f"""
        proxy = "http://proxy.example:3128/"
        proxy_credentials = "FAR_PROXY"
        ca = "{authority.ca}"
        client_certificate = "{certificate}"
        client_key = "{key}"
    """
    loaded_route = load_config(tmp_path, route, FAR_PROXY="baton:s3:cret")
    expected = Route("http://proxy.example:3128", "FAR_PROXY", authority.ca, certificate, key)
    assert loaded_route.catalog.providers["far"].route == expected
    assert loaded_route.proxy_credentials["far"].get_secret_value() == "baton:s3:cret"
    assert "s3:cret" not in repr(loaded_route)
    assert load_config(tmp_path, "").catalog.providers["far"].route == DIRECT


def test_all_faults_of_a_route_come_at_once(tmp_path: Path, authority: Authority) -> None:
    certificate, _ = authority.client("one")
    _, other_key = authority.client("other")
    words = tmp_path / "words.pem"
    words.write_text("no certificate")
    route = f"""
        proxy = "https://proxy.example:3128"
        proxy_credentials = "FAR_PROXY"
        ca = "{words}"
        client_certificate = "{certificate}"
        client_key = "{other_key}"
    """
    assert faults(tmp_path, route) == [
        "proxy: is not the address of an HTTP proxy; write it as http://host:port",
        "proxy_credentials: the environment variable FAR_PROXY does not hold user:password; export it so",
        "ca: holds no certificate in PEM form; name a file that has -----BEGIN CERTIFICATE----- in it",
        "client_key: is the key of another certificate; name the key that client_certificate was made with",
    ]


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        ('proxy = "http://user:secret@proxy.example"', "proxy: holds credentials"),
        ('proxy = "proxy.example:3128"', "proxy: is not"),
        ('proxy = "http://proxy.example/path"', "proxy: is not the address of an HTTP proxy"),
        ('proxy_credentials = "baton:s3cret"', "proxy_credentials: is not the name of an environment variable"),
        ('proxy_credentials = "FAR_PROXY"', "proxy_credentials: belong to no proxy"),
        ('ca = "ca.pem"', "ca: is not an absolute path"),
        ('ca = "/nowhere/ca.pem"', "ca: cannot be read (FileNotFoundError)"),
        ('client_key = "{key}"', "client_key: belongs to no certificate"),
        ('client_certificate = "{certificate}"', "client_certificate: holds no private key"),
        ('client_certificate = "{certificate}"\nclient_key = "{certificate}"', "client_key: holds no private key"),
        ('client_certificate = "{certificate}"\nclient_key = "{locked}"', "client_key: holds an encrypted key"),
    ],
)
def test_each_fault_of_a_route(tmp_path: Path, authority: Authority, route: str, fault: str) -> None:
    certificate, key = authority.client()
    text = route.format(certificate=certificate, key=key, locked=authority.write_locked_key())
    (only_fault,) = faults(tmp_path, text, FAR_PROXY="user:password")
    assert only_fault.startswith(fault)
    assert "secret" not in only_fault


def test_certificates_are_of_no_use_without_tls(tmp_path: Path, authority: Authority) -> None:
    (fault,) = faults(tmp_path, f'ca = "{authority.ca}"', base_url="http://far.example/v1")
    assert fault.startswith("ca: is of no use with a base_url of http://")


def test_simulated_workers_take_no_route(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    text = POOL.format(route='proxy = "http://proxy.example:3128"', base_url="")
    path.write_text(text.replace('"openai"', '"rehearsal"').replace('"model-a"', '"drafter"'))
    with pytest.raises(ConfigInvalid, match=r"providers\.far\.proxy: is of no use to simulated workers; remove it"):
        configure({"BATON_POOL": str(path)})
