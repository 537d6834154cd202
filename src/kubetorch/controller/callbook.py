"""The records of spawned calls: in the state, and held here for as long as that takes none."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kubetorch.controller.state import CallRecord, CallState
from kubetorch.errors import KubetorchError
from kubetorch.lib.clock import Clock, Timer

#: Seconds until what could not be written is tried again.
RETRY = 5.0
#: Records that are held at most; beyond, the oldest are lost.
HELD = 10_000

_log = logging.getLogger(__name__)


class CallBook:
    """Reads and writes records. A full disk is no reason to refuse what a pod reports.

    Args:
        state: Where they are kept.
        clock: For the next attempt.

    Attributes:
        ended: How many calls there are that have ended.
        result_bytes: The bytes of all results together.
    """

    def __init__(self, state: CallState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._held: dict[str, CallRecord] = {}
        self._retry: Timer | None = None
        self.ended, self.result_bytes = state.count_ended_calls()

    def find(self, call_id: str) -> CallRecord | None:
        """One call."""
        return self._held.get(call_id) or self._state.call(call_id)

    def calls(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """Calls, newest first, of a namespace and a workload if they are given."""
        found = self._state.calls(namespace=namespace, workload=workload)
        return self._with_held(found, namespace, workload)

    def running(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """Those of `calls` whose end is not known."""
        found = self._state.running_calls(namespace=namespace, workload=workload)
        merged = self._with_held(found, namespace, workload)
        return [call for call in merged if call.ended is None]

    def results(self, namespace: str = "") -> set[str]:
        """The digests of all results, of a namespace if it is given."""
        held = self._with_held([], namespace, "")
        return self._state.results(namespace) | {call.result for call in held if call.result}

    def put(self, call: CallRecord) -> None:
        """Add or replace a call."""
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
        """Forget calls."""
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
