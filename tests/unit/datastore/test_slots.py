from __future__ import annotations

import errno
import importlib.util
import os
import py_compile
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.datastore import slots
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.slots import CodeSlots, Slot
from kubetorch.datastore.trees import Entry, Tree, build
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError, StorageFullError


class Blobs:
    """A source of blobs that counts what was asked for."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.requested: list[str] = []

    def stream(self, digest: str) -> tuple[int, Iterator[bytes]]:
        self.requested.append(digest)
        if digest not in self.contents:
            raise DataStoreError(f"the blob {digest} is not here")
        content = self.contents[digest]
        return len(content), iter([content[:3], content[3:]])

    def tree(self, files: dict[str, str], *links: Entry, executable: tuple[str, ...] = ()) -> Tree:
        entries = list(links)
        for path, text in files.items():
            content = text.encode()
            self.contents[digest_of(content)] = content
            mode = "executable" if path in executable else "file"
            entries.append(Entry(path, mode, len(content), digest_of(content)))
        return build(entries)


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
def code(tmp_path: Path) -> CodeSlots:
    return CodeSlots(tmp_path / "code")


def content(slot: Slot) -> dict[str, str]:
    """What lies in a slot."""
    return {
        str(path.relative_to(slot.path)): path.read_text()
        for path in sorted(slot.path.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def reuse(code: CodeSlots, tree: Tree, blobs: Blobs) -> Slot:
    """Bring a slot up to date and let go of it, so that the next update takes it again."""
    slot = code.update(tree, blobs.stream, "project")
    code.release(slot)
    return slot


FILES = {"main.py": "x = 1\n", "pkg/__init__.py": "", "pkg/deep/mod.py": "y = 2\n"}


def test_a_slot_has_what_the_tree_says(code: CodeSlots, blobs: Blobs) -> None:
    link = Entry("pkg/link", "symlink", target="../main.py")
    tree = blobs.tree(FILES | {"run.sh": "#!/bin/sh\n"}, link, executable=("run.sh",))
    slot = code.update(tree, blobs.stream, "shop")
    assert slot.path.name == "shop"
    assert slot.tree == tree.digest
    assert content(slot) == FILES | {"run.sh": "#!/bin/sh\n"}
    assert str((slot.path / "pkg/link").readlink()) == "../main.py"
    assert os.access(slot.path / "run.sh", os.X_OK)
    assert not os.access(slot.path / "main.py", os.X_OK)


def test_an_update_writes_only_what_differs(code: CodeSlots, blobs: Blobs) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    untouched = (slot.path / "main.py").stat().st_ino
    blobs.requested.clear()
    edited = FILES | {"pkg/deep/mod.py": "y = 3\n"}
    assert reuse(code, blobs.tree(edited), blobs).number == slot.number
    assert blobs.requested == [digest_of(b"y = 3\n")]
    assert content(slot) == edited
    assert (slot.path / "main.py").stat().st_ino == untouched
    blobs.requested.clear()
    reuse(code, blobs.tree(edited), blobs)
    assert blobs.requested == []


def test_deleted_files_vanish_with_the_folders_that_they_leave_empty(
    code: CodeSlots, blobs: Blobs
) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    py_compile.compile(str(slot.path / "pkg/deep/mod.py"))
    py_compile.compile(str(slot.path / "pkg/__init__.py"))
    reuse(code, blobs.tree({"main.py": "x = 1\n"}), blobs)
    assert [path.name for path in slot.path.iterdir()] == ["main.py"]


def test_a_file_becomes_a_folder_and_a_folder_a_file(code: CodeSlots, blobs: Blobs) -> None:
    steps = [{"a": "1", "b/c": "2"}, {"a/x/y": "1", "b": "2"}, {"a": "3", "b/c/d": "4"}]
    for files in steps:
        assert content(reuse(code, blobs.tree(files), blobs)) == files


def test_a_file_becomes_a_link_and_back(code: CodeSlots, blobs: Blobs) -> None:
    reuse(code, blobs.tree({"a": "1", "b": "2"}), blobs)
    slot = reuse(code, blobs.tree({"b": "2"}, Entry("a", "symlink", target="b")), blobs)
    assert str((slot.path / "a").readlink()) == "b"
    reuse(code, blobs.tree({"a": "1", "b": "2"}), blobs)
    assert content(slot) == {"a": "1", "b": "2"}
    assert not (slot.path / "a").is_symlink()


def test_empty_folders_come_and_go_and_files_that_user_code_wrote_to_them_stay(
    code: CodeSlots, blobs: Blobs
) -> None:
    folders = [Entry("out/inner", "folder"), Entry("logs", "folder")]
    slot = reuse(code, blobs.tree({"a": "1"}, *folders), blobs)
    assert (slot.path / "out/inner").is_dir()
    (slot.path / "logs" / "mine").write_text("2")
    reuse(code, blobs.tree({"a": "1", "b": "1"}, *folders), blobs)
    assert content(slot) == {"a": "1", "b": "1", "logs/mine": "2"}
    reuse(code, blobs.tree({"a": "1", "out/new": "3"}), blobs)
    assert content(slot) == {"a": "1", "logs/mine": "2", "out/new": "3"}
    assert not (slot.path / "out/inner").exists()


def test_only_the_executable_bit_changes(code: CodeSlots, blobs: Blobs) -> None:
    slot = reuse(code, blobs.tree({"a": "1"}), blobs)
    reuse(code, blobs.tree({"a": "1"}, executable=("a",)), blobs)
    assert os.access(slot.path / "a", os.X_OK)


# ---------------------------------------------------------------------------------- who holds it


def test_a_held_slot_is_never_touched(code: CodeSlots, blobs: Blobs) -> None:
    first = code.update(blobs.tree({"a": "1"}), blobs.stream, "project")
    second = code.update(blobs.tree({"a": "2"}), blobs.stream, "project")
    assert first.number != second.number
    assert (content(first), content(second)) == ({"a": "1"}, {"a": "2"})
    code.release(first)
    third = code.update(blobs.tree({"a": "3"}), blobs.stream, "project")
    assert third.number == first.number
    assert content(second) == {"a": "2"}


def test_a_slot_is_free_when_its_worker_has_ended(code: CodeSlots, blobs: Blobs) -> None:
    slot = code.update(blobs.tree({"a": "1"}), blobs.stream, "project")
    assert reuse(code, blobs.tree({"a": "2"}), blobs).number != slot.number
    code.release(slot)
    assert reuse(code, blobs.tree({"a": "1"}), blobs).number == slot.number


def test_the_slot_that_has_the_tree_already_is_preferred(code: CodeSlots, blobs: Blobs) -> None:
    first_tree, second_tree = blobs.tree({"a": "1"}), blobs.tree({"a": "2"})
    first = code.update(first_tree, blobs.stream, "project")
    second = code.update(second_tree, blobs.stream, "project")
    code.release(first)
    code.release(second)
    blobs.requested.clear()
    assert code.update(second_tree, blobs.stream, "project").number == second.number
    assert blobs.requested == []


def test_no_more_slots_are_kept_than_are_held_or_needed_next(code: CodeSlots, blobs: Blobs) -> None:
    held_slots = [code.update(blobs.tree({"a": str(n)}), blobs.stream, "project") for n in range(4)]
    for slot in held_slots:
        code.release(slot)
    last = code.update(blobs.tree({"a": "5"}), blobs.stream, "project")
    folders = [path for path in last.path.parents[1].iterdir() if path.is_dir()]
    assert len(folders) == LIMITS.retained_slots
    assert content(last) == {"a": "5"}
    assert len(list(last.path.parents[1].glob("*.record"))) == LIMITS.retained_slots


# ------------------------------------------------------------------------------------- tampering


def _edit(path: Path) -> None:
    path.write_text("x = 9\n")


def _edit_unnoticed(path: Path) -> None:
    before = path.stat()
    path.write_text("x = 9\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(path: Path) -> None:
    path.with_name("other").write_text("x = 9\n")
    path.with_name("other").replace(path)


def _into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("1")


def _into_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "tamper",
    [_edit, _edit_unnoticed, _replace, _into_a_folder, _into_a_link, os.unlink],
    ids=["edit", "edit-with-old-times", "replace", "folder", "link", "delete"],
)
def test_what_user_code_changed_is_written_again(
    code: CodeSlots, blobs: Blobs, tamper: Callable[[Path], object]
) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    tamper(slot.path / "main.py")
    reuse(code, blobs.tree(FILES), blobs)
    assert content(slot) == FILES


def test_a_folder_that_became_a_link_is_not_written_through(
    code: CodeSlots, blobs: Blobs, tmp_path: Path
) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(slot.path / "pkg", elsewhere)
    shutil.rmtree(slot.path / "pkg")
    (slot.path / "pkg").symlink_to(elsewhere)
    reuse(code, blobs.tree(FILES | {"pkg/deep/mod.py": "changed\n"}), blobs)
    assert not (slot.path / "pkg").is_symlink()
    assert content(slot)["pkg/deep/mod.py"] == "changed\n"
    assert (elsewhere / "deep/mod.py").read_text() == FILES["pkg/deep/mod.py"]


def test_what_a_link_in_place_of_a_folder_leads_to_is_never_deleted(
    code: CodeSlots, blobs: Blobs, tmp_path: Path
) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(slot.path / "pkg", elsewhere)
    shutil.rmtree(elsewhere / "deep")
    (elsewhere / "deep").write_text("a file where the tree had a folder")
    before = sorted(path.name for path in elsewhere.rglob("*"))
    shutil.rmtree(slot.path / "pkg")
    (slot.path / "pkg").symlink_to(elsewhere)
    reuse(code, blobs.tree({"main.py": "x = 1\n"}), blobs)
    assert sorted(path.name for path in elsewhere.rglob("*")) == before
    assert [path.name for path in slot.path.iterdir()] == ["main.py"]


def test_files_that_user_code_added_stay(code: CodeSlots, blobs: Blobs) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    (slot.path / "checkpoint.bin").write_text("weights")
    reuse(code, blobs.tree(FILES | {"main.py": "x = 2\n"}), blobs)
    assert content(slot)["checkpoint.bin"] == "weights"


# ------------------------------------------------------------------------------------- byte code


def test_byte_code_of_a_changed_source_is_deleted_and_other_stays(
    code: CodeSlots, blobs: Blobs
) -> None:
    slot = reuse(code, blobs.tree({"a.py": "x = 1\n", "ab.py": "x = 1\n"}), blobs)
    for name in ("a.py", "ab.py"):
        for level in (0, 2):
            py_compile.compile(str(slot.path / name), optimize=level)
    reuse(code, blobs.tree({"a.py": "x = 2\n", "ab.py": "x = 1\n"}), blobs)
    remaining_modules = sorted(
        path.name.split(".")[0] for path in (slot.path / "__pycache__").iterdir()
    )
    assert remaining_modules == ["ab", "ab"]


def test_an_edit_of_the_same_size_within_one_second_is_seen_by_an_import(
    code: CodeSlots, blobs: Blobs
) -> None:
    def value(slot: Slot) -> object:
        spec = importlib.util.spec_from_file_location("edited", slot.path / "edited.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.x

    for number in (1, 2, 3):
        slot = reuse(code, blobs.tree({"edited.py": f"x = {number}\n"}), blobs)
        assert value(slot) == number


# ------------------------------------------------------------------------------------ interrupted


def test_a_slot_whose_update_was_cut_short_is_made_anew(code: CodeSlots, blobs: Blobs) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)

    def dying(digest: str) -> tuple[int, Iterator[bytes]]:
        raise SystemExit  # as a process that is killed: nothing is cleaned up by who asked

    new_tree = blobs.tree(FILES | {"main.py": "x = 2\n", "new.py": ""})
    with pytest.raises(SystemExit):
        code.update(new_tree, dying, "project")
    assert not (slot.path.parents[1] / f"{slot.number}.record").exists()
    reopened_slots = CodeSlots(slot.path.parents[1])
    assert content(reopened_slots.update(new_tree, blobs.stream, "project")) == FILES | {
        "main.py": "x = 2\n",
        "new.py": "",
    }


def test_half_written_slots_of_a_killed_agent_are_made_anew(code: CodeSlots, blobs: Blobs) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    root = slot.path.parents[1]
    (root / f"{slot.number}.record").unlink()
    (slot.path / "main.py").write_text("half")
    (slot.path / "stale.py").write_text("half")
    (slot.path / ".kt-new-1").write_text("half")
    assert content(CodeSlots(root).update(blobs.tree(FILES), blobs.stream, "project")) == FILES


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x94\x01\xa1\xff\xa0\x90"])
def test_a_record_that_cannot_be_read_is_none(
    code: CodeSlots, blobs: Blobs, garbage: bytes
) -> None:
    slot = reuse(code, blobs.tree(FILES), blobs)
    (slot.path / "stale.py").touch()
    (slot.path.parents[1] / f"{slot.number}.record").write_bytes(garbage)
    assert content(reuse(code, blobs.tree(FILES), blobs)) == FILES


def test_a_blob_that_is_missing_fails_the_update_and_not_the_next(
    code: CodeSlots, blobs: Blobs
) -> None:
    tree = blobs.tree(FILES)
    lost = blobs.contents.pop(digest_of(b"y = 2\n"))
    with pytest.raises(DataStoreError, match="is not here"):
        code.update(tree, blobs.stream, "project")
    blobs.contents[digest_of(lost)] = lost
    assert content(reuse(code, tree, blobs)) == FILES


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(
    code: CodeSlots, blobs: Blobs, tmp_path: Path
) -> None:
    def full(digest: str) -> tuple[int, Iterator[bytes]]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFullError, match=str(tmp_path)):
        code.update(blobs.tree(FILES), full, "project")
    assert list((tmp_path / "code").iterdir()) == []
    assert content(reuse(code, blobs.tree(FILES), blobs)) == FILES


def test_a_blob_of_another_size_than_the_tree_says_is_refused(
    code: CodeSlots, blobs: Blobs
) -> None:
    digest = digest_of(b"abc")
    blobs.contents[digest] = b"abc"
    with pytest.raises(DataStoreError, match="'a' has 3 bytes; the tree says 4"):
        code.update(build([Entry("a", "file", 4, digest)]), blobs.stream, "project")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0"])
def test_a_project_name_that_is_no_name_is_refused(
    code: CodeSlots, blobs: Blobs, name: str
) -> None:
    with pytest.raises(DataStoreError, match="no name of a folder"):
        code.update(blobs.tree(FILES), blobs.stream, name)


def test_another_project_name_gets_a_slot_of_its_own_making(code: CodeSlots, blobs: Blobs) -> None:
    reuse(code, blobs.tree(FILES), blobs)
    slot = code.update(blobs.tree(FILES), blobs.stream, "renamed")
    assert content(slot) == FILES
    assert [path.name for path in slot.path.parent.iterdir()] == ["renamed"]


def test_slots_are_filled_from_a_blob_store(code: CodeSlots, blobs: Blobs, tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    tree = blobs.tree(FILES)
    for digest, data in blobs.contents.items():
        store.put(digest, data)
    assert content(code.update(tree, store.stream, "project")) == FILES


_PATHS = ("a", "b", "a/a", "a/b.py", "b/a", "b/b/c.py", "c.py")


def _random_tree(blobs: Blobs, chance: random.Random) -> Tree:
    while True:
        chosen = chance.sample(_PATHS, chance.randint(0, 5))
        links = [Entry(path, "symlink", target="a") for path in chosen if chance.random() < 0.15]
        rest = [path for path in chosen if path not in {link.path for link in links}]
        links += [Entry(path, "folder") for path in rest if chance.random() < 0.15]
        names = {link.path for link in links}
        files = {path: str(chance.randint(0, 3)) for path in chosen if path not in names}
        executable = tuple(path for path in files if chance.random() < 0.2)
        try:
            return blobs.tree(files, *links, executable=executable)
        except DataStoreError:  # a file that is also a folder
            continue


def _meddle(root: Path, chance: random.Random) -> None:
    """What user code may do to its folder."""
    path = root / chance.choice(_PATHS)
    kind = chance.choice(["write", "delete", "folder", "link", "touch"])
    try:
        if kind == "touch":
            os.utime(path, (0, 0))
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif kind != "write" or path.is_symlink():
            path.unlink(missing_ok=True)
        if kind == "write":
            path.write_text(chance.choice("0123"))
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(chance.choice(["a", "..", "/nowhere", "../../../outside"]))
    except OSError:  # its folder is not there, or no folder
        return


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_a_slot_is_what_the_tree_says_whatever_happened_to_it(seed: int) -> None:
    chance, blobs = random.Random(seed), Blobs()
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder) / "outside"
        (outside / "a").mkdir(parents=True)
        for name in ("b", "b.py", "c.py"):
            (outside / name).touch()
        code = CodeSlots(Path(folder) / "code")
        for _ in range(8):
            tree = _random_tree(blobs, chance)
            before = sorted(outside.rglob("*"))
            slot = reuse(code, tree, blobs)
            assert sorted(outside.rglob("*")) == before
            for entry in tree.entries:
                path = slot.path / entry.path
                assert path.is_symlink() == (entry.mode == "symlink")
                if path.is_symlink():
                    assert str(path.readlink()) == entry.target
                    continue
                if entry.mode == "folder":
                    assert path.is_dir()
                    continue
                assert path.read_bytes() == blobs.contents[entry.digest]
                assert os.access(path, os.X_OK) == (entry.mode == "executable")
            for _ in range(chance.randint(0, 3)):
                _meddle(slot.path, chance)


# ------------------------------------------------------------------------------------- switching


def test_the_project_and_what_is_in_it_are_seen_in_a_folder_of_one_slot_and_then_of_another(
    code: CodeSlots, blobs: Blobs, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for number in "12":
        files = {"a": number, "data/b": number, f"only{number}": ""}
        slot = code.update(blobs.tree(files), blobs.stream, "project")
        assert code.show(slot, folder) == []
        assert (folder / "project" / "a").read_text() == number
        assert (folder / "a").read_text() == (folder / "data" / "b").read_text() == number
        assert sorted(p.name for p in folder.iterdir()) == ["a", "data", f"only{number}", "project"]


def test_what_somebody_else_has_there_stays(code: CodeSlots, blobs: Blobs, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "project").mkdir(parents=True)
    (folder / "a").write_text("own")
    (folder / "b").symlink_to("/nowhere")
    (folder / "old").symlink_to(tmp_path / "code" / "0" / "project")  # of an earlier tree
    files = {"a": "1", "b": "1", "c": "1"}
    slot = code.update(blobs.tree(files), blobs.stream, "project")
    assert code.show(slot, folder) == ["a", "b", "project"]
    assert (folder / "a").read_text() == "own"
    assert (folder / "c").read_text() == "1"
    assert not (folder / "old").is_symlink()
    with pytest.raises(DataStoreError, match="cannot be linked"):
        code.show(slot, tmp_path / "nowhere")


def test_a_folder_of_the_projects_name_is_seen_with_the_project(
    code: CodeSlots, blobs: Blobs, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for number in "12":
        files = {"a": f"top{number}", "shop/a": "inner", f"shop/b{number}": "inner"}
        slot = code.update(blobs.tree(files), blobs.stream, "shop")
        assert code.show(slot, folder) == []
        assert (folder / "shop" / "a").read_text() == f"top{number}"
        assert (folder / "shop" / f"b{number}").read_text() == "inner"
        assert (folder / "shop" / "shop" / "a").read_text() == "inner"
        code.release(slot)
    # The slot of the first one, whose folder is seen once more.
    slot = code.update(blobs.tree({"a": "3", "shop/c": ""}), blobs.stream, "shop")
    code.show(slot, folder)
    assert sorted(path.name for path in (folder / "shop").iterdir()) == ["a", "c", "shop"]


def test_a_folder_gets_files_of_its_own_where_links_were(
    code: CodeSlots, blobs: Blobs, tmp_path: Path
) -> None:
    slot = code.update(blobs.tree({"a": "1", "b": "1"}), blobs.stream, "project")
    code.show(slot, tmp_path)
    (tmp_path / "mine").symlink_to("/nowhere")
    slots.uncover(tmp_path, tmp_path / "code", ["a", "mine", "none"])
    (tmp_path / "a").write_text("own")
    assert (slot.path / "a").read_text() == "1"
    assert (tmp_path / "mine").is_symlink()
    assert code.show(slot, tmp_path) == ["a"]
