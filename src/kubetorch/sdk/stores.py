"""Requests to a controller about the secrets and volumes that it keeps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from kubetorch.lib.hidden import Hidden
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire import messages, routes, waits
from kubetorch.wire.secrets import PutSecret, SecretValues, SecretView, StoredSecret
from kubetorch.wire.volumes import CreatedVolume, StorageClass, VolumeView

if TYPE_CHECKING:
    from kubetorch.sdk.controller import Controller


class SecretRequests:
    """Requests about secrets.

    Args:
        controller: Who is asked.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        """Store values.

        Raises:
            SecretConflictError: The secret has other values, and those were to be the same.
            SecretNotFound: It is not there, and the values were to be added to its own.
        """
        path, body = routes.secret(namespace, object_name), messages.encode(put)
        return messages.decode(StoredSecret, self._controller.ask("POST", path, body=body))

    def get(self, namespace: str, object_name: str) -> SecretView | None:
        """A secret without its values, if there is one of that name."""
        answer = self._controller.ask("GET", routes.secret(namespace, object_name))
        return messages.decode(SecretView | None, answer)  # type: ignore[arg-type]  # a union

    def values(self, namespace: str, object_name: str) -> Hidden:
        """The values of a secret.

        Raises:
            SecretNotFound: There is none of that name.
        """
        answer = self._controller.ask("GET", routes.secret(namespace, object_name, "values"))
        return Hidden(messages.decode(SecretValues, answer).values)

    def list(self, namespace: str | None = None) -> list[SecretView]:
        """The secrets of a namespace, or of all."""
        path = routes.SECRETS if namespace is None else routes.secrets(namespace)
        return messages.decode(list[SecretView], self._controller.ask("GET", path))

    def delete(self, namespace: str, object_name: str) -> None:
        """Delete a secret.

        Raises:
            SecretNotFound: There is none of that name.
        """
        self._controller.ask("DELETE", routes.secret(namespace, object_name))


class VolumeRequests:
    """Requests about volumes.

    Args:
        controller: Who is asked.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        """Make a volume; one that exists stays as it is.

        Raises:
            SpecError: There is no storage class for its access mode.
        """
        path, body = routes.volumes(namespace), messages.encode(spec)
        return messages.decode(CreatedVolume, self._controller.ask("POST", path, body=body))

    def get(self, namespace: str, claim: str) -> VolumeView | None:
        """A volume, if there is one of that name."""
        answer = self._controller.ask("GET", routes.volume(namespace, claim))
        return messages.decode(VolumeView | None, answer)  # type: ignore[arg-type]  # a union

    def list(self, namespace: str | None = None) -> list[VolumeView]:
        """The volumes of a namespace, or of all."""
        path = routes.VOLUMES if namespace is None else routes.volumes(namespace)
        return messages.decode(list[VolumeView], self._controller.ask("GET", path))

    def delete(self, namespace: str, claim: str, *, wait: float) -> bool:
        """Delete a volume and what is in it; whether it is gone after so many seconds.

        Raises:
            VolumeNotFoundError: There is none of that name.
            VolumeInUseError: Services have it mounted.
        """
        path = f"{routes.volume(namespace, claim)}?{urlencode({'wait': wait})}"
        answer = self._controller.ask("DELETE", path, timeout=wait + waits.MARGIN)
        gone: bool = json.loads(answer)["gone"]
        return gone

    def storage_class(self, access_mode: str, namespace: str) -> str:
        """The class of a volume of a namespace for which nobody names one.

        Raises:
            SpecError: There is none for this access mode.
        """
        query = urlencode({"access_mode": access_mode, "namespace": namespace})
        path = f"{routes.STORAGE_CLASS}?{query}"
        return messages.decode(StorageClass, self._controller.ask("GET", path)).storage_class
