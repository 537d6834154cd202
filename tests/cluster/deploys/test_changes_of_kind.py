"""A service that is deployed as another kind: only that is there afterwards, and is called."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cluster import byo, faults
from cluster.conftest import Installed, Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
Start = Callable[[str], faults.Client]


@pytest.fixture
def client(tmp_path: Path, bringing: Installed) -> Iterator[Start]:
    """Starts programs of somebody who may make objects of all kinds."""
    with faults.clients(tmp_path, bringing.environ) as start:
        yield start


#: A program says which kind; the next one the other.
KINDS = {
    "Deployment": 'kt.Compute(cpus="0.01", launch_timeout=100)',
    "Knative": 'kt.Compute(cpus="0.01", launch_timeout=100).autoscale(min_scale=1, max_scale=1)',
    # All that there is of them on the two nodes.
    "GPUs": 'kt.Compute(cpus="0.01", gpus=8, replicas=2, launch_timeout=100)',
    "StatefulSet": "brought(service.STATEFUL_SET)",
    "JobSet": "brought(service.JOB_SET)",
    "Unserved": "brought(service.UNSERVED)",
    # Knative refuses what its features do not allow.
    "Refused": 'kt.Compute(cpus="0.01", node_selector={"a": "b"}).autoscale(min_scale=1)',
}
PROGRAM = """
import pathlib, yaml

def wait_for(word):
    service.until(pathlib.Path(word).exists)

def brought(text):
    compute = kt.Compute.from_manifest(yaml.safe_load(text))
    compute.launch_timeout = 100
    return compute

def called():
    try:
        return kt.Fn.from_name(NAME)(0)
    except kt.ControllerUnavailableError:
        return None

def deploy(compute):
    return kt.fn(service.slow, name=NAME).to(compute)
"""
GPUS = {"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8", "cpu": "10m"}}
RESOURCES = {
    "deployments",
    "statefulsets",
    "jobsets.jobset.x-k8s.io",
    "services.serving.knative.dev",
}


def _manifest(kind: str, name: str) -> str:
    """One that the cluster's whole set of GPUs is needed for."""
    manifest, _ = byo.KINDS[kind]
    manifest = json.loads(json.dumps(manifest))
    manifest["metadata"]["name"] = name
    text = yaml.safe_dump(manifest)
    if kind == "StatefulSet":
        manifest["spec"]["template"]["spec"]["containers"][0]["resources"] = GPUS
        text = yaml.safe_dump(manifest)
    return text


def _unserved(name: str) -> byo.Object:
    """One of a kind whose operator the cluster lacks."""
    template = {"size": 2, "workerTemplate": byo.template()}
    spec = {"replicas": 1, "leaderWorkerTemplate": template}
    manifest = byo.manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", spec)
    return {**manifest, "metadata": {"name": name}}


def program(name: str, body: str) -> str:
    """One of a user, with all kinds at hand."""
    manifests = {
        "STATEFUL_SET": _manifest("StatefulSet", name),
        "JOB_SET": _manifest("JobSet", name),
        "UNSERVED": yaml.safe_dump(_unserved(name)),
    }
    head = "".join(f"service.{key} = {text!r}\n" for key, text in manifests.items())
    for kind, text in KINDS.items():
        body = body.replace(f"<{kind}>", text)
    return f"NAME = {name!r}\n" + head + PROGRAM + body


def made_objects(kubectl: Kubectl, installed: Installed, name: str) -> set[str]:
    """The objects of a service that are nobody else's, as `kind/name`."""
    listing = json.loads(
        kubectl(
            *("get", ",".join(sorted(RESOURCES)), "-n", installed.namespace, "-o", "json"),
            *("-l", f"kubetorch.com/service={name}"),
        )
    )
    return {f"{manifest['kind']}/{manifest['metadata']['name']}" for manifest in listing["items"]}


