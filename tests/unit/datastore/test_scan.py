from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.datastore import scan as scanning
from kubetorch.datastore import scan_cache
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.ignore_rules import IgnoreRules
from kubetorch.datastore.scan import FileChangedError, Limits, Options, Scan, Walk, scan
from kubetorch.datastore.scan_cache import Listings
from kubetorch.datastore.transfer import Receiver, compressed
from kubetorch.datastore.trees import Entry
from kubetorch.errors import DataStoreError, ProjectTooLargeError, SpecError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode() if isinstance(text, str) else text)


def paths(project_scan: Scan) -> list[str]:
    return [entry.path for entry in project_scan.tree.entries]


def content(project_scan: Scan) -> dict[str, bytes]:
    """Files of a scan with what its upload would send."""
    return {
        entry.path: b"".join(project_scan.stream(entry.digest)[1])
        for entry in project_scan.tree.entries
        if entry.digest
    }


def settle(cache: Path) -> None:
    """Make what the last scan kept look as if it had been read long after it was written."""
    (path,) = cache.glob("*.listing")
    listings = msgspec.msgpack.decode(path.read_bytes(), type=Listings)
    (root, folders) = (Path(listings.root), [])
    for folder in listings.folders:
        fields = {
            field: [
                msgspec.structs.replace(
                    file, ctime_ns=(root / folder.path / file.name).stat().st_ctime_ns
                )
                for file in getattr(folder, field)
            ]
            for field in ("files", "followed", "rules")
        }
        folders.append(msgspec.structs.replace(folder, **fields))
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(listings, folders=folders)))


# ------------------------------------------------------------------------------ what travels


def test_files_travel_with_their_content_and_executable_bit(project: Path) -> None:
    write(project, {"main.py": "x = 1\n", "pkg/deep/mod.py": "", "run.sh": "#!/bin/sh\n"})
    (project / "run.sh").chmod(0o755)
    (project / "empty folder" / "inner").mkdir(parents=True)
    (project / "ignored" / "__pycache__").mkdir(parents=True)
    project_scan = scan(project)
    assert {entry.path: entry.mode for entry in project_scan.tree.entries} == {
        "empty folder/inner": "folder",
        "main.py": "file",
        "pkg/deep/mod.py": "file",
        "run.sh": "executable",
    }
    assert content(project_scan)["main.py"] == b"x = 1\n"
    assert project_scan.tree.digest == project_scan.digest
    assert project_scan.warnings == ()


