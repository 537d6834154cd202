"""Buckets of Google and Azure: servers of their layouts, which check signatures, and Azurite."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

import kubetorch as kt
from kubetorch.sdk import backend
from tests.free_ports import free_port
from tests.local.object_storage import Objects, azure, azure_signature, serving
from tests.local.user_project import UserProject

pytest.importorskip("obstore")

#: The account that Azurite has.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass
class Cloud:
    """A server with the empty bucket `bucket`, and values of secrets that open it or do not."""

    scheme: str
    right: Mapping[str, str]
    wrong: Mapping[str, str]
    endpoint: Mapping[str, str]
    objects: Objects = field(default_factory=Objects)

    @property
    def bucket(self) -> str:
        return f"{self.scheme}://bucket"

    @property
    def secret(self) -> kt.Secret:
        return kt.Secret(self.scheme, values={**self.endpoint, **self.right})

    @property
    def wrong_secret(self) -> kt.Secret:
        return kt.Secret("wrong", values={**self.endpoint, **self.wrong})

    @property
    def no_secret(self) -> kt.Secret:
        return kt.Secret("none", values=self.endpoint)


def service_account(key: rsa.RSAPrivateKey) -> str:
    encoding, style = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(encoding, style, serialization.NoEncryption()).decode()
    account = {"type": "service_account", "client_email": "me@x", "private_key_id": "1"}
    return json.dumps(account | {"private_key": pem})


def is_signed(request: BaseHTTPRequestHandler, key: rsa.RSAPublicKey) -> bool:
    """Whether a request has a token that was signed with the other half of a key."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    text, _, signature = token.rpartition(".")
    try:
        key.verify(
            base64.urlsafe_b64decode(signature + "=="),
            text.encode(),
            padding.PKCS1v15(),
            hashes.SHA256(),
        )
    except InvalidSignature:
        return False
    return True


@pytest.fixture(scope="module")
def keys() -> tuple[rsa.RSAPrivateKey, rsa.RSAPrivateKey]:
    right, wrong = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    return right, wrong


@contextmanager
def google(keys: tuple[rsa.RSAPrivateKey, rsa.RSAPrivateKey]) -> Iterator[Cloud]:
    objects = Objects()
    objects.allows = lambda request: is_signed(request, keys[0].public_key())
    right, wrong = ({"GOOGLE_APPLICATION_CREDENTIALS_JSON": service_account(key)} for key in keys)
    with serving(objects.handler()) as url:
        yield Cloud("gs", right, wrong, {"GOOGLE_ENDPOINT_URL": f"{url}/"}, objects)


def azure_cloud(url: str, objects: Objects) -> Cloud:
    endpoint = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_ENDPOINT_URL": f"{url}/{ACCOUNT}/",
    }
    wrong = base64.b64encode(b"guessed").decode()
    right, wrong_values = ({"AZURE_STORAGE_ACCOUNT_KEY": key} for key in (ACCOUNT_KEY, wrong))
    return Cloud("az", right, wrong_values, endpoint, objects)


@contextmanager
def azure_layout() -> Iterator[Cloud]:
    objects = Objects()
    with serving(azure(objects, ACCOUNT, ACCOUNT_KEY)) as url:
        yield azure_cloud(url, objects)


