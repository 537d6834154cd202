"""Storage that fails: a blob volume without room, an image that its registry has lost."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import images
from cluster.conftest import IMAGE, POD_IMAGE, Installed, Kubectl
from cluster.faults import Client, pods

#: Both install the controller anew.
pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(180), pytest.mark.faults]

STORE = "/var/lib/kubetorch"
#: Writes to the controller's volume until nothing more goes on it.
FILL = f"""
with open("{STORE}/filler", "wb", buffering=0) as file:
    try:
        for _ in range(16 * 1024):
            file.write(bytes(4096))
    except OSError as error:
        print(error.strerror)
"""
EMPTY = f"import os; os.unlink('{STORE}/filler')"
#: The registry of the kit, and what it may answer with.
REGISTRY = "198.18.0.1:5000"
MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.oci.image.manifest.v1+json"
)
#: This machine reaches it by its address, and no proxy does.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Start = Callable[[str], Client]


def install(*settings: str) -> None:
    """Have Kubetorch installed with these values; calls of other programs go on."""
    kt = str(Path(sys.executable).parent / "kt")
    command = [kt, "install", "--image", IMAGE, "--pod-image", POD_IMAGE, "--timeout", "120s"]
    completed = subprocess.run(
        [*command, "--set", ",".join(settings)], capture_output=True, text=True, timeout=150
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.fixture
def inside(kubectl: Kubectl, installed: Installed) -> Iterator[Callable[[str], str]]:
    """Runs Python in the controller's pod, whose blobs lie on a real volume of 8 MiB."""
    ours = ("-n", "kubetorch", "-l", "app.kubernetes.io/component=controller", "-o", "name")
    before = kubectl("get", "pods", *ours).split()
    install("blobs.emptyDir.medium=Memory", "blobs.emptyDir.sizeLimit=8Mi")
    kubectl("wait", "--for=delete", "--timeout=60s", "-n", "kubetorch", *before)
    python = ("--", "/kubetorch/bin/python", "-I", "-c")
    yield lambda code: kubectl(
        "exec", "-n", "kubetorch", "deploy/kubetorch-controller", *python, code
    )
    install("blobs.emptyDir.medium=", "blobs.emptyDir.sizeLimit=20Gi")


def test_a_full_blob_volume_fails_deploys_alone_and_they_work_when_there_is_room(
    client: Start, inside: Callable[[str], str], kubectl: Kubectl, installed: Installed
) -> None:
    program = client("""
        import json, os
        from pathlib import Path

        def deploy():
            return kt.fn(service.echo, name="large").to(kt.Compute(cpus="0.01"))

        def fail(word):
            try:
                deploy()
            except kt.StorageFullError as error:
                print(word, json.dumps([error.message, error.hint]), flush=True)

        kept = kt.fn(service.echo, name="kept").to(kt.Compute(cpus="0.01"))
        big = Path("big.bin")
        big.write_bytes(os.urandom(12 * 1024 * 1024))
        fail("refused")
        print("answers", kept(1), flush=True)
        big.write_bytes(os.urandom(1024))
        service.until(Path("is-full").exists)
        fail("full")
        print("answers", kept(2), flush=True)
        print("spawned", kept.spawn(4).get(), flush=True)
        service.until(lambda: not Path("is-full").exists())
        print("result", deploy()(3), flush=True)
    """)
    for word, number in (("refused", 1), ("full", 2)):
        message, hint = json.loads(program.line(word).removeprefix(word))
        assert message.startswith("the controller's blob store is full: no space left in "), message
        assert "blobs.emptyDir.sizeLimit" in hint
        assert program.line("answers") == f"answers {number}"
        names = kubectl("get", "ktworkloads", "-n", installed.namespace, "-o", "name")
        assert [name.rpartition("/")[2] for name in names.split()] == ["kept"]
        begun = f"{STORE}/blobs/{installed.namespace}/tmp"
        assert inside(f"import os; print(os.listdir('{begun}'))") == "[]\n"
        if number == 1:
            assert inside(FILL) == "No space left on device\n"
            (program.folder / "is-full").touch()
    assert program.line("spawned") == "spawned 4"
    inside(EMPTY)
    (program.folder / "is-full").unlink()
    assert program.line("result") == "result 3"


# ----------------------------------------------------------------------------------- the registry


class Pushed:
    """An image in the registry of the kit, which can lose it."""

    def __init__(self, folder: Path) -> None:
        tag = secrets.token_hex(3)
        folder.mkdir()
        (folder / "Dockerfile").write_text(f"FROM {images.BASE}\nENV FAULTS={tag}\n")
        images.build(f"localhost/faults:{tag}", folder, "--push")
        self.name = f"{REGISTRY}/faults:{tag}"
        self._url = f"http://{REGISTRY}/v2/faults/manifests"
        request = urllib.request.Request(f"{self._url}/{tag}", headers={"Accept": MANIFESTS})
        with DIRECT.open(request, timeout=10) as answer:
            self._digest = answer.headers["Docker-Content-Digest"]
            self._manifest, self._type = answer.read(), answer.headers["Content-Type"]
        self._tag = tag

    def lose(self) -> None:
        """Delete it."""
        self._ask("DELETE", self._digest)

    def find(self) -> None:
        """Have it there again: its layers never went."""
        self._ask("PUT", self._tag, self._manifest)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> None:
        headers = {} if body is None else {"Content-Type": self._type}
        request = urllib.request.Request(f"{self._url}/{path}", body, headers, method=method)
        DIRECT.open(request, timeout=10).close()


@pytest.fixture
def pushed(tmp_path: Path, kubectl: Kubectl) -> Iterator[Pushed]:
    image = Pushed(tmp_path / "image")
    yield image
    with contextlib.suppress(urllib.error.HTTPError):
        image.lose()
    # A node's containerd keeps the image, but not all that a node which starts would copy of it.
    images.remove("/faults")


def test_an_image_that_its_registry_lost_dooms_new_pods_and_leaves_those_that_run(
    client: Start, pushed: Pushed, kubectl: Kubectl, installed: Installed
) -> None:
    program = client(f"""
        import json, time
        from pathlib import Path

        def deploy(**more):
            compute = kt.Compute(cpus="0.01", image=kt.Image(image_id="{pushed.name}"),
                                 image_pull_policy="Always", launch_timeout=60, **more)
            return kt.fn(service.echo, name="pulled").to(compute)

        pulled = deploy()
        print("deployed", pulled(0), flush=True)
        service.until(Path("is-gone").exists)
        for more in ({{"env_vars": {{"NEW": "1"}}}}, {{"replicas": 2}}):
            try:
                deploy(**more)
            except kt.ImagePullError as error:
                seconds = time.time() - error.since
                print("doomed", json.dumps([error.message, error.hint, seconds]), flush=True)
            print("answers", pulled(1), flush=True)
        service.until(lambda: not Path("is-gone").exists())
        print("result", deploy(env_vars={{"NEW": "1"}})(2), flush=True)
    """)
    program.line("deployed")
    before = pods(kubectl, installed.namespace, "pulled")
    pushed.lose()
    (program.folder / "is-gone").touch()
    for _ in ("a new template", "a new replica"):
        message, hint, seconds = json.loads(program.line("doomed").removeprefix("doomed"))
        assert message.startswith(f"failed to pull: there is no image {pushed.name}: "), message
        assert "pushed" in hint
        assert seconds < 50
        assert program.line("answers") == "answers 1"
        assert set(before) <= set(pods(kubectl, installed.namespace, "pulled"))
    pushed.find()
    (program.folder / "is-gone").unlink()
    assert program.line("result") == "result 2"
