"""Removing Kubetorch from a cluster, so that nothing of ours is left.

    the controller ──► workloads, and what they own ──► what the controller made
      ──► what the chart made ──► the kind KubetorchWorkload ──► the namespace, if it is ours

The kind stays, as nobody's, where others have services: those would go with it. The controller goes
first: one that is at work would write down again what is deleted under it, and one that is dead is
then no special case.

Volumes and secrets of users stay unless the user says otherwise. An object that a user had before a
deploy took it over is put back as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kubetorch.errors import InstallError, KubernetesNotFoundError, KubernetesRequestError
from kubetorch.install import apply, releases, scope
from kubetorch.install.apply import Report
from kubetorch.install.readiness import NAME
from kubetorch.install.releases import Item
from kubetorch.install.scope import WORKLOADS, Scope
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Resource, Selection
from kubetorch.lib import deadlines
from kubetorch.manifests import labels

_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
_SECRETS = Resource("", "v1", "secrets", "Secret")


@dataclass(frozen=True)
class Kept:
    """The users' own."""

    volumes: tuple[Item, ...] = ()
    secrets: tuple[Item, ...] = ()


async def find(client: Client, scope: Scope) -> Kept:
    volumes, secrets = await asyncio.gather(
        scope.list(client, _CLAIMS, labels.VOLUME), scope.list(client, _SECRETS, labels.SECRET_NAME)
    )
    return Kept(_items(volumes), _items(secrets))


def _items(found: list[Object]) -> tuple[Item, ...]:
    return tuple(sorted(map(Item.of, found)))


#: Made by the controller in its own namespace.
_OF_CONTROLLER = (
    Item("v1", "Secret", "", "kubetorch-installation"),
    Item("coordination.k8s.io/v1", "Lease", "", NAME),
)
#: Requests that are under way at one time.
_AT_ONCE = 8


@dataclass(frozen=True)
class Removal:
    """The objects to remove, and the manner of their removal."""

    namespace: str
    scope: Scope
    timeout: float
    volumes: bool = False
    secrets: bool = False
    contents_only: bool = False


@dataclass
class Removed:
    items: list[Item] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    others: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


async def scope_of(client: Client, watched: list[str], namespace: str) -> Scope:
    """The namespaces whose workloads are an installation's.

    What another one names is that one's. Where the definition is another installation's, or
    another one works in all namespaces too, only its own namespace is surely this one's, whatever
    it was told.
    """
    others = [one.scope for one in await scope.others(client, namespace)]
    taken = {name for one in others for name in one.namespaces or ()}
    own = {namespace} - taken
    if watched:
        return Scope(tuple(sorted({*watched, *own})))
    definition = await apply.get(client, releases.DEFINITION)
    is_foreign = definition is not None and releases.owner(definition) not in (None, namespace)
    if is_foreign or any(one.namespaces is None for one in others):
        return Scope(tuple(own))
    return Scope(without=frozenset(taken))


async def remove(
    client: Client, removal: Removal, items: Iterable[Item], report: Report
) -> Removed:
    run = _Run(client, removal, report)
    try:
        async with deadlines.timeout(removal.timeout):
            return await run.all(list(items))
    except TimeoutError as error:
        raise InstallError(
            f"{run.waits_for or 'what was deleted'} is not gone within {removal.timeout:g} s",
            hint="kubectl describe says what holds it; then kt uninstall goes on where it was",
        ) from error


