"""Objects that an earlier spec of a workload had made and its present one has no use for.

A spec of another kind makes other objects. Those of before would go on beside them, with their pods
and GPUs, and their names may be in the way: of a Service of ours where the new kind's controller
makes its own, or of what the old kind's controller made. So they go first, but not before the API
server has said that it would take the new ones. They are found by their labels, so that a
controller which starts in between finds them, too.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from kubetorch.controller.backends.kubernetes.applied import Applied, identities, identity
from kubetorch.controller.backends.kubernetes.applying import Applier, controller_of, is_own
from kubetorch.controller.backends.kubernetes.insisting import Insisting, Wish
from kubetorch.controller.backends.kubernetes.watching import Key
from kubetorch.errors import KubernetesForbiddenError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import SERVICES, Object, Ref, Resource, Selection
from kubetorch.manifests import kinds, labels, trainjob
from kubetorch.manifests.kinds import KINDS, Manifest

_T = TypeVar("_T")

# What a deploy may make, with its versions: never volumes or secrets.
_VERSIONS: dict[tuple[str, str], tuple[str, ...]] = {
    **{(row.group, row.kind): row.versions for row in KINDS.values()},
    ("", "Service"): ("v1",),
    (trainjob.GROUP, trainjob.RUNTIME_KIND): KINDS["TrainJob", trainjob.GROUP].versions,
}
# Owners between an object and what it owns: a Knative Service, its Route, that one's Service.
_DEPTH = 4

_log = logging.getLogger(__name__)


class Replacing:
    """Removes what an earlier spec left, to make room for what is wanted.

    Args:
        client: Asks the API server.
        applier: Applies and deletes.
        insisting: Asks again while the API server cannot say.
    """

    def __init__(self, client: Client, applier: Applier, insisting: Insisting) -> None:
        self._client = client
        self._applier = applier
        self._insisting = insisting

    async def make_room(self, key: Key, wish: Wish, before: Applied | None) -> None:
        """Remove what is not wanted any more, once the API server would take what is.

        Args:
            key: The workload.
            wish: What is wanted; nothing is known to be there if anything was removed.
            before: What was applied before, which goes on until then; `None` if there was nothing.

        Raises:
            KubetorchError: The API server will never take what is wanted, so all stays; or what is
                there does not go.
            ServiceTimeoutError: The time is over.
        """
        if before is None or before.objects == identities(wish.manifests):
            return
        before.objects = frozenset()
        async with self._insisting.within(key, wish.timeout):
            find = functools.partial(self._find, key, wish.manifests, wish.owner, before.main)
            found = await self._insist(key, wish, find)
            uids = {one["metadata"]["uid"] for one in found}
            look = functools.partial(self._in_the_way, wish.manifests, uids)
            going = await self._insist(key, wish, look)
            if found or going:
                await self._check(key, wish, going)
                refs = [await self._applier.ref(one) for one in found]
                names = ",".join(f"{ref.resource}/{ref.name}" for ref in refs)
                _log.info("objects not wanted any more workload=%s/%s objects=%s", *key, names)
                await self._insist(key, wish, functools.partial(self._remove, refs, going))
                wish.known.clear()

    async def remove_left(self, key: Key, workload: Applied, owner: Manifest | None) -> None:
        """Delete what else there may be of a workload that is deleted; without an owner it goes."""
        if not workload.objects and owner is not None:
            for one in await self._find(key, (), owner, workload.main):
                await self._applier.delete(await self._applier.ref(one))

    async def _insist(self, key: Key, wish: Wish, ask: Callable[[], Awaitable[_T]]) -> _T:
        nothing: Manifest = {"metadata": {"namespace": key[0]}}
        about = wish.manifests[-1] if wish.manifests else nothing
        return await self._insisting.until_taken(key, about, ask)

    async def _check(self, key: Key, wish: Wish, going: Iterable[Ref]) -> None:
        """Raise what there is against what is wanted, but for what is in its way."""
        blocked = {(ref.resource.group, ref.resource.kind, ref.name) for ref in going}
        for manifest in wish.manifests:
            if identity(manifest) not in blocked:
                takes = manifest is wish.taken
                check = functools.partial(self._applier.check, manifest, wish.owner, takes=takes)
                await self._insisting.until_taken(key, manifest, check)

    async def _find(
        self,
        key: Key,
        wanted: Sequence[Manifest],
        owner: Manifest | None,
        before: Manifest | None,
    ) -> list[Object]:
        """The objects that were applied for a workload, but for those that are wanted.

        Args:
            key: The workload.
            wanted: What is wanted.
            owner: What all of them go away with.
            before: One of a kind that may not be known.
        """
        versions = dict(_VERSIONS)
        if before is not None:
            group, kind, _ = identity(before)
            version = str(before["apiVersion"]).rpartition("/")[2]
            versions.setdefault((group, kind), (version,))
        resources = await asyncio.gather(*map(self._served, versions, versions.values()))
        lists = await asyncio.gather(*(self._list(one, key) for one in resources if one))
        kept = identities(wanted)
        return [
            one
            for found in lists
            for one in found
            if identity(one) not in kept and _is_ours(one, owner)
        ]

    async def _served(self, kind: tuple[str, str], versions: Sequence[str]) -> Resource | None:
        """How a kind is served, if it is."""
        group, name = kind
        for version in versions:
            try:
                return await self._client.discovery.find(
                    f"{group}/{version}" if group else version, name
                )
            except KubernetesNotFoundError:
                continue
        return None

    async def _list(self, resource: Resource, key: Key) -> list[Object]:
        selection = Selection(resource, key[0], labels=f"{labels.SERVICE}={key[1]}")
        try:
            return list((await self._client.list(selection)).items)
        except (KubernetesNotFoundError, KubernetesForbiddenError):
            return []  # whoever may not list a kind has made none of it

    async def _in_the_way(self, wanted: Sequence[Manifest], uids: set[str]) -> list[Ref]:
        """What has the name of something wanted, and is about to go with its owner."""
        refs = []
        for ref in [await self._applier.ref(one) for one in wanted] + _made_by(wanted):
            there = await self._applier.find(ref)
            if there is not None and await self._goes(there, uids):
                refs.append(ref)
        return refs

    async def _goes(self, one: Object, uids: set[str]) -> bool:
        """Whether an object is, or goes with, one of these, or one that is gone or going."""
        for _ in range(_DEPTH):
            metadata = one["metadata"]
            if metadata["uid"] in uids or metadata.get("deletionTimestamp"):
                return True
            owner = controller_of(one)
            if owner is None:
                return False
            try:
                resource = await self._client.discovery.resource_of(owner)
                ref = Ref(resource, owner["name"], metadata["namespace"])
                one = await self._client.get(ref)
            except KubernetesNotFoundError:
                return True
            except KubernetesForbiddenError:
                return False
            if one["metadata"]["uid"] != owner["uid"]:
                return True
        return False

    async def _remove(self, refs: Iterable[Ref], going: Iterable[Ref]) -> None:
        """Delete objects, and wait until they and those that go with them are gone."""
        await asyncio.gather(*map(self._applier.delete, refs))
        await asyncio.gather(*map(self._applier.gone, (*refs, *going)))


def _made_by(wanted: Sequence[Manifest]) -> list[Ref]:
    """What the controller of the object that is wanted makes of its name."""
    main = wanted[-1] if wanted else {}
    kind = kinds.find(main)
    if kind is None or not (kind.is_autoscaled or kind.has_service):
        return []
    return [Ref(SERVICES, main["metadata"]["name"], main["metadata"]["namespace"])]


def _is_ours(one: Object, owner: Manifest | None) -> bool:
    """Whether an object was applied here, for this very workload."""
    if not is_own(one):
        return False
    owners = one["metadata"].get("ownerReferences") or ()
    return owner is None or owner["metadata"]["uid"] in {each["uid"] for each in owners}
