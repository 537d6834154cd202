"""Secrets and volumes as files and folders of the user, and how pods of this machine get them.

A secret is the file `secrets/<namespace>/<object>.json`, 0600 in 0700. The file is written beside
and renamed, and no method awaits between reading and writing: so each of two racing uploads sees
all of the other one or nothing.

A volume is the folder `volumes/<namespace>/<claim>`. The file `.<claim>.json` beside the folder has
the declaration, and makes the folder a volume. So a creation ends with that file, and a deletion
begins with it. The folder is renamed before it is emptied; if the service is killed then, the next
start removes the rest.

Variables come with the environment of an agent. The values of secrets are on no disk outside of the
folder of the secrets: an agent gets the path of a secret's file, and shows the values as files from
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from kubetorch.controller.backends.base import Stores, check_views, decide_put, missing_volume
from kubetorch.controller.tuning import TIMING
from kubetorch.errors import (
    ControllerError,
    ResourceNotAvailableError,
    SecretNotFound,
    SpecError,
    StorageFullError,
)
from kubetorch.lib import deadlines, files, mounts
from kubetorch.lib.decoders import json_decoder
from kubetorch.lib.secret_bytes import SecretBytes
from kubetorch.manifests import secrets as manifests
from kubetorch.manifests.container_variables import (
    ConfigVariables,
    FieldVariable,
    PodFacts,
    ResourceVariable,
    SecretVariables,
    TextVariable,
    expand_references,
)
from kubetorch.manifests.desired_pods import Attached, DesiredPods, path_of_machine
from kubetorch.manifests.storage import SHARED_MEMORY_PATH
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import SHARED, VolumeSpec
from kubetorch.wire.podenv import Attachments, FilesAt, FolderAt
from kubetorch.wire.secrets import (
    Outcome,
    PutSecret,
    SecretDraft,
    SecretFile,
    SecretView,
    StoredSecret,
)
from kubetorch.wire.volumes import CreatedVolume, StorageClass, VolumeView

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_SUFFIX = ".json"
#: The storage class of all volumes on this machine.
STORAGE_CLASS = "local"
_DELETED_PREFIX = ".deleted-"


def fail(path: Path, error: OSError) -> NoReturn:
    """Raise a typed error for an error of the file system."""
    if error.errno in _FULL_ERRNOS:
        raise StorageFullError(f"no space left for {path}", hint="make room there") from error
    raise ControllerError(f"{path} cannot be used: {error.strerror}") from error


class SecretFiles:
    """The secrets of an installation; a `SecretStore`."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock

    async def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        old = self._read(namespace, object_name)
        outcome, values = decide_put(namespace, put, None if old is None else old.values)
        if old is not None and outcome == "unchanged":
            return StoredSecret(outcome=outcome, secret=_view(namespace, object_name, old))
        draft = old.draft if old is not None and outcome == "merged" else put.draft
        return self._store(namespace, object_name, draft, values, outcome, old)

    async def get(self, namespace: str, object_name: str) -> SecretView | None:
        return self.view(namespace, object_name)

    async def values(self, namespace: str, object_name: str) -> dict[str, bytes]:
        secret_file = self._read(namespace, object_name)
        if secret_file is None:
            raise SecretNotFound(object_name, namespace)
        return secret_file.values

    async def list(self, namespace: str | None) -> list[SecretView]:  # SecretStore's
        views = (self.view(*key) for key in self._keys(namespace))
        return [view for view in views if view is not None]

    async def delete(self, namespace: str, object_name: str) -> bool:  # SecretStore's
        path = self.file(namespace, object_name)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            fail(path, error)
        return True

    def view(self, namespace: str, object_name: str) -> SecretView | None:
        secret_file = self._read(namespace, object_name)
        return None if secret_file is None else _view(namespace, object_name, secret_file)

    def read(self, namespace: str, object_name: str) -> SecretBytes | None:
        secret_file = self._read(namespace, object_name)
        return None if secret_file is None else SecretBytes(secret_file.values)

    def file(self, namespace: str, object_name: str) -> Path:
        return self._folder / namespace / f"{object_name}{_SUFFIX}"

    def _keys(self, namespace: str | None) -> Iterator[tuple[str, str]]:
        for path in sorted(self._folder.glob(f"{namespace or '*'}/[!.]*{_SUFFIX}")):
            yield path.parent.name, path.name.removesuffix(_SUFFIX)

    def _read(self, namespace: str, object_name: str) -> SecretFile | None:
        path = self.file(namespace, object_name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            fail(path, error)
        try:
            return json_decoder(SecretFile).decode(data)
        except msgspec.MsgspecError:
            # Without a cause, since its text may have values from the file.
            raise ControllerError(
                f"the file of a secret, {path}, is broken", hint="delete it, and deploy again"
            ) from None

    def _store(
        self,
        namespace: str,
        object_name: str,
        draft: SecretDraft,
        values: dict[str, bytes],
        outcome: Outcome,
        old: SecretFile | None,
    ) -> StoredSecret:
        now = self._clock()
        created = now if old is None else old.created
        new = SecretFile(
            draft=draft, values=values, version=os.urandom(8).hex(), created=created, updated=now
        )
        path = self.file(namespace, object_name)
        try:
            for folder in (self._folder, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            files.write_atomically(path, msgspec.json.encode(new))
        except OSError as error:
            fail(path, error)
        return StoredSecret(outcome=outcome, secret=_view(namespace, object_name, new))


def _view(namespace: str, object_name: str, stored: SecretFile) -> SecretView:
    draft, keys = stored.draft, tuple(stored.values)
    ref = SecretRef(draft.name, object_name, draft.mount_type, keys, draft.path)
    shell = manifests.secret_manifest(
        ref, namespace=namespace, username=draft.username, provider=draft.provider
    )
    return SecretView(
        namespace=namespace,
        object_name=object_name,
        name=draft.name,
        mount_type=draft.mount_type,
        keys=keys,
        version=stored.version,
        path=draft.path,
        renamed=draft.renamed,
        provider=draft.provider,
        username=draft.username,
        override=draft.override,
        labels=shell["metadata"]["labels"],
        created=stored.created,
        updated=stored.updated,
    )


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a volume, as in the file beside its folder."""

    spec: VolumeSpec
    created: float


class VolumeFolders:
    """The volumes of an installation; a `VolumeStore`."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock

    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        claim = spec.claim_name
        existing_view = self.view(namespace, claim)
        if existing_view is not None:
            return CreatedVolume(is_new=False, volume=existing_view)
        folder, note = self._folder / namespace / claim, self._note(namespace, claim)
        mode = (await self.storage_class(spec)).access_mode
        stored = _Stored(spec=replace(spec, access_mode=mode), created=self._clock())
        try:
            for directory in (self._folder, folder.parent, folder):
                directory.mkdir(mode=0o700, exist_ok=True)
            files.write_atomically(note, msgspec.json.encode(stored))
        except OSError as error:
            fail(folder, error)
        return CreatedVolume(is_new=True, volume=self._view(namespace, claim, stored))

    async def get(self, namespace: str, claim: str) -> VolumeView | None:
        return self.view(namespace, claim)

    async def list(self, namespace: str | None) -> list[VolumeView]:  # VolumeStore's
        views = (self.view(*key) for key in self._keys(namespace))
        return [view for view in views if view is not None]

    async def delete(
        self, namespace: str, claim: str, *, wait: float, is_forced: bool = False
    ) -> bool:
        folder = self._folder / namespace / claim
        deleted_folder = folder.with_name(_DELETED_PREFIX + os.urandom(8).hex())
        try:
            self._note(namespace, claim).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                folder.rename(deleted_folder)
        except OSError as error:
            fail(folder, error)
        # The volume has disappeared; the removal of its files may take long.
        await asyncio.to_thread(shutil.rmtree, deleted_folder, ignore_errors=True)
        return True

    async def storage_class(self, spec: VolumeSpec) -> StorageClass:  # VolumeStore's
        # All pods of this machine share the folder.
        return StorageClass(spec.storage_class or STORAGE_CLASS, spec.access_mode or SHARED)

    def view(self, namespace: str, claim: str) -> VolumeView | None:
        note = self._note(namespace, claim)
        try:
            stored = json_decoder(_Stored).decode(note.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            fail(note, error)
        except msgspec.MsgspecError as error:
            raise ControllerError(
                f"the file of a volume, {note}, is broken: {error}",
                hint="delete the file; the volume can then be created again and keeps its content",
            ) from error
        return self._view(namespace, claim, stored)

    def folder(self, namespace: str, claim: str) -> Path:
        if self.view(namespace, claim) is None:
            raise missing_volume(namespace, claim)
        return self._folder / namespace / claim

    def sweep(self) -> None:
        """Remove the remaining files of deleted volumes."""
        for folder in self._folder.glob(f"*/{_DELETED_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _note(self, namespace: str, claim: str) -> Path:
        return self._folder / namespace / f".{claim}{_SUFFIX}"

    def _keys(self, namespace: str | None) -> Iterator[tuple[str, str]]:
        for note in sorted(self._folder.glob(f"{namespace or '*'}/.[!.]*{_SUFFIX}")):
            yield note.parent.name, note.name.removeprefix(".").removesuffix(_SUFFIX)

    def _view(self, namespace: str, claim: str, stored: _Stored) -> VolumeView:
        return VolumeView(
            namespace=namespace,
            claim=claim,
            spec=stored.spec,
            storage_class=stored.spec.storage_class or STORAGE_CLASS,
            folder=str(self._folder / namespace / claim),
            created=stored.created,
        )


class PodInputs(NamedTuple):
    """The variables and mounted paths of a pod, and what its manifest declares.

    Attributes:
        working_dir: Its working directory, if declared.
        grace: Seconds from SIGTERM to SIGKILL, if declared.
    """

    variables: dict[str, str]
    paths: Attachments
    working_dir: str | None = None
    grace: float | None = None


class PodAttachments:
    def __init__(self, secrets: SecretFiles, volumes: VolumeFolders) -> None:
        #: The stores of the controller's routes.
        self.stores = Stores(secrets, volumes)
        self._secrets = secrets
        self.volumes = volumes
        # Why the machine allows no mount namespaces; empty if it allows them, `None` if untested.
        self._refusal: str | None = None

    async def check(self, pod_set: DesiredPods, facts: PodFacts) -> None:
        self._check(pod_set.namespace, pod_set.attached)
        variables = self.resolve(pod_set, facts)
        for claim in pod_set.attached.claims:
            claim.expand_sub_path(variables)
        if pod_set.attached.paths:
            await self._check_mounts()

    def _check(self, namespace: str, attached: Attached) -> None:
        secrets = {name: self._secrets.view(namespace, name) for name in attached.all_secrets}
        claims = {
            mount.claim: self.volumes.view(namespace, mount.claim) for mount in attached.claims
        }
        check_views(namespace, attached, secrets, claims)

    def version(self, namespace: str, attached: Attached) -> str:
        """A fingerprint of the secrets' versions: pods are replaced when it changes.

        Empty without secrets, and when a secret is missing: pods that have its values go on.
        """
        views = [self._secrets.view(namespace, name) for name in attached.all_secrets]
        versions = [view.version for view in views if view is not None]
        if len(versions) < len(views):
            return ""
        return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:8] if versions else ""

    def inputs(self, pod_set: DesiredPods, folder: Path, facts: PodFacts) -> PodInputs:
        namespace, attached = pod_set.namespace, pod_set.attached
        self._check(namespace, attached)
        variables = self.resolve(pod_set, facts)
        paths = self._paths(namespace, attached, folder, variables)
        return PodInputs(variables, paths, pod_set.working_dir, pod_set.grace_seconds)

    def _paths(
        self, namespace: str, attached: Attached, folder: Path, variables: Mapping[str, str]
    ) -> Attachments:
        home = str(Path.home())
        files = []
        for secret_files in attached.files:
            if self._secrets.view(namespace, secret_files.secret) is not None:
                file = str(self._secrets.file(namespace, secret_files.secret))
                files.append(
                    FilesAt(file, path_of_machine(secret_files.path, home), secret_files.items)
                )
        folders = []
        for claim in attached.claims:
            volume = self.volumes.folder(namespace, claim.claim)
            source = _folder_inside(volume, claim.expand_sub_path(variables))
            target = path_of_machine(claim.path, home)
            folders.append(FolderAt(str(source), target, claim.read_only))
        for number, path in enumerate(_empty_dirs(attached)):
            source = folder / "empty" / str(number)
            folders.append(FolderAt(str(source), path_of_machine(path, home)))
        return Attachments(tuple(folders), tuple(files))

    def notes(self, pod_set: DesiredPods) -> tuple[str, ...]:
        """Sentences on the volumes and config maps that pods lack on this machine."""
        attached = pod_set.attached
        empty_dirs = set(_empty_dirs(attached))
        config_maps = {
            variable.config_map: None
            for variable in pod_set.variables
            if isinstance(variable, ConfigVariables)
        }
        return (
            *(f"there is no config map {name}, which may be missing" for name in config_maps),
            *(
                f"there is no volume of the kind {kind} at {path} here"
                for path, kind in attached.other_mounts
                if path not in empty_dirs and path != SHARED_MEMORY_PATH
            ),
        )

    def resolve(self, pod_set: DesiredPods, facts: PodFacts) -> dict[str, str]:
        """The values of a pod's variables, in the order of Kubernetes."""
        values: dict[str, str] = {}
        for variable in pod_set.variables:
            match variable:
                case TextVariable(name, text):
                    values[name] = expand_references(text, values)
                case FieldVariable(name):
                    values[name] = facts.field(variable)
                case ResourceVariable(name):
                    values[name] = facts.amount(variable)
                case SecretVariables():
                    values.update(self._of_secret(pod_set.namespace, variable))
                case ConfigVariables(config_map):
                    if not variable.optional:
                        raise _no_config_map(config_map, variable.variable)
        return values

    def _of_secret(self, namespace: str, variable: SecretVariables) -> Iterator[tuple[str, str]]:
        values = self._secrets.read(namespace, variable.secret)
        if values is None:
            return
        if variable.variable is None:
            for key in values:
                yield variable.prefix + key, _text(variable.secret, key, values[key])
        elif variable.key in values:
            yield variable.variable, _text(variable.secret, variable.key, values[variable.key])

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


def _folder_inside(volume: Path, folder: str) -> Path:
    """The path of a folder in a volume; a link out of the volume is refused."""
    subfolder = (volume / folder).resolve()
    if not subfolder.is_relative_to(volume.resolve()):
        raise SpecError(
            f"the folder {folder!r} of the volume {volume.name!r} is a link out of it",
            hint="subPath must be a folder in the volume",
        )
    return subfolder


def _empty_dirs(attached: Attached) -> list[str]:
    """The paths of folders that begin empty and live as long as their pod."""
    return [
        p for p, kind in attached.other_mounts if kind == "emptyDir" and p != SHARED_MEMORY_PATH
    ]


def _no_config_map(name: str, variable: str | None) -> ResourceNotAvailableError:
    subject = "variables of envFrom come" if variable is None else f"the variable {variable} comes"
    return ResourceNotAvailableError(
        f"{subject} from the config map {name!r}, and there are no config maps on this machine",
        hint="optional: true leaves it out, env_vars= gives values here, or deploy to a cluster",
    )


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
            async with deadlines.timeout(TIMING.mount_probe_seconds):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"it did not answer within {TIMING.mount_probe_seconds:.0f} s"
        if process.returncode == 0:
            return None
        return output.decode(errors="replace").strip() or f"exit status {process.returncode}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
