"""What is written in a view that has a shield, in programs that go into one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.local.namespaced import in_namespace, skip_without_namespaces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return skip_without_namespaces(tmp_path)


def test_what_is_written_behind_a_shield_stays_there(folder: Path) -> None:
    # A folder that the machine has outside of those that are shared.
    outside = Path("/var/lib/kubetorch-test")
    shared = folder / "shared"
    shared.mkdir()
    try:
        outside.mkdir()
        (outside / "old").write_text("of the machine")
    except OSError:
        pytest.skip("this user owns no folder outside of the temporary ones")
    try:
        report = in_namespace(
            folder,
            """
            view.shield(keep=[str(folder / "shared")])
            outside = Path("/var/lib/kubetorch-test")
            before = (outside / "old").read_text()
            (outside / "old").write_text("changed")
            (outside / "new").write_text("")
            Path("/kubetorch-top").mkdir()
            (folder / "shared" / "file").write_text("kept")
            print(json.dumps([before, (outside / "old").read_text(), os.listdir("/kubetorch-top")]))
            """,
        )
        assert report == ["of the machine", "changed", []]
        assert [path.name for path in outside.iterdir()] == ["old"]
        assert (outside / "old").read_text() == "of the machine"
        assert not Path("/kubetorch-top").exists()
        assert (shared / "file").read_text() == "kept"
    finally:
        (outside / "old").unlink(missing_ok=True)
        outside.rmdir()


def test_disks_that_are_mounted_somewhere_below_are_covered_too(folder: Path) -> None:
    disk = folder / "disk"
    (disk / "kept").mkdir(parents=True)
    (disk / "file").write_text("of the machine")
    (folder / "place").mkdir()
    # The outer namespace stands for the machine.
    mounting = f"""
from kubetorch.lib import mounts
assert mounts.separate() is None
mounts.mount_filesystem({str(disk)!r}, {str(folder / "place")!r}, mounts.BIND)
"""
    report = in_namespace(
        folder,
        """
        place = folder / "place"
        view.shield(keep=[str(folder / "view"), str(place / "kept")])
        (place / "file").write_text("changed")
        (place / "new").write_text("new")
        (place / "kept" / "new").write_text("new")
        print(json.dumps([(place / "file").read_text(), sorted(os.listdir(place))]))
        """,
        before=mounting,
    )
    assert report == ["changed", ["file", "kept", "new"]]
    assert (disk / "file").read_text() == "of the machine"
    assert sorted(path.name for path in disk.iterdir()) == ["file", "kept"]
    assert (disk / "kept" / "new").exists()


def test_temporary_folders_are_covered_too(folder: Path) -> None:
    program = """
        view.shield(keep=[str(folder)])
        Path("/tmp/kubetorch-test-shield").write_text("")
        print(json.dumps(Path("/tmp/kubetorch-test-shield").exists()))
    """
    assert in_namespace(folder, program) is True
    assert not Path("/tmp/kubetorch-test-shield").exists()


def test_a_folder_that_is_frozen_is_seen_as_it_is_and_cannot_be_written(folder: Path) -> None:
    outside = Path("/var/lib/kubetorch-test-frozen")
    try:
        outside.mkdir()
    except OSError:
        pytest.skip("this user owns no folder outside of the temporary ones")
    try:
        (outside / "source").write_text("old")
        program = """
            outside = Path("/var/lib/kubetorch-test-frozen")
            view.shield(frozen=[str(outside)])
            before = (outside / "source").read_text()
            try:
                (outside / "new").write_text("")
            except OSError as error:
                print(json.dumps([before, error.strerror]))
        """
        assert in_namespace(folder, program) == ["old", "Read-only file system"]
        assert [path.name for path in outside.iterdir()] == ["source"]
    finally:
        shutil.rmtree(outside)


def test_a_mount_after_a_shield_and_one_in_another_are_possible(folder: Path) -> None:
    (folder / "source").mkdir()
    program = """
        view.add(Mount(str(folder / "source"), "/kubetorch-test/first"))
        view.shield(keep=[str(folder)])
        view.add(Mount(str(folder / "source"), "/opt/kubetorch-test/second"))
        Path("/opt/kubetorch-test/second/x").write_text("")
        print(json.dumps(os.listdir("/kubetorch-test/first")))
    """
    assert in_namespace(folder, program) == ["x"]
    assert not Path("/opt/kubetorch-test").exists()


@pytest.mark.timeout(300)  # seconds on a machine with time and few mounts
def test_a_shield_that_failed_is_none_and_the_next_one_goes_on_with_it(folder: Path) -> None:
    outer, inner = folder / "outer", folder / "inner"
    for path in (outer / "at", inner):
        path.mkdir(parents=True)
    mounting = f"""
