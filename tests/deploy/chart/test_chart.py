"""The Helm chart is installed by Helm's own engine into a stand-in for a cluster, which keeps what it is sent.

Run by `make chart`, in an environment of its own. Objects of Kubernetes are checked against its published schemas;
those of KEDA and of the Prometheus operator, whose schemas no package brings, are checked field by field.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart.cluster import Cluster, Document, cluster

Objects = dict[tuple[str, str], Document]
"""Objects by kind and name."""

helm = pytest.importorskip("helm_sdkpy", reason="this test has an environment of its own: make chart")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm"
OTHERS = ("ScaledObject", "PodMonitor", "PrometheusRule")
"""Kinds that are no part of Kubernetes."""
OLDEST, NEWEST = "1.27", "1.33"
EVERYTHING: Document = {
    "fullnameOverride": "plan",
    "image": {"digest": "sha256:" + "0a" * 32, "pullSecrets": [{"name": "registry"}]},
    "extraSecrets": ["providers"],
    "pool": {"text": '[tiers.baton-mini]\npool = ["alpha"]\n'},
    "otlpEndpoint": "http://collector:4318",
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
    "extraVolumeMounts": [{"name": "authorities", "mountPath": "/etc/authorities", "readOnly": True}],
    "serviceAccountName": "baton",
    "priorityClassName": "high",
    "podLabels": {"team": "platform"},
    "gateway": {
        "autoscaling": {"enabled": True},
        "nodeSelector": {"disk": "none"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "podAnnotations": {"sidecar": "none"},
    },
    "dispatcher": {"autoscaling": {"enabled": True, "prometheus": "http://prometheus:9090"}},
    "podAnnotations": {"cluster": "north"},
    "migrate": {
        "nodeSelector": {"disk": "none"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "podAnnotations": {"sidecar": "none"},
    },
    "service": {"type": "LoadBalancer", "annotations": {"scheme": "internal"}},
    "admin": {"enabled": True, "url": "https://admin.example"},
    "ingress": {"enabled": True, "className": "nginx", "host": "baton.example", "tlsSecret": "tls"},
    "networkPolicy": {
        "enabled": True,
        "callers": [{"namespaceSelector": {"matchLabels": {"calls": "baton"}}}],
        "prometheus": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
        "admins": [{"podSelector": {"matchLabels": {"app": "proxy"}}}],
    },
    "monitoring": {"podMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
}
SETS: dict[str, Document] = {
    "defaults": {},
    "everything": EVERYTHING,
    "a pool of its own and an adapter for metrics": {
        "pool": {"existingConfigMap": "pools"},
        "dispatcher": {"autoscaling": {"enabled": True, "kind": "hpa"}},
        "networkPolicy": {"enabled": True},
        "preStopSeconds": 0,
    },
}


def connection(target: Cluster, folder: Path) -> Any:
    """Return Helm's configuration for a cluster, as a kubeconfig file names it."""
    path = folder / "kubeconfig"
    context = {"cluster": "test", "user": "test", "namespace": "baton"}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": context}],
        "clusters": [{"name": "test", "cluster": {"server": target.url}}],
        "users": [{"name": "test", "user": {}}],
    }
    path.write_text(yaml.safe_dump(kubeconfig))
    return helm.Configuration(namespace="baton", kubeconfig=str(path))


def installed(values: Document, folder: Path) -> Objects:
    """Install the chart; return what the cluster has then, and the Job that ran before, by kind and name."""
    with cluster() as target:
        running = helm.Install(connection(target, folder)).run(
            "plan", str(CHART), values=values, wait=False, timeout=60
        )
        asyncio.run(running)
        return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in target.created}


