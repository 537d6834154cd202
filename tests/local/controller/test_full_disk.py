"""A disk that runs full under the controller: typed errors, and nothing half-written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import StorageFullError
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import Ready
from tests.local.key_store import KeyStore
from tests.local.service_harness import FAKE, Service, deploy, pack, spec

# The home of the service is a disk of one MiB, in a mount namespace of its own.
MOUNT = 'mount -t tmpfs -o size=1m,mode=700 full "$0" && exec "$@"'
UNSHARE = ("unshare", "--mount", "--propagation=private", "sh", "-c", MOUNT)


def _can_mount() -> bool:
    try:
        command = [*UNSHARE, "/mnt", "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = [
    pytest.mark.skipif(not _can_mount(), reason="this user cannot mount a small disk"),
    pytest.mark.faults,
]


@pytest.fixture
def service(service_home: Path) -> Iterator[Service]:
    service_home.mkdir(mode=0o700)
    service = Service(service_home, (*UNSHARE, str(service_home), *FAKE)).start()
    yield service
    with service.client(inside(service, "token").read_text()) as client:
        client.request("POST", routes.STOP, body=b'{"pods": true}').close()
    service.wait()


def inside(service: Service, name: str) -> Path:
    """A file in the home, as the service sees it."""
    return Path(f"/proc/{service.pid}/root{service.home}/{name}")


def post(service: Service, path: str, body: bytes) -> tuple[int, object]:
    return service.request("POST", path, body, token=inside(service, "token").read_text())


def test_fault_a_full_disk_refuses_a_blob_and_keeps_nothing_of_it(service: Service) -> None:
    large, small = os.urandom(2 * 1024 * 1024), b"small"
    status, answer = post(service, routes.BLOBS, pack([large]))
    assert (status, answer["error_type"]) == (507, "StorageFullError")  # type: ignore[index]
    assert list(inside(service, "blobs/tmp").iterdir()) == []
    assert post(service, routes.BLOBS, pack([small]))[0] == 200
    assert inside(service, f"blobs/{digest_of(small)[:2]}/{digest_of(small)}").exists()


def test_fault_a_deploy_on_a_full_disk_fails_whole_and_works_when_there_is_room(
    service: Service,
) -> None:
    filler = inside(service, "filler")
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    body = messages.encode(deploy(spec("f"))) + b"\n"
    path = routes.workload("default", "f", "deploy")
    status, answer = post(service, path, body)
    assert (status, answer["error_type"]) == (507, "StorageFullError")  # type: ignore[index]
    token = inside(service, "token").read_text()
    assert service.request("GET", routes.WORKLOADS, token=token) == (200, [])
    filler.unlink()
    with service.client(token) as client, client.request("POST", path, body=body) as response:
        assert response.status == 200
        last = list(response.iter_lines())[-1]
    assert isinstance(messages.decode(messages.DeployEvent, last), Ready)


def test_fault_a_put_that_the_disk_has_no_room_for_is_refused_and_changes_nothing(
    service: Service, tmp_path: Path
) -> None:
    with service.client(inside(service, "token").read_text()) as client:
        store = KeyStore(client, tmp_path)
        store.put("k", b"small")
        with pytest.raises(StorageFullError, match="no space left") as caught:
            store.put("k", bytes(range(256)) * 5000)
        assert "blobs of 1,28" in caught.value.message
        assert store.get("k") == {"": b"small"}
        assert store.put("k", b"smaller").version == 2
