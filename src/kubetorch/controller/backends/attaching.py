"""Secrets and volumes in the pods of the local backend: whether they are there, and where from.

Variables come with the environment of an agent. Files of secrets never lie on a disk outside of
the secrets' own folder: an agent is told which secret to show where, and shows it from memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kubetorch.controller.backends.secret_files import SecretFiles
from kubetorch.controller.backends.stores import Stores
from kubetorch.controller.backends.volume_folders import VolumeFolders, missing
from kubetorch.errors import ResourceNotAvailableError, SecretNotFound, SpecError
from kubetorch.manifests.attached import Attached, path_of_machine
from kubetorch.manifests.deployment import Wanted
from kubetorch.wire.attachments import Attachments, FilesAt, FolderAt

#: Where Kubernetes mounts shared memory; every process of a machine has that.
_SHARED_MEMORY = "/dev/shm"


class Given(NamedTuple):
    """What a pod is given.

    Attributes:
        variables: Variables of its container.
        paths: What it is shown at absolute paths.
    """

    variables: dict[str, str]
    paths: Attachments


class Attaching:
    """Finds what pods are given.

    Args:
        secrets: The secrets of the installation.
        volumes: Its volumes.
    """

    def __init__(self, secrets: SecretFiles, volumes: VolumeFolders) -> None:
        #: Where the controller keeps them.
        self.stores = Stores(secrets, volumes)
        self._secrets = secrets
        self._volumes = volumes
        # What the machine says of mount namespaces, once it was asked.
        self._refusal: str | None = None
        self._is_known = False

    async def check(self, namespace: str, attached: Attached) -> None:
        """Refuse what pods could not be given.

        Raises:
            SecretNotFound: A secret is not there.
            SpecError: A secret has no value of that name.
            VolumeNotFoundError: A volume is not there.
            ResourceNotAvailableError: The machine allows no mount namespaces.
        """
        for _ in self._variables(namespace, attached):
            pass
        for secret in attached.secrets:
            if self._secrets.view(namespace, secret) is None:
                raise SecretNotFound(secret, namespace)
        for claim in attached.claims:
            if self._volumes.view(namespace, claim.claim) is None:
                raise missing(namespace, claim.claim)
        if attached.paths:
            await self._check_mounts()

    def version(self, namespace: str, attached: Attached) -> str:
        """What changes when pods have to be replaced to see other values.

        Empty without secrets, and when one is missing: pods that saw it go on as they are.
        """
        views = [self._secrets.view(namespace, name) for name in attached.all_secrets]
        versions = [view.version for view in views if view is not None]
        if len(versions) < len(views):
            return ""
        return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:8] if versions else ""

    def give(self, wanted: Wanted, folder: Path) -> Given:
        """What a pod is given when its agent starts.

        Args:
            wanted: What its manifest says.
            folder: The pod's own.

        Raises:
            SecretNotFound: A secret is not there.
            SpecError: It has no value of that name, or one that no variable can have.
            VolumeNotFoundError: A volume is not there.
        """
        namespace, attached = wanted.namespace, wanted.attached
        variables = {**dict(wanted.environment), **dict(self._variables(namespace, attached))}
        return Given(variables, self._paths(namespace, attached, folder))

    def _paths(self, namespace: str, attached: Attached, folder: Path) -> Attachments:
        home = str(Path.home())
        files = []
        for one in attached.files:
            if self._secrets.view(namespace, one.secret) is not None:
                file = str(self._secrets.file(namespace, one.secret))
                files.append(FilesAt(file, path_of_machine(one.path, home), one.items))
        folders = []
        for claim in attached.claims:
            source = _inside(self._volumes.folder(namespace, claim.claim), claim.sub_path)
            target = path_of_machine(claim.path, home)
            folders.append(FolderAt(str(source), target, claim.read_only))
        for number, path in enumerate(_empty(attached)):
            source = folder / "empty" / str(number)
            folders.append(FolderAt(str(source), path_of_machine(path, home)))
        return Attachments(tuple(folders), tuple(files))

    def sweep(self) -> None:
        """Remove what a service that was killed left of volumes that were deleted."""
        self._volumes.sweep()

    def notes(self, attached: Attached) -> tuple[str, ...]:
        """What pods are not given, one sentence each."""
        shown = set(_empty(attached))
        return tuple(
            f"there is no volume of the kind {kind} at {path} here"
            for path, kind in attached.others
            if path not in shown and path != _SHARED_MEMORY
        )

    def _variables(self, namespace: str, attached: Attached) -> Iterator[tuple[str, str]]:
        for one in attached.variables:
            values = self._secrets.read(namespace, one.secret)
            if values is None:
                if one.optional:
                    continue
                raise SecretNotFound(one.secret, namespace)
            if one.variable is None:
                for key in values:
                    yield one.prefix + key, _text(one.secret, key, values[key])
            elif one.key in values:
                yield one.variable, _text(one.secret, one.key, values[one.key])
            elif not one.optional:
                raise SpecError(
                    f"the secret {one.secret!r} in namespace {namespace!r} has no {one.key!r}; it "
                    f"has {', '.join(values) or 'nothing'}"
                )

    async def _check_mounts(self) -> None:
        if not self._is_known:
            # Costs the start of every service 5 ms, and few need it.
            from kubetorch.controller.backends import probing  # noqa: PLC0415

            self._refusal = await probing.probe()
            self._is_known = True
        if self._refusal is not None:
            raise ResourceNotAvailableError(
                f"secrets as files and volumes need a mount namespace, which this machine does "
                f"not allow: {self._refusal}",
                hint="that takes Linux, and root or user namespaces; secrets as variables work "
                "everywhere",
            )


def _inside(volume: Path, folder: str) -> Path:
    """A folder of a volume, in which pods may have made links.

    Raises:
        SpecError: It is a link out of the volume.
    """
    found = (volume / folder).resolve()
    if not found.is_relative_to(volume.resolve()):
        raise SpecError(
            f"the folder {folder!r} of the volume {volume.name!r} is a link out of it",
            hint="subPath must be a folder in the volume",
        )
    return found


def _empty(attached: Attached) -> list[str]:
    """Paths of folders that begin empty and live as long as their pod."""
    return [p for p, kind in attached.others if kind == "emptyDir" and p != _SHARED_MEMORY]


def _text(secret: str, key: str, value: bytes) -> str:
    if b"\0" in value:
        raise SpecError(
            f"{key!r} of the secret {secret!r} is no text, so it cannot be a variable",
            hint="a secret with `path` becomes files",
        )
    return value.decode("utf-8", "surrogateescape")
