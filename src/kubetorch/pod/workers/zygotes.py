"""The agent's handle of a zygote: starting one, having it preload, having it fork."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kubetorch.lib import deadlines, processes
from kubetorch.lib.processes import ExitWatch
from kubetorch.pod.workers.launching import Launched

#: Seconds until a preload, a fork and an exit status are given up. The first fork waits for the
#: start of an interpreter, which takes long in a small pod on a node that is full.
PRELOAD_TIMEOUT = 300.0
FORK_TIMEOUT = 30.0
STATUS_TIMEOUT = 1.0

# What a zygote takes over from the agent when it begins.
_STDOUT, _STDERR = 1, 2

_T = TypeVar("_T")


class ZygoteError(Exception):
    """A zygote cannot do what was asked; its text says why, for the user."""


class ZygoteLost(ZygoteError):
    """A zygote is gone, or outdated by what it imported: another one may do it.

    Attributes:
        is_outdated: It is outdated.
    """

    def __init__(self, message: str, *, is_outdated: bool = False) -> None:
        super().__init__(message)
        self.is_outdated = is_outdated


class Forked(NamedTuple):
    """A worker process that a zygote started."""

    pid: int
    pidfd: int | None


class Zygote:
    """A running zygote.

    Args:
        launched: Its process.
        sys_path: Entries to put first.

    Raises:
        ZygoteLost: It has ended already.
    """

    def __init__(self, launched: Launched, sys_path: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = launched.control
        self.pid = launched.pid
        #: Why workers must not be forks of it: they are fresh interpreters then.
        self.unfit: str | None = None
        #: Modules that it has preloaded.
        self.preloaded: set[str] = set()
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._descriptors: deque[int] = deque()
        self._forks: dict[int, asyncio.Future[Forked]] = {}
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._readies: deque[asyncio.Future[str | None]] = deque()
        self._on_module: Callable[[str], None] = _nothing
        self._importing = ""
        self._is_retired = False
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._receive)
        self._reaped = asyncio.Event()
        self._send({"op": "begin", "path": list(sys_path)}, _STDOUT, _STDERR)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked for anything."""
        return self._control.fileno() >= 0

    async def preload(self, modules: Sequence[str], on_module: Callable[[str], None]) -> None:
        """Have it import modules.

        Args:
            modules: Their names; those that it has already cost nothing.
            on_module: Told of each before its import.

        Raises:
            ZygoteLost: It is gone, or has to be replaced.
        """
        self._on_module = on_module
        ready: asyncio.Future[str | None] = self._loop.create_future()
        self._readies.append(ready)
        self._send({"op": "preload", "modules": list(modules)})
        self.unfit = await self._within(ready, PRELOAD_TIMEOUT, "preload")
        self.preloaded.update(modules)

    async def fork(self, sock: socket.socket, output: int, marker: str) -> Forked:
        """Have it start a worker: a fork of itself, or a fresh interpreter if it is unfit.

        Args:
            sock: The worker's end of its socket.
            output: The worker's end of the pipe for its output.
            marker: In the environment of all that the worker will start.

        Raises:
            ZygoteError: It could not; nothing runs.
        """
        number = next(self._numbers)
        future: asyncio.Future[Forked] = self._loop.create_future()
        self._forks[number] = future
        try:
            is_fresh = self.unfit is not None
            message = {"op": "fork", "id": number, "marker": marker, "fresh": is_fresh}
            self._send(message, sock.fileno(), output)
            return await self._within(future, FORK_TIMEOUT, "fork")
        finally:
            self._forks.pop(number, None)

    async def status(self, pid: int) -> int | None:
        """What a forked worker ended with; `None` if the zygote is gone or does not say."""
        future = self._statuses.get(pid)
        if future is None:
            return None
        with contextlib.suppress(ZygoteError):
            return await self._within(future, STATUS_TIMEOUT, "tell the end of a worker")
        return None

    def retire(self) -> None:
        """End it as soon as the last of its workers has ended.

        Until then it stands by: it knows what they end with, and ends them when the agent dies.
        """
        self._is_retired = True
        if not self._statuses:
            self._lose("it was replaced")

    async def close(self) -> None:
        """End it now. Its workers live on."""
        self._lose("it was closed")
        async with deadlines.timeout(STATUS_TIMEOUT):
            await self._reaped.wait()

    # --------------------------------------------------------------------------------- internals

    async def _within(self, future: asyncio.Future[_T], timeout: float, what: str) -> _T:
        try:
            async with deadlines.timeout(timeout):
                return await asyncio.shield(future)
        except TimeoutError:
            self._lose(f"it took more than {timeout:.0f} s to {what}")
            raise ZygoteLost(f"the zygote took more than {timeout:.0f} s to {what}") from None

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        data = json.dumps(message).encode() + b"\n"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            sent = self._control.sendmsg([data], rights if descriptors else [])
        except OSError:
            sent = 0
        if sent < len(data):  # far less is ever under way than the socket takes
            self._lose("it does not listen")
            raise ZygoteLost("the zygote has ended")

    def _receive(self) -> None:
        try:
            flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            data, ancillary, _, _ = self._control.recvmsg(65536, socket.CMSG_SPACE(64), flags)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                self._descriptors.extend(received)
        if not data:
            self._lose("it ended")
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "importing":
            self._importing = message["module"]
            self._on_module(message["module"])
        elif operation == "ready":
            self._importing = ""
            ready = self._readies.popleft()
            if message["outdated"]:
                ready.set_exception(ZygoteLost(message["outdated"], is_outdated=True))
                ready.exception()  # it may be that nobody waits
            else:
                ready.set_result(message["unfit"])
        elif operation == "forked":
            self._forked(message)
        elif operation == "exited":
            future = self._statuses.get(message["pid"])
            if future is not None and not future.done():
                future.set_result(message["status"])
        else:
            future_fork = self._forks.get(message["id"])
            if future_fork is not None and not future_fork.done():
                outdated = message["outdated"]
                future_fork.set_exception(
                    ZygoteLost(outdated, is_outdated=True)
                    if outdated
                    else ZygoteError(message["message"])
                )

    def _forked(self, message: dict[str, Any]) -> None:
        pid = message["pid"]
        pidfd = self._descriptors.popleft() if message["pidfd"] else None
        future = self._forks.get(message["id"])
        if future is None or future.done():  # nobody waits for it any more
            if pidfd is not None:
                os.close(pidfd)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            return
        self._statuses[pid] = self._loop.create_future()
        future.set_result(Forked(pid, pidfd))

    def forget(self, pid: int) -> None:
        """The end of this worker has been dealt with."""
        self._statuses.pop(pid, None)
        if self._is_retired:
            self.retire()

    def _lose(self, reason: str) -> None:
        if not self.is_alive:
            return
        # Before it sees the end of the socket, at which it would end its workers.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        try:
            ExitWatch(self.pid, self._reap)
        except OSError:
            reaping = self._loop.run_in_executor(None, os.waitpid, self.pid, 0)
            reaping.add_done_callback(lambda _: self._reap())
        while self._descriptors:
            os.close(self._descriptors.popleft())
        doing = f" while it imported {self._importing}" if self._importing else ""
        error = ZygoteLost(f"the zygote is gone{doing}: {reason}")
        waiting: list[asyncio.Future[Any]] = [*self._readies, *self._forks.values()]
        for future in [*waiting, *self._statuses.values()]:
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody waits

    def _reap(self) -> None:
        processes.exit_status(self.pid)
        self._reaped.set()


def _nothing(_: str) -> None:
    return None
