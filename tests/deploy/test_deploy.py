"""The files for operators parse, agree with each other, and name only what exists. No Docker is needed."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from app.cli.commands import command_line, parse, reference
from app.gateway.http.health import CHECK_TIMEOUT
from app.process.config import configure
from app.process.config.settings import PREFIX, secret_variables, variables
from app.store.sql import READY_SECONDS
from app.telemetry import COUNTERS, GAUGES, HISTOGRAMS, TOTALS, Telemetry, metrics_page

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
COMPOSE: Final = ROOT / "docker-compose.yml"
PAGES: Final = tuple(sorted(f"deploy/docs/{page.name}" for page in (DEPLOY / "docs").glob("*.md")))
DOCUMENTS: Final = ("Dockerfile", "docker-compose.yml", "README.md", "deploy/env.example", *PAGES)
GENERATED: Final = ("Dockerfile", "deploy/docs/changelog.md", "deploy/docs/commands.md")
"""Documents without command lines of their own, and the page of commands, which the commands write."""
OF_CLIENTS: Final = {"BATON_API_KEY", "BATON_BASE_URL"}
"""Variables in examples of clients, which Baton does not read."""
COMMANDS: Final = tuple(
    context.command_path.split()[1:]
    for _, context in reference.commands(command_line(), click.Context(command_line(), info_name="baton"))
)
TEMPLATES: Final = sorted((DEPLOY / "helm" / "templates").iterdir())
OURS: Final = ("gateway", "dispatcher", "migrate")
SECRET: Final = {
    "POSTGRES_PASSWORD": "0a" * 12,
    "BATON_PEPPER": "p" * 40,
    "BATON_BOOTSTRAP_KEY": f"bt_0a1b2c3d_{'a' * 43}",
}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, continuation lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def interpolate(value: str, variables: dict[str, str]) -> str:
    """Replace `${NAME:-default}` and `${NAME:?message}` as docker compose does."""

    def value_of(match: re.Match[str]) -> str:
        name, sign, rest = match.groups()
        if variables.get(name):
            return variables[name]
        assert sign != "?", f"{name} is required"
        return rest

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value_of, value)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return document


def is_accepted(arguments: list[str]) -> bool:
    try:
        parse(arguments)
    except SystemExit as end:
        return end.code == 0
    return True


def names_a_command(mention: str) -> bool:
    """True if a mention in a sentence is the path of a command or of a group, perhaps with options but no values."""
    path = [word for word in mention.split() if not word.startswith("-")]
    return any(command[: len(path)] == path for command in COMMANDS)


def strings(value: object) -> Iterator[str]:
    """Every text inside a parsed document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


# -- commands and variables, wherever they are written


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_variable_that_is_named_exists(name: str) -> None:
    named = set(re.findall(rf"\b{PREFIX}(?!TEST_)[A-Z_]+\b", (ROOT / name).read_text()))
    in_files = {f"{name}_FILE" for name in secret_variables()}
    assert named - set(variables()) - in_files - OF_CLIENTS == set()


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in GENERATED])
def test_every_command_that_is_named_is_accepted(name: str) -> None:
    text = (ROOT / name).read_text().replace("\\\n", " ")
    quoted = re.findall(r"`(?:docker compose exec gateway )?baton ([^`]+)`", text)
    lines = re.findall(r"^(?:docker compose exec gateway |kubectl exec \S+ -- )?baton (.+)$", text, re.MULTILINE)
    commands = {shlex.join(shlex.split(line.replace("ID", "run_1"), comments=True)) for line in lines}
    mentions = {line.replace("ID", "run_1") for line in quoted if not names_a_command(line)}
    assert [line for line in sorted(commands | mentions) if not is_accepted(shlex.split(line))] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_module_that_is_named_can_be_run_with_its_options(name: str) -> None:
    """The source is read: the parsers of many of these modules need libraries that only they need."""
    wrong = []
    for module, rest in re.findall(r"python -m ((?:app|tests)\.[\w.]+)([^`\n#>|]*)", (ROOT / name).read_text()):
        path = ROOT / module.replace(".", "/")
        files = [file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()]
        source = "".join([file.read_text() for file in files])
        named = re.findall(r"--[a-z][\w-]*", rest)
        if not files or any(f'"{option}"' not in source for option in named):
            wrong.append(f"{module}{rest}")
    assert wrong == []


# -- the image


