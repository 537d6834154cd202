"""Spawned calls: what pods report of them, and for how long their results are kept.

The records of spawned calls: in the state, and held here for as long as that takes none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec.structs import asdict, replace

from kubetorch.controller.backends.base import DELETED
from kubetorch.controller.blobs import BlobStores, NamespaceBlobs
from kubetorch.controller.state import CallRecord, SqliteState
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import AgentDiedError, DataStoreError, KubetorchError, ResultExpiredError
from kubetorch.lib import deadlines
from kubetorch.lib.clock import Clock, Timer
from kubetorch.wire import exceptions
from kubetorch.wire.calls import Raised, pack_outcome
from kubetorch.wire.messages import CallProgress, CallReport, CallView, Ending

#: Seconds until what could not be written is tried again.
RETRY = 5.0
#: Records that are held at most; beyond, the oldest are lost.
HELD = 10_000
#: Seconds that the result of a spawned call is kept.
KEEP_SECONDS = 24 * 3600.0
#: Bytes of all results together; beyond, the oldest are dropped.
KEEP_BYTES = 1024**3
#: Calls that are remembered, with or without a result.
KEEP_CALLS = 10_000
#: Seconds that the first news of a spawned call may take: less than whoever asks waits for.
FIRST_NEWS = 1.0
#: What may be too much before the oldest are looked for, and what is made room for then: to look
#: costs as much as ten thousand calls.
SLACK_CALLS = 1000
SLACK_BYTES = KEEP_BYTES // 16

_log = logging.getLogger(__name__)


class CallRecords:
    """Reads and writes records. A full disk is no reason to refuse what a pod reports."""

    def __init__(self, state: SqliteState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._held: dict[str, CallRecord] = {}
        self._retry: Timer | None = None
        self.ended, self.result_bytes = state.count_ended_calls()

    def find(self, call_id: str) -> CallRecord | None:
        return self._held.get(call_id) or self._state.call(call_id)

    def calls(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """Calls, newest first, of a namespace and a workload if they are given."""
        found = self._state.calls(namespace=namespace, workload=workload)
        return self._with_held(found, namespace, workload)

    def running(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """The `calls` whose end is not known."""
        found = self._state.calls(namespace=namespace, workload=workload, is_running=True)
        merged = self._with_held(found, namespace, workload)
        return [call for call in merged if call.ended is None]

    def results(self, namespace: str = "") -> set[str]:
        """The digests of all results, of a namespace if it is given."""
        held = self._with_held([], namespace, "")
        return self._state.results(namespace) | {call.result for call in held if call.result}

    def put(self, call: CallRecord) -> None:
        before = self.find(call.id)
        if before is not None:
            self._count(before, -1)
        self._count(call, 1)
        if not self._write(call):
            self._held.pop(call.id, None)
            self._held[call.id] = call
            if len(self._held) > HELD:
                self._held.pop(next(iter(self._held)))
            self._try_again()

    def delete(self, calls: Iterable[CallRecord]) -> None:
        gone = [call for call in calls if self.find(call.id) is not None]
        self._state.delete_calls(call.id for call in gone)
        for call in gone:
            self._held.pop(call.id, None)
            self._count(call, -1)

    def _count(self, call: CallRecord, sign: int) -> None:
        self.ended += sign * (call.ended is not None)
        self.result_bytes += sign * call.result_bytes

    def _with_held(
        self, found: Iterable[CallRecord], namespace: str, workload: str
    ) -> list[CallRecord]:
        merged = {call.id: call for call in found}
        for call in self._held.values():
            if namespace in ("", call.namespace) and workload in ("", call.workload):
                merged[call.id] = call
        if not self._held:
            return list(merged.values())
        return sorted(merged.values(), key=lambda call: call.started, reverse=True)

    def _write(self, call: CallRecord) -> bool:
        try:
            self._state.put_call(call)
        except KubetorchError as error:
            _log.warning("call not kept id=%s error=%s", call.id, error)
            return False
        self._held.pop(call.id, None)
        return True

    def _try_again(self) -> None:
        if self._retry is None:
            self._retry = self._clock.call_later(RETRY, self._write_held)

    def _write_held(self) -> None:
        self._retry = None
        if not all(self._write(call) for call in list(self._held.values())):
            self._try_again()


class Calls:
    def __init__(
        self,
        state: SqliteState,
        blob_stores: BlobStores,
        clock: Clock,
        *,
        first_news: float = FIRST_NEWS,
    ) -> None:
        self._book = CallRecords(state, clock)
        self._blob_stores = blob_stores
        self._clock = clock
        self._first_news = first_news
        # Of calls that run; their pods repeat it to the next controller.
        self._progress: dict[str, CallProgress] = {}
        # Calls that are asked for before anybody spoke of them.
        self._expected: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    def report(self, namespace: str, workload: str, pod: str, report: CallReport) -> None:
        """A pod says what became of a call.

        Ids are chosen outside: a pod of one workload cannot speak of the calls of another.
        """
        known = self._book.find(report.id)
        if known is not None and (known.namespace, known.workload) != (namespace, workload):
            _log.warning("call of another workload reported id=%s pod=%s", report.id, pod)
            return
        # Of a call that one pod refused: the pod that took it says so, and has its result.
        is_result = report.state == "succeeded" and known is not None and known.state == "failed"
        is_news = report.ended is None or is_result
        if known is not None and known.pod != pod and not is_news:
            return
        fields = asdict(report)
        progress = fields.pop("progress")
        record = CallRecord(namespace=namespace, workload=workload, pod=pod, **fields)
        self._progress.pop(report.id, None)
        if progress is not None and report.ended is None:
            self._progress[report.id] = progress
        if record != known:
            self._book.put(record)
        expected = self._expected.get(report.id)
        if expected is not None:
            expected.set()
        book = self._book
        if book.ended > KEEP_CALLS + SLACK_CALLS or book.result_bytes > KEEP_BYTES:
            self.expire()

    def lost(self, namespace: str, workload: str, pods: Mapping[str, Ending]) -> None:
        """Fail the calls that ran on pods that are gone for good."""
        for call in self._book.running(namespace=namespace, workload=workload):
            if call.pod in pods:
                self._fail(call, pods[call.pod].error(call.pod))

    def lost_by_agent(
        self, namespace: str, workload: str, pod: str, known: Collection[str]
    ) -> None:
        """The agent of a pod knows of no other calls than these: others of its own have failed."""
        for call in self._book.running(namespace=namespace, workload=workload):
            if call.pod == pod and call.id not in known:
                self._fail(call, AgentDiedError(pod, "it was started without what it kept"))

    def sweep(self, is_there: Callable[[str, str, str], bool]) -> None:
        """Fail the calls of pods that are not there, by namespace, workload and name."""
        for call in self._book.running():
            if not is_there(call.namespace, call.workload, call.pod):
                self._fail(call, DELETED.error(call.pod))

    async def expect(self, call_id: str) -> CallView:
        """As `get`, of a call that may have been spawned a moment ago."""
        if self._book.find(call_id) is None:
            expected = self._expected.setdefault(call_id, asyncio.Event())
            try:
                async with deadlines.timeout(self._first_news):
                    await expected.wait()
            except TimeoutError as error:
                raise unknown(call_id) from error
        return self.get(call_id)

    def get(self, call_id: str) -> CallView:
        return self._view(self._record(call_id))

    def list(self, *, namespace: str = "", workload: str = "") -> list[CallView]:
        found = self._book.calls(namespace=namespace, workload=workload)
        return [self._view(call) for call in found]

    def result(self, call_id: str) -> str:
        """Digest of the packed outcome of a call that has ended."""
        call = self._record(call_id)
        if call.result is not None and self._store(call).has(call.result):
            return call.result
        if call.ended is None:
            raise ResultExpiredError(f"the call {call_id} still runs", hint="wait for it first")
        raise ResultExpiredError(
            f"the result of the call {call_id} is not kept any more",
            hint=f"results are kept for {KEEP_SECONDS / 3600:.0f} hours and at most "
            f"{KEEP_BYTES // 1024**2} MiB in all, the oldest are dropped first",
        )

    def results(self, store: NamespaceBlobs) -> set[str]:
        return self._book.results(store.namespace or "")

    def expire(self) -> None:
        """Forget what is too old or too much."""
        calls = self._book.calls()
        dropped, forgotten = expired(calls, now=self._clock.time())
        if not dropped and not forgotten:
            return
        for call in dropped:
            self._book.put(replace(call, result=None, result_bytes=0))
        self._book.delete(forgotten)
        gone = {call.id for call in (*dropped, *forgotten)}
        kept = {(self._store(call).root, call.result) for call in calls if call.id not in gone}
        for call in (*dropped, *forgotten):
            blobs = self._store(call)
            if call.result is not None and (blobs.root, call.result) not in kept:
                blobs.delete(call.result)

    def _store(self, call: CallRecord) -> BlobStore:
        return self._blob_stores.of(call.namespace).blobs

    def _record(self, call_id: str) -> CallRecord:
        call = self._book.find(call_id)
        if call is not None and call.ended is not None:
            kept = 2 * KEEP_SECONDS if call.result is None else KEEP_SECONDS
            if self._clock.time() - call.ended >= kept:
                self.expire()
                call = self._book.find(call_id)
        if call is None:
            raise unknown(call_id)
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
        self._book.put(ended)
        self._progress.pop(call.id, None)

    def _view(self, call: CallRecord) -> CallView:
        expires = None if call.result is None or call.ended is None else call.ended + KEEP_SECONDS
        return CallView(**asdict(call), expires=expires, progress=self._progress.get(call.id))


def unknown(call_id: str) -> ResultExpiredError:
    """The error for a call that is not there, or not for who asks."""
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
    # What can never be kept takes no room from others.
    sizes = [call.result_bytes if call.result_bytes <= KEEP_BYTES else 0 for call in ended]
    is_full = sum(sizes) > KEEP_BYTES
    size = 0
    for index, call in enumerate(ended):
        size += sizes[index]
        age = now - _ended(call)
        if index >= KEEP_CALLS or age >= 2 * KEEP_SECONDS:
            forgotten.append(call)
        elif call.result is not None:
            # The newest has all the room there is.
            room = KEEP_BYTES - SLACK_BYTES if is_full and index > 0 else KEEP_BYTES
            if age >= KEEP_SECONDS or size > room or call.result_bytes > KEEP_BYTES:
                dropped.append(call)
    return dropped, forgotten


def _ended(call: CallRecord) -> float:
    return call.ended or 0.0
