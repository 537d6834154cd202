"""A bucket that keeps the data store: the disk may be lost, and what fails is as if it never began."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import DataStoreError, KubetorchError, StoreUnavailableError
from kubetorch.wire import exceptions
from tests.local.key_store import KeyStore
from tests.local.object_storage import Objects, serving
from tests.local.service_harness import FAKE, Service

pytest.importorskip("obstore")
pytestmark = pytest.mark.faults

CREDENTIALS = "[default]\naws_access_key_id = me\naws_secret_access_key = mine\n"


class BucketService(Service):
    """A service whose store is in a bucket, and whose disk can be lost."""

    def __init__(self, home: Path, objects: Objects, url: str) -> None:
        super().__init__(home, FAKE)
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


@pytest.fixture
def service(service_home: Path) -> Iterator[BucketService]:
    objects = Objects()
    credentials = Path.home() / ".aws" / "credentials"
    credentials.parent.mkdir()
    credentials.write_text(CREDENTIALS)
    with serving(objects.handler()) as url:
        service = BucketService(service_home, objects, url)
        service.start()
        yield service
        objects.on_request = lambda method, key: None
        service.kill()


@contextmanager
def opened(service: Service, folder: Path, namespace: str = "default") -> Iterator[KeyStore]:
    with service.client() as client:
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
