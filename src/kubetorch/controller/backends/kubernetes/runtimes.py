"""What a TrainJob runs on: a runtime of its own, like the one that its user names.

A TrainJob has no pod template and cannot add the init container that brings the agent; the runtime
that it refers to can.
"""

from __future__ import annotations

from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref
from kubetorch.manifests import agent, kinds, trainjob
from kubetorch.manifests.agent import Runtime
from kubetorch.manifests.kinds import Manifest


async def beside(client: Client, manifest: Manifest, runtime: Runtime) -> list[Manifest]:
    """What has to be applied before an equipped object, which is changed to refer to it.

    Args:
        client: Asks the API server.
        manifest: The object; of any kind but a TrainJob it stays as it is.
        runtime: Where the agent comes from.

    Raises:
        KubernetesNotFoundError: The user's runtime is not there.
    """
    kind = kinds.find(manifest)
    if kind is None or kind.has_template:
        return []
    base = await _base(client, manifest)
    return [agent.beside(manifest, base, runtime=runtime)]


async def _base(client: Client, manifest: Manifest) -> Object:
    kind, name = trainjob.base_of(manifest)
    resource = await client.discovery.find(manifest["apiVersion"], kind)
    namespace = manifest["metadata"]["namespace"] if resource.is_namespaced else None
    try:
        return await client.get(Ref(resource, name, namespace))
    except KubernetesNotFoundError:
        where = "" if namespace is None else f" in namespace {namespace!r}"
        error = KubernetesNotFoundError(
            f"the TrainJob {manifest['metadata']['name']!r} names the runtime {name!r}, and there "
            f"is no such {kind}{where}",
            hint=f"kubectl get {resource} lists those that are there",
        )
        error.resource, error.namespace, error.name = str(resource), namespace, name
        error.verb, error.status_code, error.reason = "get", 404, "NotFound"
        raise error from None
