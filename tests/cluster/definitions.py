"""Definitions of kinds that have no operator in the test cluster, from their documented fields.

Pod templates are checked as strictly as in the definitions of operators that are there: their
schema is taken from those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "format": "int32"}


def of(installed: Callable[[str], Schema]) -> list[Schema]:
    """The definitions.

    Args:
        installed: Gives the definition of that name from the cluster.
    """
    training = _spec(installed("pytorchjobs.kubeflow.org"))
    replicas = training["properties"]["pytorchReplicaSpecs"]
    run_policy = training["properties"]["runPolicy"]
    jobs = _spec(installed("jobsets.jobset.x-k8s.io"))["properties"]["replicatedJobs"]["items"]
    job = jobs["properties"]["template"]["properties"]["spec"]
    template = job["properties"]["template"]
    return [
        _jax_job(replicas, run_policy),
        _leader_worker_set(template),
        _queue(),
        _gang(template),
    ]


def _spec(definition: Schema) -> Schema:
    version = next(version for version in definition["spec"]["versions"] if version["storage"])
    spec_schema: Schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec_schema


def _jax_job(replicas: Schema, run_policy: Schema) -> Schema:
    """https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/jax/."""
    return _definition(
        "kubeflow.org",
        "v1",
        "JAXJob",
        {"jaxReplicaSpecs": replicas, "runPolicy": run_policy},
        required=["jaxReplicaSpecs"],
    )


def _leader_worker_set(template: Schema) -> Schema:
    """https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/."""
    workers = {
        "leaderTemplate": template,
        "workerTemplate": template,
        "size": _COUNT | {"minimum": 1},
        "restartPolicy": _TEXT,
        "subGroupPolicy": _object({"subGroupSize": _COUNT, "subGroupPolicyType": _TEXT}),
    }
    fields = {
        "replicas": _COUNT,
        "startupPolicy": _TEXT,
        "leaderWorkerTemplate": _object(workers, required=["workerTemplate"]),
        "networkConfig": _object({"subdomainPolicy": _TEXT}),
        "rolloutStrategy": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    }
    return _definition(
        "leaderworkerset.x-k8s.io",
        "v1",
        "LeaderWorkerSet",
        fields,
        required=["leaderWorkerTemplate"],
    )


def _queue() -> Schema:
    """https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/queues."""
    amount = {"type": "number"}
    resource = _object({"quota": amount, "overQuotaWeight": amount, "limit": amount})
    fields = {
        "displayName": _TEXT,
        "parentQueue": _TEXT,
        "priority": {"type": "integer"},
        "resources": _object({"cpu": resource, "gpu": resource, "memory": resource}),
    }
    return _definition("scheduling.run.ai", "v2", "Queue", fields, scope="Cluster")


def _gang(template: Schema) -> Schema:
    """A kind that Kubetorch does not know."""
    task = _object({"replicas": _COUNT, "template": template}, required=["template"])
    return _definition("example.com", "v1", "Gang", {"tasks": {"type": "array", "items": task}})


def _object(properties: Schema, *, required: list[str] | None = None) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return schema | {"required": required} if required else schema


def _definition(
    group: str,
    version: str,
    kind: str,
    spec: Schema,
    *,
    required: list[str] | None = None,
    scope: str = "Namespaced",
) -> Schema:
    plural = f"{kind.lower()}s"
    schema = _object({"apiVersion": _TEXT, "kind": _TEXT, "metadata": {"type": "object"}})
    schema["properties"]["spec"] = _object(spec, required=required)
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": names,
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
