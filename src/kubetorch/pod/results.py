"""The ends of calls, on the pod's disk: outcomes that may be asked for again, spawned calls.

    <root>/results/calls        a line for each report of a spawned call, from before it runs until
                                the controller certainly knows its end
    <root>/results/outcomes-*   outcomes that the controller does not have yet
    <root>/outcomes/outcomes-*  outcomes of calls with an idempotency key
    <root>/values               pickled values of calls that could not travel, in files without a
                                name, which workers have written

Outcomes are appended to existing files: to make a file takes longer than a call. When a restarted
agent finds a call that had not ended, the process that ran the call is gone, and the call is
reported as failed. Outcomes are uploaded to the controller, which keeps them; reports are repeated
until they have certainly arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kubetorch.errors import AgentDiedError, KubetorchError
from kubetorch.lib import backoff, files
from kubetorch.lib.decoders import json_decoder
from kubetorch.lib.tasks import cancel_all
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions
from kubetorch.wire.calls import CALL_ID, Outcome, Raised, Returned, packed, unpack_outcome
from kubetorch.wire.messages import CallReport

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class _File:
    """A file that outcomes are appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self.descriptor).st_size
        #: Outcomes in the file that are kept.
        self.used = 0

    @property
    def name(self) -> str:
        return self.path.name

    def close(self) -> None:
        os.close(self.descriptor)
        self.path.unlink(missing_ok=True)


class _NamelessFile(_File):
    """A file of a worker, which is gone once its descriptor is closed."""

    name = ""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.used = 0

    def close(self) -> None:
        os.close(self.descriptor)


class FileRange:
    """The bytes of a file that an outcome has, or is to be written to."""

    def __init__(self, file: _File, begin: int, length: int) -> None:
        self.file = file
        self.begin = begin
        self.length = length

    def write(self, parts: Iterable[Buffer]) -> None:
        offset = self.begin
        for part in parts:
            view = memoryview(part)
            while view:
                written = os.pwrite(
                    self.file.descriptor, view[: LIMITS.outcome_piece_bytes], offset
                )
                view, offset = view[written:], offset + written

    def pieces(self) -> Iterator[bytes]:
        end = self.begin + self.length
        for offset in range(self.begin, end, LIMITS.outcome_piece_bytes):
            yield os.pread(
                self.file.descriptor, min(LIMITS.outcome_piece_bytes, end - offset), offset
            )

    def outcome(self) -> Outcome:
        """The outcome, whose payload is mapped from the file."""
        return unpack_outcome(self._mapped())

    def _mapped(self) -> memoryview:
        skipped = self.begin % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            self.file.descriptor,
            self.length + skipped,
            access=mmap.ACCESS_READ,
            offset=self.begin - skipped,
        )
        return memoryview(mapping)[skipped:]


class _PickledRange(FileRange):
    """The bytes of a value that a worker has pickled."""

    def outcome(self) -> Outcome:
        return Returned("pickle", (self.length,), self._mapped())


