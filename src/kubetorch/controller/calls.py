"""Spawned calls: the reports of pods about them, and how long their results are kept.

The records are in the state; while it cannot be written, new records are in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec.structs import asdict, replace

from kubetorch.controller.backends.base import DELETED
from kubetorch.controller.blobs import BlobStores, NamespaceBlobs
from kubetorch.controller.records import Records, view_of
from kubetorch.controller.state import CallRecord, SqliteState
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import AgentDiedError, DataStoreError, KubetorchError, ResultExpiredError
from kubetorch.lib import deadlines
from kubetorch.lib.clock import Clock, Timer
from kubetorch.wire import exceptions
from kubetorch.wire.calls import Raised, pack_outcome
from kubetorch.wire.messages import CallProgress, CallReport, CallView, Ending

_log = logging.getLogger(__name__)


class CallRecords:
    """Reads and writes records; keeps in memory those that a full disk does not take."""

    def __init__(self, state: SqliteState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        # By call: records that the state could not take.
        self._unwritten: dict[str, CallRecord] = {}
        self._retry: Timer | None = None
        self.ended, self.result_bytes = state.count_ended_calls()

    def find(self, call_id: str) -> CallRecord | None:
        return self._unwritten.get(call_id) or self._state.call(call_id)

    def calls(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """Calls, newest first: of one namespace and workload, or of all."""
        stored_calls = self._state.calls(namespace=namespace, workload=workload)
        return self._with_unwritten(stored_calls, namespace, workload)

    def running(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """The `calls` whose end is not known."""
        stored_calls = self._state.calls(namespace=namespace, workload=workload, is_running=True)
        calls = self._with_unwritten(stored_calls, namespace, workload)
        return [call for call in calls if call.ended is None]

    def results(self, namespace: str = "") -> set[str]:
        """The digests of all results: of one namespace, or of all."""
        unwritten_calls = self._with_unwritten([], namespace, "")
        return self._state.results(namespace) | {
            call.result for call in unwritten_calls if call.result
        }

    def put(self, call: CallRecord) -> None:
        before = self.find(call.id)
        if before is not None:
            self._count(before, -1)
        self._count(call, 1)
        if not self._write(call):
            self._unwritten.pop(call.id, None)
            self._unwritten[call.id] = call
            if len(self._unwritten) > LIMITS.unwritten_calls:
                self._unwritten.pop(next(iter(self._unwritten)))
            self._retry_later()

    def delete(self, calls: Iterable[CallRecord]) -> None:
        known_calls = [call for call in calls if self.find(call.id) is not None]
        self._state.delete_calls(call.id for call in known_calls)
        for call in known_calls:
            self._unwritten.pop(call.id, None)
            self._count(call, -1)

    def _count(self, call: CallRecord, sign: int) -> None:
        self.ended += sign * (call.ended is not None)
        self.result_bytes += sign * call.result_bytes

    def _with_unwritten(
        self, stored_calls: Iterable[CallRecord], namespace: str, workload: str
    ) -> list[CallRecord]:
        merged = {call.id: call for call in stored_calls}
        for call in self._unwritten.values():
            if namespace in ("", call.namespace) and workload in ("", call.workload):
                merged[call.id] = call
        if not self._unwritten:
            return list(merged.values())
        return sorted(merged.values(), key=lambda call: call.started, reverse=True)

    def _write(self, call: CallRecord) -> bool:
        try:
            self._state.put_call(call)
        except KubetorchError as error:
            _log.warning("call not kept id=%s error=%s", call.id, error)
            return False
        self._unwritten.pop(call.id, None)
        return True

    def _retry_later(self) -> None:
        if self._retry is None:
            self._retry = self._clock.call_later(
                TIMING.call_write_retry_seconds, self._write_unwritten
            )

    def _write_unwritten(self) -> None:
        self._retry = None
        if not all(self._write(call) for call in list(self._unwritten.values())):
            self._retry_later()


class Calls:
    def __init__(
        self,
        state: SqliteState,
        blob_stores: BlobStores,
        clock: Clock,
        *,
        first_report_timeout: float = TIMING.call_first_report_seconds,
    ) -> None:
        self._records = CallRecords(state, clock)
        #: What calls have left for replays.
        self.replays = Records(state, blob_stores, clock)
        self._blob_stores = blob_stores
        self._clock = clock
        self._first_report_timeout = first_report_timeout
        # By running call; pods repeat the progress to the next controller.
        self._progress: dict[str, CallProgress] = {}
        # By call that a client asks for before a pod has reported it.
        self._expected_calls: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    def report(self, namespace: str, workload: str, pod: str, report: CallReport) -> bool:
        """Record the report of a pod about a call; returns false if it is ignored.

        Clients choose the ids of calls: a report about a call of another workload is ignored.
        """
        earlier_record = self._records.find(report.id)
        for earlier in (earlier_record, self.replays.find(report.id)):
            if earlier is not None and (earlier.namespace, earlier.workload) != (
                namespace,
                workload,
            ):
                _log.warning("call of another workload reported id=%s pod=%s", report.id, pod)
                return False
        # A call that one pod refused may have been taken by another pod, which has its result.
        is_result = (
            report.state == "succeeded"
            and earlier_record is not None
            and earlier_record.state == "failed"
        )
        is_takeover = report.ended is None or is_result
        if earlier_record is not None and earlier_record.pod != pod and not is_takeover:
            return False
        fields = asdict(report)
        progress = fields.pop("progress")
        for name in ("record", "record_bytes", "generation"):
            del fields[name]
        record = CallRecord(namespace=namespace, workload=workload, pod=pod, **fields)
        self._progress.pop(report.id, None)
        if progress is not None and report.ended is None:
            self._progress[report.id] = progress
        # A call that was not spawned is reported for its record, and not remembered itself.
        is_plain = earlier_record is None and report.record is not None and report.result is None
        if record != earlier_record and not is_plain:
            self._records.put(record)
        expected = self._expected_calls.get(report.id)
        if expected is not None:
            expected.set()
        records = self._records
        if (
            records.ended > LIMITS.remembered_calls + LIMITS.surplus_calls
            or records.result_bytes > LIMITS.call_result_bytes
        ):
            self.expire()
        return True

    def lost(self, namespace: str, workload: str, pods: Mapping[str, Ending]) -> None:
        """Fail the running calls of pods that have ended."""
        for call in self._records.running(namespace=namespace, workload=workload):
            if call.pod in pods:
                self._fail(call, pods[call.pod].error(call.pod))

    def lost_by_agent(
        self, namespace: str, workload: str, pod: str, running_ids: Collection[str]
    ) -> None:
        """Fail the running calls of a pod that its agent does not know any more."""
        for call in self._records.running(namespace=namespace, workload=workload):
            if call.pod == pod and call.id not in running_ids:
                self._fail(call, AgentDiedError(pod, "it was started without what it kept"))

    def sweep(self, may_run: Callable[[str, str, str], bool]) -> None:
        """Fail the calls for whose namespace, workload and pod `may_run` is false."""
        for call in self._records.running():
            if not may_run(call.namespace, call.workload, call.pod):
                self._fail(call, DELETED.error(call.pod))

    async def expect(self, call_id: str) -> CallView:
        """The view of a call that may have been spawned a moment ago, and is waited for."""
        if self._records.find(call_id) is None and self.replays.find(call_id) is None:
            expected = self._expected_calls.setdefault(call_id, asyncio.Event())
            try:
                async with deadlines.timeout(self._first_report_timeout):
                    await expected.wait()
            except TimeoutError as error:
                raise unknown_call(call_id) from error
        return self.get(call_id)

    async def expect_record(self, call_id: str) -> None:
        """Wait a little for the record of a call that has ended just now, or is about to."""
        with contextlib.suppress(TimeoutError):
            async with deadlines.timeout(TIMING.call_record_wait_seconds):
                while self.replays.find(call_id) is None:
                    call = self._records.find(call_id)
                    if call is not None and call.ended is not None:
                        return
                    expected = self._expected_calls.setdefault(call_id, asyncio.Event())
                    expected.clear()
                    await expected.wait()

    def get(self, call_id: str) -> CallView:
        replay = self.replays.find(call_id)
        try:
            view = self._view(self._current_record(call_id))
        except ResultExpiredError:
            if replay is None:
                raise
            return view_of(replay)
        is_replayable = replay is not None and (replay.namespace, replay.workload) == (
            view.namespace,
            view.workload,
        )
        return replace(view, is_replayable=is_replayable)

    def list(self, *, namespace: str = "", workload: str = "") -> list[CallView]:
        records = self._records.calls(namespace=namespace, workload=workload)
        views = [self._view(call) for call in records]
        return self.replays.views(views, namespace=namespace, workload=workload)

    def result(self, call_id: str) -> str:
        """Digest of the packed outcome of a call that has ended."""
        if self._records.find(call_id) is None and self.replays.find(call_id) is not None:
            raise ResultExpiredError(
                f"the call {call_id} has left a record, and its result is not kept",
                hint=f"those of spawned calls are, for a while; kt replay {call_id} runs it again",
            )
        call = self._current_record(call_id)
        if call.result is not None and self._store(call).has(call.result):
            return call.result
        if call.ended is None:
            raise ResultExpiredError(f"the call {call_id} still runs", hint="wait for it first")
        hours = TIMING.call_result_seconds / 3600
        raise ResultExpiredError(
            f"the result of the call {call_id} is not kept any more",
            hint=f"results are kept for {hours:.0f} hours and at most "
            f"{LIMITS.call_result_bytes // 1024**2} MiB in all, the oldest are dropped first",
        )

    def results(self, store: NamespaceBlobs) -> set[str]:
        return self._records.results(store.namespace or "") | self.replays.blobs(store)

    def expire(self) -> None:
        """Drop the results and forget the calls that are too old or too many."""
        self.replays.expire()
        calls = self._records.calls()
        dropped, forgotten = expired(calls, now=self._clock.time())
        if not dropped and not forgotten:
            return
        for call in dropped:
            self._records.put(replace(call, result=None, result_bytes=0))
        self._records.delete(forgotten)
        expired_ids = {call.id for call in (*dropped, *forgotten)}
        live_results = {
            (self._store(call).root, call.result) for call in calls if call.id not in expired_ids
        }
        for call in (*dropped, *forgotten):
            blobs = self._store(call)
            if call.result is not None and (blobs.root, call.result) not in live_results:
                blobs.delete(call.result)

    def _store(self, call: CallRecord) -> BlobStore:
        return self._blob_stores.of(call.namespace).blobs

    def _current_record(self, call_id: str) -> CallRecord:
        call = self._records.find(call_id)
        if call is not None and call.ended is not None:
            keep_seconds = TIMING.call_result_seconds * (2 if call.result is None else 1)
            if self._clock.time() - call.ended >= keep_seconds:
                self.expire()
                call = self._records.find(call_id)
        if call is None:
            raise unknown_call(call_id)
        return call

    def _fail(self, call: CallRecord, error: KubetorchError) -> None:
        outcome = pack_outcome(Raised(exceptions.describe(error, pod_name=call.pod)))
        digest = digest_of(outcome)
        try:
            self._store(call).put(digest, outcome)
        except DataStoreError:  # the disk is full: then it has failed without a result
            digest = ""
        ended = replace(
            call,
            state="failed",
            ended=self._clock.time(),
            result=digest or None,
            result_bytes=len(outcome),
        )
        self._records.put(ended)
        self._progress.pop(call.id, None)

    def _view(self, call: CallRecord) -> CallView:
        expires = None
        if call.result is not None and call.ended is not None:
            expires = call.ended + TIMING.call_result_seconds
        return CallView(**asdict(call), expires=expires, progress=self._progress.get(call.id))


def unknown_call(call_id: str) -> ResultExpiredError:
    """The error for a call that does not exist, or that the sender may not see."""
    return ResultExpiredError(
        f"no call has the id {call_id}, or its result is no longer kept",
        hint="kt calls list shows the calls and their ids",
    )


def expired(
    calls: Sequence[CallRecord], *, now: float
) -> tuple[list[CallRecord], list[CallRecord]]:
    """Calls whose results are to be dropped, and calls to be forgotten altogether."""
    ended = [call for call in calls if call.ended is not None]
    ended.sort(key=_ended, reverse=True)
    dropped, forgotten = [], []
    # A result beyond the limit is dropped anyway, so it takes no room from others.
    sizes = [
        call.result_bytes if call.result_bytes <= LIMITS.call_result_bytes else 0 for call in ended
    ]
    is_full = sum(sizes) > LIMITS.call_result_bytes
    size = 0
    for index, call in enumerate(ended):
        size += sizes[index]
        age = now - _ended(call)
        if index >= LIMITS.remembered_calls or age >= 2 * TIMING.call_result_seconds:
            forgotten.append(call)
        elif call.result is not None:
            # The newest result may fill all the room.
            room = LIMITS.call_result_bytes
            if is_full and index > 0:
                room -= LIMITS.call_result_slack_bytes
            if (
                age >= TIMING.call_result_seconds
                or size > room
                or call.result_bytes > LIMITS.call_result_bytes
            ):
                dropped.append(call)
    return dropped, forgotten


def _ended(call: CallRecord) -> float:
    return call.ended or 0.0