@pytest.fixture(scope="module", params=SETS)
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """All objects of the chart, for one set of values after the other."""
    return installed(SETS[request.param], tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """All objects where every value is set."""
    return installed(EVERYTHING, tmp_path_factory.mktemp("chart"))


def pod(document: Document) -> Document:
    """The pod of a Deployment or a Job."""
    pod_spec: Document = document["spec"]["template"]["spec"]
    return pod_spec


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_accepts_every_object(objects: Objects, version: str) -> None:
    for (kind, name), one in objects.items():
        if kind not in OTHERS:
            document = {**one, "metadata": {**one["metadata"], "resourceVersion": None, "uid": None}}
            document["metadata"] = {key: value for key, value in document["metadata"].items() if value is not None}
            document.pop("status", None)
            kubernetes_validate.validate(document, version, strict=True)
        assert name.startswith("plan")


def test_every_pod_is_confined(objects: Objects) -> None:
    pods = [pod(manifest) for (kind, _), manifest in objects.items() if kind in ("Deployment", "Job")]
    assert len(pods) == 3
    for one in pods:
        (container,) = one["containers"]
        assert one["securityContext"]["runAsNonRoot"] is True
        assert one["securityContext"]["runAsUser"] == 10001
        assert one["enableServiceLinks"] is False
        assert one["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in one["volumes"]}
        assert container["resources"]["limits"]["memory"]


def test_the_migration_reads_the_secrets_and_files_of_the_others(everything: Objects) -> None:
    """It reads all settings, and fails where one of them names a file that it does not have."""
    (job,), (gateway,) = [
        pod(everything[kind, name])["containers"]
        for kind, name in (("Job", "plan-migrate"), ("Deployment", "plan-gateway"))
    ]
    assert job["envFrom"] == gateway["envFrom"]
    assert [mount for mount in gateway["volumeMounts"] if mount["name"] != "pool"] == job["volumeMounts"]
    assert all(variable in job["env"] for variable in EVERYTHING["extraEnv"])


def test_the_migration_runs_where_and_as_the_others_do(everything: Objects) -> None:
    """A service account may have the secret of the registry, and nodes may admit only what tolerates their taints."""
    gateway, job = pod(everything["Deployment", "plan-gateway"]), pod(everything["Job", "plan-migrate"])
    for field in ("serviceAccountName", "priorityClassName", "imagePullSecrets", "nodeSelector", "tolerations"):
        assert job[field] == gateway[field], field
    annotations = everything["Job", "plan-migrate"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"cluster": "north", "sidecar": "none"}


def test_every_process_has_what_the_settings_of_logins_need(everything: Objects) -> None:
    """Each of them reads `BATON_OIDC_ISSUER` from the common Secret, and does not start if these are missing."""
    for kind, name in (("Job", "migrate"), ("Deployment", "gateway"), ("Deployment", "dispatcher")):
        (container,) = pod(everything[kind, f"plan-{name}"])["containers"]
        values = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert (values["BATON_ADMIN_PORT"], values["BATON_ADMIN_URL"]) == ("9091", "https://admin.example")


def test_services_budgets_and_policies_select_the_pods(objects: Objects) -> None:
    labels = [
        manifest["spec"]["template"]["metadata"]["labels"]
        for (kind, _), manifest in objects.items()
        if kind == "Deployment"
    ]
    selectors = []
    for (kind, _), one in objects.items():
        if kind == "Service":
            selectors.append(one["spec"]["selector"])
        elif kind in ("PodDisruptionBudget", "PodMonitor"):
            selectors.append(one["spec"]["selector"]["matchLabels"])
        elif kind == "NetworkPolicy":
            selectors.append(one["spec"]["podSelector"]["matchLabels"])
    assert len(selectors) >= 3
    for selector in selectors:
        assert len([label for label in labels if selector.items() <= label.items()]) == 1, selector


def test_ports_and_targets_exist(everything: Objects) -> None:
    ports = {}
    for component in ("gateway", "dispatcher"):
        (container,) = pod(everything["Deployment", f"plan-{component}"])["containers"]
        ports[component] = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports[component]
        (endpoint,) = everything["PodMonitor", f"plan-{component}"]["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == "metrics"
        assert endpoint["port"] in ports[component]
        environ = {variable["name"]: variable.get("value") for variable in container["env"]}
        (metrics_port,) = [port for port in container["ports"] if port["name"] == "metrics"]
        assert environ["BATON_METRICS_PORT"] == str(metrics_port["containerPort"])
        rules = everything["NetworkPolicy", f"plan-{component}"]["spec"]["ingress"]
        opened = [rule["from"] for rule in rules if rule["ports"][0]["port"] == "metrics"]
        assert opened == [EVERYTHING["networkPolicy"]["prometheus"]]
    assert everything["Service", "plan"]["spec"]["ports"][0]["targetPort"] in ports["gateway"]
    (rule,) = everything["Ingress", "plan"]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == "plan"
    assert everything["HorizontalPodAutoscaler", "plan-gateway"]["spec"]["scaleTargetRef"]["name"] == "plan-gateway"
    assert everything["ScaledObject", "plan-dispatcher"]["spec"]["scaleTargetRef"]["name"] == "plan-dispatcher"


def test_an_autoscaled_deployment_states_no_replicas(everything: Objects) -> None:
    """Each upgrade would undo what the autoscaler did."""
    for component in ("gateway", "dispatcher"):
        assert "replicas" not in everything["Deployment", f"plan-{component}"]["spec"]


def test_engines_are_scaled_by_metrics_that_exist(everything: Objects) -> None:
    (trigger,) = everything["ScaledObject", "plan-dispatcher"]["spec"]["triggers"]
    names = set(re.findall(r"baton_\w+", trigger["metadata"]["query"]))
    assert names
    table = (ROOT / "app" / "telemetry.py").read_text()
    assert all(f'"{name}"' in table for name in names)


def test_a_changed_pool_file_starts_the_pods_anew(tmp_path: Path) -> None:
    sums = []
    for text in ("a = 1", "a = 2"):
        objects = installed({"pool": {"text": text}}, tmp_path)
        for component in ("gateway", "dispatcher"):
            template = objects["Deployment", f"plan-{component}"]["spec"]["template"]
            sums.append(template["metadata"]["annotations"]["checksum/pool"])
            assert {"name": "BATON_POOL", "value": "/etc/baton/pool.toml"} in template["spec"]["containers"][0]["env"]
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    assert sums[0] != sums[2]


def test_a_pool_file_arrives_as_it_is_written(tmp_path: Path) -> None:
    for text in ("a = 1", '  # indented\n[a]\n\tb = "é: #"  \r\n\n'):
        objects = installed({"pool": {"text": text}}, tmp_path)
        assert objects["ConfigMap", "plan-pool"]["data"]["pool.toml"] == text


def test_a_pod_leaves_the_service_before_it_is_stopped(everything: Objects) -> None:
    gateway = pod(everything["Deployment", "plan-gateway"])
    assert "time.sleep(5)" in gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert gateway["terminationGracePeriodSeconds"] > 5 + 5 + 25


def test_the_rules_are_those_of_the_repository(everything: Objects) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
    assert everything["PrometheusRule", "plan"]["spec"] == rules


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 3}}, "replica"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"metricsPort": 8080}, "metricsPort"),
        ({"admin": {"enabled": True, "port": 8080}}, "port"),
        ({"admin": {"enabled": True, "port": 9090}}, "admin.port"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"pool": {"text": "a = 1", "existingConfigMap": "pools"}}, "pool"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"dispatcher": {"autoscaling": {"enabled": True}}}, "dispatcher.autoscaling.prometheus"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_values_are_refused_with_their_name(values: Document, words: str, tmp_path: Path) -> None:
    with pytest.raises(helm.InstallError, match=words):
        installed(values, tmp_path)


def test_helm_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    with cluster() as target:
        lint = asyncio.run(helm.Lint(connection(target, tmp_path)).run(str(CHART)))
    assert [
        message for message in lint["Messages"] if message["Severity"] > 1
    ] == []  # 1 is advice: the chart has no icon