class OutcomeFiles:
    """Files that outcomes are appended to; a file is removed when none of its outcomes is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._last: _File | None = None

    def reserve(self, length: int) -> FileRange:
        """Reserve room for an outcome, which `keep` or `holding` keeps."""
        last = self._last
        if last is None or last.size > LIMITS.kept_outcomes_file_bytes:
            self._last = None
            if last is not None:
                self._tidy(last)
            last = self._last = self._open(f"outcomes-{os.urandom(8).hex()}")
        file_range = FileRange(last, last.size, length)
        last.size += length
        return file_range

    def find(self, name: str, begin: int, length: int) -> FileRange:
        """The room that an earlier process reserved; raises `OSError` if its file is missing."""
        if not (self._folder / name).is_file():
            raise FileNotFoundError(name)
        file = self._files.get(name) or self._open(name)
        if begin + length > file.size:
            raise EOFError(name)
        return FileRange(file, begin, length)

    def keep(self, file_range: FileRange) -> None:
        """Keep an outcome until it is released."""
        file_range.file.used += 1

    @contextlib.contextmanager
    def holding(self, file_ranges: Iterable[FileRange | None]) -> Iterator[None]:
        """Keep outcomes for as long as the block runs, also if they are released meanwhile."""
        held_ranges = [file_range for file_range in file_ranges if file_range is not None]
        for file_range in held_ranges:
            self.keep(file_range)
        try:
            yield
        finally:
            for file_range in held_ranges:
                self.release(file_range)

    def release(self, file_range: FileRange) -> None:
        file_range.file.used -= 1
        self._tidy(file_range.file)

    def clear(self) -> None:
        """Remove the files of an earlier process in which nothing was found."""
        for path in self._folder.glob("outcomes-*"):
            if path.name not in self._files:
                path.unlink(missing_ok=True)

    def _open(self, name: str) -> _File:
        file = self._files[name] = _File(self._folder / name)
        return file

    def _tidy(self, file: _File) -> None:
        if not file.used and file is not self._last:
            self._files.pop(file.name, None)
            file.close()


class Outcomes(msgspec.Struct, eq=False, dict=True):
    """Outcomes by key, on disk, the oldest first out."""

    folder: Path
    clock: Callable[[], float]
    keep_seconds: float = TIMING.kept_outcome_seconds
    limit_bytes: int = LIMITS.kept_outcomes_bytes
    overhead: int = LIMITS.kept_outcome_overhead_bytes

    def __post_init__(self) -> None:
        self._files = OutcomeFiles(self.folder)
        self._records: OrderedDict[object, tuple[float, FileRange]] = OrderedDict()
        self._bytes = 0
        self._files.clear()

    def put(self, key: object, outcome: Outcome) -> None:
        """Keep an outcome. With a full disk the outcome is lost, and the call goes on."""
        self._drop(key)
        parts = packed(outcome)
        length = sum(map(len, parts))
        if self.overhead + length > self.limit_bytes:
            return
        try:
            file_range = self._files.reserve(length)
            file_range.write(parts)
        except OSError as error:
            _log.warning("outcome not kept error=%s", error)
            return
        self._add(key, file_range)

    def keep_file(self, key: object, descriptor: int) -> None:
        """Keep a value that a worker has pickled into a file, which is closed at its expiry."""
        self._drop(key)
        file = _NamelessFile(descriptor)
        self._add(key, _PickledRange(file, 0, file.size))
        # The value is large, and perhaps no later call lets it expire.
        asyncio.get_running_loop().call_later(
            self.keep_seconds + TIMING.kept_value_margin_seconds, self._expire
        )

    def _add(self, key: object, file_range: FileRange) -> None:
        self._files.keep(file_range)
        self._records[key] = (self.clock() + self.keep_seconds, file_range)
        self._bytes += self.overhead + file_range.length
        self._expire()

    def get(self, key: object) -> Outcome | None:
        self._expire()
        record = self._records.get(key)
        return record[1].outcome() if record else None

    def _expire(self) -> None:
        now = self.clock()
        while self._records:
            key, (expires, _) = next(iter(self._records.items()))
            if expires > now and self._bytes <= self.limit_bytes:
                return
            self._drop(key)

    def _drop(self, key: object) -> None:
        record = self._records.pop(key, None)
        if record:
            self._bytes -= self.overhead + record[1].length
            self._files.release(record[1])


class _CallLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the list of calls."""

    report: CallReport
    #: Name of the file of the outcome, its begin in the file, its length.
    outcome: tuple[str, int, int] | None = None
    #: True if the call may be forgotten.
    is_over: bool = False


class _CallList:
    """The list of calls: the last line of a call counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._lines = 0
        self._last: dict[str, _CallLine] = {}

    def load(self) -> list[_CallLine]:
        with contextlib.suppress(OSError):
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    self._apply(json_decoder(_CallLine).decode(line))
        return list(self._last.values())

    def add(self, news: _CallLine) -> None:
        """Add a line; `OSError` if it is not written."""
        if self._descriptor is None or self._lines > LIMITS.outdated_call_lines + 4 * len(
            self._last
        ):
            self._begin()
        assert self._descriptor is not None
        line = msgspec.json.encode(news) + b"\n"
        if os.write(self._descriptor, line) != len(line):
            os.ftruncate(self._descriptor, self._size)
            raise OSError("the disk is full")
        self._size += len(line)
        self._apply(news)

    def _apply(self, news: _CallLine) -> None:
        self._lines += 1
        self._last.pop(news.report.id, None)
        if not news.is_over:
            self._last[news.report.id] = news

    def _begin(self) -> None:
        """Write the list anew, without outdated lines."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = b"".join(msgspec.json.encode(news) + b"\n" for news in self._last.values())
        files.write_atomically(self._path, data)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size, self._lines = len(data), len(self._last)


