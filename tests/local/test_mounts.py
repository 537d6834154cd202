"""Paths that only the processes of a namespace see, in programs that go into one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kubetorch.lib import mounts

_BEGIN = """
import json, os, sys
from pathlib import Path
from kubetorch.lib.mounts import Mount, View, separate
folder = Path(sys.argv[1])
assert separate() is None
view = View(folder / "view")
"""


def _can_separate(folder: Path) -> bool:
    probe = [sys.executable, "-m", "kubetorch.lib.mounts", str(folder)]
    return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    probe = tmp_path / "probe"
    probe.mkdir()
    if not _can_separate(probe):
        pytest.skip("this machine allows no mount namespaces")
    return tmp_path


def _run(folder: Path, program: str, *, before: str = "") -> Any:
    """What a program in a namespace of its own prints, as JSON."""
    text = before + _BEGIN + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text, str(folder)], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_folder_is_seen_at_a_path_that_the_machine_does_not_have(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    (source / "before").write_text("there")
    seen = _run(
        folder,
        """
        view.add(Mount(str(folder / "source"), "/kubetorch-test/data"))
        Path("/kubetorch-test/data/new").write_text("written")
        print(json.dumps([os.listdir("/kubetorch-test/data"), os.path.exists(sys.executable)]))
        """,
    )
    assert sorted(seen[0]) == ["before", "new"]
    assert seen[1], "the rest of the machine is gone"
    assert (source / "new").read_text() == "written"
    assert not Path("/kubetorch-test").exists()


def test_a_folder_covers_the_one_that_the_machine_has(folder: Path) -> None:
    home = Path.home() / ".tool"
    home.mkdir()
    (home / "config").write_text("of the machine")
    source = folder / "source"
    source.mkdir()
    program = """
        view.add(Mount(str(folder / "source"), os.path.expanduser("~/.tool")))
        print(json.dumps(os.listdir(os.path.expanduser("~/.tool"))))
    """
    assert _run(folder, program) == []
    assert (home / "config").read_text() == "of the machine"


def test_a_folder_that_is_read_only_cannot_be_written(folder: Path) -> None:
    (folder / "source").mkdir()
    program = """
        view.add(Mount(str(folder / "source"), "/kubetorch-test", read_only=True))
        try:
            Path("/kubetorch-test/new").write_text("")
        except OSError as error:
            print(json.dumps(error.strerror))
    """
    assert _run(folder, program) == "Read-only file system"
    assert not list((folder / "source").iterdir())


def test_files_lie_in_memory_for_their_owner_alone(folder: Path) -> None:
    program = """
        view.add_files("/kubetorch-test/.aws", {"config": b"value", "sub/key": b"other"})
        place = Path("/kubetorch-test/.aws")
        modes = [oct(path.stat().st_mode & 0o777) for path in (place, place / "config")]
        on_disk = [str(p) for p in folder.rglob("*") if p.is_file() and b"value" in p.read_bytes()]
        print(json.dumps([modes, (place / "sub/key").read_text(), on_disk]))
    """
    modes, text, on_disk = _run(folder, program)
    assert modes == ["0o700", "0o600"]
    assert text == "other"
    assert on_disk == []


def test_files_in_a_project_hide_nothing_of_it(folder: Path) -> None:
    project = folder / "project"
    (project / "sub").mkdir(parents=True)
    for name in (".env", "main.py", "sub/data"):
        (project / name).write_text("the machine's")
    program = """
        files = {".env": b"value", "sub/new": b"other", "new/key": b"third"}
        place = folder / "project"
        view.add_files(str(place), files)
        names = (".env", "main.py", "sub/data", "sub/new", "new/key")
        seen = {name: (place / name).read_text() for name in names}
        refused = []
        for name in (".env", "sub/new"):
            try:
                (place / name).write_text("changed")
            except OSError as error:
                refused.append(error.strerror)
        print(json.dumps([seen, refused]))
    """
    seen, refused = _run(folder, program)
    assert seen == {
        ".env": "value",
        "main.py": "the machine's",
        "sub/data": "the machine's",
        "sub/new": "other",
        "new/key": "third",
    }
    assert refused == ["Read-only file system"] * 2
    assert sorted(path.name for path in project.rglob("*")) == [".env", "data", "main.py", "sub"]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if b"value" in path.read_bytes()]


def test_processes_that_run_already_see_what_is_added(folder: Path) -> None:
    (folder / "source").mkdir()
    program = """
        import subprocess
        code = "import os; input(); print(os.path.isdir('/kubetorch-test'))"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
        view.add(Mount(str(folder / "source"), "/kubetorch-test"))
        print(json.dumps(child.communicate("go\\n")[0]))
    """
    assert _run(folder, program).strip() == "True"


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
        seen = _run(
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
        assert seen == ["of the machine", "changed", []]
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
from kubetorch.lib import mountcalls, mounts
assert mounts.separate() is None
mountcalls.mount({str(disk)!r}, {str(folder / "place")!r}, mountcalls.BIND)
"""
    seen = _run(
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
    assert seen == ["changed", ["file", "kept", "new"]]
    assert (disk / "file").read_text() == "of the machine"
    assert sorted(one.name for one in disk.iterdir()) == ["file", "kept"]
    assert (disk / "kept" / "new").exists()


def test_temporary_folders_are_covered_too(folder: Path) -> None:
    program = """
        view.shield(keep=[str(folder)])
        Path("/tmp/kubetorch-test-shield").write_text("")
        print(json.dumps(Path("/tmp/kubetorch-test-shield").exists()))
    """
    assert _run(folder, program) is True
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
        assert _run(folder, program) == ["old", "Read-only file system"]
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
    assert _run(folder, program) == ["x"]
    assert not Path("/opt/kubetorch-test").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.usefixtures("folder")
def test_a_user_who_is_not_root_has_a_namespace_too() -> None:
    own = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    try:
        os.chown(own, 65534, 65534)
        _check_as_nobody(own)
    finally:
        shutil.rmtree(own)


def _check_as_nobody(own: Path) -> None:
    become = """
import ctypes, json, os, sys
from kubetorch.lib import mounts
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # its /proc/self is its own again, as in a login
"""
    seen = _run(
        own,
        """
        (folder / "source").mkdir()
        view.add(Mount(str(folder / "source"), "/kubetorch-test"))
        view.add_files("/kubetorch-files", {"key": b"value"})
        view.shield(keep=[str(folder)])
        Path("/kubetorch-test/x").write_text("")
        print(json.dumps([os.getuid(), Path("/kubetorch-files/key").read_text()]))
        """,
        before=become,
    )
    assert seen == [65534, "value"]
    assert (own / "source" / "x").exists()


@pytest.mark.skipif(sys.platform == "linux", reason="Linux has them")
def test_other_systems_say_that_they_have_none() -> None:
    assert mounts.separate() == "only Linux has mount namespaces"
