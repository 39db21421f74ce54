"""Settings: every `BATON_*` variable of the environment, checked as a whole.

`read` takes the environment as a mapping and never reads `os.environ`. An empty variable counts as unset. An unknown
variable is an error, because a typing mistake would otherwise only be noticed by its consequences. A setting that is a
secret may stand in a file (`secret_files.py`).
"""

import difflib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator

from app.core.pool.rates import RateLimits
from app.core.roles import KEY_FORM_TEXT, KEY_FORMAT
from app.core.run.notices import read_secrets
from app.core.run.retention_classes import RetentionClass
from app.core.transparency.notes import Signer
from app.core.transparency.version_signatures import TrustedSigners
from app.core.transparency.witnesses import Witness
from app.errors import ConfigInvalid
from app.process.config import key_lists
from app.process.config.retention_classes import retention_classes
from app.process.config.role_rules import role_rules
from app.process.config.secret_files import SUFFIX, secret
from app.telemetry import TENANTS, RequestLines

PREFIX = "BATON_"
HIDDEN = "********"
DAY_SECONDS = 86_400.0
PEPPER_CHARS = 32
"""Characters that a pepper has at least, so that nobody can guess it."""
URL_FORMS = {
    "database_url": (
        r"sqlite(\+\w+)?:///.*|postgres(ql)?(\+\w+)?://.*",
        "sqlite:///baton.db or postgresql://user@host/name",
    ),
    "redis_url": (
        r"rediss?://([^/?#]*@)?(\[[^]]*\]|[^:/?#]*)(:\d{1,5})?(/\d*)?(\?.*)?|unix://.*",
        "redis://host:6379/0",
    ),
}
URLS = frozenset({"database_url", "redis_url", "webhook_url"})
"""URLs that may hold a password."""
INTERNAL_FIELDS = frozenset({"given", "in_files"})
"""Fields that are no settings."""
PRIVATE = frozenset({"webhook_url"})
"""URLs of which `baton config` shows only the host."""
FIGURE = re.compile(r"[0-9]{1,12}")
NOT_UTF8 = re.compile("[\ud800-\udfff]")
"""Finds the lone surrogates by which Python represents bytes of the environment that are not UTF-8."""
IGNORED_VARIABLES = re.compile(
    r"BATON_API_KEY$|BATON_(TEST|BENCH)_|BATON_((ADMIN|METRICS)_)?(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))"
)
"""A client's key, test variables, and the variables that Kubernetes adds to every pod for a Service called `baton`,
`baton-admin` or `baton-metrics`."""