class _Run:
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
            first = [one for one in reversed(items) if not one.is_same_as(releases.DEFINITION)]
            await self._delete([one for one in first if await self._is_ours(one)])
        # The definition goes last: while it is there, nothing refers to a kind that is not.
        await self._definition()
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
        found = await self._removal.scope.workloads(self._client)
        await self._put_back(await self._find(labels.SERVICE, _is_taken_over))
        owned = await self._find(labels.SERVICE, _is_of_workload)
        for one in found:
            if one["metadata"].get("finalizers"):
                ref = Ref(WORKLOADS, one["metadata"]["name"], one["metadata"]["namespace"])
                await self._client.patch(ref, {"metadata": {"finalizers": None}})
        await self._delete([Item.of(one) for one in found])
        await self._delete([Item.of(one) for one in owned])

    async def _put_back(self, taken: list[Object]) -> None:
        """Have objects that users had before their deploys be what they were."""
        # Few installations have any.
        from kubetorch.controller.backends.kubernetes.apply import Applier  # noqa: PLC0415

        applier = Applier(self._client)
        for one in taken:
            left = await applier.delete_applied(await applier.ref(one))
            if left is not None:
                self._report(f"left {left}")

    async def _managed(self) -> None:
        """Delete what the controller made in the namespaces of workloads."""
        selector = ",".join(f"{name}={value}" for name, value in labels.MANAGED.items())
        found = await self._find(selector, _is_of_controller)
        await self._delete([Item.of(one) for one in found])

    async def _definition(self) -> None:
        """Delete the definition, which takes every workload of the cluster along."""
        found = await apply.get(self._client, releases.DEFINITION)
        if found is None or not self._owns(found):
            return
        if not found["metadata"].get("deletionTimestamp") and (others := await self._others()):
            await releases.give_up(self._client, found)
            self._done.others = others
            self._report(f"kept {releases.DEFINITION}")
        else:
            await self._delete([releases.DEFINITION])

    async def _others(self) -> list[str]:
        """The other installations that need the definition; those of this one are gone by now."""
        beside = await scope.others(self._client, self._removal.namespace)
        found = [f"the Kubetorch in namespace {one.namespace}" for one in beside]
        try:
            left = await Scope().list(self._client, WORKLOADS)
        except KubernetesNotFoundError:
            return [*found, f"{WORKLOADS} that are not of version {WORKLOADS.version}"]
        return [*found, *scope.names(left)]

    async def _users(self) -> None:
        removal = self._removal
        found = await find(self._client, removal.scope)
        gone = [*(found.volumes if removal.volumes else ())]
        gone += found.secrets if removal.secrets else ()
        await self._delete(gone)
        self._done.kept = Kept(
            () if removal.volumes else found.volumes, () if removal.secrets else found.secrets
        )

    async def _find(self, selector: str, wanted: Callable[[Object], bool]) -> list[Object]:
        """Objects of ours; the controller could not have made what cannot be seen either."""
        found, _ = await self._search(selector, self._removal.scope)
        return list(filter(wanted, found))

    async def _search(self, selector: str, where: Scope) -> tuple[list[Object], list[str]]:
        """Objects of every kind of the cluster that lies in namespaces, and what was not seen."""
        served = await self._client.discovery.everything("list", "delete")
        unseen = [f"kinds of {version}" for version in served.unanswered]

        async def search(resource: Resource) -> list[Object]:
            async with self._limit:
                try:
                    return await where.list(self._client, resource, selector)
                except KubernetesRequestError as error:
                    # The server of a kind is away, or this user may not see it.
                    if error.status_code not in _NOT_TO_BE_SEEN:
                        raise
                    unseen.append(str(resource))
                    return []

        found = await asyncio.gather(*(search(one) for one in served.kinds if one.is_namespaced))
        return [item for items in found for item in items], unseen

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
        """The objects of other owners in the namespace, or the reason why they are unknown."""
        found, unseen = await self._search("", Scope((namespace,)))
        # Some kinds are served by two groups.
        left = {f"{one['kind']} {one['metadata']['name']}" for one in found if _is_left(one)}
        # A kind whose definition has just gone may still be announced for a moment.
        is_defined = await apply.get(self._client, releases.DEFINITION) is not None
        ours = () if is_defined else (str(WORKLOADS), f"kinds of {WORKLOADS.api_version}")
        return sorted(left) + [f"cannot see {one}" for one in sorted({*unseen} - {*ours})]

    # ------------------------------------------------------------------------------- deleting

    async def _is_ours(self, item: Item) -> bool:
        found = await apply.get(self._client, item)
        return found is not None and self._owns(found)

    def _owns(self, found: Object) -> bool:
        manager = releases.HELM if self._removal.contents_only else releases.OURS
        return releases.is_of(found, self._removal.namespace, manager)

    async def _delete(self, items: list[Item]) -> None:
        """Delete objects with all that they own, and wait until they are gone."""
        await asyncio.gather(*map(self._begin, items))
        for item in items:
            await self._gone(item)

    async def _begin(self, item: Item) -> None:
        ref = await apply.find(self._client, item)
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
        ref = await apply.find(self._client, item)
        if ref is None or await apply.get(self._client, item) is None:
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


def _is_left(found: Object) -> bool:
    """True if an object is neither in every namespace nor deleted with another object."""
    metadata, kind = found["metadata"], found["kind"]
    is_default = (kind, metadata["name"]) in _DEFAULTS or kind in _OF_NO_CONSEQUENCE
    is_going = "deletionTimestamp" in metadata or bool(metadata.get("ownerReferences"))
    return not is_default and not is_going


def _is_of_controller(found: Object) -> bool:
    """True if the controller made an object for itself: claims and secrets belong to users."""
    metadata = found["metadata"]
    is_of_user = (
        found["kind"] == "PersistentVolumeClaim" or labels.SECRET_NAME in metadata["labels"]
    )
    return not is_of_user and not metadata.get("ownerReferences")


def _is_taken_over(found: Object) -> bool:
    """True if an object was a user's before a deploy; what it makes has its annotations, too."""
    metadata = found["metadata"]
    is_recorded = labels.BEFORE in (metadata.get("annotations") or {})
    return is_recorded and not metadata.get("ownerReferences")


def _is_of_workload(found: Object) -> bool:
    """True if an object is deleted with a workload."""
    owners = found["metadata"].get("ownerReferences") or []
    return any(
        owner["kind"] == WORKLOADS.kind and owner["apiVersion"].startswith(WORKLOADS.group)
        for owner in owners
    )
