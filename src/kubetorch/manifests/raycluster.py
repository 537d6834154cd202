"""RayCluster of KubeRay: one head, and workers with the head's pod template.

https://docs.ray.io/en/latest/cluster/kubernetes/user-guides/config.html
"""

from __future__ import annotations

from kubetorch.manifests.kinds import KINDS, Manifest
from kubetorch.manifests.workload_manifest import PodTemplate

KIND = KINDS["RayCluster", "ray.io"]
TEMPLATE_LABEL = "raycluster"
#: Version of Ray that the operator assumes for the cluster's protocol.
RAY_VERSION = "2.8.0"

#: The operator joins a container's command with its own unless this annotation is "true"; the
#: operator's command is then in a variable of the container.
OVERWRITE_COMMAND = "ray.io/overwrite-container-cmd"
_START_VARIABLE = "KUBERAY_GEN_RAY_START_CMD"
GCS_PORT = 6379
#: Ports of Ray's head.
PORTS = {"gcs": GCS_PORT, "dashboard": 8265, "client": 10001}
#: Options of `ray start --head`.
HEAD_START_OPTIONS = {
    "dashboard-host": "0.0.0.0",
    "port": str(GCS_PORT),
    "object-manager-port": "8076",
    "node-manager-port": "8077",
    "dashboard-port": str(PORTS["dashboard"]),
    "metrics-export-port": "8080",
}


def skeleton() -> Manifest:
    """A RayCluster of a head alone, with an empty container."""
    return {
        "apiVersion": KIND.api_version,
        "kind": KIND.kind,
        "metadata": {},
        "spec": {
            "rayVersion": RAY_VERSION,
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": dict(HEAD_START_OPTIONS),
                "template": {"metadata": {}, "spec": {"containers": [{"name": KIND.container}]}},
            },
            "workerGroupSpecs": [],
        },
    }


def command_with_agent(agent: str) -> list[str]:
    """The command of a container that starts Ray, as the operator would have, and an agent.

    Ray is a child of the agent, which stays the first process. The operator needs bash in its
    images, too.
    """
    return ["/bin/bash", "-c", f'ulimit -n 65536; bash -c "${_START_VARIABLE}" & exec {agent}']


def keep_agent_command_and_ports(template: PodTemplate) -> None:
    """Keep the operator from changing the agent's command, and give the head Ray's own ports.

    The operator makes the head's Service of the head's ports, and of Ray's own where the head has
    none; the agent's port, which is added, would leave the Service without Ray's.
    """
    if template.is_primary and template.kind == KIND:
        template.annotations_of_object()[OVERWRITE_COMMAND] = "true"
        if not template.container.get("ports"):
            template.container["ports"] = [
                {"name": name, "containerPort": port} for name, port in PORTS.items()
            ]
