"""Addresses that are refused: a bucket is no way into the machine, or into the cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.datastore import addresses
from kubetorch.datastore.buckets import _azure
from kubetorch.datastore.tuning import LIMITS
from kubetorch.lib.egress import is_allowed, networks
from kubetorch.sdk import backend
from tests.local.object_storage import Objects, serving

pytest.importorskip("obstore")
pytestmark = pytest.mark.security
URL = "http://169.254.169.254"


@pytest.fixture(autouse=True, scope="module")
def store(shared_service_home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_BACKEND", "local")
        yield
        backend.close_all()


def pull(tmp_path: Path, address: str, *allowed: str, **options: str) -> dict[str, Any]:
    """The last line of the program that pulls an address."""
    job = {"address": address, "folder": str(tmp_path), "networks": allowed, "options": options}
    done = subprocess.run(
        [sys.executable, "-m", "kubetorch.datastore.bucket_program"],
        input=json.dumps(job).encode(),
        capture_output=True,
        timeout=60,
    )
    assert not done.stderr
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def test_credentials_are_read_from_the_files_of_aws() -> None:
    files = {
        "credentials": "[default]\naws_access_key_id = me\naws_secret_access_key = mine\n",
        "config": "[default]\nregion = eu-west-1\n",
    }
    assert addresses.options_for("s3", addresses.variables_of_files(files)) == {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "mine",
        "AWS_REGION": "eu-west-1",
    }


def test_no_address_of_the_machine_is_reached_without_the_operators_word() -> None:
    objects = Objects(a=b"1")
    with serving(objects.handler()) as url:
        for address in (f"{url}/bucket/a", f"{url.replace('127.0.0.1', 'localhost')}/bucket/a"):
            with pytest.raises(kt.DataStoreError, match="which is no public address"):
                kt.get(address)
    assert objects.requests == []


def test_nor_after_a_redirect(tmp_path: Path) -> None:
    objects = Objects(a=b"1")
    # One address of the machine stands for the public one that redirects, another for a secret.
    with serving(objects.handler()) as url:
        secret_url = url.replace("127.0.0.1", "127.0.0.2")

        class Redirecting(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_response(302)
                self.send_header("location", f"{secret_url}/bucket/a")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with serving(Redirecting) as address:
            row = pull(tmp_path, f"{address}/x", "127.0.0.1/32")
    assert "leads to 127.0.0.2, which is no public address" in row["failure"]["message"]
    assert "kt local stop" in str(row["failure"])
    assert objects.requests == []


def test_an_endpoint_of_a_secret_is_an_address_as_any(tmp_path: Path) -> None:
    row = pull(tmp_path, "s3://bucket/a", AWS_ENDPOINT_URL=URL)
    assert "leads to 169.254.169.254" in row["failure"]["message"]


@pytest.mark.parametrize(
    "name", ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_PROFILE"]
)
def test_an_option_that_reads_what_the_controller_has_is_refused(name: str) -> None:
    with pytest.raises(kt.DataStoreError, match="no option"):
        addresses.check_options("s3", {name: "/var/run/secrets/token"})


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "fe80::1%eth0", "fd00::1", "::"),
        *("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "ff02::1"),
        *("168.63.129.16", "192.0.0.8", "192.88.99.1", "fec0::1", "64:ff9b:1::808:808"),
        *("3fff::1", "2001:db8::1", "::8.8.8.8"),
    ],
)
def test_what_is_no_public_address(address: str) -> None:
    assert not is_allowed(address)


def test_public_addresses_and_those_that_the_operator_allows() -> None:
    assert is_allowed("8.8.8.8")
    assert is_allowed("2001:4860:4860::8888")
    assert is_allowed("10.1.2.3", networks(["10.1.0.0/16"]))
    assert not is_allowed("10.2.2.3", networks(["10.1.0.0/16"]))


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "168.63.129.16", "fd00:ec2::254", "fe80::1", "::ffff:169.254.169.254"),
        "64:ff9b::a9fe:a9fe",
    ],
)
def test_what_gives_credentials_to_machines_cannot_be_allowed(address: str) -> None:
    assert not is_allowed(address, networks(["0.0.0.0/0", "::/0"]))


def test_only_a_whole_identity_of_azure_signs() -> None:
    def azure(**options: str) -> Any:
        return _azure({f"AZURE_{name}": value for name, value in options.items()}, is_own=False)

    client = {"CLIENT_ID": "a", "CLIENT_SECRET": "b", "TENANT_ID": "c"}
    assert "skip_signature" not in azure(**client)
    assert "skip_signature" not in azure(STORAGE_SAS_KEY="a")
    for name in client:
        assert azure(**{other: value for other, value in client.items() if other != name})[
            "skip_signature"
        ]


@pytest.mark.parametrize(
    ("address", "options", "fault"),
    [
        ("az://bucket/a", {"AZURE_STORAGE_ACCOUNT_KEY": "YQ=="}, "Account must be specified"),
        (
            "az://bucket/a",
            {"AZURE_STORAGE_ACCOUNT_NAME": "me", "AZURE_STORAGE_ACCOUNT_KEY": "not base 64!"},
            "Invalid Access Key",
        ),
        (
            "gs://bucket/a",
            {"GOOGLE_APPLICATION_CREDENTIALS_JSON": '{"type": "service_account"}'},
            "missing field `private_key`",
        ),
    ],
)
def test_credentials_that_cannot_be_used_are_named(
    tmp_path: Path, address: str, options: dict[str, str], fault: str
) -> None:
    failure = pull(tmp_path, address, **options)["failure"]
    assert f"{address} cannot be opened" in failure["message"]
    assert fault in failure["message"]
    assert failure["state"]["hint"] == "the values of secret= are wrong, or one is missing"


def test_memory_of_a_pull_is_limited(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from kubetorch.datastore import bucket_program\n"
        "bucket_program.main()\n"
        "print(resource.getrlimit(resource.RLIMIT_DATA)[0])\n"
        "try: bytearray(1024**3)\n"
        "except MemoryError: print('refused')\n"
    )
    job = {"address": "s3://bucket", "folder": str(tmp_path), "options": {"AWS_ENDPOINT_URL": URL}}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(job).encode(), capture_output=True
    )
    assert done.stdout.splitlines()[-2:] == [b"%d" % LIMITS.bucket_memory_bytes, b"refused"]
