"""What pods are given of volumes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kubetorch.controller.backends.process.stores import PodAttachments, SecretFiles, VolumeFolders
from kubetorch.errors import SpecError
from kubetorch.manifests.container_variables import PodFacts
from kubetorch.manifests.desired_pods import Attached, ClaimMount, DesiredPods
from kubetorch.specs.volume import VolumeSpec

NOTHING = PodFacts({}, {}, {}, {})


def test_a_folder_of_a_volume_that_is_a_link_out_of_it_is_not_mounted(tmp_path: Path) -> None:
    volumes = VolumeFolders(tmp_path / "volumes", lambda: 0.0)
    spec = VolumeSpec("data", "/data", "1Gi")
    volume = Path(asyncio.run(volumes.create("ns", spec)).volume.folder or "")
    (volume / "inner").mkdir()
    (volume / "good").symlink_to("inner")
    (volume / "bad").symlink_to(tmp_path)
    attachments = PodAttachments(SecretFiles(tmp_path / "secrets", lambda: 0.0), volumes)

    def mounted_source(folder: str) -> str:
        claim = ClaimMount(spec.claim_name, "/data", sub_path=folder)
        attached = Attached(claims=(claim,))
        pods = DesiredPods("ns", "w", 1, "", (), None, "Deployment", False, (), attached=attached)
        return attachments.inputs(pods, tmp_path / "pod", NOTHING).paths.folders[0].source

    assert mounted_source("good") == str(volume / "inner")
    assert mounted_source("new") == str(volume / "new")
    with pytest.raises(SpecError, match="a link out of it"):
        mounted_source("bad/etc")
