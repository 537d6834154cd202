"""The seams between the controller and what keeps secrets and volumes: objects of a cluster, files.

Names are checked before they come here. On Kubernetes a secret is a Secret and a volume a
PersistentVolumeClaim; what the fields are there stands in `kubetorch.manifests.secrets` and
`kubetorch.manifests.storage`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire.secrets import PutSecret, SecretView, StoredSecret
from kubetorch.wire.volumes import CreatedVolume, VolumeView


class SecretStore(Protocol):
    """Keeps secrets."""

    async def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        """Store values, in one step.

        Args:
            namespace: Namespace of the secret.
            object_name: What Kubernetes calls it.
            put: The values, and what becomes of them if the secret exists.

        Raises:
            SecretConflictError: It has other values, and those were to be the same.
            SecretNotFound: It is not there, and the values were to be added to its own.
            SpecError: It would become too large.
            StorageFullError: There is no room.
        """

    async def get(self, namespace: str, object_name: str) -> SecretView | None:
        """A secret without its values, if there is one of that name."""

    async def values(self, namespace: str, object_name: str) -> dict[str, bytes]:
        """The values of a secret.

        Raises:
            SecretNotFound: There is none of that name.
        """

    async def list(self, namespace: str | None) -> list[SecretView]:
        """The secrets of a namespace, or of all; on Kubernetes those that Kubetorch made."""

    async def delete(self, namespace: str, object_name: str) -> bool:
        """Delete a secret; whether there was one."""


class VolumeStore(Protocol):
    """Keeps volumes."""

    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        """Make a volume; one that exists stays as it is.

        Raises:
            SpecError: There is no storage class for its access mode.
            StorageFullError: There is no room.
        """

    async def get(self, namespace: str, claim: str) -> VolumeView | None:
        """A volume, if there is one of that name."""

    async def list(self, namespace: str | None) -> list[VolumeView]:
        """The volumes of a namespace, or of all; on Kubernetes those that Kubetorch made."""

    async def delete(self, namespace: str, claim: str, *, wait: float) -> bool:
        """Delete a volume and what is in it.

        Args:
            namespace: Namespace of the volume.
            claim: Name of its claim.
            wait: Seconds to wait until it is gone.

        Returns:
            Whether it is gone.
        """

    async def storage_class(self, access_mode: str) -> str:
        """The class of a volume for which nobody names one.

        Raises:
            SpecError: There is none for this access mode.
        """


class Stores(NamedTuple):
    """Both of a backend."""

    secrets: SecretStore
    volumes: VolumeStore