from kubetorch.lib import mounts
assert mounts.separate() is None
mounts.mount_filesystem({str(outer)!r}, {str(outer)!r}, mounts.BIND)
mounts.mount_filesystem({str(inner)!r}, {str(outer / "at")!r}, mounts.BIND)
"""
    program = """
        from kubetorch.lib import mounts
        # Something is in the way of every third folder that it makes.
        for number in range(0, 300, 3):
            for kind in ("mirror", "overlay", "layer"):
                (folder / "view" / f"{kind}-{number}").mkdir(parents=True)
        failures = 0
        while True:
            try:
                view.shield(keep=[str(folder / "view")])
                break
            except FileExistsError:
                failures += 1
        for path in (folder, folder / "outer", folder / "outer" / "at"):
            (path / "new").touch()
        left = [str(path) for path in mounts.mounted_paths() if folder / "view" in path.parents]
        print(json.dumps([failures, left]))
    """
    failures, remaining_mounts = in_namespace(folder, program, before=mounting)
    assert failures > 2
    assert remaining_mounts == []
    assert not [path for path in (folder, outer, inner) if (path / "new").exists()]


def test_who_gives_up_a_shield_leaves_no_hole_for_the_next_one(folder: Path) -> None:
    program = """
        import asyncio
        from kubetorch.pod.filesystem import PodFilesystem
        from kubetorch.wire.podenv import PodEnv
        paths = {"root": str(folder / "pod"), "controller_file": str(folder / "pod" / "url")}
        known = {"namespace": "default", "workload": "w", "pod": "w-0", "host": "", "port": 1}
        view = PodFilesystem(PodEnv(**known, **paths, working_dir="", environments=""), None)

        async def main():
            first = asyncio.create_task(view.shield())
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await view.shield()
            (folder / "new").touch()
            return first.cancelled()

        print(json.dumps(asyncio.run(main())))
    """
    assert in_namespace(folder, program) is True
    assert not (folder / "new").exists()


def test_a_shield_that_failed_says_why_and_blames_the_machine_only_if_it_refused(
    folder: Path,
) -> None:
    (folder / "pod").mkdir()
    (folder / "pod" / "view").touch()
    program = """
        import asyncio
        from kubetorch.errors import ResourceNotAvailableError
        from kubetorch.pod.filesystem import PodFilesystem
        from kubetorch.wire.podenv import PodEnv
        paths = {"root": str(folder / "pod"), "controller_file": str(folder / "pod" / "url")}
        known = {"namespace": "default", "workload": "w", "pod": "w-0", "host": "", "port": 1}
        env = PodEnv(**known, **paths, working_dir="", environments="")
        said = []
        for refusal in (None, "no namespaces"):
            view = PodFilesystem(env, refusal)
            for _ in range(2):
                try:
                    asyncio.run(view.shield())
                except ResourceNotAvailableError as error:
                    said.append([error.message, error.hint])
        print(json.dumps(said))
    """
    (*failed, refused, second_refusal) = in_namespace(folder, program)
    assert refused == second_refusal
    assert len(failed) == 2
    for message, hint in failed:
        assert "pod/view" in message
        assert hint is None
    assert "no namespaces" in refused[0]
    assert "user namespaces" in refused[1]


def test_a_disk_that_is_mounted_in_memory_is_covered_too(folder: Path) -> None:
    (folder / "disk").mkdir()
    (folder / "memory").mkdir()
    mounting = f"""
