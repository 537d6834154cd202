"""The ends of calls, on the pod's disk: outcomes that may be asked for again, spawned calls.

    <root>/results/calls        a line for each news of a spawned call, from before it runs until
                                the controller certainly knows its end
    <root>/results/outcomes-*   outcomes that the controller does not have yet
    <root>/outcomes/outcomes-*  outcomes of calls with an idempotency key
    <root>/values               pickled values of calls that could not travel, in files without a
                                name, which workers have written

Everything is appended to files that there are: to make one takes longer than a call. When the agent
finds a call after a restart that had not ended, the process that ran it is gone, and it is reported
as failed. Outcomes are uploaded to the controller, which keeps them; reports are repeated until
they have certainly arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kubetorch.errors import AgentDiedError, KubetorchError
from kubetorch.lib import backoff, files
from kubetorch.lib.decoders import json_decoder
from kubetorch.lib.tasks import cancel_all
from kubetorch.wire import exceptions
from kubetorch.wire.calls import CALL_ID, Outcome, Raised, Returned, packed, unpack_outcome
from kubetorch.wire.messages import CallReport

#: Seconds that the outcome of a call with an idempotency key is kept.
KEEP_SECONDS = 600.0
#: Bytes of all of them together.
LIMIT_BYTES = 64 * 1024 * 1024
#: Bytes of a file, after which another one is begun.
_FILE_BYTES = LIMIT_BYTES // 8
#: What one takes beside its bytes.
_OVERHEAD = 1024
#: Seconds that a value which could not travel is kept, and what each takes beside its bytes: the
#: agent has its file open.
VALUE_SECONDS, VALUE_OVERHEAD = 3600.0, 16 * 1024 * 1024
#: Seconds until a failed upload is tried again, doubled each time up to the second number.
RETRY_DELAYS = (0.5, 30.0)
#: See `Results`.
WAITING_BYTES = 1024**3
#: Outcomes, and bytes of them, that are uploaded together.
_BATCH, _BATCH_BYTES = 64, 4 * 1024 * 1024
#: Seconds that outcomes are gathered for.
_GATHERING = 0.02
#: Bytes of an outcome that stays in memory until the controller has it.
_SMALL = 4096
#: Lines of the list of calls that say nothing any more before it is written anew.
_STALE = 10_000
_PIECE = 1024 * 1024

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class _File:
    """A file that outcomes are appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self.descriptor).st_size
        #: Outcomes in it that are wanted.
        self.used = 0

    @property
    def name(self) -> str:
        return self.path.name

    def close(self) -> None:
        os.close(self.descriptor)
        self.path.unlink(missing_ok=True)


class _NamelessFile(_File):
    """A file of another process, which goes with its descriptor."""

    name = ""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.used = 0

    def close(self) -> None:
        os.close(self.descriptor)


class Place:
    """The place of an outcome, which may still be written."""

    def __init__(self, file: _File, begin: int, length: int) -> None:
        self.file = file
        self.begin = begin
        self.length = length

    def write(self, parts: Iterable[Buffer]) -> None:
        at = self.begin
        for part in parts:
            view = memoryview(part)
            while view:
                written = os.pwrite(self.file.descriptor, view[:_PIECE], at)
                view, at = view[written:], at + written

    def pieces(self) -> Iterator[bytes]:
        end = self.begin + self.length
        for at in range(self.begin, end, _PIECE):
            yield os.pread(self.file.descriptor, min(_PIECE, end - at), at)

    def outcome(self) -> Outcome:
        """The outcome in it, whose payload is no memory of this process."""
        return unpack_outcome(self._mapped())

    def _mapped(self) -> memoryview:
        skipped = self.begin % mmap.ALLOCATIONGRANULARITY
        found = mmap.mmap(
            self.file.descriptor,
            self.length + skipped,
            access=mmap.ACCESS_READ,
            offset=self.begin - skipped,
        )
        return memoryview(found)[skipped:]


class _PickledPlace(Place):
    """The place of a value that a worker has pickled."""

    def outcome(self) -> Outcome:
        return Returned("pickle", (self.length,), self._mapped())


