"""The file system as the processes of a pod see it.

On Kubernetes the processes see the container's file system. On the local backend they see the
machine's, in a mount namespace of the pod's own, in which paths can be the pod's alone. The agent
enters the namespace when it starts, and its child processes inherit it.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from kubetorch.config import environment
from kubetorch.errors import ResourceNotAvailableError, SecretNotFound
from kubetorch.lib import mounts
from kubetorch.wire import messages, podenv
from kubetorch.wire.podenv import Attachments, FilesAt, FolderAt, PodEnv
from kubetorch.wire.secrets import SecretFile

#: Errors of the kernel for a mount that it does not allow, or does not know.
_REFUSAL_ERRNOS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENODEV)


class PodFilesystem:
    def __init__(self, pod: PodEnv, refusal: str | None) -> None:
        #: True for a container, whose files are the pod's own.
        self.is_container = pod.backend != "local"
        #: A warning for the user who deploys; empty if there is none.
        self.warning = ""
        #: Why pods of this machine can have no paths of their own; `None` if they can.
        self._refusal = refusal
        self._home = Path(pod.controller_file).parent
        self._data = podenv.own_data(Path(pod.root))
        folder = Path(pod.root) / "view"
        if not self.is_container:
            # The folder of an earlier agent of the pod, whose mounts ended with it.
            shutil.rmtree(folder, ignore_errors=True)
        self._view = mounts.View(folder)

    def attach(self, file: str) -> None:
        """Mount the folders of volumes and the files of secrets that the file names."""
        attachments = (
            messages.decode(Attachments, Path(file).read_bytes()) if file else Attachments()
        )
        if not (attachments.folders or attachments.files):
            return
        self._check()
        # A folder is mounted before the folders inside it.
        volumes_and_secrets: list[FolderAt | FilesAt] = [*attachments.folders, *attachments.files]
        for attachment in sorted(
            volumes_and_secrets, key=lambda attachment: len(Path(attachment.target).parts)
        ):
            try:
                if isinstance(attachment, FolderAt):
                    Path(attachment.source).mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._view.add(
                        mounts.Mount(attachment.source, attachment.target, attachment.read_only)
                    )
                else:
                    self._view.add_files(attachment.target, _secret_values(attachment))
            except OSError as error:
                raise _mount_error(error, f"{attachment.target}: ") from error

    def place_working_dir(self, pod: PodEnv) -> PodEnv:
        """Return the pod with its working directory at the declared path, if the machine allows it.

        The pod's own folder is mounted at that path. Where the machine has a folder with files, the
        program sees those files, and what the program writes stays in the pod.
        """
        pod_folder, declared_path = podenv.own_work(Path(pod.root)), Path(pod.working_dir)
        if self.is_container or declared_path == pod_folder:
            return pod
        try:
            self._check()
            if declared_path == Path("/"):
                raise _no_own_paths_error("it has the files of the machine")
            if declared_path.is_dir() and any(declared_path.iterdir()):
                self._view.cover(str(declared_path), self._shared)
            else:
                self._view.add(mounts.Mount(str(pod_folder), str(declared_path)))
        except (OSError, ResourceNotAvailableError) as error:
            reason = error.strerror if isinstance(error, OSError) else error.message
            self.warning = (
                f"the working directory of a pod is {pod_folder}, and not {declared_path}: {reason}"
            )
            return structs.replace(pod, working_dir=str(pod_folder))
        return pod

    async def shield(self, frozen: Iterable[str] = ()) -> None:
        """Keep in the pod whatever it writes at absolute paths from now on.

        The installation and its caches stay shared with the machine. A second call does nothing,
        unless the first one failed: then it tries again.
        """
        if self.is_container:
            return
        self._check()
        try:
            await asyncio.to_thread(self._view.shield, self._shared, tuple(frozen))
        except OSError as error:
            raise _mount_error(error) from error

    def clear(self, path: str, working_dir: str) -> Path:
        """Make room at a path of the pod for a link; returns the path of the link."""
        target = Path(path)
        if not self.is_container and not target.is_relative_to(working_dir):
            self._check()
            return self._view.clear(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target = target.parent.resolve() / target.name
        if target.is_symlink() and target.readlink().is_relative_to(self._data):
            target.unlink()  # of an earlier agent of the pod
        elif target.is_dir() and not target.is_symlink():
            target.rmdir()
        elif target.exists() or target.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "it is there and is no folder")
        return target

    @property
    def _shared(self) -> list[str]:
        """The folders that the pods of the machine share: the installation and its caches."""
        return [str(self._home), str(environment.cache_dir())]

    def _check(self) -> None:
        if self._refusal is not None:
            raise _no_own_paths_error(self._refusal)


def _secret_values(secret_files: FilesAt) -> dict[str, bytes]:
    """The contents of a secret's files, by file name."""
    file = Path(secret_files.secret)
    try:
        values = messages.decode(SecretFile, file.read_bytes()).values
    except FileNotFoundError:
        raise SecretNotFound(file.stem, file.parent.name) from None
    items = secret_files.items or tuple((key, key) for key in values)
    return {name: values[key] for key, name in items if key in values}


def _mount_error(error: OSError, where: str = "") -> ResourceNotAvailableError:
    file = f": {error.filename}" if error.strerror and error.filename else ""
    reason = f"{where}{error.strerror or error}{file}"
    if error.errno in _REFUSAL_ERRNOS:
        return _no_own_paths_error(reason)
    return ResourceNotAvailableError(
        f"the pod could not be given absolute paths of its own: {reason}"
    )


def _no_own_paths_error(reason: str) -> ResourceNotAvailableError:
    """The error for a machine whose pods can have no paths of their own."""
    return ResourceNotAvailableError(
        f"pods of this machine cannot have absolute paths of their own: {reason}",
        hint="that takes Linux, and root or user namespaces (Linux 5.11 for steps that write "
        "anywhere); paths in the working directory are the pod's own everywhere",
    )
