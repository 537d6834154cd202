"""A bucket keeps the data store: the disk may be lost, and what fails leaves no half."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import DataStoreError, KubetorchError, StoreUnavailableError
from kubetorch.lib.http_client import HttpClient
from kubetorch.local import lifetime
from kubetorch.sdk import backend
from kubetorch.wire import exceptions
from tests.free_ports import free_port
from tests.local.key_store import KeyStore
from tests.local.object_storage import Objects, serving
from tests.local.service_harness import FAKE, Service

pytest.importorskip("obstore")
pytestmark = pytest.mark.faults

#: For tests that wait until the service gives its bucket up.
impatient = pytest.mark.parametrize(
    "service",
    [(sys.executable, str(Path(FAKE[1]).with_name("impatient_service.py")))],
    ids=["impatient"],
    indirect=True,
)
CREDENTIALS = "[default]\naws_access_key_id = me\naws_secret_access_key = mine\n"


class BucketService(Service):
    """A service whose store is in a bucket, and whose disk can be lost."""

    def __init__(self, home: Path, command: tuple[str, ...], objects: Objects, url: str) -> None:
        super().__init__(home, command)
        self.objects, self.server = objects, url

    def start(self, **environ: str) -> Service:
        bucket = {"KT_STORE_BUCKET": "s3://bucket/team", "KT_STORE_ENDPOINT": self.server}
        return super().start(**(bucket | environ))

    def lose_disk(self) -> None:
        self.kill()
        shutil.rmtree(self.home)
        self.start()

    def names(self, folder: str) -> set[str]:
        """The names of the objects in a folder."""
        paths = list(self.objects.content)
        return {path.rpartition("/")[2] for path in paths if path.startswith(f"team/{folder}/")}

    def blob(self, content: bytes) -> Path:
        """The copy of a blob on disk."""
        digest = digest_of(content)
        return self.home / "blobs" / digest[:2] / digest


def write_credentials() -> None:
    file = Path.home() / ".aws" / "credentials"
    file.parent.mkdir()
    file.write_text(CREDENTIALS)


@pytest.fixture
def service(service_home: Path, request: pytest.FixtureRequest) -> Iterator[BucketService]:
    objects = Objects()
    write_credentials()
    with serving(objects.handler()) as url:
        service = BucketService(service_home, getattr(request, "param", FAKE), objects, url)
        service.start()
        yield service
        objects.on_request = lambda method, key: None
        service.kill()


#: A program of its own: `obstore` must not be used where tests fork.
COPIES = """
import sys
from pathlib import Path
from kubetorch.controller.blobs import BlobStores
from kubetorch.datastore.blobs import Room, digest_of
from kubetorch.datastore.bucket_store import open_bucket
from kubetorch.errors import StorageFullError

credentials = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}

def stores(name):
    bucket = open_bucket("s3://bucket/team", sys.argv[2], credentials, has_identity=False)
    room = Room(limit_bytes=1_000_000)
    stores = BlobStores(Path(sys.argv[1]) / name, room=room, bucket=bucket)
    stores.load()
    return stores

blobs = stores("a").of("team-a").blobs
code = blobs.add(b"code")
contents = [bytes([number]) * 300_000 for number in range(10)]
for content in contents:
    blobs.save([blobs.add(content)])
for content in contents:
    assert blobs.read(digest_of(content)) == content
    assert sum(info.size for info in blobs.iterate()) <= 1_000_000
assert code in {info.digest for info in blobs.iterate()}
for number in range(3):
    blobs.add(b"%d" % number * 320_000)  # never saved, as code
try:
    blobs.add(bytes(320_000))
    raise AssertionError
except StorageFullError:
    pass
assert blobs.read(digest_of(contents[0])) == contents[0]  # not from the disk, which is full