def test_the_same_content_elsewhere_has_the_same_digest(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1", "d/b.py": "2"})
    shutil.copytree(project, tmp_path / "copy")
    assert scan(project).digest == scan(tmp_path / "copy").digest


def test_a_folder_that_becomes_empty_or_gets_a_file_is_seen(project: Path, tmp_path: Path) -> None:
    options = Options(cache=tmp_path / "cache")
    write(project, {"data/x": "1"})
    scan(project, options)
    (project / "data" / "x").unlink()
    assert [(entry.path, entry.mode) for entry in scan(project, options).tree.entries] == [
        ("data", "folder")
    ]
    write(project, {"data/y": "1"})
    assert paths(scan(project, options)) == ["data/y"]


def test_what_is_ignored_stays_at_home_and_is_not_looked_into(project: Path) -> None:
    write(
        project,
        {
            "main.py": "",
            ".gitignore": "*.bin\n",
            "big.bin": "0",
            ".venv/lib/x.py": "",
            "__pycache__/main.pyc": "",
            "d/.ktignore": "!keep.bin\n",
            "d/keep.bin": "0",
        },
    )
    assert paths(scan(project)) == [".gitignore", "d/.ktignore", "d/keep.bin", "main.py"]


def test_filters_replace_the_rules(project: Path) -> None:
    write(project, {"main.py": "", ".gitignore": "*.py\n", "x.log": ""})
    assert paths(scan(project, Options(filters=("*.log",)))) == [".gitignore", "main.py"]


def test_an_empty_project_has_an_empty_tree(project: Path) -> None:
    assert paths(scan(project)) == []


def test_one_file_of_a_folder_can_be_the_project(project: Path) -> None:
    write(project, {"main.py": "x", "other.py": "y", "pkg/mod.py": "z"})
    assert content(scan(project, Options(only="main.py"))) == {"main.py": b"x"}
    assert content(scan(project, Options(only="pkg/mod.py"))) == {"pkg/mod.py": b"z"}
    with pytest.raises(SpecError, match=r"gone\.py"):
        scan(project, Options(only="gone.py"))


def test_one_file_that_is_a_link_travels_as_what_it_leads_to(project: Path) -> None:
    write(project, {"epoch10.ckpt": "x", "pkg/mod.py": "z"})
    (project / "latest.ckpt").symlink_to("epoch10.ckpt")
    for _ in range(2):
        project_scan = scan(project, Options(only="latest.ckpt"))
        assert content(project_scan) == {"latest.ckpt": b"x"}
        assert project_scan.tree.entries[0].mode == "file"
    (project / "folder").symlink_to("pkg")
    with pytest.raises(SpecError, match="folder is no file"):
        scan(project, Options(only="folder"))


@pytest.mark.parametrize("name", ["ä.py", "a b", "-x", "a\nb", "'", "…", "日本.py"])
def test_unusual_names_travel(project: Path, tmp_path: Path, name: str) -> None:
    write(project, {name: "1", f"{name}.d/{name}": "2"})
    cache = tmp_path / "cache"
    assert paths(scan(project, Options(cache=cache))) == sorted([name, f"{name}.d/{name}"])
    assert paths(scan(project, Options(cache=cache))) == sorted([name, f"{name}.d/{name}"])


def test_a_name_that_is_not_utf_8_stays_at_home_with_a_warning(project: Path) -> None:
    write(project, {"main.py": ""})
    try:
        (project / os.fsdecode(b"\xff.py")).touch()
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    project_scan = scan(project)
    assert paths(project_scan) == ["main.py"]
    assert "not UTF-8" in project_scan.warnings[0]


def test_a_root_that_is_a_link_is_the_folder_it_leads_to(project: Path, tmp_path: Path) -> None:
    write(project, {"main.py": "x"})
    (tmp_path / "link").symlink_to(project)
    assert scan(tmp_path / "link").digest == scan(project).digest


# -------------------------------------------------------------------------------------- links


def test_links_within_the_project_stay_links(project: Path) -> None:
    write(project, {"a/main.py": "x", "b/x.py": ""})
    (project / "b/up").symlink_to("../a/main.py")
    (project / "b/absolute").symlink_to(project / "a")
    (project / "b/chain").symlink_to("up")
    (project / "self").symlink_to(".")
    links = {e.path: e.target for e in scan(project).tree.entries if e.mode == "symlink"}
    assert links == {
        "b/up": "../a/main.py",
        "b/absolute": "../a",
        "b/chain": "../a/main.py",
        "self": ".",
    }


def test_links_that_leave_the_project_stay_at_home_with_one_warning(
    project: Path, tmp_path: Path
) -> None:
    write(tmp_path, {"outside/data.txt": "1", "project/main.py": ""})
    for number in range(12):
        (project / f"file{number:02}").symlink_to(tmp_path / "outside/data.txt")
    (project / "folder").symlink_to("../outside")
    (project / "chain").symlink_to("folder/data.txt")
    project_scan = scan(project)
    assert paths(project_scan) == ["main.py"]
    (warning,) = project_scan.warnings
    assert f"do not travel: chain -> {tmp_path / 'outside/data.txt'}, file00 -> " in warning
    assert 'and 4 more; name one that is to travel in a line "!follow PATH"' in warning


@pytest.mark.parametrize("line", ["!follow file\n!follow folder", "!follow /f*", "!follow *"])
def test_links_that_leave_the_project_are_followed_where_they_are_named(
    project: Path, tmp_path: Path, line: str
) -> None:
    write(tmp_path, {"outside/data.txt": "1", "outside/sub/more.txt": "2", "outside/x.pyc": ""})
    (tmp_path / "outside/inner").symlink_to("sub/more.txt")
    (project / "file").symlink_to(tmp_path / "outside/data.txt")
    (project / "folder").symlink_to("../outside")
    write(project, {".ktignore": line})
    project_scan = scan(project)
    followed = {"folder/data.txt": b"1", "folder/sub/more.txt": b"2", "folder/inner": b"2"}
    assert content(project_scan) == {".ktignore": line.encode(), "file": b"1", **followed}
    assert all(entry.mode == "file" for entry in project_scan.tree.entries)
    (project / ".ktignore").write_text("# !follow *\n")
    assert paths(scan(project)) == [".ktignore"]
    assert paths(scan(project, Options(link_targets=(f"{tmp_path}/outside/data.txt",)))) == [
        ".ktignore",
        "file",
    ]


def test_a_link_of_a_folder_that_is_followed_leads_no_further(
    project: Path, tmp_path: Path
) -> None:
    write(tmp_path, {"outside/a": "1", "secret": "2", "project/.ktignore": "!follow folder"})
    (project / "folder").symlink_to("../outside")
    (tmp_path / "outside/out").symlink_to(tmp_path / "secret")
    project_scan = scan(project)
    assert paths(project_scan) == [".ktignore", "folder/a"]
    assert "folder/out -> " in project_scan.warnings[0]


def test_folders_of_our_own_never_travel(project: Path, tmp_path: Path) -> None:
    write(project, {"main.py": "", "home/.kt/cache/a": "", "home/.kt/token": "", "home/x": ""})
    write(project, {".ktignore": "!.kt\n!follow link"})
    (tmp_path / "elsewhere").symlink_to(project / "home")
    options = Options(cache=tmp_path / "cache", excluded_folders=(f"{tmp_path}/elsewhere/.kt",))
    for _ in range(2):
        assert paths(scan(project, options)) == [".ktignore", "home/x", "main.py"]
        settle(tmp_path / "cache")


def test_links_that_go_nowhere_or_in_circles_stay_at_home_with_a_warning(
    project: Path, tmp_path: Path
) -> None:
    write(project, {"main.py": ""})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "again").symlink_to(outside)
    (project / "nowhere").symlink_to("gone")
    (project / "loop").symlink_to("loop")
    (project / "above").symlink_to("..")
    (project / "root").symlink_to("/")
    (project / "out").symlink_to(outside)
    write(project, {".ktignore": "!follow *"})
    project_scan = scan(project)
    assert paths(project_scan) == [".ktignore", "main.py"]
    named = sorted(warning.split(" ")[0] for warning in project_scan.warnings)
    assert named == ["above", "loop", "nowhere", "out/again", "root"]


