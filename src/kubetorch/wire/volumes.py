"""Messages about volumes."""

from __future__ import annotations

import msgspec

from kubetorch.specs.volume import VolumeSpec


class VolumeView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A volume that exists; it was created so many seconds after the epoch.

    Attributes:
        spec: What it was made from; of a claim that somebody else made what can be read off it.
        phase: Kubernetes' word: `Pending`, `Bound` or `Lost`.
        identity: What no other volume has or will have, on Kubernetes: a digest of its `uid`.
        folder: Where it lies on this machine, on the local backend.
        used_by: Names of the services that have it mounted; only where volumes are listed.
    """

    namespace: str
    claim: str
    spec: VolumeSpec
    phase: str = "Bound"
    storage_class: str = ""
    is_ours: bool = True
    identity: str = ""
    folder: str | None = None
    created: float = 0.0
    used_by: tuple[str, ...] = ()


class CreatedVolume(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a creation: the volume, and whether it is new."""

    is_new: bool
    volume: VolumeView


class StorageClass(msgspec.Struct, frozen=True):
    """The class and the access mode that a volume gets; the class is empty for one without."""

    storage_class: str
    access_mode: str