others = stores("b")
digest = digest_of(contents[0])
assert others.of("team-a").blobs.read(digest) == contents[0]
assert not others.of("team-b").blobs.has(digest)
assert not others.of("team-a").blobs.has(code)
"""


def test_the_disk_has_a_bounded_part_of_the_bucket_and_namespaces_share_nothing(
    service: BucketService, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", COPIES, str(tmp_path), service.server], check=True)


@contextmanager
def opened(service: Service, folder: Path, namespace: str = "default") -> Iterator[KeyStore]:
    with HttpClient(service.url, service.token, timeout=300.0) as client:
        yield KeyStore(client, folder, namespace)


def test_what_was_put_is_there_byte_for_byte_when_the_disk_was_lost(
    service: BucketService, tmp_path: Path
) -> None:
    files = {"a": os.urandom(3_000_000), "x/b": b"2", "empty": b""}
    with opened(service, tmp_path / "putter") as store:
        store.put("models/base", files)
        store.put("models/other", b"3")
        store.put("models/gone", b"4")
        store.rm("models/gone")
    service.lose_disk()
    with opened(service, tmp_path / "getter") as store:
        assert store.ls("models") == ["base/", "other"]
        assert store.get("models/base") == files
        assert store.get("models/other") == {"": b"3"}
        assert store.put("models/other", b"5").version == 2


def test_a_bucket_that_answers_503_for_a_while_only_costs_time(
    service: BucketService, tmp_path: Path
) -> None:
    refusals = iter(range(1, 4))
    service.objects.on_request = lambda method, key: 503 if next(refusals, None) else None
    with opened(service, tmp_path) as store:
        store.put("k", {"a": b"1"})
        assert store.get("k") == {"a": b"1"}
    assert next(refusals, None) is None


@impatient
def test_a_put_whose_key_the_bucket_does_not_answer_fails_and_either_version_is_whole(
    service: BucketService, tmp_path: Path
) -> None:
    objects = service.objects
    with opened(service, tmp_path / "a") as store:
        store.put("k", {"a": b"1"})
        objects.stores_first = True
        objects.on_request = lambda method, key: (
            503 if method == "PUT" and "/keys/" in key else None
        )
        with pytest.raises(StoreUnavailableError, match="the bucket of the data store") as raised:
            store.put("k", {"a": b"2"})
        assert raised.value.hint
        assert store.get("k") == {"a": b"1"}
        objects.on_request = lambda method, key: None
        store.client.collect()  # which may delete neither version
    service.lose_disk()
    with opened(service, tmp_path / "b") as store:
        assert store.get("k") == {"a": b"2"}


def test_a_service_killed_between_blobs_and_key_leaves_the_version_before(
    service: BucketService, tmp_path: Path
) -> None:
    with opened(service, tmp_path / "a") as store:
        store.put("k", {"a": b"1"})

        def kill(method: str, key: str) -> int | None:
            if method == "PUT" and "/keys/" in key:
                service.kill()
                return 503
            return None

        service.objects.on_request = kill
        with pytest.raises(KubetorchError):
            store.put("k", {"a": b"2"})
    assert digest_of(b"2") in service.names("blobs")
    service.objects.on_request = lambda method, key: None
    shutil.rmtree(service.home)
    service.start()
    with opened(service, tmp_path / "b") as store:
        assert store.get("k") == {"a": b"1"}


@impatient
def test_a_put_over_keys_below_it_is_whole_though_they_could_not_be_deleted(
    service: BucketService, tmp_path: Path
) -> None:
    objects = service.objects
    with opened(service, tmp_path / "a") as store:
        store.put("k/a", b"1")
        objects.on_request = lambda method, key: 503 if method == "DELETE" else None
        store.put("k", {"a": b"2"})
        objects.on_request = lambda method, key: None
        store.put("k", {"a": b"3"})
    service.lose_disk()
    with opened(service, tmp_path / "b") as store:
        assert store.get("k") == {"a": b"3"}
    assert len(service.names("keys")) == 1


def test_a_damaged_object_is_an_error_that_names_it_and_a_put_heals_it(
    service: BucketService, tmp_path: Path
) -> None:
    files = {"a": b"whole", "b": b"other"}
    path = f"team/blobs/_shared/{digest_of(b'whole')}"
    with opened(service, tmp_path / "a") as store:
        store.put("k", files)
        service.objects.content[path] = b"wholE"
        (row,) = [row for row in store.client.verify("k") if row.faults]
        assert f"s3://bucket/{path}" in row.faults[0]
    service.lose_disk()
    with opened(service, tmp_path / "b") as store:
        with pytest.raises(DataStoreError, match=f"the object s3://bucket/{path} is damaged"):
            store.get("k")
        store.put("k", files)
    service.lose_disk()
    with opened(service, tmp_path / "c") as store:
        assert store.get("k") == files


def test_what_no_key_has_any_more_is_deleted_from_the_bucket(
    service: BucketService, tmp_path: Path
) -> None:
    with opened(service, tmp_path / "a") as store:
        store.put("k", {"a": b"1"})
        store.put("gone", {"a": b"1", "b": b"2"})
        store.rm("gone", recursive=True)
        assert store.client.collect().deleted_blobs == 0  # they are young
    service.lose_disk()
    with opened(service, tmp_path / "b") as store:
        assert store.client.collect().deleted_blobs == 2
        assert {digest_of(b"1")} < service.names("blobs")
        assert len(service.names("blobs")) == 2
        assert store.get("k") == {"a": b"1"}


@impatient
def test_nothing_is_deleted_while_the_bucket_does_not_give_a_manifest(
    service: BucketService, tmp_path: Path
) -> None:
    with opened(service, tmp_path / "a") as store:
        store.put("k", {"a": b"1"})
        service.lose_disk()
    service.objects.on_request = lambda method, key: (
        503 if method == "GET" and "blobs/" in key else None
    )
    with opened(service, tmp_path / "b") as store:
        with pytest.raises(StoreUnavailableError):
            store.client.collect()
        service.objects.on_request = lambda method, key: None
        assert store.get("k") == {"a": b"1"}


def test_namespaces_do_not_see_one_another(service: BucketService, tmp_path: Path) -> None:
    with opened(service, tmp_path / "a", "team-a") as store:
        store.put("k", b"1")
    service.lose_disk()
    with opened(service, tmp_path / "b", "team-b") as store:
        assert store.ls() == []
        with pytest.raises(DataStoreError, match="belong to no key"):
            store.fetch([digest_of(b"1")])
        store.put("k", b"2")
    with opened(service, tmp_path / "a", "team-a") as store:
        assert store.get("k") == {"": b"1"}


def test_keys_of_before_the_store_had_a_bucket_move_there(
    service: BucketService, tmp_path: Path
) -> None:
    service.kill()
    service.start(KT_STORE_BUCKET="")
    with opened(service, tmp_path / "a") as store:
        store.put("k", {"a": b"1"})
    moved = threading.Event()

    def note(method: str, key: str) -> None:
        if method == "PUT" and "/keys/" in key:
            moved.set()

    service.objects.on_request = note
    service.kill()
    service.start()
    assert moved.wait(60)
    with opened(service, tmp_path / "b") as store:
        store.put("last", b"2")  # a put waits for the move of a key
    service.lose_disk()
    with opened(service, tmp_path / "c") as store:
        assert store.get("k") == {"a": b"1"}


@pytest.mark.parametrize(
    ("environ", "expected_message"),
    [
        ({"KT_STORE_BUCKET": "gs://bucket"}, "the bucket of the data store is 'gs://bucket'"),
        ({"KT_STORE_BUCKET": "bucket"}, "is no address that the data store knows"),
        ({"PYTHONPATH": "without"}, "pip install 'kubetorch[object-storage]'"),
    ],
)
def test_a_service_that_cannot_use_its_bucket_says_why_at_its_start(
    service: BucketService, tmp_path: Path, environ: dict[str, str], expected_message: str
) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "obstore.py").write_text("raise ImportError")
    service.kill()
    if "PYTHONPATH" in environ:
        environ = {"PYTHONPATH": str(tmp_path / "without")}
    with pytest.raises(AssertionError) as raised:
        service.start(**environ)
    failure = raised.value.args[0][0]["failure"]
    error = exceptions.rebuild(exceptions.parse(failure))
    assert expected_message in str(error)


def test_credentials_that_do_not_suffice_are_named_at_the_start(service: BucketService) -> None:
    service.kill()
    service.objects.on_request = lambda method, key: 403
    with pytest.raises(AssertionError) as raised:
        service.start()
    error = exceptions.rebuild(exceptions.parse(raised.value.args[0][0]["failure"]))
    assert isinstance(error, StoreUnavailableError)
    assert "~/.aws/credentials" in str(error)


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[str]:
    """A server of S3 that checks signatures, with the bucket `shelf`."""
    pytest.importorskip("nanio")
    (tmp_path / "data" / "shelf").mkdir(parents=True)
    port = free_port()
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(tmp_path / "data")]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"],
        env={**os.environ, "NANIO_ACCESS_KEY": "me", "NANIO_SECRET_KEY": "mine"},
    )
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def test_programs_put_and_get_as_without_a_bucket_which_the_settings_name(
    service_home: Path, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)
    write_credentials()
    kt.config.write({"store_bucket": "s3://shelf/kubetorch", "store_endpoint": s3})
    Path("src").mkdir()
    Path("src/a.bin").write_bytes(os.urandom(9_000_000))
    Path("src/b.txt").write_text("2")
    weights = {"w": numpy.arange(2_000_000, dtype="float32")}
    kt.put("folder", "src", contents=True)
    kt.put("weights", weights)
    weights["w"][7] = 0.5
    kt.put("weights", weights)
    backend.close_all()
    lifetime.stop()
    shutil.rmtree(service_home)
    kt.get("folder", "out", contents=True)
    for name in ("a.bin", "b.txt"):
        assert Path("out", name).read_bytes() == Path("src", name).read_bytes()
    assert (kt.get("weights")["w"] == weights["w"]).all()
    kt.rm("folder", recursive=True)
    assert [row["name"] for row in kt.ls()] == ["weights"]
    backend.close_all()
