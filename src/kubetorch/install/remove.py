"""Removing Kubetorch from a cluster, so that nothing of ours is left.

    the controller ──► workloads, and what they own ──► what the controller made
      ──► what the chart made ──► the kind KubetorchWorkload ──► the namespace, if it is ours

The kind stays, without an owner, where other installations have services, which would be deleted
with it. The controller goes first: a live one would make deleted objects again, and a dead one is
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
from kubetorch.install.readiness import NAME, STORE
from kubetorch.install.releases import Item
from kubetorch.install.scope import WORKLOADS, Scope
from kubetorch.install.tuning import LIMITS
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Resource, Selection
from kubetorch.lib import deadlines
from kubetorch.manifests import labels

_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
_SECRETS = Resource("", "v1", "secrets", "Secret")


@dataclass(frozen=True)
class UserObjects:
    """Volumes and secrets that users made."""

    volumes: tuple[Item, ...] = ()
    secrets: tuple[Item, ...] = ()


async def find(client: Client, scope: Scope) -> UserObjects:
    volumes, secrets = await asyncio.gather(
        scope.list(client, _CLAIMS, labels.VOLUME), scope.list(client, _SECRETS, labels.SECRET_NAME)
    )
    return UserObjects(_items_of(volumes), _items_of(secrets))


def _items_of(manifests: list[Object]) -> tuple[Item, ...]:
    return tuple(sorted(map(Item.of, manifests)))


#: Objects that the controller and a data store of its own make in their namespace.
_CONTROLLER_OBJECTS = (
    Item("v1", "Secret", "", "kubetorch-installation"),
    Item("coordination.k8s.io/v1", "Lease", "", NAME),
    Item("coordination.k8s.io/v1", "Lease", "", STORE.name),
)


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
    """The result of a removal.

    Attributes:
        items: The deleted objects.
        user_objects: Objects of users that stay.
        definition_users: Workloads and installations that need the definition, which then stays.
        leftovers: Objects in the namespace, which then stays.
    """

    items: list[Item] = field(default_factory=list)
    user_objects: UserObjects = field(default_factory=UserObjects)
    definition_users: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


async def scope_of(client: Client, watched: list[str], namespace: str) -> Scope:
    """The namespaces whose workloads belong to an installation.

    A namespace that another installation names belongs to that one. Where the definition belongs to
    another installation, or another installation watches all namespaces too, only the own namespace
    surely belongs to it.
    """
    other_scopes = [
        installation.scope
        for installation in await scope.find_other_installations(client, namespace)
    ]
    taken = {name for other_scope in other_scopes for name in other_scope.namespaces or ()}
    own_namespace = {namespace} - taken
    if watched:
        return Scope(tuple(sorted({*watched, *own_namespace})))
    definition = await apply.get(client, releases.DEFINITION)
    is_foreign = definition is not None and releases.owner(definition) not in (None, namespace)
    if is_foreign or any(other_scope.namespaces is None for other_scope in other_scopes):
        return Scope(tuple(own_namespace))
    return Scope(excluded=frozenset(taken))


async def remove(
    client: Client, removal: Removal, items: Iterable[Item], report: Report
) -> Removed:
    run = _Run(client, removal, report)
    try:
        async with deadlines.timeout(removal.timeout):
            return await run.remove_all(list(items))
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
        self._removed = Removed()
        self._limit = asyncio.Semaphore(LIMITS.concurrent_requests)
        self.waits_for = ""

    async def remove_all(self, items: list[Item]) -> Removed:
        removal, where = self._removal, self._removal.namespace
        await self._delete([Item("apps/v1", "Deployment", where, NAME)])
        await self._delete_workloads()
        await self._delete_managed()
        if not removal.contents_only:
            chart_items = [
                item for item in reversed(items) if not item.is_same_as(releases.DEFINITION)
            ]
            await self._delete([item for item in chart_items if await self._is_ours(item)])
        # The definition goes last: while it exists, no object is of an undefined kind.
        await self._delete_definition()
        await self._delete(
            [Item(item.api_version, item.kind, where, item.name) for item in _CONTROLLER_OBJECTS]
        )
        await self._delete_user_objects()
        if not removal.contents_only:
            await releases.forget(self._client, where)
            await self._delete_namespace()
        return self._removed

    # ------------------------------------------------------------------------------ workloads

    async def _delete_workloads(self) -> None:
        """Delete workloads, and wait until all objects that they own are deleted."""
        workloads = await self._removal.scope.workloads(self._client)
        await self._put_back(await self._find(labels.SERVICE, _is_taken_over))
        owned = await self._find(labels.SERVICE, _is_of_workload)
        for workload in workloads:
            if workload["metadata"].get("finalizers"):
                ref = Ref(
                    WORKLOADS, workload["metadata"]["name"], workload["metadata"]["namespace"]
                )
                await self._client.patch(ref, {"metadata": {"finalizers": None}})
        await self._delete([Item.of(workload) for workload in workloads])
        await self._delete([Item.of(owned_object) for owned_object in owned])

    async def _put_back(self, taken: list[Object]) -> None:
        """Restore objects that users had before their deploys."""
        # Few installations have any.
        from kubetorch.controller.backends.kubernetes.apply import Applier  # noqa: PLC0415

        applier = Applier(self._client)
        for taken_object in taken:
            remaining = await applier.delete_applied(await applier.ref(taken_object))
            if remaining is not None:
                self._report(f"left {remaining}")

    async def _delete_managed(self) -> None:
        """Delete the controller's objects in the namespaces of workloads."""
        selector = ",".join(f"{name}={value}" for name, value in labels.MANAGED.items())
        manifests = await self._find(selector, _is_of_controller)
        await self._delete([Item.of(manifest) for manifest in manifests])

    async def _delete_definition(self) -> None:
        """Delete the definition, unless other installations or workloads need it."""
        definition = await apply.get(self._client, releases.DEFINITION)
        if definition is None or not self._owns(definition):
            return
        if not definition["metadata"].get("deletionTimestamp") and (
            definition_users := await self._find_definition_users()
        ):
            await releases.give_up(self._client, definition)
            self._removed.definition_users = definition_users
            self._report(f"kept {releases.DEFINITION}")
        else:
            await self._delete([releases.DEFINITION])

    async def _find_definition_users(self) -> list[str]:
        """Other installations, and workloads of the cluster, this one's being deleted by now."""
        other_installations = await scope.find_other_installations(
            self._client, self._removal.namespace
        )
        users = [
            f"the Kubetorch in namespace {installation.namespace}"
            for installation in other_installations
        ]
        try:
            workloads = await Scope().list(self._client, WORKLOADS)
        except KubernetesNotFoundError:
            return [*users, f"{WORKLOADS} that are not of version {WORKLOADS.version}"]
        return [*users, *scope.workload_names(workloads)]

    async def _delete_user_objects(self) -> None:
        removal = self._removal
        user_objects = await find(self._client, removal.scope)
        deleted_items = [*(user_objects.volumes if removal.volumes else ())]
        deleted_items += user_objects.secrets if removal.secrets else ()
        await self._delete(deleted_items)
        self._removed.user_objects = UserObjects(
            () if removal.volumes else user_objects.volumes,
            () if removal.secrets else user_objects.secrets,
        )

    async def _find(self, selector: str, is_wanted: Callable[[Object], bool]) -> list[Object]:
        """Objects of ours in the scope; the controller cannot make kinds that cannot be listed."""
        manifests, _ = await self._search(selector, self._removal.scope)
        return list(filter(is_wanted, manifests))

    async def _search(self, selector: str, where: Scope) -> tuple[list[Object], list[str]]:
        """Objects of every namespaced kind of the cluster, and the kinds that cannot be listed."""
        served = await self._client.discovery.all_kinds("list", "delete")
        unseen = [f"kinds of {version}" for version in served.unanswered]

        async def search(resource: Resource) -> list[Object]:
            async with self._limit:
                try:
                    return await where.list(self._client, resource, selector)
                except KubernetesRequestError as error:
                    # The server of a kind is away, or this user may not list the kind.
                    if error.status_code not in _UNLISTABLE_STATUSES:
                        raise
                    unseen.append(str(resource))
                    return []

        listings = await asyncio.gather(
            *(search(resource) for resource in served.kinds if resource.is_namespaced)
        )
        return [item for items in listings for item in items], unseen

    # -------------------------------------------------------------------------- the namespace

    async def _delete_namespace(self) -> None:
        """Delete the namespace, if `kt install` made it and no object is left in it."""
        item = Item("v1", "Namespace", "", self._removal.namespace)
        if not await self._is_ours(item):
            return
        leftovers = await self._find_leftovers(item.name)
        if leftovers:
            self._removed.leftovers = leftovers
        else:
            await self._delete([item])

    async def _find_leftovers(self, namespace: str) -> list[str]:
        """The objects of other owners in the namespace, or the reason why they are unknown."""
        manifests, unseen = await self._search("", Scope((namespace,)))
        # Some kinds are served by two groups.
        leftovers = {
            f"{manifest['kind']} {manifest['metadata']['name']}"
            for manifest in manifests
            if _is_leftover(manifest)
        }
        # A kind whose definition has just gone may still be announced for a moment.
        is_defined = await apply.get(self._client, releases.DEFINITION) is not None
        ours = () if is_defined else (str(WORKLOADS), f"kinds of {WORKLOADS.api_version}")
        return sorted(leftovers) + [
            f"cannot see {unseen_kind}" for unseen_kind in sorted({*unseen} - {*ours})
        ]

    # ------------------------------------------------------------------------------- deleting

    async def _is_ours(self, item: Item) -> bool:
        manifest = await apply.get(self._client, item)
        return manifest is not None and self._owns(manifest)

    def _owns(self, manifest: Object) -> bool:
        manager = releases.HELM if self._removal.contents_only else releases.OURS
        return releases.is_of(manifest, self._removal.namespace, manager)

    async def _delete(self, items: list[Item]) -> None:
        """Delete objects with all that they own, and wait until they are deleted."""
        await asyncio.gather(*map(self._start_deletion, items))
        for item in items:
            await self._wait_until_gone(item)

    async def _start_deletion(self, item: Item) -> None:
        ref = await apply.find(self._client, item)
        if ref is None:
            return
        async with self._limit:
            try:
                await self._client.delete(ref, propagation="Foreground")
            except KubernetesNotFoundError:
                return
        self._removed.items.append(item)
        self._report(f"deleted {item}")

    async def _wait_until_gone(self, item: Item) -> None:
        ref = await apply.find(self._client, item)
        if ref is None or await apply.get(self._client, item) is None:
            return
        self.waits_for = str(item)
        selection = Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")
        async with Informer(self._client, selection) as informer:
            await informer.until(lambda objects: not objects, timeout=self._removal.timeout)


