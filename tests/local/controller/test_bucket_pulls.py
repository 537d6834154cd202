"""Pulls of the controller: shared by getters, ended with the last one, and never without an end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path

import pytest

from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.buckets import Buckets, allowed_networks
from kubetorch.controller.data import DataStore
from kubetorch.controller.holders import Holders
from kubetorch.controller.tuning import LIMITS
from kubetorch.datastore import manifests
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.errors import ConfigError, DataStoreError
from kubetorch.lib import deadlines
from kubetorch.wire.buckets import BucketProgress, PullBucket, PushBucket
from kubetorch.wire.data import FindKeys, PutKey, RemovePath
from manual_clock import ManualClock
from tests.local.object_storage import Objects, serving

pytest.importorskip("obstore")
ENVIRON = {"PATH": os.environ["PATH"], "KT_BUCKET_NETWORKS": "127.0.0.1/32"}


@pytest.fixture
def objects() -> Iterator[Objects]:
    """A bucket whose object `a`, or what `held` says, is answered once `release` is set."""
    objects = Objects(a=b"1")
    objects.held = "a"  # type: ignore[attr-defined]
    objects.release = threading.Event()  # type: ignore[attr-defined]

    def wait(method: str, key: str) -> None:
        if (method, key) == ("GET", objects.held):  # type: ignore[attr-defined]
            objects.release.wait(60)  # type: ignore[attr-defined]

    objects.on_request = wait
    with serving(objects.handler()) as url:
        objects.url = url  # type: ignore[attr-defined]
        yield objects
        objects.release.set()  # type: ignore[attr-defined]


class Store:
    def __init__(
        self, root: Path, *, silence_seconds: float = 60.0, environ: Mapping[str, str] = ENVIRON
    ) -> None:
        self.blobs = BlobStores(root / "blobs")
        self.data = DataStore(
            root / "keys",
            self.blobs,
            ManualClock(),
            has_service=lambda namespace, name: False,
            holders=Holders(lambda namespace, name: None, lambda namespace, name: ""),
        )
        self.buckets = Buckets(self.data, self.blobs, environ, silence_seconds=silence_seconds)

    async def pull(self, objects: Objects) -> BucketProgress:
        """The last line of a pull."""
        async with aclosing(self.buckets.pull("ns", pull_of(objects), "me")) as rows:
            return [row async for row in rows][-1]


def pull_of(objects: Objects) -> PullBucket:
    url = objects.url  # type: ignore[attr-defined]
    return PullBucket(address="s3://bucket", options={"AWS_ENDPOINT_URL": url})


async def until_asked(objects: Objects) -> None:
    async with deadlines.timeout(60):
        while ("GET", objects.held) not in objects.requests:
            await asyncio.sleep(0.01)


def test_getters_at_the_same_time_share_a_pull(tmp_path: Path, objects: Objects) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)
        getters = [asyncio.ensure_future(store.pull(objects)) for _ in range(40)]
        await until_asked(objects)
        objects.release.set()  # type: ignore[attr-defined]
        rows = await asyncio.gather(*getters)
        assert {row.key and row.key.version for row in rows} == {1}

    asyncio.run(scenario())
    assert objects.requests.count(("GET", "a")) == 1


@pytest.mark.faults
def test_a_server_that_falls_silent_ends_a_pull_and_no_key_is_there(
    tmp_path: Path, objects: Objects
) -> None:
    async def scenario() -> None:
        store = Store(tmp_path, silence_seconds=1.5)
        row = await store.pull(objects)
        assert row.failure is not None
        assert "sent nothing for 2 s" in row.failure["message"]
        assert not (await store.data.find("ns", FindKeys(path=""))).keys

    asyncio.run(scenario())


@pytest.mark.faults
def test_a_pull_ends_with_its_last_getter_and_the_next_one_begins_anew(
    tmp_path: Path, objects: Objects
) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)
        getter = asyncio.ensure_future(store.pull(objects))
        await until_asked(objects)
        getter.cancel()
        await asyncio.gather(getter, return_exceptions=True)
        objects.release.set()  # type: ignore[attr-defined]
        row = await store.pull(objects)
        assert row.key is not None
        await store.buckets.close()

    asyncio.run(scenario())


@pytest.mark.faults
def test_a_getter_that_joins_while_the_last_one_leaves_gets_the_key(
    tmp_path: Path, objects: Objects
) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)
        leaving = asyncio.ensure_future(store.pull(objects))
        await until_asked(objects)
        async with aclosing(store.buckets.pull("ns", pull_of(objects), "me")) as rows:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            objects.release.set()  # type: ignore[attr-defined]
            async with deadlines.timeout(60):
                last = [row async for row in rows][-1]
        assert last.key is not None

    asyncio.run(scenario())
    assert objects.requests.count(("GET", "a")) == 1


@pytest.mark.faults
def test_getters_hear_of_a_program_that_writes_no_lines(tmp_path: Path, objects: Objects) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('x' * 2**21)")
    environ = {**ENVIRON, "PYTHONPATH": str(tmp_path)}

    async def scenario() -> None:
        store = Store(tmp_path / "store", environ=environ)
        async with deadlines.timeout(60):
            row = await store.pull(objects)
        assert row.failure is not None
        assert "the controller ended its work on s3://bucket" in row.failure["message"]

    asyncio.run(scenario())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "expected_message"),
    [
        ("os.kill(os.getpid(), 9)", "the program for s3://bucket was ended by SIGKILL"),
        ("os._exit(3)", "the program for s3://bucket ended with exit code 3"),
        (
            "threading.Thread.start = lambda _: sys.exit(1 / 0)",
            "the server failed: ZeroDivisionError",
        ),
    ],
)
def test_getters_and_the_log_of_the_controller_say_why_a_program_ended(
    tmp_path: Path,
    objects: Objects,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    expected_message: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys, threading\n{fault}")
    environ = {**ENVIRON, "PYTHONPATH": str(tmp_path)}

    row = asyncio.run(Store(tmp_path / "store", environ=environ).pull(objects))

    assert row.failure is not None
    assert expected_message in row.failure["message"]
    if "Error" in expected_message:
        assert "Traceback" in capfd.readouterr().err


@pytest.mark.faults
def test_getters_hear_of_the_end_of_the_controller(tmp_path: Path, objects: Objects) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)
        getter = asyncio.ensure_future(store.pull(objects))
        await asyncio.sleep(0)  # its program did not start yet
        await store.buckets.close()
        async with deadlines.timeout(60):
            row = await getter
        assert row.failure is not None

    asyncio.run(scenario())


def test_a_key_that_is_removed_during_a_pull_without_changes_is_there_again(
    tmp_path: Path, objects: Objects
) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)
        await store.pull(objects)
        objects.release.clear()  # type: ignore[attr-defined]
        objects.requests.clear()
        objects.held = ""  # type: ignore[attr-defined]
        getter = asyncio.ensure_future(store.pull(objects))
        await until_asked(objects)
        await store.data.remove("ns", RemovePath(path="s3:/bucket", recursive=True), "me")
        objects.release.set()  # type: ignore[attr-defined]
        row = await getter
        [path_key] = (await store.data.find("ns", FindKeys(path="s3:/bucket"))).keys
        assert path_key.key == row.key

    objects.release.set()  # type: ignore[attr-defined]
    asyncio.run(scenario())


def test_a_namespace_has_a_part_of_the_pulls_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)

        def begin(namespace: str, number: int) -> None:
            store.buckets.pull(namespace, PullBucket(address=f"s3://bucket/{number}"), "me")

        for number in range(LIMITS.bucket_runs_of_namespace):
            begin("ns", number)
        with pytest.raises(DataStoreError, match="namespace ns; a namespace may have 16"):
            begin("ns", LIMITS.bucket_runs_of_namespace)
        begin("ns", 0)
        begin("another", 0)
        await store.buckets.close()

    asyncio.run(scenario())


@pytest.mark.security
def test_tags_come_only_to_keys_that_pods_pull_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)
        blobs = store.blobs.of("ns").blobs
        entry = Entry("a", chunks=(Chunk(blobs.add(b"1"), 1),))
        digest, encoded = manifests.encode(Manifest("folder", (entry,), tags={"a": "tag"}))
        blobs.add(encoded, digest)
        for key in ("models", "https:/host/a", "hf:/owner/name", "s3:", "s3/bucket"):
            with pytest.raises(DataStoreError, match="has tags of a bucket"):
                await store.data.put("ns", PutKey(key=key, manifest=digest), "me")
        await store.data.put("ns", PutKey(key="s3:/bucket", manifest=digest), "me")

    asyncio.run(scenario())


def test_what_cannot_be_written_to_and_what_is_no_network_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        put = PutKey(key="x", manifest="0" * 64)
        with pytest.raises(DataStoreError, match="cannot be written to"):
            Store(tmp_path).buckets.push("ns", PushBucket(address="https://h/x", put=put), "me")

    asyncio.run(scenario())
    with pytest.raises(ConfigError, match="KT_BUCKET_NETWORKS has"):
        allowed_networks({"KT_BUCKET_NETWORKS": "10.0.0.0/8,nowhere"})