class Settings(BaseModel):
    """The settings of one process. Their repr shows no secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    metrics_host: str | None = Field(
        default=None, description="Address of the listener for probes and /metrics; unset: that of BATON_HOST."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a listener for probes and /metrics alone; unset: gateways have /metrics on BATON_PORT.",
    )
    admin_host: str = Field(default="127.0.0.1", description="Address of the listener of the admin API.")
    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the admin API, which no other listener serves; unset: there is none.",
    )
    admin_url: str | None = Field(
        default=None, description="Address of the admin API as browsers reach it, for logins at an OpenID provider."
    )
    oidc_issuer: str | None = Field(
        default=None, description="Issuer URL of the OpenID provider at which people log in to the admin API."
    )
    oidc_client_id: str | None = Field(default=None, description="Id of Baton as a client of the OpenID provider.")
    oidc_client_secret: SecretStr | None = Field(
        default=None, description="Secret of Baton as a client of the OpenID provider; unset: a public client."
    )
    oidc_scopes: str = Field(
        default="openid", description="Scopes that the OpenID provider is asked for, separated by spaces."
    )
    oidc_roles: str = Field(
        default="",
        description="Roles by claims: claim=value=>role@tenant, separated by semicolons; the first that fits counts.",
    )
    oidc_session_minutes: float = Field(
        default=15.0, gt=0, le=1_440, description="How long a person's session lasts before they log in again."
    )
    metrics_tenants: int = Field(
        default=TENANTS, ge=0, le=10_000, description="Tenants whose spending is counted apart; the rest is `other`."
    )
    revision: str = Field(default="", description="Revision of the source code, which baton_build_info shows.")
    pool: Path | None = Field(
        default=None, description="Pool file (TOML); unset: the pool is built from the provider keys found."
    )
    data_dir: Path = Field(
        default=Path(".baton"), description="Folder for the embedded database and the generated pepper."
    )
    database_url: str = Field(
        default="", repr=False, description="SQLite or Postgres URL; unset: SQLite in the data folder."
    )
    redis_url: str | None = Field(
        default=None, repr=False, description="Redis URL; unset: the queue lives inside the process."
    )
    bootstrap_key: SecretStr | None = Field(
        default=None, description="API key to adopt on the first start instead of making one."
    )
    pepper: SecretStr | None = Field(
        default=None,
        description="Secret under which API keys are hashed; unset: made once, in the data folder. On further lines: "
        "earlier ones that are still accepted.",
    )
    content_keys: SecretStr | None = Field(
        default=None,
        description="Master keys for encrypting contents at rest, each 32 bytes in base64 or aws-kms:KEY: the present "
        "one, and on further lines earlier ones; unset: contents are stored plain.",
    )
    log_key: SecretStr | None = Field(
        default=None,
        description="Signer key of the transparency log (PRIVATE+KEY+NAME+...), on further lines others that sign, "
        "too; unset: made once, in the database.",
    )
    log_export: str = Field(
        default="", description="Folder or s3://bucket/prefix to which checkpoints of the transparency log are written."
    )
    log_witness: str = Field(
        default="",
        repr=False,
        description="Witnesses that cosign exported checkpoints, each as URL and verifier key (NAME+HEX+BASE64), "
        "separated by spaces.",
    )
    log_timestamp_url: str = Field(
        default="", repr=False, description="URL of an RFC 3161 authority that stamps exported checkpoints."
    )
    conductor_signing_key: SecretStr | None = Field(
        default=None, description="Signer key (PRIVATE+KEY+NAME+...) with which `baton conductor sign` signs versions."
    )
    conductor_signers: str = Field(
        default="",
        description="Verifier keys (NAME+HEX+BASE64), separated by spaces, of which one must have signed each version "
        "of a conductor that is to be loaded or put into force; unset: versions need no signature.",
    )
    conductor_unsigned: Literal["refuse", "warn"] = Field(
        default="refuse", description="What is done with versions that none of these keys has signed."
    )
    conductor_url: str | None = Field(
        default=None,
        repr=False,
        description="Base URL of an OpenAI-compatible server that conducts; its calls count as free.",
    )
    conductor_model: str | None = Field(default=None, description="Model name on the conductor's server.")
    conductor_key: SecretStr | None = Field(
        default=None, description="API key of the conductor's server, if it wants one."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log line to write."
    )
    log_requests: RequestLines = Field(
        default="all",
        description="HTTP requests that get a line in the log: all, api (no probes and no /metrics), or off.",
    )
    log_steps: bool = Field(default=True, description="Whether each step gets a line in the log.")
    drain_seconds: float = Field(
        default=5.0,
        ge=0,
        le=3_600,
        description="How long a gateway that was told to stop still serves new requests, so that balancers notice.",
    )
    keep_alive_seconds: int = Field(
        default=75, ge=1, le=3_600, description="How long an idle connection of a client is kept open."
    )
    lease_seconds: float = Field(
        default=4.0,
        ge=0.5,
        le=300,
        description="How long a process that has stopped renewing its leases keeps its work.",
    )
    max_body_bytes: int = Field(
        default=8 * 1024 * 1024, ge=1024, le=1 << 30, description="Largest request body that is read."
    )
    concurrent_runs: int = Field(
        default=512,
        ge=1,
        le=100_000,
        description="Runs that one gateway follows, and one engine drives, at once; more get a 503.",
    )
    concurrent_steps: int = Field(default=64, ge=1, le=10_000, description="Steps that one engine executes at once.")
    waiting_runs: int = Field(
        default=1_024,
        ge=1,
        le=1_000_000,
        description="Runs that may wait for an engine; beyond, tenants that have their share of them get a 429.",
    )
    key_limits: str = Field(
        default="",
        description="Rate limits of a key, each where it has none of its own: rpm=60, tpm=100000, concurrency=8.",
    )
    tenant_limits: str = Field(
        default="", description="Rate limits of each tenant, over all of its keys, written as BATON_KEY_LIMITS."
    )
    user_limits: str = Field(
        default="", description="Rate limits of each end user whom requests name, written as BATON_KEY_LIMITS."
    )
    steps: Literal["local", "spread"] = Field(
        default="local",
        description="Where steps are executed: by the engine of their run while it has free slots, or by any engine.",
    )
    idempotency_hours: float = Field(
        default=24, ge=24, le=8_784, description="How long an Idempotency-Key is remembered after its run's time limit."
    )
    retention_content: float | None = Field(
        default=None,
        gt=0,
        le=36_525,
        description="Days after which engines erase the texts of runs that have ended; unset: never.",
    )
    retention_events: float | None = Field(
        default=None,
        gt=0,
        le=36_525,
        description="Days after which engines delete runs that have ended, journal and all; unset: never.",
    )
    retention_classes: str = Field(
        default="",
        description="How long runs of a tenant, tier or label are kept: label=phi=>content=7,events=3650; "
        "tenant=acme,tier=baton-mini=>content=never.",
    )
    archive: str = Field(
        default="", description="Folder or s3://bucket/prefix to which runs are written before they are deleted."
    )
    archive_endpoint: str | None = Field(
        default=None, description="URL of an S3-compatible store in place of AWS, for an archive in a bucket."
    )
    archive_content: bool = Field(
        default=False, description="Archive the texts that are still stored, too; erasing does not reach them there."
    )
    rehearsal_delay: float = Field(
        default=1.0, ge=0, le=100, description="Factor on the rehearsal workers' delays; 0 for none."
    )
    web_search: Literal["omit", "refuse"] = Field(
        default="omit",
        description="What becomes of the web search that Codex offers with full access: left out, or a 400.",
    )
    cors_origins: str = Field(
        default="", description="Origins whose web pages may call the API, separated by commas; * for all."
    )
    webhook_url: str | None = Field(
        default=None, repr=False, description="URL to which the ends of background responses are reported; unset: none."
    )
    webhook_secret: SecretStr | None = Field(
        default=None, description="Secret that signs webhooks (whsec_...); several are separated by spaces."
    )
    given: frozenset[str] = Field(default=frozenset(), exclude=True, repr=False)
    """The fields that the environment set."""
    in_files: frozenset[str] = Field(default=frozenset(), exclude=True, repr=False)
    """The fields whose values were read from files, by `NAME_FILE`."""

    @field_validator("log_level", "log_requests", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        if isinstance(value, str):
            return value.lower()
        return value

    @field_validator("retention_classes")
    @classmethod
    def _classes(cls, value: str) -> str:
        retention_classes(value)
        return value

    @field_validator("oidc_roles")
    @classmethod
    def _roles(cls, value: str) -> str:
        role_rules(value)
        return value

    @field_validator("oidc_issuer")
    @classmethod
    def _issuer(cls, value: str | None) -> str | None:
        problem = url_problem(value) if value is not None else None
        if problem:
            raise ValueError(problem)
        return value  # a slash at its end is part of an issuer's name

    @field_validator("conductor_url", "archive_endpoint", "admin_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        problem = url_problem(value) if value is not None else None
        if problem:
            raise ValueError(problem)
        if value is None:
            return None
        return value.rstrip("/")

    @field_validator("webhook_url")
    @classmethod
    def _webhook(cls, value: str | None) -> str | None:
        if value is not None and "#" in value:
            raise ValueError("has a fragment; leave it out")
        problem = None
        if value is not None:
            problem = url_problem(value.partition("?")[0])
        if problem:
            raise ValueError(problem)
        return value

    @field_validator("webhook_secret")
    @classmethod
    def _signing(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            read_secrets(value.get_secret_value())
        return value

    @field_validator("bootstrap_key")
    @classmethod
    def _first_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not KEY_FORMAT.fullmatch(value.get_secret_value()):
            remedy = 'make one by: echo "bt_$(openssl rand -hex 4)_$(openssl rand -hex 24)"'
            raise ValueError(f"{KEY_FORM_TEXT}; {remedy}")
        return value

    @field_validator("content_keys")
    @classmethod
    def _master_keys(cls, value: SecretStr | None) -> SecretStr | None:
        key_lists.master_keys(value)
        return value

    @field_validator("log_key", "conductor_signing_key")
    @classmethod
    def _log_signers(cls, value: SecretStr | None) -> SecretStr | None:
        key_lists.signers(value)
        return value

    @field_validator("log_witness")
    @classmethod
    def _witnesses(cls, value: str) -> str:
        for witness in key_lists.witnesses(value):
            if problem := url_problem(witness.url):
                raise ValueError(f"the URL of {witness.name} {problem}")
        return value

    @field_validator("conductor_signers")
    @classmethod
    def _conductor_signers(cls, value: str) -> str:
        key_lists.verifiers(value)
        return value

    @field_validator("log_timestamp_url")
    @classmethod
    def _timestamp_url(cls, value: str) -> str:
        if value and (problem := url_problem(value)):
            raise ValueError(problem)
        return value

    @field_validator("archive", "log_export")
    @classmethod
    def _archive(cls, value: str) -> str:
        if "://" in value and not re.fullmatch(r"s3://[^/@?#]+(/[^?#]*)?", value):
            raise ValueError("must be a folder or s3://bucket/prefix; correct it")
        return value

    @field_validator("key_limits", "tenant_limits", "user_limits")
    @classmethod
    def _limits(cls, value: str) -> str:
        rate_limits(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        for origin in _split_list(value):
            parts = urlsplit(origin)
            whole = f"{parts.scheme}://{parts.netloc}" == origin and "@" not in origin and not url_problem(origin)
            if not whole and value.strip() != "*":
                raise ValueError("must be origins such as https://app.example.com, or * alone; correct it")
        return value

    @property
    def retention_content_seconds(self) -> float | None:
        """Return `retention_content` in seconds."""
        if self.retention_content is None:
            return None
        return self.retention_content * DAY_SECONDS

    @property
    def retention_events_seconds(self) -> float | None:
        """Return `retention_events` in seconds."""
        if self.retention_events is None:
            return None
        return self.retention_events * DAY_SECONDS

    @property
    def classes_of_retention(self) -> tuple[RetentionClass, ...]:
        """Return the classes of `retention_classes`."""
        return retention_classes(self.retention_classes)

    @property
    def origins(self) -> frozenset[str]:
        """Return the origins of `cors_origins`, in lower case as browsers send them."""
        return frozenset(_split_list(self.cors_origins.lower()))

    @field_validator("database_url", "redis_url")
    @classmethod
    def _url_form(cls, value: str | None, info: ValidationInfo) -> str | None:
        pattern, example = URL_FORMS[info.field_name or ""]
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"is not a URL that Baton can use; write it as {example}")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_port(cls, value: str | None) -> str | None:
        if value is not None:
            urlsplit(value).port  # noqa: B018 - it raises ValueError for a port that does not exist
        return value


def rate_limits(value: str) -> RateLimits:
    """Return the limits of a setting such as `rpm=60, concurrency=8`. Raises `ValueError`."""
    limits: dict[str, int] = {}
    for part in _split_list(value):
        name, _, figure = map(str.strip, part.partition("="))
        if name not in ("rpm", "tpm", "concurrency") or not FIGURE.fullmatch(figure):
            raise ValueError("must be limits such as rpm=60, tpm=100000, concurrency=8; correct it")
        limits[name] = int(figure)
    return RateLimits(**limits)


def _split_list(value: str) -> list[str]:
    return [part for part in map(str.strip, value.split(",")) if part]


class SettingLine(Struct, frozen=True):
    """One line of `baton config`."""

    name: str
    value: str
    default: str
    origin: Literal["environment", "file", "default"]
    meaning: str


def variables() -> dict[str, str]:
    """Return every variable with the name of its field."""
    return {PREFIX + name.upper(): name for name in Settings.model_fields if name not in INTERNAL_FIELDS}


def secret_variables() -> dict[str, str]:
    """Return the variables whose values are secret, or hold one, with the name of their field."""
    names = {}
    for variable, name in variables().items():
        if name in URLS or _is_secret(name):
            names[variable] = name
    return names


def read(environ: Mapping[str, str]) -> Settings:
    """Return the settings of an environment. Raises `ConfigInvalid` with every fault."""
    fields_by_variable = variables()
    values_by_field: dict[str, str] = {}
    faults = _unknown(environ, fields_by_variable)
    for variable, value in environ.items():
        if variable not in fields_by_variable:
            continue
        if NOT_UTF8.search(value):
            faults.append(f"{variable}: is not UTF-8; correct the value")
        elif value.strip():
            values_by_field[fields_by_variable[variable]] = value
    in_files = _from_files(environ, faults)
    values_by_field |= in_files
    faults += _incomplete(values_by_field)
    readable = {name: value for name, value in values_by_field.items() if value}
    values: dict[str, Any] = {**readable, "given": frozenset(values_by_field), "in_files": frozenset(in_files)}
    values.setdefault("database_url", _embedded_url(values_by_field.get("data_dir", ".baton")))
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigInvalid(
            faults + [_fault(item, values_by_field) for item in error.errors(include_input=False)]
        ) from None
    if faults:
        raise ConfigInvalid(faults)
    return settings


def describe(settings: Settings) -> list[SettingLine]:
    """Return all settings with their meaning. Secrets are masked entirely, and so are passwords inside URLs."""
    lines = []
    for variable, name in variables().items():
        value = getattr(settings, name)
        if name in PRIVATE:
            value = _url_without_secrets(value)
        line = SettingLine(
            name=variable,
            value=_as_text(value),
            default=_as_text(_default(name, settings)),
            origin=_origin(name, settings),
            meaning=Settings.model_fields[name].description or "",
        )
        lines.append(line)
    return lines


def pepper(settings: Settings) -> SecretStr:
    """Return the pepper: the one in the settings, or the data folder's, made on first use and readable by its owner."""
    if settings.pepper is not None:
        return settings.pepper
    path = pepper_file(settings)
    try:
        if not path.exists():
            _write_once(path, secrets.token_urlsafe(32))
        text = path.read_text(encoding="ascii", errors="ignore").strip()
    except OSError as error:
        remedy = "correct BATON_DATA_DIR or the folder's permissions, or set BATON_PEPPER"
        raise ConfigInvalid([f"{path}: cannot be made or read: {error.strerror}; {remedy}"]) from None
    if len(text) < PEPPER_CHARS:
        raise ConfigInvalid(
            [f"{path}: the pepper is damaged; restore it from a backup, or delete it and issue new keys"]
        )
    return SecretStr(text)


