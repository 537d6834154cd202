"""Spawned calls that are asked for by their id: at once, after a teardown, wrongly."""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kubetorch as kt
from kubetorch.cli.call import app
from tests.local.user_project import UserProject

COMPUTE = kt.Compute(cpus="0.1")


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project = UserProject(tmp_path / "shop")
    project.write("waits.py", "import time\n\ndef slow(s):\n    time.sleep(s)\n    return s\n")
    monkeypatch.syspath_prepend(str(project.folder))
    import waits

    handle = kt.fn(waits.slow).to(COMPUTE)
    yield handle
    handle.teardown()
    project.forget()


MODEL = """
import threading

class Model:
    def __init__(self, size):
        self.data = b"x" * size

class Locked(Model):
    def __init__(self, size):
        super().__init__(size)
        self.lock = threading.Lock()

def train(size, locked=False):
    return {"best": (Locked if locked else Model)(size)}

def build() -> list["Part"]:
    return [Part()]

class Part:
    pass
"""


@pytest.fixture(scope="module")
def model(service: Path, tmp_path_factory: pytest.TempPathFactory):
    project = UserProject(tmp_path_factory.mktemp("model") / "shop")
    project.write("trains.py", MODEL)
    sys.path.insert(0, str(project.folder))
    try:
        yield importlib.import_module("trains")
    finally:
        sys.path.remove(str(project.folder))
        project.forget()


@pytest.fixture(scope="module")
def train(model):
    handle = kt.fn(model.train).to(COMPUTE)
    yield handle
    handle.teardown()


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_value_that_cannot_travel_is_kept_and_fetched_by_the_id_of_its_call(
    train, model, tmp_path, size
) -> None:
    with pytest.raises(
        kt.SerializationError, match=r'result\["best"\] is a trains.Model'
    ) as caught:
        train(size)
    call_id = caught.value.call_id
    assert f'kt.calls.get("{call_id}").result(serialization="pickle")' in caught.value.hint
    call = kt.calls.get(call_id)
    best_model = call.result(serialization="pickle")["best"]
    assert (type(best_model), best_model.data) == (model.Model, b"x" * size)
    with pytest.raises(kt.SerializationError):
        call.result()
    out = tmp_path / "model.pkl"
    arguments = ["calls", "result", call_id, "--serialization", "pickle", "--out", str(out)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert pickle.loads(out.read_bytes())["best"].data == b"x" * size


def test_so_is_that_of_a_spawned_call_and_of_one_over_http(train) -> None:
    call = train.spawn(10)
    with pytest.raises(kt.SerializationError) as caught:
        call.result()
    assert caught.value.call_id == call.id
    fetched = asyncio.run(call.get_async(serialization="pickle"))
    assert fetched["best"].data == b"x" * 10
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(train, "train", {"args": [20]})
    envelope = json.loads(refused.value.read())
    assert refused.value.code == 400
    value = kt.calls.get(envelope["state"]["call_id"]).result(serialization="pickle")
    assert value["best"].data == b"x" * 20


def test_what_pickle_cannot_carry_either_is_named_and_not_kept(train) -> None:
    with pytest.raises(kt.SerializationError, match=r'nor .*: result\["best"\]\.lock is') as caught:
        train(10, locked=True)
    assert caught.value.call_id is None


def test_a_value_that_travelled_is_no_pickle_and_is_asked_for_as_it_is(train, tmp_path) -> None:
    with pytest.raises(kt.SpecError, match="serialization='json'"):
        kt.calls.get("0" * 32).result(serialization="json")
    with pytest.raises(kt.ResultExpiredError):
        kt.calls.get("0" * 32).result(serialization="pickle")
    shown = CliRunner().invoke(app, ["calls", "result", "0" * 32, "--out", str(tmp_path / "x")])
    assert (shown.exit_code, "--serialization pickle" in shown.output) == (2, True)


def test_an_annotation_that_shows_it_is_warned_of_at_the_deploy(model) -> None:
    with pytest.warns(UserWarning, match=r"build returns a trains\.Part.* cannot travel"):
        build = kt.fn(model.build).to(COMPUTE)
    build.teardown()


def post(handle, path: str, body: object) -> bytes:
    request = urllib.request.Request(
        f"{handle.base_endpoint}/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **handle.request_headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def test_a_call_is_found_as_soon_as_it_was_spawned(slow) -> None:
    for _ in range(30):
        call = slow.spawn(0.01)
        assert kt.CallHandle.from_id(call.id).status() in ("running", "succeeded")
        assert kt.CallHandle.from_id(call.id).result() == 0.01


def test_what_a_call_returned_outlives_a_teardown_at_once(slow) -> None:
    call = slow.spawn(0)
    assert call.result() == 0
    slow.teardown()
    assert kt.CallHandle.from_id(call.id).result() == 0
    assert kt.CallHandle.from_id(call.id).status() == "succeeded"


@pytest.mark.parametrize(
    "wrong", [5, None, "", "short", "../../x", "a" * 65, "0" * 32 + ",", "é" * 9]
)
def test_what_is_no_id_is_named(wrong) -> None:
    with pytest.raises(kt.SpecError, match="is not the id of a call"):
        kt.CallHandle.from_id(wrong)
