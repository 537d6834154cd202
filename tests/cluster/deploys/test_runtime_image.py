"""The runtime's image in real pods: copied into images of other systems, it runs their Python.

The controller is a fake one on this machine, at the address that pods reach it at. Images are built
with the kit (`KT_CLUSTER_KIT`), once for a cluster.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kubetorch
from agent_harness import SECRET, WORKLOAD, FakeController
from cluster.conftest import Kubectl
from cluster.images import BASE, KIT, build, has_image
from kubetorch.lib.http_client import HttpClient
from kubetorch.manifests import agent
from kubetorch.specs.image import EnvStep, ImageSpec, PipStep, RunStep
from kubetorch.specs.workload import RuntimeSpec, WorkloadSpec
from kubetorch.wire import messages, tokens

#: The first of them builds images.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
#: Address of this machine that pods reach.
NODE_ADDRESS = "198.18.0.1"
SPACE = "kubetorch-runtime"
_GENTLY = ("--ignore-not-found", "--wait=false", "--now")
AUDIENCE = tokens.audience(SPACE, WORKLOAD)
KEY = tokens.workload_key(SECRET, AUDIENCE)
IMAGE = os.environ.get("KT_TEST_IMAGE", "localhost/kubetorch:test")

SOURCE = """
import os, sys, subprocess
import kubetorch as kt

def who():
    from kubetorch.wire import messages
    child = "import kubetorch, msgspec, yaml; print(kubetorch.__version__)"
    return {
        "python": list(sys.version_info[:2]), "executable": sys.executable, "pid": os.getpid(),
        "user": os.getuid(), "folder": os.getcwd(), "first": os.readlink("/proc/1/exe"),
        "env": {k: v for k, v in os.environ.items() if k.startswith(("KT_", "POD_"))},
        "child": subprocess.run([sys.executable, "-c", child], capture_output=True, text=True),
    }

def who_as_json():
    found = who()
    child = found.pop("child")
    return {**found, "child": child.stdout + child.stderr}

def fill():
    held = []
    while True:
        held.append(b"x" * 10_000_000)

def read(name):
    return __import__(name).__file__
"""


@pytest.fixture(scope="module", autouse=True)
def image(kubectl: Kubectl) -> None:
    if not (KIT / "image").exists():
        pytest.skip(f"there is no cluster kit in {KIT}: KT_CLUSTER_KIT names its folder")
    if "KT_TEST_IMAGE" not in os.environ:
        build(IMAGE, ROOT, "-f", ROOT / "deploy" / "Dockerfile", "--build-arg", f"BASE={BASE}")


@pytest.fixture(scope="module")
def space(kubectl: Kubectl) -> Iterator[str]:
    """A namespace, and the account of its pods."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}
    kubectl("apply", "-f", "-", manifests=[namespace])
    yield SPACE
    kubectl("delete", "namespace", SPACE, "--wait=false")


