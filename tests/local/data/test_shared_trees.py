"""Pods of one machine that declare the same data have one tree of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kubetorch as kt
from tests.local.calling import until
from tests.local.user_project import UserProject

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="absolute paths of pods")

SOURCE = """
import os


def inodes(path):
    root = os.path.realpath(path)
    return {name: os.stat(os.path.join(root, name)).st_ino for name in sorted(os.listdir(root))}


def inodes_elsewhere(path):
    return inodes(path)


def overwrite(path, text):
    if text:
        with open(path, "w") as file:
            file.write(text)
    with open(path) as file:
        return file.read()
"""


@pytest.fixture
def jobs(emptied_home: Path, tmp_path: Path) -> Iterator[ModuleType]:
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


def put(tmp_path: Path, **files: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    kt.put("models/base", folder, contents=True)


def deployed(function: object, path: str = "/kt-data", **more: object) -> kt.Fn:
    return kt.fn(function).to(kt.Compute(cpus="0.1", data={path: "models/base"}, **more))


def trees(emptied_home: Path) -> list[Path]:
    return list(emptied_home.glob("data/default/*/trees/*/content"))


def test_pods_that_start_at_once_and_another_service_share_one_tree(
    jobs: ModuleType, emptied_home: Path, tmp_path: Path
) -> None:
    put(tmp_path, a="1", b="2")
    first, second = deployed(jobs.inodes, replicas=2)("/kt-data")
    assert first == second
    assert deployed(jobs.inodes_elsewhere, "/elsewhere")("/elsewhere") == first
    (tree,) = trees(emptied_home)
    assert tree.stat().st_mode & 0o222 == 0
    assert [path.stat().st_mode & 0o222 for path in tree.iterdir()] == [0, 0]


def test_a_version_that_nobody_shows_any_more_is_removed_and_its_files_live_on_in_the_next(
    jobs: ModuleType, emptied_home: Path, tmp_path: Path
) -> None:
    put(tmp_path, same="1", other="1")
    inodes = deployed(jobs.inodes, replicas=2)
    first = inodes("/kt-data")[0]
    for version in ("2", "3"):
        put(tmp_path, other=version)
        inodes.refresh_data()
    last = inodes("/kt-data")
    assert last[0] == last[1]
    assert last[0]["same"] == first["same"]
    assert last[0]["other"] != first["other"]
    assert len(trees(emptied_home)) == 2

    inodes.teardown()
    until(lambda: trees(emptied_home) == [], 60)


@pytest.mark.skipif(os.geteuid() != 0, reason="write bits stop other users")
def test_what_root_wrote_to_a_version_is_not_taken_for_the_next(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, same="1", other="1")
    overwrite = deployed(jobs.overwrite)
    assert overwrite("/kt-data/same", "2") == "2"
    put(tmp_path, other="2")
    overwrite.refresh_data()
    assert overwrite("/kt-data/same", None) == "1"
