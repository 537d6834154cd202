"""Storage that fails: a blob volume without room, an image that its registry has lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.conftest import IMAGE, POD_IMAGE, Installed, Kubectl
from cluster.faults import Client

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

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
Start = Callable[[str], Client]


def install(*settings: str) -> None:
    """Have Kubetorch installed with these values; calls of other programs go on."""
    kt = str(Path(sys.executable).parent / "kt")
    command = [kt, "install", "--image", IMAGE, "--pod-image", POD_IMAGE, "--timeout", "120s"]
    done = subprocess.run(
        [*command, "--set", ",".join(settings)], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
        import json, os, time
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
        while not Path("is-full").exists():
            time.sleep(0.1)
        fail("full")
        print("answers", kept(2), flush=True)
        print("spawned", kept.spawn(4).get(), flush=True)
        while Path("is-full").exists():
            time.sleep(0.1)
        print("result", deploy()(3), flush=True)
    """)
    for word, number in (("refused", 1), ("full", 2)):
        message, hint = json.loads(program.line(word).removeprefix(word))
        assert message.startswith("the controller's blob store is full: no space left in "), message
        assert "blobs.emptyDir.sizeLimit" in hint
        assert program.line("answers") == f"answers {number}"
        found = kubectl("get", "ktworkloads", "-n", installed.namespace, "-o", "name")
        assert [one.rpartition("/")[2] for one in found.split()] == ["kept"]
        begun = f"{STORE}/blobs/{installed.namespace}/tmp"
        assert inside(f"import os; print(os.listdir('{begun}'))") == "[]\n"
        if number == 1:
            assert inside(FILL) == "No space left on device\n"
            (program.folder / "is-full").touch()
    assert program.line("spawned") == "spawned 4"
    inside(EMPTY)
    (program.folder / "is-full").unlink()
    assert program.line("result") == "result 3"
