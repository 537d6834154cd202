"""The app of a pod: the one that runs now, who uses it, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from kubetorch.errors import CallableNotFoundError, CallRefusedError, KubetorchError, StartupError
from kubetorch.lib import deadlines, ports
from kubetorch.lib.changes import Changes
from kubetorch.pod.apps.process import AppProcess
from kubetorch.pod.apps.run import AppRun, Memory
from kubetorch.pod.workers.lines import Line
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.apps import AppView

#: Seconds that a request waits for an app that is being started.
PATIENCE = 30.0
#: Requests and WebSockets at one time.
REQUEST_LIMIT = 2000


class AppHost:
    """Starts apps, and knows the one that serves.

    Args:
        root: Folder of the pod.
        pod_name: For errors.
        on_line: Told of each line of an app, and of its generation.
        on_exit: Told of an app that serves and ended, but has to run.
        on_change: Told when the app begins or ends.
        on_activity: Told when the number of requests changes.
    """

    def __init__(
        self,
        root: Path,
        *,
        pod_name: str,
        on_line: Callable[[Line, int], None],
        on_exit: Callable[[AppProcess], None],
        on_change: Callable[[], None],
        on_activity: Callable[[], None],
    ) -> None:
        self._memory = Memory(root / "app.json")
        self._pod_name = pod_name
        self._on_line = on_line
        self._on_exit = on_exit
        self._on_change = on_change
        self._on_activity = on_activity
        self._process: AppProcess | None = None
        self._latest: AppProcess | None = None
        self._refusal: KubetorchError | None = None
        self._changes = Changes()
        self._requests = 0
        #: Seconds since the epoch of the last begin or end of a request, or end of an app.
        self.last = 0.0

    # --------------------------------------------------------------------------- the supervisor

    async def start(self, wanted: AppRun) -> AppProcess:
        """Start an app; it may not serve yet. One that is done is left at that.

        Raises:
            StartupError: Its port is taken.
        """
        port = wanted.app.port
        if port is not None and not ports.is_free(port):
            raise StartupError(
                f"port {port} is taken on the machine of {self._pod_name}, "
                f"so the app {wanted.app.command!r} cannot listen on it",
                hint="give it another one: pods that are processes share the ports of the machine",
            )
        self._latest = AppProcess(
            wanted,
            pod_name=self._pod_name,
            on_line=self._on_line,
            on_change=self._changed,
            ended=self._memory.find(wanted.generation),
        )
        return self._latest

    def serve(self, process: AppProcess) -> None:
        """Requests go to this one."""
        self._process, self._refusal = process, None
        self._changes.notify()

    def hold(self) -> None:
        """Requests wait for the next one."""
        self._process, self._refusal = None, None

    def refuse(self, error: KubetorchError) -> None:
        """None serves, and none is about to."""
        self._process, self._refusal = None, error
        self._changes.notify()

    def no_call(self, spec: WorkloadSpec) -> KubetorchError:
        """The refusal of calls."""
        return CallableNotFoundError(
            f"{spec.name} is an app, which has no callable", hint="its own routes are below /http/"
        )

    def _changed(self, process: AppProcess) -> None:
        ended = process.ended
        if ended is not None:
            self.last = time.time()
            if process.is_done and not process.is_asked:
                self._memory.keep(ended)
            elif process is self._process and not process.is_asked:
                self._on_exit(process)
        self._changes.notify()
        self._on_change()

    # ------------------------------------------------------------------------------ the routes

    @property
    def view(self) -> AppView | None:
        """The app, as the controller is told; `None` when there is none."""
        return None if self._latest is None else self._latest.view

    @property
    def alive(self) -> list[AppProcess]:
        """The app, as long as it lives."""
        return [self._latest] if self._latest is not None and self._latest.is_alive else []

    @property
    def busy(self) -> int:
        """Requests that are being answered, and 1 for a script that runs."""
        latest = self._latest
        runs = latest is not None and latest.is_alive and latest.is_script
        return self._requests + runs

    @property
    def is_public(self) -> bool:
        """Whether requests need no token."""
        return self._latest is not None and self._latest.app.public

    async def serving(self) -> AppProcess:
        """The app that takes requests, once there is one.

        Raises:
            KubetorchError: There is none, or it serves nothing.
        """
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            async with deadlines.timeout(PATIENCE):
                while self._refusal is None and (self._process is None or self._process.is_ending):
                    await self._changes.wait()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        process = self._process
        if process is None:
            raise CallRefusedError(
                f"pod {self._pod_name} has had no app that serves for {PATIENCE:g} s",
                hint="kt logs shows what it does",
            )
        if process.is_script:
            raise CallRefusedError(
                f"the app in {self._pod_name} serves nothing: it was deployed without a port",
                hint="kt.app(..., port=...)",
            )
        if not process.is_alive:
            raise CallRefusedError(f"{process.ending} in {self._pod_name}", hint="deploy it again")
        return process

    async def end(self, generation: int) -> None:
        """Wait for the end of the app of this generation, or until another one takes its place."""
        while True:
            latest = self._latest
            if latest is not None and latest.generation > generation:
                return
            if latest is not None and latest.generation == generation:
                await latest.wait()
                if latest.is_done or latest.is_asked:
                    return
            await self._changes.wait()

    def begin(self) -> None:
        """A request begins, which counts as activity until `finish`.

        Raises:
            CallRefusedError: There are too many.
        """
        if self._requests >= REQUEST_LIMIT:
            raise CallRefusedError(f"pod {self._pod_name} has {REQUEST_LIMIT} requests")
        self._count(1)

    def finish(self) -> None:
        """A request that began has ended."""
        self._count(-1)

    def _count(self, change: int) -> None:
        self._requests += change
        self.last = time.time()
        self._on_activity()
