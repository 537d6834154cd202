"""A shell in a volume."""

from __future__ import annotations

import os
import subprocess

from kubetorch.errors import ConfigError
from kubetorch.wire.volumes import VolumeView


def run(view: VolumeView, *, mount_path: str, image: str) -> None:
    """Open a shell in a volume; returns when that ends.

    Args:
        view: The volume.
        mount_path: Where a pod that is started for it has it.
        image: Image of that pod.

    Raises:
        ConfigError: There is nothing to do it with.
    """
    if view.folder is None:
        raise ConfigError(
            f"the volume {view.claim!r} lies in a cluster, which this release cannot reach",
            hint=f"kubectl run -it --image {image}, with the claim at {mount_path}",
        )
    shell = os.environ.get("SHELL") or "/bin/sh"
    subprocess.run([shell], cwd=view.folder, check=False)
