"""Starting workers: forks of a zygote where that is sound, else fresh interpreters."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from kubetorch.errors import KubetorchError, WorkerDiedError
from kubetorch.lib import processes
from kubetorch.pod.handles import CallSink as CallSink
from kubetorch.pod.handles import LoadFailed as LoadFailed
from kubetorch.pod.handles import Worker as Worker
from kubetorch.pod.handles import WorkerProcess
from kubetorch.pod.handles import WorkerSpec as WorkerSpec
from kubetorch.pod.lines import Line as Line
from kubetorch.pod.links import OwnedPayload as OwnedPayload
from kubetorch.pod.links import Payload as Payload
from kubetorch.pod.zygotes import PROGRAM, Zygote, ZygoteError

OnStage = Callable[[str, str], None]

#: Bytes that the pipe of output holds; where that is not allowed, it holds what the system gives.
_PIPE_BYTES = 256 * 1024
_F_SETPIPE_SZ = 1031

#: Libraries that read variables of a rank while they are imported, or open a device: each worker
#: has to import them itself.
NOT_PRELOADED = frozenset(
    {"deepspeed", "horovod", "jax", "jaxlib", "mpi4py", "tensorflow", "torch_xla", "vllm"}
)
#: Variables that are for workers alone: a change of theirs does not need another zygote.
_WORKER_VARIABLES = ("KT_", "POD_")


class _Environment(NamedTuple):
    """What decides whether a zygote can be used."""

    python: str
    env: frozenset[tuple[str, str]]
    sys_path: tuple[str, ...]


class WorkerHost:
    """Starts the workers of one agent.

    Args:
        pod_name: For errors.
        on_line: Told of each line of each worker.
        on_exit: Told when a worker that was loaded ended without having been asked to.
    """

    def __init__(
        self,
        *,
        pod_name: str,
        on_line: Callable[[Line, Worker], None],
        on_exit: Callable[[Worker, KubetorchError], None],
    ) -> None:
        self._pod_name = pod_name
        self._on_line = on_line
        self._on_exit = on_exit
        self._zygote: Zygote | None = None
        self._environment: _Environment | None = None
        # Why forks are not sound, for an environment and what is preloaded in it.
        self._unfit: dict[tuple[_Environment, frozenset[str]], str] = {}
        self._lock = asyncio.Lock()
        self._workers: set[Worker] = set()

    async def start(self, spec: WorkerSpec, on_stage: OnStage) -> Worker:
        """Start a worker; it has loaded nothing yet.

        Args:
            spec: What it is to run.
            on_stage: Told of what happens, and why: `preloading`, `starting`.

        Raises:
            WorkerDiedError: The interpreter cannot be started.
        """
        sock, theirs = socket.socketpair()
        output, their_output = os.pipe()
        _enlarge(output)
        try:
            with theirs:
                process = await self._start(spec, (sock, theirs), (output, their_output), on_stage)
        except BaseException as error:
            sock.close()
            os.close(output)
            if isinstance(error, OSError):
                raise self._cannot_start(spec.python, error) from error
            raise
        finally:
            os.close(their_output)
        worker = Worker(
            spec,
            process,
            pod_name=self._pod_name,
            on_line=self._on_line,
            on_exit=self._on_worker_exit,
        )
        self._workers = {each for each in self._workers if each.is_alive} | {worker}
        return worker

    async def prewarm(
        self,
        python: str,
        env: Sequence[tuple[str, str]],
        sys_path: Sequence[str],
        preload: Sequence[str],
    ) -> None:
        """Have a zygote ready for workers that are started later.

        Args:
            python: Absolute path of the interpreter.
            env: The workers' environment.
            sys_path: Entries outside of the deployed code to import from.
            preload: Third-party modules.
        """
        environment = _environment(python, dict(env), sys_path)
        with contextlib.suppress(ZygoteError, OSError):  # `start` meets them again and says so
            async with self._lock:
                await self._ready_zygote(environment, dict(env), preload, _say_nothing)

    async def close(self) -> None:
        """End all workers and the zygote."""
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        async with self._lock:
            if self._zygote is not None:
                await self._zygote.close()
                self._zygote = None

    # --------------------------------------------------------------------------------- internals

    async def _start(
        self,
        spec: WorkerSpec,
        sockets: tuple[socket.socket, socket.socket],
        pipe: tuple[int, int],
        on_stage: OnStage,
    ) -> WorkerProcess:
        sock, theirs = sockets
        output, their_output = pipe
        environment = _environment(spec.python, dict(spec.env), spec.library_path)
        reason = ""
        for _ in range(2):  # a second time with a new zygote, if the first one is stale or gone
            async with self._lock:
                try:
                    zygote = await self._ready_zygote(
                        environment, dict(spec.env), spec.preload, on_stage
                    )
                    pid, pidfd = await zygote.fork(theirs, their_output)
                except ZygoteError as error:
                    reason = str(error)
                    if self._is_known_unfit(environment, spec.preload):
                        break
                    await self._drop_zygote()
                    continue
            find_status = _status_of_fork(zygote, pid)
            return WorkerProcess(pid, pidfd, sock, output, find_status)
        on_stage("starting", f"a fresh interpreter: {reason}")
        fresh = _start_fresh(spec, theirs.fileno(), their_output)
        return WorkerProcess(fresh.pid, None, sock, output, _status_of_child(fresh))

    async def _ready_zygote(
        self,
        environment: _Environment,
        env: Mapping[str, str],
        preload: Sequence[str],
        on_stage: OnStage,
    ) -> Zygote:
        """The zygote for this environment, with these modules imported.

        Raises:
            ZygoteError: Its forks would not be sound.
            OSError: The interpreter cannot be started.
        """
        wanted = [name for name in preload if name.partition(".")[0] not in NOT_PRELOADED]
        unfit = self._unfit.get((environment, frozenset(preload)))
        if unfit is not None:
            raise ZygoteError(unfit)
        zygote = self._zygote
        if zygote is None or not zygote.is_alive or self._environment != environment:
            await self._drop_zygote()
            zygote = Zygote(environment.python, env, environment.sys_path)
            self._zygote, self._environment = zygote, environment
        if not zygote.preloaded.issuperset(wanted):
            on_stage("preloading", ", ".join(wanted))
            try:
                await zygote.preload(wanted, lambda name: on_stage("preloading", name))
            except ZygoteError as error:
                await self._drop_zygote()
                self._unfit[environment, frozenset(preload)] = str(error)
                raise
        return zygote

    def _is_known_unfit(self, environment: _Environment, preload: Sequence[str]) -> bool:
        return (environment, frozenset(preload)) in self._unfit

    async def _drop_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()

    def _cannot_start(self, python: str, error: OSError) -> WorkerDiedError:
        failed = WorkerDiedError(
            f"the interpreter {python} cannot be started in {self._pod_name}: {error}",
            hint="deploy again with an interpreter that exists there",
        )
        failed.pod_name = self._pod_name
        return failed

    def _on_worker_exit(self, worker: Worker, error: KubetorchError) -> None:
        self._workers.discard(worker)
        self._on_exit(worker, error)


def _environment(python: str, env: Mapping[str, str], sys_path: Sequence[str]) -> _Environment:
    lasting = {name: value for name, value in env.items() if not name.startswith(_WORKER_VARIABLES)}
    return _Environment(python, frozenset(lasting.items()), tuple(sys_path))


def _start_fresh(spec: WorkerSpec, sock: int, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [spec.python, PROGRAM, "worker", str(sock), str(output)],
        env=dict(spec.env),
        stdin=subprocess.DEVNULL,
        pass_fds=[sock, output],
    )


def _status_of_fork(zygote: Zygote, pid: int) -> Callable[[], Awaitable[int | None]]:
    async def find() -> int | None:
        status = await zygote.status(pid)
        zygote.forget(pid)
        # An orphan of a zygote that is gone is a child of this process, a subreaper.
        return processes.exit_status(pid) if status is None else status

    return find


def _status_of_child(child: subprocess.Popen[bytes]) -> Callable[[], Awaitable[int | None]]:
    async def find() -> int | None:
        return child.poll()

    return find


def _enlarge(pipe: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE_BYTES)


def _say_nothing(_stage: str, _message: str) -> None:
    return None
