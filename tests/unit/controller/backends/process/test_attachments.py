"""What pods are given of volumes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kubetorch.controller.backends.process.stores import PodAttachments, SecretFiles, VolumeFolders
from kubetorch.errors import SpecError
from kubetorch.manifests.container_variables import FieldVariable, PodFacts, Variable
from kubetorch.manifests.desired_pods import Attached, ClaimMount, DesiredPods
from kubetorch.specs.volume import VolumeSpec

NOTHING = PodFacts({}, {}, {}, {})


def mounting(claim: ClaimMount, *variables: Variable) -> DesiredPods:
    attached = Attached(claims=(claim,))
    return DesiredPods(
        "ns", "w", 1, "", variables, None, "Deployment", False, (), attached=attached
    )


def test_each_pod_has_the_folder_that_its_variables_name(tmp_path: Path) -> None:
    volumes = VolumeFolders(tmp_path / "volumes", lambda: 0.0)
    spec = VolumeSpec("data", "/data", "1Gi")
    volume = Path(asyncio.run(volumes.create("ns", spec)).volume.folder or "")
    attachments = PodAttachments(SecretFiles(tmp_path / "secrets", lambda: 0.0), volumes)

    def mounted_source(expression: str, pod_name: str = "w-1") -> str:
        claim = ClaimMount(spec.claim_name, "/data", sub_path_expression=expression)
        pods = mounting(claim, FieldVariable("POD", "metadata.name"))
        facts = PodFacts({"metadata.name": pod_name}, {}, {}, {})
        return attachments.inputs(pods, tmp_path / "pod", facts).paths.folders[0].source

    assert mounted_source("runs/$(POD)") == str(volume / "runs" / "w-1")
    with pytest.raises(SpecError, match=r"'\$\(RANK\)' of the claim 'data' names a variable"):
        mounted_source("$(RANK)")
    with pytest.raises(SpecError, match="leads out of it"):
        mounted_source("$(POD)", "../w-1")


def test_a_folder_of_a_volume_that_is_a_link_out_of_it_is_not_mounted(tmp_path: Path) -> None:
    volumes = VolumeFolders(tmp_path / "volumes", lambda: 0.0)
    spec = VolumeSpec("data", "/data", "1Gi")
    volume = Path(asyncio.run(volumes.create("ns", spec)).volume.folder or "")
    (volume / "inner").mkdir()
    (volume / "good").symlink_to("inner")
    (volume / "bad").symlink_to(tmp_path)
    attachments = PodAttachments(SecretFiles(tmp_path / "secrets", lambda: 0.0), volumes)

    def mounted_source(folder: str) -> str:
        pods = mounting(ClaimMount(spec.claim_name, "/data", sub_path=folder))
        return attachments.inputs(pods, tmp_path / "pod", NOTHING).paths.folders[0].source

    assert mounted_source("good") == str(volume / "inner")
    assert mounted_source("new") == str(volume / "new")
    with pytest.raises(SpecError, match="a link out of it"):
        mounted_source("bad/etc")