class Pods:
    """Starts pods with an agent, each with a controller of its own."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self._kubectl = kubectl
        self._folder = folder
        self._controllers: list[FakeController] = []
        self._names: list[str] = []
        self.address = ""

    def begin(self, name: str, image: str, **container: Any) -> FakeController:
        """A pod whose agent has connected."""
        folder = self._folder / name
        folder.mkdir()
        # The token is the API server's; that it is one is not this test's business.
        controller = FakeController(folder, NODE_ADDRESS, lambda token: token.count(".") == 2)
        self._controllers.append(controller)
        self._kubectl("apply", "-f", "-", manifests=[_pod(name, image, controller, container)])
        self._names.append(name)
        return self._welcome(controller)

    def join(self, name: str, image: str) -> FakeController:
        """A pod as `docs/byo.md` says to make one, whose agent has connected."""
        folder = self._folder / name
        folder.mkdir()
        controller = FakeController(folder, NODE_ADDRESS, lambda token: token == "of the namespace")
        self._controllers.append(controller)
        container = {
            "command": ["/kubetorch/bin/kt", "server", "start", "--workload", WORKLOAD],
            "workingDir": "/srv",
            "env": [
                {"name": "KT_POD_TOKEN", "value": "of the namespace"},
                {"name": "KT_CONTROLLER_URL", "value": controller.url},
            ],
        }
        pod = _pod(name, image, controller, {})
        spec = pod["spec"]
        (pod_container,) = spec["containers"]
        mounts = [
            mount for mount in pod_container["volumeMounts"] if mount["mountPath"] == agent.FOLDER
        ]
        pod_container.update({**container, "volumeMounts": mounts})
        del spec["automountServiceAccountToken"]
        self._kubectl("apply", "-f", "-", manifests=[pod])
        self._names.append(name)
        return self._welcome(controller)

    def _welcome(self, controller: FakeController) -> FakeController:
        self.address = controller.wait_for(messages.Hello).url
        controller.send(messages.Welcome(key=KEY.hex(), version="1", protocol=1))
        return controller

    def ask(self, callable_: str, *args: Any) -> Any:
        """Call, as a client in the cluster does."""
        claims = tokens.Claims(AUDIENCE, time.time() + 60)
        body = json.dumps({"args": args, "kwargs": {}}).encode()
        with (
            HttpClient(self.address, tokens.sign(KEY, claims), timeout=60) as client,
            client.request("POST", f"/{callable_}", body=body) as answer,
        ):
            return json.loads(answer.read())

    def close(self) -> None:
        if self._names:
            self._kubectl("delete", "pod", "-n", SPACE, *self._names, *_GENTLY)
        for controller in self._controllers:
            controller.close()


def _pod(
    name: str, image: str, controller: FakeController, container: dict[str, Any]
) -> dict[str, Any]:
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": WORKLOAD, "namespace": SPACE},
        "spec": {
            "template": {
                "metadata": {},
                "spec": {
                    "containers": [
                        {
                            "name": "kubetorch",
                            "image": image,
                            "imagePullPolicy": "IfNotPresent",
                            "resources": {"requests": {"cpu": "10m"}},
                            **container,
                        }
                    ]
                },
            }
        },
    }
    runtime = agent.Runtime(IMAGE, "localhost/none:dev", controller.url, "IfNotPresent")
    agent.equip(deployment, workload=WORKLOAD, runtime=runtime)
    spec = deployment["spec"]["template"]["spec"]
    spec["terminationGracePeriodSeconds"] = 3
    spec["restartPolicy"] = "Never"
    spec["automountServiceAccountToken"] = False
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": SPACE},
        "spec": spec,
    }


@pytest.fixture
def pods(kubectl: Kubectl, space: str, tmp_path: Path) -> Iterator[Pods]:
    started_pods = Pods(kubectl, tmp_path)
    yield started_pods
    started_pods.close()


def spec_of(controller: FakeController, name: str, image: ImageSpec | None = None) -> WorkloadSpec:
    """A workload as a client with another machine and another Python sends it."""
    spec = controller.spec(SOURCE, name)
    return replace(
        spec,
        namespace=SPACE,
        compute=replace(spec.compute, image=image),
        runtime=RuntimeSpec(
            python="/home/me/bin/python", version="3.99.1", path=("/home/me/lib",), site=("/x",)
        ),
    )


def deploy(controller: FakeController, generation: int, spec: WorkloadSpec) -> messages.Observed:
    controller.send(messages.Reload(generation=generation, spec=spec))
    return controller.wait_for(messages.Observed, lambda m: m.generation == generation)


UBUNTU = "http://archive.ubuntu.com/ubuntu"
DEBIAN = "http://deb.debian.org/debian"
SYSTEMS = {
    "jammy": ((3, 10), UBUNTU),  # an older C library than the runtime's
    "noble": ((3, 12), UBUNTU),
    "trixie": ((3, 13), DEBIAN),  # a newer one
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("user", [0, 4321])
def test_an_image_runs_its_own_python(pods: Pods, system: str, user: int) -> None:
    version, mirror = SYSTEMS[system]
    image = f"localhost/kubetorch-test-{system}:1"
    if not has_image(image):
        arguments = ["--build-arg", f"SUITE={system}", "--build-arg", f"MIRROR={mirror}"]
        build(image, ROOT, "-f", ROOT / "tests" / "cluster" / "systems.Dockerfile", *arguments)
    security = {
        "runAsUser": user,
        "readOnlyRootFilesystem": user != 0,
        "allowPrivilegeEscalation": False,
    }
    controller = pods.begin(f"{system}-{user}", image, securityContext=security)
    observed = deploy(controller, 1, spec_of(controller, "who_as_json"))
    assert observed.failure is None, observed.failure
    answer = pods.ask("who_as_json")
    assert tuple(answer["python"]) == version
    assert answer["executable"].startswith("/usr/bin/python3")
    assert answer["user"] == user
    assert answer["folder"].endswith("/run/kubetorch/work")
    assert answer["first"] == "/kubetorch/bin/python"
    assert answer["child"].strip() == kubetorch.__version__
    env = answer["env"]
    assert env["POD_NAME"] == f"{system}-{user}"
    assert env["POD_NAMESPACE"] == env["KT_NAMESPACE"] == SPACE
    assert env["POD_IP"] in pods.address
    assert env["KT_SERVICE"] == env["KT_SERVICE_NAME"] == WORKLOAD
    assert env["KT_BACKEND"] == "kubernetes"
    assert not any(name.startswith("KT_POD_") for name in env)


def test_an_image_of_another_libc_without_python_is_told_so(pods: Pods) -> None:
    image = "localhost/kubetorch-test-musl:1"
    if not has_image(image):
        file = ROOT / "tests" / "cluster" / "musl.Dockerfile"
        build(image, ROOT, "-f", file)
    controller = pods.begin("musl", image)
    begun = time.monotonic()
    spec = spec_of(controller, "who_as_json", ImageSpec(image_id=image))
    failure = deploy(controller, 1, spec).failure
    assert time.monotonic() - begun < 30
    assert failure is not None
    assert failure["code"] == "pod_container"
    assert f"the image {image} has no Python 3.10 or newer; found: none" in failure["message"]


def test_steps_run_in_the_container(pods: Pods) -> None:
    controller = pods.begin("steps", BASE)
    steps = (
        EnvStep("GREETING", "hello"),
        PipStep("six==1.16.0"),
        RunStep("apt-get update -qq && apt-get install -qq -y tree && tree --version > /installed"),
    )
    image = ImageSpec(image_id=BASE, steps=steps)
    observed = deploy(controller, 1, spec_of(controller, "read", image))
    assert observed.failure is None, observed.failure
    assert "site-packages/six.py" in pods.ask("read", "six")


def test_a_step_that_needs_root_says_so(pods: Pods) -> None:
    controller = pods.begin("no-root", BASE, securityContext={"runAsUser": 4321})
    image = ImageSpec(image_id=BASE, steps=(RunStep("apt-get install -y tree"),))
    failure = deploy(controller, 1, spec_of(controller, "read", image)).failure
    assert failure is not None
    assert failure["code"] == "image_step"
    assert "apt-get needs root" in failure["message"]
    assert "4321" in failure["message"]


def test_a_worker_that_uses_too_much_memory_is_told_so(pods: Pods) -> None:
    resources = {"requests": {"cpu": "10m"}, "limits": {"memory": "300Mi"}}
    controller = pods.begin("memory", BASE, resources=resources)
    assert deploy(controller, 1, spec_of(controller, "fill")).failure is None
    failure = pods.ask("fill")
    assert failure["code"] == "out_of_memory", failure


def test_a_pod_of_the_users_own_joins(pods: Pods) -> None:
    controller = pods.join("joins", BASE)
    assert deploy(controller, 1, spec_of(controller, "who_as_json")).failure is None
    answer = pods.ask("who_as_json")
    assert answer["executable"] == "/usr/bin/python3"
    assert answer["folder"] == "/srv"
    assert answer["env"]["POD_NAME"] == "joins"


def test_the_end_of_a_pod_is_quick_and_leaves_nothing(pods: Pods, kubectl: Kubectl) -> None:
    controller = pods.begin("ends", BASE)
    assert deploy(controller, 1, spec_of(controller, "read")).failure is None
    begun = time.monotonic()
    kubectl("delete", "pod", "-n", SPACE, "ends", "--grace-period=60", "--wait")
    assert time.monotonic() - begun < 30
