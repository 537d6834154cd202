"""RayCluster of KubeRay: one head, and workers that are as it is.

https://docs.ray.io/en/latest/cluster/kubernetes/user-guides/config.html
"""

from __future__ import annotations

from kubetorch.manifests.kinds import KINDS, Manifest
from kubetorch.manifests.workload_manifest import PodTemplate

KIND = KINDS["RayCluster", "ray.io"]
TEMPLATE_LABEL = "raycluster"
#: Version that the operator takes the cluster's protocol to be, where the image says no other.
RAY_VERSION = "2.8.0"

#: The operator joins a container's command with its own unless this says "true"; what it would
#: have run is in a variable of the container then.
OVERWRITE_COMMAND = "ray.io/overwrite-container-cmd"
_START = "KUBERAY_GEN_RAY_START_CMD"
GCS_PORT = 6379
#: Ports of Ray's head.
PORTS = {"gcs": GCS_PORT, "dashboard": 8265, "client": 10001}
#: What `ray start --head` is given.
HEAD = {
    "dashboard-host": "0.0.0.0",
    "port": str(GCS_PORT),
    "object-manager-port": "8076",
    "node-manager-port": "8077",
    "dashboard-port": str(PORTS["dashboard"]),
    "metrics-export-port": "8080",
}


def skeleton() -> Manifest:
    """A RayCluster of a head alone, with nothing in its pods."""
    return {
        "apiVersion": KIND.api_version,
        "kind": KIND.kind,
        "metadata": {},
        "spec": {
            "rayVersion": RAY_VERSION,
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": dict(HEAD),
                "template": {
                    "metadata": {},
                    "spec": {"containers": [{"name": KIND.container}]},
                },
            },
            "workerGroupSpecs": [],
        },
    }


def beside(agent: str) -> list[str]:
    """The command of a container that starts Ray, as the operator would have, and an agent.

    Ray is a child of the agent, which stays the first process. The operator takes it for granted
    that its images have bash.
    """
    return ["/bin/bash", "-c", f'ulimit -n 65536; bash -c "${_START}" & exec {agent}']


def fill(template: PodTemplate) -> None:
    """Keep the operator from changing the agent's command, and the head's Service as it would be.

    The operator makes that Service of the head's ports, and of Ray's own where there are none; the
    agent's port is one.
    """
    if template.is_primary and template.kind == KIND:
        template.annotations_of_object().setdefault(OVERWRITE_COMMAND, "true")
        if not template.container.get("ports"):
            template.container["ports"] = [
                {"name": name, "containerPort": port} for name, port in PORTS.items()
            ]
