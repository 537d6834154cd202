"""Keys that pods publish in place: who gets them from which pod, and until when."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kubetorch as kt
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk import backend
from kubetorch.sdk.data.client import DataClient
from kubetorch.wire.data import FindKeys, PathKey
from tests.local import commands
from tests.local.user_project import UserProject

SOURCE = """
import os
from pathlib import Path

import kubetorch as kt

def publish(key, folder, **files):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        Path(folder, name).write_text(text)
    kt.put(key, folder, locale="local", contents=True)
    return os.environ["POD_NAME"]

def get(key, folder):
    kt.get(key, folder, contents=True)
    return {path.name: path.read_text() for path in Path(folder).iterdir()}, os.environ["POD_NAME"]

def get_tree(key, folder):
    kt.get(key, folder, contents=True)
"""


@pytest.fixture
def jobs(emptied_home: Path, tmp_path: Path) -> Iterator[ModuleType]:
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


def found(path: str) -> list[PathKey]:
    ask = FindKeys(path=path)
    return list(
        backend.session().ask(lambda controller: DataClient(controller, "default").find(ask)).keys
    )


def holders(path: str) -> list[tuple[str, ...]]:
    return [path_key.key.holders for path_key in found(path)]


def test_what_a_pod_publishes_is_read_there_and_getters_become_sources(
    jobs: ModuleType, tmp_path: Path, emptied_home: Path
) -> None:
    publisher = kt.fn(jobs.publish, name="publisher").to(kt.Compute(cpus="0.1"))
    getter = kt.fn(jobs.get, name="getter").to(kt.Compute(cpus="0.1"))
    files = {"weights": "w" * 100_000, "config": "small"}
    source = tmp_path / "source"
    pod = publisher("models/live", str(source), **files)
    assert holders("models") == [(pod,)]
    assert kt.ls("models") == [{"name": "live/", "is_directory": True, "locale": pod}]
    assert {"name": "models/", "is_directory": True, "locale": pod} in kt.ls()
    stored = sum(path.stat().st_size for path in emptied_home.glob("blobs/??/*"))
    content, getting_pod = getter("models/live", str(tmp_path / "copy"))
    assert content == files
    assert holders("models") == [(pod, getting_pod)]
    kt.get("models/live", str(tmp_path / "laptop"), contents=True)
    assert (tmp_path / "laptop/weights").read_text() == files["weights"]
    assert sum(path.stat().st_size for path in emptied_home.glob("blobs/??/*")) < stored + 50_000

    publisher("relative", "in its working directory", x="1")
    kt.get("relative", str(tmp_path / "relative"), contents=True)
    assert (tmp_path / "relative/x").read_text() == "1"

    whole = f"models/live version 1 in {{}}: whole, {100_005:,} bytes\n"
    verified = commands.kt("store", "verify", "models")
    assert verified.stdout == whole.format(pod) + whole.format(getting_pod), verified.stderr

    # The files of the publisher change under the readers: the pod that has a copy goes on.
    (source / "weights").write_text("changed")
    verified = commands.kt("store", "verify", "models")
    assert f"version 1 in {pod}: not whole" in verified.stdout
    assert "weights is not any more as it was when it was published" in verified.stdout
    kt.get("models/live", str(tmp_path / "second"), contents=True)
    assert (tmp_path / "second/weights").read_text() == files["weights"]
    getter.teardown()
    with pytest.raises(kt.DataStoreError, match="weights is not any more as it was"):
        kt.get("models/live", str(tmp_path / "third"), contents=True)
    assert not (tmp_path / "third").exists()

    publisher.teardown()
    assert found("models") == []
    with pytest.raises(kt.DataStoreError, match="there is no key"):
        kt.get("models/live", str(tmp_path / "fourth"))


def test_a_getter_of_the_store_is_a_source_for_the_next_one(
    jobs: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for number in range(20):
        (tmp_path / "data" / f"small{number}").write_text(str(number))
    (tmp_path / "data" / "large").write_text("l" * 3_000_000)
    kt.put("set", str(tmp_path / "data"), contents=True)
    getter = kt.fn(jobs.get, name="getter").to(kt.Compute(cpus="0.1"))
    content, pod = getter("set", str(tmp_path / "copy"))
    assert len(content) == 21
    assert holders("set") == [("store", pod)]
    kt.get("set", str(tmp_path / "laptop"), contents=True)
    copied = {
        path.name: path.read_text() for path in (tmp_path / "laptop").rglob("*") if path.is_file()
    }
    assert copied == content
    (tmp_path / "copy" / "large").write_text("changed")
    kt.get("set", str(tmp_path / "after"), contents=True)
    assert (tmp_path / "after" / "large").read_text() == "l" * 3_000_000
    getter.teardown()
    assert holders("set") == [("store",)]


def test_a_token_for_published_blobs_opens_nothing_else(jobs: ModuleType, tmp_path: Path) -> None:
    publisher = kt.fn(jobs.publish, name="publisher").to(kt.Compute(cpus="0.1"))
    publisher("k", str(tmp_path / "source"), x="1")
    (path_key,) = found("k")
    (source,) = path_key.sources
    with HttpClient(source.url, source.token) as client:
        for method, path in (("POST", "/publish"), ("POST", "/v1/run"), ("GET", "/v1/logs")):
            with client.request(method, path, body=b"{}" if method == "POST" else None) as answer:
                assert answer.status == 401, path
        body = b'{"manifest": "%s", "blobs": []}' % (b"0" * 64)
        with client.request("POST", "/v1/published", body=body) as answer:
            assert answer.status in (200, 404)
    with HttpClient(source.url) as client, client.request("POST", "/v1/published") as answer:
        assert answer.status == 401


def test_outside_of_pods_nothing_is_published_in_place(tmp_path: Path, emptied_home: Path) -> None:
    (tmp_path / "x").write_text("1")
    with pytest.raises(kt.DataStoreError, match="this program runs in none"):
        kt.put("k", str(tmp_path / "x"), locale="local")


def test_a_prefix_whose_keys_two_pods_publish_has_the_files_of_both(
    jobs: ModuleType, tmp_path: Path
) -> None:
    pods = {
        name: kt.fn(jobs.publish, name=name).to(kt.Compute(cpus="0.1")) for name in ("one", "two")
    }
    for name, publish in pods.items():
        publish(f"shards/train/{name}", str(tmp_path / name), **{name: name * 1000})
    content = {Path(name, name): name * 1000 for name in pods}
    kt.get("/shards/train/", tmp_path / "out", contents=True)
    assert tree(tmp_path / "out") == content
    getter = kt.fn(jobs.get_tree, name="getter").to(kt.Compute(cpus="0.1"))
    getter("/shards/train/", str(tmp_path / "copy"))
    assert tree(tmp_path / "copy") == content
    # The end of a pod is the end of its shard alone.
    pods["one"].teardown()
    shutil.rmtree(tmp_path / "out")
    kt.get("/shards/train/", tmp_path / "out", contents=True)
    assert tree(tmp_path / "out") == {Path("two/two"): "two" * 1000}


def tree(folder: Path) -> dict[Path, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_text() for path in paths}
