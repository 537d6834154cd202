"""The formats on the wire and on disk: the first release, and later ones, are judged by these.

`python tests/contract/test_formats.py` writes down what they are now.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
import typing
from pathlib import Path
from typing import Any

import msgspec

from kubetorch.controller import database
from kubetorch.controller.access import Grant, User
from kubetorch.controller.backends.process import stores
from kubetorch.controller.cluster import resource
from kubetorch.controller.state import Generation, SqliteState, WorkloadRecord
from kubetorch.datastore import trees
from kubetorch.errors import CallError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import STEPS, EnvStep, ImageSpec, PipStep
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire import calls, codecs, exceptions, frames, messages, secrets, versions

GOLDENS = Path(__file__).with_name("formats.json")
MESSAGES = (
    *(messages.FromAgent, messages.FromController, messages.Deploy, messages.DeployEvent),
    *(messages.WorkerStacks, messages.CallView, messages.TokenView, messages.StatusView),
    *(secrets.PutSecret, secrets.SecretFile, stores._Stored, exceptions.Failure),
)
META = (
    *(frames.Open, frames.Attach, frames.Cancel, frames.Result, frames.Yield, frames.Log),
    *(frames.Progress, frames.Credit, frames.Ack, frames.Welcome, frames.Goaway),
)

SPEC = WorkloadSpec(
    "team",
    "train",
    CallableRef("fn", "train", "ml.train", "train"),
    ComputeSpec(
        replicas=2,
        cpus="0.5",
        env_vars=(("A", "1"),),
        image=ImageSpec(image_id="python:3.12", steps=(PipStep("numpy"), EnvStep("B", "2"))),
    ),
    tree="a" * 64,
    username="ada",
    origin=Origin("b" * 64, "github.com/acme/shop", "ml/train.py:train", "c" * 64),
)
RECORD = WorkloadRecord(
    "team", "train", 2, good=1, epoch=3, created=1e9, updated=1e9 + 1, active=1e9 + 2, pool="0,1"
)
GRANT = Grant(
    User("ada@acme", "uid", ("ml",), (("scopes", ("a",)),)),
    (("token", "d1"),),
    (("data", "d2"),),
    messages.Creator("ada@acme", "ada"),
)
CONTENT = resource.Content(RECORD, (Generation(1, SPEC, GRANT), Generation(2, SPEC, GRANT)))
TREE = trees.build(
    [trees.Entry("ml/train.py", "file", 3, "e" * 64), trees.Entry("now", "symlink", target="ml")]
)
SEGMENTS = codecs.encode("values", {"loss": 0.5, "step": (1, 2)})
OUTCOMES = {
    "returned": calls.Returned(
        "values", tuple(map(len, SEGMENTS)), b"".join(codecs.join(SEGMENTS)), generation=2
    ),
    "raised": calls.Raised(exceptions.describe(CallError("it failed", hint="look"), pod_name="p")),
}


def fields_of(*roots: Any) -> dict[str, str]:
    """A line for each class of the types: its fields, with their types and defaults."""
    lines: dict[str, str] = {}
    types = list(roots)
    for kind in types:
        types += typing.get_args(kind)
        if isinstance(kind, type) and kind.__qualname__ not in lines:
            if issubclass(kind, msgspec.Struct):
                info = msgspec.structs.fields(kind)
                tag = kind.__struct_config__.tag
                beginning = ["array"] if kind.__struct_config__.array_like else []
                beginning += [f"type={tag}"] if tag else []
                parts = [(field.encode_name, field.type, field.default) for field in info]
            elif dataclasses.is_dataclass(kind):
                beginning, hints = [], typing.get_type_hints(kind)
                parts = [
                    (field.name, hints[field.name], field.default)
                    for field in dataclasses.fields(kind)
                ]
            else:
                continue
            types += [part[1] for part in parts]
            texts = [*beginning, *(_field_text(*part) for part in parts)]
            lines[kind.__qualname__] = "; ".join(texts)
    return lines


def _field_text(name: str, kind: Any, default: Any) -> str:
    is_class = isinstance(kind, type) and not typing.get_args(kind)
    text = kind.__qualname__ if is_class else re.sub(r"[\w.]+\.(?=\w)", "", str(kind))
    is_required = default in (dataclasses.MISSING, msgspec.NODEFAULT)
    return f"{name}: {text}" if is_required else f"{name}: {text} = {default!r}"


def written(folder: Path) -> dict[str, Any]:
    """The formats as they are now."""
    connection = database.open_database(folder / "state.sqlite")
    tables = connection.execute("select sql from sqlite_master where sql is not null order by name")
    pragmas = [connection.execute(f"pragma {name}").fetchone()[0] for name in PRAGMAS]
    descriptions = {
        "protocol": versions.PROTOCOL,
        "database": dict(zip(PRAGMAS, pragmas, strict=True)),
        "tables": [re.sub(r"\s+", " ", sql) for (sql,) in tables],
        "messages": fields_of(*MESSAGES, *STEPS.values()),
        "frames": {
            "header": frames.HEADER.format,
            "kinds": {kind.name: int(kind) for kind in frames.Kind},
            "meta": fields_of(*META),
            "encoded": frames.encode(frames.Kind.CANCEL, 7, frames.Cancel("enough")).hex(),
        },
        "spec": json.loads(messages.encode(SPEC)),
        "workload": {**resource.manifest(CONTENT), "status": resource.status(CONTENT, None, {})},
        "tree": TREE.encoded.hex(),
        "outcomes": {
            name: calls.pack_outcome(outcome).decode("latin-1")
            for name, outcome in OUTCOMES.items()
        },
    }
    connection.close()
    formats: dict[str, Any] = json.loads(json.dumps(descriptions))
    return formats


PRAGMAS = ("application_id", "user_version")


def test_the_formats_are_those_that_are_written_down(tmp_path: Path) -> None:
    assert written(tmp_path) == json.loads(GOLDENS.read_text())


def test_a_workload_of_a_cluster_is_read() -> None:
    golden = json.loads(GOLDENS.read_text())["workload"]
    content = resource.read(golden)
    assert content.generations == CONTENT.generations
    assert (content.record.good, content.record.pool) == (RECORD.good, RECORD.pool)


def test_a_workload_of_this_machine_is_read(tmp_path: Path) -> None:
    golden = json.loads(GOLDENS.read_text())
    path = tmp_path / "state.sqlite"
    connection = sqlite3.connect(path)
    for statement in golden["tables"]:
        connection.execute(statement)
    for name, value in golden["database"].items():
        connection.execute(f"pragma {name}={value}")
    row = ("team", "train", 1, json.dumps(golden["spec"]))
    connection.execute("insert into generations values (?, ?, ?, ?)", row)
    connection.commit()
    connection.close()
    state = SqliteState(path, database.open_database(path))
    assert state.contents().generations == {("team", "train"): (Generation(1, SPEC),)}
    state.close()


def test_trees_and_outcomes_are_read() -> None:
    golden = json.loads(GOLDENS.read_text())
    assert trees.decode(bytes.fromhex(golden["tree"])) == TREE
    for name, text in golden["outcomes"].items():
        outcome = calls.unpack_outcome(text.encode("latin-1"))
        assert calls.pack_outcome(outcome) == calls.pack_outcome(OUTCOMES[name])


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        GOLDENS.write_text(json.dumps(written(Path(name)), indent=1, ensure_ascii=True) + "\n")
