"""`kt.Volume`: storage that outlives the services that have it mounted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError, SpecError, VolumeNotFoundError, did_you_mean
from kubetorch.lib import terminal
from kubetorch.sdk import backend, inpod, parameters
from kubetorch.sdk.tuning import TIMING
from kubetorch.specs import names, quantity
from kubetorch.specs import volume as specs
from kubetorch.specs.volume import VolumeSpec

if TYPE_CHECKING:
    from kubetorch.sdk.controller import Controller
    from kubetorch.wire.volumes import StorageClass, VolumeView

_SIZE_HINT = 'kt.Volume(name="data", size="10Gi", mount_path="/data")'


class Volume:
    """Storage that outlives the services that have it mounted.

    It is a declaration: a deploy to a `kt.Compute(volumes=[...])` makes it if it is not there.

    Args:
        name: Its name.
        size: Its size, such as `"10Gi"`; not needed for one that exists.
        mount_path: Absolute path in the pods; `/ktfs/<name>` if not given.
        storage_class: Storage class; that of the access mode, else the default one, if not given.
        access_mode: `"ReadWriteMany"`, `"ReadWriteOnce"`, `"ReadOnlyMany"` or
            `"ReadWriteOncePod"`. If not given, the first where the storage class is known to make
            volumes that several nodes can mount, else the second, which a line on stderr says.
        namespace: Namespace; that of the service if not given.
        volume_name: PersistentVolume to bind to.
        pvc: A PersistentVolumeClaim that exists: it is mounted, and neither made nor deleted.
        pv: The same as `volume_name`.

    Raises:
        SpecError: A value is impossible; the message names the parameter.
    """

    #: The claim that a compute mounts, if the volume was found by its name.
    _reference: VolumeSpec | None = None

    def __init__(  # noqa: PLR0913  # the documented constructor
        self,
        name: str,
        size: str | int | None = None,
        mount_path: str | None = None,
        storage_class: str | None = None,
        access_mode: str | None = None,
        namespace: str | None = None,
        volume_name: str | None = None,
        *,
        pvc: str | None = None,
        pv: str | None = None,
    ) -> None:
        if volume_name is not None and pv is not None and volume_name != pv:
            raise SpecError(f"volume_name is {volume_name!r} and pv is {pv!r}; they are the same")
        bound = volume_name if volume_name is not None else pv
        if pvc is None and size is None:
            raise SpecError(
                f"the volume {name!r} has no size",
                hint=f"{_SIZE_HINT}; pvc= names a claim that exists",
            )
        if pvc is not None and bound is not None:
            raise SpecError("pvc names a claim that exists; it is bound to a volume already")
        self._spec = VolumeSpec(
            name=specs.check_name(name),
            mount_path=specs.default_mount_path(name)
            if mount_path is None
            else specs.check_mount_path(mount_path),
            size=None if size is None else quantity.memory(size, parameter="size"),
            # Empty text is the class of volumes that have none.
            storage_class=specs.check_claim(storage_class, parameter="storage_class")
            if storage_class
            else storage_class,
            access_mode=specs.access_mode(access_mode),
            namespace=None if namespace is None else names.check_namespace(namespace),
            volume_name=None
            if bound is None
            else specs.check_claim(bound, parameter="volume_name"),
            claim=None if pvc is None else specs.check_claim(pvc),
        )

    @classmethod
    def from_name(
        cls, name: str, namespace: str | None = None, mount_path: str | None = None
    ) -> Volume:
        """A volume that exists.

        Args:
            name: Its name, or the name of a claim that Kubetorch did not make.
            namespace: Its namespace. Without it a deploy takes the volume of that name that is
                where the service is; all else asks in `kt.config.namespace`.
            mount_path: Where to mount it; where it was mounted before if not given, else
                `/ktfs/<name>`.

        Raises:
            VolumeNotFoundError: There is none of that name.
        """
        claim = specs.check_claim(name, parameter="name")
        searched_namespace = (
            config.namespace if namespace is None else names.check_namespace(namespace)
        )
        path = None if mount_path is None else specs.check_mount_path(mount_path)
        volume = cls.__new__(cls)
        effective_path = path or specs.default_mount_path(claim)
        volume._spec = VolumeSpec(claim, effective_path, namespace=namespace)
        volume._reference = VolumeSpec(claim, effective_path, namespace=namespace, claim=claim)
        if inpod.is_importing():
            return volume  # a module that a pod imports must not ask the controller
        view = backend.session().ask(
            lambda controller: controller.volumes.get(searched_namespace, claim)
        )
        if view is not None:
            effective_path = path or view.spec.mount_path
            volume._spec = replace(
                view.spec,
                mount_path=effective_path,
                storage_class=view.storage_class or None,
                namespace=namespace,
                claim=None if view.is_ours else claim,
            )
            volume._reference = replace(
                volume._reference, mount_path=effective_path, access_mode=view.spec.access_mode
            )
        elif namespace is not None or not _may_be_elsewhere(claim):
            raise backend.session().ask(
                lambda controller: not_found_error(controller, claim, searched_namespace)
            )
        return volume

    # --------------------------------------------------------------------------------- questions

    @property
    def name(self) -> str:
        """The name of the volume."""
        return self._spec.name

    @property
    def pvc_name(self) -> str:
        """Name of its PersistentVolumeClaim."""
        return self._spec.claim_name

    @property
    def size(self) -> str | None:
        """The size; `None` for a claim that exists."""
        return self._spec.size

    @property
    def mount_path(self) -> str:
        """Absolute path in the pods; a compute has that of the moment when it was given it."""
        return self._spec.mount_path

    @mount_path.setter
    def mount_path(self, value: str) -> None:
        path = specs.check_mount_path(value)
        self._spec = replace(self._spec, mount_path=path)
        if self._reference is not None:
            self._reference = replace(self._reference, mount_path=path)

    @property
    def access_mode(self) -> str:
        """The access mode, in Kubernetes' words; the controller is asked if none was given."""
        spec = self._spec
        if spec.access_mode is not None:
            return spec.access_mode
        view = self._view()
        return self._class().access_mode if view is None else str(view.spec.access_mode)

    @property
    def namespace(self) -> str:
        """The namespace; without one of its own that of `kt.config`."""
        return self._spec.namespace or config.namespace

    @property
    def volume_name(self) -> str | None:
        """PersistentVolume that it is bound to, if one was named."""
        return self._spec.volume_name

    @property
    def storage_class(self) -> str:
        """The storage class; the controller is asked if none was given.

        Raises:
            SpecError: There is none for its access mode.
        """
        spec = self._spec
        if spec.storage_class is not None:
            return spec.storage_class
        if spec.volume_name is not None:
            return ""
        view = None if spec.claim is None and spec.access_mode is not None else self._view()
        if view is not None:
            return view.storage_class
        return self._class().storage_class

    def exists(self) -> bool:
        """True if the volume exists."""
        return self._view() is not None

    def config(self) -> dict[str, str | None]:
        """The declaration, with its storage class or the volume that it is bound to."""
        spec = self._spec
        declaration = {
            "name": spec.name,
            "size": spec.size,
            "access_mode": self.access_mode,
            "mount_path": spec.mount_path,
            "namespace": self.namespace,
        }
        if spec.volume_name is not None:
            return {**declaration, "volume_name": spec.volume_name}
        return {**declaration, "storage_class": self.storage_class}

    def pod_template_spec(self) -> dict[str, Any]:
        """The volume as the spec of a pod has it."""
        claim = {"claimName": self.pvc_name}
        return {"name": self.name, "persistentVolumeClaim": claim}

    def to_spec(self) -> VolumeSpec:
        """The frozen form, as a compute has it mounted."""
        return self._reference or self._spec

    # ---------------------------------------------------------------------------------- changing

    def create(self) -> dict[str, Any]:
        """Make it, if it is not there; its PersistentVolumeClaim.

        Raises:
            VolumeNotFoundError: It stands for a claim that does not exist.
            SpecError: There is no storage class for its access mode.
        """
        spec, namespace = self._spec, self.namespace
        if spec.claim is not None:
            view = self._existing()
        else:
            view = backend.session().ask(lambda controller: create(controller, namespace, spec))
        # Declaring a volume loads no manifests.
        from kubetorch.manifests import storage  # noqa: PLC0415

        return storage.claim_of(
            view.spec,
            namespace=view.namespace,
            claim=view.claim,
            storage_class=view.storage_class,
            phase=view.phase,
        )

    def delete(self, wait: bool = True, timeout: float = TIMING.volume_delete_seconds) -> None:
        """Delete it and what is in it; that there is none is only a warning.

        Args:
            wait: Whether to wait until it is gone.
            timeout: For how many seconds; that it is still there then is a warning.

        Raises:
            VolumeInUseError: Services have it mounted.
            SpecError: It stands for a claim that Kubetorch did not make.
        """
        spec, namespace = self._spec, self.namespace
        if spec.claim is not None:
            raise SpecError(
                f"the claim {spec.claim!r} was not made as a kt.Volume, and so is not deleted",
                hint=f"kubectl delete pvc {spec.claim} -n {namespace}",
            )
        seconds = timeout if wait else 0.0
        try:
            is_gone = backend.session().ask(
                lambda controller: controller.volumes.delete(
                    namespace, spec.claim_name, wait=seconds
                )
            )
        except VolumeNotFoundError as error:
            parameters.warn(error.message)
            return
        if wait and not is_gone:
            parameters.warn(f"the volume {spec.name!r} is still there after {timeout:g} s")

    def ssh(self, image: str = "alpine:latest") -> None:
        """Open a shell in it; returns when that ends.

        Args:
            image: Image of the pod that a cluster starts for it.

        Raises:
            VolumeNotFoundError: There is none of that name.
        """
        from kubetorch.sdk import shells  # noqa: PLC0415  # starts a process

        view = self._existing()
        shells.run_in_volume(backend.session(), view, mount_path=self.mount_path, image=image)

    def _class(self) -> StorageClass:
        """The class and the access mode of a new volume with this declaration."""
        spec, namespace = self._spec, self.namespace
        return backend.session().ask(
            lambda controller: controller.volumes.storage_class(spec, namespace)
        )

    def _view(self) -> VolumeView | None:
        namespace, claim = self.namespace, self.pvc_name
        return backend.session().ask(lambda controller: controller.volumes.get(namespace, claim))

    def _existing(self) -> VolumeView:
        view = self._view()
        if view is None:
            namespace, claim = self.namespace, self.pvc_name
            raise backend.session().ask(
                lambda controller: not_found_error(controller, claim, namespace)
            )
        return view

    # ------------------------------------------------------------------------------- as a value

    def __eq__(self, other: object) -> bool:
        return self._spec == other._spec if isinstance(other, Volume) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._spec)

    def __repr__(self) -> str:
        spec = self._spec
        arguments = {
            "name": spec.name,
            "size": spec.size,
            "mount_path": spec.mount_path,
            "storage_class": spec.storage_class,
            "access_mode": spec.access_mode,
            "namespace": spec.namespace,
            "volume_name": spec.volume_name,
            "pvc": spec.claim,
        }
        return parameters.expression("Volume", arguments)


