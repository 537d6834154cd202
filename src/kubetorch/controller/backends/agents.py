"""One pod of the process backend: an agent process that is started again when it ends.

      start ──► Running ──(exit)──► Pending ──(back-off)──► start
                   │                   │ third exit without having been ready in between
                   │                   ▼
                   │                Failed, with the last lines of agent.log; still started again
                   └──(end)──► Terminating ──► gone, with every process that it started

What an agent starts inherits `MARK` in its environment, and mostly its session. Both are searched
when it has ended, so nothing of it is left whatever its programs did.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from kubetorch.controller.backends.attaching import Given
from kubetorch.controller.backends.base import Phase, PodStatus
from kubetorch.controller.backends.site import Site
from kubetorch.controller.backends.spare import Spare
from kubetorch.controller.backends.spares import Spares
from kubetorch.controller.state import PodRecord, PodState
from kubetorch.errors import KubetorchError, ServiceHealthError
from kubetorch.lib import backoff, deadlines, files, identity, ports, processes, spawning
from kubetorch.lib.clock import Clock, Timer
from kubetorch.wire import failures
from kubetorch.wire.podenv import MARK

#: Exits without having been ready in between after which a pod is said to be unable to start.
CRASH_LIMIT = 3
#: Lines of `agent.log` that the error then shows.
SHOWN_LINES = 20
# Seconds after which an agent that ends is started at once, as if it had never ended before.
_STABLE = 60.0
# Seconds between the end of a pod's grace and SIGKILL: what its agent needs to say goodbye.
_EXIT_MARGIN = 2.0
_LOG = "agent.log"
_LOG_LIMIT = 8 * 1024 * 1024
# A process that is killed may have started others in the meantime.
_KILL_ROUNDS = 5


class Pod:
    """One pod.

    Args:
        record: What is kept of it.
        site: Where it lives.
        give: What it is given, told its folder.
        state: Where its record is kept.
        spares: Agents that were started before they were needed.
        clock: For back-off.
        on_change: What to call when something about it changed.
    """

    def __init__(
        self,
        record: PodRecord,
        *,
        site: Site,
        give: Callable[[Path], Given],
        state: PodState,
        spares: Spares,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self.record = record
        #: Made from an older template; it ends when its successor serves.
        self.is_retiring = False
        #: Somebody has decided to end it.
        self.is_leaving = False
        #: It served, or may have served, what was wanted.
        self.was_ready = False
        self._site = site
        self._give = give
        self._state = state
        self._spares = spares
        self._clock = clock
        self._on_change = on_change
        self._watch: processes.ExitWatch | None = None
        self._restart: Timer | None = None
        self._exits = 0
        self._delays = self._new_delays()
        self._reason = ""
        self._failure: ServiceHealthError | None = None
        self._ended: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------- questions

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self._site.folder(self.record.namespace, self.record.name)

    @property
    def is_running(self) -> bool:
        """Whether its agent lives."""
        return self._watch is not None

    def status(self) -> PodStatus:
        """What is known of it."""
        record, phase = self.record, self._phase()
        return PodStatus(
            name=record.name,
            ordinal=record.ordinal,
            phase=phase,
            url=f"http://{ports.LOOPBACK}:{record.port}",
            is_retiring=self.is_retiring or self.is_leaving,
            restarts=record.restarts,
            reason=self._reason,
            failure=None if self._failure is None else failures.describe(self._failure).to_dict(),
            pid=record.pid if self.is_running else None,
            started=record.started,
            is_down=phase in ("Pending", "Failed"),
        )

    def _phase(self) -> Phase:
        if self.is_leaving or self._ended is not None:
            return "Terminating"
        if self.is_running:
            return "Running"
        return "Pending" if self._failure is None else "Failed"

    # ------------------------------------------------------------------------------- beginning

    def start(self) -> None:
        """Start its agent; if that fails it is tried again, as when an agent ends."""
        self._cancel_restart()
        try:
            self._start()
        except (OSError, KubetorchError) as error:
            self._fell(f"its agent could not be started: {error}")

    def _start(self) -> None:
        given = self._give(self.folder)
        spare = self._spares.take()
        self._keep(replace(self.record, port=self._port(), pid=0, start_time=""))
        variables = self._site.prepare(self.record, given, now=self._clock.time())
        pid = self._become(spare, variables) or self._spawn(variables)
        started, start_time = self._clock.time(), identity.start_time(pid) or ""
        self._keep(replace(self.record, pid=pid, start_time=start_time, started=started))
        self._observe(pid)

    def restart(self) -> None:
        """Start its agent once more."""
        self.record = replace(self.record, restarts=self.record.restarts + 1)
        self.start()

    def adopt(self) -> bool:
        """Take up the agent that an earlier controller started; whether it lives."""
        record = self.record
        if not record.pid or identity.start_time(record.pid) != record.start_time:
            return False
        self._observe(record.pid)
        return True

    def retry(self) -> None:
        """Start its agent now if it is waiting for its next attempt."""
        if self._restart is not None:
            self._failure = None
            self._exits = 0
            self._delays = self._new_delays()
            self.restart()

    def mark_ready(self) -> None:
        """It serves: it can start."""
        self.was_ready = True
        self._exits = 0
        self._failure = None

    def _observe(self, pid: int) -> None:
        self._reason = ""
        self._watch = processes.ExitWatch(pid, self._exited)
        self._on_change()

    def _port(self) -> int:
        own = (self.record.namespace, self.record.name)
        others = (pod for pod in self._state.pods() if (pod.namespace, pod.name) != own)
        taken = {pod.port for pod in others}
        port = self.record.port
        is_usable = port and port not in taken and ports.is_free(port)
        return port if is_usable else ports.choose(taken)

    def _become(self, spare: Spare | None, environment: Mapping[str, str]) -> int | None:
        """The process of a spare that is this pod's agent now; `None` if there is none."""
        if spare is None:
            return None
        self._keep(replace(self.record, mark=spare.mark))
        try:
            spare.become(environment, str(self.folder / _LOG))
        except OSError:  # it died
            processes.reap(spare.pid)
            return None
        return spare.pid

    def _spawn(self, environment: Mapping[str, str]) -> int:
        # Known before it runs: should the controller die in between, its successor finds it.
        mark = self._site.new_mark()
        self._keep(replace(self.record, mark=mark))
        log = self.folder / _LOG
        if log.exists() and log.stat().st_size > _LOG_LIMIT:
            log.replace(log.with_suffix(".log.1"))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return spawning.spawn(
                self._site.command, {**environment, MARK: mark}, output=output, errors=output
            )
        finally:
            os.close(output)

    def _keep(self, record: PodRecord) -> None:
        self.record = record
        self._state.put_pod(record)

    # ---------------------------------------------------------------------------------- ending

    async def end(self, grace: float) -> None:
        """End its agent and all that it started; returns when nothing is left.

        Args:
            grace: Seconds that the agent has to let its calls end.
        """
        self.is_leaving = True
        if self._ended is not None:
            hurry = self._clock.call_later(grace + _EXIT_MARGIN, self._kill_all)
            await asyncio.shield(self._ended)
            hurry.cancel()
            return
        self._ended = asyncio.get_running_loop().create_future()
        self._cancel_restart()
        self._on_change()
        try:
            await self._stop(grace)
        finally:
            self._ended.set_result(None)

    async def discard(self) -> None:
        """Forget it, once it has ended: remove its record and its folder."""
        import shutil  # noqa: PLC0415  # costs 3 ms of each start

        self._state.delete_pods([(self.record.namespace, self.record.name)])
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other pods of the namespace are in it
            self.folder.parent.rmdir()

    def release(self) -> None:
        """Do not watch it any more: the controller stops, and the pod goes on."""
        self._cancel_restart()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    async def _stop(self, grace: float) -> None:
        if self._watch is None:
            return
        self._watch.close()
        pid = self.record.pid
        if grace > 0:
            _signal(pid, signal.SIGTERM)
            await _wait_for_ends({pid}, timeout=grace + _EXIT_MARGIN)
        for _ in range(_KILL_ROUNDS):
            killed = await asyncio.to_thread(self._kill_all)
            # SIGKILL has no exception; what takes long is a process that the kernel holds.
            await _wait_for_ends({pid, *killed}, timeout=_EXIT_MARGIN)
            if not killed:
                break
        processes.exit_status(pid)
        self._watch = None

    def _kill_all(self) -> list[int]:
        """Kill the session of its agent, and whatever carries its mark elsewhere."""
        return processes.kill_session(self.record.pid, marker=f"{MARK}={self.record.mark}")

    def _exited(self) -> None:
        self._watch = None
        code = processes.exit_status(self.record.pid)
        self._kill_all()
        self._fell(f"its agent ended with {_describe_exit(code)}")

    def _fell(self, reason: str) -> None:
        """It does not run: say why, and try again."""
        self._reason = reason
        self._exits += 1
        if self._exits >= CRASH_LIMIT:
            self._failure = self._crash_loop()
        if self._clock.time() - self.record.started > _STABLE:
            self._delays = self._new_delays()
        self._restart = self._clock.call_later(next(self._delays), self.restart)
        self._on_change()

    def _cancel_restart(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None

    def _crash_loop(self) -> ServiceHealthError:
        lines = files.tail(self.folder / _LOG, SHOWN_LINES)
        shown = "".join(f"\n  {line}" for line in lines) or " It wrote nothing."
        return ServiceHealthError(
            f"pod {self.record.name} cannot start: {self._exits} attempts failed; "
            f"the last time {self._reason}. Its last lines:{shown}",
            hint=f"all of it is in {self.folder / _LOG}",
        )

    @staticmethod
    def _new_delays() -> Iterator[float]:
        return itertools.chain([0.0], backoff.exponential(first=0.1, factor=3.0, limit=30.0))


async def _wait_for_ends(pids: set[int], *, timeout: float) -> None:
    """Wait until processes have ended, at most so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with deadlines.timeout(timeout):
            await processes.wait_for_ends(pids)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "an unknown exit status"
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
