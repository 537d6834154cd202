"""The values of references (`kt.ref`) in this agent, each once for all workers and callers.

    client's stream ── value, once ──┐                             ┌── once ── worker that maps it
    agent of a sibling ── the same ──┴─ References ─ ReferenceUse ─┴── once ── agent of a sibling
                                             ▲
                                     calls that name it

A value stays as long as a stream holds it, from its arrival until the client's last reference to it
is gone, or the client, and as long as a call uses it. Values that no call uses make room for new
ones, those first that were used longest ago: a client that names one of them sends it again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kubetorch.errors import CallRefusedError, KubetorchError, ReferenceLostError
from kubetorch.lib import memory_files
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.lib.tasks import start_task
from kubetorch.pod.tuning import LIMITS
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS
from kubetorch.wire.references import check

if TYPE_CHECKING:
    from kubetorch.pod.payloads import Payload


class Reference:
    """The value of one reference.

    Attributes:
        number: Its number in frames to workers.
        sizes: Bytes of its segments.
    """

    def __init__(self, number: int, identity: str, sizes: Sequence[int], size: int) -> None:
        self.number = number
        self.identity = identity
        self.sizes = tuple(sizes)
        self.size = size
        #: The bytes, once they are there.
        self.memory: MemoryFile | bytes | None = None
        #: The streams that hold it, and those on which its bytes are under way.
        self.holders: set[object] = set()
        self.senders: set[object] = set()
        self.uses: set[ReferenceUse] = set()


class ReferenceUse:
    """The use of references by one call."""

    def __init__(self, references: References, entries: Sequence[Reference]) -> None:
        self._references = references
        self.entries = entries
        self._on_present: Callable[[KubetorchError | None], object] | None = None

    def when_present(self, on_present: Callable[[KubetorchError | None], object]) -> None:
        """Call back once all values are present, or with the error if one does not come."""
        self._on_present = on_present
        self.check()

    def check(self, error: KubetorchError | None = None) -> None:
        on_present = self._on_present
        if on_present is None:
            return
        if error is not None or all(entry.memory is not None for entry in self.entries):
            self._on_present = None
            on_present(error)

    def end(self) -> None:
        self._on_present = None
        for entry in self.entries:
            entry.uses.discard(self)
            self._references.drop_unused(entry)


class References:
    def __init__(self) -> None:
        #: Bytes of all values together; set once the memory of the pod is known.
        self.limit_bytes = LIMITS.references_bytes
        #: Called with each reference that is dropped.
        self.on_drop: list[Callable[[Reference], object]] = []
        self._numbers = itertools.count(1)
        # Those used last are at the end.
        self._entries: dict[str, Reference] = {}
        self._used_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # --------------------------------------------------------------------------- from streams

    def expect(self, identity: str, sizes: Sequence[int], size: int, stream: object) -> bool:
        """Make room for the value that a stream brings; false if the stream need not send it.

        Raises:
            SerializationError: No process of ours sends such a value.
            CallRefusedError: There is no room for it.
        """
        check(identity, sizes, size)
        entry = self._entries.get(identity)
        if entry is None:
            self._make_room(identity, size)
            entry = self._entries[identity] = Reference(next(self._numbers), identity, sizes, size)
            self._used_bytes += size
        entry.holders.add(stream)
        if entry.memory is not None or (entry.sizes, entry.size) != (tuple(sizes), size):
            return False
        entry.senders.add(stream)
        return True

    def receive(
        self,
        identity: str,
        payload: Payload,
        stream: object,
        on_end: Callable[[KubetorchError | None], object],
    ) -> None:
        """Take a value that has arrived whole; calls back once calls can use the value."""
        if isinstance(payload, MemoryFile):
            self._set_memory(identity, payload, stream)
            on_end(None)
        elif not memory_files.IS_AVAILABLE or len(payload.view) <= WORKER_LIMITS.inline_bytes:
            content = bytes(payload.view)
            payload.release()
            self._set_memory(identity, content, stream)
            on_end(None)
        else:
            start_task(self._write_file(identity, payload, stream, on_end), self._tasks)

    async def _write_file(
        self,
        identity: str,
        payload: Payload,
        stream: object,
        on_end: Callable[[KubetorchError | None], object],
    ) -> None:
        """Write bytes that came on a stream to a file that workers can map."""
        view = payload.view
        try:
            file = await asyncio.to_thread(MemoryFile.write, [view], len(view))
        except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no thread can start
            lost = ReferenceLostError.of(
                identity,
                f"this pod cannot keep a reference of {len(view)} bytes: {error}",
                "no memory is left, or no thread can start: kt.Compute(memory=...) gives more",
            )
            self.give_up(identity, stream, lost)
            on_end(lost)
        else:
            self._set_memory(identity, file, stream)
            on_end(None)
        finally:
            payload.release()

    def _set_memory(self, identity: str, memory: MemoryFile | bytes, stream: object) -> None:
        entry = self._entries.get(identity)
        if entry is not None and entry.memory is None:
            entry.memory = memory
        elif isinstance(memory, MemoryFile):  # of a client that is gone; or another was faster
            memory.release()
        if entry is not None:
            entry.senders.discard(stream)
            for use in list(entry.uses):
                use.check()
            self.drop_unused(entry)

    def give_up(self, identity: str, stream: object, error: KubetorchError | None = None) -> None:
        """The stream does not bring the value any more."""
        entry = self._entries.get(identity)
        if entry is None or stream not in entry.senders:
            return
        entry.senders.discard(stream)
        entry.holders.discard(stream)
        if entry.memory is None and not entry.senders:
            lost = error or _lost(identity)
            for use in list(entry.uses):
                use.check(lost)
        self.drop_unused(entry)

    def release(self, identity: str, stream: object) -> None:
        """The client of a stream names the reference no more."""
        entry = self._entries.get(identity)
        if entry is not None:
            entry.holders.discard(stream)
            self.drop_unused(entry)

    def end_stream(self, stream: object) -> None:
        for entry in list(self._entries.values()):
            self.give_up(entry.identity, stream)
            self.release(entry.identity, stream)

    # ----------------------------------------------------------------------------- from calls

    def use(self, identities: Iterable[str]) -> ReferenceUse:
        """Keep the values that a call names until it has ended.

        Raises:
            ReferenceLostError: One of them is neither here nor under way.
        """
        entries = []
        for identity in identities:
            entry = self._entries.get(identity)
            if entry is None or (entry.memory is None and not entry.senders):
                raise _lost(identity)
            entries.append(entry)
        use = ReferenceUse(self, entries)
        for entry in entries:
            self._entries[entry.identity] = self._entries.pop(entry.identity)
            entry.uses.add(use)
        return use

    def present(self, identities: Iterable[str]) -> Iterator[Reference]:
        """Those of the references whose values are here."""
        for identity in identities:
            entry = self._entries.get(identity)
            if entry is not None and entry.memory is not None:
                yield entry

    # ------------------------------------------------------------------------------- the room

    def _make_room(self, identity: str, size: int) -> None:
        """Drop what was used longest ago, unless that would not be enough."""
        idle = [entry for entry in self._entries.values() if not (entry.uses or entry.senders)]
        busy_bytes = self._used_bytes - sum(entry.size for entry in idle)
        busy_count = len(self._entries) - len(idle)
        if busy_count >= LIMITS.references:
            raise CallRefusedError(
                f"no room for the reference {identity[:8]}…: a pod keeps at most "
                f"{LIMITS.references} references, and calls that run use {busy_count}",
                hint="put several values into one reference, kt.ref([...]), or let calls end first",
            )
        if busy_bytes + size > self.limit_bytes:
            raise CallRefusedError(
                f"no room for the reference {identity[:8]}… of {size} bytes: the references in "
                f"this pod may have {self.limit_bytes} bytes together, and calls that run use "
                f"{busy_bytes}",
                hint="give the pod more memory, kt.Compute(memory=...), or put the value into the "
                "data store: kt.put",
            )
        for entry in idle:
            is_below_count = len(self._entries) < LIMITS.references
            if is_below_count and self._used_bytes + size <= self.limit_bytes:
                return
            self._drop(entry)

    def drop_unused(self, entry: Reference) -> None:
        """Drop a value that neither streams nor calls hold."""
        if not (entry.holders or entry.senders or entry.uses):
            self._drop(entry)

    def _drop(self, entry: Reference) -> None:
        if self._entries.get(entry.identity) is not entry:
            return
        del self._entries[entry.identity]
        self._used_bytes -= entry.size
        for on_drop in self.on_drop:
            on_drop(entry)
        if isinstance(entry.memory, MemoryFile):
            entry.memory.release()


def _lost(identity: str) -> ReferenceLostError:
    return ReferenceLostError.of(
        identity,
        f"the value of the reference {identity[:8]}… is not in this pod: the process that made "
        "the reference, or passed it on, has ended or no longer uses it",
        "make it anew with kt.ref(value), in a process that lives as long as the calls",
    )
