"""Who may do what, by the tokens and roles of a real API server."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.conftest import Kubectl
from cluster.faults import until
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.tuning import LIMITS
from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref, Resource
from kubetorch.wire import routes
from tests.cluster_controller import InCluster, open_session
from tests.local.agent.test_attacks import Socket
from tests.local.agent.test_fuzzed_routes import CONTROLLER, filled_path, wrong_tokens
from tests.local.service_harness import pack

pytestmark = [pytest.mark.cluster, pytest.mark.security]

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
EVERYTHING = ["get", "list", "create", "update", "delete"]
PARTS = ("", "/call", "/logs", "/secrets", "/volumes", "/status")
JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "job"},
    "spec": {"template": {"spec": {"containers": [{"name": "c", "image": "x"}]}}},
}


class World(InCluster):
    """A controller of this machine, and two namespaces with a user each."""

    def __init__(self, folder: Path) -> None:
        suffix = uuid.uuid4().hex[:6]
        self.a, self.b = f"access-a-{suffix}", f"access-b-{suffix}"
        self.admin = kubeconfig.find()
        super().__init__(folder, lambda: Client(self.admin))

    async def prepare(self) -> None:
        for namespace in (self.a, self.b):
            await self.client.create(_manifest(NAMESPACES, namespace))
            await self.client.create(_manifest(ACCOUNTS, "user", namespace))
            await self.client.create(self.role(namespace))
            await self.client.create(_binding(namespace, "Role", "kubetorch"))

    def wait_for_roles(self) -> None:
        """Wait until the API server knows the bindings, which it learns of some time later."""
        for namespace in (self.a, self.b):
            token, path = self.token(namespace), routes.workloads(namespace)
            until(lambda token=token, path=path: self.request("GET", path, token)[0] == 200)

    async def tidy(self) -> None:
        for namespace in (self.a, self.b):
            try:
                await self.client.delete(Ref(NAMESPACES, namespace))
            except KubernetesNotFoundError:
                continue

    def role(self, namespace: str, *parts: str) -> Object:
        names = [f"kubetorchworkloads{part}" for part in parts or PARTS]
        rule = {"apiGroups": ["kubetorch.com"], "resources": names, "verbs": EVERYTHING}
        return {**_manifest(ROLES, "kubetorch", namespace), "rules": [rule]}

    def token(self, namespace: str, *audiences: str, pod: Object | None = None) -> str:
        spec: Object = {"audiences": list(audiences), "expirationSeconds": 600}
        if pod is not None:
            metadata = pod["metadata"]
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "uid": metadata["uid"],
            }
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        request = self.client.post(Ref(ACCOUNTS, "user", namespace, "token"), body)
        return str(self.run(request)["status"]["token"])

    def pod(self, name: str) -> Object:
        """A pod that no node takes, so that it starts nothing."""
        manifest = _manifest(PODS, name, self.a)
        manifest["spec"] = {
            "serviceAccountName": "user",
            "nodeSelector": {"kubetorch.com/nowhere": "1"},
            "containers": [{"name": "c", "image": "localhost/python:3.11"}],
        }
        return self.run(self.client.create(manifest))


def _manifest(resource: Resource, name: str, namespace: str | None = None) -> Object:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}


def _binding(namespace: str, kind: str, role: str) -> Object:
    return {
        **_manifest(BINDINGS, f"user-{role}", namespace),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": namespace}],
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no KUBECONFIG: these tests need a real Kubernetes")
    with World(tmp_path_factory.mktemp("controller")) as world:
        world.run(world.prepare())
        try:
            world.wait_for_roles()
            yield world
        finally:
            world.run(world.tidy())


@pytest.mark.parametrize("audiences", [("kubetorch",), ()], ids=["for us", "for the API server"])
def test_a_user_deploys_and_calls_in_their_namespace_alone(
    world: World, audiences: tuple[str, ...]
) -> None:
    token = world.token(world.a, *audiences)
    assert world.deploy(token, world.a, "f")[0] == 200
    status, view = world.request("GET", routes.workload(world.a, "f"), token)
    assert (status, bool(view["token"])) == (200, True)
    for method, path in (
        ("GET", routes.workloads(world.b)),
        ("GET", routes.workload(world.b, "f")),
        ("DELETE", routes.workload(world.b, "f")),
        ("POST", routes.workload(world.b, "f", "token")),
        ("GET", routes.WORKLOADS),
        ("GET", routes.secrets(world.b)),
        ("GET", routes.secret(world.b, "x", "values")),
        ("POST", f"{routes.BLOBS_FETCH}?namespace={world.b}"),
        ("GET", routes.CALLS),
    ):
        status, answer = world.request(method, path, token, b"{}")
        assert (status, answer["error_type"]) == (403, "ForbiddenError"), path
    assert world.deploy(token, world.b, "f")[0] == 403


def test_tokens_that_are_for_somebody_else_or_changed_are_refused(world: World) -> None:
    path = routes.workloads(world.a)
    token = world.token(world.a, "kubetorch")
    assert world.request("GET", path, token)[0] == 200
    head, body, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["sub"] = f"system:serviceaccount:{world.b}:user"
    forged = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    for wrong in (
        world.token(world.a, "vault"),
        f"{head}.{forged}.{signature}",
        f"{head}.{body}.{signature[:-4]}AAAA",
        f"{head}.{body}.",
    ):
        assert world.request("GET", path, wrong)[0] == 401


def test_a_right_that_is_taken_away_is_gone_within_ten_seconds(world: World) -> None:
    token, path = world.token(world.b, "kubetorch"), routes.secrets(world.b)
    assert world.request("GET", path, token)[0] == 200
    world.run(world.client.apply(world.role(world.b, ""), force=True))
    try:
        seconds = until(lambda: world.request("GET", path, token)[0] == 403, seconds=60)
        assert seconds < 40
    finally:
        world.run(world.client.apply(world.role(world.b), force=True))
    until(lambda: world.request("GET", path, token)[0] == 200, seconds=60)


def test_a_pod_is_known_by_its_own_token_until_it_is_gone(world: World) -> None:
    pod = world.pod("g-0")
    token = world.token(world.a, "kubetorch", pod=pod)
    user = world.token(world.a, "kubetorch")
    uid = pod["metadata"]["uid"]
    world.backend.named[world.a, "g"] = [PodStatus("g-0", 0, "Running", "", uid=uid)]
    assert world.deploy(user, world.a, "g")[0] == 200
    assert open_session(world.url, token) == 101
    blob = b"of a"
    path, named = f"{routes.BLOBS}?namespace={world.a}", json.dumps({"blobs": [digest_of(blob)]})
    assert world.request("POST", path, user, pack([blob]))[0] == 200
    assert world.request("POST", routes.BLOBS_FETCH, token, named.encode())[0] == 200
    world.run(world.client.delete(Ref(PODS, "g-0", world.a), grace_seconds=0))
    until(lambda: open_session(world.url, token) == 401, seconds=60)


def test_values_of_variables_are_for_who_may_get_pods(world: World) -> None:
    token, path = world.token(world.a, "kubetorch"), routes.workload(world.a, "h", "pods")
    own_pod, foreign_pod = (
        {
            "metadata": {"name": name, "namespace": world.a},
            "spec": {"containers": [{"name": "c", "env": [{"name": "A", "value": "quince"}]}]},
        }
        for name in ("h-0", "foreign")
    )
    world.backend.objects[world.a, "h"] = [own_pod, foreign_pod]
    world.backend.named[world.a, "h"] = [
        PodStatus("h-0", 0, "Running", ""),
        PodStatus("foreign", 1, "Running", "", is_ours=False),
    ]
    assert world.deploy(token, world.a, "h")[0] == 200
    status, shown_pods = world.request("GET", path, token)
    assert (status, [shown_pod["metadata"]["name"] for shown_pod in shown_pods]) == (200, ["h-0"])
    assert "quince" not in json.dumps(shown_pods)
    assert world.request("GET", path, world.token(world.b, "kubetorch"))[0] == 403
    world.run(world.client.create(_binding(world.a, "ClusterRole", "edit")))
    try:
        until(lambda: len(world.request("GET", path, token)[1]) == 2, seconds=60)
        assert world.request("GET", path, token)[1] == [own_pod, foreign_pod]
    finally:
        world.run(world.client.delete(Ref(BINDINGS, "user-edit", world.a)))


def test_an_object_of_ones_own_needs_the_right_to_make_it(world: World) -> None:
    token = world.token(world.a, "kubetorch")
    more: tuple[dict[str, Any], ...] = (
        {"manifest": json.dumps(JOB)},
        {"service_account_name": "default"},
        {"service_template": json.dumps({"spec": {"template": {"spec": {"hostPID": True}}}})},
    )
    for compute in more:
        status, answer = world.deploy(token, world.a, "job", **compute)
        assert (status, answer["error_type"]) == (403, "ForbiddenError"), compute
        assert "ClusterRole edit" in answer["message"] or "ClusterRole edit" in str(answer)
    world.run(world.client.create(_binding(world.a, "ClusterRole", "edit")))
    try:
        until(lambda: world.deploy(token, world.a, "job", **more[0])[0] == 200, seconds=60)
        # That they may not is known for two seconds more.
        until(lambda: world.deploy(token, world.a, "job", **more[1])[0] == 200, seconds=60)
    finally:
        world.run(world.client.delete(Ref(BINDINGS, "user-edit", world.a)))


def test_an_object_without_a_namespace_is_nobodys(world: World) -> None:
    manifest = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "sly"},
        "x": {"spec": {"containers": [{"name": "c", "image": "x"}]}},
    }
    status, answer = world.deploy(
        world.token(world.a),
        world.a,
        "sly",
        manifest=json.dumps(manifest),
        pod_template_path=("x",),
    )
    assert (status, answer["error_type"]) == (400, "SpecError"), answer


def test_the_token_of_a_namespace_is_void_with_its_secret(world: World) -> None:
    world.run(world.pod_tokens.ensure(world.a))
    secrets = Resource("", "v1", "secrets", "Secret")
    ref = Ref(secrets, "kubetorch-pod-token", world.a)
    token = base64.b64decode(world.run(world.client.get(ref))["data"]["token"]).decode()
    assert open_session(world.url, token) == 101
    assert world.request("GET", routes.workloads(world.a), token)[0] == 401
    world.run(world.client.delete(ref))
    until(lambda: open_session(world.url, token) == 401, seconds=60)


def test_without_an_api_server_nobody_gets_in(kubectl: Kubectl, tmp_path: Path) -> None:
    admin_access = kubeconfig.find()
    cluster = dataclasses.replace(admin_access.cluster, server="https://127.0.0.1:9")
    access = dataclasses.replace(admin_access, cluster=cluster)
    with InCluster(tmp_path, lambda: Client(access, patience=0.5)) as controller:
        status, answer = controller.request("GET", routes.workloads("a"), "token")
    assert (status, answer["error_type"]) == (503, "ControllerUnavailableError")


# -------------------------------------------------------------------------------------- strangers


def test_every_wrong_token_is_refused_in_one_sentence(world: World) -> None:
    requests = itertools.cycle([request for request in CONTROLLER if request[1] != routes.HEALTH])
    for token, (method, path) in zip(wrong_tokens() * 3, requests):  # noqa: B905  # it has no end
        status, answer = world.request(method, filled_path(path, []), token)
        assert status == 401, (token, method, path, answer)
        assert re.fullmatch(r"[^\n]{5,300}", answer["message"]), answer
        assert (answer["traceback"], answer["cause"]) == ("", None), answer


def test_an_account_has_few_sessions_whichever_tokens_it_makes(
    world: World,
) -> None:
    host, port = world.url.removeprefix("http://").split(":")
    tokens = [world.token(world.b) for _ in range(2 * LIMITS.waiting_sessions)]
    with contextlib.ExitStack() as sessions:
        statuses = []
        for token in tokens:
            session = sessions.enter_context(Socket((host, int(port)), routes.SESSIONS, token))
            statuses.append(session.status)
    assert statuses == [101] * LIMITS.waiting_sessions + [429] * LIMITS.waiting_sessions