class _Ended:
    """A call that has ended, and whose outcome or record the controller does not have yet."""

    def __init__(
        self,
        report: CallReport,
        outcome: Outcome | None,
        file_range: FileRange | None,
        record: Sequence[Buffer] = (),
    ) -> None:
        self.report = report
        #: The parts of the record of the call, which is in memory alone.
        self.record = record
        #: In memory until it is on disk; a small outcome until the controller has it.
        self.outcome = outcome
        self.file_range = file_range
        self.size = sum(map(len, packed(outcome))) if outcome is not None else 0
        if file_range is not None:
            self.size = file_range.length

    @property
    def has_outcome(self) -> bool:
        """False for a call that was not spawned, which leaves its record alone."""
        return self.outcome is not None or self.file_range is not None

    def pieces(self) -> Iterator[bytes]:
        """The packed outcome, piece by piece."""
        outcome, file_range = self.outcome, self.file_range
        if outcome is None:
            assert file_range is not None
            yield from file_range.pieces()
            return
        for part in packed(outcome):
            view = memoryview(part)
            for offset in range(0, len(view), LIMITS.outcome_piece_bytes):
                yield bytes(view[offset : offset + LIMITS.outcome_piece_bytes])


#: Stores blobs in the controller, each as a function that makes its pieces; returns their digests.
Upload = Callable[[Sequence[Callable[[], Iterable[bytes]]]], Awaitable[list[str]]]


