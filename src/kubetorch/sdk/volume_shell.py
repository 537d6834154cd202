"""A shell in a volume."""

from __future__ import annotations

import os
import subprocess

from kubetorch.errors import ConfigError
from kubetorch.sdk.session import Session
from kubetorch.wire.volumes import VolumeView


def run(session: Session, view: VolumeView, *, mount_path: str, image: str) -> None:
    """Open a shell in a volume; returns when that ends.

    Args:
        session: The way to its controller.
        view: The volume.
        mount_path: Where a pod that is started for it has it.
        image: Image of that pod.

    Raises:
        ConfigError: There is nothing to do it with.
    """
    if view.folder is None:
        _run_in_cluster(session, view, mount_path, image)
        return
    shell = os.environ.get("SHELL") or "/bin/sh"
    subprocess.run([shell], cwd=view.folder, check=False)


def _run_in_cluster(session: Session, view: VolumeView, mount_path: str, image: str) -> None:
    from kubetorch.sdk import volume_pod  # noqa: PLC0415  # loads what reaches a cluster
    from kubetorch.sdk.reach.cluster import Cluster  # noqa: PLC0415  # as above

    if not isinstance(session.way, Cluster):
        raise ConfigError(
            f"a shell in the volume {view.claim!r} takes a pod of yours, and this program does not "
            "speak with the API server",
            hint="unset KT_API_URL, and run it outside of pods with a kubeconfig",
        )
    volume_pod.run(session.way.access, view, mount_path=mount_path, image=image)
