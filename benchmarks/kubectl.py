"""The cluster that `KUBECONFIG` names, as kubectl has it: what the floors and peers are made of."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import processes
from benchmarks.venvs import UnavailableError

INSTALLATION, CONTROLLER = "kubetorch", "deployment/kubetorch-controller"
# 120 s: the longest is that a pod becomes ready while another measurement still ends.
DEADLINE = 120.0
#: What every pod asks for, ours as well: who asks for less has less of a node that is full.
CPU = "0.1"


def check() -> None:
    """Make sure that there is a cluster with Kubetorch.

    Raises:
        UnavailableError: There is none.
    """
    if not os.environ.get("KUBECONFIG"):
        raise UnavailableError("no KUBECONFIG: it needs a real Kubernetes")
    if shutil.which("kubectl") is None:
        raise UnavailableError("no kubectl on the PATH: it is one of the peers")
    try:
        default_image()
    except subprocess.CalledProcessError as error:
        raise UnavailableError(
            f"no Kubetorch in namespace {INSTALLATION} of the cluster (kt install): "
            f"{error.stderr.strip()}"
        ) from None
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"the cluster does not answer: {error}") from None


def run(*arguments: str, stdin_object: object = None) -> str:
    """The output of kubectl; it reads `stdin_object` as JSON."""
    done = subprocess.run(
        ["kubectl", *arguments],
        input=None if stdin_object is None else json.dumps(stdin_object),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    return done.stdout


def get(*arguments: str) -> Any:  # noqa: ANN401  # whatever object it is
    """An object or a list."""
    return json.loads(run("get", *arguments, "-o", "json"))


@contextmanager
def namespace() -> Iterator[str]:
    """A namespace of its own, which goes with everything in it."""
    name = f"kt-benchmark-{secrets.token_hex(3)}"
    run("create", "namespace", name)
    try:
        yield name
    finally:
        try:
            _clean("kubetorchworkloads", "--all", "-n", name, "--wait=true")
        finally:
            _clean("namespace", name, "--wait=false")


def default_image() -> str:
    """The image of pods for which none is named."""
    [container] = get(CONTROLLER, "-n", INSTALLATION)["spec"]["template"]["spec"]["containers"]
    [image] = [e["value"] for e in container["env"] if e["name"] == "KT_DEFAULT_IMAGE"]
    return str(image)


def controller_memory() -> float:
    """Bytes that the leading controller's process has in memory."""
    labels = "app.kubernetes.io/component=controller,kubetorch.com/leads=true"
    name = run("get", "pod", "-n", INSTALLATION, "-l", labels, "-o", "name").split()[0]
    program = "print(open('/proc/1/status').read())"
    python = "/kubetorch/bin/python"
    status = run("exec", "-n", INSTALLATION, name, "--", python, "-c", program)
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return float(line.split()[1]) * 1024


def two_nodes() -> tuple[str, str]:
    """Names of two nodes that run; the same one twice if there are no more."""
    names = [
        node["metadata"]["name"]
        for node in get("nodes")["items"]
        if {"type": "Ready", "status": "True"}.items()
        <= {item for c in node["status"]["conditions"] for item in c.items()}
    ]
    return names[0], names[-1]


@contextmanager
def pod(
    namespace: str, name: str, program: str, *, port: int | None = None, node: str | None = None
) -> Iterator[str]:
    """A pod of the default image that runs a program on our runtime; gives its address.

    Args:
        namespace: Its namespace.
        name: Its name.
        program: The text of the program.
        port: A port that it listens on once it is ready.
        node: The node that it runs on.
    """
    command = ["/kubetorch/bin/python", "-c", program]
    probe = {"readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1}} if port else {}
    node_selector = {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
    run(*_new_pod(namespace, name, default_image(), command, probe, node_selector))
    try:
        wait(namespace, name)
        yield str(get("pod", name, "-n", namespace)["status"]["podIP"])
    finally:
        delete(namespace, name)


def start(namespace: str, name: str, image: str) -> None:
    """Start a pod of an image that sleeps, and wait until it is ready."""
    run(*_new_pod(namespace, name, image, ["sleep", "3600"]))
    wait(namespace, name)


def wait(namespace: str, name: str) -> None:
    """Wait until a pod is ready."""
    timeout = f"--timeout={DEADLINE:.0f}s"
    run("wait", "--for=condition=Ready", timeout, f"pod/{name}", "-n", namespace)


def delete(namespace: str, name: str) -> None:
    """Delete a pod at once."""
    _clean("pod", name, "-n", namespace, "--grace-period=1", "--wait=false")


def _clean(*arguments: str) -> None:
    """Delete something. A failure is said, not raised: it would hide why the benchmark ended."""
    try:
        run("delete", *arguments)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        processes.complain(error)


def _new_pod(
    namespace: str,
    name: str,
    image: str,
    command: Sequence[str],
    container: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> list[str]:
    """The command that makes a pod; `container` and `spec` are what more there is to say of it."""
    described = {"name": name, "resources": {"requests": {"cpu": CPU}}, **(container or {})}
    overrides = {"spec": {"containers": [described], **(spec or {})}}
    options = ["--image-pull-policy=IfNotPresent", "--restart=Never", "--override-type=strategic"]
    options += [f"--image={image}", f"--overrides={json.dumps(overrides)}"]
    return ["run", name, "-n", namespace, *options, "--command", "--", *command]


@contextmanager
def forward(namespace: str, name: str, port: int) -> Iterator[int]:
    """A local port that `kubectl port-forward` leads to a port of a pod."""
    command = ["kubectl", "port-forward", "-n", namespace, f"pod/{name}", f":{port}"]
    with processes.speaking(command, " -> ", deadline=DEADLINE) as (line, process):
        # "Forwarding from 127.0.0.1:40321 -> 7000"
        yield int(line.split(" -> ")[0].rpartition(":")[2])
        process.terminate()
