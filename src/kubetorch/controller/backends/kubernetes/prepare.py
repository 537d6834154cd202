"""The prerequisites of the pods of a workload: account, secrets, volumes, runtime.

Kubernetes itself would only keep pods waiting whose secrets or volumes are missing. And what it
puts into variables it puts there once: so that pods see other values they have to be replaced, by
a version in their template.
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
from kubetorch.wire.messages import Runtime


async def check_attached(stores: Stores, namespace: str, attached: Attached) -> str:
    """Check that the secrets and volumes of pods exist; returns a version of the secrets."""
    names, claims = attached.all_secrets, tuple({one.claim for one in attached.claims})
    secrets = await asyncio.gather(*(stores.secrets.get(namespace, name) for name in names))
    volumes = await asyncio.gather(*(stores.volumes.get(namespace, claim) for claim in claims))
    views = dict(zip(names, secrets, strict=True))
    check_views(namespace, attached, views, dict(zip(claims, volumes, strict=True)))
    versions = [f"{name}={view.version if view else ''}" for name, view in sorted(views.items())]
    return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:8] if versions else ""


class PodPrerequisites:
    def __init__(
        self,
        namespaces: Namespaces,
        stores: Stores,
        have_token: Callable[[str], Awaitable[None]],
    ) -> None:
        self._namespaces = namespaces
        self._stores = stores
        self._have_token = have_token

    async def prepare_selected(self, namespace: str) -> None:
        """Prepare a namespace for pods that somebody else made."""
        await self._have_token(namespace)

    async def prepare(
        self, manifest: Manifest, path: tuple[str, ...] | None = None, *, is_repeated: bool = False
    ) -> bool:
        """Prepare a namespace for the pods of an object; whether they are to be restricted.

        What is known of the namespace does not count for a launch that was refused before.
        """
        workload = WorkloadManifest.parse(manifest, path)
        namespace: str = manifest["metadata"]["namespace"]
        accounts = [*dict.fromkeys(_account(template) for template in workload.templates)]
        for account in accounts:
            await self._namespaces.prepare(namespace, account)
        for template in workload.templates:
            found = desired_pods.read_attached(template.spec, template.container)
            version = await check_attached(self._stores, namespace, found)
            agent.note_secrets(template, version)
        workload.write_templates()
        return await self._namespaces.is_restricted(
            namespace, accounts[0], is_asked_anew=is_repeated
        )


def _account(template: PodTemplate) -> str:
    """The service account of the pods; the default of Kubernetes if the manifest names none."""
    # `serviceAccount` is what it was called before.
    found = template.spec.get("serviceAccountName") or template.spec.get("serviceAccount")
    if found is None and template.kind.is_custom:
        return "default"
    return str(found or SERVICE_ACCOUNT)


async def beside(
    client: Client,
    manifest: Manifest,
    runtime: Runtime,
    root_images: Collection[str] | None = None,
) -> list[Manifest]:
    """The objects to apply before an equipped object, which refers to them."""
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
        where = "" if namespace is None else f" in namespace {namespace!r}"
        error = KubernetesNotFoundError(
            f"the TrainJob {manifest['metadata']['name']!r} names the runtime {name!r}, and there "
            f"is no such {kind}{where}",
            hint=f"kubectl get {resource} lists them",
        )
        error.resource, error.namespace, error.name = str(resource), namespace, name
        error.verb, error.status_code, error.reason = "get", 404, "NotFound"
        raise error from None
