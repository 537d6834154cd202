"""Paths that only the processes of a namespace see, in programs that go into one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from kubetorch.lib import mounts
from tests.local.namespaced import in_namespace, skip_without_namespaces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return skip_without_namespaces(tmp_path)


def test_a_folder_is_seen_at_a_path_that_the_machine_does_not_have(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    (source / "before").write_text("there")
    report = in_namespace(
        folder,
        """
        view.add(Mount(str(folder / "source"), "/kubetorch-test/data"))
        Path("/kubetorch-test/data/new").write_text("written")
        print(json.dumps([os.listdir("/kubetorch-test/data"), os.path.exists(sys.executable)]))
        """,
    )
    assert sorted(report[0]) == ["before", "new"]
    assert report[1], "the rest of the machine is gone"
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
    assert in_namespace(folder, program) == []
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
    assert in_namespace(folder, program) == "Read-only file system"
    assert not list((folder / "source").iterdir())


def test_files_lie_in_memory_for_their_owner_alone(folder: Path) -> None:
    program = """
        view.add_files("/kubetorch-test/.aws", {"config": b"value", "sub/key": b"other"})
        place = Path("/kubetorch-test/.aws")
        modes = [oct(path.stat().st_mode & 0o777) for path in (place, place / "config")]
        on_disk = [str(p) for p in folder.rglob("*") if p.is_file() and b"value" in p.read_bytes()]
        print(json.dumps([modes, (place / "sub/key").read_text(), on_disk]))
    """
    modes, text, on_disk = in_namespace(folder, program)
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
    file_texts, refused = in_namespace(folder, program)
    assert file_texts == {
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
    assert in_namespace(folder, program).strip() == "True"


def test_files_that_vanish_while_a_folder_is_mirrored_are_left_out(folder: Path) -> None:
    places = [folder / f"place-{number}" for number in range(8)]
    for mirror in places:
        (mirror / "stays").mkdir(parents=True)
    (folder / "source").mkdir()
    # All that it makes is gone again at once, and of another kind the next time.
    churning = """
import os, subprocess, sys
code = '''
import contextlib, os, sys
print(flush=True)
kinds = (
    (os.mkdir, os.rmdir),
    (lambda path: os.close(os.open(path, os.O_CREAT)), os.unlink),
    (lambda path: os.symlink("stays", path), os.unlink),
)
turn = 0
while os.getppid() == int(sys.argv[2]):
    turn += 1
    paths = [f"{sys.argv[1]}/place-{place}/{name}" for place in range(8) for name in range(30)]
    for number, path in enumerate(paths):
        kinds[(turn + number) % 3][0](path)
    for number, path in enumerate(paths):
        kinds[(turn + number) % 3][1](path)
'''
command = [sys.executable, "-c", code, sys.argv[1], str(os.getpid())]
churner = subprocess.Popen(command, stdout=-1, text=True)
churner.stdout.readline()
"""
    program = """
        for number in range(8):
            view.add(Mount(str(folder / "source"), str(folder / f"place-{number}" / "data")))
        view.shield(keep=[str(folder / "view"), str(folder / "source")])
        for number in range(8):
            (folder / f"place-{number}" / "data" / str(number)).touch()
            (folder / f"place-{number}" / "stays" / "new").touch()
        churner.kill()
        print(json.dumps([churner.wait(), sorted(os.listdir(folder / "source"))]))
    """
    assert in_namespace(folder, program, before=churning) == [-9, [str(n) for n in range(8)]]
    for mirror in places:
        assert not list((mirror / "stays").iterdir())
        assert not (mirror / "data").exists()


def test_paths_may_have_any_bytes(folder: Path) -> None:
    odd_folder = folder / os.fsdecode(b"a b:c,d\\e\xff\x0b")
    (odd_folder / "disk").mkdir(parents=True)
    (odd_folder / "at").mkdir()
    mounting = f"""
from kubetorch.lib import mounts
assert mounts.separate() is None
mounts.mount_filesystem({str(odd_folder / "disk")!r}, {str(odd_folder / "at")!r}, mounts.BIND)
"""
    program = f"""
        place = Path({str(odd_folder)!r})
        view = View(place / "view")
        view.add(Mount(str(folder), str(place / "new")))
        view.shield(keep=[str(place / "view")])
        (place / "at" / "file").touch()
        print(json.dumps(os.listdir(place / "at")))
    """
    assert in_namespace(folder, program, before=mounting) == ["file"]
    assert not list((odd_folder / "disk").iterdir())


def test_a_mirror_belongs_to_whom_the_folder_belongs(folder: Path) -> None:
    (folder / "source").mkdir()
    mirror = folder / "place"
    mirror.mkdir()
    mirror.chmod(0o1750)
    if os.geteuid() == 0:
        os.chown(mirror, 65534, 65534)
    program = """
        view.add(Mount(str(folder / "source"), str(folder / "place" / "data")))
        found = (folder / "place").stat()
        print(json.dumps([found.st_mode, found.st_uid, found.st_gid]))
    """
    mirror_stat = mirror.stat()
    assert in_namespace(folder, program) == [
        mirror_stat.st_mode,
        mirror_stat.st_uid,
        mirror_stat.st_gid,
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.usefixtures("folder")
def test_a_user_who_is_not_root_has_a_namespace_too() -> None:
    own_folder = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    try:
        os.chown(own_folder, 65534, 65534)
        _check_as_nobody(own_folder)
    finally:
        shutil.rmtree(own_folder)


def _check_as_nobody(own_folder: Path) -> None:
    become = """
import ctypes, json, os, sys
from kubetorch.lib import mounts
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # its /proc/self is its own again, as in a login
"""
    report = in_namespace(
        own_folder,
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
    assert report == [65534, "value"]
    assert (own_folder / "source" / "x").exists()


@pytest.mark.skipif(sys.platform == "linux", reason="Linux has them")
def test_other_systems_say_that_they_have_none() -> None:
    assert mounts.separate() == "only Linux has mount namespaces"
