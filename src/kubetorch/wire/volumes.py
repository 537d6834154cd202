"""Messages about volumes."""

from __future__ import annotations

import msgspec

from kubetorch.specs.volume import VolumeSpec


class VolumeView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A volume that exists; it was created so many seconds after the epoch.

    Attributes:
        spec: The spec that it was made from; for a claim of other tools, read from the claim.
        phase: Kubernetes' word: `Pending`, `Bound` or `Lost`.
        identity: On Kubernetes a digest of its `uid`, which no other volume has or will have.
        folder: Its folder on this machine, on the local backend.
        used_by: Names of the services that have it mounted; only in lists of volumes.
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
    """The storage class of a volume, empty for none, and its access mode."""

    storage_class: str
    access_mode: str
