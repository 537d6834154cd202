"""One pod of the process backend: an agent process that is started again when it ends.

      start ──► Running ──(exit)──► Pending ──(back-off)──► start
                   │                   │ third exit without having been ready in between
                   │                   ▼
                   │                Failed, with the last lines of agent.log; still started again
                   └──(end)──► Terminating ──► gone, with every process that it started

The processes that an agent starts inherit `MARK` in their environment, and mostly its session. When
the agent has ended, all processes with its mark or in its session are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kubetorch.controller.backends.base import Phase, PodStatus
from kubetorch.controller.backends.process.spares import SpareAgent, SpareAgents
from kubetorch.controller.backends.process.stores import PodInputs
from kubetorch.controller.state import PodRecord, SqliteState
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import KubetorchError, ServiceHealthError
from kubetorch.lib import backoff, deadlines, files, process_watch, processes, sockets
from kubetorch.lib.clock import Clock, Timer
from kubetorch.wire import exceptions, tokens
from kubetorch.wire.messages import Ending
from kubetorch.wire.podenv import INHERITED, MARK, PodEnv, own_work

# Inherited, so that programs in a pod deploy to the local service of that pod.
_SERVICE_HOME = "KT_LOCAL_DIR"
_LOG = "agent.log"
#: The file in the home of the local service with the URL of its controller.
CONTROLLER_URL = "controller-url"
_SURPLUS = Ending(reason="Deleted", message="newer pods took its place, or fewer are needed")
_log = logging.getLogger(__name__)


class PodHome(msgspec.Struct, frozen=True):
    home: Path
    secret: bytes
    user: str
    environment: Mapping[str, str]
    command: tuple[str, ...]
    marks: str
    #: Session tokens by folder of the pod: user code may delete the files in the folder.
    sessions: dict[Path, str] = msgspec.field(default_factory=dict)

    def folder(self, namespace: str, pod: str) -> Path:
        return self.home / "pods" / namespace / pod

    def session(self, namespace: str, pod: str) -> str:
        """The token of a pod for its session; empty without such a pod."""
        folder = self.folder(namespace, pod)
        try:
            credentials = json.loads((folder / "credentials.json").read_bytes())
            return self.sessions.get(folder) or str(credentials["session"])
        except (OSError, ValueError, KeyError):
            return self.sessions.get(folder, "")

    def controller_url(self) -> str:
        """The URL of the controller of this home; empty before it listens."""
        try:
            return (self.home / CONTROLLER_URL).read_text().strip().rstrip("/")
        except OSError:
            return ""

    def new_mark(self) -> str:
        """A new value of `MARK`, which no process has."""
        return self.marks + os.urandom(8).hex()

    def prepare(self, pod: PodRecord, inputs: PodInputs, *, now: float) -> dict[str, str]:
        """Make the folder and the credentials of a pod; returns the environment of its agent."""
        folder = self.folder(pod.namespace, pod.name)
        work = own_work(folder)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        audience = tokens.audience(pod.namespace, pod.workload)
        key = tokens.workload_key(self.secret, audience)
        claims = tokens.Claims(audience, now + TIMING.pod_token_seconds, f"pod:{pod.name}")
        self.sessions[folder] = session = tokens.sign(key, claims)
        credentials = {"key": key.hex(), "session": session, "user": self.user}
        file = folder / "credentials.json"
        files.write_atomically(file, json.dumps(credentials).encode())
        attachments_file = folder / "attachments.json"
        files.write_atomically(attachments_file, msgspec.json.encode(inputs.paths))
        pod_env = PodEnv(
            namespace=pod.namespace,
            workload=pod.workload,
            pod=pod.name,
            controller_file=str(self.home / CONTROLLER_URL),
            credentials_file=str(file),
            host=sockets.LOOPBACK,
            port=pod.port,
            root=str(folder),
            working_dir=inputs.working_dir or str(work),
            attachments_file=str(attachments_file),
            environments=str(self.home / "environments"),
            node_data=str(self.home / "data" / pod.namespace),
            grace=inputs.grace,
        )
        inherited = self.environment.keys() - inputs.variables.keys() - {_SERVICE_HOME}
        return {
            **self.environment,
            "POD_IP": address_of(pod),
            **inputs.variables,
            **pod_env.write(),
            INHERITED: ",".join(sorted(inherited)),
        }


def address_of(pod: PodRecord) -> str:
    """The address of a pod for its program, which no other pod of this machine has.

    It follows from the port of the agent, which listens on 127.0.0.1: tools that forward ports of a
    machine look there. macOS has only this loopback address, so its pods share it.
    """
    if pod.port not in sockets.PORTS or not _has_many_addresses():
        return sockets.LOOPBACK
    subnet, host = divmod(pod.port - sockets.PORTS.start, 250)
    return f"127.0.{subnet + 2}.{host + 1}"


@functools.cache
def _has_many_addresses() -> bool:
    return sockets.is_free(0, "127.0.2.1")


class Pod:
    def __init__(
        self,
        record: PodRecord,
        *,
        pod_home: PodHome,
        read_inputs: Callable[[PodRecord, Path], PodInputs],
        state: SqliteState,
        spares: SpareAgents,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self.record = record
        #: The pod was made from an older template, and ends when its successor serves.
        self.is_retiring = False
        #: The pod is ending, or is about to end.
        self.is_leaving = False
        #: The pod has served the desired generation, or may have.
        self.was_ready = False
        self._pod_home = pod_home
        self._read_inputs = read_inputs
        self._state = state
        self._spares = spares
        self._clock = clock
        self._on_change = on_change
        self._watch: process_watch.ExitWatch | None = None
        self._restart: Timer | None = None
        self._exits = 0
        self._delays = self._new_delays()
        self._reason = ""
        self._failure: ServiceHealthError | None = None
        self._end_done: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------- questions

    @property
    def folder(self) -> Path:
        return self._pod_home.folder(self.record.namespace, self.record.name)

    @property
    def is_running(self) -> bool:
        return self._watch is not None

    def status(self) -> PodStatus:
        record, phase = self.record, self._phase()
        return PodStatus(
            name=record.name,
            ordinal=record.ordinal,
            phase=phase,
            url=f"http://{sockets.LOOPBACK}:{record.port}",
            address=address_of(record),
            is_retiring=self.is_retiring or self.is_leaving,
            restarts=record.restarts,
            reason=self._reason,
            failure=None if self._failure is None else exceptions.describe(self._failure),
            pid=record.pid if self.is_running else None,
            started=record.started,
            is_down=phase in ("Pending", "Failed"),
            ending=_SURPLUS if self.is_leaving else None,
        )

    def _phase(self) -> Phase:
        if self.is_leaving or self._end_done is not None:
            return "Terminating"
        if self.is_running:
            return "Running"
        return "Pending" if self._failure is None else "Failed"

    # ------------------------------------------------------------------------------- beginning

    def start(self) -> None:
        """Start the agent; after a failure it is started again later, as when an agent ends."""
        self._cancel_restart()
        try:
            self._start()
        except (OSError, KubetorchError) as error:
            self._schedule_restart(f"its agent could not be started: {error}")

    def _start(self) -> None:
        # The inputs are read before a spare is claimed, which would be lost if they cannot be read.
        self.record = replace(self.record, port=self._port(), pid=0, start_time="")
        inputs = self._read_inputs(self.record, self.folder)
        spare = self._spares.claim()
        self._save(self.record)
        variables = self._pod_home.prepare(self.record, inputs, now=self._clock.time())
        pid = self._use_spare(spare, variables) or self._spawn(variables)
        started, start_time = self._clock.time(), processes.start_time(pid) or ""
        self._save(replace(self.record, pid=pid, start_time=start_time, started=started))
        self._observe(pid)

    def restart(self) -> None:
        self.record = replace(self.record, restarts=self.record.restarts + 1)
        self.start()

    def adopt(self) -> bool:
        """Watch the agent that an earlier controller started; returns `False` if it has ended."""
        record = self.record
        if not record.pid or processes.start_time(record.pid) != record.start_time:
            return False
        self._observe(record.pid)
        return True

    def retry(self) -> None:
        """Start the agent now if it waits for its next attempt."""
        if self._restart is not None:
            self._failure = None
            self._exits = 0
            self._delays = self._new_delays()
            self.restart()

    def mark_ready(self) -> None:
        self.was_ready = True
        self._exits = 0
        self._failure = None

    def _observe(self, pid: int) -> None:
        self._reason = ""
        self._watch = process_watch.ExitWatch(pid, self._agent_exited)
        self._on_change()

    def _port(self) -> int:
        pod_key = (self.record.namespace, self.record.name)
        other_pods = (pod for pod in self._state.pods() if (pod.namespace, pod.name) != pod_key)
        used_ports = {pod.port for pod in other_pods}
        port = self.record.port
        is_usable = port and port not in used_ports and sockets.is_free(port)
        return port if is_usable else sockets.choose(used_ports)

    def _use_spare(self, spare: SpareAgent | None, environment: Mapping[str, str]) -> int | None:
        """Make a spare the agent of this pod; returns its process id, or `None` without a spare."""
        if spare is None:
            return None
        self._save(replace(self.record, mark=spare.mark))
        try:
            spare.become_pod(environment, str(self.folder / _LOG))
        except OSError:  # the spare has ended
            process_watch.reap(spare.pid)
            return None
        return spare.pid

    def _spawn(self, environment: Mapping[str, str]) -> int:
        # The mark is stored first: if the controller dies here, its successor finds the process.
        mark = self._pod_home.new_mark()
        self._save(replace(self.record, mark=mark))
        log = self.folder / _LOG
        if log.exists() and log.stat().st_size > LIMITS.agent_log_bytes:
            log.replace(log.with_suffix(".log.1"))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return processes.spawn(
                self._pod_home.command, {**environment, MARK: mark}, output=output, errors=output
            )
        finally:
            os.close(output)

    def _save(self, record: PodRecord) -> None:
        self.record = record
        self._state.put_pod(record)

    # ---------------------------------------------------------------------------------- ending

    def leave(self) -> None:
        """Note that the pod is about to end, for the next controller as well."""
        self.is_leaving = True
        try:
            self._save(replace(self.record, is_leaving=True))
        except KubetorchError as error:  # the next controller takes it for one that stays
            _log.warning("pod not noted as leaving pod=%s error=%s", self.record.name, error)

    async def end(self, grace: float) -> None:
        """End the agent and all processes that it started; returns when they have ended."""
        self.is_leaving = True
        if self._end_done is not None:
            kill_timer = self._clock.call_later(grace + TIMING.agent_exit_seconds, self._kill_all)
            try:
                await asyncio.shield(self._end_done)
            finally:
                kill_timer.cancel()
            return
        self._end_done = asyncio.get_running_loop().create_future()
        self._cancel_restart()
        self._on_change()
        try:
            await self._stop(grace)
        finally:
            self._end_done.set_result(None)

    async def discard(self) -> None:
        """Remove the record and the folder of an ended pod."""
        self._state.delete_pods([(self.record.namespace, self.record.name)])
        self._pod_home.sessions.pop(self.folder, None)
        await asyncio.to_thread(files.remove_tree, self.folder)
        with contextlib.suppress(OSError):  # it has folders of other pods
            self.folder.parent.rmdir()

    def release(self) -> None:
        """Stop watching the agent, since the controller stops; the pod goes on."""
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
            await _wait_for_ends({pid}, timeout=grace + TIMING.agent_exit_seconds)
        for _ in range(LIMITS.kill_rounds):
            killed = await asyncio.to_thread(self._kill_all)
            # A process that outlives SIGKILL for long is held by the kernel.
            await _wait_for_ends({pid, *killed}, timeout=TIMING.agent_exit_seconds)
            if not killed:
                break
        processes.exit_status(pid)
        self._watch = None

    def _kill_all(self) -> list[int]:
        """Kill the session of the agent, and all other processes with its mark."""
        return processes.kill_session(self.record.pid, marker=f"{MARK}={self.record.mark}")

    def _agent_exited(self) -> None:
        self._watch = None
        code = processes.exit_status(self.record.pid)
        self._kill_all()
        self._schedule_restart(f"its agent ended with {_describe_exit(code)}")

    def _schedule_restart(self, reason: str) -> None:
        """Note why the agent does not run, and schedule its next start."""
        self._reason = reason
        self._exits += 1
        if self._exits >= LIMITS.failed_starts:
            self._failure = self._crash_loop()
        if self._clock.time() - self.record.started > TIMING.stable_agent_seconds:
            self._delays = self._new_delays()
        self._restart = self._clock.call_later(next(self._delays), self.restart)
        self._on_change()

    def _cancel_restart(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None

    def _crash_loop(self) -> ServiceHealthError:
        lines = files.tail(self.folder / _LOG, LIMITS.failed_agent_lines)
        shown = "".join(f"\n  {line}" for line in lines) or " It wrote nothing."
        return ServiceHealthError(
            f"pod {self.record.name} cannot start: {self._exits} attempts failed; "
            f"the last time {self._reason}. Its last lines:{shown}",
            hint=f"all of it is in {self.folder / _LOG}",
        )

    @staticmethod
    def _new_delays() -> Iterator[float]:
        delays = backoff.exponential(
            first=TIMING.agent_restart_first_delay_seconds,
            factor=3.0,
            limit=TIMING.agent_restart_longest_delay_seconds,
        )
        return itertools.chain([0.0], delays)


async def _wait_for_ends(pids: set[int], *, timeout: float) -> None:
    await deadlines.wait_at_most(timeout, process_watch.wait_for_ends(pids))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "an unknown exit status"
    if code < 0:
        return processes.signal_name(-code)
    return f"exit code {code}"


async def sweep(
    pod_home: PodHome, *, marks: Callable[[], Set[str]], pods: Callable[[], Set[tuple[str, str]]]
) -> None:
    """End the processes of unknown pods, and remove their folders.

    Args:
        pod_home: The home of all pods.
        marks: Returns the marks of the present agents and spares.
        pods: Returns namespace and name of the present pods.
    """
    marks_by_pid = await asyncio.to_thread(processes.processes_with, MARK)
    # Read on the event loop, where a spare becomes a pod in one step: no agent is missed.
    live_marks = marks()
    for pid, mark in marks_by_pid.items():
        if mark.startswith(pod_home.marks) and mark not in live_marks:
            _signal(pid, signal.SIGKILL)
    await asyncio.to_thread(_remove_folders, pod_home, pods(), pods)


def _remove_folders(
    pod_home: PodHome, live_pods: Set[tuple[str, str]], pods: Callable[[], Set[tuple[str, str]]]
) -> None:
    folders = pod_home.home / "pods"
    for namespace in folders.iterdir() if folders.exists() else ():
        for folder in namespace.iterdir():
            key = (namespace.name, folder.name)
            # A pod may have been made in between.
            if key not in live_pods and key not in pods():
                files.remove_tree(folder)
