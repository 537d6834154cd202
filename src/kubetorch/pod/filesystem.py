"""The file system as the processes of a pod see it.

On Kubernetes that is the container's. On the local backend it is the machine's, in a mount
namespace of the pod's own, in which paths can be the pod's alone. The agent goes into it when it
starts, so all that it starts is in it.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kubetorch.config import environment
from kubetorch.errors import ResourceNotAvailableError, SecretNotFound
from kubetorch.lib import mounts
from kubetorch.wire import messages, podenv
from kubetorch.wire.podenv import Attachments, FilesAt, FolderAt, PodEnv
from kubetorch.wire.secrets import SecretFile

#: What the kernel says of a mount that it does not allow, or does not know.
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENODEV)


class PodFilesystem:
    def __init__(self, pod: PodEnv, refusal: str | None) -> None:
        #: Whether that is a container's, whose files are the pod's own.
        self.is_container = pod.backend != "local"
        #: What who deploys should know of it.
        self.warning = ""
        self._refusal = refusal
        self._home = Path(pod.controller_file).parent
        folder = Path(pod.root) / "view"
        if not self.is_container:
            # What an agent before this one had; the mounts ended with it.
            shutil.rmtree(folder, ignore_errors=True)
        self._view = mounts.View(folder)

    def attach(self, file: str) -> None:
        """Show what the pod is given: folders of volumes, files of secrets."""
        given = messages.decode(Attachments, Path(file).read_bytes()) if file else Attachments()
        if not (given.folders or given.files):
            return
        self._check()
        # A folder within another one comes after it.
        both: list[FolderAt | FilesAt] = [*given.folders, *given.files]
        for one in sorted(both, key=lambda one: len(Path(one.target).parts)):
            try:
                if isinstance(one, FolderAt):
                    Path(one.source).mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._view.add(mounts.Mount(one.source, one.target, one.read_only))
                else:
                    self._view.add_files(one.target, _values(one))
            except OSError as error:
                raise _failed(error, f"{one.target}: ") from error

    def place_working_dir(self, pod: PodEnv) -> PodEnv:
        """The pod, whose working directory is at the path that it is declared to be, if it can be.

        It is the pod's own folder there. Where the machine has a folder with something in it, the
        program sees that, and what it writes stays in the pod.
        """
        own, path = podenv.own_work(Path(pod.root)), Path(pod.working_dir)
        if self.is_container or path == own:
            return pod
        try:
            self._check()
            if path == Path("/"):
                raise _refused("it has the files of the machine")
            if path.is_dir() and any(path.iterdir()):
                self._view.cover(str(path), self._shared)
            else:
                self._view.add(mounts.Mount(str(own), str(path)))
        except (OSError, ResourceNotAvailableError) as error:
            reason = error.strerror if isinstance(error, OSError) else error.message
            self.warning = f"the working directory of a pod is {own}, and not {path}: {reason}"
            return replace(pod, working_dir=str(own))
        return pod

    async def shield(self, frozen: Iterable[str] = ()) -> None:
        """See to it that what the pod writes at absolute paths from now on stays in the pod.

        The installation and its caches are shared with the machine as before. To ask again changes
        nothing, unless it failed before: then it is tried again.
        """
        if self.is_container:
            return
        self._check()
        try:
            await asyncio.to_thread(self._view.shield, self._shared, tuple(frozen))
        except OSError as error:
            raise _failed(error) from error

    @property
    def _shared(self) -> list[str]:
        """The folders that the pods of the machine share: the installation and its caches."""
        return [str(self._home), str(environment.cache_dir())]

    def _check(self) -> None:
        if self._refusal is not None:
            raise _refused(self._refusal)


def _values(one: FilesAt) -> dict[str, bytes]:
    """The files of a secret."""
    file = Path(one.secret)
    try:
        values = messages.decode(SecretFile, file.read_bytes()).values
    except FileNotFoundError:
        raise SecretNotFound(file.stem, file.parent.name) from None
    items = one.items or tuple((key, key) for key in values)
    return {name: values[key] for key, name in items if key in values}


def _failed(error: OSError, where: str = "") -> ResourceNotAvailableError:
    """The error for a mount that did not come about."""
    file = f": {error.filename}" if error.strerror and error.filename else ""
    reason = f"{where}{error.strerror or error}{file}"
    if error.errno in _REFUSALS:
        return _refused(reason)
    return ResourceNotAvailableError(
        f"the pod could not be given absolute paths of its own: {reason}"
    )


def _refused(reason: str) -> ResourceNotAvailableError:
    """The error for a machine whose pods can have no paths of their own."""
    return ResourceNotAvailableError(
        f"pods of this machine cannot have absolute paths of their own: {reason}",
        hint="that takes Linux, and root or user namespaces (Linux 5.11 for steps that write "
        "anywhere); paths in the working directory are the pod's own everywhere",
    )
