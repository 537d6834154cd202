"""One run of an app: a shell and all that it starts, from its first process to its last."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable

from kubetorch.errors import OutOfMemoryError, PodContainerError, ServiceHealthError
from kubetorch.lib import deadlines, processes, spawning
from kubetorch.lib.processes import ExitWatch
from kubetorch.pod.apps import health, run
from kubetorch.pod.apps.run import AppRun, Ended
from kubetorch.pod.workers.host import MARKER
from kubetorch.pod.workers.lines import Line, Output
from kubetorch.wire.apps import AppView

#: Seconds that an app has to end after SIGTERM.
STOP_GRACE = 10.0
#: Seconds for a killed app to be gone.
KILL_TIMEOUT = 10.0
#: Seconds in which a command that cannot be run at all is noticed.
SETTLE = 0.2
#: Lines that an error about an app ends with.
LAST_LINES = 20
#: What a shell ends with when there is no such command, or it is no program.
_NOT_RUN = (126, 127)

_SHELL = "/bin/sh"
_SCRIPT = f'cd -- "$0" && exec {_SHELL} -c "$1"'


class AppProcess:
    """An app that runs, or has run.

    Args:
        wanted: What it is.
        pod_name: For errors.
        on_line: Told of each line that it writes.
        on_change: Told when it begins to serve, and when it ends.
        ended: How this run ended in an earlier life of the agent; then nothing is started.

    Raises:
        PodContainerError: There is no shell.
    """

    def __init__(
        self,
        wanted: AppRun,
        *,
        pod_name: str,
        on_line: Callable[[Line, int], None],
        on_change: Callable[[AppProcess], None],
        ended: Ended | None = None,
    ) -> None:
        self.app = wanted.app
        self.generation = wanted.generation
        self._pod_name = pod_name
        self._on_line = on_line
        self._on_change = on_change
        #: Where it listens.
        self.address = health.ADDRESSES[0]
        #: Whether it was asked to end.
        self.is_asked = False
        self._is_settled = ended is not None
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.ended = ended
        self._exited = asyncio.Event()
        self._burial: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._marker = f"{MARKER}={secrets.token_hex(8)}"
        self.pid, self.started = 0, time.time()
        if ended is None:
            self._start(wanted)
        else:
            self._exited.set()

    def _start(self, wanted: AppRun) -> None:
        output, theirs = os.pipe()
        try:
            self.pid = spawning.spawn(
                (_SHELL, "-c", _SCRIPT, wanted.folder, wanted.app.command),
                {**dict(wanted.env), MARKER: self._marker.partition("=")[2]},
                output=theirs,
                errors=theirs,
            )
        except OSError as error:
            os.close(output)
            text = f"no shell can be started in {self._pod_name}: {error}"
            raise PodContainerError(text) from error
        finally:
            os.close(theirs)
        self.started = time.time()
        self._output = Output(output, b"\x1eKT" + os.urandom(13), self._deliver)
        self._loop.add_reader(output, self._read_output)
        self._watch = ExitWatch(self.pid, self._on_end)

    # ------------------------------------------------------------------------------------ state

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._burial is None and self.ended is None

    @property
    def is_ending(self) -> bool:
        """Whether it has ended and it is not known yet with what."""
        return self._burial is not None and self.ended is None

    @property
    def is_script(self) -> bool:
        """Whether it serves nothing, and is done when it ends."""
        return self.app.port is None

    @property
    def is_done(self) -> bool:
        """Whether it has ended as it was meant to: it is not to be started again."""
        return self.ended is not None and (self.is_script or self.ended.exit_code == 0)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = "" if self.ended is None else f" with exit code {self.ended.exit_code}"
        return f"the app ended{code}"

    @property
    def view(self) -> AppView:
        """As the controller is told."""
        if self.ended is not None:
            return self.ended.view
        state = "running" if self._is_settled else "starting"
        return AppView(state=state, pid=self.pid, started=self.started)

    async def wait(self) -> None:
        """Wait until it has ended, and everything that it wrote was read."""
        await self._exited.wait()

    # -------------------------------------------------------------------------------- its begin

    async def settle(self, timeout: float) -> None:
        """Wait until it serves, or, if it serves nothing, until it is sure that it runs.

        Args:
            timeout: Seconds that it has.

        Raises:
            ServiceHealthError: It ended, or does not answer; with its last lines.
        """
        if self._is_settled:
            return
        exit_ = asyncio.ensure_future(self._exited.wait())
        healthy = asyncio.ensure_future(self._healthy())
        try:
            await asyncio.wait(
                (exit_, healthy), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if self.ended is not None:
                self._check_exit(self.ended.exit_code)
            elif not healthy.done():
                what = self.app.health_check
                asked = f"GET {what} with 200 " if what else ""
                raise self._failure(f"did not answer {asked}on port {self.app.port}", timeout)
            else:
                self.address = healthy.result()
        finally:
            for waiting in (exit_, healthy):
                waiting.cancel()
            await asyncio.gather(exit_, healthy, return_exceptions=True)
        self._is_settled = True
        self._on_change(self)

    async def _healthy(self) -> str:
        if self.app.port is None:
            await asyncio.sleep(SETTLE)
            return self.address
        return await health.wait(self.app.port, self.app.health_check)

    def _check_exit(self, code: int) -> None:
        if not self.is_script:
            raise self._failure(
                f"ended with exit code {code} before it answered on port {self.app.port}"
            )
        if code in _NOT_RUN:
            raise self._failure(f"could not be run: exit code {code}")

    def _failure(self, what: str, seconds: float | None = None) -> ServiceHealthError:
        within = "" if seconds is None else f" within {seconds:.0f} s"
        lines = "".join(f"\n  {line}" for line in self._last)
        error = ServiceHealthError(
            f"the app {self.app.command!r} in {self._pod_name} {what}{within}"
            + (f"; its last lines:{lines}" if lines else "; it wrote nothing"),
            hint="kt logs shows all of it"
            if seconds is None
            else "does it listen on that port? kt.Compute(launch_timeout=...) allows more time",
        )
        error.pod_name = self._pod_name
        return error

    # ---------------------------------------------------------------------------------- its end

    async def drain(self, grace: float) -> None:
        """End it: SIGTERM to all its processes, and SIGKILL for those that stay.

        Args:
            grace: Seconds between the two, at most `STOP_GRACE`.
        """
        self.is_asked = True
        if self.is_alive:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                async with deadlines.timeout(min(grace, STOP_GRACE)):
                    await self._exited.wait()
        await self.kill()

    async def kill(self) -> None:
        """End it and all that it started, now."""
        self.is_asked = True
        if self.is_alive:
            self._signal(signal.SIGKILL)
        async with deadlines.timeout(KILL_TIMEOUT):
            await self._exited.wait()

    def condemn(self, error: OutOfMemoryError) -> None:
        """End it because it used too much memory; its log says so."""
        self._deliver(Line(error.message, "stderr", None, time.time(), None))
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def _on_end(self) -> None:
        if self._burial is None:
            self._burial = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        """Its first process has ended: end the others, read what they wrote, say so."""
        status = processes.exit_status(self.pid)
        self._signal(signal.SIGKILL)
        # What left the session is found by its marker.
        kill = functools.partial(processes.kill_session, self.pid, marker=self._marker)
        for pid in await self._loop.run_in_executor(None, kill):
            processes.reap(pid)
        self._loop.remove_reader(self._output.descriptor)
        self._output.close()
        code = run.exit_code(status)
        self.ended = Ended(self.generation, code, self.started, time.time())
        self._exited.set()
        self._on_change(self)

    # ----------------------------------------------------------------------------------- output

    def _read_output(self) -> None:
        if not self._output.read():
            self._loop.remove_reader(self._output.descriptor)

    def _deliver(self, line: Line) -> None:
        self._last.append(line.text)
        self._on_line(line, self.generation)