def pepper_file(settings: Settings) -> Path:
    """Return the file of the pepper where the settings have none."""
    return settings.data_dir / "pepper"


def pepper_note(settings: Settings) -> str | None:
    """Return what operators have to know of the pepper: that it is short, or one that this process or command made for
    itself although others share its database. None where there is nothing to say."""
    if settings.pepper is not None:
        if len(peppers(settings)[0]) >= PEPPER_CHARS:
            return None
        return (
            f"BATON_PEPPER has fewer than {PEPPER_CHARS} characters, so that it may be guessed from a hash or from a "
            "message in Redis. Make another one by `openssl rand -hex 32`, and rotate it (deploy/docs/secrets.md)"
        )
    if settings.database_url.startswith("sqlite"):
        return None
    return (
        f"BATON_PEPPER is not set, so API keys are hashed under the pepper in {pepper_file(settings)}; gateways with "
        "another pepper refuse them. Set the same BATON_PEPPER for all processes and commands"
    )


def content_keys(settings: Settings) -> tuple[bytes | str, ...]:
    """Return the master keys of contents, the present one first; none where contents are stored plain."""
    return key_lists.master_keys(settings.content_keys)


def log_signers(settings: Settings) -> tuple[Signer, ...]:
    """Return the keys that sign the checkpoints of the transparency log; none where the database has its own."""
    return key_lists.signers(settings.log_key)


