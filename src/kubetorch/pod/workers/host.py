"""Starting the workers of an agent. See docs/design/workers.md.

WorkerHost ── Zygotes ── Zygote ══ zygote process
    │                                  │ forks
    └─ Worker ── Link, Output ════ worker process
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence

from kubetorch.errors import KubetorchError, WorkerDiedError
from kubetorch.lib import processes
from kubetorch.pod.workers.forking import Belongings, OnStage, Zygotes
from kubetorch.pod.workers.handles import Worker as Worker
from kubetorch.pod.workers.handles import WorkerProcess
from kubetorch.pod.workers.launching import Launched
from kubetorch.pod.workers.lines import Line as Line
from kubetorch.pod.workers.links import OwnedPayload as OwnedPayload
from kubetorch.pod.workers.links import Payload as Payload
from kubetorch.pod.workers.terms import CallSink as CallSink
from kubetorch.pod.workers.terms import LoadFailed as LoadFailed
from kubetorch.pod.workers.terms import WorkerSpec as WorkerSpec
from kubetorch.pod.workers.zygotes import Zygote, ZygoteError

#: Variable by which all that a worker started is found.
MARKER = "KT_WORKER"
#: Bytes that the pipe of output holds; where that is not allowed, it holds what the system gives.
_PIPE_BYTES = 256 * 1024
_F_SETPIPE_SZ = 1031


class WorkerHost:
    """Starts the workers of one agent.

    Args:
        pod_name: For errors.
        on_line: Told of each line of each worker.
        on_exit: Told when a worker that was loaded ended without having been asked to.
        zygote: A zygote that was started already.
    """

    def __init__(
        self,
        *,
        pod_name: str,
        on_line: Callable[[Line, Worker], None],
        on_exit: Callable[[Worker, KubetorchError], None],
        zygote: Launched | None = None,
    ) -> None:
        self._pod_name = pod_name
        self._on_line = on_line
        self._on_exit = on_exit
        self._zygotes = Zygotes(zygote)
        self._workers: set[Worker] = set()

    @property
    def alive(self) -> list[Worker]:
        """The workers that live."""
        return [worker for worker in self._workers if worker.is_alive]

    @property
    def zygote_pid(self) -> int | None:
        """The process that workers are forked from at present."""
        return self._zygotes.pid

    async def start(self, spec: WorkerSpec, on_stage: OnStage) -> Worker:
        """Start a worker; it has loaded nothing yet.

        It is a fork of a zygote where that is sound, else a fresh interpreter.

        Args:
            spec: What it is to run.
            on_stage: Told of what happens, and why: `preloading` and the name of a module,
                `starting` and why a fresh interpreter is needed.

        Raises:
            WorkerDiedError: The interpreter cannot be started.
        """
        sock, theirs = socket.socketpair()
        output, their_output = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(output, _F_SETPIPE_SZ, _PIPE_BYTES)
        belongings = Belongings(theirs, their_output, f"{MARKER}={secrets.token_hex(8)}")
        try:
            zygote, (pid, pidfd) = await self._zygotes.start(
                spec.python, dict(spec.env), spec.library_path, spec.preload, belongings, on_stage
            )
        except BaseException as error:
            sock.close()
            os.close(output)
            if isinstance(error, (OSError, ZygoteError)):
                raise self._cannot_start(spec.python, error) from error
            raise
        finally:
            theirs.close()
            os.close(their_output)
        worker = Worker(
            spec,
            WorkerProcess(pid, pidfd, sock, output, belongings.marker, _status_of(zygote, pid)),
            pod_name=self._pod_name,
            on_line=self._on_line,
            on_exit=self._on_exit,
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
            sys_path: Entries outside of the deployed code to import from, as
                `WorkerSpec.library_path`.
            preload: Third-party modules.
        """
        with contextlib.suppress(ZygoteError, OSError):  # `start` meets them again and says so
            await self._zygotes.prewarm(python, dict(env), sys_path, preload)

    async def close(self) -> None:
        """End all workers and zygotes."""
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        await self._zygotes.close()

    def _cannot_start(self, python: str, error: Exception) -> WorkerDiedError:
        failed = WorkerDiedError(
            f"the interpreter {python} cannot be started in {self._pod_name}: {error}",
            hint="deploy again with an interpreter that exists there",
        )
        failed.pod_name = self._pod_name
        return failed


def _status_of(zygote: Zygote, pid: int) -> Callable[[], Awaitable[int | None]]:
    async def find() -> int | None:
        status = await zygote.status(pid)
        zygote.forget(pid)
        # An orphan of a zygote that is gone is a child of this process, a subreaper.
        return processes.exit_status(pid) if status is None else status

    return find