class Results(msgspec.Struct, eq=False, dict=True):
    """Records spawned calls, and uploads their outcomes."""

    folder: Path
    pod_name: str
    upload: Upload
    report: Callable[[CallReport], None]
    waiting_bytes: int = LIMITS.waiting_outcomes_bytes

    def __post_init__(self) -> None:
        self._list = _CallList(self.folder / "calls")
        self._files = OutcomeFiles(self.folder)
        self._waiting: dict[str, _Ended] = {}
        # Bytes of the outcomes that wait.
        self._size = 0
        #: Bytes of the records that wait.
        self.record_bytes = 0
        self._unstored: list[_Ended] = []
        self._storing: asyncio.Task[None] | None = None
        self._delivery: asyncio.Task[None] | None = None

    def recover(self) -> None:
        """Report the calls of an earlier process of this agent."""
        for news in self._list.load():
            report = news.report
            if not CALL_ID.fullmatch(report.id):
                continue
            if report.ended is None:
                self.report(report)
                error = AgentDiedError(self.pod_name, "the agent was started again")
                failure = exceptions.describe(error, pod_name=self.pod_name)
                self.end(replace(report, state="failed", ended=time.time()), Raised(failure))
            elif news.outcome is None:
                self.report(report)
            else:
                try:
                    file_range = self._files.find(*news.outcome)
                    self._files.keep(file_range)
                except (OSError, EOFError):
                    self.report(report)
                    continue
                # Until its outcome is uploaded: the controller gives up unreported calls.
                self.report(replace(report, state="running", ended=None))
                self._wait(_Ended(report, None, file_range))
        self._files.clear()

    def begin(self, report: CallReport) -> None:
        """Record a call before it waits or runs; raises `OSError` if it is not written."""
        # The call may have been refused before, and sent again: the refusal was not its end.
        self._discard(report.id)
        try:
            self._list.add(_CallLine(report))
        finally:
            self.report(report)

    def progress(self, report: CallReport) -> None:
        self.report(report)

    def end(
        self, report: CallReport, outcome: Outcome | None, record: Sequence[Buffer] = ()
    ) -> None:
        """Record the end of a call; `report` does not name the outcome yet.

        `record` are the parts of the record of the call. A call that was not spawned has a record
        and no outcome.
        """
        record_bytes = sum(map(len, record))
        if self.record_bytes + record_bytes > LIMITS.waiting_records_bytes:
            record, record_bytes = (), 0
        if outcome is None and not record:
            return
        self.record_bytes += record_bytes
        ended = _Ended(report, outcome, None, record)
        self._wait(ended)
        if outcome is None:
            return
        self._unstored.append(ended)
        if self._storing is None or self._storing.done():
            self._storing = asyncio.get_running_loop().create_task(self._store())

    def find(self, call_id: str) -> Outcome | None:
        """The outcome of a spawned call, until the controller has it."""
        ended = self._waiting.get(call_id)
        if ended is None or not ended.has_outcome:
            return None
        if ended.outcome is not None:
            return ended.outcome
        try:
            assert ended.file_range is not None
            return ended.file_range.outcome()
        except (OSError, ValueError, KubetorchError):
            return None

    def forget(self, call_id: str) -> None:
        """Forget a call, whose end the controller certainly knows."""
        over = CallReport(id=call_id, callable="", state="", started=0.0)
        with contextlib.suppress(OSError):
            self._list.add(_CallLine(over, is_over=True))

    async def close(self, timeout: float) -> None:
        """Wait for uploads that are under way, for so many seconds; the rest stays on disk."""
        tasks = [task for task in (self._storing, self._delivery) if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        await cancel_all(tasks)

    def _wait(self, ended: _Ended) -> None:
        self._waiting[ended.report.id] = ended
        self._size += ended.size
        while self._size > self.waiting_bytes:
            outcomes = [waiting for waiting in self._waiting.values() if waiting.has_outcome]
            if len(outcomes) == 1:
                break
            oldest = min(outcomes, key=lambda waiting: waiting.report.ended or 0.0)
            self._report_end(oldest, oldest.report)
        if self._delivery is None or self._delivery.done():
            self._delivery = asyncio.get_running_loop().create_task(self._deliver())

    # ------------------------------------------------------------------------------ to the disk

    async def _store(self) -> None:
        """Write outcomes to the disk. With a full disk they stay in memory."""
        while self._unstored:
            batch, self._unstored = self._unstored, []
            for ended in batch:
                try:
                    await self._store_one(ended)
                except (OSError, RuntimeError) as error:  # RuntimeError: a thread too many
                    _log.warning("outcome not written call=%s error=%s", ended.report.id, error)

    async def _store_one(self, ended: _Ended) -> None:
        assert ended.outcome is not None
        file_range = self._files.reserve(ended.size)
        with self._files.holding([file_range]):
            if ended.size > LIMITS.outcome_piece_bytes:
                await asyncio.to_thread(file_range.write, packed(ended.outcome))
            else:
                file_range.write(packed(ended.outcome))
            if self._waiting.get(ended.report.id) is not ended:
                return  # it was sent again, or given up
            file_position = (file_range.file.path.name, file_range.begin, file_range.length)
            self._list.add(_CallLine(ended.report, file_position))
            self._files.keep(file_range)
            ended.file_range = file_range
            if ended.size > LIMITS.small_outcome_bytes:
                ended.outcome = None

    # ------------------------------------------------------------------------- to the controller

    async def _deliver(self) -> None:
        """Upload outcomes to the controller, without a deadline."""
        first, limit = (
            TIMING.outcome_retry_first_delay_seconds,
            TIMING.outcome_retry_longest_delay_seconds,
        )
        delays = backoff.exponential(first=first, limit=limit)
        most = LIMITS.outcome_batch_calls
        while self._waiting:
            # Short calls end at the same time, and one request costs as much as many outcomes.
            await asyncio.sleep(TIMING.outcome_batch_delay_seconds)
            if self._storing is not None:
                await asyncio.shield(self._storing)
            batch = self._next_batch(most)
            try:
                with self._files.holding(ended.file_range for ended in batch):
                    results = [ended for ended in batch if ended.has_outcome]
                    recorded = [ended for ended in batch if ended.record]
                    records = [functools.partial(map, bytes, ended.record) for ended in recorded]
                    digests = await self.upload([*(ended.pieces for ended in results), *records])
            except (KubetorchError, OSError) as error:
                _log.warning("upload failed calls=%s error=%s", len(batch), error)
                for ended in batch:
                    if self._waiting.get(ended.report.id) is ended:
                        self._waiting[ended.report.id] = self._waiting.pop(ended.report.id)
                if most == 1:
                    await asyncio.sleep(next(delays))
                most = 1  # perhaps a single outcome cannot be uploaded
                continue
            most, delays = LIMITS.outcome_batch_calls, backoff.exponential(first=first, limit=limit)
            result_digests = dict(zip(results, digests, strict=False))
            record_digests = dict(zip(recorded, digests[len(results) :], strict=True))
            for ended in batch:
                report = replace(
                    ended.report,
                    result=result_digests.get(ended),
                    result_bytes=ended.size,
                    record=record_digests.get(ended),
                    record_bytes=sum(map(len, ended.record)),
                )
                self._report_end(ended, report)
                await asyncio.sleep(0)  # calls come first

    def _next_batch(self, most: int) -> list[_Ended]:
        """The outcomes of the next upload: as many as fit."""
        batch: list[_Ended] = []
        size = 0
        for ended in self._waiting.values():
            size += ended.size
            if batch and (size > LIMITS.outcome_batch_bytes or len(batch) == most):
                break
            batch.append(ended)
        return batch

    def _report_end(self, ended: _Ended, report: CallReport) -> None:
        """Report the end of a call, with its result, or without one that is given up."""
        if self._waiting.get(report.id) is not ended:
            return  # it was sent again, or given up
        with contextlib.suppress(OSError):
            self._list.add(_CallLine(report))
        self._discard(report.id)
        self.report(report)

    def _discard(self, call_id: str) -> None:
        ended = self._waiting.pop(call_id, None)
        if ended is not None:
            self._size -= ended.size
            self.record_bytes -= sum(map(len, ended.record))
            if ended.file_range is not None:
                self._files.release(ended.file_range)
