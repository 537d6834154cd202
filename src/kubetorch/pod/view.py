"""The file system as the processes of a pod see it.

On Kubernetes that is the container's. On the local backend it is the machine's, in a mount
namespace of the pod's own, in which paths can be the pod's alone. The agent goes into it when it
starts, so all that it starts is in it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from kubetorch.config import environment
from kubetorch.errors import ResourceNotAvailableError
from kubetorch.lib import mounts
from kubetorch.wire.podenv import PodEnv


class PodView:
    """What a pod sees.

    Args:
        pod: Who it is.
        refusal: What `kubetorch.lib.mounts.separate` said.
    """

    def __init__(self, pod: PodEnv, refusal: str | None) -> None:
        self._is_container = pod.backend != "local"
        self._refusal = refusal
        self._home = Path(pod.controller_file).parent
        self._lock = asyncio.Lock()
        folder = Path(pod.root) / "view"
        if not self._is_container:
            # What an agent before this one had; the mounts ended with it.
            shutil.rmtree(folder, ignore_errors=True)
        self._view = mounts.View(folder)

    async def shield(self, keep: Iterable[str] = ()) -> None:
        """See to it that what the pod writes at absolute paths from now on stays in the pod.

        Temporary folders, the installation, its caches and the agent's interpreter are shared with
        the machine as before. To ask again changes nothing.

        Args:
            keep: Further folders that are shared, such as environments of other interpreters.

        Raises:
            ResourceNotAvailableError: The machine cannot do that.
        """
        if self._is_container:
            return
        self._check()
        shared = [self._home, environment.cache_dir(), sys.prefix, sys.base_prefix, *keep]
        async with self._lock:
            try:
                await asyncio.to_thread(self._view.shield, [str(path) for path in shared])
            except OSError as error:
                raise cannot(error.strerror or str(error)) from error

    def _check(self) -> None:
        if self._refusal is not None:
            raise cannot(self._refusal)


def cannot(reason: str) -> ResourceNotAvailableError:
    """The error for a machine whose pods can have no paths of their own."""
    return ResourceNotAvailableError(
        f"pods of this machine cannot have absolute paths of their own: {reason}",
        hint="that takes Linux, and root or user namespaces; paths in the working directory are "
        "the pod's own everywhere",
    )