def test_a_link_to_a_virtual_environment_is_not_followed(project: Path, tmp_path: Path) -> None:
    write(tmp_path, {"envs/x/pyvenv.cfg": "", "envs/x/lib/mod.py": ""})
    (project / "env").symlink_to(tmp_path / "envs/x")
    project_scan = scan(project, Options(link_targets=(f"{tmp_path}/envs",)))
    assert paths(project_scan) == []
    assert "virtual environment" in project_scan.warnings[0]


def test_what_is_no_file_stays_at_home_with_a_warning(project: Path) -> None:
    write(project, {"main.py": ""})
    os.mkfifo(project / "pipe")
    project_scan = scan(project)
    assert paths(project_scan) == ["main.py"]
    assert project_scan.warnings == ("pipe does not travel: it is no file, folder or link",)


# -------------------------------------------------------------------------------------- limits


def test_a_project_that_is_too_large_names_its_largest_files(project: Path) -> None:
    write(project, {f"data/{n:02}.bin": bytes(n * 1000) for n in range(1, 15)})
    write(project, {"main.py": ""})
    with pytest.raises(ProjectTooLargeError) as caught:
        scan(project, Options(limits=Limits(total_bytes=100_000)))
    text = str(caught.value)
    assert "has 0.1 MiB in 15 files; 0.1 MiB are allowed" in text
    assert [f"data/{n:02}.bin" in text for n in (14, 5, 4)] == [True, True, False]
    assert text.index("14.bin") < text.index("13.bin")
    assert ".ktignore" in text


