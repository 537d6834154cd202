"""What an earlier service left of pods that nobody knows: their processes, and their folders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Set

from kubetorch.controller.backends.site import Site
from kubetorch.lib import identity
from kubetorch.wire.podenv import MARK


async def sweep(
    site: Site, *, marks: Callable[[], Set[str]], pods: Callable[[], Set[tuple[str, str]]]
) -> None:
    """End the processes, and remove the folders.

    Args:
        site: Where pods are.
        marks: The marks of pods and spares that are known now.
        pods: Namespace and name of the pods that are known now.
    """
    found = await asyncio.to_thread(identity.processes_with, MARK)
    # On the loop: between being a spare and being a pod, no agent is a stray.
    known = marks()
    for pid, mark in found.items():
        if mark.startswith(site.marks) and mark not in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(_remove_folders, site, pods(), pods)


def _remove_folders(
    site: Site, known: Set[tuple[str, str]], pods: Callable[[], Set[tuple[str, str]]]
) -> None:
    import shutil  # noqa: PLC0415  # rarely needed, and costs 3 ms of each start

    folders = site.home / "pods"
    for namespace in folders.iterdir() if folders.exists() else ():
        for folder in namespace.iterdir():
            key = (namespace.name, folder.name)
            # It may have come since.
            if key not in known and key not in pods():
                shutil.rmtree(folder, ignore_errors=True)
