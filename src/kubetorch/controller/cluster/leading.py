"""The mark of the pod that leads, by which the Service and clients find it."""

from __future__ import annotations

from kubetorch.controller.cluster.settings import NAME
from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref, Selection
from kubetorch.manifests import labels

#: Labels of all pods of the controller.
PODS_OF_CONTROLLER = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=controller"


async def mark(client: Client, namespace: str, identity: str) -> None:
    """Mark the pod that leads from now on, and no other.

    A process that is no pod of the installation, such as a test's, marks nothing.

    Args:
        client: Asks the API server.
        namespace: Namespace that Kubetorch is installed in.
        identity: Name of the pod.

    Raises:
        KubernetesError: They cannot be marked.
    """
    marked = Selection(PODS, namespace, f"{PODS_OF_CONTROLLER},{labels.LEADS}")
    for pod in (await client.list(marked)).items:
        if pod["metadata"]["name"] != identity:
            await _patch(client, namespace, pod["metadata"]["name"], None)
    await _patch(client, namespace, identity, "true")


async def _patch(client: Client, namespace: str, pod: str, value: str | None) -> None:
    patch: Object = {"metadata": {"labels": {labels.LEADS: value}}}
    try:
        await client.patch(Ref(PODS, pod, namespace), patch, field_manager=NAME)
    except KubernetesNotFoundError:
        return
