"""The state in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kubetorch.controller import database
from kubetorch.controller.state import (
    CallRecord,
    Generation,
    PodRecord,
    SqliteState,
    WorkloadRecord,
)
from kubetorch.errors import ControllerError, StorageFullError, VersionMismatchError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec

SPEC = WorkloadSpec("ns", "f", CallableRef("fn", "f", "m", "f"), ComputeSpec(replicas=2))
WORKLOAD = WorkloadRecord("ns", "f", 1)
POD = PodRecord("ns", "f", "f-1", 0, 18000, "template")
CALL = CallRecord("id", "ns", "f", "f-1", "f", "running", started=1.0)


def opened(path: Path) -> SqliteState:
    return SqliteState(path, database.open_database(path))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[SqliteState]:
    opened_state = opened(tmp_path / "state.sqlite")
    yield opened_state
    opened_state.close()


def test_everything_is_there_after_it_was_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    state = opened(path)
    state.put_workload(WORKLOAD, generation=Generation(1, SPEC))
    state.put_pod(POD)
    state.put_call(CALL)
    state.close()
    state = opened(path)
    contents = state.contents()
    assert contents.workloads == (WORKLOAD,)
    assert contents.generations == {("ns", "f"): (Generation(1, SPEC),)}
    assert state.pods() == [POD]
    assert state.call("id") == CALL
    state.close()


def test_what_was_written_is_there_for_another_process_at_once(
    state: SqliteState, tmp_path: Path
) -> None:
    state.put_pod(POD)
    other_state = opened(tmp_path / "state.sqlite")
    assert other_state.pods() == [POD]
    other_state.close()


def test_only_the_generations_to_keep_are_kept(state: SqliteState) -> None:
    for number in (1, 2, 3):
        record = replace(WORKLOAD, generation=number)
        state.put_workload(record, generation=Generation(number, SPEC), keep=[number, 1])
    generations = state.contents().generations["ns", "f"]
    assert [generation.number for generation in generations] == [1, 3]


def test_a_transaction_that_fails_changes_nothing(state: SqliteState) -> None:
    state.put_workload(WORKLOAD, generation=Generation(1, SPEC))
    with pytest.raises(ControllerError):
        numberless = Generation(None, SPEC)  # type: ignore[arg-type]  # SQLite refuses it
        state.put_workload(replace(WORKLOAD, good=1), generation=numberless)
    assert state.contents().workloads == (WORKLOAD,)
    state.put_workload(replace(WORKLOAD, good=1))


def test_a_deleted_workload_takes_its_generations_along(state: SqliteState) -> None:
    state.put_workload(WORKLOAD, generation=Generation(1, SPEC))
    state.delete_workload("ns", "f")
    contents = state.contents()
    assert (contents.workloads, contents.generations) == ((), {})


def test_pods_are_replaced_and_deleted_by_name(state: SqliteState) -> None:
    state.put_pod(POD)
    state.put_pod(replace(POD, pid=7))
    assert [pod.pid for pod in state.pods()] == [7]
    state.delete_pods([("ns", "f-1"), ("ns", "unknown"), ("other", "f-2")])
    assert state.pods() == []


def test_calls_are_found_by_namespace_and_workload(state: SqliteState) -> None:
    state.put_call(CALL)
    state.put_call(replace(CALL, id="other", workload="g", started=2.0))
    assert [call.id for call in state.calls()] == ["other", "id"]
    assert [call.id for call in state.calls(namespace="ns", workload="f")] == ["id"]
    assert state.calls(namespace="elsewhere") == []


def test_calls_that_have_ended_are_counted_with_their_results(
    state: SqliteState,
) -> None:
    state.put_call(CALL)
    state.put_call(replace(CALL, id="b", ended=2.0, result="digest", result_bytes=10))
    assert state.count_ended_calls() == (1, 10)
    running = state.calls(namespace="ns", workload="f", is_running=True)
    assert [call.id for call in running] == ["id"]
    assert state.calls(workload="g", is_running=True) == []
    assert state.results("ns") == {"digest"}
    assert state.results("elsewhere") == set()


def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(ControllerError, match=r"state\.sqlite cannot be used") as caught:
        database.open_database(path)
    assert "move" in str(caught.value)


def test_a_file_for_which_there_is_no_room_is_an_error_of_its_kind(tmp_path: Path) -> None:
    error = database.failure(tmp_path, sqlite3.OperationalError("database or disk is full"))
    assert isinstance(error, StorageFullError)
    assert str(tmp_path) in error.message


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    database.open_database(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"pragma user_version={database.SCHEMA + 1}")
    connection.close()
    with pytest.raises(VersionMismatchError, match="newer version"):
        database.open_database(path)


@pytest.mark.parametrize("schema", [0, 1, 6])
def test_a_file_of_an_unreleased_version_is_refused_with_what_to_delete(
    tmp_path: Path, schema: int
) -> None:
    path = tmp_path / "state.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("create table workloads (name text)")
    connection.execute(f"pragma user_version={schema}")
    connection.close()
    with pytest.raises(VersionMismatchError) as caught:
        database.open_database(path)
    assert str(caught.value) == (
        f"{path} was written by an unreleased version of Kubetorch: run kt local stop, and delete "
        f"{path}"
    )
    path.unlink()
    opened(path).close()


def test_a_generation_that_cannot_be_read_is_left_out(state: SqliteState, tmp_path: Path) -> None:
    state.put_workload(WORKLOAD, generation=Generation(1, SPEC))
    connection = sqlite3.connect(tmp_path / "state.sqlite")
    connection.execute("insert into generations values ('ns', 'f', 2, '{\"broken\": 1}')")
    connection.execute("insert into generations values ('ns', 'f', 3, 'no JSON')")
    connection.commit()
    connection.close()
    contents = state.contents()
    assert contents.workloads == (WORKLOAD,)
    assert contents.generations == {("ns", "f"): (Generation(1, SPEC),)}
