"""Removing Kubetorch from a cluster, so that nothing of ours is left.

    the controller ──► workloads, and what they own ──► what the controller made
      ──► what the chart made ──► the kind KubetorchWorkload ──► the namespace, if it is ours

The controller goes first: one that is at work would write down again what is deleted under it, and
one that is dead is then no special case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kubetorch.errors import InstallError, KubernetesNotFoundError, KubernetesRequestError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Resource, Selection
from kubetorch.lib import deadlines
from kubetorch.manifests import labels
from kubetorch.sdk.installing import applying, kept, ownership, releases
from kubetorch.sdk.installing.applying import Report
from kubetorch.sdk.installing.readiness import NAME
from kubetorch.sdk.installing.releases import Item
from kubetorch.sdk.installing.scope import Scope

#: The kind of a workload's own object.
WORKLOADS = Resource(
    "kubetorch.com", "v1alpha1", "kubetorchworkloads", "KubetorchWorkload", is_namespaced=True
)
#: Made by the controller in its own namespace.
_OF_CONTROLLER = (
    Item("v1", "Secret", "", "kubetorch-installation"),
    Item("coordination.k8s.io/v1", "Lease", "", NAME),
)
#: Requests that are under way at one time.
_AT_ONCE = 8


@dataclass(frozen=True)
class Removal:
    """What is removed, and how.

    Attributes:
        namespace: Of the installation.
        scope: Where its workloads are.
        timeout: Seconds for what is deleted to be gone.
        volumes, secrets: Whether those of users are deleted too.
        contents_only: Leave what the chart made: helm deletes that itself.
    """

    namespace: str
    scope: Scope
    timeout: float
    volumes: bool = False
    secrets: bool = False
    contents_only: bool = False


@dataclass
class Removed:
    """What was removed.

    Attributes:
        items: In the order in which they went.
        kept: What users keep.
        leftovers: Why the namespace of the installation is still there; empty if it is gone, or
            never was ours.
    """

    items: list[Item] = field(default_factory=list)
    kept: kept.Kept = field(default_factory=kept.Kept)
    leftovers: list[str] = field(default_factory=list)


async def scope_of(client: Client, watched: list[str], namespace: str) -> Scope:
    """The namespaces whose workloads are an installation's.

    Where the definition is another installation's, those of all namespaces are not this one's,
    whatever it was told.

    Args:
        client: Asks the server.
        watched: Its value `watchNamespaces`.
        namespace: Where its controller is.
    """
    if watched:
        return Scope.of(watched, namespace)
    definition = await applying.get(client, releases.DEFINITION)
    is_foreign = definition is not None and ownership.owner(definition) not in (None, namespace)
    return Scope((namespace,)) if is_foreign else Scope()


async def remove(
    client: Client, removal: Removal, items: Iterable[Item], report: Report
) -> Removed:
    """Remove an installation.

    Args:
        client: Asks the server.
        removal: What, and how.
        items: The objects of the chart, in the order in which they were applied.
        report: Told each object that went.

    Raises:
        InstallError: Something is not gone in time.
        KubernetesError: The server refused.
    """
    run = _Run(client, removal, report)
    try:
        async with deadlines.timeout(removal.timeout):
            return await run.all(list(items))
    except TimeoutError as error:
        raise InstallError(
            f"{run.waits_for or 'what was deleted'} is not gone within {removal.timeout:g} s",
            hint="kubectl describe tells what holds it; then kt uninstall goes on where it was",
        ) from error


class _Run:
    """One removal at work."""

    def __init__(self, client: Client, removal: Removal, report: Report) -> None:
        self._client = client
        self._removal = removal
        self._report = report
        self._done = Removed()
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self.waits_for = ""

    async def all(self, items: list[Item]) -> Removed:
        removal, where = self._removal, self._removal.namespace
        await self._delete([Item("apps/v1", "Deployment", where, NAME)])
        await self._workloads()
        await self._managed()
        if not removal.contents_only:
            # The definition goes last: while it is there, nothing refers to a kind that is not.
            first = [one for one in reversed(items) if one.kind != releases.DEFINITION.kind]
            await self._delete([one for one in first if await self._is_ours(one)])
            last = [one for one in items if one.kind == releases.DEFINITION.kind]
            await self._delete([one for one in last if await self._is_ours(one)])
        await self._delete(
            [Item(one.api_version, one.kind, where, one.name) for one in _OF_CONTROLLER]
        )
        await self._users()
        if not removal.contents_only:
            await releases.forget(self._client, where)
            await self._namespace()
        return self._done

    # ------------------------------------------------------------------------------ workloads

    async def _workloads(self) -> None:
        """Delete workloads and wait until all that they own is gone."""
        found = await self._removal.scope.list(self._client, WORKLOADS, "")
        owned = await self._search(labels.SERVICE, _is_of_workload)
        for one in found:
            if one["metadata"].get("finalizers"):
                ref = Ref(WORKLOADS, one["metadata"]["name"], one["metadata"]["namespace"])
                await self._client.patch(ref, {"metadata": {"finalizers": None}})
        await self._delete([Item.of(one) for one in found])
        await self._delete([Item.of(one) for one in owned])

    async def _managed(self) -> None:
        """Delete what the controller made in the namespaces of workloads."""
        selector = f"{releases.MANAGED_BY}={releases.OURS},!{releases.INSTALL_NAMESPACE}"
        found = await self._search(selector, lambda one: not one["metadata"].get("ownerReferences"))
        await self._delete([Item.of(one) for one in found])

    async def _users(self) -> None:
        removal = self._removal
        found = await kept.find(self._client, removal.scope)
        gone = [*(found.volumes if removal.volumes else ())]
        gone += found.secrets if removal.secrets else ()
        await self._delete(gone)
        self._done.kept = kept.Kept(
            () if removal.volumes else found.volumes, () if removal.secrets else found.secrets
        )

    async def _search(
        self, selector: str, wanted: Callable[[Object], bool], scope: Scope | None = None
    ) -> list[Object]:
        """Objects of every kind of the cluster that lies in namespaces."""
        kinds = await self._client.discovery.everything("list", "delete")
        where = scope or self._removal.scope

        async def search(resource: Resource) -> list[Object]:
            async with self._limit:
                try:
                    return await where.list(self._client, resource, selector)
                except KubernetesRequestError as error:
                    # The server of a kind is away, or this user may not see it: nothing of ours is
                    # hidden there, for the controller could not have made it either.
                    if error.status_code not in _NOT_TO_BE_SEEN:
                        raise
                    return []

        found = await asyncio.gather(*(search(one) for one in kinds if one.is_namespaced))
        return [item for items in found for item in items if wanted(item)]

    # -------------------------------------------------------------------------- the namespace

    async def _namespace(self) -> None:
        """Delete the namespace, if `kt install` made it and nothing is left in it."""
        item = Item("v1", "Namespace", "", self._removal.namespace)
        if not await self._is_ours(item):
            return
        left = await self._left_in(item.name)
        if left:
            self._done.leftovers = left
        else:
            await self._delete([item])

    async def _left_in(self, namespace: str) -> list[str]:
        """What somebody else has in the namespace."""
        found = await self._search("", _is_of_somebody, Scope((namespace,)))
        # Some kinds are served by two groups.
        return sorted({f"{one['kind']} {one['metadata']['name']}" for one in found})

    # ------------------------------------------------------------------------------- deleting

    async def _is_ours(self, item: Item) -> bool:
        found = await applying.get(self._client, item)
        return found is not None and ownership.is_of(found, self._removal.namespace)

    async def _delete(self, items: list[Item]) -> None:
        """Delete objects with all that they own, and wait until they are gone."""
        await asyncio.gather(*map(self._begin, items))
        for item in items:
            await self._gone(item)

    async def _begin(self, item: Item) -> None:
        ref = await applying.find(self._client, item)
        if ref is None:
            return
        async with self._limit:
            try:
                await self._client.delete(ref, propagation="Foreground")
            except KubernetesNotFoundError:
                return
        self._done.items.append(item)
        self._report(f"deleted {item}")

    async def _gone(self, item: Item) -> None:
        ref = await applying.find(self._client, item)
        if ref is None or await applying.get(self._client, item) is None:
            return
        self.waits_for = str(item)
        selection = Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")
        async with Informer(self._client, selection) as there:
            await there.until(lambda found: not found, timeout=self._removal.timeout)


#: What is in every namespace.
_DEFAULTS = (("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default"))
#: Statuses of a list that cannot be had.
_NOT_TO_BE_SEEN = (403, 404, 405, 503)
#: Kinds that come and go with others, or say what happened.
_OF_NO_CONSEQUENCE = (
    "Event",
    "EndpointSlice",
    "Endpoints",
    "Lease",
    "PodMetrics",
    "ControllerRevision",
)


def _is_of_somebody(found: Object) -> bool:
    """Whether an object is neither in every namespace nor goes with another one."""
    metadata, kind = found["metadata"], found["kind"]
    is_default = (kind, metadata["name"]) in _DEFAULTS or kind in _OF_NO_CONSEQUENCE
    is_going = "deletionTimestamp" in metadata or bool(metadata.get("ownerReferences"))
    return not is_default and not is_going


def _is_of_workload(found: Object) -> bool:
    """Whether an object goes away with a workload."""
    owners = found["metadata"].get("ownerReferences") or []
    return any(
        owner["kind"] == WORKLOADS.kind and owner["apiVersion"].startswith(WORKLOADS.group)
        for owner in owners
    )
