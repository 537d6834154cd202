"""Messages about keys of the data store."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from kubetorch.wire.transports import Offer

#: `cluster`: a key stays until it is deleted; `resource`: until its service is torn down.
Lifespan = Literal["cluster", "resource"]


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod of a service, in the namespace of the keys that it has.

    Attributes:
        part: Names the blobs that it has, or gets, of a version by a digest; empty for all.
    """

    workload: str
    pod: str
    part: str = ""


class HoldManifest(msgspec.Struct, frozen=True):
    """Tell the controller whether a pod has what it says of a manifest, for other getters."""

    manifest: str
    holder: Holder
    is_whole: bool = True


class PutKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Let a key hold a manifest, whose blobs were uploaded before.

    Attributes:
        key: Canonical: no `/` at either end.
        manifest: The digest of the manifest.
        lifespan: `None`: `resource` if the key's first segment is a service, else `cluster`.
        service: The service at whose end the key ends, with the lifespan `resource`.
        publisher: The pod that has the content, which is not uploaded; such a key ends with the
            pod. `None`: the store has the content.
    """

    key: str
    manifest: str
    lifespan: Lifespan | None = None
    service: str = ""
    publisher: Holder | None = None


class KeyView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key and what it holds.

    Attributes:
        kind: `file`, `folder` or `tensors`.
        manifest: The digest of its newest version's manifest.
        version: Counts puts of this key, from 1.
        size, files: Bytes and number of files of this version.
        created: Seconds after the epoch of the put of this version.
        publisher: The pod that has the content, where the store has not.
        holders: `store`, and the names of pods that have this version.
    """

    key: str
    kind: str
    manifest: str
    version: int = 1
    size: int = 0
    files: int = 0
    created: float = 0.0
    creator: str = ""
    lifespan: Lifespan = "cluster"
    service: str = ""
    publisher: Holder | None = None
    holders: tuple[str, ...] = ()


class BlobSizes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blobs of a put by their digests, with their lengths in bytes.

    Attributes:
        is_check: Whether the store reads those that it has; one that is damaged is missing then.
    """

    sizes: dict[str, int]
    is_check: bool = False


class BlobNames(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blobs by their digests.

    Attributes:
        bases: For some of them a blob that the receiver has and that is almost equal: what is sent
            may be the delta.
    """

    blobs: tuple[str, ...]
    bases: dict[str, str] = {}


class PutAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The key as it is after a put; or the blobs that are missing, and the key is as before."""

    key: KeyView | None = None
    missing: tuple[str, ...] = ()


class FindKeys(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ask for the keys to read for a path.

    They are the key itself, or the key above it whose folder has the path, and all keys below it.
    The answer leases the manifests: their blobs stay for so many seconds, though the keys are put
    again or deleted meanwhile.

    Attributes:
        wants_all_sources: Name all pods that have the keys, and not only those to be asked.
    """

    path: str
    lease_seconds: float = 600.0
    wants_all_sources: bool = False


class JoinGet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ask for a source of a version, as one of those that get it now; again if a source fails.

    Attributes:
        key: The key that had this version when it was looked for.
        getter: Names the get, for as long as it goes on.
        holder: The pod that gets it and gives what it has to other getters meanwhile.
        failed: The pod that was named last, and that sends nothing, too little, or wrong bytes.
        fanout: Getters that each source serves at a time; 0: as many as the controller likes best.
        part: Names the blobs that it needs if these are not all; see `Holder`.
        is_done: Whether the get has ended, in whichever way.
    """

    key: str
    manifest: str
    getter: str
    part: str = ""
    holder: Holder | None = None
    failed: Holder | None = None
    fanout: int = 0
    is_done: bool = False


class KeySource(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that gives blobs of a manifest, by a `POST` of `AskBlobs` to `routes.PUBLISHED`.

    Attributes:
        url: The base URL of its agent, for other pods.
        token: Opens nothing else, and not for long.
        part: What it has if that is not all; the request names it in place of the manifest.
    """

    workload: str
    pod: str
    url: str
    token: str
    part: str = ""


class GetSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pod from which to get a version; `None` for the store."""

    source: KeySource | None = None


class JoinWindow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Take part in a window of a group; repeated until it is closed.

    Attributes:
        participant: Names who waits.
        ip: The address of its pod; empty outside of pods.
        timeout, world_size, ips: The conditions of `kt.BroadcastWindow`.
        offer: How it can pass tensors to others, past the store.
    """

    group: str
    participant: str
    ip: str = ""
    timeout: float | None = None
    world_size: int | None = None
    ips: tuple[str, ...] = ()
    offer: Offer | None = None


class WindowView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A window as a participant sees it.

    Attributes:
        offers: By participant, of a closed window: the same for all of them.
    """

    is_closed: bool
    participants: int
    offers: dict[str, Offer] = {}


class AskBlobs(msgspec.Struct, frozen=True):
    """Ask a pod for blobs of a manifest; with `is_only_check` only which of them are damaged."""

    manifest: str
    blobs: tuple[str, ...]
    is_only_check: bool = False


class PathKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key that has a part of a path.

    Attributes:
        inside: The path inside of the key's folder that was asked for; empty for all of it.
        shadowed: Paths in the key's folder that a newer key below it holds: not to be read here.
        sources: Pods that have all of this version, in the order in which to ask them; the store
            has it too if `store` is a holder.
    """

    key: KeyView
    inside: str = ""
    shadowed: tuple[str, ...] = ()
    sources: tuple[KeySource, ...] = ()


class PathKeys(msgspec.Struct, frozen=True, kw_only=True):
    keys: tuple[PathKey, ...]


class ListedPath(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name directly below a path: a key, a part of a key's folder, or a folder of keys.

    `locale` is `store`, or the name of the pod that published the content in place.
    """

    name: str
    is_directory: bool
    locale: str = "store"
    size: int = 0
    created: float = 0.0
    key: KeyView | None = None


class RemovePath(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Delete a key, or the part of a key's folder with this path.

    With `recursive` also all keys below it; with `is_prefix` all that begin with these characters.
    """

    path: str
    recursive: bool = False
    is_prefix: bool = False


class CheckedKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key whose blobs are being compared with their digests.

    Attributes:
        holder: The holder of these blobs: `store`, or the name of a pod.
        size, checked: The number of its bytes, and of those that have been compared.
        faults: Missing and damaged files with the reasons, in words; not more than fit in a line.
        is_whole: True at the end if nothing is missing or damaged; `None` until then.
    """

    key: str
    version: int
    holder: str = "store"
    size: int = 0
    checked: int = 0
    faults: tuple[str, ...] = ()
    is_whole: bool | None = None


class CollectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a garbage collection: numbers of blobs, and their bytes.

    Attributes:
        deleted_blobs, deleted_size: Those that were deleted, or would be.
        young_blobs, young_size: Those that stay some minutes more, since a put may have begun.
        remaining_blobs, remaining_size: Those that keys, services and results need.
    """

    deleted_blobs: int = 0
    deleted_size: int = 0
    young_blobs: int = 0
    young_size: int = 0
    remaining_blobs: int = 0
    remaining_size: int = 0


class RemoveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that were deleted or changed."""

    keys: tuple[str, ...]


class ServicePod(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod of a service, for a store of its own; see `PodView`."""

    name: str
    url: str = ""
    phase: str = ""


class NamespaceServices(msgspec.Struct, frozen=True):
    """Tell a store of its own which services a namespace has, and their pods by service."""

    services: dict[str, tuple[ServicePod, ...]]


def services_digest(encoded: bytes) -> str:
    """The name of an encoded `NamespaceServices` in the header `routes.SERVICES`."""
    return hashlib.sha256(encoded).hexdigest()


class EndService(msgspec.Struct, frozen=True):
    """Delete the keys of a service that was torn down."""

    service: str


class EndedKeys(msgspec.Struct, frozen=True):
    """How many keys ended with a service."""

    keys: int


class StoreContact(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where pods send and fetch blobs themselves, and the token for it.

    Attributes:
        url: Base URL of the store; empty if the controller is the store.
        expires: The end of the token, in seconds since the epoch.
    """

    url: str = ""
    token: str = ""
    expires: float = 0.0


class StoreStatus(msgspec.Struct, frozen=True):
    """What a store of its own says of itself.

    Attributes:
        sent_bytes: Bytes of blobs that went to getters, as they travelled.
    """

    sent_bytes: int
