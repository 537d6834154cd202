"""A cluster for tests of the backend: objects, what owns them, and what its controllers make."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

from kubetorch.controller.backends.base import Stores
from kubetorch.controller.backends.kubernetes.apply import SCALER_MANAGER
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.errors import KubernetesNotFoundError, KubernetesRequestError
from kubetorch.k8s.client import Client, Listing
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Ref, Resource, Selection
from kubetorch.manifests.rendering import merge_manifests
from kubetorch.wire.messages import Runtime

#: The kind that the controller of each kind makes, of the same name: a Knative Service makes a
#: Route, and the Route makes a Service.
MADE_KINDS = {
    ("serving.knative.dev/v1", "Service"): ("serving.knative.dev/v1", "Route"),
    ("serving.knative.dev/v1", "Route"): ("v1", "Service"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): ("v1", "Service"),
    ("apps/v1", "Deployment"): ("apps/v1", "ReplicaSet"),
}
OWNER: Object = {
    "apiVersion": "kubetorch.com/v1",
    "kind": "KubetorchWorkload",
    "metadata": {"name": "f", "uid": "workload"},
}


class SmallCluster:
    """An API server, and controllers that copy labels and annotations to what they make.

    Attributes:
        asked: What was asked but for reading: `apply Deployment`, `try Service`, `delete Service`.
        listed: How often something was listed.
        refused: Kinds that it refuses, with the message.
        unserved: Kinds, or versions of groups, that it does not have.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.listed = 0
        self.refused: dict[str, str] = {}
        self.unserved: set[str] = {"LeaderWorkerSet", "PyTorchJob"}
        self.discovery = self
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._uids = itertools.count(1)

    # ------------------------------------------------------------------------------------ for tests

    def names(self) -> set[str]:
        """What there is and has no owner in the cluster, as `kind/name`; of Knative's with a K."""
        return {
            f"{'K' if 'knative' in version else ''}{kind}/{name}"
            for (version, kind, name), manifest in self._objects.items()
            if _controller(manifest) is None
        }

    def makers(self, name: str) -> list[str]:
        """Who made the core Services of this name."""
        service = self._objects.get(("v1", "Service", name))
        return [owner["kind"] for owner in (service or {"metadata": {}})["metadata"].get(*_OWNERS)]

    def put(self, manifest: Object) -> Object:
        """Somebody makes an object."""
        stored_object = copy.deepcopy(manifest)
        metadata = stored_object["metadata"]
        key = (stored_object["apiVersion"], stored_object["kind"], metadata["name"])
        previous_object = self._objects.get(key)
        metadata["uid"] = (
            previous_object["metadata"]["uid"] if previous_object else f"uid-{next(self._uids)}"
        )
        metadata["generation"] = 1
        metadata["resourceVersion"] = "1"
        self._objects[key] = stored_object
        self._make(stored_object)
        return stored_object

    def take(self, api_version: str, kind: str) -> Object:
        """The object `f` of a kind."""
        return self._objects[api_version, kind, "f"]

    def pod(self, name: str) -> Object:
        return self._objects["v1", "Pod", name]

    def slice_of(self, name: str) -> Object | None:
        """An EndpointSlice, if it is there."""
        return self._objects.get(("discovery.k8s.io/v1", "EndpointSlice", name))

    def events(self) -> list[Object]:
        return [manifest for (_, kind, _), manifest in self._objects.items() if kind == "Event"]

    def lose(self, api_version: str, kind: str) -> None:
        """The object `f` of a kind goes; what it made stays until somebody waits for its end."""
        del self._objects[api_version, kind, "f"]

    def _collect(self) -> None:
        """Remove what is owned by nothing."""
        while True:
            uids = {manifest["metadata"]["uid"] for manifest in self._objects.values()}
            orphan_keys = [
                key
                for key, manifest in self._objects.items()
                if _controller(manifest) not in uids | {None}
            ]
            if not orphan_keys:
                return
            for key in orphan_keys:
                del self._objects[key]

    def _make(self, owner: Object) -> None:
        made_kind = MADE_KINDS.get((owner["apiVersion"], owner["kind"]))
        name = owner["metadata"]["name"]
        if made_kind is None or (*made_kind, name) in self._objects:
            return
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": name,
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        metadata = {**owner["metadata"], "ownerReferences": [reference]}
        self.put(
            {"apiVersion": made_kind[0], "kind": made_kind[1], "metadata": metadata, "spec": {}}
        )

    # ------------------------------------------------------------------------------------- a client

    async def find(self, api_version: str, kind: str) -> Resource:
        group, _, version = api_version.rpartition("/")
        if {kind, api_version} & self.unserved:
            error = KubernetesNotFoundError(f"the cluster has no kind {kind} in {api_version}")
            error.reason = "NoKindMatch"
            raise error
        return Resource(group, version, f"{kind.lower()}s", kind)

    async def resource_of(self, manifest: Object) -> Resource:
        return await self.find(manifest["apiVersion"], manifest["kind"])

    async def get(self, ref: Ref) -> Object:
        key = (ref.resource.api_version, ref.resource.kind, ref.name)
        if key not in self._objects:
            raise KubernetesNotFoundError(f"no such {ref.resource.kind}")
        return copy.deepcopy(self._objects[key])

    async def apply(
        self, manifest: Object, *, field_manager: str = "", dry_run: bool = False, **_: Any
    ) -> Object:
        kind = manifest["kind"]
        verb = "scale" if field_manager == SCALER_MANAGER else "apply"
        self.requests.append(f"{'try' if dry_run else verb} {kind}")
        message = self.refused.get(kind)
        if message and (dry_run or "dry run" not in message):
            error = KubernetesRequestError(message)
            error.status_code = 400
            raise error
        if dry_run:
            return manifest
        return self.put(manifest if kind != "Deployment" else self._applied(manifest, verb))

    def _applied(self, manifest: Object, verb: str) -> Object:
        """A Deployment after an apply: of its two managers each leaves the other's fields."""
        key = (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])
        live_object = self._objects.get(key, {"metadata": {}, "spec": {}})
        entries = live_object["metadata"].get("managedFields", [])
        if verb == "scale":
            if key not in self._objects:
                raise KubernetesRequestError("spec.selector: Required value")
            fields = {"f:spec": {"f:replicas": {}}}
            entries = [{"manager": SCALER_MANAGER, "fieldsV1": fields}]
            manifest = merge_manifests(live_object, manifest)
        if not entries:
            return manifest
        metadata = {**manifest["metadata"], "managedFields": entries}
        kept_spec = {"replicas": live_object["spec"].get("replicas")}
        return {**manifest, "metadata": metadata, "spec": {**kept_spec, **manifest["spec"]}}

    async def create(self, manifest: Object, **_: Any) -> Object:
        self.requests.append(f"create {manifest['kind']}")
        return self.put(manifest)

    async def patch(self, ref: Ref, patch: Object, **_: Any) -> Object:
        self.requests.append(f"patch {ref.resource.kind}")
        live_object = self._objects[ref.resource.api_version, ref.resource.kind, ref.name]
        return self.put(merge_manifests(live_object, patch))

    async def delete(self, ref: Ref, **_: Any) -> None:
        self.requests.append(f"delete {ref.resource.kind}")
        key = (ref.resource.api_version, ref.resource.kind, ref.name)
        if self._objects.pop(key, None) is None:
            raise KubernetesNotFoundError(f"no such {ref.resource.kind}")

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource)

    async def list(self, selection: Selection) -> Listing:
        self.listed += bool(selection.labels) and selection.resource.kind != "Pod"
        resource = selection.resource
        if selection.fields:
            self._collect()
        selected_objects = [
            copy.deepcopy(manifest)
            for (version, kind, called), manifest in self._objects.items()
            if (version, kind) == (resource.api_version, resource.kind)
            and selection.fields in ("", f"metadata.name={called}")
            and _has(manifest, selection.labels)
        ]
        return Listing(selected_objects, "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


_OWNERS: tuple[str, list[Object]] = ("ownerReferences", [])


def _controller(manifest: Object) -> str | None:
    owners = manifest["metadata"].get(*_OWNERS)
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def _has(manifest: Object, selector: str) -> bool:
    tags = manifest["metadata"].get("labels") or {}
    terms = [term.partition("=") for term in selector.split(",") if term]
    return all(
        tags.get(name) == text if has_value else name in tags for name, has_value, text in terms
    )


class _Prepared:
    """There is nothing to prepare."""

    async def prepare(self, *_: Any, **__: Any) -> bool:
        return False

    prepare_selected = prepare


def backend_of(cluster: SmallCluster, **settings: Any) -> KubernetesBackend:
    """A backend whose workload `f` is there."""
    return KubernetesBackend(
        cast("Client", cluster),
        runtime=Runtime("image", "image", "http://controller"),
        stores=cast("Stores", None),
        prerequisites=cast("PodPrerequisites", _Prepared()),
        owner=lambda namespace, name: OWNER,
        **settings,
    )
