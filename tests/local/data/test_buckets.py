"""Addresses of buckets in `kt.get`, `kt.put` and `data=`: what is there becomes a key's content."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from tests.free_ports import free_port
from tests.local.object_storage import SECRET, Objects, hub, serving
from tests.local.user_project import UserProject

pytest.importorskip("obstore")


@pytest.fixture(autouse=True, scope="module")
def store(shared_service_home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_BACKEND", "local")
        patch.setenv("KT_BUCKET_NETWORKS", "127.0.0.1/32")
        yield
        backend.close_all()


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """A bucket with two objects, whose endpoint is in the environment."""
    objects = Objects(data__a=b"1", data__x__b=b"2" * 100_000)
    with serving(objects.handler()) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield objects


@pytest.fixture(scope="module")
def moto() -> Iterator[Any]:
    """A client of an S3 server, with the bucket `shelf`."""
    server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threaded = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="me",
        aws_secret_access_key="mine",
    )
    client.create_bucket(Bucket="shelf")
    yield client
    client.close()
    threaded.stop()


@pytest.fixture
def secret(moto: Any) -> kt.Secret:
    values = SECRET | {"AWS_ENDPOINT_URL": moto.meta.endpoint_url}
    return kt.Secret(name="shelf", values=values)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


def tree(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


# --------------------------------------------------------------------------------------------- S3


def test_a_folder_of_a_bucket_lands_as_that_of_a_key(moto: Any, secret: kt.Secret) -> None:
    content = {"a.txt": b"1", "x/b.bin": os.urandom(20_000_000), "x/empty": b""}
    for path, data in content.items():
        moto.put_object(Bucket="shelf", Key=f"in/{path}", Body=data)
    kt.get("s3://shelf/in", "out", secret=secret)
    assert tree("out") == {f"in/{path}": data for path, data in content.items()}
    kt.get("s3://shelf/in/x/", "x", secret=secret, contents=True)
    assert tree("x") == {"b.bin": content["x/b.bin"], "empty": b""}
    kt.get("s3://shelf/in/a.txt", "new.txt", secret=secret)
    assert Path("new.txt").read_bytes() == b"1"


def test_a_put_writes_objects_and_the_next_get_fetches_none(
    moto: Any, secret: kt.Secret, capfd: pytest.CaptureFixture[str]
) -> None:
    content = {"deep/a": b"1", "b": os.urandom(12_000_000), "empty": b""}
    for path, data in content.items():
        Path("src", path).parent.mkdir(parents=True, exist_ok=True)
        Path("src", path).write_bytes(data)
    Path("src/link").symlink_to("deep/a")
    kt.put("s3://shelf/put", "src", contents=True, secret=secret)
    listed = moto.list_objects_v2(Bucket="shelf", Prefix="put/")["Contents"]
    written = {row["Key"]: moto.get_object(Bucket="shelf", Key=row["Key"]) for row in listed}
    assert {key: answer["Body"].read() for key, answer in written.items()} == {
        f"put/{path}": data for path, data in (content | {"link": b"1"}).items()
    }
    kt.get("s3://shelf/put", "out", contents=True, secret=secret, verbose=True)
    assert "0 B had to be moved" not in capfd.readouterr().err  # the link is an object of its own
    kt.get("s3://shelf/put", "out", contents=True, secret=secret, verbose=True)
    assert "4 files, 12.0 MB, of which 0 B had to be moved" in capfd.readouterr().err
    assert tree("out") == content | {"link": b"1"}


def test_a_put_of_content_that_is_there_is_a_version_of_its_own(
    moto: Any, secret: kt.Secret
) -> None:
    Path("src").write_bytes(b"1")
    for _ in range(2):
        kt.put("s3://shelf/twice", "src", secret=secret)
    [row] = [row for row in kt.ls("s3://shelf", verbose=True) if row["name"] == "twice"]
    assert row["version"] == 2


def test_signatures_are_those_of_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nanio")  # which checks them, as moto does not
    (tmp_path / "data" / "shelf").mkdir(parents=True)
    port = free_port()
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(tmp_path / "data")]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"],
        env={**os.environ, "NANIO_ACCESS_KEY": "me", "NANIO_SECRET_KEY": "mine"},
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    try:
        wait_for_port(port)
        Path("a.txt").write_text("1")
        Path("b.bin").write_bytes(os.urandom(9_000_000))  # in parts
        right = kt.Secret("right", values=SECRET)
        wrong = kt.Secret("wrong", values=SECRET | {"AWS_SECRET_ACCESS_KEY": "guessed"})
        kt.put("s3://shelf/x", ["a.txt", "b.bin"], secret=right)
        kt.get("s3://shelf/x", "out", contents=True, secret=right)
        assert tree("out") == {name: Path(name).read_bytes() for name in ("a.txt", "b.bin")}
        for secret in (wrong, None):
            with pytest.raises(kt.DataStoreError, match="may not be reached") as caught:
                kt.get("s3://shelf/x", "out", secret=secret)
            assert "guessed" not in str(caught.value)
        with pytest.raises(kt.DataStoreError, match="may not be reached"):
            kt.put("s3://shelf/y", "a.txt", secret=wrong)
        assert kt.ls("s3://shelf/y") == []
    finally:
        server.terminate()
        server.wait(60)


# ------------------------------------------------------------------------------- conditional checks


def test_a_second_get_only_compares_tags(objects: Objects) -> None:
    kt.get("s3://bucket/data", "out", contents=True)
    objects.requests.clear()
    objects.content["data/new"] = b"3"
    kt.get("s3://bucket/data", "out", contents=True)
    assert [key for method, key in objects.requests if method == "GET" and key] == ["data/new"]
    assert tree("out") == {"a": b"1", "x/b": b"2" * 100_000, "new": b"3"}
    version = kt.ls("s3://bucket", verbose=True)[0]["version"]
    kt.get("s3://bucket/data", "out", contents=True)
    assert kt.ls("s3://bucket", verbose=True)[0]["version"] == version


def test_an_object_that_is_gone_is_gone_from_the_key(objects: Objects) -> None:
    kt.get("s3://bucket/data", "out")
    del objects.content["data/a"]
    kt.get("s3://bucket/data", "new")
    assert tree("new") == {"data/x/b": b"2" * 100_000}
    kt.rm("s3://bucket/data", recursive=True)
    assert kt.ls("s3://bucket") == []


# ----------------------------------------------------------------------------------------- faults


def test_an_object_that_changes_while_it_is_pulled_is_pulled_again(objects: Objects) -> None:
    def change(method: str, key: str) -> None:
        if (method, key) == ("GET", "data/x/b") and objects.content[key][:1] == b"2":
            objects.content[key] = b"3" * 90_000

    objects.on_request = change
    kt.get("s3://bucket/data", "out", contents=True)
    assert tree("out") == {"a": b"1", "x/b": b"3" * 90_000}


@pytest.mark.faults
def test_an_object_that_never_rests_leaves_the_key_as_it_was(objects: Objects) -> None:
    kt.get("s3://bucket/data", "out", contents=True)

    def change(method: str, key: str) -> None:
        if method == "GET" and key == "data/a":
            objects.content[key] += b"+"

    objects.content["data/a"] = b"4"
    objects.on_request = change
    with pytest.raises(kt.DataStoreError, match=r"'a' of s3://bucket/data .*3 times in a row"):
        kt.get("s3://bucket/data", "out", contents=True)
    kt.get("s3:/bucket/data", "kept", contents=True)
    assert tree("kept")["a"] == b"1"


@pytest.mark.faults
def test_another_object_than_its_tag_says_is_refused(objects: Objects) -> None:
    objects.listed_tags["data/a"] = "f" * 32
    with pytest.raises(kt.DataStoreError, match=r"'a' of s3://bucket/data"):
        kt.get("s3://bucket/data", "out")
    assert not Path("out").exists()


@pytest.mark.faults
def test_a_bucket_that_is_overloaded_for_a_moment_is_asked_again(objects: Objects) -> None:
    refusals = [503, 503, 500]
    objects.on_request = lambda method, key: refusals.pop() if refusals else None
    kt.get("s3://bucket/data", "out")
    assert tree("out")["data/a"] == b"1"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (503, "does not answer as it should: .*503"),
        (403, r"may not be reached with these credentials \(403"),
        (404, "there is nothing at s3://bucket/data"),
    ],
)
def test_what_a_bucket_refuses_is_said(objects: Objects, status: int, message: str) -> None:
    objects.on_request = lambda method, key: status
    with pytest.raises(kt.DataStoreError, match=message) as caught:
        kt.get("s3://bucket/data", "out")
    assert "secret" not in str(caught.value) or status == 403
    assert not Path("out").exists()


@pytest.mark.faults
def test_objects_that_cannot_be_files_are_named(objects: Objects) -> None:
    objects.content["data/x"] = b"a file, and a folder of b"
    with pytest.raises(kt.DataStoreError, match="has the object 'x' and objects below it"):
        kt.get("s3://bucket/data", "out")


def test_an_empty_prefix_is_an_error(objects: Objects) -> None:
    with pytest.raises(kt.DataStoreError, match="there is nothing at s3://bucket/none"):
        kt.get("s3://bucket/none")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/x", "no address that the data store knows"),
        ("s3://", "names no bucket"),
        ("https://me:mine@host/x", "no user, password"),
        ("https://host/x?token=1", "no user, password"),
        ("s3://bucket/../x", "empty part"),
        ("hf://small", "names no repository"),
    ],
)
def test_an_impossible_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(kt.DataStoreError, match=message):
        kt.get(address)


def test_an_address_of_the_web_cannot_be_written_to() -> None:
    Path("f").write_text("x")
    with pytest.raises(kt.DataStoreError, match="cannot be written to"):
        kt.put("https://host.example/x", "f")


# ------------------------------------------------------------------------------ the web, and models


def test_a_file_of_the_web(objects: Objects) -> None:
    url = os.environ["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")
    kt.get(f"{url}/bucket/data/x/b", "b.txt")
    assert Path("b.txt").read_bytes() == b"2" * 100_000
    objects.requests.clear()
    kt.get(f"{url}/bucket/data/x/b", "b.txt")
    assert [method for method, _ in objects.requests] == ["HEAD"]


FILES = {"config.json": b"{}", "w.bin": b"w" * 300_000, "tok/a.txt": b"a"}


def test_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(hub(FILES)) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        kt.get("hf://me/small", "model", contents=True)
        assert tree("model") == FILES
        kt.get("hf://me/small/tok", "t", contents=True)
        assert tree("t") == {"a.txt": b"a"}
        with pytest.raises(kt.DataStoreError, match=r"there is nothing at hf://me/none"):
            kt.get("hf://me/none")


def test_a_model_that_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(hub({"a": b"1"}, token="hf_right")) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        kt.get("hf://me/small/", "m", secret=kt.Secret("hf", values={"HF_TOKEN": "hf_right"}))
        assert tree("m") == {"small/a": b"1"}
        with pytest.raises(kt.DataStoreError, match="these credentials"):
            kt.get("hf://me/small/", secret=kt.Secret("hf", values={"HF_TOKEN": "hf_wrong"}))


@pytest.mark.faults
def test_a_file_of_the_hub_that_is_damaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"w.bin": b"w" * 1000}
    handler = hub(files)

    class Damaging(handler):  # type: ignore[misc, valid-type]
        def part(self, body: bytes, **headers: str) -> None:
            super().part(body[:-1] + b"x", **headers)

    with serving(Damaging) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(kt.DataStoreError, match="another content than its list says"):
            kt.get("hf://me/small", "m")


# -------------------------------------------------------------------------------- declared


def test_data_of_a_service_is_pulled_by_the_deploy(
    moto: Any, secret: kt.Secret, project: UserProject
) -> None:
    moto.put_object(Bucket="shelf", Key="words/w.txt", Body=b"hello")
    jobs = project.module("def read():\n    return open('/kt-words/w.txt').read()\n")
    compute = kt.Compute(cpus="0.1", secrets=[secret], data={"/kt-words": "s3://shelf/words"})
    remote = kt.fn(jobs.read).to(compute)
    assert remote() == "hello"
    moto.put_object(Bucket="shelf", Key="words/w.txt", Body=b"goodbye")
    assert list(remote.refresh_data().values()) == ["2"]
    assert remote() == "goodbye"


def test_a_pod_pulls_with_its_own_identity(project: UserProject) -> None:
    objects = Objects(a=b"1", b=b"2" * 100_000)
    signatures: list[str] = []

    class WithIdentity(objects.handler()):  # type: ignore[misc]
        def do_GET(self) -> None:
            if self.path == "/identity":
                expiry = "2036-11-02T10:00:00Z"
                keys = {"AccessKeyId": "the-pod", "SecretAccessKey": "x", "Token": "t"}
                self.answer(200, json.dumps(keys | {"Expiration": expiry}).encode())
                return
            signatures.append(self.headers.get("authorization", ""))
            super().do_GET()

        do_HEAD = do_GET

    project.write("token", "t")
    jobs = project.module(
        """
        import kubetorch as kt

        def fetch():
            kt.get("s3://bucket/", "out", contents=True)
            return sorted(row["name"] for row in kt.ls("s3://bucket"))
        """
    )
    with serving(WithIdentity) as url:
        values = {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/identity",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(project.folder / "token"),
            "AWS_ENDPOINT_URL": url,
        }
        secrets = [kt.Secret("identity", values=values)]
        remote = kt.fn(jobs.fetch).to(kt.Compute(cpus="0.1", secrets=secrets))
        assert remote() == ["a", "b"]
        assert all("Credential=the-pod/" in signature for signature in signatures)
        objects.requests.clear()
        objects.content["a"] = b"3"
        remote()
    assert [key for method, key in objects.requests if method == "GET" and key] == ["a"]
    kt.get("s3:/bucket", "copy", contents=True)
    assert tree("copy") == {"a": b"3", "b": b"2" * 100_000}


def test_without_the_extra_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError")
    job = {"address": "s3://bucket/x", "folder": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "kubetorch.datastore.bucket_program"],
        input=json.dumps(job).encode(),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=60,
    )
    state = json.loads(done.stdout.splitlines()[-1])["failure"]["state"]
    assert "pip install 'kubetorch[object-storage]'" in state["hint"]
