"""What pods of a compute are given: an image, volumes, secrets, and where their calls go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kubetorch.config.settings import DEFAULT_IMAGE, config
from kubetorch.sdk.computing import attached, objects
from kubetorch.sdk.computing.manifest_view import ManifestView
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.image import ImageSpec, check_reference

if TYPE_CHECKING:
    from kubetorch.sdk.image import Image
    from kubetorch.sdk.secrets.secret import Secret
    from kubetorch.sdk.volume import Volume


class Attachments(ManifestView):
    """Image, volumes, secrets and endpoint."""

    #: The image as the user has it: steps that are added to it later are deployed, too.
    _image: Image | None
    _secrets: tuple[Secret, ...]
    #: What nobody said, so that `kt.config` says it.
    _unsaid: frozenset[str]
    #: Where the deployed service answers.
    _url: str | None

    # ------------------------------------------------------------------------------------ image

    @property
    def image(self) -> Image | None:
        """The image of the pods and its steps, which can be added to; `None` is the default one."""
        if self._image is None and self._spec.image is not None:
            from kubetorch.sdk.image import Image  # noqa: PLC0415  # few computes have one

            self._image = Image.from_spec(self._spec.image)
        return self._image

    @image.setter
    def image(self, value: Image | None) -> None:
        given = None if value is None else attached.image(value)
        self._set(image=None)
        self._image = given

    @property
    def server_image(self) -> str:
        """Reference of the container image that the pods run."""
        return str(self._container().get("image", ""))

    @server_image.setter
    def server_image(self, value: str) -> None:
        spec = self.to_spec().image or ImageSpec()
        self._image = None
        self._set(image=replace(spec, image_id=check_reference(value)))

    @property
    def python_path(self) -> str | None:
        """Interpreter in the container, or its folder, as the image says."""
        spec = self.to_spec().image
        return None if spec is None else spec.python_path

    @property
    def image_install_cmd(self) -> str | None:
        """Command that installs a requirement, as the image says."""
        spec = self.to_spec().image
        return None if spec is None else spec.install_cmd

    # ------------------------------------------------------------------------ volumes and secrets

    @property
    def volumes(self) -> list[str]:
        """Names of its volumes. Setting it adds volumes, or names of claims that exist."""
        return [one.name for one in self.to_spec().volumes]

    @volumes.setter
    def volumes(self, value: Sequence[str | Volume] | None) -> None:
        if value is None:
            return
        new = attached.volumes(value)
        names = {one.name for one in new}
        kept = tuple(one for one in self._spec.volumes if one.name not in names)
        self._set(volumes=(*kept, *new))
        self._unsaid -= {"volumes"}

    @property
    def secrets(self) -> list[Secret]:
        """Its secrets. Setting it adds secrets, names of providers, or of secrets that exist."""
        return list(self._secrets)

    @secrets.setter
    def secrets(self, value: Iterable[str | Secret] | None) -> None:
        if value is None:
            return
        new = attached.secrets(value)
        refs = [one.to_ref() for one in new]
        names = {one.name for one in refs}
        kept = tuple(one for one in self._spec.secrets if one.name not in names)
        self._set(secrets=(*kept, *refs))
        self._secrets = (*(one for one in self._secrets if one.name not in names), *new)

    # ----------------------------------------------------------------------------------- queue

    @property
    def queue(self) -> str | None:
        """Queue of the KAI scheduler that the pods wait in; `kt.config.queue` if not given."""
        return self.to_spec().queue

    @queue.setter
    def queue(self, value: str | None) -> None:
        self._set(queue=None if value is None else objects.queue(value))
        self._unsaid = self._unsaid - {"queue"} if value is not None else self._unsaid

    # --------------------------------------------------------------------------------- endpoint

    @property
    def endpoint(self) -> str | None:
        """URL that calls go to: the user's own, else that of the deployed service."""
        given = self._spec.endpoint
        return self._url if given is None or given.url is None else given.url

    @endpoint.setter
    def endpoint(self, value: Endpoint | None) -> None:
        self._set(endpoint=None if value is None else objects.endpoint(value))

    # --------------------------------------------------------------------------------- as a spec

    def to_spec(self) -> ComputeSpec:
        """What is sent to the controller: frozen."""
        spec = self._spec
        if self._image is not None:
            spec = replace(spec, image=self._image.to_spec())
        if self._unsaid and not spec.is_selector_only:
            spec = self._with_defaults(spec)
        return spec

    def _with_defaults(self, spec: ComputeSpec) -> ComputeSpec:
        """The spec with what `kt.config` says of what nobody said."""
        names, queue, base = config.volumes, config.queue, config.default_image
        if names and "volumes" in self._unsaid:
            spec = replace(spec, volumes=attached.volumes(names))
        if queue and "queue" in self._unsaid and spec.queue_name is None:
            spec = replace(spec, queue=objects.queue(queue))
        if base != DEFAULT_IMAGE and (spec.image is None or spec.image.image_id is None):
            spec = replace(spec, image=replace(spec.image or ImageSpec(), image_id=base))
        return spec
