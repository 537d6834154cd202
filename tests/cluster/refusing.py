"""A namespace in which much is refused: quota, limits, Pod Security, webhooks, a policy."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trustme

from kubetorch.errors import KubernetesError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Ref, Resource

Object = dict[str, Any]
#: The machine as the cluster reaches it.
MACHINE = "198.18.0.1"
DENIAL = "not on a Saturday"
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
NODES = Resource("", "v1", "nodes", "Node", is_namespaced=False)
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
_ADMISSION = "admissionregistration.k8s.io"
WEBHOOKS = Resource(
    _ADMISSION,
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    is_namespaced=False,
)
POLICIES = Resource(
    _ADMISSION, "v1", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", False
)
BINDINGS = Resource(
    _ADMISSION, "v1", "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", False
)
_RULE = {
    "apiGroups": ["apps"],
    "apiVersions": ["v1"],
    "resources": ["deployments"],
    "operations": ["CREATE", "UPDATE"],
}
QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue")
#: A node that only exists on paper, so that it is lost; nobody tolerates it by accident.
TAINT = {"key": "kubetorch.test/ghost", "value": "yes", "effect": "NoSchedule"}


@asynccontextmanager
async def namespace(client: Client, name: str) -> AsyncIterator[str]:
    """Make it, and take it and all that belongs to it away again."""
    with _webhook() as (port, authority):
        try:
            for manifest in _objects(name, port, authority):
                await client.apply(manifest, field_manager="test")
            await client.patch(Ref(NODES, name, subresource="status"), _ghost())
            await _in_force(client, name)
            yield name
        finally:
            for ref in (
                Ref(WEBHOOKS, name),
                Ref(BINDINGS, name),
                Ref(POLICIES, name),
                Ref(NODES, name),
                Ref(NAMESPACES, name),
            ):
                await client.delete(ref)


async def queues(client: Client, name: str) -> bool:
    """A Kueue queue `team` of one CPU in the namespace; whether there is Kueue."""
    try:
        await client.discovery.find(QUEUES.api_version, QUEUES.kind)
    except KubernetesNotFoundError:
        return False
    version = QUEUES.api_version
    selector = {"matchLabels": {"kubernetes.io/metadata.name": name}}
    flavor = {"name": name, "resources": [{"name": "cpu", "nominalQuota": 1}]}
    group = {"coveredResources": ["cpu"], "flavors": [flavor]}
    for kind, metadata, spec in (
        ("ResourceFlavor", {"name": name}, {}),
        (
            "ClusterQueue",
            {"name": name},
            {"namespaceSelector": selector, "resourceGroups": [group]},
        ),
        ("LocalQueue", {"name": "team", "namespace": name}, {"clusterQueue": name}),
    ):
        manifest = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
        await client.apply(manifest, field_manager="test")
    return True


async def no_queues(client: Client, name: str) -> None:
    """Take what `queues` made away again."""
    for plural, kind in (("clusterqueues", "ClusterQueue"), ("resourceflavors", "ResourceFlavor")):
        resource = Resource("kueue.x-k8s.io", "v1beta1", plural, kind, is_namespaced=False)
        await client.delete(Ref(resource, name))


def _objects(name: str, port: int, authority: bytes) -> Iterator[Object]:
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    yield {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": labels},
    }
    yield {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small", "namespace": name},
        "spec": {"hard": {"requests.example.com/chips": "4"}},
    }
    yield {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "with-deadline", "namespace": name},
        "spec": {"hard": {"pods": "3"}, "scopes": ["Terminating"]},
    }
    limit = {
        "type": "Container",
        "max": {"memory": "800Gi"},
        "defaultRequest": {"memory": "1Mi", "cpu": "5m"},
    }
    yield {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "limits", "namespace": name},
        "spec": {"limits": [limit]},
    }
    bundle = base64.b64encode(authority).decode()
    denied = {"url": f"https://{MACHINE}:{port}/", "caBundle": bundle}
    silent = {"url": f"https://{MACHINE}:9/", "caBundle": bundle}
    yield {
        "apiVersion": f"{_ADMISSION}/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [_hook(name, "denied", denied), _hook(name, "silent", silent)],
    }
    yield {
        "apiVersion": f"{_ADMISSION}/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [_RULE], **_selectors(name, "policy")},
            "validations": [{"expression": "false", "message": "the policy says no"}],
        },
    }
    yield {
        "apiVersion": f"{_ADMISSION}/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    yield {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubetorch.test/ghost": "yes"}},
        "spec": {"taints": [TAINT]},
    }


def _ghost() -> Object:
    amounts = {"cpu": "1", "memory": "1Gi", "pods": "10", "ephemeral-storage": "1Gi"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}


def _selectors(name: str, doom: str) -> Object:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "objectSelector": {"matchLabels": {"doom": doom}},
    }


def _hook(name: str, doom: str, client: Object) -> Object:
    return {
        "name": f"{doom}.kubetorch.test",
        "clientConfig": client,
        "rules": [_RULE],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 3,
        "failurePolicy": "Fail",
        **_selectors(name, doom),
    }


async def _in_force(client: Client, name: str) -> None:
    """Wait until all of it is in force: the API server learns of it by watches of its own."""
    for doom in ("denied", "policy", "silent"):
        manifest = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "probe", "namespace": name, "labels": {"doom": doom}},
            "spec": {
                "selector": {"matchLabels": {"app": "probe"}},
                "template": {
                    "metadata": {"labels": {"app": "probe"}},
                    "spec": {"containers": [{"name": "main", "image": "none"}]},
                },
            },
        }
        for _ in range(100):
            try:
                await client.create(manifest, dry_run=True)
            except KubernetesError:
                break
            await asyncio.sleep(0.2)
        else:
            raise AssertionError(f"the API server does not refuse {doom!r} within 20 s")
    # A quota allows everything until its controller has counted what there is.
    for quota in ("small", "with-deadline"):
        for _ in range(100):
            if "hard" in (await client.get(Ref(QUOTAS, quota, name))).get("status", {}):
                break
            await asyncio.sleep(0.2)
        else:
            raise AssertionError(f"the quota {quota!r} is not in force within 20 s")


# ------------------------------------------------------------------------------------- the webhook


class _Denying(http.server.BaseHTTPRequestHandler):
    """Denies whatever it is asked about."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": {
                "uid": review["request"]["uid"],
                "allowed": False,
                "status": {"message": DENIAL},
            },
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@contextmanager
def _webhook() -> Iterator[tuple[int, bytes]]:
    """A server with TLS: its port, and the authority of its certificate."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(MACHINE).configure_cert(context)
    server = http.server.ThreadingHTTPServer(("", 0), _Denying)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], authority.cert_pem.bytes()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
