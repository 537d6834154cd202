"""All parameters of a compute and what each is to a manifest: the topics, put together."""

from __future__ import annotations

from kubetorch.manifests import (
    container,
    environment,
    gpus,
    knative,
    metadata,
    replicas,
    resources,
    scheduling,
    secrets,
    serving,
    storage,
)
from kubetorch.manifests.parameter import Parameter

#: In the order in which they are written.
PARAMETERS: tuple[Parameter, ...] = (
    *replicas.PARAMETERS,
    *metadata.PARAMETERS,
    *container.PARAMETERS,
    *serving.PARAMETERS,
    *resources.PARAMETERS,
    *gpus.PARAMETERS,
    *scheduling.PARAMETERS,
    *environment.PARAMETERS,
    *storage.PARAMETERS,
    *secrets.PARAMETERS,
    *knative.PARAMETERS,
)

#: Fields of `ComputeSpec` that shape the object, or are no part of it, and what becomes of them.
ELSEWHERE = {
    "service_template": "laid over the whole manifest at the end, lists replaced",
    "manifest": "the object itself",
    "pod_template_path": "where the pods of `manifest` are; then only their command is ours",
    "selector": "which pods belong to the workload, and selector of the Service",
    "endpoint": "`url`: no Service; `selector`: the Service's",
    "distribution": '`"ray"` makes the object a RayCluster; the rest is told to the pods',
}