class OutcomeFiles:
    """Files that outcomes are appended to; each is removed when nothing in it is wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._last: _File | None = None

    def reserve(self, length: int) -> Place:
        """Room for an outcome, to be kept or held."""
        last = self._last
        if last is None or last.size > _FILE_BYTES:
            self._last = None
            if last is not None:
                self._tidy(last)
            last = self._last = self._open(f"outcomes-{os.urandom(8).hex()}")
        place = Place(last, last.size, length)
        last.size += length
        return place

    def find(self, name: str, begin: int, length: int) -> Place:
        """The reservation of an earlier process; raises `OSError` if it is missing."""
        if not (self._folder / name).is_file():
            raise FileNotFoundError(name)
        file = self._files.get(name) or self._open(name)
        if begin + length > file.size:
            raise EOFError(name)
        return Place(file, begin, length)

    def keep(self, place: Place) -> None:
        """Keep the outcome at this place until it is released."""
        place.file.used += 1

    @contextlib.contextmanager
    def holding(self, places: Iterable[Place | None]) -> Iterator[None]:
        """Have them stay where they are, also if they are released meanwhile."""
        held = [place for place in places if place is not None]
        for place in held:
            self.keep(place)
        try:
            yield
        finally:
            for place in held:
                self.release(place)

    def release(self, place: Place) -> None:
        """Let the outcome at this place go."""
        place.file.used -= 1
        self._tidy(place.file)

    def clear(self) -> None:
        """Remove what an earlier process left, but for what was found."""
        for path in self._folder.glob("outcomes-*"):
            if path.name not in self._files:
                path.unlink(missing_ok=True)

    def _open(self, name: str) -> _File:
        found = self._files[name] = _File(self._folder / name)
        return found

    def _tidy(self, file: _File) -> None:
        if not file.used and file is not self._last:
            self._files.pop(file.name, None)
            file.close()


@dataclass(eq=False)
class Outcomes:
    """Outcomes by key, on disk, the oldest first out."""

    folder: Path
    clock: Callable[[], float]
    keep_seconds: float = KEEP_SECONDS
    limit_bytes: int = LIMIT_BYTES
    overhead: int = _OVERHEAD

    def __post_init__(self) -> None:
        self._files = OutcomeFiles(self.folder)
        self._kept: OrderedDict[object, tuple[float, Place]] = OrderedDict()
        self._bytes = 0
        self._files.clear()

    def put(self, key: object, outcome: Outcome) -> None:
        """Keep an outcome. A full disk costs that, not the call."""
        self._drop(key)
        parts = packed(outcome)
        length = sum(map(len, parts))
        if self.overhead + length > self.limit_bytes:
            return
        try:
            place = self._files.reserve(length)
            place.write(parts)
        except OSError as error:
            _log.warning("outcome not kept error=%s", error)
            return
        self._add(key, place)

    def take(self, key: object, descriptor: int) -> None:
        """Keep a value that a worker has pickled into a file, which is closed when it goes."""
        self._drop(key)
        file = _NamelessFile(descriptor)
        self._add(key, _PickledPlace(file, 0, file.size))
        # Nobody may ask again, and it is large.
        asyncio.get_running_loop().call_later(self.keep_seconds + 1.0, self._expire)

    def _add(self, key: object, place: Place) -> None:
        self._files.keep(place)
        self._kept[key] = (self.clock() + self.keep_seconds, place)
        self._bytes += self.overhead + place.length
        self._expire()

    def get(self, key: object) -> Outcome | None:
        self._expire()
        found = self._kept.get(key)
        return found[1].outcome() if found else None

    def _expire(self) -> None:
        now = self.clock()
        while self._kept:
            key, (expires, _) = next(iter(self._kept.items()))
            if expires > now and self._bytes <= self.limit_bytes:
                return
            self._drop(key)

    def _drop(self, key: object) -> None:
        found = self._kept.pop(key, None)
        if found:
            self._bytes -= self.overhead + found[1].length
            self._files.release(found[1])


class _News(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the list of calls."""

    report: CallReport
    #: Name of a file, where the outcome begins in it, its length.
    outcome: tuple[str, int, int] | None = None
    #: Nothing is to be known of it any more.
    is_over: bool = False


