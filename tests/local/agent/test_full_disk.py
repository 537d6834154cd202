"""A full disk, met for real: a file system of one megabyte in a mount namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

SHELL = 'mount -t tmpfs -o size=1m,nr_inodes={inodes} full "$0" && exec "$@"'


def run_on_a_small_disk(folder: Path, program: str, *, inodes: int = 500) -> dict[str, Any]:
    """What a program prints as JSON; its `disk` is a path on a file system of 1 MiB."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("needs mount namespaces")
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("this machine allows no mount namespaces")
    prefix = f"import json, pathlib; disk = pathlib.Path({str(folder)!r})\n"
    command = [*unshare, "sh", "-c", SHELL.format(inodes=inodes), str(folder)]
    completed = subprocess.run(
        [*command, sys.executable, "-c", prefix + program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    report: dict[str, Any] = json.loads(completed.stdout)
    return report


BLOBS = """
import os
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import StorageFullError
store = BlobStore(disk / "blobs")
small, large = b"x" * 1000, os.urandom(3_000_000)
store.put(digest_of(small), small)
try:
    store.put(digest_of(large), large)
    error = None
except StorageFullError as full:
    error = str(full)
after = b"y" * 500_000
store.put(digest_of(after), after)
print(json.dumps({
    "error": error,
    "temporary": os.listdir(disk / "blobs/tmp"),
    "kept": store.read(digest_of(small)) == small,
    "lost": store.missing([digest_of(large)]) == [digest_of(large)],
    "next": store.read(digest_of(after)) == after,
}))
"""


def test_fault_disk_full_while_a_blob_is_written(tmp_path: Path) -> None:
    report = run_on_a_small_disk(tmp_path, BLOBS)
    error = report.pop("error")
    assert f"no space left in {tmp_path}/blobs" in error
    assert "MiB free" in error
    assert report == {"temporary": [], "kept": True, "lost": True, "next": True}


STREAM = """
import os
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.transfer import Receiver, compressed
from kubetorch.errors import StorageFullError
store = BlobStore(disk / "blobs")
contents = {digest_of(data): data for data in (b"first", os.urandom(3_000_000), b"last")}
receiver, error = Receiver(store), None
try:
    for piece in compressed(contents, lambda digest: (len(contents[digest]), [contents[digest]])):
        receiver.feed(piece)
except StorageFullError as full:
    error = str(full)
finally:
    receiver.close()
print(json.dumps({
    "error": error,
    "temporary": os.listdir(disk / "blobs/tmp"),
    "kept": store.has(digest_of(b"first")),
}))
"""


def test_fault_disk_full_while_a_stream_of_blobs_is_received(tmp_path: Path) -> None:
    report = run_on_a_small_disk(tmp_path, STREAM)
    assert "no space left" in report.pop("error")
    assert report == {"temporary": [], "kept": True}


SLOTS = """
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.slots import CodeSlots
from kubetorch.datastore.trees import Entry, build
from kubetorch.errors import StorageFullError
code, error = CodeSlots(disk / "code"), None
def tree(name, size):
    data = bytes(size)
    contents[digest_of(data)] = data
    return build([Entry(name, "file", size, digest_of(data))])
contents = {}
source = lambda digest: (len(contents[digest]), [contents[digest]])
serving = code.update(tree("a.py", 1000), source, "shop")
try:
    code.update(tree("b.bin", 3_000_000), source, "shop")
except StorageFullError as full:
    error = str(full)
again = code.update(tree("c.bin", 500_000), source, "shop")
print(json.dumps({
    "error": error,
    "serving": [path.name for path in serving.path.iterdir()],
    "again": [path.name for path in again.path.iterdir()],
}))
"""


def test_fault_disk_full_while_a_code_slot_is_written(tmp_path: Path) -> None:
    report = run_on_a_small_disk(tmp_path, SLOTS)
    assert f"no space left in {tmp_path}/code" in report.pop("error")
    assert report == {"serving": ["a.py"], "again": ["c.bin"]}


def test_fault_disk_without_room_for_another_file(tmp_path: Path) -> None:
    report = run_on_a_small_disk(
        tmp_path,
        """
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import StorageFullError
store, error = BlobStore(disk), None
try:
    for number in range(100):
        store.put(digest_of(b"%d" % number), b"%d" % number)
except StorageFullError as full:
    error = str(full)
print(json.dumps({"error": error, "temporary": [p.name for p in (disk / "tmp").iterdir()]}))
""",
        inodes=20,
    )
    assert "no space left" in report["error"]
    assert report["temporary"] == []


CACHE = """
from kubetorch.datastore.scan import Options, scan
project = pathlib.Path({project!r})
(disk / "filler").write_bytes(bytes(1024 * 1024 - 8192))
found = scan(project, Options(cache=disk / "cache"))
print(json.dumps({{"files": len(found.tree.entries), "cached": len(list(disk.rglob("*.*")))}}))
"""


def test_fault_disk_full_while_a_scan_is_kept(tmp_path: Path) -> None:
    project, disk = tmp_path / "project", tmp_path / "disk"
    project.mkdir()
    disk.mkdir()
    for number in range(200):
        (project / f"{number:03}.py").touch()
    report = run_on_a_small_disk(disk, CACHE.format(project=str(project)))
    assert report == {"files": 200, "cached": 0}
