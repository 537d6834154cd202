"""Many pods that get a key at the same time: a tree, which grows as they come and heals itself."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import pytest

import kubetorch as kt
from kubetorch.config import environment
from kubetorch.sdk import backend
from kubetorch.sdk.data.client import DataClient, ask, find_key
from kubetorch.wire import routes
from kubetorch.wire.data import JoinGet
from tests.local.user_project import UserProject

SOURCE = """
import hashlib
import os
import time
from pathlib import Path

import kubetorch as kt

def get(key, folder, seconds_after=0):
    target = Path(folder, os.environ["POD_NAME"])
    kt.get(key, target, contents=True)
    time.sleep(seconds_after)
    content = b"".join(path.read_bytes() for path in sorted(target.rglob("*")) if path.is_file())
    return hashlib.sha256(content).hexdigest()

def get_file(key, folder):
    target = Path(folder, os.environ["POD_NAME"] + ".bin")
    kt.get(key, target)
    return hashlib.sha256(target.read_bytes()).hexdigest()

def get_some(key, folder, names):
    target = Path(folder, os.environ["POD_NAME"])
    kt.get(key, target, contents=True, only=names)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in target.iterdir()}
"""
TENSORS_SOURCE = """
import os
from pathlib import Path

from kubetorch.sdk import backend
from kubetorch.sdk.data import client, tensors
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.transport.session import Session

def get(key, folder, only=()):
    # From afar: pods of one machine read the folder of the store.
    os.environ["KT_CACHE_DIR"] = str(Path(folder, os.environ["POD_NAME"]))
    session = Session(backend.session().controller, is_local=False)
    view = client.find_key(session, "default", key)
    progress = Progress("getting", key)
    value = tensors.get(session, "default", key, view, None, progress, only=only)
    return [float(array.sum()) for array in value["layers"]]
