"""What the version before has pickled and stored is still read; `earlier/make.py` made it there."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import pickle
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch import _moved
from kubetorch.controller import database
from kubetorch.controller.backends.process.stores import SecretFiles, VolumeFolders
from kubetorch.controller.cluster import resource
from kubetorch.controller.state import SqliteState
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore
from kubetorch.sdk import backend
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import calls, codecs

EARLIER = Path(__file__).parent / "earlier"
PICKLES = json.loads((EARLIER / "pickles.json").read_text())
PROTOCOLS = ("2", "5")
#: The workloads that `make.py` stored, and their callables.
WORKLOADS = {"counter": "Counter", "double": "double"}


def _read(case: dict[str, Any], protocol: str) -> Any:
    return pickle.loads(base64.b64decode(case["pickles"][protocol]))


def _plain(value: object) -> object:
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PICKLES["values"])
def test_a_value_that_was_pickled_is_what_it_was(name: str, protocol: str) -> None:
    case = PICKLES["values"][name]
    value = _read(case, protocol)
    assert type(value).__qualname__ == case["type"]
    facts = {attribute: _plain(getattr(value, attribute)) for attribute in case["facts"]}
    assert facts == case["facts"]
    if case["repr"] is not None:
        assert repr(value) == case["repr"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PICKLES["values"])
def test_a_value_that_was_pickled_is_pickled_again(name: str, protocol: str) -> None:
    case = PICKLES["values"][name]
    value = _read(case, protocol)
    again = pickle.loads(pickle.dumps(value, protocol=int(protocol)))
    assert type(again) is type(value)
    for attribute in case["facts"]:
        assert getattr(again, attribute) == getattr(value, attribute)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PICKLES["errors"])
def test_an_error_that_was_pickled_is_what_it_was(name: str, protocol: str) -> None:
    case = PICKLES["errors"][name]
    error = _read(case, protocol)
    assert type(error).__qualname__ == case["type"]
    assert isinstance(error, getattr(kt, case["type"]))
    assert str(error) == case["text"]
    assert json.loads(json.dumps(vars(error), default=sorted)) == case["state"]


def test_no_class_of_an_error_is_left_out() -> None:
    assert {case["type"] for case in PICKLES["errors"].values()} <= set(kt.__all__)


@pytest.mark.parametrize("path", _moved.PATHS)
def test_a_class_that_moved_is_found_where_it_was(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert callable(pickle.loads(f"c{module}\n{name}\n.".encode()))


# --------------------------------------------------------------------------------------- stored


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return shutil.copytree(EARLIER / "home", tmp_path / "home")


@pytest.fixture
def state(home: Path) -> Iterator[SqliteState]:
    file = home / "state.sqlite"
    opened = SqliteState(file, database.open_database(file))
    yield opened
    opened.close()


@pytest.fixture
def blobs(home: Path) -> BlobStore:
    return BlobStore(home / "blobs")


def _specs(state: SqliteState) -> list[WorkloadSpec]:
    found = state.contents().generations.values()
    return [generation.spec for generations in found for generation in generations]


def test_workloads_of_the_database_are_read(state: SqliteState) -> None:
    contents = state.contents()
    assert {one.name: one.generation for one in contents.workloads} == dict.fromkeys(WORKLOADS, 1)
    assert {spec.name: spec.callable.qualname for spec in _specs(state)} == WORKLOADS
    (spec,) = (spec for spec in _specs(state) if spec.name == "double")
    assert spec.compute.cpus == "0.1"
    assert spec.compute.env_vars == (("A", "1"),)
    assert [one.name for one in spec.compute.secrets] == ["kept"]
    assert [one.mount_path for one in spec.compute.volumes] == ["/kept"]


def test_the_code_and_arguments_of_workloads_are_read(state: SqliteState, blobs: BlobStore) -> None:
    for spec in _specs(state):
        assert spec.tree is not None
        tree = trees.decode(blobs.read(spec.tree))
        contents = {entry.path: blobs.read(entry.digest) for entry in tree.entries if entry.digest}
        assert b"def double(x):" in contents["train.py"]
        if spec.init_args is not None:
            assert codecs.decode("json", [blobs.read(spec.init_args)]) == {"start": 5}


def test_results_of_spawned_calls_are_read(state: SqliteState, blobs: BlobStore) -> None:
    found = {}
    for call in state.calls():
        assert call.state == "succeeded"
        assert call.result is not None
        found[call.callable] = calls.value_of(calls.unpack_outcome(blobs.read(call.result)))
    assert found == {"double": 42, "Counter.add": 8}


def test_a_database_has_the_present_schema_once_it_was_opened(home: Path) -> None:
    file = home / "state.sqlite"
    database.open_database(file).close()
    with sqlite3.connect(file) as connection:
        (version,) = connection.execute("pragma user_version").fetchone()
    connection.close()
    assert version == database.SCHEMA


def test_secrets_and_volumes_of_this_machine_are_read(home: Path) -> None:
    secrets = SecretFiles(home / "secrets", lambda: 0.0)
    volumes = VolumeFolders(home / "volumes", lambda: 0.0)
    (secret,) = asyncio.run(secrets.list("default"))
    assert asyncio.run(secrets.values("default", secret.object_name)) == {"TOKEN": b"a value"}
    (volume,) = asyncio.run(volumes.list("default"))
    assert (volume.spec.name, volume.spec.size) == ("kept", "1Gi")


def test_resources_of_a_cluster_are_the_workloads_of_the_database(state: SqliteState) -> None:
    found = json.loads((EARLIER / "workload.json").read_text())
    generations = state.contents().generations
    for one in found:
        content = resource.read(one)
        key = content.record.namespace, content.record.name
        assert content.generations == generations[key]
        assert resource.manifest(content)["spec"] == one["spec"]
    assert len(found) == len(WORKLOADS)


@pytest.mark.parametrize("module", sorted(_moved._EARLIER_MODULES))
def test_a_module_of_0_5_has_the_names_that_there_are(module: str) -> None:
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=rf"{module} is a module of kubetorch 0\.5") as said:
        found = importlib.import_module(module)
    assert said[0].filename != _moved.__file__
    for name in _moved._EARLIER_MODULES[module].keys() - {"*"}:
        assert getattr(found, name) is not None
    with pytest.raises(ImportError):
        exec(f"from {module} import never_there", {})


def test_what_is_set_in_a_module_of_0_5_is_set() -> None:
    with pytest.warns(DeprecationWarning):
        sys.modules.pop("kubetorch.globals", None)
        globals_ = importlib.import_module("kubetorch.globals")
    assert globals_.config is kt.config
    assert globals_.controller_client is backend.controller_client
    try:
        globals_.disable_decorators = True
        assert backend.disable_decorators is True
    finally:
        globals_.disable_decorators = False
    assert backend.disable_decorators is False