def test_the_image_is_slim_pinned_and_without_rights() -> None:
    image_lines = instructions()
    stages = [place for place, (word, _) in enumerate(image_lines) if word == "FROM"]
    last = image_lines[stages[-1] :]
    runs = " ".join(rest for word, rest in image_lines if word == "RUN")
    assert len(stages) == 2
    assert all("slim" in rest for word, rest in image_lines if word == "FROM")
    assert '--require-hashes -r "${REQUIREMENTS}"' in runs
    assert ("ARG", "REQUIREMENTS=requirements.txt") in image_lines
    assert "--only-binary=:all:" in runs
    assert "apt-get" not in runs
    assert "gcc" not in runs
    assert [rest for word, rest in last if word == "USER"] == ["10001:10001"]
    assert {"HEALTHCHECK", "ENTRYPOINT", "CMD", "EXPOSE", "STOPSIGNAL"} <= {word for word, _ in last}


def test_the_image_with_more_libraries_has_the_pins_of_the_others() -> None:
    plain, extras, dev = [pins(ROOT / f"requirements{name}.txt") for name in ("", "-extras", "-dev")]
    assert plain < extras
    assert {extra.partition("==")[0] for extra in extras - plain} >= {
        "azure-identity",
        "botocore",
        "google-auth",
        "rfc3161-client",
    }
    assert extras <= dev | plain


def test_the_lock_of_the_developers_installs_the_service_too() -> None:
    assert read_locked_lines("requirements.txt") <= read_locked_lines("requirements-dev.txt"), (
        "make installs only this one"
    )


def read_locked_lines(name: str) -> set[str]:
    """The pins and the hashes of a lock file."""
    lines = (ROOT / name).read_text().splitlines()
    return {line.strip(" \\") for line in lines if not line.startswith("#")}


def pins(locked: Path) -> set[str]:
    """The packages of a lock file, each with its version."""
    return set(re.findall(r"^[\w.-]+==[\w.]+", locked.read_text(), re.MULTILINE))


def test_the_image_starts_what_exists_in_isolated_mode() -> None:
    image_lines = dict(instructions())
    entry, command = json.loads(image_lines["ENTRYPOINT"]), json.loads(image_lines["CMD"])
    probe = json.loads(image_lines["HEALTHCHECK"].partition("CMD")[2])
    assert entry[1:] == ["-I", "-m", "app"]
    assert probe[: len(entry)] == entry
    assert is_accepted(command)
    assert is_accepted(probe[len(entry) :])


def test_the_build_context_is_what_the_image_copies() -> None:
    in_context = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied: set[str] = set()
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            copied.update(rest.split()[:-1])
    assert in_context == copied
    assert [name for name in sorted(in_context) if not (ROOT / name).exists()] == []