@contextmanager
def azurite(folder: Path) -> Iterator[Cloud]:
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the path: npm install azurite")
    port = free_port()
    address = ("--blobHost", "127.0.0.1", "--blobPort", str(port))
    server = subprocess.Popen(
        [program, *address, "--silent", "--disableTelemetry", "--location", str(folder)],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if b"successfully listens" in line:
                break
        create_container(port)
        yield azure_cloud(f"http://127.0.0.1:{port}", Objects())
    finally:
        server.terminate()
        server.wait(60)
        server.stdout.close()


def create_container(port: int) -> None:
    path = f"/{ACCOUNT}/bucket?restype=container"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    signature = azure_signature("PUT", path, headers, ACCOUNT, ACCOUNT_KEY)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    authorization = f"SharedKey {ACCOUNT}:{signature}"
    connection.request("PUT", path, headers=headers | {"authorization": authorization})
    assert connection.getresponse().status == 201
    connection.close()


@pytest.fixture(autouse=True, scope="module")
def store(shared_service_home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_BACKEND", "local")
        patch.setenv("KT_BUCKET_NETWORKS", "127.0.0.1/32")
        yield
        backend.close_all()


@pytest.fixture(params=["google", "azure"])
def cloud(
    request: pytest.FixtureRequest,
    keys: tuple[rsa.RSAPrivateKey, rsa.RSAPrivateKey],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cloud]:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    opened = {
        "google": lambda: google(keys),
        "azure": azure_layout,
        "azurite": lambda: azurite(tmp_path / "azurite"),
    }
    with opened[request.param]() as cloud:
        yield cloud


with_azurite = pytest.mark.parametrize("cloud", ["google", "azure", "azurite"], indirect=True)


def write(folder: str, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def tree(folder: str) -> dict[str, bytes]:
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# --------------------------------------------------------------------------------- there and back


@with_azurite
def test_a_folder_goes_there_and_back_and_then_what_has_changed(
    cloud: Cloud, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {
        "a.txt": b"1",
        "big.bin": os.urandom(12_000_000),  # in parts
        "x/empty": b"",
        "x/ünï 100%25 #?+&=;<.txt": b"2",
        "日本/語": b"3",
    }
    folder, secret = f"{cloud.bucket}/folder", cloud.secret
    write("src", files)
    kt.put(folder, "src", contents=True, secret=secret)
    kt.rm(folder, recursive=True)  # of the store alone
    kt.get(folder, "out", contents=True, secret=secret)
    assert tree("out") == files
    capfd.readouterr()
    kt.get(folder, "out", contents=True, secret=secret, verbose=True)
    assert "5 files, 12.0 MB, of which 0 B had to be moved" in capfd.readouterr().err
    write("src", {"a.txt": b"new"})
    kt.put(f"{folder}/a.txt", "src/a.txt", secret=secret)
    kt.get(folder, "out", contents=True, secret=secret, verbose=True)
    assert "of which 3 B had to be moved" in capfd.readouterr().err
    assert tree("out") == files | {"a.txt": b"new"}
    kt.get(f"{folder}/x/ünï 100%25 #?+&=;<.txt", "one.txt", secret=secret)
    assert Path("one.txt").read_bytes() == b"2"


def test_data_of_a_service(cloud: Cloud, project: UserProject) -> None:
    cloud.objects.content["words/w.txt"] = b"hello"
    path = f"/kt-words-{cloud.scheme}"
    jobs = project.module(f"def read():\n    return open('{path}/w.txt').read()\n")
    compute = kt.Compute(cpus="0.1", secrets=[cloud.secret], data={path: f"{cloud.bucket}/words"})
    remote = kt.fn(jobs.read).to(compute)
    assert remote() == "hello"
    cloud.objects.content["words/w.txt"] = b"goodbye"
    remote.refresh_data()
    assert remote() == "goodbye"


def test_an_object_with_an_encoding_comes_as_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = gzip.compress(b"1" * 1000)
    objects = Objects(**{"a.gz": stored})

    class Decompressing(objects.handler()):  # type: ignore[misc]
        def part(self, body: bytes, **headers: str) -> None:
            if self.headers.get("accept-encoding") == "gzip":
                super().part(body, content_encoding="gzip", **headers)
            else:
                self.answer(200, gzip.decompress(body), **headers)

    with serving(Decompressing) as url:
        monkeypatch.setenv("GOOGLE_ENDPOINT_URL", url)
        kt.get("gs://bucket/a.gz", "a.gz")
    assert Path("a.gz").read_bytes() == stored


def test_a_pod_of_google_pulls_with_the_identity_that_its_node_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = Objects(a=b"of the pod")
    objects.allows = lambda request: request.headers.get("authorization") == "Bearer of-the-pod"

    class Metadata(BaseHTTPRequestHandler):
        """The metadata server of a node, as Google documents it."""

        def do_GET(self) -> None:
            account = "/computeMetadata/v1/instance/service-accounts/default/"
            content = {
                f"{account}email": b"pod@project.iam.gserviceaccount.com",
                f"{account}token": b'{"access_token": "of-the-pod", "expires_in": 3600}',
            }.get(self.path.partition("?")[0])
            is_right = self.headers.get("metadata-flavor") == "Google" and content is not None
            self.send_response(200 if is_right else 404)
            self.send_header("metadata-flavor", "Google")
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(objects.handler()) as url, serving(Metadata) as metadata_url:
        monkeypatch.setenv("GOOGLE_ENDPOINT_URL", url)
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
            monkeypatch.setenv(name, metadata_url.removeprefix("http://"))
        with pytest.raises(kt.DataStoreError, match="may not be reached with these credentials"):
            kt.get("gs://bucket/a", "on-a-laptop")
        monkeypatch.setenv("KT_SERVICE_NAME", "f")
        kt.get("gs://bucket/a", "in-a-pod")
    assert Path("in-a-pod/a").read_bytes() == b"of the pod"


# ----------------------------------------------------------------------------------------- faults


@with_azurite
@pytest.mark.security
def test_wrong_credentials_open_nothing(cloud: Cloud) -> None:
    write("src", {"a": b"1"})
    kt.put(f"{cloud.bucket}/a", "src/a", secret=cloud.secret)
    for secret in (cloud.wrong_secret, cloud.no_secret):
        with pytest.raises(kt.DataStoreError, match="may not be reached with these credentials"):
            kt.get(f"{cloud.bucket}/a", "out", secret=secret)
        with pytest.raises(kt.DataStoreError, match="credentials") as raised:
            kt.put(f"{cloud.bucket}/b", "src/a", secret=secret)
        assert "169.254" not in str(raised.value)
        assert kt.ls(f"{cloud.bucket}/b") == []


@with_azurite
@pytest.mark.faults
def test_a_bucket_that_is_not_there_is_named(cloud: Cloud) -> None:
    write("src", {"a": b"1"})
    absent = f"{cloud.scheme}://absent/a"
    with pytest.raises(kt.DataStoreError, match=f"there is nothing at {absent}"):
        kt.get(absent, "out", secret=cloud.secret)
    with pytest.raises(kt.DataStoreError, match=f"there is nothing at {absent}"):
        kt.put(absent, "src/a", secret=cloud.secret)


@pytest.mark.faults
def test_a_server_that_is_overloaded_for_a_moment_is_asked_again(cloud: Cloud) -> None:
    cloud.objects.content |= {"f/a": b"1", "f/b": b"2"}
    refusals = [503, 500, 429]
    cloud.objects.on_request = lambda method, key: refusals.pop() if refusals else None
    kt.get(f"{cloud.bucket}/f", "out", contents=True, secret=cloud.secret)
    refusals += [503, 500, 429]
    kt.put(f"{cloud.bucket}/g", "out", contents=True, secret=cloud.secret)
    assert cloud.objects.content == {"f/a": b"1", "f/b": b"2", "g/a": b"1", "g/b": b"2"}
    cloud.objects.on_request = lambda method, key: 503
    with pytest.raises(kt.DataStoreError, match=r"does not answer as it should: .*503"):
        kt.get(f"{cloud.bucket}/f", "new", secret=cloud.secret)


@pytest.mark.faults
def test_an_object_that_changes_while_it_is_pulled_is_pulled_again(cloud: Cloud) -> None:
    content = cloud.objects.content
    content |= {"f/a": b"1", "f/b": b"2" * 100_000}

    def change(method: str, key: str) -> None:
        if (method, key) == ("GET", "f/b") and content[key][:1] == b"2":
            content[key] = b"3" * 90_000

    cloud.objects.on_request = change
    kt.get(f"{cloud.bucket}/f", "out", contents=True, secret=cloud.secret)
    assert tree("out") == {"a": b"1", "b": b"3" * 90_000}