"""
SIZE = 48 * 1024**2


@pytest.fixture
def jobs(service_home: Path, tmp_path: Path) -> Iterator[ModuleType]:
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def tensor_jobs(service_home: Path, tmp_path: Path) -> Iterator[ModuleType]:
    project = UserProject(tmp_path / "weights")
    yield project.module(TENSORS_SOURCE)
    project.forget()


def sent_bytes() -> int:
    """Bytes that the store has sent."""
    text = backend.session().ask(lambda controller: controller.ask("GET", routes.METRICS)).decode()
    name = "kubetorch_controller_data_sent_bytes "
    return int(next(line for line in text.splitlines() if line.startswith(name))[len(name) :])


def test_the_store_sends_two_copies_to_six_pods(jobs: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(SIZE))
    for number in range(50):
        (source / f"small{number}").write_bytes(os.urandom(100))
    kt.put("models/base", str(source), contents=True)
    getters = kt.fn(jobs.get, name="getters").to(kt.Compute(cpus="0.1", replicas=6))
    digests = getters("models/base", str(tmp_path / "out"))
    assert len(digests) == 6
    assert len(set(digests)) == 1
    assert sent_bytes() <= 2.5 * SIZE
    folders = list((tmp_path / "out").iterdir())
    assert len(folders) == 6
    for folder in folders:
        assert (folder / "large").read_bytes() == (source / "large").read_bytes()
        assert len(list(folder.iterdir())) == 51
    # A pod that comes later gets all of it from those that have it.
    before = sent_bytes()
    late = kt.fn(jobs.get, name="late").to(kt.Compute(cpus="0.1"))
    assert late("models/base", str(tmp_path / "late")) == digests[0]
    assert sent_bytes() - before < SIZE / 10


def test_pods_that_name_the_file_of_a_get_give_it_to_each_other(
    jobs: ModuleType, tmp_path: Path
) -> None:
    content = os.urandom(8 * 1024**2)
    (tmp_path / "source").write_bytes(content)
    (tmp_path / "out").mkdir()
    kt.put("large", str(tmp_path / "source"))
    getters = kt.fn(jobs.get_file, name="getters").to(kt.Compute(cpus="0.1", replicas=4))
    digests = getters("large", str(tmp_path / "out"))
    assert digests == [hashlib.sha256(content).hexdigest()] * 4
    assert sent_bytes() <= 2.5 * len(content)


def test_pods_that_get_the_same_part_of_a_key_give_it_to_each_other(
    jobs: ModuleType, tmp_path: Path
) -> None:
    source, size = tmp_path / "source", 8 * 1024**2
    source.mkdir()
    for name in ("large", "other"):
        (source / name).write_bytes(os.urandom(size))
    for number in range(3):  # one blob has them: what a pod that has one of them cannot give
        (source / f"small{number}").write_bytes(os.urandom(1000))
    kt.put("models/base", str(source), contents=True)
    getters = kt.fn(jobs.get_some, name="getters").to(kt.Compute(cpus="0.1", replicas=4))
    names = ["large", "small1"]
    digests = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in names}
    assert getters("models/base", str(tmp_path / "out"), names) == [digests] * 4
    assert sent_bytes() <= 2.5 * size
    # Who comes later gets it from them, and another part from the store.
    before = sent_bytes()
    late = kt.fn(jobs.get_some, name="late").to(kt.Compute(cpus="0.1"))
    assert late("models/base", str(tmp_path / "late"), names) == digests
    assert sent_bytes() - before < size / 10
    assert late("models/base", str(tmp_path / "rest"), ["other"]).keys() == {"other"}
    assert size <= sent_bytes() - before < 1.1 * size


def kill(agent: int) -> None:
    """SIGKILL all processes of a pod."""
    process = psutil.Process(agent)
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def fetched_bytes(folder: Path) -> int:
    """Bytes that gets below a folder have written so far."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("large"))


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.faults
def test_getters_go_on_when_the_pod_that_they_get_from_is_killed(
    jobs: ModuleType, tmp_path: Path
) -> None:
    size = 128 * 1024**2  # so that there is a middle
    (tmp_path / "source").mkdir()
    (tmp_path / "source/large").write_bytes(os.urandom(size))
    kt.put("models/base", str(tmp_path / "source"), contents=True)
    getters = [
        kt.fn(jobs.get, name=f"getter{number}").to(kt.Compute(cpus="0.1")) for number in range(3)
    ]
    folders = [tmp_path / f"out{number}" for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        calls = []
        # The first call has not ended when its pod is killed, however fast its get was.
        for getter, folder, seconds_after in zip(getters, folders, (600, 0, 0), strict=True):
            folder.mkdir()
            calls.append(pool.submit(getter, "models/base", str(folder), seconds_after))
            wait_until(lambda folder=folder: fetched_bytes(folder) > 0)
        # The third pod gets from the first pod.
        kill(getters[0].service_config["pods"][0]["pid"])
        with pytest.raises(kt.KubetorchError):
            calls[0].result()
        digests = {call.result() for call in calls[1:]}
    assert len(digests) == 1
    for folder in folders[1:]:
        (path,) = folder.rglob("large")
        assert path.read_bytes() == (tmp_path / "source/large").read_bytes()


@pytest.mark.faults
@pytest.mark.parametrize("is_served_by_the_store", [False, True])
def test_a_get_goes_on_with_pods_while_the_controller_does_not_answer(
    jobs: ModuleType, tmp_path: Path, is_served_by_the_store: bool
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/large").write_bytes(os.urandom(128 * 1024**2))
    kt.put("models/base", str(tmp_path / "source"), contents=True)
    first, second = (
        kt.fn(jobs.get, name=name).to(kt.Compute(cpus="0.1")) for name in ("first", "second")
    )
    digest = first("models/base", str(tmp_path / "first"))
    if is_served_by_the_store:  # the pod that has it has enough to do
        session = backend.session()
        view = find_key(session, "default", "models/base")
        assert view is not None
        for getter in ("busy", "more"):
            join = JoinGet(key=view.key, manifest=view.manifest, getter=getter)
            question = partial(DataClient.join, join=join)
            source = ask(session, "default", question)
            assert source is not None
    folder = tmp_path / "second"
    folder.mkdir()
    service = json.loads((environment.local_dir() / "service.json").read_text())["pid"]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(second, "models/base", str(folder))
        wait_until(lambda: fetched_bytes(folder) > 0)
        os.kill(service, signal.SIGSTOP)
        try:
            assert call.result(timeout=60) == digest
        finally:
            os.kill(service, signal.SIGCONT)


def test_a_hundred_getters_at_once_all_get_it(service_home: Path, tmp_path: Path) -> None:
    content = os.urandom(1024**2)
    (tmp_path / "file").write_bytes(content)
    kt.put("small", str(tmp_path / "file"))
    with ThreadPoolExecutor(100) as pool:
        list(pool.map(lambda number: kt.get("small", str(tmp_path / f"{number}.bin")), range(100)))
    assert all((tmp_path / f"{number}.bin").read_bytes() == content for number in range(100))


def test_pods_that_get_tensors_give_them_to_each_other(
    tensor_jobs: ModuleType, tmp_path: Path
) -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(1)
    layers = [generator.random(1024**2) for _ in range(2)]
    sums = [float(layer.sum()) for layer in layers]
    kt.put("policy", src={"layers": layers})
    getters = kt.fn(tensor_jobs.get, name="getters").to(kt.Compute(cpus="0.1", replicas=3))
    assert getters("policy", str(tmp_path / "out")) == [sums] * 3
    assert sent_bytes() <= 2.5 * sum(layer.nbytes for layer in layers)
    # Who comes later gets a part, too, from them, and then only the difference from the store.
    before = sent_bytes()
    late = kt.fn(tensor_jobs.get, name="late").to(kt.Compute(cpus="0.1"))
    assert late("policy", str(tmp_path / "late"), ["layers.1"]) == sums[1:]
    layers[1][:10] = 0
    kt.put("policy", src={"layers": layers})
    assert late("policy", str(tmp_path / "late"), ["layers.1"]) == [float(layers[1].sum())]
    assert sent_bytes() - before < layers[1].nbytes / 10


def test_getters_of_tensors_wait_for_the_putter_and_for_each_other(service_home: Path) -> None:
    numpy = pytest.importorskip("numpy")
    kt.put("policy", src={"w": numpy.zeros(10)})
    window = kt.BroadcastWindow(world_size=3, group_id="step 1")
    with ThreadPoolExecutor(2) as pool:
        gets = [pool.submit(kt.get, "policy", broadcast=window) for _ in range(2)]
        time.sleep(0.3)
        assert not any(each.done() for each in gets)
        kt.put("policy", src={"w": numpy.ones(10)}, broadcast=window)
        assert all((each.result()["w"] == 1).all() for each in gets)
