"""The prerequisites of the pods of a workload: account, secrets, volumes, runtime.

Kubernetes would only keep pods waiting whose secrets or volumes are missing. And it fills in
variables once, when a pod starts: so a version of the secrets is in the pod template, and pods are
replaced when values change.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection

from kubetorch.controller.backends.base import Stores, check_views
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref
from kubetorch.manifests import agent, desired_pods, kinds, trainjob
from kubetorch.manifests.agent_container import SERVICE_ACCOUNT
from kubetorch.manifests.desired_pods import Attached
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Runtime


async def check_attached(stores: Stores, namespace: str, attached: Attached) -> str:
    """Check that the secrets and volumes of pods exist; returns a version of the secrets."""
    names, claims = attached.all_secrets, tuple({mount.claim for mount in attached.claims})
    secrets = await asyncio.gather(*(stores.secrets.get(namespace, name) for name in names))
    volumes = await asyncio.gather(*(stores.volumes.get(namespace, claim) for claim in claims))
    views = dict(zip(names, secrets, strict=True))
    check_views(namespace, attached, views, dict(zip(claims, volumes, strict=True)))
    versions = [f"{name}={view.version if view else ''}" for name, view in sorted(views.items())]
    return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:8] if versions else ""


class PodPrerequisites:
    def __init__(
        self, namespaces: Namespaces, stores: Stores, have_token: Callable[[str], Awaitable[None]]
    ) -> None:
        self._namespaces = namespaces
        self._stores = stores
        self._have_token = have_token

    async def prepare_selected(self, namespace: str) -> None:
        """Prepare a namespace for pods that its user made."""
        await self._have_token(namespace)

    async def prepare(
        self, manifest: Manifest, path: tuple[str, ...] | None = None, *, is_repeated: bool = False
    ) -> bool:
        """Prepare a namespace for the pods of an object; returns whether they are to be restricted.

        After a refused launch (`is_repeated`), the level of the namespace is read anew.
        """
        workload = WorkloadManifest.parse(manifest, path)
        namespace: str = manifest["metadata"]["namespace"]
        accounts = [*dict.fromkeys(_account(template) for template in workload.templates)]
        for account in accounts:
            await self._namespaces.prepare(namespace, account)
        for template in workload.templates:
            attached = desired_pods.read_attached(template.spec, template.container)
            version = await check_attached(self._stores, namespace, attached)
            agent.note_secrets(template, version)
        workload.write_templates()
        return await self._namespaces.is_restricted(
            namespace, accounts[0], is_asked_anew=is_repeated
        )

    async def admits_node_data(self, manifest: Manifest, spec: WorkloadSpec, folder: str) -> bool:
        """True if the pods of an object may mount the node's folder for declared data."""
        workload = WorkloadManifest.parse(manifest, spec.compute.pod_template_path)
        volume = agent.node_data_volume(folder, spec.namespace)
        account = _account(workload.primary)
        return await self._namespaces.admits_volume(spec.namespace, account, volume)


def _account(template: PodTemplate) -> str:
    """The service account of the pods; the default of Kubernetes if the manifest names none."""
    # `serviceAccount` is the older name of the field.
    account = template.spec.get("serviceAccountName") or template.spec.get("serviceAccount")
    if account is None and template.kind.is_custom:
        return "default"
    return str(account or SERVICE_ACCOUNT)


async def companion_objects(
    client: Client, manifest: Manifest, runtime: Runtime, root_images: Collection[str] | None = None
) -> list[Manifest]:
    """The objects that an equipped object refers to, which are applied before it."""
    kind = kinds.find(manifest)
    if kind is None or kind.has_template:
        return []
    base = await _base(client, manifest)
    return [agent.runtime_of_trainjob(manifest, base, runtime=runtime, root_images=root_images)]


async def _base(client: Client, manifest: Manifest) -> Object:
    kind, name = trainjob.base_of(manifest)
    resource = await client.discovery.find(manifest["apiVersion"], kind)
    namespace = manifest["metadata"]["namespace"] if resource.is_namespaced else None
    try:
        return await client.get(Ref(resource, name, namespace))
    except KubernetesNotFoundError:
        in_namespace = "" if namespace is None else f" in namespace {namespace!r}"
        error = KubernetesNotFoundError(
            f"the TrainJob {manifest['metadata']['name']!r} names the runtime {name!r}, and there "
            f"is no such {kind}{in_namespace}",
            hint=f"kubectl get {resource} lists them",
        )
        error.resource, error.namespace, error.name = str(resource), namespace, name
        error.verb, error.status_code, error.reason = "get", 404, "NotFound"
        raise error from None
