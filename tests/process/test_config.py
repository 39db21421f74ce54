"""The door: settings, pool files and discovery; every fault at once, no secret ever shown."""

import base64
import json
import stat
from pathlib import Path

import pytest

from app.core.message.chat import Usage
from app.core.pool.catalog import Evaluation
from app.errors import ConfigInvalid
from app.process.config import (
    Configuration,
    configure,
    describe,
    load,
    pepper,
    read,
    read_catalog,
    read_catalog_text,
    reload,
)
from app.process.config.entries import EFFORTS
from app.process.config.known import known_providers
from app.process.config.lines import line_numbers, line_of
from app.process.config.settings import variables

ROOT = Path(__file__).resolve().parents[2]

GOOD = """
[providers.openai]
format = "openai"
key = "OPENAI_API_KEY"

[workers.small]
provider = "openai"
model = "small-1"
price = { input = 0.15, cached = "0.0028", output = 0.6 }

[workers.large]
provider = "openai"
model = "large-1"
price = { input = "1.25", output = "10" }

[tiers.baton-mini]
pool = ["small", "large"]

[tiers.baton-ultra]
pool = "all"
conductor = { kind = "model", worker = "large" }
fallback = "small"
limits = { usd = 2.5, seconds = 90.5 }
efforts.low = { steps = 2 }
efforts.high = { usd = "7.000001" }
"""

NASTY = """\
[providers.openai]
format = "openai"
key = "OPENAI_API_KEY"
base_ulr = "https://api.openai.com/v1"

[providers.leaky]
format = "opnai"
key = "sk-live-1234567890"

[providers.house]
format = "openai"

[workers.a]
provider = "opanai"
model = "m"
price = { input = nan, output = -1 }

[workers.b]
provider = "house"
price = { input = 20000, output = "cheap", chached = 1 }
context = "many"

[workers."bad name"]
provider = "house"
model = "x"

[workers.twin]
provider = "house"
model = "y"

[workers.other]
provider = "house"
model = "y"
price = { input = 0.0000001, output = 0 }

[tiers.baton-mini]
pool = ["a", "bb", "a"]

[tiers.baton-ultra]
pool = ["a", "twin"]
conductor = { kind = "model", worker = "conductr" }
fallback = "other"
effort = "huge"

[tiers.third]
pool = [
  "a",
  "nobody",
]
conductor = { kind = "fixed", shape = "single", workers = ["other"] }
fallback = "other"

[tiers.third.efforts.medum]
steps = 0

[tiers.fourth]
pool = ["twin"]
conductor = { kind = "model" }
limits = { stepz = 3, seconds = inf }

[aliases]
third = "baton-mini"
round = "about"
about = "round"
lost = "baton-minni"

[worker.c]
model = "z"
"""

EXPECTED = [
    (4, "providers.openai.base_ulr", "did you mean base_url?"),
    (7, "providers.leaky.format", ""),
    (8, "providers.leaky.key", "never write a key itself"),
    (10, "providers.house.base_url", "HOUSE_BASE_URL"),
    (14, "workers.a.provider", "there is no provider opanai; did you mean openai?"),
    (16, "workers.a.price.input", "not a finite amount"),
    (16, "workers.a.price.output", "is negative"),
    (18, "workers.b.model", "is missing"),
    (20, "workers.b.price.input", "above $10,000"),
    (20, "workers.b.price.output", "not an amount in USD"),
    (20, "workers.b.price.chached", "did you mean cached?"),
    (21, "workers.b.context", "must be a valid integer"),
    (23, "workers.bad name", "not a usable name"),
    (34, "workers.other.price.input", "finer than a micro-dollar"),
    (37, "tiers.baton-mini.pool", "lists a more than once"),
    (43, "tiers.baton-ultra.effort", "minimal"),
    (41, "tiers.baton-ultra.conductor.worker", "there is no worker conductr"),
    (42, "tiers.baton-ultra.fallback", "not in the tier's pool"),
    (46, "tiers.third.pool", "there is no worker nobody"),
    (50, "tiers.third.conductor.workers", "not in the tier's pool"),
    (51, "tiers.third.fallback", "not in the tier's pool"),
    (53, "tiers.third.efforts.medum", ""),
    (58, "tiers.fourth.conductor", "needs `worker`"),
    (59, "tiers.fourth.limits.stepz", "did you mean steps?"),
    (59, "tiers.fourth.limits.seconds", ""),
    (62, "aliases.third", "hides the tier"),
    (63, "aliases.round", "leads to itself"),
    (64, "aliases.about", "leads to itself"),
    (65, "aliases.lost", "did you mean baton-mini?"),
    (67, "worker", "did you mean workers?"),
]


