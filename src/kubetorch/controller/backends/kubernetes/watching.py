"""The pods of all workloads, as they change.

One informer has every pod with our label. A workload whose pods lack it (pods that somebody else
made, kinds whose operator does not pass labels on) has an informer of its own. A deploy may change
by which labels its pods are found: those that only the earlier ones chose are no pods of it then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AsyncExitStack

from kubetorch.controller.backends.kubernetes import statuses
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Selection
from kubetorch.k8s.watching import ADDED, DELETED, Change
from kubetorch.manifests import labels

#: Namespace and name of a workload.
Key = tuple[str, str]
#: Seconds until all pods have to be known.
LIST_TIMEOUT = 30.0


class PodWatch:
    """Knows the pods of workloads.

    Args:
        client: Asks the API server.
        on_change: Told of each workload whose pods changed, once for all changes of a moment.
        on_gone: Told of each pod that is gone.
        namespaces: Where to look; everywhere if there are none.
    """

    def __init__(
        self,
        client: Client,
        on_change: Callable[[Key], None],
        on_gone: Callable[[Object], None],
        *,
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._client = client
        self._on_change = on_change
        self._on_gone = on_gone
        self._namespaces = namespaces
        self._stack = AsyncExitStack()
        self._informers: list[Informer] = []
        self._pods: dict[Key, dict[str, Object]] = {}
        self._ordinals: dict[Key, dict[str, int]] = {}
        self._selected: dict[Key, tuple[str, Informer]] = {}
        self._dirty: set[Key] = set()
        # Whose change concerns pods, and where it concerns those without a node.
        self._nodes: set[str] = set()
        self._waiting: set[str | None] = set()

    async def start(self) -> None:
        """Know all pods with our label.

        Raises:
            KubernetesError: They cannot be listed.
        """
        for namespace in self._namespaces or (None,):
            selection = Selection(PODS, namespace, labels=labels.SERVICE)
            informer = Informer(self._client, selection, self._changed)
            self._informers.append(await self._stack.enter_async_context(informer))
        await asyncio.gather(*(one.listed(timeout=LIST_TIMEOUT) for one in self._informers))

    async def close(self) -> None:
        """Stop watching."""
        for _, informer in self._selected.values():
            await informer.close()
        await self._stack.aclose()

    # ---------------------------------------------------------------------------------- questions

    def of(self, key: Key) -> Mapping[str, Object]:
        """The pods of a workload by name."""
        return self._pods.get(key, {})

    def named(self, namespace: str, name: str) -> Object | None:
        """A pod, of whatever workload."""
        return next((self._pods[key][name] for key in self.whose(namespace, name)), None)

    def whose(self, namespace: str, name: str) -> list[Key]:
        """The workloads that a pod is of: more than one may select it."""
        mine = ((key, pods) for key, pods in self._pods.items() if key[0] == namespace)
        return [key for key, pods in mine if name in pods]

    def ordinals(self, key: Key) -> Mapping[str, int]:
        """The numbers of these pods."""
        return self._ordinals.get(key, {})

    # ----------------------------------------------------------------------------- other selectors

    async def select(self, key: Key, selector: Mapping[str, str]) -> None:
        """Take the pods with these labels for those of a workload.

        Raises:
            KubernetesError: They cannot be listed.
        """
        text = ",".join(f"{name}={value}" for name, value in sorted(selector.items()))
        if selector == {labels.SERVICE: key[1]}:
            await self.forget(key)
            return
        there = self._selected.get(key)
        if there is not None and there[0] == text:
            return
        informer = Informer(
            self._client,
            Selection(PODS, key[0], labels=text),
            lambda change: self._put_selected(key, text, change),
        )
        await informer.__aenter__()
        try:
            await informer.listed(timeout=LIST_TIMEOUT)
        except BaseException:
            await informer.close()
            raise
        self._selected[key] = (text, informer)
        self._take(key, informer.objects.values())
        if there is not None:
            await there[1].close()

    async def forget(self, key: Key) -> None:
        """A workload is gone, or its pods are those with our label."""
        there = self._selected.pop(key, None)
        if there is not None:
            self._take(key, [*self._labelled(key)])
            await there[1].close()

    def _labelled(self, key: Key) -> Iterator[Object]:
        for informer in self._informers:
            for pod in informer.objects.values():
                if _named(pod) == key:
                    yield pod

    def _take(self, key: Key, pods: Iterable[Object]) -> None:
        """These are the pods of a workload, whichever it had before."""
        found = {pod["metadata"]["name"]: pod for pod in pods}
        for name, pod in [*self.of(key).items()]:
            if name not in found:
                self._drop(key, name)
                self._on_gone(pod)
        for pod in found.values():
            self._put(key, Change(ADDED, pod))
        self.mark(key)

    # ------------------------------------------------------------------------------------ changes

    def _changed(self, change: Change) -> None:
        key = _named(change.object)
        if key not in self._selected:
            self._put(key, change)

    def _put_selected(self, key: Key, text: str, change: Change) -> None:
        # Until all of them are listed, and once others are selected, these are not its pods.
        there = self._selected.get(key)
        if there is not None and there[0] == text:
            self._put(key, change)

    def _put(self, key: Key, change: Change) -> None:
        name = change.object["metadata"]["name"]
        if change.kind == DELETED:
            self._drop(key, name)
            self._on_gone(change.object)
        else:
            pods = self._pods.setdefault(key, {})
            pods[name] = change.object
            ordinals = self._ordinals.setdefault(key, {})
            if name not in ordinals:
                ordinals[name] = _free(change.object, pods, ordinals)
        self.mark(key)

    def _drop(self, key: Key, name: str) -> None:
        pods, ordinals = self._pods.get(key, {}), self._ordinals.get(key, {})
        pods.pop(name, None)
        ordinals.pop(name, None)
        if not pods:
            self._pods.pop(key, None)
            self._ordinals.pop(key, None)

    def mark(self, key: Key) -> None:
        """Something about a workload's pods is different: say so, with what else changes now."""
        self._tell_soon()
        self._dirty.add(key)

    def mark_node(self, name: str) -> None:
        """A node is different: it matters to the pods on it, and to those without a node."""
        self._tell_soon()
        self._nodes.add(name)

    def mark_waiting(self, namespace: str | None) -> None:
        """Something is different that matters to pods without a node, maybe in one namespace."""
        self._tell_soon()
        self._waiting.add(namespace)

    def _tell_soon(self) -> None:
        if not (self._dirty or self._nodes or self._waiting):
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        dirty, self._dirty = self._dirty, set()
        nodes, self._nodes = self._nodes, set()
        waiting, self._waiting = self._waiting, set()
        if nodes or waiting:
            is_all = bool(nodes) or None in waiting
            for key, pods in self._pods.items():
                if _concerns(nodes, is_all or key[0] in waiting, pods.values()):
                    dirty.add(key)
        for key in dirty:
            self._on_change(key)


def _concerns(nodes: Set[str], waiting: bool, pods: Iterable[Object]) -> bool:
    """Whether any of these pods is on one of the nodes, or waits for one when that matters."""
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if name in nodes or (waiting and not name):
            return True
    return False


def _named(pod: Object) -> Key:
    """The workload that our label on a pod names."""
    metadata = pod["metadata"]
    return metadata["namespace"], metadata["labels"][labels.SERVICE]


def _free(pod: Object, pods: Mapping[str, Object], ordinals: Mapping[str, int]) -> int:
    """The number of a new pod: its owner's, or the first that no pod has that stays."""
    given = statuses.index(pod)
    taken = {
        number
        for name, number in ordinals.items()
        if name in pods and not statuses.is_leaving(pods[name]) and not statuses.is_over(pods[name])
    }
    if given is not None and given not in taken:
        return given
    return next(number for number in _numbers() if number not in taken)


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
