"""Buckets of a server beside the cluster: in pods, and as what keeps the data store."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import faults
from cluster.conftest import Installed, Kubectl
from cluster.controller.test_faults_storage import install
from cluster.refusing import MACHINE
from example_programs import EXAMPLES, EXPECTED

#: Each installs the controller anew.
pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(300)]

SECRET = "store-credentials"
KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
CONTROLLERS = ("-n", "kubetorch", "-l", "app.kubernetes.io/component=controller")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server of S3 with a bucket `store`, at an address that pods reach."""
    boto3 = pytest.importorskip("boto3")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address=MACHINE, port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {name.lower(): value for name, value in KEYS.items()}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="store")
    yield url
    server.stop()


@pytest.fixture(scope="module")
def bucket(kubectl: Kubectl, installed: Installed, endpoint: str) -> Iterator[str]:
    """An installation whose data store is kept by the bucket; the URL of its server."""
    literals = [f"--from-literal={name}={value}" for name, value in KEYS.items()]
    kubectl("create", "secret", "generic", SECRET, "-n", "kubetorch", *literals)
    try:
        install(
            "store.bucket=s3://store/kubetorch",
            f"store.endpoint={endpoint}",
            f"store.secretName={SECRET}",
            f"buckets.allowedNetworks={{{MACHINE}/32}}",
        )
        yield endpoint
    finally:
        install(
            *("store.bucket=", "store.endpoint=", "store.secretName="),
            "buckets.allowedNetworks={}",
        )
        kubectl("delete", "secret", SECRET, "-n", "kubetorch")


@pytest.mark.usefixtures("bucket")
def test_a_pod_works_on_a_folder_of_a_bucket(installed: Installed) -> None:
    program = EXAMPLES / "bucket_folder.py"
    command = ("env", f"MOTO_HOST={MACHINE}", sys.executable, str(program))

    printed = installed.run(*command, timeout=200)

    assert printed.endswith(EXPECTED["bucket_folder.py"])


@pytest.mark.usefixtures("bucket")
def test_a_key_outlives_the_disk_of_the_controller(
    tmp_path: Path, installed: Installed, kubectl: Kubectl
) -> None:
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 20_000)
    installed.run("kt", "put", "models/base", "--src", "weights", cwd=tmp_path)
    before = kubectl("get", "pods", *CONTROLLERS, "-o", "name").split()

    # Its blobs lie in an emptyDir, which goes with the pod.
    kubectl("delete", *before, "-n", "kubetorch", "--grace-period=0", "--force")
    faults.until(lambda: set(before).isdisjoint(_ready(kubectl)) and _ready(kubectl))

    installed.run("kt", "get", "models/base", "--dest", "back/", cwd=tmp_path)
    assert (tmp_path / "back/base").read_bytes() == (tmp_path / "weights").read_bytes()


def test_a_controller_that_does_not_reach_its_bucket_leaves_the_one_before(
    bucket: str, kubectl: Kubectl
) -> None:
    before = _ready(kubectl)
    try:
        with pytest.raises(AssertionError, match="does not answer"):
            install(f"store.endpoint=http://{MACHINE}:1")

        assert _ready(kubectl) == before
    finally:
        install(f"store.endpoint={bucket}")


def _ready(kubectl: Kubectl) -> list[str]:
    """The controllers that are ready."""
    pods = json.loads(kubectl("get", "pods", *CONTROLLERS, "-o", "json"))["items"]
    return [
        f"pod/{pod['metadata']['name']}"
        for pod in pods
        if any(status["ready"] for status in pod["status"].get("containerStatuses", ()))
    ]
