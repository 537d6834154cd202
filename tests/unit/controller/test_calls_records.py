"""Records of spawned calls, while the state takes them and while it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kubetorch.controller import database
from kubetorch.controller.calls import CallRecords
from kubetorch.controller.state import CallRecord, SqliteState
from kubetorch.controller.tuning import TIMING
from kubetorch.errors import StorageFullError
from manual_clock import ManualClock

CALL = CallRecord("a", "ns", "f", "f-1", "f", "running", started=1.0)


class Disk(SqliteState):
    """A state whose disk may be full."""

    is_full = False

    def put_call(self, call: CallRecord) -> None:
        if self.is_full:
            raise StorageFullError("no space left")
        super().put_call(call)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    path = tmp_path / "state.sqlite"
    return Disk(path, database.open_database(path))


def ids(calls: list[CallRecord]) -> list[str]:
    return [call.id for call in calls]


def test_what_a_full_disk_does_not_take_is_known_all_the_same(disk: Disk) -> None:
    book = CallRecords(disk, ManualClock())
    book.put(CALL)
    disk.is_full = True
    ended = replace(CALL, state="succeeded", ended=3.0, result="digest", result_bytes=5)
    book.put(ended)
    book.put(replace(CALL, id="b", workload="g", started=2.0))
    assert book.find("a") == ended
    assert ids(book.calls()) == ["b", "a"]
    assert ids(book.calls(workload="f")) == ["a"]
    assert ids(book.running()) == ["b"]
    assert book.results("ns") == {"digest"}
    assert (book.ended, book.result_bytes) == (1, 5)
    assert disk.call("a") == CALL


def test_it_is_written_once_there_is_room(disk: Disk) -> None:
    clock = ManualClock()
    book = CallRecords(disk, clock)
    disk.is_full = True
    book.put(CALL)
    clock.advance(3 * TIMING.call_write_retry_seconds)
    assert disk.calls() == []
    disk.is_full = False
    clock.advance(TIMING.call_write_retry_seconds)
    assert disk.calls() == [CALL]
    assert book.calls() == [CALL]


def test_what_has_ended_is_counted_also_by_the_next_one(disk: Disk) -> None:
    book = CallRecords(disk, ManualClock())
    ended = replace(CALL, ended=2.0, result="digest", result_bytes=7)
    for call in (CALL, ended, ended, replace(ended, id="b"), replace(CALL, id="c")):
        book.put(call)
    assert (book.ended, book.result_bytes) == (2, 14)
    reopened_records = CallRecords(disk, ManualClock())
    assert (reopened_records.ended, reopened_records.result_bytes) == (2, 14)
    reopened_records.delete([ended, replace(ended, id="unknown")])
    assert (reopened_records.ended, reopened_records.result_bytes) == (1, 7)
    assert ids(reopened_records.calls()) == ["b", "c"]
