"""Spawned calls: what becomes of them survives the caller, and the agent.

    <root>/results/<id>.json    a call that began, until the controller knows its end
    <root>/results/<id>.blob    its packed outcome, until the controller has it

A call is recorded before it runs. When the agent finds a running one on its disk after a restart,
the process that ran it is gone, and it is reported as failed. Outcomes are uploaded to the
controller, which keeps them; reports are repeated until they have certainly arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kubetorch.errors import AgentDiedError, KubetorchError
from kubetorch.lib import backoff
from kubetorch.lib.decoding import json_decoder
from kubetorch.pod.calls.call import Call
from kubetorch.wire import failures
from kubetorch.wire.calls import CALL_ID, Outcome, Raised, Returned, pack_outcome
from kubetorch.wire.messages import CallReport

#: Seconds until a failed upload is tried again, doubled each time up to the second number.
RETRY_DELAYS = (0.5, 30.0)
#: See `Results`.
WAITING_BYTES = 1024**3

_log = logging.getLogger(__name__)


class Results:
    """Records of detached calls; `kubetorch.pod.calls.calls.Records`.

    Args:
        folder: Where they lie.
        pod_name: Name of the pod.
        upload: Stores a blob in the controller and returns its digest.
        report: Sends a report to the controller, now or when there is a session.
        waiting_bytes: Bytes of outcomes that wait for the controller; beyond, the oldest are lost.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pod_name: str,
        upload: Callable[[bytes], Awaitable[str]],
        report: Callable[[CallReport], None],
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._folder = folder
        self._pod_name = pod_name
        self._upload = upload
        self._report = report
        self._waiting_bytes = waiting_bytes
        self._uploads: dict[str, asyncio.Task[None]] = {}
        # Outcomes that the controller does not have, and their bytes.
        self._waiting: dict[str, tuple[CallReport, int]] = {}

    def recover(self) -> None:
        """Report what an earlier process of this agent left behind."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                report = json_decoder(CallReport).decode(path.read_bytes())
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
                _remove(path)
                continue
            if not CALL_ID.fullmatch(report.id):
                _remove(path)
            elif report.result is not None:
                self._report(report)
            else:
                # Until its outcome is uploaded: the controller gives up calls it is not told of.
                self._report(replace(report, state="running", ended=None))
                if report.ended is None:
                    self._lost(report)
                else:
                    self._start(report, self._blob(report.id).read_bytes)

    def on_begin(self, call: Call) -> None:  # noqa: D102  # Records'
        # It may have been refused before, and sent again: that was not its end.
        self._discard(call.request.id)
        report = CallReport(
            id=call.request.id, callable=call.name, state="running", started=call.opened
        )
        self._write(self._record(report.id), msgspec.json.encode(report))
        self._report(report)

    def on_end(self, call: Call, outcome: Outcome) -> None:  # noqa: D102  # Records'
        self._end(
            CallReport(
                id=call.request.id,
                callable=call.name,
                state=_state(call, outcome),
                started=call.opened,
                ended=time.time(),
            ),
            outcome,
        )

    def forget(self, call_id: str) -> None:
        """The controller certainly knows how this call ended."""
        _remove(self._record(call_id))

    async def close(self, timeout: float) -> None:
        """Wait for uploads that are under way, for so many seconds; the rest stays on disk."""
        tasks = list(self._uploads.values())
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _lost(self, report: CallReport) -> None:
        error = AgentDiedError(self._pod_name, "the agent was started again")
        failure = failures.describe(error, pod_name=self._pod_name)
        ended = replace(report, state="failed", ended=time.time())
        self._end(ended, Raised(failure))

    def _end(self, report: CallReport, outcome: Outcome) -> None:
        self._start(report, lambda: self._store(report, outcome))

    def _start(self, report: CallReport, load: Callable[[], bytes]) -> None:
        loop = asyncio.get_running_loop()
        self._uploads[report.id] = loop.create_task(self._deliver(report, load))

    def _store(self, report: CallReport, outcome: Outcome) -> bytes:
        """Write down how a call ended; runs in a thread, since outcomes may be large."""
        blob = pack_outcome(outcome)
        self._write(self._blob(report.id), blob)
        self._write(self._record(report.id), msgspec.json.encode(report))
        return blob

    async def _deliver(self, report: CallReport, load: Callable[[], bytes]) -> None:
        """Bring an outcome to the controller, however long that takes."""
        try:
            blob = await asyncio.to_thread(load)
        except (OSError, RuntimeError) as error:  # the second is that of a thread too many
            _log.warning("outcome not readable call=%s error=%s", report.id, error)
            self._drop(report)
            return
        self._waiting[report.id] = (report, len(blob))
        while self._is_too_much() and len(self._waiting) > 1:
            self._drop(next(iter(self._waiting.values()))[0])
        first, limit = RETRY_DELAYS
        for delay in backoff.exponential(first=first, limit=limit):
            try:
                digest = await self._upload(blob)
            except (KubetorchError, OSError) as error:
                _log.warning("upload failed call=%s error=%s delay=%s", report.id, error, delay)
                await asyncio.sleep(delay)
                continue
            report = replace(report, result=digest, result_bytes=len(blob))
            self._write(self._record(report.id), msgspec.json.encode(report))
            self._report(report)
            break
        self._waiting.pop(report.id, None)
        self._uploads.pop(report.id, None)
        _remove(self._blob(report.id))

    def _is_too_much(self) -> bool:
        return sum(size for _, size in self._waiting.values()) > self._waiting_bytes

    def _drop(self, report: CallReport) -> None:
        """Give up an outcome: the call has ended without a result."""
        self._discard(report.id)
        self._report(report)

    def _discard(self, call_id: str) -> None:
        self._waiting.pop(call_id, None)
        task = self._uploads.pop(call_id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        _remove(self._blob(call_id))

    def _record(self, call_id: str) -> Path:
        return self._folder / f"{call_id}.json"

    def _blob(self, call_id: str) -> Path:
        return self._folder / f"{call_id}.blob"

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file at once or not at all. A full disk costs the record, not the call."""
        temporary = path.with_suffix(f".{os.getpid()}.new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            _log.warning("record not written path=%s error=%s", path, error)
            _remove(temporary)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _state(call: Call, outcome: Outcome) -> str:
    if isinstance(outcome, Returned):
        return "succeeded"
    return "cancelled" if call.cancelled is not None else "failed"