def test_a_large_project_is_named_with_its_large_files(project: Path) -> None:
    write(project, {"main.py": "", "weights.bin": bytes(3 * 2**20)})
    (warning,) = scan(project, Options(limits=Limits(warn_bytes=2**20))).warnings
    assert warning.splitlines() == [
        f"the project {project} has 3.0 MiB. Its largest files:",
        "       3.0 MiB  weights.bin",
        "hint: list what the pods do not need in .ktignore",
    ]


def test_a_project_that_is_too_large_is_refused_before_it_is_read(project: Path) -> None:
    with (project / "huge.bin").open("wb") as file:
        file.truncate(1 << 40)  # a hole: reading it would take hours
    with pytest.raises(ProjectTooLargeError, match=r"1048576\.0 MiB  huge\.bin"):
        scan(project)


def test_sizes_of_files_that_did_not_change_count(project: Path, tmp_path: Path) -> None:
    write(project, {"a.bin": bytes(1000), "b.bin": bytes(1000)})
    cache = tmp_path / "cache"
    scan(project, Options(cache=cache))
    settle(cache)
    with pytest.raises(ProjectTooLargeError):
        scan(project, Options(cache=cache, limits=Limits(total_bytes=1999)))
    scan(project, Options(cache=cache, limits=Limits(total_bytes=2000)))


def test_too_many_files_are_refused_and_the_folder_named(project: Path) -> None:
    write(project, {f"images/{n}.png": "" for n in range(20)} | {"main.py": ""})
    with pytest.raises(ProjectTooLargeError, match=r"more than 10 files.* images"):
        scan(project, Options(limits=Limits(files=10)))


def test_much_is_warned_of(project: Path) -> None:
    write(project, {"a.bin": bytes(3000), "b.py": ""})
    project_scan = scan(project, Options(limits=Limits(warn_bytes=2000)))
    assert len(project_scan.warnings) == 1
    assert "a.bin" in project_scan.warnings[0]
    assert ".ktignore" in project_scan.warnings[0]


# ------------------------------------------------------------------------------ between scans


