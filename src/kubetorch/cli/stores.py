"""What commands ask about the secrets and volumes that a controller keeps."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kubetorch.config.settings import config
from kubetorch.errors import SecretNotFound, SpecError
from kubetorch.sdk import parameters
from kubetorch.sdk import services as sdk
from kubetorch.sdk.secrets import uploading
from kubetorch.sdk.secrets.secret import Secret
from kubetorch.sdk.volume import Volume
from kubetorch.wire.secrets import Collision, SecretView, StoredSecret
from kubetorch.wire.volumes import VolumeView

AllNamespaces = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="Those of all namespaces.")
]


class _Keeper:
    """The controller, and the namespace that a command is about.

    Args:
        namespace: Which; the configured one if not given.
        all_namespaces: Whether it is about all of them.
    """

    def __init__(self, namespace: str | None, *, all_namespaces: bool = False) -> None:
        given = namespace or config.get("namespace")
        self.namespace: str = parameters.namespace(given)
        self._all_namespaces = all_namespaces
        # Which backend there is was said when something was deployed.
        sdk.be_quiet()
        self._session = sdk.session()

    @property
    def where(self) -> str:
        """Where it looks, for people."""
        return "any namespace" if self._all_namespaces else f"{self.namespace} namespace"

    @property
    def _listed(self) -> str | None:
        return None if self._all_namespaces else self.namespace


class SecretKeeper(_Keeper):
    """The secrets."""

    def all(self, *, prefix: str | None = None) -> list[SecretView]:
        """All of them, or those whose name begins with a prefix."""
        found = self._session.ask(lambda asked: asked.secrets.list(self._listed))
        return [view for view in found if view.name.startswith(prefix or "")]

    def find(self, name: str) -> SecretView:
        """The secret of that name.

        Raises:
            SecretNotFound: There is none.
        """
        found = self._session.ask(lambda asked: uploading.find(asked, self.namespace, name))
        # A list says who uses each.
        listed = self._session.ask(lambda asked: asked.secrets.list(self.namespace))
        return next((one for one in listed if one.object_name == found.object_name), found)

    def values(self, view: SecretView) -> dict[str, str]:
        """The values of a secret, as text."""
        hidden = self._session.ask(
            lambda asked: asked.secrets.values(view.namespace, view.object_name)
        )
        return {key: hidden[key].decode(errors="replace") for key in hidden}

    def create(self, name: str | None, source: dict[str, Any]) -> StoredSecret:
        """Make a secret of a source; one that is there stays as it is.

        Raises:
            SpecError: There is no source, or nothing in it.
        """
        return self._put(Secret(name, **_given(source)), "keep")

    def update(self, name: str | None, source: dict[str, Any]) -> StoredSecret:
        """Add the values of a source to a secret.

        Raises:
            SecretNotFound: There is none of that name.
            SpecError: There is no source, or nothing in it.
        """
        secret = Secret(name, **_given(source))
        try:
            self.find(secret.name)
        except SecretNotFound as error:
            error.hint = "kt secrets create makes one"
            raise
        return self._put(secret, "merge")

    def delete(self, view: SecretView) -> None:
        """Delete a secret.

        Raises:
            SecretNotFound: It is gone already.
        """
        self._session.ask(lambda asked: asked.secrets.delete(view.namespace, view.object_name))

    def _put(self, secret: Secret, collision: Collision) -> StoredSecret:
        return self._session.ask(
            lambda asked: uploading.upload(
                asked, self.namespace, secret, username=config.username, collision=collision
            )
        )


class VolumeKeeper(_Keeper):
    """The volumes."""

    def all(self) -> list[VolumeView]:
        """All of them that were made as volumes."""
        found = self._session.ask(lambda asked: asked.volumes.list(self._listed))
        return [view for view in found if view.is_ours]

    def get(self, volume: Volume) -> VolumeView:
        """A volume that exists."""
        found = self._session.ask(
            lambda asked: asked.volumes.get(volume.namespace, volume.pvc_name)
        )
        assert found is not None
        return found


def _given(source: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in source.items() if value is not None}
    if not found:
        raise SpecError(
            "the secret has no values: give --provider, --path or --env-vars",
            hint="for example kt secrets create hf-token --env-vars HF_TOKEN",
        )
    return found