def conductor_signer(settings: Settings) -> Signer | None:
    """Return the key that signs versions of conductors; None where there is none. Of several it is the first."""
    return next(iter(key_lists.signers(settings.conductor_signing_key)), None)


def trusted_signers(settings: Settings) -> TrustedSigners:
    """Return the keys of which one must have signed each version of a conductor."""
    return TrustedSigners(key_lists.verifiers(settings.conductor_signers), settings.conductor_unsigned == "refuse")


def log_witnesses(settings: Settings) -> tuple[Witness, ...]:
    """Return the witnesses that are asked to cosign checkpoints."""
    return key_lists.witnesses(settings.log_witness)


def peppers(settings: Settings) -> tuple[bytes, ...]:
    """Return the pepper in force, then the earlier ones that are still accepted while API keys are hashed anew."""
    lines = pepper(settings).get_secret_value().splitlines()
    return tuple(line.encode() for line in lines if line.strip())


def url_problem(value: str) -> str | None:
    """Return the fault of an HTTP base URL, in words that follow its name, or None. The URL is never repeated."""
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - reading it is the check
    except ValueError:
        return "is not a URL; write it as https://host/path"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return "is not an HTTP URL; write it as https://host/path"
    if parts.username or parts.password:
        return "holds credentials; put the key into its own variable"
    if parts.query or parts.fragment:
        return "has a query or a fragment; leave only scheme, host and path"
    return None


