"""The app of a pod: its runs, and the run that gets the requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from kubetorch.errors import (
    CallRefusedError,
    CallTimeoutError,
    KubetorchError,
    OutOfMemoryError,
    PodContainerError,
    ServiceHealthError,
    StartupError,
    WorkerDiedError,
)
from kubetorch.lib import backoff, deadlines, files, process_watch, processes, sockets
from kubetorch.lib.changes import Changes
from kubetorch.lib.decoders import json_decoder
from kubetorch.lib.http1 import AnswerReader, encoded, request_head
from kubetorch.lib.process_watch import ExitWatch
from kubetorch.lib.tasks import cancel_all
from kubetorch.pod.apps import stacks
from kubetorch.pod.apps.stacks import AppStacksFile
from kubetorch.pod.logs import Line, LogPipe
from kubetorch.pod.slots import Slots, Start, Ticket
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.worker_process.worker import MARKER
from kubetorch.specs.callable import AppSpec
from kubetorch.specs.compute import MOST_WAITING
from kubetorch.wire import routes
from kubetorch.wire.messages import AppView, QueueView, WorkerStacks

#: The number that a shell adds to the signal that ended its command.
_SIGNALLED = 128
#: Loopback addresses, of which an app may listen on a single one.
ADDRESSES = ("127.0.0.1", "::1")
#: Characters of a path that stay as they are.
_QUOTED = "/?&=%:@,;+$!*'()~#[]"
_PIECE = 4096
#: Exit codes of a shell whose command does not exist, or is no program.
_NOT_RUN_CODES = (126, 127)
_SHELL = "/bin/sh"
_SCRIPT = f'cd -- "$0" && exec {_SHELL} -c "$1"'
#: Said where a command does not listen on the port of its pod.
OWN_PORT = (
    "several pods of this machine share its ports, so each has one of its own: the app has to "
    "listen on PORT of its environment, which is {port} in the command"
)


class AppRun(msgspec.Struct, frozen=True):
    generation: int
    app: AppSpec
    #: Port that it is to listen on: the declared one, or one of this pod alone.
    port: int | None
    folder: str
    env: Mapping[str, str]
    stacks_file: str = ""
    #: Requests that it gets at once, and that may wait.
    concurrency: int | None = None
    max_queue: int = MOST_WAITING
    #: True if each request goes to the least busy pod.
    is_balanced: bool = False


class AppExit(msgspec.Struct, frozen=True):
    """The end of a run that must not be repeated."""

    generation: int
    exit_code: int
    started: float
    ended: float

    @property
    def view(self) -> AppView:
        return AppView(
            state="exited", exit_code=self.exit_code, started=self.started, ended=self.ended
        )


def exit_code(status: int | None) -> int:
    """An exit status as shells count it: 128 plus the signal's number for a killed process."""
    if status is None:
        return _SIGNALLED
    return _SIGNALLED - status if status < 0 else status