#: Objects of every namespace.
_NAMESPACE_DEFAULTS = (("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default"))
#: Statuses of the list of a kind that is not served or not allowed.
_UNLISTABLE_STATUSES = (403, 404, 405, 503)
#: Kinds that come and go with other objects, or are records of events.
_TRANSIENT_KINDS = (
    "Event",
    "EndpointSlice",
    "Endpoints",
    "Lease",
    "PodMetrics",
    "ControllerRevision",
)


def _is_leftover(manifest: Object) -> bool:
    """True if an object is neither in every namespace nor deleted with another object."""
    metadata, kind = manifest["metadata"], manifest["kind"]
    is_default = (kind, metadata["name"]) in _NAMESPACE_DEFAULTS or kind in _TRANSIENT_KINDS
    is_going = "deletionTimestamp" in metadata or bool(metadata.get("ownerReferences"))
    return not is_default and not is_going


def _is_of_controller(manifest: Object) -> bool:
    """True if the controller made an object for itself: claims and secrets belong to users."""
    metadata = manifest["metadata"]
    is_of_user = (
        manifest["kind"] == "PersistentVolumeClaim" or labels.SECRET_NAME in metadata["labels"]
    )
    return not is_of_user and not metadata.get("ownerReferences")


def _is_taken_over(manifest: Object) -> bool:
    """True if an object was a user's before a deploy; objects that it owns copy its annotations."""
    metadata = manifest["metadata"]
    is_recorded = labels.BEFORE in (metadata.get("annotations") or {})
    return is_recorded and not metadata.get("ownerReferences")


def _is_of_workload(manifest: Object) -> bool:
    """True if an object is deleted with a workload."""
    owners = manifest["metadata"].get("ownerReferences") or []
    return any(
        owner["kind"] == WORKLOADS.kind and owner["apiVersion"].startswith(WORKLOADS.group)
        for owner in owners
    )
