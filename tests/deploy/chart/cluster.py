"""A Kubernetes API server for one chart: it says what kinds it has, stores what it is sent, and runs nothing.

Helm's own engine installs into it over HTTP, so what a test sees is what a cluster would be sent. A Job is complete as
soon as it is created. It answers JSON only, which Helm's client accepts.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Document = dict[str, Any]
KINDS = {
    "v1": ("ConfigMap", "Namespace", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "batch/v1": ("Job",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "policy/v1": ("PodDisruptionBudget",),
}
VERSION = "1.30.0"


def plural(kind: str) -> str:
    """The name of a kind in paths."""
    lower = kind.lower()
    if lower.endswith("s"):
        return f"{lower}es"
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"


class Cluster:
    """The objects that were created, by path."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: dict[str, Document] = {}
        self.created: list[Document] = []
        """All that was ever created, those that are gone as well."""

    def get(self, path: str) -> Document | None:
        """Return what is at a path: discovery, an object, or the list of a collection."""
        if path == "/version":
            return {"major": "1", "minor": "30", "gitVersion": f"v{VERSION}"}
        if path == "/openapi/v3":
            return {"paths": {}}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()}
        api = path.removeprefix("/apis/").removeprefix("/api/")
        if api in KINDS:
            return {"kind": "APIResourceList", "groupVersion": api, "resources": _resources(KINDS[api])}
        if path in self.objects:
            return self.objects[path]
        return self._list(path)

    def _list(self, path: str) -> Document | None:
        for api, kinds in KINDS.items():
            for kind in kinds:
                if path.endswith(f"/{plural(kind)}"):
                    items = [one for place, one in self.objects.items() if place.rpartition("/")[0] == path]
                    metadata = {"resourceVersion": "1"}
                    return {"kind": f"{kind}List", "apiVersion": api, "metadata": metadata, "items": items}
        return None

    def create(self, path: str, document: Document) -> Document:
        """Store an object of a collection."""
        document["metadata"] |= {"uid": "0", "resourceVersion": "1", "namespace": "baton"}
        if document["kind"] == "Job":
            document["status"] = {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
        self.objects[f"{path}/{document['metadata']['name']}"] = document
        self.created.append(document)
        return document


def _groups() -> list[Document]:
    groups = []
    for api in KINDS:
        if "/" in api:
            group, version = api.split("/")
            served = {"groupVersion": api, "version": version}
            groups.append({"name": group, "versions": [served], "preferredVersion": served})
    return groups


def _resources(kinds: tuple[str, ...]) -> list[Document]:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = []
    for kind in kinds:
        namespaced = kind != "Namespace"
        resources.append({"name": plural(kind), "kind": kind, "namespaced": namespaced, "verbs": verbs})
    return resources


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/openapi/v2":  # asked for as a protobuf; an empty one describes no kind, so none is checked
            return self._send(200, b"")
        document = self.cluster.get(parts.path)
        if document is not None and "watch" in parse_qs(parts.query):
            return self._watch(document)
        return self._answer(document)

    def _watch(self, document: Document) -> None:
        """Send what there is, say that this is all so far, and end; the client watches again."""
        events = [{"type": "ADDED", "object": item} for item in document["items"]]
        metadata = {"resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}}
        kind = document["kind"].removesuffix("List")
        all_sent = {"kind": kind, "apiVersion": document["apiVersion"], "metadata": metadata}
        events.append({"type": "BOOKMARK", "object": all_sent})
        self._send(200, "\n".join(json.dumps(event) for event in events).encode())

    def do_POST(self) -> None:
        document = self._body()
        self._send(201, json.dumps(self.cluster.create(urlsplit(self.path).path, document)).encode())

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path
        self._send(200, json.dumps(self.cluster.create(path.rpartition("/")[0], self._body())).encode())

    def do_DELETE(self) -> None:
        self._body()
        self._answer(self.cluster.objects.pop(urlsplit(self.path).path, None))

    def _body(self) -> Document:
        document: Document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return document

    def _answer(self, document: Document | None) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self._send(404 if document is None else 200, json.dumps(missing if document is None else document).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Serve an empty cluster on loopback."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    new_cluster = handler.cluster = Cluster(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield new_cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