class AppExitFile:
    """Remembers on disk how the app ended: a restarted agent does not run it again."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find(self, generation: int) -> AppExit | None:
        try:
            app_exit = json_decoder(AppExit).decode(self._file.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        return app_exit if app_exit.generation == generation else None

    def write(self, ended: AppExit) -> None:
        """Write the end of a run. On a full disk it is lost, and the run would be repeated."""
        with contextlib.suppress(OSError):
            files.write_atomically(self._file, msgspec.json.encode(ended))


async def wait_until_healthy(port: int, path: str | None) -> str:
    """Wait until a server on this port answers; returns the address that it listens on."""
    pauses = backoff.exponential(
        first=TIMING.app_probe_first_delay_seconds, limit=TIMING.app_probe_longest_delay_seconds
    )
    while True:
        for address in ADDRESSES:
            try:
                async with deadlines.timeout(TIMING.app_probe_seconds):
                    if await _answers(address, port, path):
                        return address
            except (OSError, TimeoutError, asyncio.TimeoutError):
                continue
        await asyncio.sleep(next(pauses))


async def _wait_until_open(port: int | None) -> None:
    """Wait until a program listens on a port that is free now."""
    if port is None or not sockets.is_free(port):
        await asyncio.Event().wait()
    assert port is not None
    await wait_until_healthy(port, None)


async def _answers(address: str, port: int, path: str | None) -> bool:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        if path is None:
            return True
        host = f"[{address}]" if ":" in address else address
        # A path with blanks is requested as a browser does.
        target = quote(path, safe=_QUOTED)
        headers = [("Host", f"{host}:{port}"), ("Connection", "close")]
        writer.write(request_head("GET", target, encoded(headers)))
        answer = AnswerReader()
        while not answer.has_head:
            answer.feed(await reader.read(_PIECE))
        return answer.status == 200
    finally:
        writer.transport.abort()


class AppProcess(msgspec.Struct, eq=False, dict=True):
    """A run of an app, which may have ended."""

    app_run: AppRun
    pod_name: str
    service: str
    on_line: Callable[[Line, int], None]
    on_change: Callable[[AppProcess], None]
    ended: AppExit | None = None

    def __post_init__(self) -> None:
        self.app, self.port = self.app_run.app, self.app_run.port
        self.generation = self.app_run.generation
        #: The address that the app listens on.
        self.address = ADDRESSES[0]
        #: True once the agent ends the app.
        self.is_stopping = False
        self._is_settled = self.ended is not None
        self._last: deque[str] = deque(maxlen=LIMITS.app_error_lines)
        self._stacks = AppStacksFile(self.app_run.stacks_file)
        self._exited = asyncio.Event()
        self._is_out_of_time = asyncio.Event()
        self._exiting: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._marker = f"{MARKER}={secrets.token_hex(8)}"
        self.pid, self.started = 0, time.time()
        if self.ended is None:
            self._start(self.app_run)
        else:
            self._exited.set()

    def _start(self, app_run: AppRun) -> None:
        output, theirs = os.pipe()
        try:
            self.pid = processes.spawn(
                (_SHELL, "-c", _SCRIPT, app_run.folder, app_run.app.command),
                {**app_run.env, MARKER: self._marker.partition("=")[2]},
                output=theirs,
                errors=theirs,
            )
        except OSError as error:
            os.close(output)
            text = f"no shell can be started in {self.pod_name}: {error}"
            raise PodContainerError(text) from error
        finally:
            os.close(theirs)
        self.started = time.time()
        self._output = LogPipe(output, b"\x1eKT" + os.urandom(13), self._deliver)
        self._watch = ExitWatch(self.pid, self._on_end)

    # ------------------------------------------------------------------------------------ state

    @property
    def is_alive(self) -> bool:
        return self._exiting is None and self.ended is None

    @property
    def is_ending(self) -> bool:
        """True if the process has ended and its exit code is not known yet."""
        return self._exiting is not None and self.ended is None

    @property
    def is_script(self) -> bool:
        """True for an app without a port, which is done when it ends."""
        return self.port is None

    @property
    def is_done(self) -> bool:
        """True if the app has ended as intended, and is not started again."""
        return self.ended is not None and (self.is_script or self.ended.exit_code == 0)

    @property
    def ending(self) -> str:
        code = "" if self.ended is None else f" with exit code {self.ended.exit_code}"
        return f"the app ended{code}"

    def died(self) -> WorkerDiedError:
        """The error of a request that the app ran when it ended."""
        code = None if self.ended is None else self.ended.exit_code
        number = 0 if code is None else code - _SIGNALLED
        is_by_signal = 0 < number < signal.NSIG
        by_signal = f" ({processes.signal_name(number)})" if is_by_signal else ""
        rest = "is not started again" if self.is_done or self.is_stopping else "is started again"
        error = WorkerDiedError(
            f"{self.ending}{by_signal} in {self.pod_name} before it answered this request, "
            f"and {rest}",
            exit_code=-number if is_by_signal else code,
            hint=f"the request may have had an effect; kt logs {self.service} shows why it ended",
        )
        error.pod_name = self.pod_name
        return error

    @property
    def view(self) -> AppView:
        if self.ended is not None:
            return self.ended.view
        state = "running" if self._is_settled else "starting"
        return AppView(state=state, pid=self.pid, started=self.started)

    async def stacks(self) -> list[WorkerStacks]:
        """The stacks of each of its Python processes, or why there are none."""
        pids = [pid for pid in await self._find(processes.members) if self._stacks.answers(pid)]
        texts = [(pid, await self._stacks.ask(pid)) for pid in sorted(pids)]
        if not texts:
            reason = f"no Python of the app answers; {stacks.way_out(self.pid)}"
            texts = [(self.pid, reason)]
        return [
            WorkerStacks(self.pod_name, pid, self.generation, None, text) for pid, text in texts
        ]

    async def wait(self) -> None:
        """Wait until the app has ended, and all of its output was read."""
        await self._exited.wait()

    async def ends_within(self, seconds: float) -> bool:
        """True if the app has ended, or ends within this time."""
        await deadlines.wait_at_most(seconds, self._exited.wait())
        return self.ended is not None

    # -------------------------------------------------------------------------------- its begin

    async def wait_until_serving(self, timeout: float) -> None:
        """Wait until the app serves; an app without a port only has to run for a moment."""
        if self._is_settled:
            return
        exit_ = asyncio.ensure_future(self._exited.wait())
        port, path = self.port, self.app.health_check
        if port is None:
            healthy = asyncio.ensure_future(asyncio.sleep(TIMING.app_settle_seconds, self.address))
        else:
            healthy = asyncio.ensure_future(wait_until_healthy(port, path))
        # An app that ignores its own port listens on the declared one, as its siblings would.
        declared = self.app.port if port != self.app.port else None
        elsewhere = asyncio.ensure_future(_wait_until_open(declared))
        try:
            await asyncio.wait(
                (exit_, healthy, elsewhere), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if elsewhere.done():
                ends = (exit_, healthy)
                await asyncio.wait(
                    ends, timeout=TIMING.app_other_port_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not healthy.done() and not exit_.done():
                    raise self._failure(f"listens on port {declared}, and not on {port}")
            if self.ended is not None:
                code = self.ended.exit_code
                if port is not None:
                    raise self._failure(
                        f"ended with exit code {code} before it answered on port {port}"
                    )
                if code in _NOT_RUN_CODES:
                    raise self._failure(f"could not be run: exit code {code}")
            elif not healthy.done():
                request_text = f"GET {path} with 200 " if path else ""
                raise self._failure(f"did not answer {request_text}on port {port}", timeout)
            else:
                self.address = healthy.result()
        finally:
            await cancel_all((exit_, healthy, elsewhere))
        self._is_settled = True
        self.on_change(self)

    def _failure(self, problem: str, seconds: float | None = None) -> ServiceHealthError:
        within = "" if seconds is None else f" within {seconds:.0f} s"
        if self.port != self.app.port:
            problem = f"{problem}, a port of this pod alone"
        lines = "".join(f"\n  {line}" for line in self._last)
        error = ServiceHealthError(
            f"the app {self.app.command!r} in {self.pod_name} {problem}{within}"
            + (f"; its last lines:{lines}" if lines else "; it wrote nothing"),
            hint=OWN_PORT
            if self.port != self.app.port
            else f"kt logs {self.service} shows all of it"
            if seconds is None
            else "does it listen on that port? kt.Compute(launch_timeout=...) allows more time",
        )
        error.pod_name = self.pod_name
        return error

    # ---------------------------------------------------------------------------------- its end

    async def drain(self, grace: float) -> None:
        """End the app: SIGTERM to all its processes, and SIGKILL for those that stay."""
        self.is_stopping = True
        if self.is_alive:
            self._signal(signal.SIGTERM)
            await deadlines.wait_at_most(min(grace, TIMING.app_stop_seconds), self._exited.wait())
        await self.kill()

    async def kill(self) -> None:
        """End the app and all processes that it started, now."""
        self.is_stopping = True
        self._is_out_of_time.set()
        if self.is_alive:
            self._signal(signal.SIGKILL)
        async with deadlines.timeout(TIMING.app_kill_seconds):
            await self._exited.wait()

    def abort(self, error: OutOfMemoryError) -> None:
        """End the app because it used too much memory; its log says so."""
        self._deliver(Line(error.message, "stderr", None, time.time(), None))
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def _on_end(self) -> None:
        if self._exiting is None:
            self._exiting = self._loop.create_task(self._finish_exit())

    async def _finish_exit(self) -> None:
        """End the app's other processes after its first one, read their output, report the end."""
        status = processes.exit_status(self.pid)
        try:
            if self.is_stopping:
                await self._wait_for_descendants()
            self._signal(signal.SIGKILL)
            # Until these processes are gone, the app's port is taken.
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                async with deadlines.timeout(TIMING.app_leftover_seconds):
                    await process_watch.wait_for_ends(await self._find(processes.kill_session))
            self._output.close()
        finally:
            # Whatever failed: who waits for the end of the app goes on.
            code = exit_code(status)
            self.ended = AppExit(self.generation, code, self.started, time.time())
            self._exited.set()
            self.on_change(self)

    async def _wait_for_descendants(self) -> None:
        """Wait for the shell's children: the shell ends at SIGTERM at once, they get the grace."""
        pids = await self._find(processes.members)
        ends = asyncio.ensure_future(process_watch.wait_for_ends(pids))
        no_time = asyncio.ensure_future(self._is_out_of_time.wait())
        await asyncio.wait((ends, no_time), return_when=asyncio.FIRST_COMPLETED)
        await cancel_all((ends, no_time))

    async def _find(self, look: Callable[..., list[int]]) -> list[int]:
        # Processes that left the session are found by their marker.
        return await asyncio.to_thread(look, self.pid, marker=self._marker)

    # ----------------------------------------------------------------------------------- output

    def _deliver(self, line: Line) -> None:
        self._last.append(line.text)
        self.on_line(line, self.generation)