# -- the checkout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="Only a checkout knows which of its files are committed.")
def test_nothing_else_is_committed_at_the_top() -> None:
    """A command that was given far-fetched arguments once left files named after them, which were committed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    committed = {name.partition("/")[0] for name in listed.split("\0") if name}
    folders = {"app", "deploy", "migrations", "tests"}
    files = {"Dockerfile", "LICENSE", "Makefile", "README.md", "docker-compose.yml", "pyproject.toml"}
    locks = {path.name for path in ROOT.glob("requirements*.txt")}
    assert {name for name in committed if not name.startswith(".")} == folders | files | locks


# -- the wheel


@pytest.mark.long
def test_a_wheel_has_all_that_the_checkout_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = apply_configuration(Distribution({"script_name": "setup.py"}), ROOT / "pyproject.toml")
    project.include_package_data = False
    packed = project.get_command_obj("build_py")
    packed.build_lib = "."
    packed.ensure_finalized()
    files = {Path(name) for name in packed.get_outputs(include_bytecode=False)}
    here = {path.relative_to(ROOT) for folder in ("app", "migrations") for path in (ROOT / folder).rglob("*.*")}
    assert {path for path in here if path.suffix != ".pyc"} == files


# -- docker compose


def test_our_services_cannot_do_more_than_they_must(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] in ("unless-stopped", "no"), name
    assert all("cap_add" not in compose["services"][name] for name in OURS)


def test_one_image_runs_known_commands(compose: dict[str, Any]) -> None:
    services = [compose["services"][name] for name in OURS]
    assert len({service["image"] for service in services}) == 1
    assert all(is_accepted(service["command"]) for service in services)
    assert all(service["env_file"] == [".env"] for service in services), "settings that the file does not name"


def test_compose_starts_with_three_values_and_not_with_two(compose: dict[str, Any]) -> None:
    environ = {name: str(value) for name, value in compose["services"]["gateway"]["environment"].items()}
    filled = {name: interpolate(value, SECRET) for name, value in environ.items()}
    configuration = configure(filled)
    assert configuration.settings.host == "0.0.0.0"
    assert (
        configuration.settings.database_url == f"postgresql://baton:{SECRET['POSTGRES_PASSWORD']}@postgres:5432/baton"
    )
    for name in SECRET:
        with pytest.raises(AssertionError):
            [interpolate(value, {**SECRET, name: ""}) for value in environ.values()]


@pytest.mark.parametrize("name", OURS)
def test_every_setting_in_the_file_of_compose_reaches_each_process(compose: dict[str, Any], name: str) -> None:
    """Those of logins stay with the gateway, because each process checks the settings that it gets as a whole."""
    written = {
        **SECRET,
        "HOUSE_KEY": "of-a-pool-file",
        "BATON_RETENTION_CONTENT": "30",
        "BATON_ADMIN_URL": "https://admin.example",
        "BATON_OIDC_ISSUER": "https://id.example",
        "BATON_OIDC_CLIENT_ID": "baton",
        "BATON_OIDC_CLIENT_SECRET": "s" * 20,
        "BATON_OIDC_ROLES": "groups=ops=>operator",
    }
    own = compose["services"][name]["environment"]
    environ = {**written, **{variable: interpolate(str(value), written) for variable, value in own.items()}}
    if name == "gateway":
        more = yaml.safe_load((DEPLOY / "compose.admin.yaml").read_text())["services"]["gateway"]["environment"]
        environ |= {variable: str(value) for variable, value in more.items()}
    settings = configure(environ).settings
    assert settings.retention_content == 30
    assert (settings.oidc_issuer is not None) == (name == "gateway")


def test_the_gpu_profile_conducts(compose: dict[str, Any]) -> None:
    served = compose["services"]["vllm"]
    flags = [interpolate(flag, {}) for flag in served["command"]]
    variables = {**SECRET, "BATON_CONDUCTOR_URL": "http://vllm:8000/v1", "BATON_CONDUCTOR_MODEL": "conductor"}
    environ = compose["services"]["gateway"]["environment"]
    configuration = configure({name: interpolate(str(value), variables) for name, value in environ.items()})
    assert configuration.catalog.tiers["baton-ultra"].conductor.worker == "conductor"
    assert f"--served-model-name={configuration.catalog.workers['conductor'].model}" in flags
    assert f"--port={8000}" in flags
    assert {"--model=Qwen/Qwen2.5-7B-Instruct", "--enable-prefix-caching", "--enable-lora"} <= set(flags)
    structured = next(flag.partition("=")[2] for flag in flags if flag.startswith("--structured-outputs-config"))
    assert json.loads(structured) == {"backend": "guidance", "disable_any_whitespace": True}
    assert served["profiles"] == ["gpu"]


def test_only_the_gateway_can_be_reached(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]
    assert services["vllm"]["networks"] == ["conductor"]
    assert services["postgres"]["networks"] == services["redis"]["networks"] == ["data"]
    assert compose["networks"]["data"]["internal"] is True
    published = interpolate(services["gateway"]["ports"][0], {})
    assert published.endswith(f":{services['gateway']['environment']['BATON_PORT']}")
    assert published.startswith("127.0.0.1:")


def test_what_waits_for_what(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in ("gateway", "dispatcher"):
        assert services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
        assert services[name]["depends_on"]["redis"]["condition"] == "service_healthy"
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert all("test" in services[name]["healthcheck"] for name in ("postgres", "redis", "vllm"))
    words = " ".join(services["redis"]["command"])
    assert "--save  --appendonly no" in words, "live text is written to no disk (deploy/docs/security.md)"
    assert "--maxmemory-policy noeviction" in words


def test_the_probe_of_vllm_is_python(compose: dict[str, Any]) -> None:
    compile(compose["services"]["vllm"]["healthcheck"]["test"][-1], "probe", "exec")


def test_the_example_environment_names_what_compose_reads(compose: dict[str, Any]) -> None:
    variables = set(re.findall(r"^(?:# )?([A-Z_]+)=", (DEPLOY / "env.example").read_text(), re.MULTILINE))
    variables_read = {name for text in strings(compose) for name in re.findall(r"\$\{(\w+):", text)}
    assert variables - variables_read == set()
    assert set(SECRET) <= variables


# -- Helm: `make chart` installs it; here is what needs no Helm


def test_the_chart_runs_known_commands_with_known_variables() -> None:
    text = "\n".join(path.read_text() for path in TEMPLATES)
    commands = re.findall(r"args: \[(\w+)\]", text)
    assert sorted(commands) == sorted(OURS)
    assert all(is_accepted([command]) for command in commands)
    assert set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", text)) <= set(variables())


def test_the_chart_has_the_port_of_the_image() -> None:
    (port,) = re.findall(r"\{name: http, containerPort: (\d+)\}", (DEPLOY / "helm/templates/gateway.yaml").read_text())
    assert [port] == [rest for word, rest in instructions() if word == "EXPOSE"]


# -- systemd


@pytest.mark.parametrize("component", ["gateway", "dispatcher"])
def test_probes_wait_longer_than_the_checks_that_they_ask_for(component: str) -> None:
    """A probe that gives up first would never see why a process is not ready."""
    lines = (DEPLOY / f"helm/templates/{component}.yaml").read_text().splitlines()
    probes = [line for line in lines if "Probe:" in line]
    timeouts = [int(seconds) for line in probes for seconds in re.findall(r"timeoutSeconds: (\d+)", line)]
    assert len(timeouts) == len(probes) == 3
    assert READY_SECONDS < CHECK_TIMEOUT < min(timeouts)


@pytest.mark.parametrize("name", ["baton-gateway.service", "baton-dispatcher@.service"])
def test_the_units_start_what_exists_without_rights(name: str) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "systemd" / name)
    service = unit["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/bin/baton")
    assert is_accepted(arguments)
    assert set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", (DEPLOY / "systemd" / name).read_text())) <= set(variables())
    assert (service["DynamicUser"], service["NoNewPrivileges"], service["ProtectSystem"]) == ("yes", "yes", "strict")
    assert service["CapabilityBoundingSet"] == ""
    assert int(service["TimeoutStopSec"]) > 25


# -- watching


def list_exposed() -> set[str]:
    """Every name that /metrics can show."""
    return {*COUNTERS, *GAUGES, *TOTALS} | {
        f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")
    }


def labels(expression: str) -> Iterator[tuple[str, str]]:
    """Each metric with the labels that its selector names."""
    for metric, selector in re.findall(r"(baton_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*[=!]", selector):
            yield metric, label


def list_known_labels(metric: str) -> set[str]:
    """Its own, and `role`, by which Prometheus tells gateways and engines apart (prometheus.yaml, the chart)."""
    tables = {**COUNTERS, **GAUGES, **HISTOGRAMS, **TOTALS}
    return {*tables[re.sub(r"_(bucket|sum|count)$", "", metric)][1], "role"}


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())["groups"]
    group_rules: list[dict[str, Any]] = group["rules"]
    return group_rules


def test_alerts_and_dashboard_ask_for_metrics_that_exist(rules: list[dict[str, Any]]) -> None:
    dashboard = json.loads((DEPLOY / "grafana/baton.json").read_text())
    queries = [rule["expr"] for rule in rules] + [
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ]
    for query in queries:
        assert set(re.findall(r"\bbaton_\w+", query)) <= list_exposed()
        assert all(label in list_known_labels(metric) for metric, label in labels(query)), query


def test_alerts_on_what_happens_seldom_count_the_first_event_too(rules: list[dict[str, Any]]) -> None:
    """A counter with labels is there from its first event on, and `increase` begins to count behind it: a step that was
    given up, or a conductor that died, gave no alert until it happened a second time to the same process."""
    counted = r"(?<!unless )sum(?: by \([a-z, ]+\) |)\(increase\(((baton_\w+)(?:{[^}]*})?)\[(\w+)\]"
    checked = 0
    for rule in rules:
        for series, metric, span in re.findall(counted, rule["expr"].replace("max by", "sum by")):
            if COUNTERS[metric][1]:
                assert f"({series} unless {series} offset {span})" in rule["expr"], rule["alert"]
                checked += 1
    assert checked == 9


def test_an_alert_on_the_least_value_leaves_gateways_out(rules: list[dict[str, Any]]) -> None:
    """A gateway shows 0 for what only engines measure, so a least value that it has a part in never rises."""
    selectors = [re.findall(r"\bmin\(baton_\w+({[^}]*}|)\)", rule["expr"]) for rule in rules]
    assert [selector for of_rule in selectors for selector in of_rule] == ['{role!="gateway"}']


def test_the_dashboard_and_the_rules_need_no_other_metrics(rules: list[dict[str, Any]]) -> None:
    """But those that every Python process and every Prometheus has."""
    dashboard = json.loads((DEPLOY / "grafana/baton.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    others = set()
    for query in targets + [rule["expr"] for rule in rules]:
        others.update(re.findall(r"\b[a-z]+_[a-z_]+\b", query))
    metrics = set(Telemetry().exposition().decode().replace("{", " ").split())
    functions = {"histogram_quantile", "min_over_time", "over_budget"}
    assert {name for name in others - list_exposed() - functions if name not in metrics} == set()


def test_the_admin_api_is_not_published(compose: dict[str, Any]) -> None:
    """Nobody reaches it by the ports that callers use: neither with Compose nor by the chart's Service and Ingress."""
    assert [port.rpartition(":")[2] for port in compose["services"]["gateway"]["ports"]] == ["8080"]
    service = (DEPLOY / "helm/templates/gateway.yaml").read_text().partition("kind: Service")[2]
    assert re.findall(r"targetPort: (\S+)}", service) == ["http"]
    network = (DEPLOY / "helm/templates/network.yaml").read_text()
    assert set(re.findall(r"port: \{?(?:name: )?(\w+)", network)) == {"http", "metrics", "admin"}
    assert set(re.findall(r"port: \{?(?:name: )?(\w+)", network.partition("kind: Ingress")[2])) == {"http"}


