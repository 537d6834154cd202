"""Records of calls in the controller: for how long, how many, and without which values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kubetorch.controller import database
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.calls import Calls
from kubetorch.controller.records import Records, without_values
from kubetorch.controller.state import SqliteState
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import ResultExpiredError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import EnvStep, ImageSpec, RunStep
from kubetorch.specs.workload import RuntimeSpec, WorkloadSpec
from kubetorch.wire.messages import CallReport, CallView, Creator
from manual_clock import ManualClock

TREE = "ab" * 32
SPEC = WorkloadSpec(
    "ns",
    "w",
    CallableRef("fn", "f", "jobs", "f"),
    ComputeSpec(
        env_vars=(("TOKEN", "hush"),),
        image=ImageSpec(steps=(EnvStep("KEY", "hush"), RunStep("true"))),
        manifest='{"env": "hush"}',
    ),
    tree=TREE,
    runtime=RuntimeSpec(environ=(("HOME", "/hush"),)),
)
MOST = 32
CALL = CallView(
    id="call-one",
    namespace="ns",
    workload="w",
    pod="p",
    callable="f",
    state="failed",
    started=1.0,
)


class World:
    def __init__(self, folder: Path) -> None:
        path = folder / "state.sqlite"
        self.state = SqliteState(path, database.open_database(path))
        self.clock = ManualClock()
        self.blobs = BlobStores(folder / "blobs")
        self.records = Records(self.state, self.blobs, self.clock, most_records=MOST)

    def add(
        self, call_id: str, size: int = 1, namespace: str = "ns", ended: float | None = None
    ) -> None:
        now = self.clock.time()
        digest, blobs = digest_of(call_id.encode()), self.blobs.of(namespace).blobs
        blobs.put(digest, call_id.encode())
        os.truncate(blobs.path(digest), size)  # a hole takes no disk
        report = CallReport(
            id=call_id,
            callable="f",
            state="failed",
            started=now if ended is None else ended,
            ended=now if ended is None else ended,
            record=digest,
            record_bytes=-1,
            generation=1,
        )
        self.records.add(namespace, "w", "p", report, SPEC, Creator("ada"))

    def ids(self) -> set[str]:
        return {row.id for row in self.records.rows()}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.state.close()


def test_a_record_says_whose_code_it_is_and_keeps_its_tree(world: World) -> None:
    world.add("call-one")

    view = world.records.view(CALL, "ada")

    assert view.is_own
    assert not world.records.view(CALL, "eve").is_own
    assert view.call.is_replayable
    assert [spec.tree for spec in world.records.specs()] == [TREE]
    assert world.records.digest(CALL) in world.records.blobs(world.blobs.of("ns"))


@pytest.mark.security
def test_a_record_has_names_of_variables_and_no_values() -> None:
    reduced, names = without_values(SPEC)

    assert names == ("TOKEN", "KEY")
    assert "hush" not in str(reduced)
    assert reduced.compute.image is not None
    assert reduced.compute.image.steps == (RunStep("true"),)


def test_a_record_is_kept_for_seven_days(world: World) -> None:
    world.add("call-one")
    world.clock.advance(TIMING.call_record_seconds - 1)
    assert world.records.view(CALL, "").call.id == "call-one"

    world.clock.advance(2)

    with pytest.raises(ResultExpiredError, match="has left no record"):
        world.records.view(CALL, "")
    world.records.expire()
    assert not world.ids()


def test_the_oldest_records_of_a_full_namespace_go_first(world: World) -> None:
    share = LIMITS.namespace_record_bytes * 15 // 32 - 10_000
    for name in ("call-one", "call-two", "call-three"):
        world.clock.advance(1)
        world.add(name, share)
    world.add("call-else", share, namespace="other")

    assert world.ids() == {"call-two", "call-three", "call-else"}


@pytest.mark.security
def test_a_record_that_takes_most_of_a_namespace_is_not_kept(world: World) -> None:
    world.add("call-one")
    world.clock.advance(1)
    world.add("call-huge", LIMITS.namespace_record_bytes // 2)

    assert world.ids() == {"call-one"}


def test_beyond_their_number_the_oldest_go_down_to_a_slack(world: World) -> None:
    for number in range(MOST):
        world.clock.advance(1)
        world.add(f"call-{number:02}")
    assert len(world.ids()) == MOST

    world.clock.advance(1)
    world.add("call-last")

    newest = {f"call-{number:02}" for number in range(3, MOST)}
    assert world.ids() == {*newest, "call-last"}


def test_a_record_is_no_younger_than_now_and_as_large_as_its_blob(world: World) -> None:
    world.add("call-one", 1234, ended=world.clock.time() + 1e9)

    (row,) = world.records.rows()

    assert row.started == row.ended == world.clock.time()
    assert row.bytes == 1234 + world.blobs.of("ns").blobs.size(row.code)


def test_without_its_blob_there_is_no_record(world: World) -> None:
    report = CallReport(
        id="call-one", callable="f", state="failed", started=1.0, ended=2.0, record="ef" * 32
    )
    world.records.add("ns", "w", "p", report, SPEC, None)
    assert not world.ids()


def test_the_code_of_records_is_written_once_and_stays_young(world: World) -> None:
    world.add("call-one")
    (row,) = world.records.rows()
    path = world.blobs.of("ns").blobs.path(row.code)
    os.utime(path, (1.0, 1.0))
    inode = path.stat().st_ino

    world.add("call-two")

    assert path.stat().st_ino == inode
    assert path.stat().st_mtime > 1.0


def test_a_disk_that_cannot_be_read_ends_a_collection_and_no_tree_is_deleted(world: World) -> None:
    world.add("call-one")
    (row,) = world.records.rows()
    path = world.blobs.of("ns").blobs.path(row.code)
    path.unlink()
    path.mkdir()

    with pytest.raises(IsADirectoryError):
        world.records.specs()


def test_a_pod_of_another_workload_does_not_replace_a_record(world: World) -> None:
    world.add("call-one", 5)
    world.add("call-one", 7, namespace="other")

    assert [row.namespace for row in world.records.rows()] == ["ns"]


@pytest.mark.security
@pytest.mark.parametrize("changes", [{"namespace": "other"}, {"workload": "v"}])
def test_who_may_use_a_call_of_another_workload_does_not_get_a_record_by_its_id(
    world: World, changes: dict[str, str]
) -> None:
    world.add("call-one")
    call = replace(CALL, **changes)

    with pytest.raises(ResultExpiredError):
        world.records.view(call, "ada")
    with pytest.raises(ResultExpiredError):
        world.records.digest(call)
    assert [view.is_replayable for view in world.records.views([call])] == [True, False]


def test_a_call_that_was_not_spawned_leaves_its_record_and_is_not_remembered(world: World) -> None:
    calls = Calls(world.state, world.blobs, world.clock)
    world.add("call-one")
    report = CallReport(
        id="call-one", callable="f", state="failed", started=1.0, ended=2.0, record="ef" * 32
    )

    assert calls.report("ns", "w", "p", report)

    assert not world.state.calls()
    assert calls.get("call-one").is_replayable
    assert [view.id for view in calls.list()] == ["call-one"]
    with pytest.raises(ResultExpiredError, match="has left a record") as caught:
        calls.result("call-one")
    assert "kt replay call-one" in (caught.value.hint or "")


@pytest.mark.security
def test_a_report_about_a_call_of_another_workload_is_not_accepted(world: World) -> None:
    calls = Calls(world.state, world.blobs, world.clock)
    running = CallReport(id="call-one", callable="f", state="running", started=1.0)
    assert calls.report("ns", "w", "p", running)
    assert not calls.report("other", "w", "p", running)

    # Also once only the record of the call is left.
    world.add("call-two")
    report = CallReport(id="call-two", callable="f", state="failed", started=1.0, ended=2.0)
    assert not calls.report("other", "w", "p", report)
    assert calls.report("ns", "w", "p", report)
