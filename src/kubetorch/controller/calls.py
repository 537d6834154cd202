"""Spawned calls: what pods report of them, and for how long their results are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kubetorch.controller.depots import Depot, Depots
from kubetorch.controller.state import CallRecord, CallState
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import DataStoreError, KubetorchError, PodTerminatedError, ResultExpiredError
from kubetorch.lib.clock import Clock
from kubetorch.wire import failures
from kubetorch.wire.messages import CallReport, CallView

_log = logging.getLogger(__name__)

#: Seconds that the result of a spawned call is kept.
KEEP_SECONDS = 24 * 3600.0
#: Bytes of all results together; beyond, the oldest are dropped.
KEEP_BYTES = 1024**3
#: Calls that are remembered, with or without a result.
KEEP_CALLS = 10_000


class Calls:
    """The spawned calls of all workloads.

    Args:
        state: Keeps their records.
        depots: Keep their results.
        clock: Says what is too old.
    """

    def __init__(self, state: CallState, depots: Depots, clock: Clock) -> None:
        self._state = state
        self._depots = depots
        self._clock = clock

    def report(self, namespace: str, workload: str, pod: str, report: CallReport) -> None:
        """A pod says what became of a call.

        Ids are chosen outside: a pod of one workload cannot speak of the calls of another.
        """
        known = self._state.call(report.id)
        if known is not None and (known.namespace, known.workload) != (namespace, workload):
            _log.warning("call of another workload reported id=%s pod=%s", report.id, pod)
            return
        self._state.put_call(
            CallRecord(
                id=report.id,
                namespace=namespace,
                workload=workload,
                pod=pod,
                callable=report.callable,
                state=report.state,
                started=report.started,
                ended=report.ended,
                result=report.result,
                result_bytes=report.result_bytes,
            )
        )
        count, size = self._state.count_calls()
        if count > KEEP_CALLS or size > KEEP_BYTES:
            self.expire()

    def lost(self, namespace: str, workload: str, pods: Iterable[str], reason: str) -> None:
        """Pods are gone for good: what ran on them has failed."""
        gone = set(pods)
        for call in self._state.calls(namespace=namespace, workload=workload):
            if call.ended is None and call.pod in gone:
                self._fail(call, PodTerminatedError(call.pod, reason))

    def get(self, call_id: str) -> CallView:
        """One call.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
        """
        return self._view(self._record(call_id))

    def list(self, *, namespace: str = "", workload: str = "") -> list[CallView]:
        """Calls, newest first, of a namespace and a workload if they are given."""
        found = self._state.calls(namespace=namespace, workload=workload)
        return [self._view(call) for call in found]

    def result(self, call_id: str) -> str:
        """Digest of the packed outcome of a call that has ended.

        Raises:
            ResultExpiredError: It is not kept any more, or not there yet.
        """
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

    def results(self, depot: Depot) -> set[str]:
        """Digests of all results that are kept in a store."""
        self.expire()
        calls = self._state.calls(namespace=depot.namespace or "")
        return {call.result for call in calls if call.result is not None}

    def expire(self) -> None:
        """Forget what is too old or too much."""
        dropped, forgotten = expired(self._state.calls(), now=self._clock.time())
        for call in dropped:
            self._state.put_call(replace(call, result=None, result_bytes=0))
        self._state.delete_calls(call.id for call in forgotten)
        kept = {(self._store(call).root, call.result) for call in self._state.calls()}
        for call in (*dropped, *forgotten):
            blobs = self._store(call)
            if call.result is not None and (blobs.root, call.result) not in kept:
                blobs.delete(call.result)

    def _store(self, call: CallRecord) -> BlobStore:
        return self._depots.of(call.namespace).blobs

    def _record(self, call_id: str) -> CallRecord:
        call = self._state.call(call_id)
        if call is not None and call.ended is not None and self._is_old(call):
            self.expire()
            call = self._state.call(call_id)
        if call is None:
            raise unknown(call_id)
        return call

    def _is_old(self, call: CallRecord) -> bool:
        return _ended(call) + KEEP_SECONDS <= self._clock.time()

    def _fail(self, call: CallRecord, error: KubetorchError) -> None:
        # Rarely needed, and pickle costs 5 ms of each start.
        from kubetorch.wire.calls import Raised, pack_outcome  # noqa: PLC0415

        outcome = pack_outcome(Raised(failures.describe(error, pod_name=call.pod)))
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
        self._state.put_call(ended)

    @staticmethod
    def _view(call: CallRecord) -> CallView:
        expires = None if call.result is None or call.ended is None else call.ended + KEEP_SECONDS
        return CallView(
            id=call.id,
            namespace=call.namespace,
            workload=call.workload,
            pod=call.pod,
            callable=call.callable,
            state=call.state,
            started=call.started,
            ended=call.ended,
            result=call.result,
            result_bytes=call.result_bytes,
            expires=expires,
        )


def unknown(call_id: str) -> ResultExpiredError:
    """The error for a call that is not there, or not for who asks."""
    return ResultExpiredError(f"there is no call {call_id}, or it is forgotten")


def expired(
    calls: Sequence[CallRecord], *, now: float
) -> tuple[list[CallRecord], list[CallRecord]]:
    """Calls whose results are to be dropped, and calls to be forgotten altogether.

    Args:
        calls: All calls.
        now: Seconds since the epoch.
    """
    ended = [call for call in calls if call.ended is not None]
    ended.sort(key=_ended, reverse=True)
    dropped, forgotten = [], []
    size = 0
    for index, call in enumerate(ended):
        size += call.result_bytes
        age = now - _ended(call)
        if index >= KEEP_CALLS or age >= 2 * KEEP_SECONDS:
            forgotten.append(call)
        elif call.result is not None and (age >= KEEP_SECONDS or size > KEEP_BYTES):
            dropped.append(call)
    return dropped, forgotten


def _ended(call: CallRecord) -> float:
    return call.ended or 0.0