def test_the_admin_listener_is_reached_where_an_operator_asks_for_it() -> None:
    """The chart's Service for it is off by default and stays inside the cluster; Compose publishes it on loopback."""
    service = (DEPLOY / "helm/templates/admin.yaml").read_text()
    assert service.startswith("{{- if .Values.admin.enabled }}")
    assert re.findall(r"type: (\S+)|targetPort: (\S+)}", service) == [("ClusterIP", ""), ("", "admin")]
    assert yaml.safe_load((DEPLOY / "helm/values.yaml").read_text())["admin"]["enabled"] is False
    more = yaml.safe_load((DEPLOY / "compose.admin.yaml").read_text())["services"]["gateway"]
    [published] = more["ports"]
    assert interpolate(published, {}) == f"127.0.0.1:9091:{more['environment']['BATON_ADMIN_PORT']}"
    assert set(more["environment"]) <= set(variables())


def test_prometheus_scrapes_gateways_and_engines(compose: dict[str, Any]) -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    (service,) = job["dns_sd_configs"]
    assert job["job_name"] == "baton"
    assert set(service["names"]) == {"gateway", "dispatcher"}
    for name in service["names"]:
        assert compose["services"][name]["environment"]["BATON_METRICS_PORT"] == service["port"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package: prometheus)")