from pathlib import Path
from kubetorch.lib import mounts
assert mounts.separate() is None
mounts.mount_filesystem("tmpfs", {str(folder / "memory")!r}, 0, kind="tmpfs")
Path({str(folder / "memory" / "at")!r}).mkdir()
mounts.mount_filesystem({str(folder / "disk")!r}, {str(folder / "memory" / "at")!r}, mounts.BIND)
"""
    program = """
        view.shield(keep=[str(folder / "view")])
        (folder / "memory" / "at" / "new").touch()
        print(json.dumps(os.listdir(folder / "memory" / "at")))
    """
    assert in_namespace(folder, program, before=mounting) == ["new"]
    assert not list((folder / "disk").iterdir())


def test_disks_in_what_is_frozen_are_too_and_what_is_shared_in_it_is_not(folder: Path) -> None:
    frozen = folder / "frozen"
    for path in (frozen / "shared", frozen / "at", folder / "disk"):
        path.mkdir(parents=True)
    mounting = f"""
from kubetorch.lib import mounts
assert mounts.separate() is None
mounts.mount_filesystem({str(folder / "disk")!r}, {str(frozen / "at")!r}, mounts.BIND)
"""
    program = """
        frozen = folder / "frozen"
        keep = [str(folder / "view"), str(frozen / "shared"), str(frozen / "none")]
        view.shield(keep=keep, frozen=[str(frozen), str(folder / "not-there")])
        (frozen / "shared" / "new").touch()
        refused = []
        for place in (frozen, frozen / "at"):
            try:
                (place / "new").touch()
            except OSError as error:
                refused.append(error.strerror)
        print(json.dumps(refused))
    """
    refused = in_namespace(folder, program, before=mounting)
    assert refused == ["Read-only file system"] * 2
    assert (frozen / "shared" / "new").exists()
    assert not list((folder / "disk").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can pile up overlays")
def test_what_is_shared_on_a_disk_that_can_be_no_layer_can_be_written(folder: Path) -> None:
    for name in ("below", "first/up", "first/work", "first/at", "up", "work", "place"):
        (folder / name).mkdir(parents=True)
    (folder / "below" / "shared").mkdir()
    # The third one on top of another is more than the kernel allows.
    mounting = f"""
from kubetorch.lib import mounts
assert mounts.separate() is None
def overlay(lower, above, place):
    data = f"lowerdir={{lower}},upperdir={{above}}/up,workdir={{above}}/work"
    mounts.mount_filesystem("overlay", place, 0, kind="overlay", data=data)
overlay("{folder}/below", "{folder}/first", "{folder}/first/at")
overlay("{folder}/first/at", "{folder}", "{folder}/place")
"""
    program = """
        place = folder / "place"
        view.shield(keep=[str(folder / "view"), str(place / "shared")])
        (place / "shared" / "new").touch()
        try:
            (place / "new").touch()
        except OSError as error:
            print(json.dumps(error.strerror))
    """
    assert in_namespace(folder, program, before=mounting) == "Read-only file system"
    assert [path.name for path in (folder / "up" / "shared").iterdir()] == ["new"]


def test_a_folder_that_can_only_be_read_stays_so_and_shows_what_is_new(folder: Path) -> None:
    (folder / "source").mkdir()
    (folder / "place").mkdir()
    program = """
        view.add(Mount(str(folder / "source"), str(folder / "place"), read_only=True))
        view.shield(keep=[str(folder / "view"), str(folder / "source")])
        (folder / "source" / "new").touch()
        try:
            (folder / "place" / "other").touch()
        except OSError as error:
            print(json.dumps([error.strerror, os.listdir(folder / "place")]))
    """
    assert in_namespace(folder, program) == ["Read-only file system", ["new"]]