def test_fresh_is_what_the_last_scan_did_not_have(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1", "b.py": "2"})
    options = Options(cache=tmp_path / "cache")
    assert scan(project, options).fresh == ()
    assert scan(project, options).fresh == ()
    write(project, {"a.py": "3", "c.py": "2"})
    project_scan = scan(project, options)
    assert project_scan.fresh == (project_scan.digest, digest_of(b"3"))
    assert scan(project, options).fresh == ()
    (project / "c.py").unlink()
    project_scan = scan(project, options)
    assert project_scan.fresh == (project_scan.digest,)


def test_files_that_did_not_change_are_not_read_again(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1", "d/b.py": "2"})
    cache = tmp_path / "cache"
    before = scan(project, Options(cache=cache))
    settle(cache)
    (path,) = cache.glob("*.listing")
    listings = msgspec.msgpack.decode(path.read_bytes(), type=Listings)
    # If they were read, the lie would be found out.
    lie = msgspec.structs.replace(listings.folders[0].files[0], digest=digest_of(b"lie"))
    listings.folders[0].files[0] = lie
    path.write_bytes(msgspec.msgpack.encode(listings))
    project_scan = scan(project, Options(cache=cache))
    assert project_scan.digest == before.digest
    assert {entry.digest for entry in project_scan.tree.entries} == {
        digest_of(b"lie"),
        digest_of(b"2"),
    }


def test_a_project_in_a_folder_whose_name_is_no_text_is_scanned_without_a_cache(
    tmp_path: Path,
) -> None:
    project = tmp_path / os.fsdecode(b"caf\xe9")
    write(project, {"a.py": "1"})
    assert paths(scan(project, Options(cache=tmp_path / "cache"))) == ["a.py"]


def test_listings_are_removed_when_they_were_not_used_for_long(
    project: Path, tmp_path: Path
) -> None:
    write(project, {"used/a.py": "1", "unused/a.py": "2", "new/a.py": "3"})
    options = Options(cache=tmp_path / "cache")
    scan(project / "used", options)
    (used,) = (tmp_path / "cache").iterdir()
    scan(project / "unused", options)
    (unused,) = set((tmp_path / "cache").iterdir()) - {used}
    for path in (used, unused):
        os.utime(path, (0, 0))
    (used.parent / "gone.listing").symlink_to("nowhere")  # as another process removes one meanwhile
    scan(project / "used", options)  # nothing has changed
    settled = scan(project / "new", options)
    assert used.exists()
    assert not unused.exists()
    assert scan(project / "new", options).digest == settled.digest
    assert len(list(used.parent.iterdir())) == 3


def test_a_change_within_the_clocks_granularity_is_seen(project: Path, tmp_path: Path) -> None:
    options = Options(cache=tmp_path / "cache")
    for number in range(20):
        write(project, {"a.py": f"x = {number:03}\n"})
        os.utime(project / "a.py", ns=(0, 0))
        assert content(scan(project, options)) == {"a.py": f"x = {number:03}\n".encode()}


def test_a_file_is_racy_if_it_changed_shortly_before_it_was_read(project: Path) -> None:
    write(project, {"a.py": "1"})
    facts = (project / "a.py").stat()
    late = facts.st_ctime_ns + int(2.1e9)
    settled = scan_cache.record("a.py", facts, "", read_ns=late)
    racy = scan_cache.record("a.py", facts, "", read_ns=facts.st_ctime_ns + int(1.9e9))
    assert settled.matches(facts)
    assert not racy.matches(facts)


def test_an_edit_with_restored_times_is_seen(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1"})
    cache = tmp_path / "cache"
    scan(project, Options(cache=cache))
    before = (project / "a.py").stat()
    settle(cache)
    while (project / "a.py").stat().st_ctime_ns == before.st_ctime_ns:  # the clock's next tick
        write(project, {"a.py": "2"})
        os.utime(project / "a.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content(scan(project, Options(cache=cache))) == {"a.py": b"2"}


def test_changed_rules_are_seen_also_for_names_that_were_known(
    project: Path, tmp_path: Path
) -> None:
    write(project, {"a.py": "", "a.bin": "", "d/b.bin": "", ".gitignore": "*.txt\n"})
    cache = tmp_path / "cache"

    def names() -> set[str]:
        file_names = {Path(path).name for path in paths(scan(project, Options(cache=cache)))}
        settle(cache)
        return file_names - {".gitignore", ".ktignore"}

    assert names() == {"a.py", "a.bin", "b.bin"}
    write(project, {".gitignore": "*.bin\n"})
    assert names() == {"a.py"}
    write(project, {"d/.ktignore": "!b.bin\n"})
    assert names() == {"a.py", "b.bin"}
    (project / "d/.ktignore").unlink()
    assert names() == {"a.py"}
    (project / ".gitignore").unlink()
    assert names() == {"a.py", "a.bin", "b.bin"}


def test_changed_rules_are_seen_in_folders_that_links_lead_to(
    project: Path, tmp_path: Path
) -> None:
    write(tmp_path, {"outside/a.bin": "", "project/.gitignore": "*.bin\n"})
    (project / "link").symlink_to("../outside")
    cache = tmp_path / "cache"
    options = Options(cache=cache, link_targets=(f"{tmp_path}/outside",))
    assert paths(scan(project, options)) == [".gitignore"]
    settle(cache)
    (project / ".gitignore").unlink()
    assert paths(scan(project, options)) == ["link/a.bin"]


def test_a_file_of_rules_that_is_a_link_to_itself_has_no_rules(project: Path) -> None:
    write(project, {"a.py": ""})
    (project / ".gitignore").symlink_to(".gitignore")
    assert paths(scan(project)) == ["a.py"]


def test_rules_above_the_project_are_seen_to_change(tmp_path: Path) -> None:
    write(tmp_path, {".git/HEAD": "", ".gitignore": "", "shop/a.py": "", "shop/a.bin": ""})
    options = Options(cache=tmp_path / "cache")
    assert paths(scan(tmp_path / "shop", options)) == ["a.bin", "a.py"]
    write(tmp_path, {".gitignore": "*.bin\n"})
    assert paths(scan(tmp_path / "shop", options)) == ["a.py"]


def test_other_filters_do_not_reuse_decisions(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "", "a.bin": ""})
    cache = tmp_path / "cache"
    assert paths(scan(project, Options(cache=cache))) == ["a.bin", "a.py"]
    assert paths(scan(project, Options(cache=cache, filters=("*.bin",)))) == ["a.py"]


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x95\x01\xa1\xff\x90\xa0\x90"])
def test_a_cache_that_cannot_be_read_is_made_anew(
    project: Path, tmp_path: Path, garbage: bytes
) -> None:
    write(project, {"a.py": "1"})
    options = Options(cache=tmp_path / "cache")
    before = scan(project, options)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(garbage)
    assert scan(project, options).digest == before.digest
    assert path.read_bytes() != garbage


def test_a_cache_that_cannot_be_written_changes_nothing(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1"})
    (tmp_path / "file").touch()
    assert scan(project, Options(cache=tmp_path / "file")).digest == scan(project).digest


def test_caches_that_nobody_uses_are_removed(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1"})
    old = tmp_path / "cache" / "old.listing"
    write(tmp_path, {"cache/old.listing": ""})
    os.utime(old, (0, 0))
    scan(project, Options(cache=tmp_path / "cache"))
    assert not old.exists()


_NAMES = ("a", "b", "c.py", "d.bin", ".gitignore", ".ktignore", "l")
_RULES = ("*.bin\n", "a/\n", "b\n", "!d.bin\n", "/c.py\n", "*\n!*/\n!c.py\n", "!follow l\n", "")


def _mutate(root: Path, chance: random.Random, clock: int) -> None:
    """One change of a kind that people and tools make."""
    folders = [path for path in (root, *root.rglob("*")) if path.is_dir() and not path.is_symlink()]
    path = chance.choice(folders) / chance.choice(_NAMES)
    kind = chance.choice(["write", "write", "delete", "folder", "link", "rename", "chmod"])
    if path.is_symlink() or path.exists():
        if kind == "chmod" and not path.is_symlink() and path.is_file():
            path.chmod(chance.choice([0o644, 0o755]))
        elif kind == "rename":
            target = path.with_name(chance.choice(_NAMES))
            if not target.exists() and not target.is_symlink():
                path.rename(target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if kind == "folder" and not path.exists() and not path.is_symlink():
        path.mkdir()
    elif kind == "link" and not path.exists() and not path.is_symlink():
        path.symlink_to(
            chance.choice(["a", "../b", ".", "../../outside", "/nowhere", "..", "../.."])
        )
    elif kind == "write" and not path.exists() and not path.is_symlink():
        rule = chance.choice(_RULES)
        path.write_text(rule if path.name.endswith("ignore") else str(chance.random()))
        # Not to be taken for what was there in the same tick of the clock.
        os.utime(path, (clock, clock))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_a_scan_with_a_cache_finds_what_one_without_finds(seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root, cache = Path(folder, "deep/project"), Path(folder, "cache")
        root.mkdir(parents=True)
        write(Path(folder), {"outside/a.py": "1", "outside/sub/b.py": "2"})
        known_digests: set[str] = set()
        for step in range(8):
            for _ in range(chance.randint(0, 3)):
                _mutate(root, chance, 1_000_000 + 100 * step + chance.randint(0, 99))
            project_scan = scan(root, Options(cache=cache))
            alone = scan(root)
            assert project_scan.tree == alone.tree
            assert project_scan.digest == alone.digest
            assert sorted(project_scan.warnings) == sorted(alone.warnings)
            if known_digests and project_scan.digest not in known_digests:
                assert (
                    set(project_scan.fresh)
                    == {project_scan.digest, *project_scan.tree.digests()} - known_digests
                )
            known_digests = {project_scan.digest, *project_scan.tree.digests()}
            if chance.random() < 0.7:
                settle(cache)


# ----------------------------------------------------------------------------------- uploading


def test_a_scan_is_the_source_of_an_upload(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1", "d/big.bin": os.urandom(3_000_000), "same.py": "1", "e": ""})
    project_scan = scan(project)
    store = BlobStore(tmp_path / "store")
    receiver = Receiver(store)
    for piece in compressed(
        [project_scan.digest, *project_scan.tree.digests()], project_scan.stream
    ):
        receiver.feed(piece)
    receiver.finish()
    assert store.read(project_scan.digest) == project_scan.tree.encoded
    assert store.missing(project_scan.tree.digests()) == []


def test_what_is_sent_is_what_was_read_of_files_that_change(project: Path) -> None:
    big = os.urandom(3_000_000)
    files = {"a.py": b"one", "big.bin": big, "gone.py": b"x", "short.py": b"long"}
    write(project, files)
    project_scan = scan(project)
    write(project, {"a.py": "two", "big.bin": big[:-1] + b"!", "short.py": "l"})
    (project / "gone.py").unlink()
    assert content(project_scan) == files


def test_copies_of_many_bytes_lie_on_disk_and_come_back_whole(project: Path) -> None:
    files = {f"{number}.bin": os.urandom(1_500_000) for number in range(14)}
    write(project, files)
    project_scan = scan(project)
    write(project, dict.fromkeys(files, b"changed"))
    assert content(project_scan) == files


def test_a_file_that_changed_long_after_it_was_written_is_not_sent(project: Path) -> None:
    big = os.urandom(3_000_000)
    write(project, {"a.py": "one", "big.bin": big, "gone.py": "x", "short.py": "long"})
    for path in project.iterdir():
        os.utime(path, (0, 0))  # what writes it within the same tick of the clock changes its time
    read = scan(project)
    # A file that was there for long is not copied.
    project_scan = Scan(read.root, read.folders, read.digest, ())
    write(project, {"a.py": "two", "big.bin": big[:-1] + b"!", "short.py": "l"})
    (project / "gone.py").unlink()
    for path, sent in (("a.py", 0), ("big.bin", 3), ("gone.py", 0), ("short.py", 1)):
        digest = next(entry.digest for entry in project_scan.tree.entries if entry.path == path)
        pieces = []
        with pytest.raises(FileChangedError, match=f"^{project}/{path} c") as caught:
            for piece in project_scan.stream(digest)[1]:
                pieces.append(piece)
        assert len(pieces) <= sent
        assert caught.value.hint is not None
        assert ".ktignore" in caught.value.hint


def test_files_that_are_written_and_replaced_meanwhile_are_sent_in_a_state_they_had(
    project: Path,
) -> None:
    (project / "log").touch()
    (project / "metrics.json").write_text('{"n": 0}')
    end = threading.Event()

    def write_on() -> None:
        with (project / "log").open("a") as log:
            number = 0
            while not end.is_set():
                number += 1
                log.write("line\n")
                log.flush()
                (project / "new").write_text(f'{{"n": {number}}}')
                (project / "new").replace(project / "metrics.json")

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for _ in range(30):
            files = content(scan(project))
            assert files["log"] == b"line\n" * (len(files["log"]) // 5)
            assert re.fullmatch(rb'{"n": [0-9]+}', files["metrics.json"])
    finally:
        end.set()
        writer.join()


def test_a_file_that_only_grew_is_sent_as_it_was(project: Path) -> None:
    write(project, {"train.log": "step 1\n"})
    project_scan = scan(project)
    with (project / "train.log").open("a") as file:
        file.write("step 2\n")
    assert content(project_scan) == {"train.log": b"step 1\n"}


def test_a_digest_that_no_file_has_is_an_error(project: Path) -> None:
    with pytest.raises(DataStoreError, match="no file in"):
        scan(project).stream(digest_of(b"x"))


# ------------------------------------------------------------------------------------- trouble


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A project that others than root can reach, as one of them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        os.seteuid(65534 if os.getuid() == 0 else os.geteuid())
        try:
            yield Path(folder)
        finally:
            os.seteuid(os.getuid())


@pytest.mark.parametrize("name", ["secret.py", "folder", ".gitignore"])
def test_what_cannot_be_read_is_named(name: str) -> None:
    with unprivileged() as project:
        write(project, {"secret.py": "1", "folder/x.py": "", ".gitignore": "x"})
        (project / name).chmod(0)
        with pytest.raises(SpecError, match=f"{name} cannot be read: Permission denied"):
            scan(project)
        (project / name).chmod(0o755)


def test_a_file_that_vanishes_while_it_is_scanned_is_not_there(
    project: Path, tmp_path: Path
) -> None:
    class Meddling(IgnoreRules):
        """Rules that are asked while others work in the project."""

        def is_ignored(self, folder: str, name: str, *, is_folder: bool) -> bool:
            if name == "gone.py":
                (project / name).unlink(missing_ok=True)
            return super().is_ignored(folder, name, is_folder=is_folder)

    write(project, {"a.py": "1", "gone.py": "2"})
    walk = Walk(str(project), Meddling(str(project)), (), Options())
    walk.run()
    assert [item.name for item in walk.pending] == ["a.py"]
    # It comes back: that it was not there once is no decision that it stays at home.
    write(project, {"gone.py": "2"})
    second_walk = Walk(str(project), IgnoreRules(str(project)), walk.folders, Options())
    second_walk.run()
    assert sorted(item.name for item in second_walk.pending) == ["a.py", "gone.py"]


def test_a_file_that_vanishes_before_it_is_read_comes_back_with_the_next_scan(
    project: Path, tmp_path: Path
) -> None:
    write(project, {"a.py": "1", "gone.py": "2"})
    walk = Walk(str(project), IgnoreRules(str(project)), (), Options())
    walk.run()
    (project / "gone.py").unlink()
    scanning.read_all(walk)
    assert [file.name for file in walk.folders[0].files] == ["a.py"]
    write(project, {"gone.py": "2"})
    second_walk = Walk(str(project), IgnoreRules(str(project)), walk.folders, Options())
    second_walk.run()
    scanning.read_all(second_walk)
    assert sorted(file.name for file in second_walk.folders[0].files) == ["a.py", "gone.py"]


def test_a_project_that_is_no_folder_has_an_empty_tree(tmp_path: Path) -> None:
    assert paths(scan(tmp_path / "nowhere")) == []


def test_entries_of_a_scan_are_what_a_tree_takes(project: Path) -> None:
    write(project, {"a.py": "1"})
    (entry,) = scan(project).tree.entries
    assert entry == Entry("a.py", "file", 1, digest_of(b"1"))