def test_prometheus_reads_its_files() -> None:
    process = subprocess.run(
        ["promtool", "check", "config", str(DEPLOY / "prometheus/prometheus.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "rules found" in process.stdout


def test_the_page_of_metrics_is_up_to_date() -> None:
    """`python -c "from app.telemetry import metrics_page; print(metrics_page(), end='')" > deploy/docs/metrics.md`."""
    assert (DEPLOY / "docs" / "metrics.md").read_text() == metrics_page()


def test_every_alert_has_a_section_on_the_page_of_alerts(rules: list[dict[str, Any]]) -> None:
    headings = re.findall(r"^## (\w+)$", (DEPLOY / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in rules] == headings
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"deploy/docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_collector_takes_what_baton_sends() -> None:
    config = yaml.safe_load((DEPLOY / "otel-collector.yaml").read_text())
    assert set(config["service"]["pipelines"]) == {"traces", "metrics"}
    for pipeline in config["service"]["pipelines"].values():
        assert set(pipeline["receivers"]) <= set(config["receivers"])
        assert set(pipeline["processors"]) <= set(config["processors"])
        assert set(pipeline["exporters"]) <= set(config["exporters"])
    assert "http" in config["receivers"]["otlp"]["protocols"]


def test_the_release_is_named_alike_everywhere() -> None:
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((DEPLOY / "helm/Chart.yaml").read_text())
    image = yaml.safe_load(COMPOSE.read_text())["services"]["gateway"]["image"]
    built = re.findall(r"example.com/baton:(\S+)", (DEPLOY / "docs" / "start.md").read_text())
    assert {chart["version"], chart["appVersion"], image.partition(":")[2], *built} == {release}
    assert re.findall(r"^## (\d.+)$", (DEPLOY / "docs" / "changelog.md").read_text(), re.MULTILINE)[0] == release


@pytest.mark.parametrize("number", range(1, 20))
def test_every_decision_is_there_and_begins_with_at_most_three_lines(number: int) -> None:
    sections = re.split(r"^## ", (DEPLOY / "docs" / "decisions.md").read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(f"D{number}. ")]
    assert 1 <= len(section.split("\n\n")[1].splitlines()) <= 3