def create(controller: Controller, namespace: str, spec: VolumeSpec) -> VolumeView:
    """Make a volume, if it is not there; a line says if its chosen access mode is RWO."""
    created = controller.volumes.create(namespace, spec)
    view = created.volume
    if created.is_new and spec.access_mode is None and view.spec.access_mode == specs.UNSHARED:
        about = f"its storage class {view.storage_class}" if view.storage_class else "it"
        terminal.say(
            f"the volume {view.claim} is {specs.UNSHARED} (pods of one node at a time): {about} "
            f'is not known to be shared; access_mode="{specs.SHARED}" if it is'
        )
    return view


def _may_be_elsewhere(claim: str) -> bool:
    """True if another namespace, which a service may be in, has a volume of that name."""
    try:
        volumes = backend.session().ask(lambda controller: controller.volumes.list(None))
    except KubetorchError:  # without the right to list volumes, the deploy finds it out
        return True
    return any(volume.claim == claim for volume in volumes)


def not_found_error(controller: Controller, claim: str, namespace: str) -> VolumeNotFoundError:
    hint = (
        f"kt volumes list -n {namespace} shows the volumes; namespace=... looks for the volume "
        f"in another namespace, kt.Compute(volumes=[{claim!r}]) in that of the service"
    )
    with suppress(KubetorchError):  # who may not list them gets no help
        claims = [view.claim for view in controller.volumes.list(namespace)]
        suggestion = did_you_mean(claim, claims, likeness=0.6)
        hint = f"{suggestion} {hint}" if suggestion else hint
    return VolumeNotFoundError(
        f"Volume {claim!r} does not exist in namespace {namespace!r}", hint=hint
    )