class _CallList:
    """The list of calls: the last line of a call counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._lines = 0
        self._last: dict[str, _News] = {}

    def load(self) -> list[_News]:
        with contextlib.suppress(OSError):
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    self._take(json_decoder(_News).decode(line))
        return list(self._last.values())

    def add(self, news: _News) -> None:
        """One more line; `OSError` if it is not written."""
        if self._descriptor is None or self._lines > _STALE + 4 * len(self._last):
            self._begin()
        assert self._descriptor is not None
        line = msgspec.json.encode(news) + b"\n"
        if os.write(self._descriptor, line) != len(line):
            os.ftruncate(self._descriptor, self._size)
            raise OSError("the disk is full")
        self._size += len(line)
        self._take(news)

    def _take(self, news: _News) -> None:
        self._lines += 1
        self._last.pop(news.report.id, None)
        if not news.is_over:
            self._last[news.report.id] = news

    def _begin(self) -> None:
        """Write it anew, without what says nothing any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = b"".join(msgspec.json.encode(news) + b"\n" for news in self._last.values())
        files.write_atomically(self._path, data)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size, self._lines = len(data), len(self._last)


class _Ended:
    """A spawned call that has ended, and whose outcome the controller does not have."""

    def __init__(self, report: CallReport, outcome: Outcome | None, place: Place | None) -> None:
        self.report = report
        #: In memory until it is on disk, and a small one until the controller has it.
        self.outcome = outcome
        self.place = place
        self.size = sum(map(len, packed(outcome))) if outcome is not None else 0
        if place is not None:
            self.size = place.length

    def pieces(self) -> Iterator[bytes]:
        """The packed outcome, piece by piece."""
        outcome, place = self.outcome, self.place
        if outcome is None:
            assert place is not None
            yield from place.pieces()
            return
        for part in packed(outcome):
            view = memoryview(part)
            for at in range(0, len(view), _PIECE):
                yield bytes(view[at : at + _PIECE])


#: Stores blobs in the controller: each is a function that gives its pieces; their digests.
Upload = Callable[[Sequence[Callable[[], Iterable[bytes]]]], Awaitable[list[str]]]


