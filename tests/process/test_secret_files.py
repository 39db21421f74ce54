"""Secrets in files: settings and provider keys by `NAME_FILE`, with every fault at once and no secret shown."""

from pathlib import Path

import pytest

from app.errors import ConfigInvalid
from app.process.config import configure, describe, read, reload
from app.process.config.settings import secret_variables

POOL = """
[providers.near]
format = "openai"
base_url = "http://127.0.0.1:9/v1"
key = "NEAR_KEY"
proxy = "http://127.0.0.1:3128"
proxy_credentials = "NEAR_PROXY"

[workers.a]
provider = "near"
model = "m"
price = { input = 1, output = 2 }

[tiers.baton-mini]
pool = ["a"]
"""
SETTINGS = {
    "BATON_BOOTSTRAP_KEY": "bt_12345678_" + "k" * 43,
    "BATON_PEPPER": "p" * 32,
    "BATON_LOG_KEY": "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz",
    "BATON_CONDUCTOR_SIGNING_KEY": "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz",
    "BATON_CONTENT_KEYS": "Y29udGVudCBrZXlzIGFyZSAzMiBieXRlcyBsb25nLi4=",
    "BATON_DATABASE_URL": "postgresql://baton:s3cret@db/baton",
    "BATON_REDIS_URL": "redis://:s3cret@redis:6379/0",
    "BATON_CONDUCTOR_KEY": "s3cret-conductor",
    "BATON_OIDC_CLIENT_SECRET": "s3cret-oidc",
    "BATON_WEBHOOK_URL": "https://example.org/hook?token=s3cret",
    "BATON_WEBHOOK_SECRET": "whsec_" + "YWJj" * 12,
}
OTHERS = {
    "BATON_CONDUCTOR_URL": "http://127.0.0.1:9/v1",
    "BATON_CONDUCTOR_MODEL": "m",
    "BATON_ADMIN_PORT": "9",
    "BATON_ADMIN_URL": "https://admin.example.org",
    "BATON_OIDC_ISSUER": "https://id.example.org/",
    "BATON_OIDC_CLIENT_ID": "baton",
    "BATON_OIDC_ROLES": "groups=ops=>operator",
}


def in_files(folder: Path, secrets: dict[str, str], ending: str = "\n") -> dict[str, str]:
    """An environment that names a file for each secret."""
    for name, value in secrets.items():
        (folder / name).write_bytes((value + ending).encode())
    return {f"{name}_FILE": str(folder / name) for name in secrets}


def faults(environ: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(ConfigInvalid) as caught:
        configure(environ)
    return caught.value.faults


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_every_secret_setting_may_stand_in_a_file(tmp_path: Path, ending: str) -> None:
    assert set(SETTINGS) == set(secret_variables())
    settings = read(in_files(tmp_path, SETTINGS, ending) | OTHERS)
    plain = read(SETTINGS | OTHERS)
    for variable, name in secret_variables().items():
        assert getattr(settings, name) == getattr(plain, name), variable
    rows = {row.name: row for row in describe(settings)}
    assert {rows[name].origin for name in SETTINGS} == {"file"}
    assert all("s3cret" not in row.value for row in rows.values())


def test_keys_of_providers_come_from_files_and_are_read_again_with_the_pool(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(POOL)
    environ = in_files(tmp_path, {"NEAR_KEY": "sk-one", "NEAR_PROXY": "user:word", **SETTINGS}) | OTHERS
    environ["BATON_POOL"] = str(tmp_path / "pool.toml")
    configuration = configure(environ)
    assert configuration.secrets["near"].get_secret_value() == "sk-one"
    assert configuration.secrets["conductor"].get_secret_value() == "s3cret-conductor"
    assert configuration.proxy_credentials["near"].get_secret_value() == "user:word"
    (tmp_path / "NEAR_KEY").write_text("sk-two\n")
    again, reloaded = reload(configuration, environ)
    assert (again.secrets["near"].get_secret_value(), reloaded) == ("sk-two", ())


def test_without_a_pool_file_a_key_in_a_file_finds_its_provider(tmp_path: Path) -> None:
    configuration = configure(in_files(tmp_path, {"OPENAI_API_KEY": "sk-one"}))
    assert configuration.secrets["openai"].get_secret_value() == "sk-one"
    (fault,) = faults({"OPENAI_API_KEY_FILE": str(tmp_path / "none")})
    assert "OPENAI_API_KEY_FILE cannot be read: No such file or directory" in fault


def test_all_faults_come_at_once_and_show_no_secret(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(POOL)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"s3cret" * 20_000)
    environ = {
        "BATON_POOL": str(tmp_path / "pool.toml"),
        "BATON_PEPPER": "s3cret",
        "BATON_PEPPER_FILE": str(tmp_path / "empty"),
        "BATON_DATABASE_URL_FILE": str(tmp_path / "s3cret"),
        "BATON_WEBHOOK_URL": "https://example.org/hook",
        "BATON_WEBHOOK_SECRET_FILE": str(tmp_path / "binary"),
        "BATON_REDIS_URL_FILE": str(tmp_path / "large"),
        "BATON_PORT_FILE": str(tmp_path / "empty"),
        "NEAR_KEY_FILE": str(tmp_path / "empty"),
        "NEAR_PROXY_FILE": str(tmp_path / "s3cret"),
    }
    expected = [
        "BATON_PORT_FILE: there is no such setting",
        "BATON_DATABASE_URL: BATON_DATABASE_URL_FILE cannot be read: No such file or directory",
        "BATON_REDIS_URL: BATON_REDIS_URL_FILE names a file that is larger than 64 KiB",
        "BATON_PEPPER: BATON_PEPPER_FILE is set as well as BATON_PEPPER; unset one of them",
        "BATON_WEBHOOK_SECRET: BATON_WEBHOOK_SECRET_FILE names a file that is not UTF-8",
        "pool.toml:5: providers.near.key: NEAR_KEY_FILE names a file that is empty",
        "pool.toml:7: providers.near.proxy_credentials: NEAR_PROXY_FILE cannot be read",
    ]
    all_faults = faults(environ)
    assert len(all_faults) == len(expected), all_faults
    for words, fault in zip(expected, all_faults, strict=True):
        assert words in fault
        assert "s3cret" not in fault
