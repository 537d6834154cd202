"""`kt store`: verifying keys, and deleting what nothing needs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from tests.local import commands
from tests.local.key_store import KeyStore
from tests.local.service_harness import FAKE, Service

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def service(service_home: Path) -> Iterator[Service]:
    service = Service(service_home, FAKE).start()
    yield service
    service.terminate()


@pytest.fixture
def run(service: Service) -> Run:
    return functools.partial(commands.kt, "store")


def test_verify_says_which_version_is_whole_and_which_files_are_not(
    service: Service, run: Run, tmp_path: Path
) -> None:
    with service.client() as client:
        store = KeyStore(client, tmp_path)
        store.put("models/a", {"x": b"1", "y": b"22"})
        store.put("models/a", {"x": b"1", "y": b"333"})
        store.put("models/b", b"4444")
        whole = run("verify", "models")
        assert whole.stdout == (
            "models/a version 2 in store: whole, 4 bytes\n"
            "models/b version 1 in store: whole, 4 bytes\n"
        ), whole.stderr
        blobs = service.home / "blobs"
        (blobs / digest_of(b"1")[:2] / digest_of(b"1")).write_bytes(b"2")
        (blobs / digest_of(b"4444")[:2] / digest_of(b"4444")).unlink()
        broken = run("verify", "models", "--json")
        rows = json.loads(broken.stdout)
        assert broken.returncode == 1
        assert [(row["key"], row["is_whole"]) for row in rows] == [
            ("models/a", False),
            ("models/b", False),
        ]
        assert rows[0]["faults"][0].startswith(f"x: the blob {digest_of(b'1')} is poisoned")
        assert f"models/b: the blob {digest_of(b'4444')} is not in" in rows[1]["faults"][0]
        store.put("models/a", {"x": b"1", "y": b"333"})
        assert run("verify", "/models/a/").stdout == "models/a version 3 in store: whole, 4 bytes\n"
    nothing = run("verify", "nothing")
    assert nothing.returncode == 1
    assert "there is no key at 'nothing'\nhint: kt ls lists the keys\n" in nothing.stderr


def test_gc_says_what_it_would_delete_and_deletes_what_nothing_needs(
    service: Service, run: Run, tmp_path: Path
) -> None:
    with service.client() as client:
        store = KeyStore(client, tmp_path)
        store.put("stays", {"x": b"needed", "y": b"both"})
        store.put("goes", {"x": b"unneeded", "y": b"both"})
        store.upload({digest_of(b"young"): b"young"})
        store.rm("goes", recursive=True)
    young = service.home / "blobs" / digest_of(b"young")[:2] / digest_of(b"young")
    for blob in service.home.glob("blobs/??/*"):
        if blob != young:
            os.utime(blob, (0, 0))
    dry = run("gc", "--dry-run")
    assert dry.stdout.splitlines()[0].startswith("2 blobs of "), dry.stderr
    assert dry.stdout.splitlines()[0].endswith(" bytes would be deleted")
    assert dry.stdout.splitlines()[1].startswith("1 blobs of 5 bytes that nothing needs stay")
    assert dry.stdout.splitlines()[2].startswith("3 blobs of ")
    collected = json.loads(run("gc", "--json").stdout)
    parts = ("deleted_blobs", "young_blobs", "remaining_blobs")
    assert [collected[part] for part in parts] == [2, 1, 3]
    assert run("gc", "--dry-run").stdout.startswith("0 blobs of 0 bytes would be deleted\n")
    assert young.exists()
