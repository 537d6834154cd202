"""The zygotes of an agent: starting one, having it preload and fork, replacing an outdated one.

Imports no large module: a spare agent makes a zygote of itself before it imports the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from kubetorch.lib import deadlines, process_watch, processes
from kubetorch.lib.process_watch import ExitWatch
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.numeric_threads import VARIABLES

#: Receives the stage of a start, and a message about it.
OnStage = Callable[[str, str], None]
_T = TypeVar("_T")

#: The program that an agent runs in the user's interpreter.
PROGRAM = str(Path(__file__).parents[1] / "user_process" / "__main__.py")
#: Libraries that read variables of a rank while they are imported, or open a device: each worker
#: has to import them itself.
NOT_PRELOADED = frozenset(
    {"deepspeed", "horovod", "jax", "jaxlib", "mpi4py", "tensorflow", "torch_xla", "vllm"}
)
#: How the names of variables for workers alone begin: a change needs no other zygote.
_WORKER_VARIABLES = ("KT_", "POD_", "HOSTNAME")

_STDOUT, _STDERR = 1, 2


class LaunchedZygote(NamedTuple):
    """A zygote that was started and has no message yet; it ends when its socket is closed."""

    pid: int
    control: socket.socket
    python: str
    environ: Mapping[str, str]


def fork_zygote() -> LaunchedZygote:
    """Make a zygote of this process, for workers with its interpreter and environment.

    An agent imports the same large modules as a zygote: a fork imports them once for both. To be
    called before this process has threads, or any state that workers must not have.
    """
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
        if pid == 0:
            _become_zygote(ours, theirs)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return LaunchedZygote(pid, ours, sys.executable, dict(os.environ))


def _become_zygote(ours: socket.socket, theirs: socket.socket) -> NoReturn:
    status = 70
    try:
        os.setsid()
        os.dup2(theirs.fileno(), 0)
        ours.close()
        theirs.close()
        os.environ.update(dict.fromkeys(VARIABLES, "1"))
        from kubetorch.pod.user_process import zygote  # noqa: PLC0415  # not into the agent

        zygote.main()
        status = 0
    finally:  # whatever happens, the child must not go on as an agent
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def launch_zygote(python: str, environ: Mapping[str, str]) -> LaunchedZygote:
    ours, theirs = socket.socketpair()
    try:
        pid = processes.spawn(
            (python, PROGRAM, "zygote"),
            {**environ, **dict.fromkeys(VARIABLES, "1")},
            stdin=theirs.fileno(),
            output=_STDOUT,
            errors=_STDERR,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return LaunchedZygote(pid, ours, python, dict(environ))


class ZygoteError(Exception):
    """A zygote cannot preload or fork; the text is the reason, for the user."""


class ZygoteLost(ZygoteError):
    """A zygote is gone, or its imported modules are outdated: another zygote may succeed."""

    def __init__(self, message: str, *, is_outdated: bool = False) -> None:
        super().__init__(message)
        self.is_outdated = is_outdated


class Forked(NamedTuple):
    """A worker process that a zygote started."""

    pid: int
    pidfd: int | None


class ZygoteHandle:
    def __init__(self, launched: LaunchedZygote, sys_path: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = launched.control
        self.pid = launched.pid
        #: Why workers cannot be forks of this zygote, and are fresh interpreters; `None`: they can.
        self.unfit: str | None = None
        #: Modules that this zygote has preloaded.
        self.preloaded: set[str] = set()
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._descriptors: deque[int] = deque()
        self._forks: dict[int, asyncio.Future[Forked]] = {}
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._preloads_waiting: deque[asyncio.Future[str | None]] = deque()
        self._on_module: Callable[[str], None] = lambda _: None
        self._importing = ""
        self._is_retired = False
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._receive)
        self._reaped = asyncio.Event()
        self._send({"op": "begin", "path": list(sys_path)}, _STDOUT, _STDERR)

    @property
    def is_alive(self) -> bool:
        return self._control.fileno() >= 0

    async def preload(self, modules: Sequence[str], on_module: Callable[[str], None]) -> None:
        self._on_module = on_module
        ready: asyncio.Future[str | None] = self._loop.create_future()
        self._preloads_waiting.append(ready)
        self._send({"op": "preload", "modules": list(modules)})
        self.unfit = await self._within(ready, TIMING.zygote_preload_seconds, "preload")
        self.preloaded.update(modules)

    async def fork(self, sock: socket.socket, output: int, marker: str) -> Forked:
        """Start a worker: a fork of the zygote, or a fresh interpreter if the zygote is unfit."""
        number = next(self._numbers)
        future: asyncio.Future[Forked] = self._loop.create_future()
        self._forks[number] = future
        try:
            is_fresh = self.unfit is not None
            message = {"op": "fork", "id": number, "marker": marker, "fresh": is_fresh}
            self._send(message, sock.fileno(), output)
            return await self._within(future, TIMING.zygote_fork_seconds, "fork")
        finally:
            self._forks.pop(number, None)

    async def exit_status_of(self, pid: int) -> int | None:
        """The exit status of a forked worker; `None` if neither zygote nor `/proc` shows it."""
        future = self._statuses.get(pid)
        if future is None:
            return None
        # A zygote has one thread, which reaps no worker while it imports.
        if self._importing and (status := _zombie_status(pid)) is not None:
            return status
        try:
            async with deadlines.timeout(TIMING.zygote_status_seconds):
                return await asyncio.shield(future)
        except TimeoutError:  # it is stopped, or the node is full
            return _zombie_status(pid)
        except ZygoteError:
            return None

    def retire(self) -> None:
        """End the zygote as soon as the last of its workers has ended.

        Until then it reports their exit statuses, and ends them when the agent dies.
        """
        self._is_retired = True
        if not self._statuses:
            self._kill_and_forget("it was replaced")

    async def close(self) -> None:
        """End the zygote now. Its workers live on."""
        self._kill_and_forget("it was closed")
        # The kernel may hold it.
        await deadlines.wait_at_most(TIMING.zygote_status_seconds, self._reaped.wait())

    # --------------------------------------------------------------------------------- internals

    async def _within(self, future: asyncio.Future[_T], timeout: float, action: str) -> _T:
        try:
            async with deadlines.timeout(timeout):
                return await asyncio.shield(future)
        except TimeoutError:
            self._kill_and_forget(f"it took more than {timeout:.0f} s to {action}")
            raise ZygoteLost(f"the zygote took more than {timeout:.0f} s to {action}") from None

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        data = json.dumps(message).encode() + b"\n"
        rights = protocol.rights(*descriptors) if descriptors else []
        try:
            sent = self._control.sendmsg([data], rights)
        except OSError:
            sent = 0
        if sent < len(data):  # a short write means that it does not read
            self._kill_and_forget("it does not listen")
            raise ZygoteLost("the zygote has ended")

    def _receive(self) -> None:
        try:
            flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            data, ancillary, _, _ = self._control.recvmsg(65536, socket.CMSG_SPACE(64), flags)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        self._descriptors.extend(protocol.descriptors(ancillary))
        if not data:
            self._kill_and_forget("it ended")
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            for line in lines:
                self._handle(json.loads(line))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            # An imported package may write to the zygote's connection.
            self._kill_and_forget(f"it sent what no zygote sends: {error}")
        if len(self._buffer) > LIMITS.zygote_message_bytes:
            self._kill_and_forget("it sent a line without an end")

    def _handle(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "importing":
            self._importing = message["module"]
            self._on_module(message["module"])
        elif operation == "ready":
            self._importing = ""
            ready = self._preloads_waiting.popleft()
            if message["outdated"]:
                ready.set_exception(ZygoteLost(message["outdated"], is_outdated=True))
                ready.exception()  # perhaps no task waits
            else:
                ready.set_result(message["unfit"])
        elif operation == "forked":
            self._forked(message)
        elif operation == "exited":
            future = self._statuses.get(message["pid"])
            if future is not None and not future.done():
                future.set_result(message["status"])
        elif operation == "failed":
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
        if future is None or future.done():  # no task waits for the worker any more
            if pidfd is not None:
                os.close(pidfd)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            return
        self._statuses[pid] = self._loop.create_future()
        future.set_result(Forked(pid, pidfd))

    def forget(self, pid: int) -> None:
        """Forget a worker whose end has been handled."""
        self._statuses.pop(pid, None)
        if self._is_retired:
            self.retire()

    def _kill_and_forget(self, reason: str) -> None:
        if not self.is_alive:
            return
        # Kill the zygote before it sees the end of the socket, at which it would end its workers.
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
        waiting: list[asyncio.Future[Any]] = [*self._preloads_waiting, *self._forks.values()]
        for future in [*waiting, *self._statuses.values()]:
            if not future.done():
                future.set_exception(error)
                future.exception()  # perhaps no task waits

    def _reap(self) -> None:
        processes.exit_status(self.pid)
        self._reaped.set()


def _zombie_status(pid: int) -> int | None:
    """The exit status of a process that its parent has not reaped, as far as `/proc` shows it."""
    with contextlib.suppress(OSError):
        fields = processes.stat(Path(f"/proc/{pid}"))
        status = int(fields[49])
        if fields[0] == b"Z" and status:  # 0 may mean that it is not shown
            return os.waitstatus_to_exitcode(status)
    return None


class ZygoteSpec(NamedTuple):
    """The interpreter of workers, their environment, their `sys.path`, the modules to preload."""

    python: str
    env: Mapping[str, str]
    sys_path: Sequence[str]
    preload: Sequence[str]


class ZygoteEnvironment(NamedTuple):
    """The environment for which a zygote can be used."""

    python: str
    env: frozenset[tuple[str, str]]
    sys_path: tuple[str, ...]


class Zygotes:
    """The zygotes of one agent: the present one, and retired ones whose workers still live."""

    def __init__(self, first: LaunchedZygote | None = None) -> None:
        self._lock = asyncio.Lock()
        self._first = first
        self._present: ZygoteHandle | None = None
        self._environment: ZygoteEnvironment | None = None
        self._retired: set[ZygoteHandle] = set()
        # Why forks are not sound, for an environment and the modules that are preloaded in it.
        self._unfit: dict[tuple[ZygoteEnvironment, frozenset[str]], str] = {}
        self._losses: Counter[tuple[ZygoteEnvironment, frozenset[str]]] = Counter()

    @property
    def pid(self) -> int | None:
        """The process that workers are forked from at present."""
        return self._present.pid if self._present and self._present.is_alive else None

    async def start(
        self, spec: ZygoteSpec, on_stage: OnStage, fork: Callable[[ZygoteHandle], Awaitable[Forked]]
    ) -> tuple[ZygoteHandle, Forked]:
        """Fork a worker from a zygote; a zygote that is lost meanwhile is replaced."""
        attempt = 0
        async with self._lock:
            while True:
                attempt += 1
                try:
                    zygote = await self._ready_zygote(spec, on_stage)
                    if zygote.unfit is not None:
                        on_stage("starting", f"a fresh interpreter: {zygote.unfit}")
                    return zygote, await fork(zygote)
                except ZygoteLost:
                    self._retire()
                    if attempt == LIMITS.worker_start_attempts:
                        raise

    async def prewarm(self, spec: ZygoteSpec) -> None:
        async with self._lock:
            await self._ready_zygote(spec, lambda _stage, _message: None)

    async def close(self) -> None:
        async with self._lock:
            self._discard_first()
            self._retire()
            await asyncio.gather(*(zygote.close() for zygote in self._retired))
            self._retired.clear()

    async def _ready_zygote(self, spec: ZygoteSpec, on_stage: OnStage) -> ZygoteHandle:
        """The zygote for this environment, with these modules imported if that is sound."""
        python, env, sys_path, preload = spec
        environment = _zygote_environment(python, env, sys_path)
        modules = frozenset(name for name in preload if name.partition(".")[0] not in NOT_PRELOADED)
        unfit = self._unfit.get((environment, modules))
        zygote = self._present
        is_usable = (
            zygote is not None
            and zygote.is_alive
            and self._environment == environment
            and zygote.unfit in (None, unfit)
        )
        if zygote is None or not is_usable:
            self._retire()
            launched = self._take_first(environment) or launch_zygote(python, env)
            zygote = self._present = ZygoteHandle(launched, sys_path)
            self._environment = environment
        if unfit is not None:
            zygote.unfit = unfit
        elif not zygote.preloaded.issuperset(modules):
            await self._preload(zygote, environment, modules, on_stage)
        return zygote

    async def _preload(
        self,
        zygote: ZygoteHandle,
        environment: ZygoteEnvironment,
        modules: frozenset[str],
        on_stage: OnStage,
    ) -> None:
        names = sorted(modules)
        on_stage("preloading", ", ".join(names))
        try:
            await zygote.preload(names, lambda name: on_stage("preloading", name))
        except ZygoteLost as error:
            self._losses[environment, modules] += not error.is_outdated
            if self._losses[environment, modules] >= LIMITS.preload_losses:
                self._unfit[environment, modules] = str(error)
            raise
        self._losses.pop((environment, modules), None)
        if zygote.unfit is not None:
            self._unfit[environment, modules] = zygote.unfit

    def _take_first(self, environment: ZygoteEnvironment) -> LaunchedZygote | None:
        """The zygote of the spare agent, if it is unused and has this environment; else it ends."""
        first = self._first
        if first is None:
            return None
        if _zygote_environment(first.python, first.environ, environment.sys_path) != environment:
            self._discard_first()
            return None
        self._first = None
        return first

    def _discard_first(self) -> None:
        """End the zygote of the spare agent, if it is unused."""
        first, self._first = self._first, None
        if first is not None:
            first.control.close()
            process_watch.reap(first.pid)

    def _retire(self) -> None:
        zygote, self._present = self._present, None
        if zygote is not None:
            zygote.retire()
            self._retired = {
                retired_zygote for retired_zygote in self._retired if retired_zygote.is_alive
            } | {zygote}


def _zygote_environment(
    python: str, env: Mapping[str, str], sys_path: Sequence[str]
) -> ZygoteEnvironment:
    lasting = {name: value for name, value in env.items() if not name.startswith(_WORKER_VARIABLES)}
    return ZygoteEnvironment(python, frozenset(lasting.items()), tuple(sys_path))