def become(kubectl: Kubectl, installed: Installed, name: str, *objects: str) -> None:
    """Wait until these are the objects of a service: the cluster deletes in the background."""
    faults.until(lambda: made_objects(kubectl, installed, name) == set(objects))


def services(kubectl: Kubectl, installed: Installed, name: str) -> dict[str, str]:
    """What made the core Services whose name begins so."""
    listing = json.loads(kubectl("get", "services", "-n", installed.namespace, "-o", "json"))
    return {
        service["metadata"]["name"]: service["metadata"]["ownerReferences"][0]["kind"]
        for service in listing["items"]
        if service["metadata"]["name"] in (name, f"{name}-http", f"{name}-headless")
    }


def remaining(kubectl: Kubectl, installed: Installed, name: str, *beginnings: str) -> list[str]:
    """The pods of a service, once there are none but those whose names begin so."""
    deadline = time.monotonic() + 60
    while True:
        pods = faults.pods(kubectl, installed.namespace, name)
        if all(pod.startswith(beginnings) for pod in pods):
            return pods
        assert time.monotonic() < deadline, pods
        time.sleep(0.5)  # the cluster ends them in the background


@pytest.fixture
def _knative(kubectl: Kubectl) -> None:
    if "services" not in kubectl("api-resources", "--api-group", "serving.knative.dev"):
        pytest.skip("the cluster has no Knative")


@pytest.fixture
def _jobset(kubectl: Kubectl) -> None:
    if "jobsets" not in kubectl("api-resources", "--api-group", "jobset.x-k8s.io"):
        pytest.skip("the cluster has no JobSet")


@pytest.mark.usefixtures("_knative")
def test_a_deployment_becomes_autoscaled_and_back_while_it_is_called(
    client: Start, installed: Installed, kubectl: Kubectl
) -> None:
    user_program = client(
        program(
            "turned",
            """
import threading
said, is_over = [], threading.Event()
def call():
    handle = kt.Fn.from_name(NAME)
    while not is_over.is_set():
        try:
            said.append(handle(0.01))
        except kt.KubetorchError as error:
            print("while it changes", type(error).__name__, error, flush=True)
first = deploy(<Deployment>)
print("before", first(0), flush=True)
caller = threading.Thread(target=call)
caller.start()
wait_for("scale")
scaled = deploy(<Knative>)
print("scaled", scaled(0), flush=True)
wait_for("return")
back = deploy(<Deployment>)
print("back", back(0), flush=True)
service.until(lambda: said and said[-1] == back(0))
is_over.set()
caller.join(60)
print("ended", caller.is_alive(), len(set(said)) > 1, first(0) == back(0), flush=True)
""",
        )
    )
    user_program.line("before")
    assert made_objects(kubectl, installed, "turned") == {"Deployment/turned"}
    (user_program.folder / "scale").touch()
    assert "-00001-deployment-" in user_program.line("scaled")
    scaled_objects = ("Service/turned", "Deployment/turned-00001-deployment")
    become(kubectl, installed, "turned", *scaled_objects)
    remaining(kubectl, installed, "turned", "turned-00001-")
    assert services(kubectl, installed, "turned") == {"turned": "Route"}
    (user_program.folder / "return").touch()
    pod = user_program.line("back").split()[1]
    become(kubectl, installed, "turned", "Deployment/turned")
    assert remaining(kubectl, installed, "turned", pod) == [pod]
    assert services(kubectl, installed, "turned") == {"turned": "KubetorchWorkload"}
    assert user_program.line("ended").split() == ["ended", "False", "True", "True"]


