"""Which pods a controller lets in, and what they may have mounted, by what a real API server says.

No node takes the pods: who speaks for them is the test, with the tokens that the API server gives
for them.
"""

from __future__ import annotations

import contextlib
import copy
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.conftest import Installed, Kubectl
from cluster.faults import until
from kubetorch.controller.access import PodIdentity
from kubetorch.controller.backends.kubernetes.secrets import SECRETS
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection
from kubetorch.manifests import labels
from kubetorch.manifests.agent_container import SERVICE_ACCOUNT
from kubetorch.specs.secret import SecretRef
from kubetorch.wire import routes, tokens
from tests.cluster_controller import OnKubernetes, say_hello

pytestmark = [pytest.mark.cluster, pytest.mark.security, pytest.mark.timeout(400)]

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
EVENTS = Resource("", "v1", "events", "Event")
KEY = SecretRef("s", "s", "env", ("KEY",))
NOWHERE = (("kubetorch.com/nowhere", "1"),)


class World(OnKubernetes):
    """A controller of this machine, in a namespace with two users: one may only deploy."""

    def __init__(self, folder: Path) -> None:
        admin_access = kubeconfig.find()
        namespace = f"pods-{uuid.uuid4().hex[:6]}"
        self._admin = lambda: Client(admin_access)
        super().__init__(folder, self._admin, namespace)

    async def _prepare(self) -> None:
        async with self._admin() as client:
            await client.create(self._object(NAMESPACES, self.namespace, is_in=False))
            for user, role in (("ann", "kubetorch-edit"), ("root", "kubetorch-admin")):
                await client.create(self._object(ACCOUNTS, user))
                binding = {
                    **self._object(BINDINGS, user),
                    "roleRef": {"apiGroup": BINDINGS.group, "kind": "ClusterRole", "name": role},
                    "subjects": [
                        {"kind": "ServiceAccount", "name": user, "namespace": self.namespace}
                    ],
                }
                await client.create(binding)

    def wait_for_roles(self) -> None:
        """Wait until the API server knows the bindings, which it learns of some time later."""
        path = routes.workloads(self.namespace)
        for user in ("ann", "root"):
            token = self.token(user)
            until(lambda token=token: self.request("GET", path, token)[0] == 200)

    async def _stop(self) -> None:
        await self.client.delete(Ref(NAMESPACES, self.namespace))
        await super()._stop()

    def _object(self, resource: Resource, name: str, *, is_in: bool = True) -> Object:
        metadata = {"name": name, **({"namespace": self.namespace} if is_in else {})}
        return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}

    def token(self, account: str, pod: Object | None = None, audience: str = "kubetorch") -> str:
        spec: Object = {"audiences": [audience] if audience else [], "expirationSeconds": 600}
        if pod is not None:
            bound = {part: pod["metadata"][part] for part in ("name", "uid")}
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", **bound}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        request = self.client.post(Ref(ACCOUNTS, account, self.namespace, "token"), body)
        return str(self.run(request)["status"]["token"])

    def deployed(self, user: str, name: str, *secrets: SecretRef) -> Object:
        """A workload, and the pod that its Deployment has made."""
        token = self.token(user)
        compute = {"secrets": secrets, "node_selector": NOWHERE}
        assert self.deploy(token, self.namespace, name, **compute)[0] == 200
        return self.pod_of(name)

    def pod_of(self, name: str, *, but: str = "") -> Object:
        live_pods: list[Object] = []
        chosen = Selection(PODS, self.namespace, labels=f"{labels.SERVICE}={name}")

        def look() -> bool:
            live_pods[:] = [
                live_pod
                for live_pod in self.run(self.client.list(chosen)).items
                if live_pod["metadata"]["uid"] != but
                and not live_pod["metadata"].get("deletionTimestamp")
            ]
            return bool(live_pods)

        until(look, seconds=60)
        return live_pods[0]

    def of_pod(self, pod: Object, **claims: str) -> str:
        return self.token(SERVICE_ACCOUNT, pod, **claims)

    def hello(self, token: str, workload: str, pod: Object, *, seconds: float = 60.0) -> list[str]:
        """What a pod is told once the controller knows it, or after so many seconds."""
        name = PodIdentity(self.namespace, workload, pod["metadata"]["name"])
        answers: list[str] = []

        def is_known() -> bool:
            answers[:] = say_hello(self.url, token, name)
            return "there is no pod" not in answers[-1]

        with contextlib.suppress(AssertionError):  # it never will be
            until(is_known, seconds=seconds)
        return answers[:2]

    def secret(self, *, is_ours: bool) -> Object:
        manifest = {**self._object(SECRETS, "s"), "data": {"KEY": "eA=="}}
        if is_ours:
            manifest["metadata"]["labels"] = {labels.MOUNT_TYPE: "env"}
        return self.run(self.client.create(manifest))

    def forged(self, name: str, owner: Object | None) -> Object:
        """A pod with the labels of `f`, as anybody can make it who may make pods."""
        manifest = self._object(PODS, name)
        manifest["metadata"]["labels"] = {labels.SERVICE: "f"}
        if owner is not None:
            manifest["metadata"]["ownerReferences"] = [owner]
        manifest["spec"] = {
            "serviceAccountName": SERVICE_ACCOUNT,
            "nodeSelector": dict(NOWHERE),
            "containers": [{"name": "kubetorch", "image": "localhost/python:3.11"}],
        }
        return self.run(self.client.create(manifest))


@pytest.fixture(scope="module")
def world(controller: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("controller")) as world:
        world.wait_for_roles()
        yield world


@pytest.fixture(scope="module")
def pod(world: World) -> Object:
    """The pod of `f`."""
    return world.deployed("ann", "f")


