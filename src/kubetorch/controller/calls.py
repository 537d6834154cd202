"""Spawned calls: what pods report of them, and for how long their results are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec.structs import replace

from kubetorch.controller import departures
from kubetorch.controller.callbook import CallBook
from kubetorch.controller.depots import Depot, Depots
from kubetorch.controller.state import CallRecord, CallState
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import (
    AgentDiedError,
    DataStoreError,
    KubetorchError,
    PodTerminatedError,
    ResultExpiredError,
)
from kubetorch.lib import deadlines
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
#: Seconds that the first news of a spawned call may take: less than whoever asks waits for.
FIRST_NEWS = 1.0
#: What may be too much before the oldest are looked for, and what is made room for then: to look
#: costs as much as ten thousand calls.
SLACK_CALLS = 1000
SLACK_BYTES = KEEP_BYTES // 16


class Calls:
    """The spawned calls of all workloads.

    Args:
        state: Keeps their records.
        depots: Keep their results.
        clock: Says what is too old.
        first_news: Seconds that the first news of a call may take.
    """

    def __init__(
        self, state: CallState, depots: Depots, clock: Clock, *, first_news: float = FIRST_NEWS
    ) -> None:
        self._book = CallBook(state, clock)
        self._depots = depots
        self._clock = clock
        self._first_news = first_news
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
        if known is not None and known.pod != pod and not _is_news(known, report):
            return
        self._book.put(
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
        expected = self._expected.get(report.id)
        if expected is not None:
            expected.set()
        book = self._book
        if book.ended > KEEP_CALLS + SLACK_CALLS or book.result_bytes > KEEP_BYTES:
            self.expire()

    def lost(self, namespace: str, workload: str, pods: Mapping[str, str]) -> None:
        """These pods are gone for good: what ran on them has failed.

        Args:
            namespace: Namespace of the workload.
            workload: Its name.
            pods: Why each of them is gone, by name.
        """
        for call in self._book.running(namespace=namespace, workload=workload):
            if call.pod in pods:
                self._fail(call, PodTerminatedError(call.pod, pods[call.pod]))

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
                self._fail(call, PodTerminatedError(call.pod, departures.DELETED))

    async def expect(self, call_id: str) -> CallView:
        """As `get`, of a call that may have been spawned a moment ago, waiting for its pod's word.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
        """
        if self._book.find(call_id) is None:
            expected = self._expected.setdefault(call_id, asyncio.Event())
            try:
                async with deadlines.timeout(self._first_news):
                    await expected.wait()
            except TimeoutError as error:
                raise unknown(call_id) from error
        return self.get(call_id)

    def get(self, call_id: str) -> CallView:
        """One call.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
        """
        return self._view(self._record(call_id))

    def list(self, *, namespace: str = "", workload: str = "") -> list[CallView]:
        """Calls, newest first, of a namespace and a workload if they are given."""
        found = self._book.calls(namespace=namespace, workload=workload)
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
        return self._book.results(depot.namespace or "")

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
        return self._depots.of(call.namespace).blobs

    def _record(self, call_id: str) -> CallRecord:
        call = self._book.find(call_id)
        if call is not None and call.ended is not None and self._is_old(call):
            self.expire()
            call = self._book.find(call_id)
        if call is None:
            raise unknown(call_id)
        return call

    def _is_old(self, call: CallRecord) -> bool:
        age = self._clock.time() - _ended(call)
        return age >= (2 * KEEP_SECONDS if call.result is None else KEEP_SECONDS)

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
        self._book.put(ended)

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


def _is_news(known: CallRecord, report: CallReport) -> bool:
    """Whether what another pod says than before counts, of a call that was refused by one of them.

    The one that took it says so, and has its result.
    """
    is_result = report.state == "succeeded" and known.state == "failed"
    return report.state == "running" or is_result


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
    is_full = sum(call.result_bytes for call in ended) > KEEP_BYTES
    size = 0
    for index, call in enumerate(ended):
        size += call.result_bytes
        age = now - _ended(call)
        if index >= KEEP_CALLS or age >= 2 * KEEP_SECONDS:
            forgotten.append(call)
        elif call.result is not None:
            # The newest has all the room there is.
            room = KEEP_BYTES - SLACK_BYTES if is_full and index > 0 else KEEP_BYTES
            if age >= KEEP_SECONDS or size > room:
                dropped.append(call)
    return dropped, forgotten


def _ended(call: CallRecord) -> float:
    return call.ended or 0.0
