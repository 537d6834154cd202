"""One workload at work: its rollout, the sessions of its pods, and the deploys that wait for it.

backend ──(pods changed)──┐
sessions ─(hello, …)──────┼──► Rollout (pure) ──► effects: Reload to sessions, records in
deploys ──(a generation)──┘                        the state, events for the deploys
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Protocol

import msgspec
from msgspec.structs import replace

from kubetorch.controller import rollout, views, world
from kubetorch.controller.access import NO_GRANT, Grant
from kubetorch.controller.backends.base import (
    DELETED,
    Backend,
    EventLine,
    PodStatus,
    PortRequest,
    Trouble,
)
from kubetorch.controller.deploys import DeployProgress, PendingDeploys, expect_agents, not_applied
from kubetorch.controller.ownership import Use
from kubetorch.controller.rollout import Effect, Event, Rollout
from kubetorch.controller.scaling import Scaling, fixed_view, refuse_change
from kubetorch.controller.state import Generation, State, WorkloadRecord
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.views import PodReport
from kubetorch.controller.world import Plan, Rendezvous
from kubetorch.errors import KubetorchError, ServiceNotFoundError
from kubetorch.lib import processes
from kubetorch.lib.changes import Changes
from kubetorch.lib.clock import Clock, Timer
from kubetorch.manifests import knative, rendering
from kubetorch.manifests.desired_pods import MountedNames
from kubetorch.specs import quantity
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, frames, messages
from kubetorch.wire.exceptions import Failure

_log = logging.getLogger(__name__)


class PodSession(Protocol):
    """The session of a pod, as its workload uses it."""

    def send(self, message: messages.FromController) -> None:
        """Send a message to the agent; dropped when the session is over."""

    def send_text(self, text: bytes) -> None:
        """Send a message that is encoded already."""

    def close(self, reason: str) -> None:
        """End the session."""


class WorkloadServices(msgspec.Struct, frozen=True):
    backend: Backend
    state: State
    clock: Clock
    on_idle: Callable[[Workload], None]
    on_notice: Callable[[Workload, str, str], None]
    on_lost: Callable[[Workload, Mapping[str, messages.Ending]], None]


def _rollout(record: WorkloadRecord) -> Rollout:
    failure = exceptions.parse_json(record.failure.encode()) if record.failure else None
    return Rollout(wanted_generation=record.generation, good=record.good, failure=failure)


class Workload:
    def __init__(
        self, record: WorkloadRecord, generations: tuple[Generation, ...], shared: WorkloadServices
    ) -> None:
        self.record = record
        self.pods: list[PodStatus] = []
        #: The names of its pods; while it is torn down also of pods that still send outcomes.
        self.pod_names: frozenset[str] = frozenset()
        # The pods that end because the workload is torn down.
        self._ending: frozenset[str] = frozenset()
        # Pods that went away: when, and the last view of each.
        self._lost_pods: dict[str, tuple[float, messages.PodView]] = {}
        # Why pods are missing, as the backend reports it.
        self._trouble_reason = ""
        self._pod_failure: Failure | None = None
        # The last lines of pods that load the code, by pod.
        self._loading_lines: dict[str, deque[str]] = {}
        self._specs = {generation.number: generation.spec for generation in generations}
        self._grants = {generation.number: generation.grant for generation in generations}
        self._services = shared
        self._rollout = _rollout(record)
        self._sessions: dict[str, PodSession] = {}
        self._reports: dict[str, PodReport] = {}
        self._deploys = PendingDeploys(shared.clock)
        self._members = MemberList()
        self._activities = Activities()
        self._reload_message: tuple[int, bytes] = (0, b"")
        # Why a pod ended, until the pod in its place is sent the reason.
        self._replaced_reason = ""
        # After a restart of the controller its pods are known once the backend has adopted them.
        self._knows_pods = not generations
        self._rendezvous = Rendezvous(
            record.name,
            ports=self._world_ports,
            now=shared.clock.time(),
            stored_worlds=world.unpack(record.worlds) if record.worlds else (),
        )
        # The facts from which the last world was planned.
        self._world_inputs: object = None
        self._announce_task: asyncio.Task[None] | None = None
        self._tick_timer: Timer | None = None
        self._debounce = Debounce(shared.clock, self.pods_changed)
        self._event_reporter = PodEventReporter(self._deploys.report)
        self._apply = BackgroundApply(shared.backend)
        # Programs of this machine that have a handle: they deployed the workload, or looked it up.
        self._programs: set[str] = set()
        #: Notified of every change of the workload.
        self.changes = Changes()
        #: It is about to be gone.
        self.is_torn_down = False
        self.is_gone = False
        # When the wanted generation was deployed or reached: the idle time is counted from here.
        self._idle_since = shared.clock.time()
        self._idle = IdleWatch(
            shared.clock,
            seconds_left=self._idle_left,
            notice_seconds=self._idle_notice,
            on_notice=self._announce_stop,
            on_idle=self._stop_idle,
        )
        #: What the controller said about it, for the readers of its logs; the oldest first.
        self.notices: deque[messages.DeployLog] = deque(maxlen=LIMITS.notices)
        #: Why it stops by itself; empty while it does not.
        self.stop_reason = ""
        #: How the load decides on the number of pods, if the controller scales the workload.
        self.scaling: Scaling | None = None

    # ------------------------------------------------------------------------------- questions

    @property
    def key(self) -> tuple[str, str]:
        return self.record.namespace, self.record.name

    @property
    def spec(self) -> WorkloadSpec:
        """The wanted generation."""
        return self._specs[self.record.generation]

    @property
    def specs(self) -> list[WorkloadSpec]:
        """The specs of the stored generations: the wanted one, which is the latest, first."""
        return [self._specs[number] for number in sorted(self._specs, reverse=True)]

    @property
    def grants(self) -> list[Grant]:
        """The grants of the stored generations, in the order of `specs`."""
        return [self._grants[number] for number in sorted(self._specs, reverse=True)]

    def code_of(self, generation: int) -> tuple[WorkloadSpec, messages.Creator | None] | None:
        """A stored generation, and the user who deployed it.

        For a deploy by a pod that is the pod's own account, not the creator of the pod: whoever
        may only call a service must not deploy for its creator by way of its pods.
        """
        spec = self._specs.get(generation)
        if spec is None:
            return None
        if self._services.backend.name == "local":
            return spec, messages.Creator("", spec.username)
        grant = self._grants[generation]
        if grant.user is None or grant.creator is None or grant.creator.user == grant.user.name:
            return spec, grant.creator
        return spec, messages.Creator(grant.user.name)

    @property
    def creator(self) -> messages.Creator | None:
        """The user who deployed the wanted generation; `None` if it was written by hand."""
        if self._services.backend.name == "local":
            return messages.Creator("", self.spec.username)
        return self.grants[0].creator

    def mounted(self, pod: str) -> MountedNames:
        """The mounts of a pod that the user who deployed it must not see."""
        return self._services.backend.mounted(*self.key, pod)

    def _pods_without_agent(self) -> list[PodStatus]:
        return [pod for pod in self.pods if pod.name not in self._sessions]

    def has_session(self, pod: str) -> bool:
        return pod in self._sessions

    def view(self) -> messages.WorkloadView:
        record, spec = self.record, self._services.backend.applied(self.spec)
        manifest = rendering.of_workload(spec)
        pods = tuple(self._with_lines(self.pod_views()))
        url = self._services.backend.url(spec, manifest)
        failure = self._failure()
        return messages.WorkloadView(
            spec=spec,
            generation=record.generation,
            status=messages.TERMINATING
            if self.is_torn_down
            else views.status(self.pods, self._reports, self._rollout, spec),
            pods=pods,
            url=url or next((pod.url for pod in pods if pod.is_ready), ""),
            scaler=self._services.backend.scaler(spec, manifest),
            created=record.created,
            updated=record.updated,
            last_active=record.active,
            failure=None if failure is None else failure.to_dict(),
            notes=self._services.backend.notes(spec.compute, manifest),
            kind=manifest["kind"],
            reason=self.stop_reason if self.is_torn_down else self._trouble_reason,
            lost=tuple(
                pod for _, pod in self._lost_pods.values() if pod.name not in self.pod_names
            ),
            world=self._members.world,
            creator=self.creator,
            pool=self.pool,
            equipment=self._services.backend.equipment(*self.key),
            pods_wanted=self._rollout.total,
            scaling=self._scaling_view(pods),
            idle_seconds_left=self._idle_left(),
        )

    def pod_views(self) -> tuple[messages.PodView, ...]:
        """The pods, as lists and clients see them, with the calls of their latest reports."""
        return tuple(map(self._with_load, self._views_of_pods()))

    def _views_of_pods(self) -> tuple[messages.PodView, ...]:
        return views.pod_views(
            self.pods,
            self._reports,
            self._rollout,
            self._rendezvous.cut_off,
            is_scaled=self.scaling is not None,
        )

    def _with_lines(self, pods: Iterable[messages.PodView]) -> Iterator[messages.PodView]:
        """The pods, of which the last one that wrote something before it failed has its lines."""
        last_pod = next(reversed(self._loading_lines), None)
        for pod in pods:
            is_last = pod.name == last_pod and not pod.is_ready
            yield replace(pod, lines=tuple(self._loading_lines[pod.name])) if is_last else pod

    @property
    def has_failed(self) -> bool:
        """True if no pod takes calls, and it is known why none can."""
        return self._failure() is not None and not any(pod.is_ready for pod in self.pod_views())

    def _with_load(self, pod: messages.PodView) -> messages.PodView:
        """A pod with the calls that it has by its latest report."""
        calls = None if self.scaling is None else self.scaling.calls_of(pod.name)
        return pod if calls is None else replace(pod, calls=calls)

    def _scaling_view(self, pods: Sequence[messages.PodView]) -> messages.ScalingView | None:
        if self.scaling is not None:
            return self.scaling.view()
        if knative.scaling(self.spec.compute) is None:
            return None
        return replace(fixed_view(pods, self._rollout.total), engine="knative")

    @property
    def pool(self) -> tuple[int, ...]:
        """The ordinals of the pods of a pool that get calls: those of the last deploy."""
        if not self.spec.compute.is_pool:
            return ()
        if self.record.pool:
            return tuple(map(int, self.record.pool.split(",")))
        return self._pool_ordinals()

    def _pool_ordinals(self) -> tuple[int, ...]:
        return tuple(sorted(pod.ordinal for pod in self.pods if pod.name in self._rollout.pods))

    def opened_by(self, program: str) -> None:
        """Record that a program of this machine, named by `processes.identity`, has a handle."""
        if program and self._services.backend.name == "local":
            if len(self._programs) >= LIMITS.debounced_pods:
                self._programs = set(filter(processes.is_alive, self._programs))
            self._programs.add(program)

    def use(self, program: str) -> Use:
        """The use of the workload by other programs than this one."""
        active = max(self.record.active, self._activities.last)
        return Use(
            is_local=self._services.backend.name == "local",
            reason=self._reason_of_use(program),
            idle=self._services.clock.time() - active if active else None,
            never_served=self.record.good == 0 and self._rollout.failure is not None,
        )

    def _reason_of_use(self, program: str) -> str:
        app = self.spec.callable.app
        reports = self._reports.values()
        if any(report.activity is not None and report.activity.calls for report in reports):
            is_command = app is not None and app.port is None
            return "its command runs" if is_command else "a call runs on it"
        if self._services.backend.name == "local":
            openers = (opener for opener in self._programs if opener != program)
            opener = next(filter(processes.is_alive, openers), None)
            return f"the program {processes.pid_of(opener)} has it open" if opener else ""
        now = self._services.clock.time()
        seconds_left = self._activities.seconds_left(
            ttl=TIMING.unused_service_seconds, since=self._idle_since, now=now
        )
        is_unused = seconds_left == 0.0 and not self._deploys
        if is_unused:
            return ""
        return f"it may have been used in the last {TIMING.unused_service_seconds / 60:.0f} minutes"

    def _failure(self) -> Failure | None:
        return self._pod_failure if self._rollout.failure is None else self._rollout.failure

    # --------------------------------------------------------------------------------- deploys

    async def deploy(self, spec: WorkloadSpec, grant: Grant = NO_GRANT) -> DeployProgress:
        """Make this spec the wanted generation; returns the events on the way to it."""
        running = self._deploys.find(self.record.generation)
        # A second deploy of the same spec follows the one that runs.
        if running is not None and spec.is_like(self.spec):
            return running
        is_new = not self._specs or spec != self.spec or self._rollout.failure is not None
        # A world that has lost members makes a new generation: all its ranks start again.
        is_new = is_new or self._rendezvous.has_losses
        if is_new:
            return await self._begin(spec, grant)
        if grant != self.grants[0]:
            generation = Generation(self.record.generation, self.spec, grant)
            self._services.state.put_workload(self.record, generation=generation)
            self._grants[generation.number] = grant
        return await self._wait(messages.Accepted(generation=self.record.generation, changed=False))

    async def _begin(self, spec: WorkloadSpec, grant: Grant) -> DeployProgress:
        before, now = self.record, self._services.clock.time()
        number = before.generation + 1
        keep = {number, before.generation, before.good} - {0}
        record = replace(before, generation=number, failure="", updated=now)
        generation = Generation(number, spec, grant)
        self._services.state.put_workload(record, generation=generation, keep=sorted(keep))
        specs, grants, since = self._specs, self._grants, self._idle_since
        # Before it is durable: a change that is stored meanwhile must not undo it.
        self.record, self._idle_since, self.stop_reason = record, now, ""
        kept_specs = {earlier: specs[earlier] for earlier in specs if earlier in keep}
        self._specs = kept_specs | {number: spec}
        self._grants = {earlier: grants[earlier] for earlier in kept_specs} | {number: grant}
        try:
            await self._services.state.flush(*self.key)
        except KubetorchError:
            self._specs, self._grants, self._idle_since = specs, grants, since
            self.record = replace(
                self.record,
                generation=before.generation,
                failure=before.failure,
                updated=before.updated,
            )
            raise
        _log.info("generation wanted workload=%s/%s generation=%s", *self.key, number)
        return await self._wait(messages.Accepted(generation=number))

    async def _wait(self, accepted: messages.Accepted) -> DeployProgress:
        """Follow the wanted generation until it is served, or given up."""
        progress = DeployProgress(accepted.generation, accepted)
        timeout = self.spec.compute.launch_timeout
        self._deploys.add(progress, timeout, lambda: self._expire(progress, timeout))
        if self.spec.compute.is_selector_only:
            expect_agents(self._services.clock, progress, self._pods_without_agent, self._give_up)
        warning = await self._prepare_scaling()
        if warning:
            progress.add(messages.Stage("scale", warning, warning=True))
        if accepted.changed or not self._rollout.is_served:
            await self._apply.start(self.spec, lambda failure: self._applied(progress, failure))
        else:
            self._applied(progress, None)
        return progress

    async def adopt_scaling(self) -> None:
        """Take up the scaling that an earlier controller stored, before the pods are adopted."""
        if await self._services.backend.scales(self.spec):
            self.scaling = self._new_scaling()

    async def _prepare_scaling(self) -> str:
        """Choose the number of pods with which the wanted generation begins, if the load decides.

        Returns a warning, or an empty text.
        """
        if not await self._services.backend.scales(self.spec):
            if self.scaling is not None:
                self.scaling.close()
                self.scaling = None
                self._store(replace(self.record, scaling=""))
            return ""
        if self.scaling is None:
            self.scaling = self._new_scaling()
        return self.scaling.begin_deploy(self.spec)

    def _new_scaling(self) -> Scaling:
        return Scaling(
            self.spec,
            stored=self.record.scaling,
            backend=self._services.backend,
            clock=self._services.clock,
            store=lambda text: self._store(replace(self.record, scaling=text)),
            on_change=self.changes.notify,
        )

    def scale(self, settings: dict[str, object]) -> None:
        """Change keywords of `autoscale()` while the service runs."""
        if self.scaling is None:
            raise refuse_change(self.record.name)
        self.scaling.change(settings)
        self.changes.notify()

    def _applied(self, progress: DeployProgress, failure: Failure | None) -> None:
        if failure is None:
            manifest = rendering.of_workload(self.spec)
            for text in self._services.backend.warnings(self.spec.compute, manifest):
                progress.add(messages.Stage("backend", text, warning=True))
        # Not before it is applied: pods that the backend replaces must not load the generation.
        self.pods_changed()
        self._handle(rollout.Deployed(progress.generation, failure))
        if failure is not None:
            self._deploys.end(progress, messages.Failed(failure=failure.to_dict()))

    def _expire(self, progress: DeployProgress, timeout: float) -> None:
        waits = views.waits_in_words(self.pods, self._reports, self._rollout, self._trouble_reason)
        error = self._rendezvous.no_quorum(progress.generation)
        self._give_up(progress, error or views.timed_out(self.record.name, timeout, waits))

    def end_deploy(self, error: KubetorchError) -> None:
        """Fail the deploy of the wanted generation, if one runs."""
        progress = self._deploys.find(self.record.generation)
        if progress is not None:
            self._give_up(progress, error)

    def _give_up(self, progress: DeployProgress, error: KubetorchError) -> None:
        failure = exceptions.describe_refusal(error)
        self._handle(rollout.GaveUp(progress.generation, failure))
        self._deploys.end(progress, messages.Failed(failure=failure.to_dict()))

    # ------------------------------------------------------------------------------------ pods

    def adopted(self) -> None:
        """The backend has adopted the pods of an earlier controller."""
        self._knows_pods = True
        used_ports = [
            port for stored_world in self._rendezvous.worlds for port in stored_world.ports
        ]
        if used_ports:
            self._services.backend.hold_ports(*self.key, used_ports)
        self.pods_changed()

    def pods_changed_soon(self) -> None:
        """The backend notified us that something about the pods changed."""
        self._debounce.changed(len(self.pods))

    def pods_changed(self) -> None:
        """Compare the pods of the backend with those before, and handle every difference."""
        self._debounce.close()
        if self.is_gone:
            return
        backend = self._services.backend
        before, self.pods = self.pods, backend.pods(*self.key)
        state, names = self._rollout, frozenset(pod.name for pod in self.pods)
        is_behind = not state.failure and self._apply.is_behind(
            self._specs, state.wanted_generation
        )
        self.pod_names = names | self._ending
        current = frozenset(p.name for p in self.pods if not (p.is_retiring or is_behind))
        self._activities.set_pods(self.pod_names)
        if not self._ending:
            self._remember(lost_pods(before, self.pods), before)
        failures = (pod.failure for pod in self.pods if not pod.is_retiring and pod.failure)
        was_failing, self._pod_failure = self._pod_failure is not None, next(failures, None)
        if self.scaling is not None and self._pod_failure is not None and not was_failing:
            self.scaling.failed()
        self._loading_lines = {
            pod: lines for pod, lines in self._loading_lines.items() if pod in names
        }
        trouble, epoch = backend.trouble(*self.key), self.record.epoch
        self._trouble_reason = self._rendezvous.trouble = trouble.reason
        is_changed = self._members.update(self.pods, self._reports)
        if self._knows_pods and (self.pods or not trouble.reason):
            self._update_world(world.PodsChanged(self.pods))
        # An announcement of losses in the world has sent the members already.
        self._send_members(is_changed=is_changed and self.record.epoch == epoch)
        for pod in self.pods:
            if pod.is_down:
                self._replaced_reason = pod.reason or self._replaced_reason
            if (session := self._sessions.get(pod.name)) is not None and pod.is_down:
                # The end of its connection may be noticed later.
                self.disconnected(pod.name, session)
                session.close("its agent ended")
            elif pod.ending is not None and not self._ending:
                self.send(pod.name, pod.ending)
        expected = backend.expected(*self.key)
        needed = self._rendezvous.needed
        self._handle(rollout.PodsChanged(current, names - current, expected, needed))
        news = backend.event_lines(*self.key) if self._deploys else []
        self._event_reporter.report(self.pods, trouble, news)
        failed = sum(pod.failure is not None for pod in self.pods if pod.name in current)
        if trouble.failure is not None:
            failed += max(1, (expected or 0) - len(current))
        if self._rendezvous.can_do_without(failed):
            return
        for failure in filter(None, (trouble.failure, self._pod_failure)):
            self._handle(rollout.GaveUp(self.record.generation, failure))

    def _update_scaled_pods(self) -> None:
        """Notify the scaling of the pods that stay, and of those of them that take calls."""
        if self.scaling is None or self.is_gone or self._ending:
            return
        pods = self._views_of_pods()
        self.scaling.pods_changed(
            frozenset(pod.name for pod in pods if pod.phase != "Terminating"),
            frozenset(pod.name for pod in pods if pod.is_ready),
        )

    def _remember(self, lost: Mapping[str, messages.Ending], before: Sequence[PodStatus]) -> None:
        """Record the pods that went away, for callers who ask why their calls failed."""
        now = self._services.clock.time()
        for pod in before:
            if (ending := lost.get(pod.name)) is not None:
                lost_view = messages.PodView(
                    name=pod.name, ordinal=pod.ordinal, phase="Gone", ended=ending
                )
                self._lost_pods[pod.name] = now, lost_view
        oldest = now - TIMING.remembered_loss_seconds
        recent_losses = [(n, loss) for n, loss in self._lost_pods.items() if loss[0] > oldest]
        self._lost_pods = dict(recent_losses[-LIMITS.remembered_lost_pods :])
        if lost:
            self._services.on_lost(self, lost)
            ends = (f"pod {pod} ended ({ending.reason})" for pod, ending in lost.items())
            self._replaced_reason = ", ".join(ends)

    def connected(self, hello: messages.Hello, session: PodSession) -> None:
        old = self._sessions.get(hello.pod)
        self._sessions[hello.pod] = session
        self._reports[hello.pod] = PodReport(url=hello.url, memory_socket=hello.memory_socket)
        if old is not None:
            old.close("another session of this pod began")
        self._activities.reported(hello.pod, None)
        session.send_text(self._members.message(self.record.epoch))
        self._send_members(is_changed=self._members.reported(hello.pod, self._reports))
        self._handle(rollout.Connected(hello.pod, hello.generation))
        self._update_world(world.Connected(hello.pod, hello.url, hello.incarnation))

    def refused(self, pod: str, error: KubetorchError) -> None:
        """The session of a pod was refused for a secret or volume that it must not have."""
        self._services.backend.end_pod(*self.key, pod, error)
        self._handle(rollout.GaveUp(self.record.generation, exceptions.describe_refusal(error)))

    def disconnected(self, pod: str, session: PodSession) -> None:
        if self._sessions.get(pod) is session:
            del self._sessions[pod]
            del self._reports[pod]
            self._activities.reported(pod, None)
            self._send_members(is_changed=self._members.reported(pod, self._reports))
            self._handle(rollout.Lost(pod))
            self._update_world(world.Disconnected(pod))

    def silent(self, pod: str) -> None:
        """A pod sent nothing for too long; its session goes on."""
        self._reports[pod] = replace(self._reports[pod], is_silent=True, activity=None)
        self._activities.reported(pod, None)
        self._handle(rollout.Lost(pod))

    def silence_ended(self, pod: str, serving: int) -> None:
        """A pod that was silent sent a message."""
        self._reports[pod] = replace(self._reports[pod], is_silent=False)
        self._handle(rollout.Connected(pod, serving))

    def observed(self, pod: str, message: messages.Observed) -> None:
        failure = None if message.failure is None else exceptions.parse(message.failure)
        self._handle(rollout.Observed(pod, message.generation, message.serving, failure))
        if failure is None:
            self._loading_lines.pop(pod, None)
            self._deploys.report(views.served(pod, self._rollout), message.generation)

    def staged(self, pod: str, message: messages.StageReport) -> None:
        self._reports[pod] = replace(
            self._reports[pod], stage=" ".join(filter(None, (message.stage, message.message)))
        )
        self._deploys.report(views.stage(pod, message), message.generation)

    def logged(self, pod: str, message: messages.LogReport) -> None:
        """The user's code wrote a line while it was loaded."""
        lines = self._loading_lines.setdefault(pod, deque(maxlen=LIMITS.container_log_lines))
        lines.append(message.text[: LIMITS.container_log_characters // LIMITS.container_log_lines])
        self._deploys.report(views.line(pod, message), message.generation)

    def active(self, pod: str, message: messages.Activity) -> None:
        was_stopping = self._reports[pod].is_stopping
        self._reports[pod] = replace(self._reports[pod], activity=message)
        self._activities.reported(pod, message)
        if message.is_stopping and not was_stopping:
            self._update_scaled_pods()
            self.changes.notify()
        if message.is_stopping and self._rendezvous.has_plan:
            self._update_world(world.Stopping(pod))
        if message.last > self.record.active + TIMING.activity_step_seconds and message.calls == 0:
            self._store(replace(self.record, active=message.last))
        self._idle.update()

    def loaded(self, pod: str, message: messages.PodLoad) -> None:
        """A pod of an autoscaled service reported its load."""
        if self.scaling is not None:
            self.scaling.reported(pod, message)

    def message_received(self, pod: str) -> None:
        """A pod has sent a message; called for each one."""
        if self._rendezvous.has_plan:
            self._rendezvous.message_received(pod, self._services.clock.time())

    def regroup(self, pod: str, message: messages.Regroup) -> None:
        """A call on a pod requests a new world."""
        self._update_world(world.Regroup(pod, message.id, message.epoch, message.is_quorum_awaited))

    def probed(self, pod: str, message: messages.Probed) -> None:
        """A pod has tried to reach another one."""
        self._update_world(world.Probed(pod, message.id, message.is_reached))

    def send(self, pod: str, message: messages.FromController) -> bool:
        """Send a message to the agent of a pod; returns whether it has a session."""
        session = self._sessions.get(pod)
        if session is not None:
            session.send(message)
        return session is not None

    def senders(self) -> dict[str, Callable[[messages.FromController], None]]:
        """By connected pod: a function that sends its agent a message; serving pods come first."""
        names = sorted(self._sessions, key=lambda name: not self._rollout.serving(name))
        return {name: self._sessions[name].send for name in names}

    # ----------------------------------------------------------------------------------- ending

    async def delete(self, grace: float) -> list[str]:
        """End the pods; returns the user's own objects that remain, as `Backend.delete` does."""
        self.is_torn_down = True
        error = ServiceNotFoundError(f"{self.record.name} was torn down while it was deployed")
        self._deploys.fail_all(error)
        await self._apply.stop()
        if self.scaling is not None:
            self.scaling.close()
        self._ending = self.pod_names
        for session in self._sessions.values():
            session.send(messages.Terminate(grace=grace, reason=messages.TORN_DOWN))
        remaining_objects = await self._services.backend.delete(*self.key, grace=grace)
        self.close("the service was torn down")
        return remaining_objects

    def close(self, reason: str, *, goes_on: bool = False) -> None:
        """Stop all timers, and end the sessions.

        Args:
            reason: Why, for the agents and the deploys.
            goes_on: Whether the pods go on, under another controller.
        """
        self._idle.close()
        self._debounce.close()
        self._apply.cancel()
        if self.scaling is not None:
            self.scaling.close()
        for scheduled in (self._announce_task, self._tick_timer):
            if scheduled is not None:
                scheduled.cancel()
        self._deploys.interrupt(self.record.name, reason, goes_on=goes_on)
        self.is_gone = True
        self.changes.notify()
        sessions, self._sessions, self._reports = self._sessions, {}, {}
        for session in sessions.values():
            session.close(reason)

    # --------------------------------------------------------------------------------- effects

    def _handle(self, event: Event) -> None:
        for effect in self._rollout.handle(event):
            self._carry_out(effect)
            if isinstance(event, rollout.GaveUp) and isinstance(effect, rollout.NotReached):
                self._release_part()
        self._deploys.settle(
            self._rollout.wanted_generation,
            ready=self._ready if self._rollout.is_served else None,
            failure=self._failure(),
        )
        self._plan_world()
        self._update_scaled_pods()
        self._services.state.touch(*self.key)
        self._services.backend.mark_ready(*self.key, self._rollout.ready)
        self._idle.update()
        self.changes.notify()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case rollout.Reload(pod, generation):
                self._sessions[pod].send_text(self._reload_text(pod, generation))
            case rollout.Reached(generation) | rollout.Recovered(generation):
                self._idle_since, self._replaced_reason = self._services.clock.time(), ""
                self._store(replace(self.record, good=generation, failure=""))
                if self.scaling is not None:
                    self.scaling.served()
                _log.info("generation reached workload=%s/%s generation=%s", *self.key, generation)
            case rollout.Retried():
                self._store(replace(self.record, failure=""))
            case rollout.NotReached(generation, failure):
                self._store(replace(self.record, failure=failure.to_json().decode()))
                if self.scaling is not None:
                    self.scaling.given_up(serves_earlier=self.record.good > 0)
                    self.scaling.failed()
                _log.info("generation given up workload=%s/%s generation=%s", *self.key, generation)

    def _release_part(self) -> None:
        """Give back the pods of a distributed service if some are missing: a part is no use."""
        is_whole = self._rollout.is_complete and not self._pods_without_agent()
        if self.spec.compute.distribution is not None and not is_whole:
            self._apply.release(self.spec, self._specs.get(self.record.good))

    def _store(self, record: WorkloadRecord) -> None:
        self.record = record
        try:
            self._services.state.put_workload(record)
        except KubetorchError as error:  # the next change writes all of it
            _log.warning("workload not kept workload=%s/%s error=%s", *self.key, error)

    def _ready(self) -> messages.Ready:
        if self.spec.compute.is_pool:
            self._store(replace(self.record, pool=",".join(map(str, self._pool_ordinals()))))
            is_changed, self._members.pool = self._members.pool != self.pool, self.pool
            self._send_members(is_changed=is_changed)
        return messages.Ready(generation=self._rollout.wanted_generation, workload=self.view())

    def _reload_text(self, pod: str, generation: int) -> bytes:
        spec = self._specs[generation]
        is_again = generation == self.record.good and not self._rollout.serving(pod)
        if is_again and knative.scaling(spec.compute) is None and not spec.compute.is_selector_only:
            # The generation was served already, so this pod takes the place of another pod.
            reason, self._replaced_reason = self._replaced_reason or "its pod was started again", ""
            return messages.encode(
                messages.Reload(generation=generation, spec=spec, replaces=reason)
            )
        if self._reload_message[0] != generation:
            message = messages.Reload(generation=generation, spec=spec)
            self._reload_message = (generation, messages.encode(message))
        return self._reload_message[1]

    # ----------------------------------------------------------------------------------- world

    def _plan_world(self) -> None:
        """Form a world for the generation that pods should serve, if it is distributed."""
        state = self._rollout
        world_inputs = (
            state.wanted_generation,
            state.good,
            state.failure is None,
            state.pods,
            state.retiring,
        )
        if world_inputs == self._world_inputs or self.is_gone:
            return
        self._world_inputs = world_inputs
        generation = state.wanted_generation
        if state.failure is not None and state.good:
            generation = state.good
        spec = self._specs.get(generation)
        distribution = None if spec is None else spec.compute.distribution
        plan, pods = None, frozenset[str]()
        if spec is not None and distribution is not None:
            all_pods = state.pods | state.retiring
            pods = frozenset(pod for pod in all_pods if state.target(pod) == generation)
            plan = Plan(
                generation=generation,
                workers=spec.compute.world_pods(len(pods)),
                quorum=spec.compute.quorum(len(pods)),
                timeout=spec.compute.quorum_timeout,
                processes=distribution.processes(spec.compute.gpus),
                good=state.good,
            )
        self._update_world(world.PlanChanged(plan, pods))
        if plan is not None and self._tick_timer is None:
            self._tick()

    def _tick(self) -> None:
        self._tick_timer = None
        if self._rendezvous.has_plan:
            self._update_world(world.Tick())
            self._tick_timer = self._services.clock.call_later(
                TIMING.world_tick_seconds, self._tick
            )

    def _world_ports(self, plan: Plan, members: Sequence[messages.Member]) -> tuple[int, ...]:
        distribution = self._specs[plan.generation].compute.distribution
        assert distribution is not None
        ports_per_pod = plan.processes if distribution.has_port_each else 1
        port_request = PortRequest(
            distribution.port,
            is_declared=distribution.is_port_declared,
            count=len(members) * ports_per_pod if distribution.has_port_each else 1,
            per_pod=ports_per_pod,
            further=distribution.further_ports(len(members)),
        )
        return self._services.backend.ports(*self.key, port_request)

    def _update_world(self, event: world.Event) -> None:
        if self._ending or self.is_gone:
            return  # a service that is torn down loses no members
        for effect in self._rendezvous.handle(event, self._services.clock.time()):
            match effect:
                case world.Formed(formed):
                    self._announce_durably(formed)
                    self._serve_members()
                case world.Announce():
                    self._announce()
                case world.NotFormed(generation, error):
                    self._handle(rollout.GaveUp(generation, exceptions.describe_refusal(error)))
                case world.Refuse(pod, request, error):
                    failure = exceptions.describe_refusal(error).to_dict()
                    self.send(pod, messages.RegroupFailed(id=request, failure=failure))
                case world.SendWorld(pod):
                    if pod in self._sessions:
                        self._sessions[pod].send_text(self._members.message(self.record.epoch))
                case world.OrderProbe(pod, request, url):
                    self.send(pod, messages.Probe(id=request, url=url))

    def _serve_members(self) -> None:
        """A quorum is connected: the service is ready when these pods serve."""
        state, needed = self._rollout, self._rendezvous.needed
        if needed != state.needed:
            pods = rollout.PodsChanged(state.pods, state.retiring, state.expected, needed)
            self._handle(pods)

    def _announce_durably(self, formed: messages.World) -> None:
        """Notify pods of a new world once it would survive this process."""
        _log.info(
            "world formed workload=%s/%s generation=%s epoch=%s pods=%s",
            *self.key,
            formed.generation,
            formed.epoch,
            len(formed.members),
        )
        self._store(replace(self.record, worlds=world.pack(self._rendezvous.worlds)))
        if self._announce_task is None:
            self._announce_task = asyncio.create_task(self._flush_and_announce())

    async def _flush_and_announce(self) -> None:
        try:
            await self._services.state.flush_worlds(*self.key)
        finally:
            self._announce_task = None
        self._announce()

    def _announce(self) -> None:
        """Notify pods of the present world, unless a new world is about to be announced."""
        if self._announce_task is None:
            current = self._rendezvous.world
            self._members.world = current
            packed = world.pack(self._rendezvous.worlds) if current else self.record.worlds
            self.record = replace(self.record, worlds=packed)
            self._send_members(is_changed=True)
            self.changes.notify()

    def _send_members(self, *, is_changed: bool) -> None:
        if is_changed:
            self._store(replace(self.record, epoch=self.record.epoch + 1))
            text = self._members.message(self.record.epoch)
            for session in self._sessions.values():
                session.send_text(text)

    def _idle_left(self) -> float | None:
        ttl = self.spec.compute.inactivity_ttl if self._specs else None
        if ttl is None or self._deploys:
            return None
        now = self._services.clock.time()
        return self._activities.seconds_left(
            ttl=idle_patience(ttl), since=self._idle_since, now=now
        )

    def _idle_notice(self) -> float:
        """Seconds before its idle stop at which the stop is announced."""
        ttl = self.spec.compute.inactivity_ttl
        assert ttl is not None
        return min(quantity.seconds(ttl) / 3, TIMING.idle_notice_seconds)

    def _announce_stop(self, seconds_left: float) -> None:
        ttl = self.spec.compute.inactivity_ttl
        self._notify_readers(
            "IdleSoon",
            f"{self.record.name} stops in {seconds_left:.0f} s unless something calls it "
            f"(inactivity_ttl={ttl})",
        )

    def _stop_idle(self) -> None:
        if self.is_torn_down:
            return
        if not self.stop_reason:
            self.stop_reason = f"no call for {self.spec.compute.inactivity_ttl} (inactivity_ttl)"
            text = f"{self.record.name} stops: {self.stop_reason}; the next .to() starts it again"
            self._notify_readers("IdleStop", text)
        self._services.on_idle(self)

    def _notify_readers(self, reason: str, text: str) -> None:
        """Tell it in the log of the controller, in the logs of the workload, and as an event."""
        _log.info("%s workload=%s/%s", text, *self.key)
        now = self._services.clock.time()
        notice = messages.DeployLog(
            text=text, pod=self.record.name, source=frames.KUBETORCH, level="WARNING", time=now
        )
        self.notices.append(notice)
        self._services.on_notice(self, reason, text)
        self.changes.notify()


class BackgroundApply:
    """Applies the latest spec of one workload in the background, since a backend may take long."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._task: asyncio.Task[None] | None = None

    def is_behind(self, specs: Mapping[int, WorkloadSpec], number: int) -> bool:
        """True if only an earlier generation is applied, so that this one has no pods yet."""
        spec = specs.get(number)
        applied_spec = None if spec is None else self._backend.applied(spec)
        return applied_spec != spec and any(
            earlier < number and applied_spec == specs[earlier] for earlier in specs
        )

    async def start(self, spec: WorkloadSpec, on_end: Callable[[Failure | None], None]) -> None:
        """Apply this spec, and stop applying an earlier one."""
        await self.stop()
        self._task = asyncio.create_task(self._apply(spec, on_end), name=f"apply {spec.name}")

    def release(self, spec: WorkloadSpec, good: WorkloadSpec | None) -> None:
        """Give back the pods of a spec: all, or those that the last good spec did not have."""
        self.cancel()
        self._task = asyncio.create_task(self._release(spec, good), name=f"release {spec.name}")

    async def stop(self) -> None:
        task = self.cancel()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def cancel(self) -> asyncio.Task[None] | None:
        """Begin to stop; returns the task to wait for."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task

    async def _apply(self, spec: WorkloadSpec, on_end: Callable[[Failure | None], None]) -> None:
        failure = None
        try:
            await self._backend.apply(spec)
        except Exception as error:  # noqa: BLE001  # others may have joined this deploy
            failure = exceptions.describe_refusal(not_applied(spec.name, error))
        on_end(failure)

    async def _release(self, spec: WorkloadSpec, good: WorkloadSpec | None) -> None:
        try:
            if good is None:
                await self._backend.release(spec.namespace, spec.name)
            else:
                await self._backend.apply(good)
        except KubetorchError as error:
            _log.warning("pods not given back workload=%s error=%s", spec.name, error)
        else:
            _log.info("pods given back workload=%s/%s", spec.namespace, spec.name)


class Debounce:
    """Calls `on_change` at once for few pods, and once for several changes of many pods."""

    def __init__(self, clock: Clock, on_change: Callable[[], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._timer: Timer | None = None

    def changed(self, pods: int) -> None:
        if pods < LIMITS.debounced_pods:
            self._on_change()
        elif self._timer is None:
            self._timer = self._clock.call_later(
                pods * TIMING.pod_change_delay_seconds, self._on_change
            )

    def close(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


class PodEventReporter:
    """Reports events of pods to deploys, each event once."""

    def __init__(self, report: Callable[[messages.Stage], None]) -> None:
        self._report = report
        # By pod: why it does not run; under the empty name why pods are missing.
        self._reasons: dict[str, str] = {}

    def report(
        self, pods: Sequence[PodStatus], trouble: Trouble, news: Sequence[EventLine]
    ) -> None:
        """Report events of pods, and why pods do not run or are missing.

        A reason of many pods is reported once, and an event that is part of a reason is not
        reported beside it. Failures are left to the error of the deploy.
        """
        reported_reasons = set(self._reasons.values())
        reasons = {pod.name: pod.reason for pod in pods if pod.failure is None}
        if trouble.failure is None:
            reasons[""] = trouble.reason
        bad_reasons = set()
        for event in news:
            text = event.message.partition(": ")[2]
            explaining_reasons = [reason for reason in reasons.values() if text and text in reason]
            if not explaining_reasons:
                self._report(
                    messages.Stage(
                        "event", event.message, event.pod or None, warning=event.is_warning
                    )
                )
            elif event.is_warning:
                bad_reasons.update(explaining_reasons)
        for pod, reason in reasons.items():
            if reason and reason not in reported_reasons:
                reported_reasons.add(reason)
                self._report(
                    messages.Stage("event", reason, pod or None, warning=reason in bad_reasons)
                )
        self._reasons = reasons


class MemberList:
    """The pods of a workload, as a message that is the same for all of them."""

    def __init__(self) -> None:
        self._pods: dict[str, PodStatus] = {}
        self._members: dict[str, messages.Member] = {}
        self._message: tuple[int, bytes] = (-1, b"")
        #: The world of a distributed service.
        self.world: messages.World | None = None
        #: The ordinals in the pool of a service whose pods a selector finds.
        self.pool: tuple[int, ...] = ()

    def update(self, pods: Sequence[PodStatus], reports: Mapping[str, PodReport]) -> bool:
        """Make these pods the members; returns whether any member changed."""
        self._pods = {pod.name: pod for pod in pods if not pod.is_retiring}
        before, self._members = self._members, {}
        for name in self._pods:
            self._members[name] = self._member(name, reports)
        return list(self._members.values()) != list(before.values())

    def reported(self, pod: str, reports: Mapping[str, PodReport]) -> bool:
        """A pod reported its address, or disconnected; returns whether the member changed."""
        if pod not in self._pods:
            return False
        before, self._members[pod] = self._members[pod], self._member(pod, reports)
        return self._members[pod] != before

    def message(self, epoch: int) -> bytes:
        if self._message[0] != epoch:
            pods = tuple(self._members.values())
            members = messages.Members(epoch=epoch, members=pods, world=self.world, pool=self.pool)
            self._message = (epoch, messages.encode(members))
        return self._message[1]

    def _member(self, name: str, reports: Mapping[str, PodReport]) -> messages.Member:
        pod = self._pods[name]
        url = views.url(pod, reports.get(name))
        return messages.Member(name, pod.ordinal, url, address=pod.address)


def lost_pods(
    before: Sequence[PodStatus], after: Sequence[PodStatus]
) -> dict[str, messages.Ending]:
    """The pods that could run calls before and cannot any more, with the ending of each."""
    now = {pod.name: pod for pod in after}
    endings = {}
    for pod in before:
        if not pod.may_run_calls:
            continue
        last = now.get(pod.name)
        if last is None or last.uid != pod.uid:  # another pod may have its name by now
            endings[pod.name] = pod.ending or DELETED
        elif not last.may_run_calls:
            endings[pod.name] = last.ending or DELETED
    return endings


def idle_patience(ttl: str) -> float:
    """Seconds after which a workload with this `inactivity_ttl` is torn down."""
    return quantity.seconds(ttl) + TIMING.call_report_seconds


class Activities:
    """The last activities of the pods of a workload.

    A workload is idle if all its pods have reported for the whole time that no call runs. A pod
    without a session may be busy: while a pod is away, the workload is not idle.
    """

    def __init__(self) -> None:
        self._pods: Set[str] = frozenset()
        self._idle_pods: set[str] = set()
        #: The time of the last begin or end of a call.
        self.last = 0.0

    def set_pods(self, pods: Set[str]) -> None:
        self._pods = pods
        self._idle_pods &= pods

    def reported(self, pod: str, activity: messages.Activity | None) -> None:
        """Record the activity of a pod; `None` when the pod is away."""
        if activity is not None:
            self.last = max(self.last, activity.last)
        if activity is None or activity.calls > 0:
            self._idle_pods.discard(pod)
        elif pod in self._pods:
            self._idle_pods.add(pod)

    def seconds_left(self, *, ttl: float, since: float, now: float) -> float | None:
        """Seconds until the workload is torn down if nothing happens; `None` when it is not idle.

        A clock that was set back makes it wait at most one `ttl` longer.
        """
        if len(self._idle_pods) < len(self._pods):
            return None
        last = max(since, self.last)
        return max(0.0, min(ttl, last + ttl - now))


class IdleWatch:
    """Calls `on_notice` some time before a workload has been idle for long, and then `on_idle`.

    Args:
        notice_seconds: How long before.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        seconds_left: Callable[[], float | None],
        notice_seconds: Callable[[], float],
        on_notice: Callable[[float], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._seconds_left = seconds_left
        self._notice_seconds = notice_seconds
        self._on_notice = on_notice
        self._on_idle = on_idle
        self._is_announced = False
        self._timer: Timer | None = None

    def update(self) -> None:
        self.close()
        seconds_left = self._seconds_left()
        if seconds_left is None:
            self._is_announced = False
            return
        notice_seconds = self._notice_seconds()
        delay = seconds_left
        if seconds_left > notice_seconds:
            self._is_announced = False
            delay -= notice_seconds
        elif not self._is_announced:
            delay = 0.0  # something else was done when it was due
        self._timer = self._clock.call_later(delay, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        seconds_left = self._seconds_left()
        if seconds_left == 0.0:
            self._on_idle()
            return
        is_near = seconds_left is not None and seconds_left <= self._notice_seconds()
        if seconds_left is not None and is_near and not self._is_announced:
            self._is_announced = True
            self._on_notice(seconds_left)
        self.update()
