"""Secrets and volumes in the pods of the local backend: whether they are there, and where from.

Variables come with the environment of an agent. Files of secrets never lie on a disk outside of
the secrets' own folder: an agent gets the path of a secret's file, and shows its content
from memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kubetorch.controller.backends.base import Stores, check_views
from kubetorch.controller.backends.process.stores import SecretFiles, VolumeFolders
from kubetorch.errors import ResourceNotAvailableError, SpecError
from kubetorch.lib import deadlines, mounts
from kubetorch.manifests.desired_pods import Attached, DesiredPods, path_of_machine
from kubetorch.wire.podenv import Attachments, FilesAt, FolderAt

#: Where Kubernetes mounts shared memory; every process of a machine has that.
_SHARED_MEMORY = "/dev/shm"
#: Seconds that the machine has to show whether it allows mount namespaces.
PROBE_TIMEOUT = 20.0


class PodInputs(NamedTuple):
    """The variables, the paths, and the working directory if one is declared, that a pod gets."""

    variables: dict[str, str]
    paths: Attachments
    working_dir: str | None = None


class PodAttachments:
    def __init__(self, secrets: SecretFiles, volumes: VolumeFolders) -> None:
        #: Where the controller keeps them.
        self.stores = Stores(secrets, volumes)
        self._secrets = secrets
        self._volumes = volumes
        # What the machine says of mount namespaces, once it was asked; empty: it allows them.
        self._refusal: str | None = None

    async def check(self, namespace: str, attached: Attached) -> None:
        self._check(namespace, attached)
        for _ in self._variables(namespace, attached):
            pass
        if attached.paths:
            await self._check_mounts()

    def _check(self, namespace: str, attached: Attached) -> None:
        secrets = {name: self._secrets.view(namespace, name) for name in attached.all_secrets}
        claims = {one.claim: self._volumes.view(namespace, one.claim) for one in attached.claims}
        check_views(namespace, attached, secrets, claims)

    def version(self, namespace: str, attached: Attached) -> str:
        """A fingerprint that changes when pods have to be replaced to see other values.

        Empty without secrets, and when one is missing: pods that saw it go on as they are.
        """
        views = [self._secrets.view(namespace, name) for name in attached.all_secrets]
        versions = [view.version for view in views if view is not None]
        if len(versions) < len(views):
            return ""
        return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:8] if versions else ""

    def give(self, wanted: DesiredPods, folder: Path) -> PodInputs:
        """The variables and paths of a pod when its agent starts."""
        namespace, attached = wanted.namespace, wanted.attached
        self._check(namespace, attached)
        variables = {**dict(wanted.environment), **dict(self._variables(namespace, attached))}
        return PodInputs(variables, self._paths(namespace, attached, folder), wanted.working_dir)

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
        """The volumes that pods do not get here, one sentence each."""
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
                continue
            if one.variable is None:
                for key in values:
                    yield one.prefix + key, _text(one.secret, key, values[key])
            elif one.key in values:
                yield one.variable, _text(one.secret, one.key, values[one.key])

    async def _check_mounts(self) -> None:
        if self._refusal is None:
            self._refusal = await probe() or ""
        if self._refusal:
            raise ResourceNotAvailableError(
                f"secrets as files and volumes need a mount namespace, which this machine does "
                f"not allow: {self._refusal}",
                hint="that takes Linux, and root or user namespaces; secrets as variables work "
                "everywhere",
            )


def _inside(volume: Path, folder: str) -> Path:
    """A folder of a volume, in which pods may have made links."""
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


async def probe() -> str | None:
    """Why this machine allows no mount namespaces; `None` if it does."""
    folder = tempfile.mkdtemp(prefix="kubetorch-")
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", mounts.__name__, folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with deadlines.timeout(PROBE_TIMEOUT):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"it did not answer within {PROBE_TIMEOUT:.0f} s"
        if process.returncode == 0:
            return None
        return said.decode(errors="replace").strip() or f"exit status {process.returncode}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