@dataclass(eq=False)
class Results:
    """Records of spawned calls."""

    folder: Path
    pod_name: str
    upload: Upload
    report: Callable[[CallReport], None]
    waiting_bytes: int = WAITING_BYTES

    def __post_init__(self) -> None:
        self._list = _CallList(self.folder / "calls")
        self._files = OutcomeFiles(self.folder)
        self._waiting: dict[str, _Ended] = {}
        # Bytes of their outcomes.
        self._size = 0
        self._unstored: list[_Ended] = []
        self._storing: asyncio.Task[None] | None = None
        self._delivery: asyncio.Task[None] | None = None

    def recover(self) -> None:
        """Report what an earlier process of this agent left behind."""
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
                    place = self._files.find(*news.outcome)
                    self._files.keep(place)
                except (OSError, EOFError):
                    self.report(report)
                    continue
                # Until its outcome is uploaded: the controller gives up unreported calls.
                self.report(replace(report, state="running", ended=None))
                self._wait(_Ended(report, None, place))
        self._files.clear()

    def begin(self, report: CallReport) -> None:
        """A spawned call waits for a worker, or begins to run; `OSError` if it is not written."""
        # It may have been refused before, and sent again: that was not its end.
        self._discard(report.id)
        try:
            self._list.add(_News(report))
        finally:
            self.report(report)

    def progress(self, report: CallReport) -> None:
        self.report(report)

    def end(self, report: CallReport, outcome: Outcome) -> None:
        """A spawned call ended; `report` does not name the outcome yet."""
        ended = _Ended(report, outcome, None)
        self._wait(ended)
        self._unstored.append(ended)
        if self._storing is None or self._storing.done():
            self._storing = asyncio.get_running_loop().create_task(self._store())

    def find(self, call_id: str) -> Outcome | None:
        """The outcome of a spawned call, until the controller has it."""
        found = self._waiting.get(call_id)
        if found is None or found.outcome is not None:
            return None if found is None else found.outcome
        try:
            assert found.place is not None
            return found.place.outcome()
        except (OSError, ValueError, KubetorchError):
            return None

    def forget(self, call_id: str) -> None:
        """The controller certainly knows how this call ended."""
        over = CallReport(id=call_id, callable="", state="", started=0.0)
        with contextlib.suppress(OSError):
            self._list.add(_News(over, is_over=True))

    async def close(self, timeout: float) -> None:
        """Wait for uploads that are under way, for so many seconds; the rest stays on disk."""
        tasks = [task for task in (self._storing, self._delivery) if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        await cancel_all(tasks)

    def _wait(self, ended: _Ended) -> None:
        self._waiting[ended.report.id] = ended
        self._size += ended.size
        while len(self._waiting) > 1 and self._size > self.waiting_bytes:
            oldest = min(self._waiting.values(), key=lambda one: one.report.ended or 0.0)
            self._settle(oldest, oldest.report)
        if self._delivery is None or self._delivery.done():
            self._delivery = asyncio.get_running_loop().create_task(self._deliver())

    # ------------------------------------------------------------------------------ to the disk

    async def _store(self) -> None:
        """Write outcomes down. A full disk costs what is known of an end, not the end."""
        while self._unstored:
            batch, self._unstored = self._unstored, []
            for ended in batch:
                try:
                    await self._store_one(ended)
                except (OSError, RuntimeError) as error:  # the latter: a thread too many
                    _log.warning("outcome not written call=%s error=%s", ended.report.id, error)

    async def _store_one(self, ended: _Ended) -> None:
        assert ended.outcome is not None
        place = self._files.reserve(ended.size)
        with self._files.holding([place]):
            if ended.size > _PIECE:
                await asyncio.to_thread(place.write, packed(ended.outcome))
            else:
                place.write(packed(ended.outcome))
            if self._waiting.get(ended.report.id) is not ended:
                return  # it was sent again, or given up
            where = (place.file.path.name, place.begin, place.length)
            self._list.add(_News(ended.report, where))
            self._files.keep(place)
            ended.place = place
            if ended.size > _SMALL:
                ended.outcome = None

    # ------------------------------------------------------------------------- to the controller

    async def _deliver(self) -> None:
        """Bring outcomes to the controller, however long that takes."""
        first, limit = RETRY_DELAYS
        delays = backoff.exponential(first=first, limit=limit)
        most = _BATCH
        while self._waiting:
            # Calls that are short end together, and one request costs as much as many outcomes.
            await asyncio.sleep(_GATHERING)
            if self._storing is not None:
                await asyncio.shield(self._storing)
            batch = self._next(most)
            try:
                with self._files.holding(ended.place for ended in batch):
                    digests = await self.upload([ended.pieces for ended in batch])
            except (KubetorchError, OSError) as error:
                _log.warning("upload failed calls=%s error=%s", len(batch), error)
                for ended in batch:
                    if self._waiting.get(ended.report.id) is ended:
                        self._waiting[ended.report.id] = self._waiting.pop(ended.report.id)
                if most == 1:
                    await asyncio.sleep(next(delays))
                most = 1  # one of them may be what cannot be uploaded
                continue
            most, delays = _BATCH, backoff.exponential(first=first, limit=limit)
            for ended, digest in zip(batch, digests, strict=True):
                report = replace(ended.report, result=digest, result_bytes=ended.size)
                self._settle(ended, report)
                await asyncio.sleep(0)  # calls come first

    def _next(self, most: int) -> list[_Ended]:
        """The outcomes of the next upload: as many as fit."""
        batch: list[_Ended] = []
        size = 0
        for ended in self._waiting.values():
            size += ended.size
            if batch and (size > _BATCH_BYTES or len(batch) == most):
                break
            batch.append(ended)
        return batch

    def _settle(self, ended: _Ended, report: CallReport) -> None:
        """Say how a call ended: with its result, or without one, which is given up."""
        if self._waiting.get(report.id) is not ended:
            return  # it was sent again, or given up
        with contextlib.suppress(OSError):
            self._list.add(_News(report))
        self._discard(report.id)
        self.report(report)

    def _discard(self, call_id: str) -> None:
        found = self._waiting.pop(call_id, None)
        if found is not None:
            self._size -= found.size
            if found.place is not None:
                self._files.release(found.place)