class AppHost(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """Starts apps, and leads requests to the app that serves."""

    root: Path
    pod_name: str
    service: str
    on_line: Callable[[Line, int], None]
    on_exit: Callable[[AppProcess], None]
    on_change: Callable[[], None]
    on_activity: Callable[[], None]

    def __post_init__(self) -> None:
        self._exit_file = AppExitFile(self.root / "app.json")
        self._process: AppProcess | None = None
        self._latest: AppProcess | None = None
        self._refusal: KubetorchError | None = None
        self._changes = Changes()
        #: Requests that wait or are being answered, and those that came since the agent's start.
        self.requests = self.total = 0
        # Why no more requests are accepted, and why those that are answered end.
        self._stopping: KubetorchError | None = None
        self._ending: KubetorchError | None = None
        # The tasks that answer requests.
        self._answering: set[asyncio.Task[object]] = set()
        # The slots of the requests, where they are bounded; and each waiting request with the
        # future of its turn and the time since which it waits.
        self._slots = Slots()
        self._slots.add(0)
        self._turns: dict[str, tuple[asyncio.Future[None], float]] = {}
        self._numbers = itertools.count(1)
        #: Seconds since the epoch of the last begin or end of a request, or end of an app.
        self.last = 0.0

    # --------------------------------------------------------------------------- the supervisor

    async def start(self, app_run: AppRun) -> AppProcess:
        """Start an app, which may not serve yet; an app that is done is not run again."""
        port = app_run.port
        if port is not None and not sockets.is_free(port):
            raise StartupError(
                f"port {port} is taken on the machine of {self.pod_name}, "
                f"so the app {app_run.app.command!r} cannot listen on it",
                hint="choose another port; pods without a cluster share the ports of the machine",
            )
        self._latest = AppProcess(
            app_run,
            pod_name=self.pod_name,
            service=self.service,
            on_line=self.on_line,
            on_change=self._changed,
            ended=self._exit_file.find(app_run.generation),
        )
        return self._latest

    def serve(self, process: AppProcess) -> None:
        """Lead requests to this app."""
        self._process, self._refusal = process, None
        self._let_in(self._slots.resize(process.app_run.concurrency, process.app_run.max_queue))
        self._changes.notify()

    def hold(self) -> None:
        """Let requests wait for the next app."""
        self._process, self._refusal = None, None

    def refuse(self, error: KubetorchError) -> None:
        """Refuse requests: no app serves, and none is about to."""
        self._process, self._refusal = None, error
        self._changes.notify()

    def _changed(self, process: AppProcess) -> None:
        ended = process.ended
        if ended is not None:
            self.last = time.time()
            if process.is_done and not process.is_stopping:
                self._exit_file.write(ended)
            elif process is self._process and not process.is_stopping:
                self.on_exit(process)
        self._changes.notify()
        self.on_change()

    # ------------------------------------------------------------------------------ the routes

    @property
    def view(self) -> AppView | None:
        """The app, as the controller gets it; `None` without an app."""
        return None if self._latest is None else self._latest.view

    @property
    def latest(self) -> AppProcess | None:
        return self._latest

    @property
    def alive(self) -> list[AppProcess]:
        return [self._latest] if self._latest is not None and self._latest.is_alive else []

    @property
    def busy(self) -> int:
        """Requests that are being answered, and 1 for a script that runs."""
        latest = self._latest
        runs = latest is not None and latest.is_alive and latest.is_script
        return self.requests + runs

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._slots.waiting

    @property
    def is_public(self) -> bool:
        return self._latest is not None and self._latest.app.public

    async def serving(self) -> AppProcess:
        """Wait for the app that serves requests, and return it."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            async with deadlines.timeout(TIMING.app_serving_wait_seconds):
                while self._waits_for_app:
                    await self._changes.wait()
        self.check_stopping()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        process = self._process
        if process is None:
            raise CallRefusedError(
                f"pod {self.pod_name} has had no app that serves "
                f"for {TIMING.app_serving_wait_seconds:g} s",
                hint="kt logs shows what it does",
            )
        if process.is_script:
            raise CallRefusedError(
                f"the app in {self.pod_name} serves nothing: it was deployed without a port",
                hint="kt.app(..., port=...)",
            )
        if not process.is_alive:
            raise CallRefusedError(f"{process.ending} in {self.pod_name}", hint="deploy it again")
        return process

    @property
    def _waits_for_app(self) -> bool:
        is_refused = self._refusal is not None or self._stopping is not None
        return not is_refused and (self._process is None or self._process.is_ending)

    async def end(self, generation: int) -> None:
        """Wait for the end of the app of this generation, or until another app replaces it."""
        while True:
            latest = self._latest
            if latest is not None and latest.generation > generation:
                return
            if latest is not None and latest.generation == generation:
                await latest.wait()
                if latest.is_done or latest.is_stopping:
                    return
            await self._changes.wait()

    def stop_accepting(self, error: KubetorchError) -> None:
        """Refuse new requests, and those that wait for a slot or the app: the pod ends."""
        self._stopping = error
        for turn, _ in list(self._turns.values()):
            if not turn.done():
                turn.set_exception(error.with_traceback(None))
        self._changes.notify()

    def check_stopping(self) -> None:
        """Refuse a request if the pod ends."""
        if self._stopping is not None:
            raise self._stopping.with_traceback(None)

    def end_all(self, error: KubetorchError) -> None:
        """End the requests that are still being answered: the time of the pod is over."""
        self._ending = error
        for task in self._answering:
            task.cancel()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a task answers a request: at the end of the pod it raises the reason instead."""
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._ending is None:
                raise
            raise self._ending.with_traceback(None) from None
        finally:
            self._answering.discard(task)

    def begin(self) -> None:
        """Count a request that begins as activity, until `finish`."""
        self.check_stopping()
        if self.requests - self._slots.waiting >= LIMITS.app_requests:
            raise CallRefusedError(f"pod {self.pod_name} has {LIMITS.app_requests} requests")
        self.total += 1
        self._count(1)

    def finish(self) -> None:
        self._count(-1)

    @property
    def queue(self) -> QueueView | None:
        """The numbers of running and waiting requests, where they are bounded."""
        if self._slots.limit is None:
            return None
        line = self._slots.line
        return QueueView(
            slots=self._slots.limit,
            taken=self._slots.running,
            waiting=len(line),
            since=self._turns[line[0]][1] if line else 0.0,
        )

    async def take_slot(self, caller: str, timeout: float | None) -> Callable[[], None]:
        """Wait until a request of this caller may go to the app, where they are bounded.

        Returns:
            A function that gives the slot back. It may be called twice.

        Raises:
            QueueFullError: Too many wait.
            CallTimeoutError: Its turn did not come within so many seconds.
        """
        request = str(next(self._numbers))

        def leave() -> None:
            self._let_in(self._slots.end(request))

        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[request] = (turn, time.time())
        try:
            if self._slots.offer(Ticket(request, caller)) is None:
                async with deadlines.timeout(timeout):
                    await turn
        except (TimeoutError, asyncio.TimeoutError) as error:
            leave()
            raise CallTimeoutError(
                f"the request did not begin within its {routes.QUEUE_TIMEOUT} of {timeout:g} s: "
                f"{self._slots.waiting} others wait for their turn in {self.pod_name}",
                hint="kt status shows what runs",
            ) from error
        except BaseException:
            leave()
            raise
        finally:
            del self._turns[request]
        return leave

    def _let_in(self, starts: Sequence[Start]) -> None:
        for start in starts:
            turn, _ = self._turns[start.call]
            if not turn.done():
                turn.set_result(None)

    def _count(self, change: int) -> None:
        self.requests += change
        self.last = time.time()
        self.on_activity()