def test_the_pod_of_a_deployment_joins_with_its_own_token(world: World, pod: Object) -> None:
    assert world.hello(world.of_pod(pod), "f", pod) == ["welcome", "members"]
    pod_of_another = world.deployed("ann", "g")
    for token, workload in (
        (world.of_pod(pod, audience=""), "f"),
        (world.token(SERVICE_ACCOUNT), "f"),
        (world.of_pod(pod_of_another), "f"),
        (world.of_pod(pod), "g"),
    ):
        assert "welcome" not in world.hello(token, workload, pod, seconds=2)


def test_labels_and_made_up_owners_make_no_pod_one_of_a_workload(world: World, pod: Object) -> None:
    (made_by,) = pod["metadata"]["ownerReferences"]
    record = world.run(world.client.get(Ref(WORKLOADS, "f", world.namespace)))["metadata"]
    workload = {"apiVersion": WORKLOADS.api_version, "kind": WORKLOADS.kind, "controller": True}
    for number, owner in enumerate(
        (
            None,
            {**made_by, "controller": False},
            {**made_by, "uid": str(uuid.uuid4())},
            {**workload, "name": "f", "uid": record["uid"]},
        )
    ):
        forged = world.forged(f"forged-{number}", owner)
        # What nothing owns that is there Kubernetes deletes at once.
        with contextlib.suppress(KubernetesNotFoundError):
            answers = world.hello(world.of_pod(forged), "f", forged, seconds=2)
            assert "welcome" not in answers, owner


def test_a_pod_with_a_secret_that_took_a_name_is_refused_and_ends(
    world: World,
) -> None:
    secret = world.secret(is_ours=True)
    first = world.deployed("ann", "h", KEY)
    assert world.hello(world.of_pod(first), "h", first) == ["welcome", "members"]
    record = Ref(WORKLOADS, "h", world.namespace)

    def recorded_grants() -> list[Object]:
        status = world.run(world.client.get(record)).get("status") or {}
        grants: list[Object] = status.get("grants") or []
        return grants

    until(recorded_grants)
    (grant,) = recorded_grants()
    assert grant["user"]["username"] == f"system:serviceaccount:{world.namespace}:ann"
    identity = tokens.fingerprint(secret["metadata"]["uid"])
    assert grant["secrets"] == [{"name": "s", "identity": identity}]

    world.run(world.client.delete(Ref(SECRETS, "s", world.namespace)))
    world.secret(is_ours=False)
    world.run(world.client.delete(Ref(PODS, first["metadata"]["name"], world.namespace)))
    second = world.pod_of("h", but=first["metadata"]["uid"])
    answers = world.hello(world.of_pod(second), "h", second)
    assert "'s'" in answers[-1], answers
    name = second["metadata"]["name"]

    def is_gone() -> bool:
        try:
            world.run(world.client.get(Ref(PODS, name, world.namespace)))
        except KubernetesNotFoundError:
            return True
        return False

    until(is_gone, seconds=60)
    events = world.run(world.client.list(Selection(EVENTS, world.namespace))).items
    assert [
        event["reason"] for event in events if event["involvedObject"].get("name") == name
    ].count("MountRefused") == 1

    # The pods of who may have an object mount it have it.
    world.deployed("root", "h", KEY)

    def is_in() -> bool:
        third = world.pod_of("h")
        return "welcome" in world.hello(world.of_pod(third), "h", third, seconds=2)

    until(is_in, seconds=60)


PROGRAM = """
import os, sys
import kubetorch as kt

print("user code runs", flush=True)

def seen():
    return os.environ["KEY"]

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", secrets=["quince"], launch_timeout=60)
    print(kt.fn(seen).to(compute)())
"""


@pytest.fixture
def editor(installed: Installed, kubectl: Kubectl, tmp_path: Path) -> Installed:
    """The installation, as somebody uses it who may deploy and make no objects themselves."""
    where = ("-n", installed.namespace)
    kubectl("create", "serviceaccount", "ann", *where)
    account = f"--serviceaccount={installed.namespace}:ann"
    kubectl("create", "rolebinding", "ann", "--clusterrole=kubetorch-edit", account, *where)
    config = yaml.safe_load(Path(installed.environ["KUBECONFIG"]).read_text())
    token = kubectl("create", "token", "ann", "--duration=1h", *where)
    config["users"][0]["user"] = {"token": token.strip()}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    installed_for_editor = copy.copy(installed)
    installed_for_editor.environ = {**installed.environ, "KUBECONFIG": str(file)}
    return installed_for_editor


def test_nothing_of_the_user_runs_in_a_pod_that_is_refused(
    editor: Installed, kubectl: Kubectl, tmp_path: Path
) -> None:
    where = ("-n", editor.namespace)
    pods = ("-l", f"{labels.SERVICE}=seen", *where)
    kubectl("create", "secret", "generic", "quince", "--from-literal=KEY=first", *where)
    kubectl("label", "secret", "quince", "kubetorch.com/mount-type=env", *where)
    assert "first" in editor.python(PROGRAM, tmp_path, timeout=150)
    kubectl("delete", "secret", "quince", *where)
    kubectl("create", "secret", "generic", "quince", "--from-literal=KEY=native", *where)
    kubectl("delete", "pods", *pods)

    def refused() -> str:
        """The messages of the events."""
        which = ("--field-selector", "reason=MountRefused")
        return kubectl("get", "events", *where, *which, "-o", "jsonpath={.items[*].message}")

    log_text = ""

    def are_two() -> bool:
        nonlocal log_text
        log_text += kubectl("logs", *pods, "--tail=-1", "--ignore-errors=true")
        return refused().count("'quince'") > 1

    until(are_two, seconds=90)
    assert "user code runs" not in log_text
