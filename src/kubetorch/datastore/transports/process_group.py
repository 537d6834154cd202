"""Frames by the broadcast of a process group of `torch.distributed`: NCCL, or Gloo on CPUs.

The groups are beside the group that a program makes by `init_process_group`, and know nothing of
it. A group is kept for the next window of the same processes.
"""

from __future__ import annotations

import datetime
import importlib
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kubetorch.config import environment
from kubetorch.datastore.transports.rendezvous import Link
from kubetorch.datastore.transports.transport import Frame
from kubetorch.datastore.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError
from kubetorch.lib import processes
from kubetorch.wire.transports import Start


class ProcessGroup:
    """A communicator, and the transport over it; rank 0 is the putter.

    Attributes:
        name: Its name, which its members alone have.
        kind: The backend and the device that it is for.
    """

    def __init__(self, kind: tuple[str, str], start: Start, host: str) -> None:
        self.name = start.group
        self.kind = kind
        self.size = start.size
        self.is_putter = start.rank == 0
        self._rank = start.rank
        self._host = host
        self._store_address = start.store
        self._store: Any = None
        self._group: Any = None

    def listen(self) -> str:
        """Open the store at which the members of a new group meet; returns its address."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)
        self._store_address = f"{self._host}:{listener.getsockname()[1]}"
        self._store = _tcp_store(self._store_address, listener.detach())
        return self._store_address

    def _form(self) -> Any:  # noqa: ANN401  # a process group of torch
        distributed = importlib.import_module("torch.distributed")
        timeout = datetime.timedelta(seconds=TIMING.transport_silence_seconds)
        if self._store is None:
            self._store = _tcp_store(self._store_address)
        if self.kind[0] == "gloo":
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self._host)]
            options._timeout = timeout
            return distributed.ProcessGroupGloo(self._store, self._rank, self.size, options)
        # Without a watchdog, which would end the process when a member is lost.
        with environment.variable_set("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return distributed.ProcessGroupNCCL(self._store, self._rank, self.size, timeout)

    def send(self, frames: Iterable[Frame]) -> Iterator[None]:
        return self._broadcast(frames)

    def receive(self, frames: Iterable[Frame]) -> Iterator[None]:
        return self._broadcast(frames)

    def _broadcast(self, frames: Iterable[Frame]) -> Iterator[None]:
        """The same call at both ends; few frames are under way at a time."""
        if self._group is None:
            self._group = self._form()
            yield
        pending: deque[tuple[Frame, Any]] = deque()
        for frame in frames:
            pending.append((frame, self._begin(frame)))
            if len(pending) >= LIMITS.frames_under_way:
                _finish(pending.popleft()[1])
                yield
        while pending:
            _finish(pending.popleft()[1])
            yield

    def _begin(self, frame: Frame) -> Any:  # noqa: ANN401  # a work of torch
        distributed = importlib.import_module("torch.distributed")
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True  # so that its end can be asked for
        if self.kind[0] == "gloo":
            options.timeout = datetime.timedelta(seconds=TIMING.transport_silence_seconds)
        return self._group.broadcast([frame], options)

    def abort(self) -> None:
        """End what is under way; in a thread, as this may hang, too."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=_end, args=(group,), daemon=True).start()


def _end(group: Any) -> None:  # noqa: ANN401  # a process group of torch
    group.abort()
    # Its destructor waits, with Python's lock, for broadcasts that Gloo does not abort.
    time.sleep(TIMING.transport_silence_seconds + 1)


def _finish(work: Any) -> None:  # noqa: ANN401  # a work of torch
    end = time.monotonic() + TIMING.transport_silence_seconds
    while not work.is_completed():
        if time.monotonic() > end:
            raise DataStoreError("a broadcast does not end")
        time.sleep(TIMING.work_poll_seconds)
    work.wait()  # raises what it failed of


def _tcp_store(address: str, listener: int | None = None) -> Any:  # noqa: ANN401
    """The store at an address; of the member that listens there, with its descriptor."""
    distributed = importlib.import_module("torch.distributed")
    host, _, port = address.rpartition(":")
    return distributed.TCPStore(
        host,
        int(port),
        is_master=listener is not None,
        timeout=datetime.timedelta(seconds=TIMING.rendezvous_seconds),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class ProcessGroups:
    """The groups that this process is a member of and that are at rest, the oldest first.

    Threads may be several members of a group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[ProcessGroup] = []
        #: Those of the parent, whose threads a fork has not: ending them would hang.
        self._inherited: list[ProcessGroup] = []
        processes.at_fork(self._leave)

    def _leave(self) -> None:
        self._inherited += self._groups
        self._groups, self._lock = [], threading.Lock()

    def names(self, kind: tuple[str, str], *, of_putter: bool = False) -> frozenset[str]:
        with self._lock:
            groups = [group for group in self._groups if group.is_putter == of_putter]
            return frozenset(group.name for group in groups if group.kind == kind)

    def take(self, name: str, *, of_putter: bool = False) -> ProcessGroup | None:
        """A group, which nobody else has until it is put back."""
        with self._lock:
            for group in self._groups:
                if group.name == name and group.is_putter == of_putter:
                    self._groups.remove(group)
                    return group
        return None

    def put(self, group: ProcessGroup) -> None:
        """Put back a group over which a broadcast has ended well; the oldest goes."""
        with self._lock:
            self._groups.append(group)
            surplus = self._groups[: -LIMITS.process_groups]
            del self._groups[: -LIMITS.process_groups]
        for old_group in surplus:
            old_group.abort()

    def for_getters(
        self, kind: tuple[str, str], links: Sequence[Link], host: str
    ) -> tuple[ProcessGroup, list[Start]]:
        """The group of a putter and its getters, and what each getter is to be told of it."""
        size = len(links) + 1
        names = self.names(kind, of_putter=True)
        for name in names.intersection(*(link.groups for link in links)):
            group = self.take(name, of_putter=True)
            if group is not None and group.size == size:
                return group, [Start(transport=kind[0], group=name)] * len(links)
            if group is not None:
                self.put(group)
        name = uuid.uuid4().hex
        group = ProcessGroup(kind, Start(transport=kind[0], group=name, size=size), host)
        store = group.listen()
        return group, [
            Start(transport=kind[0], group=name, store=store, rank=rank, size=size)
            for rank in range(1, size)
        ]

    def for_putter(self, kind: tuple[str, str], start: Start, host: str) -> ProcessGroup:
        """The group of a getter that a putter starts."""
        group = ProcessGroup(kind, start, host) if start.store else self.take(start.group)
        if group is None:
            raise DataStoreError("the communicator is no longer there")
        return group
