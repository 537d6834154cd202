"""A volume that a program names is the one of that name where its service is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kubetorch as kt
from kubetorch.lib import mounts
from tests.local.user_project import UserProject

SOURCE = """
from pathlib import Path

def read(path):
    return Path(path).read_text()

def write(path, text):
    Path(path).write_text(text)
"""


@pytest.fixture
def jobs(emptied_home: Path, tmp_path: Path) -> Iterator[ModuleType]:
    probe = [sys.executable, "-m", mounts.__name__, str(tmp_path)]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("pods of this machine can have no paths of their own")
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


def on(namespace: str, volume: kt.Volume | str) -> kt.Compute:
    return kt.Compute(cpus="0.1", namespace=namespace, volumes=[volume])


def test_a_volume_by_its_name_is_the_one_where_the_service_is(jobs):
    for namespace, text in (("default", "of default"), ("team", "of team")):
        kt.Volume("shared", "1Gi", "/before", namespace=namespace).create()
        write = kt.fn(jobs.write).to(on(namespace, kt.Volume.from_name("shared", namespace)))
        write("/before/x", text)
        write.teardown()
    for volume in (kt.Volume.from_name("shared", mount_path="/here"), "shared"):
        path = "/before" if volume == "shared" else "/here"
        for namespace in ("team", "default"):
            read = kt.fn(jobs.read).to(on(namespace, volume))
            assert read(f"{path}/x") == f"of {namespace}"
            read.teardown()


def test_a_volume_that_only_another_namespace_has_is_found_by_its_service(jobs):
    kt.Volume("there", "1Gi", "/there", namespace="team", access_mode="ROX").create()
    volume = kt.Volume.from_name("there")
    assert (volume.namespace, volume.exists()) == ("default", False)

    with pytest.raises(OSError, match="Read-only"):
        kt.fn(jobs.write).to(on("team", volume))("/there/x", "one")
    with pytest.raises(kt.VolumeNotFoundError, match="'there' does not exist in namespace 'other'"):
        kt.fn(jobs.write).to(on("other", volume))
    with pytest.raises(kt.VolumeNotFoundError):
        kt.Volume.from_name("there", "other")
    with pytest.raises(kt.VolumeNotFoundError):
        kt.Volume.from_name("nowhere")
