"""The mark of the pod that leads, by which the Service and clients find it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from kubetorch.controller.cluster.settings import NAME
from kubetorch.errors import KubernetesNotFoundError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Selection
from kubetorch.manifests import labels

#: Labels of all pods of the controller.
PODS_OF_CONTROLLER = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=controller"
#: Seconds until pods that could not be marked are marked again.
PAUSE = 1.0

_log = logging.getLogger(__name__)


class Mark:
    """The pod that leads is marked, and no other; an asynchronous context manager.

    The pods are watched, because one that lost the lead a moment ago may have been about to mark
    itself. A process that is no pod of the installation, such as a test's, marks nothing. When it
    is left, the mark stays until the next one leads.

    Args:
        client: Asks the API server.
        namespace: Namespace that Kubetorch is installed in.
        identity: Name of the pod that leads.
        won: Waits until it does, and for ever if another one does by now.
    """

    def __init__(
        self, client: Client, namespace: str, identity: str, won: Callable[[], Awaitable[None]]
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._won = won
        self._changed = asyncio.Event()
        self._informer = Informer(
            client,
            Selection(PODS, namespace, labels=PODS_OF_CONTROLLER),
            lambda _: self._changed.set(),
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Mark:
        """Mark it.

        Raises:
            KubernetesError: It cannot be marked.
        """
        await self._mark()
        await self._informer.__aenter__()
        self._task = asyncio.create_task(self._keep(), name="mark")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._informer.close()

    async def _keep(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_right(self._informer.objects.values()):
                continue
            try:
                await self._mark()
            except KubetorchError as error:
                _log.warning("pod not marked pod=%s error=%s", self._identity, error)
                await asyncio.sleep(PAUSE)
                self._changed.set()

    def _is_right(self, pods: Iterable[Object]) -> bool:
        found = {one["metadata"]["name"]: one["metadata"].get("labels") or {} for one in pods}
        marked = {name: tags[labels.LEADS] for name, tags in found.items() if labels.LEADS in tags}
        return marked == ({self._identity: "true"} if self._identity in found else {})

    async def _mark(self) -> None:
        await self._won()
        selection = Selection(PODS, self._namespace, labels=f"{PODS_OF_CONTROLLER},{labels.LEADS}")
        for pod in (await self._client.list(selection)).items:
            if pod["metadata"]["name"] != self._identity:
                await self._patch(pod["metadata"]["name"], None)
        await self._patch(self._identity, "true")

    async def _patch(self, pod: str, value: str | None) -> None:
        patch: Object = {"metadata": {"labels": {labels.LEADS: value}}}
        try:
            await self._client.patch(Ref(PODS, pod, self._namespace), patch, field_manager=NAME)
        except KubernetesNotFoundError:
            return