def write_pool(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "pool.toml"
    path.write_text(text, encoding="utf-8")
    return {"BATON_POOL": str(path), "OPENAI_API_KEY": "sk-secret-1"}


def faults(environ: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(ConfigInvalid) as caught:
        configure(environ)
    return caught.value.faults


ADDRESSABLE = ["openai/gpt-4o", "meta-llama/Llama-3:free", "a..b", "a.b/c.", "a/.b", "a/...", "x@y"]
UNADDRESSABLE = [
    "a/../b",
    "a/..",
    "a/./b",
    "a/.",
    "a//b",
    "a/",
    "/a",
    "..",
    "a\tb",
    "a\n",
    "a\u202eb",
    "a?b",
    "a%2fb",
    "",
]


@pytest.mark.parametrize("name", ADDRESSABLE + UNADDRESSABLE)
@pytest.mark.parametrize("section", ["workers", "tiers", "aliases"])
def test_what_cannot_be_addressed_in_a_url_is_no_name(tmp_path: Path, section: str, name: str) -> None:
    names = {"workers": "one", "tiers": "one", "aliases": "other"} | {section: name}
    worker, tier, alias = (json.dumps(names[part]) for part in ("workers", "tiers", "aliases"))
    text = (
        '[providers.near]\nformat = "rehearsal"\n\n'
        f'[workers.{worker}]\nprovider = "near"\nmodel = "x"\nprice = {{ input = 1, output = 1 }}\n\n'
        f"[tiers.{tier}]\npool = [{worker}]\n\n[aliases]\n{alias} = {tier}\n"
    )
    environ = write_pool(tmp_path, text)
    if name in ADDRESSABLE:
        configure(environ)
    else:
        (fault,) = [fault for fault in faults(environ) if "not a usable name" in fault]
        assert f"{section}.{name}: " in fault


def test_a_count_that_could_not_be_stored_is_a_fault(tmp_path: Path) -> None:
    """Of ten trillions of tokens the cost no longer fits into the 64 bits of JSON and of the database."""
    text = GOOD.replace("[workers.small]", "[workers.small]\ncontext = 10_000_000_000_000")
    text += '[tiers.one]\npool = ["small"]\nlimits = { tokens = 10_000_000_000_000 }\n'
    of_worker, of_tier = faults(write_pool(tmp_path, text))
    assert "workers.small.context: must be less than or equal to 1000000000000; correct the value" in of_worker
    assert "tiers.one.limits.tokens: must be less than or equal to 1000000000000; correct the value" in of_tier


def test_a_good_file(tmp_path: Path) -> None:
    configuration = configure(write_pool(tmp_path, GOOD))
    catalog = configuration.catalog
    assert catalog.providers["openai"].base_url == "https://api.openai.com/v1"
    assert catalog.tiers["baton-mini"].pool == ("small", "large")
    assert catalog.tiers["baton-mini"].fallback == "small"
    assert catalog.tiers["baton-ultra"].pool == ("small", "large")
    assert catalog.aliases["ultra"] == "baton-ultra"
    assert catalog.tier("fugu") is catalog.tiers["baton-mini"]
    assert not catalog.rehearsal
    assert len(catalog.digest) == 64
    assert configuration.secrets["openai"].get_secret_value() == "sk-secret-1"
    assert "sk-secret-1" not in repr(configuration)


def test_prices_are_exact(tmp_path: Path) -> None:
    catalog = configure(write_pool(tmp_path, GOOD)).catalog
    small, large = catalog.workers["small"].price, catalog.workers["large"].price
    assert (small.input, small.cached, small.output) == (150_000, 2_800, 600_000)
    assert (large.input, large.cached, large.output) == (1_250_000, 1_250_000, 10_000_000)
    assert small.cost(Usage(input=1_000_000, cached=500_000, output=1_000_000)) == 75_000 + 1_400 + 600_000


def test_every_effort_has_limits(tmp_path: Path) -> None:
    tiers = configure(write_pool(tmp_path, GOOD)).catalog.tiers
    ultra = tiers["baton-ultra"].efforts
    assert set(ultra) == set(EFFORTS) == set(tiers["baton-mini"].efforts)
    assert ultra["low"].steps == ultra["minimal"].steps == ultra["medium"].steps == 2
    assert ultra["low"].usd == 2_500_000
    assert ultra["max"].usd == ultra["xhigh"].usd == ultra["high"].usd == 7_000_001
    assert {limits.seconds for limits in ultra.values()} == {90.5}


def test_a_nasty_file_is_told_all_at_once(tmp_path: Path) -> None:
    all_faults = faults(write_pool(tmp_path, NASTY))
    for line, path, words in EXPECTED:
        assert any(f"pool.toml:{line}: {path}: " in fault and words in fault for fault in all_faults), (
            line,
            path,
            all_faults,
        )
    assert len(all_faults) >= len(EXPECTED)
    assert all(";" in fault or "did you mean" in fault for fault in all_faults)
    assert "sk-live" not in "".join(all_faults)


def test_what_is_found_between_entries(tmp_path: Path) -> None:
    text = (
        GOOD
        + """
[workers.twin]
provider = "opanai"
model = "small-1"

[workers.copy]
provider = "openai"
model = "small-1"

[tiers.odd]
pool = ["smal"]
conductor = { kind = "fixed", shape = "single", workers = ["large"] }
fallback = "large"

[tiers.even]
pool = ["small"]
conductor = { kind = "model", worker = "lage" }
"""
    )
    all_faults = "\n".join(faults(write_pool(tmp_path, text)))
    assert "there is no provider opanai; did you mean openai?" in all_faults
    assert "workers.small.model: is used by another worker" in all_faults
    assert "workers.copy.model: is used by another worker" in all_faults
    assert "there is no worker smal; did you mean small?" in all_faults
    assert "the fallback large is not in the tier's pool" in all_faults
    assert "the conductor's worker large is not in the tier's pool" in all_faults
    assert "there is no worker lage; did you mean large?" in all_faults


def test_arms_are_served_if_the_file_says_so(tmp_path: Path) -> None:
    assert configure(write_pool(tmp_path, GOOD)).catalog.evaluation == Evaluation()
    text = GOOD + '[evaluation]\narms = true\nconductors = ["small"]\n'
    assert configure(write_pool(tmp_path, text)).catalog.evaluation == Evaluation(True, ("small",))
    wrong = "[evaluation]\narms = 1\narm = true\n"
    assert [fault.split(": ")[1] for fault in faults(write_pool(tmp_path, GOOD + wrong))] == [
        "evaluation.arms",
        "evaluation.arm",
    ]
    [missing] = faults(write_pool(tmp_path, GOOD + '[evaluation]\nconductors = ["smal"]\n'))
    assert missing.endswith("evaluation.conductors: there is no worker smal; did you mean small?")
    [plain] = faults(write_pool(tmp_path, "evaluation = 3\n" + GOOD))
    assert "evaluation: must be a table" in plain


def test_rules_are_read_and_their_faults_named(tmp_path: Path) -> None:
    right = '[rules.stay]\nlabels = ["phi"]\nallow = { region = ["eu"] }\ndeny = { worker = ["small"] }\n'
    catalog = configure(write_pool(tmp_path, GOOD + right)).catalog
    assert [rule.name for rule in catalog.rules] == ["stay"]
    assert [rule.name for rule in catalog.workers["small"].excluding_rules] == ["stay"]
    for wrong, words in (
        ("labels = []", "rules.stay: decides nothing; give it `allow`, `deny` or `approve`"),
        ("deny = {}", "rules.stay.deny: names no value; name at least one"),
        ("deny = { region = [] }", "rules.stay.deny: names no value of region; name at least one"),
        ('deny = { worker = ["smal"] }', "rules.stay.deny.worker: there is no worker smal; did you mean small?"),
        ('deny = { country = ["fr"] }', "rules.stay.deny.country: is no field here"),
    ):
        [fault] = faults(write_pool(tmp_path, f"{GOOD}[rules.stay]\n{wrong}\n"))
        assert words in fault


def test_broken_toml_names_its_line(tmp_path: Path) -> None:
    (fault,) = faults(write_pool(tmp_path, GOOD + "\n[workers.small]\nmodel = 1\n"))
    assert "pool.toml:27: not valid TOML" in fault
    [missing] = faults({"BATON_POOL": str(tmp_path / "none" / "pool.toml")})
    assert "pool.toml:1: cannot be read: No such file or directory; correct BATON_POOL" in missing
    assert "is larger than 4194304 bytes" in faults({"BATON_POOL": "/dev/zero"})[0]


def test_a_key_that_is_not_set(tmp_path: Path) -> None:
    environ = write_pool(tmp_path, GOOD)
    del environ["OPENAI_API_KEY"]
    (fault,) = faults(environ)
    assert "pool.toml:4: providers.openai.key: the environment variable OPENAI_API_KEY is not set; export it" in fault


def test_base_urls_are_overridden_by_their_variable(tmp_path: Path) -> None:
    environ = write_pool(tmp_path, GOOD) | {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1/"}
    assert configure(environ).catalog.providers["openai"].base_url == "http://127.0.0.1:9/v1"
    all_faults = faults(environ | {"OPENAI_BASE_URL": "https://me:hunter2@host/v1"})
    assert "is overridden by OPENAI_BASE_URL, which holds credentials" in all_faults[0]
    assert "hunter2" not in all_faults[0]


@pytest.mark.parametrize("name", ["pool.example.toml", "pool.eu.toml"])
def test_the_examples_are_good(name: str) -> None:
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "MISTRAL_API_KEY")
    configuration = configure(dict.fromkeys(keys, "k") | {"BATON_POOL": str(ROOT / "deploy" / name)})
    assert set(configuration.catalog.tiers) == {"baton-mini", "baton-ultra"}
    assert "conductor" not in configuration.catalog.tiers["baton-ultra"].pool


def test_reload_keeps_the_last_good_one(tmp_path: Path) -> None:
    environ = write_pool(tmp_path, GOOD)
    first = configure(environ)
    write_pool(tmp_path, GOOD.replace("0.15", "0.25"))
    second, messages = reload(first, environ)
    assert not messages
    assert second.catalog.workers["small"].price.input == 250_000
    assert second.catalog.digest != first.catalog.digest
    write_pool(tmp_path, NASTY)
    third, messages = reload(second, environ)
    assert third is second
    assert len(messages) > 10


def test_no_key_means_rehearsal() -> None:
    configuration = configure({})
    assert configuration.origin == "rehearsal"
    assert configuration.catalog.rehearsal
    assert set(configuration.catalog.tiers) == {"baton-mini", "baton-ultra"}
    assert not any("rehearsal-conductor" in tier.pool for tier in configuration.catalog.tiers.values())
    assert configure({"BATON_REHEARSAL_DELAY": "0"}).catalog.providers["rehearsal"].options["delay"] == "0.0"


HOSTED = [(name, key) for name, provider in known_providers().items() if not provider.server for key in provider.keys]


@pytest.mark.parametrize(("name", "key"), HOSTED)
def test_discovery_from_each_key(name: str, key: str) -> None:
    configuration = configure({key: "secret-of-theirs"})
    catalog = configuration.catalog
    assert set(catalog.providers) == {name}
    assert configuration.secrets[name].get_secret_value() == "secret-of-theirs"
    assert not catalog.rehearsal
    mini, ultra = catalog.tiers["baton-mini"], catalog.tiers["baton-ultra"]
    assert mini.conductor.workers == (mini.pool[0],)
    costs = [catalog.workers[worker].price for worker in mini.pool]
    assert costs == sorted(costs, key=lambda price: 3 * price.input + price.output)
    able = catalog.providers[name].format == "openai" and catalog.providers[name].structured
    assert ultra.conductor.kind == ("model" if able else "fixed")
    assert set(ultra.efforts) == set(EFFORTS)
    assert all(worker.price.cached <= worker.price.input for worker in catalog.workers.values())


def test_a_pepper_of_ones_own_is_noted_where_others_may_share_the_database() -> None:
    """A key that one process makes is void in another one then."""
    shared = {"BATON_DATABASE_URL": "postgresql://baton@db/baton"}
    [note] = configure(shared).notes
    assert "Set the same BATON_PEPPER for all" in note
    assert configure({}).notes == configure({**shared, "BATON_PEPPER": "p" * 32}).notes == ()


def test_a_short_pepper_is_noted() -> None:
    [note] = configure({"BATON_PEPPER": f"{'p' * 31}\n{'e' * 40}"}).notes
    assert "fewer than 32 characters" in note
    assert configure({"BATON_PEPPER": f"{'p' * 32}\nearlier"}).notes == ()


@pytest.mark.parametrize("name", ["openai", "anthropic", "gemini", "openrouter", "deepseek", "mistral", "groq", "xai"])
def test_discovery_honours_base_urls_and_models(name: str) -> None:
    key = known_providers()[name].keys[0]
    upper = name.upper()
    model = str(known_providers()[name].models[0]["model"])
    configuration = configure(
        {key: "k", f"{upper}_BASE_URL": "http://127.0.0.1:9/x/", f"{upper}_MODELS": f"brand-new, {model}"}
    )
    assert configuration.catalog.providers[name].base_url == "http://127.0.0.1:9/x"
    assert set(configuration.catalog.workers) == {f"{name}/brand-new", f"{name}/{model}"}
    assert any(f"{name}/brand-new" in note for note in configuration.notes)
    assert configuration.catalog.workers[f"{name}/brand-new"].price.output > 0


@pytest.mark.parametrize("name", ["VLLM", "OLLAMA", "LLAMACPP", "OPENAI_COMPATIBLE"])
def test_servers_by_url(name: str) -> None:
    environ = {f"{name}_BASE_URL": "http://127.0.0.1:8000/v1"}
    (fault,) = faults(environ)
    assert fault.startswith(f"{name}_MODELS: is not set; list the models")
    configuration = configure(environ | {f"{name}_MODELS": "qwen,llama"})
    assert set(configuration.catalog.workers) == {f"{name.lower()}/qwen", f"{name.lower()}/llama"}
    assert not configuration.secrets
    with_key = configure(environ | {f"{name}_MODELS": "qwen", f"{name}_API_KEY": "k"})
    assert set(with_key.secrets) == {name.lower()}


def test_discovery_of_several() -> None:
    keys = {key: "k" for _, key in HOSTED}
    catalog = configure(keys).catalog
    assert len(catalog.providers) == 9
    assert len(catalog.tiers["baton-mini"].pool) <= 4
    assert len(catalog.tiers["baton-ultra"].pool) <= 6


def test_discovery_never_calls_baton_itself() -> None:
    (fault,) = faults({"OPENAI_API_KEY": "sk", "OPENAI_BASE_URL": "http://localhost:8080/v1"})
    assert "Baton's own address" in fault
    configuration = configure({"OPENAI_API_KEY": "bt_abc_def", "OPENAI_BASE_URL": "http://localhost:8080/v1"})
    assert configuration.origin == "rehearsal"


@pytest.mark.parametrize("more", [{}, {"GROQ_API_KEY": "k"}])
def test_a_conductor_by_url(more: dict[str, str]) -> None:
    environ = {"BATON_CONDUCTOR_URL": "http://127.0.0.1:8001/v1", "BATON_CONDUCTOR_MODEL": "qwen", **more}
    configuration = configure(environ | {"BATON_CONDUCTOR_KEY": "hush"})
    assert configuration.catalog.rehearsal == (not more)
    assert configuration.catalog.tiers["baton-ultra"].conductor.worker == "conductor"
    assert configuration.catalog.workers["conductor"].model == "qwen"
    assert configuration.catalog.workers["conductor"].priced, "else it would conduct no run that has a budget"
    assert not any("conductor" in tier.pool for tier in configuration.catalog.tiers.values())
    assert configuration.secrets["conductor"].get_secret_value() == "hush"
    assert "BATON_CONDUCTOR_MODEL: is not set" in faults({"BATON_CONDUCTOR_URL": "http://h/v1"})[0]


def test_settings_and_pool_faults_come_together(tmp_path: Path) -> None:
    environ = write_pool(tmp_path, NASTY) | {"BATON_PROT": "1", "BATON_PORT": "many", "BATON_LEASE_SECONDS": "nan"}
    all_faults = faults(environ | {"BATON_DATABASE_URL": "mysql://root:hunter2@h/d"})
    assert "BATON_PROT: there is no such setting; did you mean BATON_PORT?" in all_faults
    for name in ("BATON_PORT: ", "BATON_LEASE_SECONDS: ", "BATON_DATABASE_URL: "):
        assert any(fault.startswith(name) for fault in all_faults)
    assert any("pool.toml:8: " in fault for fault in all_faults)
    assert "hunter2" not in "".join(all_faults)


def test_a_file_may_name_the_conductor_of_the_environment(tmp_path: Path) -> None:
    environ = write_pool(tmp_path, GOOD.replace('worker = "large"', 'worker = "conductor"'))
    assert "there is no worker conductor" in faults(environ)[0]
    environ |= {"BATON_CONDUCTOR_URL": "http://127.0.0.1:8001/v1"}
    assert faults(environ) == ("BATON_CONDUCTOR_MODEL: is not set; name the model that BATON_CONDUCTOR_URL serves",)
    tiers = configure(environ | {"BATON_CONDUCTOR_MODEL": "qwen"}).catalog.tiers
    assert tiers["baton-ultra"].conductor.worker == "conductor"
    assert tiers["baton-ultra"].pool == ("small", "large")


@pytest.mark.parametrize("text", [f"[tiers.x]\nlimits.usd = {'9' * 5_000}", f"pool = {'[' * 5_000}{']' * 5_000}"])
def test_a_file_that_python_cannot_read_has_a_fault(text: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read_catalog_text(text, "the pool file", {})
    (fault,) = refused.value.faults
    assert fault.startswith("the pool file:1: not valid TOML: ")


def test_another_file_is_read_as_this_environment_would_have_it(tmp_path: Path) -> None:
    """So that the file in force, compared with itself, shows nothing to anybody new."""
    environ = write_pool(tmp_path, GOOD.replace('worker = "large"', 'worker = "conductor"'))
    environ |= {"BATON_CONDUCTOR_URL": "http://127.0.0.1:8001/v1", "BATON_CONDUCTOR_MODEL": "qwen"}
    environ |= {"OPENAI_BASE_URL": "https://openai.internal/v1"}
    in_force = configure(environ).catalog
    del environ["OPENAI_API_KEY"]
    assert read_catalog(Path(environ["BATON_POOL"]), environ).digest == in_force.digest


def test_settings_defaults_and_values() -> None:
    settings = read(
        {"BATON_DATA_DIR": "elsewhere", "BATON_PORT": "0", "BATON_LOG_LEVEL": "INFO", "BATON_REDIS_URL": ""}
    )
    assert settings.database_url == f"sqlite:///{Path('elsewhere') / 'baton.db'}"
    assert (settings.host, settings.port, settings.redis_url, settings.log_level) == ("127.0.0.1", 0, None, "info")


def test_a_url_of_sqlite_that_names_a_host_is_a_fault() -> None:
    [fault] = faults({"BATON_DATABASE_URL": "sqlite://host/x.db"})
    assert fault.startswith("BATON_DATABASE_URL: is not a URL that Baton can use; write it as sqlite:///baton.db")


@pytest.mark.parametrize("url", ["redis://cache:65536/0", "redis://cache:99999", "rediss://[::1]:70000"])
def test_a_port_of_redis_that_does_not_exist_is_a_fault(url: str) -> None:
    [fault] = faults({"BATON_REDIS_URL": url})
    assert fault.startswith("BATON_REDIS_URL: Port out of range 0-65535; it is for: Redis URL")


def test_what_others_put_into_the_environment() -> None:
    read({"BATON_TEST_REDIS_URL": "x", "BATON_SERVICE_PORT_HTTP": "80", "BATON_PORT_80_TCP_ADDR": "10.0.0.1"})
    for variable, service in (("BATON", "baton"), ("BATON_ADMIN", "baton-admin"), ("BATON_METRICS", "baton-metrics")):
        links = {f"{variable}_SERVICE_HOST": "10.0.0.1", f"{variable}_SERVICE_PORT": "8080"}
        links |= {f"{variable}_PORT": "tcp://10.0.0.1:8080", f"{variable}_PORT_8080_TCP_PROTO": "tcp"}
        (fault,) = faults(links)
        assert fault.startswith(f"{variable}_PORT: was overwritten by Kubernetes for a Service called {service}; set ")


@pytest.mark.parametrize("variable", ["BATON_PEPPER", "BATON_ARCHIVE"])
def test_a_setting_that_is_not_utf8_is_a_fault(variable: str) -> None:
    """The bytes come from the environment as surrogates, which neither the pepper's hash nor `--json` can have."""
    value = b"0123456789abcdef0123456789abcdef\xfc".decode("utf-8", "surrogateescape")
    assert list(faults({variable: value})) == [f"{variable}: is not UTF-8; correct the value"]


def test_a_first_key_that_is_no_key_is_a_fault_of_its_setting() -> None:
    (fault,) = faults({"BATON_BOOTSTRAP_KEY": "my-own-key"})
    assert fault.startswith("BATON_BOOTSTRAP_KEY: must look like bt_")
    assert "openssl rand" in fault
    assert "my-own-key" not in fault


def test_secrets_are_masked() -> None:
    environ = {
        "BATON_PEPPER": "p" * 40,
        "BATON_BOOTSTRAP_KEY": "bt_idid_secretpart-of-it",
        "BATON_DATABASE_URL": "postgresql://baton:hunter2@db/baton?password=hunter3",
        "BATON_REDIS_URL": "redis://:hunter4@cache:6379/0",
        "BATON_WEBHOOK_URL": "https://hooks.example.com:8443/services/hunter5?token=hunter6",
        "BATON_WEBHOOK_SECRET": WEBHOOK_SECRET,
    }
    settings = read(environ)
    text = "\n".join(str(row) for row in describe(settings)) + repr(settings)
    for secret in ("pppp", "secretpart", "hunter", "c3Nz"):
        assert secret not in text
    rows = {row.name: row for row in describe(settings)}
    assert set(rows) == set(variables())
    assert rows["BATON_PEPPER"].origin == "environment"
    assert rows["BATON_PORT"].origin == "default"
    assert rows["BATON_WEBHOOK_URL"].value == "https://hooks.example.com:8443/********"
    assert all(row.meaning for row in rows.values())


@pytest.mark.parametrize("password", ["hunter2/hunter3", "hunter2#hunter3", "hunter2?hunter3", "hunter2/hunter3@h"])
def test_a_password_that_is_not_percent_encoded_is_masked_as_well(password: str) -> None:
    """SQLAlchemy takes a password with a slash, a question mark or a hash sign as it is."""
    settings = read({"BATON_DATABASE_URL": f"postgresql://baton:{password}@db/baton?sslmode=require"})
    (row,) = [row for row in describe(settings) if row.name == "BATON_DATABASE_URL"]
    assert row.value == "postgresql://baton:********@db/baton?sslmode=********"


WEBHOOK_SECRET = "whsec_" + base64.b64encode(b"s" * 24).decode()


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"URL": "https://h/x"}, "BATON_WEBHOOK_SECRET: is not set"),
        ({"SECRET": WEBHOOK_SECRET}, "BATON_WEBHOOK_SECRET: is set without BATON_WEBHOOK_URL"),
        ({"URL": "https://h/x", "SECRET": "hunter2"}, "BATON_WEBHOOK_SECRET: is no secret; write whsec_"),
        ({"URL": "https://h/x", "SECRET": "whsec_hunter2é"}, "BATON_WEBHOOK_SECRET: is no secret; write whsec_"),
        ({"URL": "https://h/x", "SECRET": f"{WEBHOOK_SECRET} hunter2"}, "BATON_WEBHOOK_SECRET: is no secret"),
        ({"URL": "ftp://hunter2/x", "SECRET": WEBHOOK_SECRET}, "BATON_WEBHOOK_URL: is not an HTTP URL"),
        ({"URL": "https://u:hunter2@h/x", "SECRET": WEBHOOK_SECRET}, "BATON_WEBHOOK_URL: holds credentials"),
        ({"URL": "https://h/x#hunter2", "SECRET": WEBHOOK_SECRET}, "BATON_WEBHOOK_URL: has a fragment"),
        ({"URL": "https://h:x/hunter2", "SECRET": WEBHOOK_SECRET}, "BATON_WEBHOOK_URL: is not a URL"),
    ],
)
def test_a_webhook_needs_an_address_and_a_secret(environ: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read({f"BATON_WEBHOOK_{name}": value for name, value in environ.items()})
    (only_fault,) = refused.value.faults
    assert only_fault.startswith(fault)
    assert "hunter2" not in only_fault


@pytest.mark.parametrize("listener", ["METRICS", "ADMIN"])
def test_the_address_of_a_listener_needs_its_port(listener: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read({f"BATON_{listener}_HOST": "0.0.0.0"})
    assert caught.value.faults == (
        f"BATON_{listener}_HOST: has no effect without BATON_{listener}_PORT; set both, or none",
    )


@pytest.mark.parametrize("name", ["BATON_LOG_WITNESS", "BATON_LOG_TIMESTAMP_URL"])
def test_who_confirms_checkpoints_needs_a_place_for_them(name: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read({name: "https://stamps.example"})
    assert f"{name}: is set without BATON_LOG_EXPORT; set both, or none" in caught.value.faults


def test_a_webhook_may_have_a_query_and_several_secrets() -> None:
    url, secrets = "http://hooks:8080/take?token=x", f"{WEBHOOK_SECRET} {WEBHOOK_SECRET}"
    settings = read({"BATON_WEBHOOK_URL": url, "BATON_WEBHOOK_SECRET": secrets})
    assert settings.webhook_url == url
    assert settings.webhook_secret is not None
    assert settings.webhook_secret.get_secret_value() == secrets


def test_a_data_folder_that_cannot_be_made_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigInvalid) as caught:
        pepper(read({"BATON_DATA_DIR": str(tmp_path / "file" / "data")}))
    assert "Not a directory" in caught.value.faults[0]
    assert "BATON_DATA_DIR" in caught.value.faults[0]


def test_the_pepper_is_made_once(tmp_path: Path) -> None:
    settings = read({"BATON_DATA_DIR": str(tmp_path / "data")})
    first = pepper(settings).get_secret_value()
    assert len(first) >= 32
    assert pepper(settings).get_secret_value() == first
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "data" / "pepper").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["pepper"]
    assert pepper(read({"BATON_PEPPER": "given"})).get_secret_value() == "given"


def test_lines_of_hard_toml() -> None:
    text = (
        'a.b = """\n[not.a.table]\nx = 1\n"""\n# c = 1\n[t."x.y"] # note\n'
        "k = [\n  \"]\", # [\n  { z = 1 },\n]\nl = '#'\n"
    )
    lines = line_numbers(text)
    assert lines[("a", "b")] == 1
    assert lines[("t", "x.y")] == 6
    assert lines[("t", "x.y", "k")] == 7
    assert lines[("t", "x.y", "l")] == 11
    assert line_of(lines, ["t", "x.y", "k", 1, "z"]) == 7
    assert line_of(lines, ["nowhere"]) == 1
    assert ("not",) not in lines
    assert ("c",) not in lines


def test_load_takes_settings_apart_from_the_environment(tmp_path: Path) -> None:
    environ = write_pool(tmp_path, GOOD)
    configuration: Configuration = load(read(environ), environ)
    assert configuration.origin.startswith("pool file ")