def did_you_mean(name: str, choices: list[str]) -> str:
    """Return a suggestion for a mistyped `name`, or an empty text."""
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def _embedded_url(data_dir: str) -> str:
    return f"sqlite:///{Path(data_dir) / 'baton.db'}"


def _write_once(path: Path, text: str) -> None:
    """Write a file unless it exists. Of two processes that start together one wins: a link replaces no file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _is_secret(name: str) -> bool:
    annotation = Settings.model_fields[name].annotation
    return annotation is SecretStr or SecretStr in get_args(annotation)


def _from_files(environ: Mapping[str, str], faults: list[str]) -> dict[str, str]:
    """Return the secret settings that stand in files, by field. One with a fault is there too, with no value."""
    values: dict[str, str] = {}
    for variable, name in secret_variables().items():
        if environ.get(variable + SUFFIX, "").strip():
            try:
                values[name] = secret(environ, variable)
            except ValueError as error:
                faults.append(f"{variable}: {error}")
                values[name] = ""
    return values


def _origin(name: str, settings: Settings) -> Literal["environment", "file", "default"]:
    if name in settings.in_files:
        return "file"
    if name in settings.given:
        return "environment"
    return "default"


def _unknown(environ: Mapping[str, str], variables_by_name: Mapping[str, str]) -> list[str]:
    """Return the faults of variables that look like settings and are none."""
    allowed_names = {*variables_by_name, *[variable + SUFFIX for variable in secret_variables()]}
    faults = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in allowed_names and not IGNORED_VARIABLES.match(name):
            remedy = did_you_mean(name, list(variables_by_name)) or "`baton config` lists them all"
            faults.append(f"{name}: there is no such setting; {remedy}")
    return faults


def _incomplete(values: Mapping[str, str]) -> list[str]:
    return [
        *_without_conductor(values),
        *_without_webhook(values),
        *_without_provider(values),
        *_without_port(values),
        *_without_export(values),
    ]


def _without_port(values: Mapping[str, str]) -> list[str]:
    faults = []
    for listener in ("metrics", "admin"):
        if f"{listener}_host" in values and f"{listener}_port" not in values:
            host, port = f"{PREFIX}{listener.upper()}_HOST", f"{PREFIX}{listener.upper()}_PORT"
            faults.append(f"{host}: has no effect without {port}; set both, or none")
    return faults


def _without_export(values: Mapping[str, str]) -> list[str]:
    if "log_export" in values:
        return []
    names = [name for name in ("log_witness", "log_timestamp_url") if name in values]
    return [f"{PREFIX}{name.upper()}: is set without BATON_LOG_EXPORT; set both, or none" for name in names]


def _without_provider(values: Mapping[str, str]) -> list[str]:
    if "oidc_issuer" in values:
        needed = ("admin_port", "admin_url", "oidc_client_id", "oidc_roles")
        missing = [name for name in needed if name not in values]
        return [f"{PREFIX}{name.upper()}: is not set; BATON_OIDC_ISSUER needs it" for name in missing]
    names = [name for name in ("admin_url", "oidc_client_id", "oidc_client_secret", "oidc_roles") if name in values]
    return [f"{PREFIX}{name.upper()}: is set without BATON_OIDC_ISSUER; set both, or none" for name in names]


def _without_webhook(values: Mapping[str, str]) -> list[str]:
    if "webhook_url" in values and "webhook_secret" not in values:
        return ["BATON_WEBHOOK_SECRET: is not set; make one that the receiver of BATON_WEBHOOK_URL knows too"]
    if "webhook_secret" in values and "webhook_url" not in values:
        return ["BATON_WEBHOOK_SECRET: is set without BATON_WEBHOOK_URL; set both, or none"]
    return []


def _without_conductor(values: Mapping[str, str]) -> list[str]:
    if "conductor_url" in values and "conductor_model" not in values:
        return ["BATON_CONDUCTOR_MODEL: is not set; name the model that BATON_CONDUCTOR_URL serves"]
    if "conductor_url" in values:
        return []
    names = [name for name in ("conductor_model", "conductor_key") if name in values]
    return [f"{PREFIX}{name.upper()}: is set without BATON_CONDUCTOR_URL; set both, or none" for name in names]


def _fault(item: Any, values: Mapping[str, str]) -> str:
    """Return a pydantic error in the words of a fault. The value is never repeated."""
    name = str(item["loc"][0])
    if name.endswith("port") and values[name].startswith("tcp://"):
        variable = f"{PREFIX}{name.upper()}"
        service = variable.removesuffix("_PORT").lower().replace("_", "-")
        return (
            f"{variable}: was overwritten by Kubernetes for a Service called {service}; "
            f"set enableServiceLinks: false in the pod, or set {variable} yourself"
        )
    message = item["msg"].removeprefix("Value error, ").partition(", unable to")[0].replace("Input should", "must")
    if ";" not in message:  # it names no remedy
        meaning = (Settings.model_fields[name].description or "").rstrip(".")
        message += f"; it is for: {meaning}"
    return f"{PREFIX}{name.upper()}: {message}"


def _default(name: str, settings: Settings) -> object:
    if name == "database_url":
        return _embedded_url(str(settings.data_dir))
    return Settings.model_fields[name].default


def _url_without_secrets(url: str | None) -> str | None:
    """Return scheme and host only: the path and query of a private address may be its only protection."""
    if not url:
        return None
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/{HIDDEN}"


def _as_text(value: object) -> str:
    if value is None or value == "":
        return "(none)"
    if isinstance(value, SecretStr):
        return HIDDEN
    text = str(value)
    if "://" in text:
        return _without_password(text)
    return text


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    if "@" not in parts.netloc and ":" in parts.netloc and "@" in url:  # a "/", "?" or "#" of the password ends it
        user, _, _ = parts.netloc.partition(":")
        return _without_password(f"{parts.scheme}://{user}:{HIDDEN}@{url.rpartition('@')[2]}")
    if "@" not in parts.netloc and not parts.query:
        return url
    login, at, host = parts.netloc.rpartition("@")
    user = login.partition(":")[0] + f":{HIDDEN}" if ":" in login else login
    query = re.sub(r"=[^&]*", f"={HIDDEN}", parts.query)
    return urlunsplit((parts.scheme, f"{user}{at}{host}", parts.path, query, ""))