@pytest.mark.usefixtures("_jobset")
def test_a_deployment_becomes_a_job_set_and_back(
    client: Start, installed: Installed, kubectl: Kubectl
) -> None:
    user_program = client(
        program(
            "jobs",
            """
print("before", deploy(<Deployment>)(0), flush=True)
print("jobs", *deploy(<JobSet>)(0), flush=True)
wait_for("return")
print("back", deploy(<Deployment>)(0), flush=True)
""",
        )
    )
    names = user_program.line("jobs").split()[1:]
    assert all(name.startswith("jobs-") for name in names)
    become(kubectl, installed, "jobs", "JobSet/jobs")
    assert services(kubectl, installed, "jobs") == {
        "jobs": "JobSet",
        "jobs-http": "KubetorchWorkload",
        "jobs-headless": "KubetorchWorkload",
    }
    (user_program.folder / "return").touch()
    pod = user_program.line("back").split()[1]
    become(kubectl, installed, "jobs", "Deployment/jobs")
    assert services(kubectl, installed, "jobs") == {"jobs": "KubetorchWorkload"}
    assert remaining(kubectl, installed, "jobs", pod) == [pod]


@pytest.mark.alone
def test_gpus_of_the_old_kind_are_free_for_the_new_one_though_the_controller_restarts_meanwhile(
    client: Start, installed: Installed, kubectl: Kubectl, kill_controllers: Callable[[], None]
) -> None:
    namespace = installed.namespace
    user_program = client(
        program(
            "gpus",
            """
print("before", deploy(<GPUs>)(0), flush=True)
wait_for("go")
print("set", *deploy(<StatefulSet>)(0), flush=True)
wait_for("return")
print("back", deploy(<Deployment>)(0), flush=True)
""",
        )
    )
    user_program.line("before")
    # Something keeps the old object until the controller has been restarted.
    patch = ("patch", "deployment", "gpus", "-n", namespace, "--type=merge", "-p")
    kubectl(*patch, '{"metadata": {"finalizers": ["example.com/kept"]}}')
    (user_program.folder / "go").touch()
    kubectl(
        *("wait", "deployment/gpus", "-n", namespace, "--timeout=60s"),
        "--for=jsonpath={.metadata.deletionTimestamp}",
    )
    assert made_objects(kubectl, installed, "gpus") == {"Deployment/gpus"}
    kill_controllers()
    kubectl(*patch, '{"metadata": {"finalizers": null}}')
    assert user_program.line("set").split() == ["set", "gpus-0", "gpus-1"]
    become(kubectl, installed, "gpus", "StatefulSet/gpus")
    remaining(kubectl, installed, "gpus", "gpus-0", "gpus-1")
    (user_program.folder / "return").touch()
    pod = user_program.line("back").split()[1]
    become(kubectl, installed, "gpus", "Deployment/gpus")
    assert remaining(kubectl, installed, "gpus", pod) == [pod]


@pytest.mark.alone
@pytest.mark.usefixtures("_knative")
@pytest.mark.parametrize("kind", ["Unserved", "Refused"])
def test_what_cannot_be_made_leaves_the_old_kind_serving(
    kind: str,
    client: Start,
    installed: Installed,
    kubectl: Kubectl,
    kill_controllers: Callable[[], None],
) -> None:
    name = f"kept-{kind.lower()}"
    user_program = client(
        program(
            name,
            f"""
first = deploy(<Deployment>)
pod = first(0)
try:
    deploy(<{kind}>)
except kt.KubetorchError as error:
    print("refused", type(error).__name__, error, flush=True)
print("same", first(0) == pod, kt.Fn.from_name(NAME)(0) == pod, flush=True)
wait_for("go")
service.until(called, 120)
print("again", called() == pod, flush=True)
print("back", deploy(<Deployment>)(0) == pod, flush=True)
first.teardown()
print("gone", flush=True)
""",
        )
    )
    refused = user_program.line("refused").split()
    assert user_program.line("same").split() == ["same", "True", "True"], refused
    assert made_objects(kubectl, installed, name) == {f"Deployment/{name}"}
    kill_controllers()
    (user_program.folder / "go").touch()
    assert user_program.line("again").split() == ["again", "True"]
    assert user_program.line("back").split() == ["back", "True"]
    user_program.line("gone")
    become(kubectl, installed, name)
