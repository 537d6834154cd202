"""The pod template of a workload: one container that runs the agent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kubetorch.manifests import labels
from kubetorch.specs.compute import ComputeSpec

Manifest = dict[str, Any]

CONTAINER = "kubetorch"
PORT = 32300
PORT_NAME = "http1"
LOG_LEVEL = "KT_LOG_LEVEL"
#: Seconds between two startup probes; `launch_timeout` is counted in them.
STARTUP_PERIOD = 5


def template(compute: ComputeSpec, *, image: str, labels: Mapping[str, str]) -> Manifest:
    """The pod template for a compute."""
    container: Manifest = {
        "name": CONTAINER,
        "image": image,
        "command": ["/bin/bash", "-c"],
        "args": ["exec python -m kubetorch.pod"],
        "ports": [{"name": PORT_NAME, "containerPort": PORT}],
        "env": environment(compute),
        "resources": resources(compute),
        "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}},
        **probes(compute.launch_timeout),
    }
    if compute.working_dir is not None:
        container["workingDir"] = compute.working_dir
    return {"metadata": {"labels": dict(labels)}, "spec": {"containers": [container]}}


def environment(compute: ComputeSpec) -> list[dict[str, str]]:
    """The variables of the container, by name."""
    variables = {LOG_LEVEL: compute.logging.level.upper(), **dict(compute.env_vars)}
    return [{"name": name, "value": value} for name, value in sorted(variables.items())]


def resources(compute: ComputeSpec) -> dict[str, dict[str, str]]:
    """What the container asks for; there are no limits."""
    asked = {"cpu": compute.cpus, "memory": compute.memory}
    requests = {name: quantity for name, quantity in asked.items() if quantity is not None}
    return {"requests": requests} if requests else {}


def probes(launch_timeout: int) -> Manifest:
    """The probes of the agent."""

    def probe(period: int, timeout: int, failures: int) -> Manifest:
        return {
            "httpGet": {"path": "/health", "port": PORT},
            "periodSeconds": period,
            "timeoutSeconds": timeout,
            "failureThreshold": failures,
        }

    startup = probe(STARTUP_PERIOD, 2, max(1, launch_timeout // STARTUP_PERIOD))
    return {
        "startupProbe": startup | {"initialDelaySeconds": 0},
        "readinessProbe": probe(3, 5, 5) | {"successThreshold": 1},
        "livenessProbe": probe(30, 5, 3),
    }


def fingerprint(template: Manifest) -> str:
    """What changes when pods have to be replaced.

    The label of the module is left out: code from another file is no reason to replace a pod.
    """
    metadata = template["metadata"]
    kept = {name: text for name, text in metadata["labels"].items() if name != labels.MODULE}
    shown = template | {"metadata": metadata | {"labels": kept}}
    text = json.dumps(shown, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
