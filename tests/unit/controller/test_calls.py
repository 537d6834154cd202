"""Spawned calls: whose word counts, and for how long their results are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kubetorch.controller import database
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.calls import Calls, expired
from kubetorch.controller.state import CallRecord, SqliteState
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.datastore.blobs import Room, digest_of
from kubetorch.errors import ResultExpiredError
from kubetorch.wire.messages import CallReport, Ending
from manual_clock import ManualClock

NOW = 1_000_000.0
HOUR = 3600.0


def call(name: str, *, age: float, size: int = 1) -> CallRecord:
    ended = NOW - age
    return CallRecord(name, "ns", "f", "p", "f", "succeeded", ended, ended, name, size)


def ids(calls: list[CallRecord]) -> list[str]:
    return [call.id for call in calls]


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[Calls]:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    yield Calls(state, BlobStores(tmp_path / "blobs"), ManualClock())
    state.close()


def report(calls: Calls, pod: str, state: str) -> None:
    ended = None if state == "running" else ManualClock().time()
    call_report = CallReport(id="c", callable="f", state=state, started=1.0, ended=ended)
    calls.report("ns", "w", pod, call_report)


def test_a_pod_that_refused_a_call_does_not_speak_for_the_one_that_runs_it(calls: Calls) -> None:
    report(calls, "b", "running")
    report(calls, "a", "failed")
    assert (calls.get("c").pod, calls.get("c").state) == ("b", "running")

    report(calls, "b", "succeeded")
    report(calls, "a", "failed")
    assert (calls.get("c").pod, calls.get("c").state) == ("b", "succeeded")


def test_a_call_that_was_refused_and_sent_again_runs(calls: Calls) -> None:
    report(calls, "a", "failed")
    report(calls, "b", "running")
    assert (calls.get("c").pod, calls.get("c").state) == ("b", "running")


def test_a_result_counts_though_it_is_heard_of_after_a_refusal(calls: Calls) -> None:
    report(calls, "a", "failed")
    report(calls, "b", "succeeded")
    assert (calls.get("c").pod, calls.get("c").state) == ("b", "succeeded")


def test_a_call_that_is_asked_for_before_its_pod_spoke_of_it_is_found(calls: Calls) -> None:
    async def ask() -> list[str]:
        asking = [asyncio.ensure_future(calls.expect("c")) for _ in range(2)]
        await asyncio.sleep(0)
        report(calls, "a", "running")
        return [(await waiter).pod for waiter in asking]

    assert asyncio.run(ask()) == ["a", "a"]


def test_a_call_that_nobody_speaks_of_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    calls = Calls(state, BlobStores(tmp_path / "blobs"), ManualClock(), first_report_timeout=0.0)
    with pytest.raises(ResultExpiredError, match="no call has the id c"):
        asyncio.run(calls.expect("c"))
    state.close()


def test_a_pod_of_another_workload_does_not_speak_of_a_call(calls: Calls) -> None:
    report(calls, "a", "running")
    call_report = CallReport(id="c", callable="f", state="failed", started=1.0, ended=2.0)
    calls.report("ns", "other", "a", call_report)
    calls.report("other", "w", "a", call_report)
    assert calls.get("c").state == "running"


class CallHistory:
    """Calls with their results, and a clock."""

    def __init__(self, folder: Path, room: Room) -> None:
        path = folder / "state.sqlite"
        self._state = SqliteState(path, database.open_database(path))
        self.clock = ManualClock()
        self.blobs = BlobStores(folder / "blobs", room=room)
        self.calls = Calls(self._state, self.blobs, self.clock)

    def end(self, call_id: str, outcome: bytes) -> str:
        """A call ends with this outcome; its digest."""
        digest = digest_of(outcome)
        self.blobs.of("ns").blobs.put(digest, outcome)
        ended = self.clock.time()
        call_report = CallReport(call_id, "f", "succeeded", 1.0, ended, digest, len(outcome))
        self.calls.report("ns", "w", "a", call_report)
        return digest

    def close(self) -> None:
        self._state.close()


@pytest.fixture
def history(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CallHistory]:
    call_history = CallHistory(tmp_path, getattr(request, "param", Room()))
    yield call_history
    call_history.close()


def test_a_result_is_gone_when_its_time_is_over_whoever_looks_then(history: CallHistory) -> None:
    digest = history.end("c", b"outcome")
    assert history.calls.result("c") == digest
    history.clock.advance(TIMING.call_result_seconds)
    with pytest.raises(ResultExpiredError, match="is not kept any more"):
        history.calls.result("c")
    assert not history.blobs.of("ns").blobs.has(digest)
    history.clock.advance(TIMING.call_result_seconds)
    with pytest.raises(ResultExpiredError, match="no call has the id c"):
        history.calls.get("c")


def test_a_result_that_a_later_call_has_too_stays_for_that(history: CallHistory) -> None:
    history.end("c", b"outcome")
    history.clock.advance(TIMING.call_result_seconds / 2)
    digest = history.end("d", b"outcome")
    history.clock.advance(TIMING.call_result_seconds / 2)
    assert history.calls.get("c").result is None
    assert history.calls.result("d") == digest


@pytest.mark.parametrize("history", [Room(limit_bytes=1)], indirect=True)
def test_a_call_whose_pod_is_lost_has_failed_though_no_result_can_be_written(
    history: CallHistory,
) -> None:
    history.calls.report("ns", "w", "a", CallReport("c", "f", "running", 1.0))
    history.calls.lost("ns", "w", {"a": Ending(reason="Evicted")})
    lost_call = history.calls.get("c")
    assert (lost_call.state, lost_call.result) == ("failed", None)
    with pytest.raises(ResultExpiredError, match="is not kept any more"):
        history.calls.result("c")


def test_a_young_result_is_kept() -> None:
    assert expired([call("a", age=TIMING.call_result_seconds - 1)], now=NOW) == ([], [])


def test_an_old_result_is_dropped_and_its_call_remembered() -> None:
    dropped, forgotten = expired([call("a", age=TIMING.call_result_seconds)], now=NOW)
    assert (ids(dropped), forgotten) == (["a"], [])


def test_a_very_old_call_is_forgotten() -> None:
    dropped, forgotten = expired([call("a", age=2 * TIMING.call_result_seconds)], now=NOW)
    assert (dropped, ids(forgotten)) == ([], ["a"])


def test_the_oldest_results_go_when_there_are_too_many_bytes() -> None:
    half = LIMITS.call_result_bytes // 2
    calls = [call("old", age=3 * HOUR, size=half), call("new", age=HOUR, size=half)]
    assert expired(calls, now=NOW) == ([], [])
    dropped, _ = expired([*calls, call("newest", age=0.0, size=1)], now=NOW)
    assert ids(dropped) == ["old"]


def test_a_result_that_can_never_be_kept_takes_no_room_from_others() -> None:
    calls = [
        call("old", age=HOUR, size=10),
        call("large", age=0.0, size=LIMITS.call_result_bytes + 1),
    ]
    dropped, forgotten = expired(calls, now=NOW)
    assert (ids(dropped), forgotten) == (["large"], [])


def test_room_is_made_for_more_than_the_next_result() -> None:
    size = LIMITS.call_result_bytes // 64
    calls = [call(str(age), age=float(age), size=size) for age in range(64)]
    assert expired(calls, now=NOW) == ([], [])
    dropped, _ = expired([*calls, call("newest", age=0.0, size=1)], now=NOW)
    assert 1 < len(dropped) <= 5


def test_the_newest_result_may_have_all_the_room() -> None:
    calls = [call("old", age=HOUR), call("newest", age=0.0, size=LIMITS.call_result_bytes)]
    dropped, _ = expired(calls, now=NOW)
    assert ids(dropped) == ["old"]


def test_a_result_larger_than_all_room_is_dropped() -> None:
    dropped, _ = expired([call("a", age=0.0, size=LIMITS.call_result_bytes + 1)], now=NOW)
    assert ids(dropped) == ["a"]


def test_the_oldest_calls_are_forgotten_when_there_are_too_many() -> None:
    calls = [call(str(index), age=float(index)) for index in range(LIMITS.remembered_calls + 1)]
    _, forgotten = expired(calls, now=NOW)
    assert ids(forgotten) == [str(LIMITS.remembered_calls)]


def test_a_running_call_is_kept_whatever_its_age() -> None:
    running = replace(call("a", age=100 * TIMING.call_result_seconds), ended=None, result=None)
    assert expired([running], now=NOW) == ([], [])
