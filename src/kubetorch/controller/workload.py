"""One workload at work: its rollout, the sessions of its pods, and the deploys that wait for it.

backend ──(pods changed)──┐
sessions ─(hello, …)──────┼──► Rollout (pure) ──► effects: Reload to sessions, records in
deploys ──(a generation)──┘                        the state, events for the deploys
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

import msgspec
from msgspec.structs import replace

from kubetorch.controller import rollout, views, world
from kubetorch.controller.access import Grant
from kubetorch.controller.backends.base import (
    DELETED,
    Backend,
    EventLine,
    PodStatus,
    PortRequest,
    Trouble,
)
from kubetorch.controller.deploys import DeployProgress, PendingDeploys, expect_agents, not_applied
from kubetorch.controller.ownership import UNUSED, Use
from kubetorch.controller.rollout import Effect, Event, Rollout
from kubetorch.controller.state import Generation, State, WorkloadRecord
from kubetorch.controller.views import PodReport
from kubetorch.controller.world import Plan, Rendezvous
from kubetorch.errors import KubetorchError, ServiceNotFoundError
from kubetorch.lib import processes
from kubetorch.lib.changes import Changes
from kubetorch.lib.clock import Clock, Timer
from kubetorch.manifests import rendering
from kubetorch.manifests.desired_pods import Mounted
from kubetorch.specs import quantity
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, messages
from kubetorch.wire.exceptions import Failure

#: Seconds that the news of a call may take to get here; a service is given them beyond its time.
REPORTING = 1.0
#: Seconds: how exactly the time of the last call is kept.
ACTIVITY_STEP = 1.0
#: For how many seconds, and how many, pods that went away are remembered.
REMEMBER_SECONDS, REMEMBER_PODS = 120.0, 100
#: From this number of pods on, changes are gathered, for this number of seconds for each pod.
MANY, DELAY = 100, 20e-6

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
    on_lost: Callable[[Workload, Mapping[str, messages.Ending]], None]


class Workload:
    def __init__(
        self,
        record: WorkloadRecord,
        generations: tuple[Generation, ...],
        shared: WorkloadServices,
    ) -> None:
        self.record = record
        self.pods: list[PodStatus] = []
        #: The names of its pods; of ending pods, until they brought all outcomes.
        self.pod_names: frozenset[str] = frozenset()
        self._ending: frozenset[str] = frozenset()
        # Pods that went away, with the moment.
        self._lost: dict[str, tuple[float, messages.PodView]] = {}
        self._reason = ""
        self._pod_failure: Failure | None = None
        self._specs = {generation.number: generation.spec for generation in generations}
        self._grants = {generation.number: generation.grant for generation in generations}
        self._services = shared
        failure = exceptions.parse_json(record.failure.encode()) if record.failure else None
        self._rollout = Rollout(wanted=record.generation, good=record.good, failure=failure)
        self._sessions: dict[str, PodSession] = {}
        self._reports: dict[str, PodReport] = {}
        self._deploys = PendingDeploys(shared.clock)
        self._members = MemberList()
        self._activities = Activities()
        self._reload: tuple[int, bytes] = (0, b"")
        # Why a pod ended whose successor was not notified of it yet.
        self._replaced = ""
        # Pods of an earlier controller are all known only when its successor says so.
        self._knows_pods = not generations
        self._rendezvous = Rendezvous(
            record.name,
            ports=self._world_ports,
            now=shared.clock.time(),
            kept=world.unpack(record.worlds) if record.worlds else (),
        )
        self._course: object = None
        self._announcing: asyncio.Task[None] | None = None
        self._ticking: Timer | None = None
        self._debounce = Debounce(shared.clock, self.pods_changed)
        self._event_reporter = PodEventReporter(self._deploys.report)
        self._apply = BackgroundApply(shared.backend)
        # The programs of this machine that have deployed the workload, or looked it up.
        self._programs: set[str] = set()
        #: Notified of every change of the workload.
        self.changes = Changes()
        self.is_gone = False
        self._since = shared.clock.time()
        self._idle = IdleWatch(
            shared.clock,
            seconds_left=self._idle_left,
            on_idle=lambda: shared.on_idle(self),
        )

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
        """All generations that are kept, the wanted one, which is the latest, first."""
        return [self._specs[number] for number in sorted(self._specs, reverse=True)]

    @property
    def grants(self) -> list[Grant | None]:
        """The grants of the stored generations, in order."""
        return [self._grants.get(number) for number in sorted(self._specs, reverse=True)]

    @property
    def creator(self) -> messages.Creator | None:
        """The user who deployed the wanted generation; `None` if an earlier version deployed it."""
        grant = self.grants[0]
        if grant is None and self._services.backend.name == "local":
            return messages.Creator("", self.spec.username)
        return None if grant is None else grant.creator

    def mounted(self, pod: str) -> Mounted:
        """The mounts of a pod that the user who deployed it must not see."""
        return self._services.backend.mounted(*self.key, pod)

    def _pods_without_agent(self) -> list[PodStatus]:
        return [pod for pod in self.pods if pod.name not in self._sessions]

    def has_session(self, pod: str) -> bool:
        return pod in self._sessions

    def view(self) -> messages.WorkloadView:
        """The workload, as lists and clients see it."""
        record, spec = self.record, self._services.backend.applied(self.spec)
        manifest = rendering.of_workload(spec)
        cut_off = self._rendezvous.cut_off
        pods = views.pod_views(self.pods, self._reports, self._rollout, cut_off)
        url = self._services.backend.url(spec, manifest)
        failure = self._failure()
        return messages.WorkloadView(
            spec=spec,
            generation=record.generation,
            status=messages.TERMINATING
            if self._ending
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
            reason=self._reason,
            lost=tuple(pod for _, pod in self._lost.values() if pod.name not in self.pod_names),
            world=self._members.world,
            creator=self.creator,
            pool=self.pool,
            equipment=self._services.backend.equipment(*self.key),
            pods_wanted=self._rollout.total,
        )

    @property
    def pool(self) -> tuple[int, ...]:
        """The pods of a pool that calls go to: those that its selector found at the last deploy."""
        if not self.spec.compute.is_pool:
            return ()
        if self.record.pool:
            return tuple(map(int, self.record.pool.split(",")))
        return self._present()

    def _present(self) -> tuple[int, ...]:
        return tuple(sorted(pod.ordinal for pod in self.pods if pod.name in self._rollout.pods))

    def opened_by(self, program: str) -> None:
        """A program of this machine, as `processes.identity` has it, has a handle from now on."""
        if program and self._services.backend.name == "local":
            if len(self._programs) >= MANY:
                self._programs = set(filter(processes.is_alive, self._programs))
            self._programs.add(program)

    def use(self, program: str) -> Use:
        """The use of the workload by others than this program."""
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
            others = (other for other in self._programs if other != program)
            pid = next((processes.pid_of(one) for one in others if processes.is_alive(one)), None)
            return f"the program {pid} has it open" if pid else ""
        now = self._services.clock.time()
        left = self._activities.seconds_left(ttl=UNUSED, since=self._since, now=now)
        is_unused = left == 0.0 and not self._deploys
        return "" if is_unused else f"it may have been used in the last {UNUSED / 60:.0f} minutes"

    def _failure(self) -> Failure | None:
        return self._pod_failure if self._rollout.failure is None else self._rollout.failure

    # --------------------------------------------------------------------------------- deploys

    async def deploy(self, spec: WorkloadSpec, grant: Grant | None = None) -> DeployProgress:
        """Make this spec the wanted generation; returns the events on the way to it."""
        running = self._deploys.find(self.record.generation)
        # An instance that is being made is a new one for everybody who waits for it.
        if running is not None and spec.is_like(self.spec):
            return running
        is_new = not self._specs or spec != self.spec or self._rollout.failure is not None
        # Ranks whose world has lost members are started again, all of them.
        is_new = is_new or self._rendezvous.has_losses
        if is_new:
            return await self._begin(spec, grant)
        if grant != self.grants[0]:
            generation = Generation(self.record.generation, self.spec, grant)
            self._services.state.put_workload(self.record, generation=generation)
            self._grants[generation.number] = grant
        return await self._wait(messages.Accepted(generation=self.record.generation, changed=False))

    async def _begin(self, spec: WorkloadSpec, grant: Grant | None) -> DeployProgress:
        before, now = self.record, self._services.clock.time()
        number = before.generation + 1
        keep = {number, before.generation, before.good} - {0}
        record = replace(before, generation=number, failure="", updated=now)
        generation = Generation(number, spec, grant)
        self._services.state.put_workload(record, generation=generation, keep=sorted(keep))
        specs, grants, since = self._specs, self._grants, self._since
        # Before it is durable: a change that is kept meanwhile must not undo it.
        self.record, self._since = record, now
        self._specs = {n: kept for n, kept in specs.items() if n in keep} | {number: spec}
        self._grants = {n: grants.get(n) for n in self._specs} | {number: grant}
        try:
            await self._services.state.flush(*self.key)
        except KubetorchError:
            self._specs, self._grants, self._since = specs, grants, since
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
        if accepted.changed or not self._rollout.is_served:
            await self._apply.start(self.spec, lambda failure: self._applied(progress, failure))
        else:
            self._applied(progress, None)
        return progress

    def _applied(self, progress: DeployProgress, failure: Failure | None) -> None:
        if failure is None:
            manifest = rendering.of_workload(self.spec)
            for text in self._services.backend.warnings(self.spec.compute, manifest):
                progress.add(messages.Stage("backend", text, warning=True))
        # Only now: pods that the backend replaces are not to load the generation.
        self.pods_changed()
        self._handle(rollout.Deployed(progress.generation, failure))
        if failure is not None:
            self._deploys.end(progress, messages.Failed(failure=failure.to_dict()))

    def _expire(self, progress: DeployProgress, timeout: float) -> None:
        waits = views.late(self.pods, self._reports, self._rollout, self._reason)
        error = self._rendezvous.no_quorum(progress.generation)
        self._give_up(progress, error or views.timed_out(self.record.name, timeout, waits))

    def end_deploy(self, error: KubetorchError) -> None:
        """The deploy of the wanted generation, if one runs, cannot succeed."""
        progress = self._deploys.find(self.record.generation)
        if progress is not None:
            self._give_up(progress, error)

    def _give_up(self, progress: DeployProgress, error: KubetorchError) -> None:
        failure = exceptions.describe_refusal(error)
        self._handle(rollout.GaveUp(progress.generation, failure))
        self._deploys.end(progress, messages.Failed(failure=failure.to_dict()))

    # ------------------------------------------------------------------------------------ pods

    def adopted(self) -> None:
        """The backend has taken up what an earlier controller left: its pods are known."""
        self._knows_pods = True
        held = [port for one in self._rendezvous.worlds for port in one.ports]
        if held:
            self._services.backend.hold_ports(*self.key, held)
        self.pods_changed()

    def pods_changed_soon(self) -> None:
        """The backend notified us that something about the pods changed."""
        self._debounce.changed(len(self.pods))

    def pods_changed(self) -> None:
        """Take over the pods as the backend has them now."""
        self._debounce.close()
        if self.is_gone:
            return
        backend = self._services.backend
        before, self.pods = self.pods, backend.pods(*self.key)
        state, names = self._rollout, frozenset(pod.name for pod in self.pods)
        is_behind = not state.failure and self._apply.is_behind(self._specs, state.wanted)
        self.pod_names = names | self._ending
        current = frozenset(p.name for p in self.pods if not (p.is_retiring or is_behind))
        self._activities.keep(self.pod_names)
        if not self._ending:
            self._remember(lost_pods(before, self.pods), before)
        failures = (pod.failure for pod in self.pods if not pod.is_retiring and pod.failure)
        self._pod_failure = next(failures, None)
        trouble, epoch = backend.trouble(*self.key), self.record.epoch
        self._reason = self._rendezvous.trouble = trouble.reason
        is_changed = self._members.update(self.pods, self._reports)
        if self._knows_pods and (self.pods or not trouble.reason):
            self._gather(world.PodsChanged(self.pods))
        # Who is lost of a world may have been said with them already.
        self._send_members(is_changed=is_changed and self.record.epoch == epoch)
        for pod in self.pods:
            if pod.is_down:
                self._replaced = pod.reason or self._replaced
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

    def _remember(self, lost: Mapping[str, messages.Ending], before: Sequence[PodStatus]) -> None:
        """Pods went away: their calls have failed, and callers ask why."""
        now = self._services.clock.time()
        for pod in before:
            if (ending := lost.get(pod.name)) is not None:
                gone = messages.PodView(
                    name=pod.name, ordinal=pod.ordinal, phase="Gone", ended=ending
                )
                self._lost[pod.name] = now, gone
        kept = [(n, one) for n, one in self._lost.items() if now - one[0] < REMEMBER_SECONDS]
        self._lost = dict(kept[-REMEMBER_PODS:])
        if lost:
            self._services.on_lost(self, lost)
            ends = (f"pod {pod} ended ({ending.reason})" for pod, ending in lost.items())
            self._replaced = ", ".join(ends)

    def connected(self, hello: messages.Hello, session: PodSession) -> None:
        old = self._sessions.get(hello.pod)
        self._sessions[hello.pod] = session
        self._reports[hello.pod] = PodReport(url=hello.url)
        if old is not None:
            old.close("another session of this pod began")
        self._activities.reported(hello.pod, None)
        session.send_text(self._members.message(self.record.epoch))
        self._send_members(is_changed=self._members.reported(hello.pod, self._reports))
        self._handle(rollout.Connected(hello.pod, hello.generation))
        self._gather(world.Connected(hello.pod, hello.url, hello.incarnation))

    def refused(self, pod: str, error: KubetorchError) -> None:
        """A pod must not have what it has mounted."""
        self._services.backend.end_pod(*self.key, pod, error)
        self._handle(rollout.GaveUp(self.record.generation, exceptions.describe_refusal(error)))

    def disconnected(self, pod: str, session: PodSession) -> None:
        if self._sessions.get(pod) is session:
            del self._sessions[pod]
            del self._reports[pod]
            self._activities.reported(pod, None)
            self._send_members(is_changed=self._members.reported(pod, self._reports))
            self._handle(rollout.Lost(pod))
            self._gather(world.Disconnected(pod))

    def silent(self, pod: str) -> None:
        """A pod sent nothing for too long; its session is still there."""
        self._reports[pod] = replace(self._reports[pod], is_silent=True, activity=None)
        self._activities.reported(pod, None)
        self._handle(rollout.Lost(pod))

    def no_longer_silent(self, pod: str, serving: int) -> None:
        """A pod that was silent sent a message."""
        self._reports[pod] = replace(self._reports[pod], is_silent=False)
        self._handle(rollout.Connected(pod, serving))

    def observed(self, pod: str, message: messages.Observed) -> None:
        failure = None if message.failure is None else exceptions.parse(message.failure)
        self._handle(rollout.Observed(pod, message.generation, message.serving, failure))
        if failure is None:
            self._deploys.report(views.served(pod, self._rollout), message.generation)

    def staged(self, pod: str, message: messages.StageReport) -> None:
        self._reports[pod] = replace(
            self._reports[pod], stage=" ".join(filter(None, (message.stage, message.message)))
        )
        self._deploys.report(views.stage(pod, message), message.generation)

    def logged(self, pod: str, message: messages.LogReport) -> None:
        """The user's code wrote a line while it was loaded."""
        self._deploys.report(views.line(pod, message), message.generation)

    def active(self, pod: str, message: messages.Activity) -> None:
        self._reports[pod] = replace(self._reports[pod], activity=message)
        self._activities.reported(pod, message)
        if message.is_stopping and self._rendezvous.is_wanted:
            self._gather(world.Stopping(pod))
        if message.last > self.record.active + ACTIVITY_STEP and message.calls == 0:
            self._keep(replace(self.record, active=message.last))
        self._idle.update()

    def heard(self, pod: str) -> None:
        if self._rendezvous.is_wanted:
            self._rendezvous.heard(pod, self._services.clock.time())

    def regroup(self, pod: str, message: messages.Regroup) -> None:
        """A call on a pod asks for a new world."""
        self._gather(world.Regroup(pod, message.id, message.epoch, message.is_quorum_awaited))

    def probed(self, pod: str, message: messages.Probed) -> None:
        """A pod has tried to reach another one."""
        self._gather(world.Probed(pod, message.id, message.is_reached))

    def send(self, pod: str, message: messages.FromController) -> bool:
        """Send a message to the agent of a pod; returns whether it has a session."""
        session = self._sessions.get(pod)
        if session is not None:
            session.send(message)
        return session is not None

    def senders(self) -> dict[str, Callable[[messages.FromController], None]]:
        """What sends a message to the agent of each connected pod, those that serve first."""
        names = sorted(self._sessions, key=lambda name: not self._rollout.serving(name))
        return {name: self._sessions[name].send for name in names}

    # ----------------------------------------------------------------------------------- ending

    async def delete(self, grace: float) -> list[str]:
        """End the pods; returns what is left, as in `Backend.delete`."""
        error = ServiceNotFoundError(f"{self.record.name} was torn down while it was deployed")
        self._deploys.fail_all(error)
        await self._apply.stop()
        self._ending = self.pod_names
        for session in self._sessions.values():
            session.send(messages.Terminate(grace=grace, reason=messages.TORN_DOWN))
        left = await self._services.backend.delete(*self.key, grace=grace)
        self.close("the service was torn down")
        return left

    def close(self, reason: str, *, goes_on: bool = False) -> None:
        """Stop all timers, and end the sessions; if it `goes_on`, then under another controller."""
        self._idle.close()
        self._debounce.close()
        self._apply.cancel()
        for one in (self._announcing, self._ticking):
            if one is not None:
                one.cancel()
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
            self._rollout.wanted,
            ready=self._ready if self._rollout.is_served else None,
            failure=self._failure(),
        )
        self._plan_world()
        self._services.state.touch(*self.key)
        self._services.backend.mark_ready(*self.key, self._rollout.ready)
        self._idle.update()
        self.changes.notify()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case rollout.Reload(pod, generation):
                self._sessions[pod].send_text(self._reload_text(pod, generation))
            case rollout.Reached(generation) | rollout.Recovered(generation):
                self._since, self._replaced = self._services.clock.time(), ""
                self._keep(replace(self.record, good=generation, failure=""))
                _log.info("generation reached workload=%s/%s generation=%s", *self.key, generation)
            case rollout.NotReached(generation, failure):
                self._keep(replace(self.record, failure=failure.to_json().decode()))
                _log.info("generation given up workload=%s/%s generation=%s", *self.key, generation)

    def _release_part(self) -> None:
        """Some pods of a distributed service are no use without the others: keep none of them."""
        is_whole = self._rollout.is_complete and not self._pods_without_agent()
        if self.spec.compute.distribution is not None and not is_whole:
            self._apply.release(self.spec, self._specs.get(self.record.good))

    def _keep(self, record: WorkloadRecord) -> None:
        self.record = record
        try:
            self._services.state.put_workload(record)
        except KubetorchError as error:  # the next change writes all of it
            _log.warning("workload not kept workload=%s/%s error=%s", *self.key, error)

    def _ready(self) -> messages.Ready:
        if self.spec.compute.is_pool:
            self._keep(replace(self.record, pool=",".join(map(str, self._present()))))
            is_changed, self._members.pool = self._members.pool != self.pool, self.pool
            self._send_members(is_changed=is_changed)
        return messages.Ready(generation=self._rollout.wanted, workload=self.view())

    def _reload_text(self, pod: str, generation: int) -> bytes:
        spec = self._specs[generation]
        is_again = generation == self.record.good and not self._rollout.serving(pod)
        if is_again and spec.compute.autoscaling is None and not spec.compute.is_selector_only:
            # It was served already, so this pod takes the place of another one.
            why, self._replaced = self._replaced or "its pod was started again", ""
            return messages.encode(messages.Reload(generation=generation, spec=spec, replaces=why))
        if self._reload[0] != generation:
            message = messages.Reload(generation=generation, spec=spec)
            self._reload = (generation, messages.encode(message))
        return self._reload[1]

    # ----------------------------------------------------------------------------------- world

    def _plan_world(self) -> None:
        """Form a world for the generation that pods should serve, if it is distributed."""
        state = self._rollout
        course = (state.wanted, state.good, state.failure is None, state.pods, state.retiring)
        if course == self._course or self.is_gone:
            return
        self._course = course
        generation = state.wanted if state.failure is None else state.good or state.wanted
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
        self._gather(world.Wanted(plan, pods))
        if plan is not None and self._ticking is None:
            self._tick()

    def _tick(self) -> None:
        self._ticking = None
        if self._rendezvous.is_wanted:
            self._gather(world.Tick())
            self._ticking = self._services.clock.call_later(world.TICK, self._tick)

    def _world_ports(self, plan: Plan, members: Sequence[messages.Member]) -> tuple[int, ...]:
        distribution = self._specs[plan.generation].compute.distribution
        assert distribution is not None
        each = plan.processes if distribution.has_port_each else 1
        wanted = PortRequest(
            distribution.port,
            is_declared=distribution.is_port_declared,
            count=len(members) * each if distribution.has_port_each else 1,
            per_pod=each,
            further=distribution.further_ports(len(members)),
        )
        return self._services.backend.ports(*self.key, wanted)

    def _gather(self, event: world.Event) -> None:
        """Pass an event to the world of a distributed service."""
        if self._ending or self.is_gone:
            return  # members of a service that is torn down are not lost
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
                case world.Repeat(pod):
                    if pod in self._sessions:
                        self._sessions[pod].send_text(self._members.message(self.record.epoch))
                case world.Ask(pod, request, url):
                    self.send(pod, messages.Probe(id=request, url=url))

    def _serve_members(self) -> None:
        """A quorum is there: the service is up when these pods serve."""
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
        self._keep(replace(self.record, worlds=world.pack(self._rendezvous.worlds)))
        if self._announcing is None:
            self._announcing = asyncio.create_task(self._flush_and_announce())

    async def _flush_and_announce(self) -> None:
        try:
            await self._services.state.flush_worlds(*self.key)
        finally:
            self._announcing = None
        self._announce()

    def _announce(self) -> None:
        """Notify pods of the present world, unless a new world is about to be announced."""
        if self._announcing is None:
            current = self._rendezvous.world
            self._members.world = current
            packed = world.pack(self._rendezvous.worlds) if current else self.record.worlds
            self.record = replace(self.record, worlds=packed)
            self._send_members(is_changed=True)
            self.changes.notify()

    def _send_members(self, *, is_changed: bool) -> None:
        if is_changed:
            self._keep(replace(self.record, epoch=self.record.epoch + 1))
            text = self._members.message(self.record.epoch)
            for session in self._sessions.values():
                session.send_text(text)

    def _idle_left(self) -> float | None:
        ttl = self.spec.compute.inactivity_ttl if self._specs else None
        if ttl is None or self._deploys:
            return None
        now = self._services.clock.time()
        return self._activities.seconds_left(ttl=idle_patience(ttl), since=self._since, now=now)


class BackgroundApply:
    """Applies the latest spec of one workload in the background: a backend may take long for it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._task: asyncio.Task[None] | None = None

    def is_behind(self, specs: Mapping[int, WorkloadSpec], number: int) -> bool:
        """True if only an earlier generation is applied, so that no pod is of this one."""
        spec = specs.get(number)
        there = None if spec is None else self._backend.applied(spec)
        return there != spec and any(
            earlier < number and there == specs[earlier] for earlier in specs
        )

    async def start(self, spec: WorkloadSpec, on_end: Callable[[Failure | None], None]) -> None:
        """Apply this spec, and no longer an earlier one."""
        await self.stop()
        self._task = asyncio.create_task(self._apply(spec, on_end), name=f"apply {spec.name}")

    def release(self, spec: WorkloadSpec, good: WorkloadSpec | None) -> None:
        """Give back the pods of a spec, but for those that the last good one had."""
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
    """Looks at pods at once where there are few, else once for many changes of them."""

    def __init__(self, clock: Clock, look: Callable[[], None]) -> None:
        self._clock = clock
        self._look = look
        self._timer: Timer | None = None

    def changed(self, pods: int) -> None:
        if pods < MANY:
            self._look()
        elif self._timer is None:
            self._timer = self._clock.call_later(pods * DELAY, self._look)

    def close(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


class PodEventReporter:
    """Reports to deploys what happened to pods, each thing when it is new."""

    def __init__(self, report: Callable[[messages.Stage], None]) -> None:
        self._report = report
        # By pod; the reason that no pod has for itself is under the empty name.
        self._reasons: dict[str, str] = {}

    def report(
        self, pods: Sequence[PodStatus], trouble: Trouble, news: Sequence[EventLine]
    ) -> None:
        """Report what happened to pods, and why they do not run or are not there.

        A reason that many pods have is reported once, and an event that a reason explains is that
        reason. What fails a deploy is left to the error.
        """
        known = set(self._reasons.values())
        reasons = {pod.name: pod.reason for pod in pods if pod.failure is None}
        if trouble.failure is None:
            reasons[""] = trouble.reason
        bad = set()
        for one in news:
            text = one.message.partition(": ")[2]
            explained = [reason for reason in reasons.values() if text and text in reason]
            if not explained:
                self._report(
                    messages.Stage("event", one.message, one.pod or None, warning=one.is_warning)
                )
            elif one.is_warning:
                bad.update(explained)
        for pod, reason in reasons.items():
            if reason and reason not in known:
                known.add(reason)
                self._report(messages.Stage("event", reason, pod or None, warning=reason in bad))
        self._reasons = reasons


class MemberList:
    """The pods of a workload, as a message that is the same for all of them."""

    def __init__(self) -> None:
        self._pods: dict[str, PodStatus] = {}
        self._members: dict[str, messages.Member] = {}
        self._message: tuple[int, bytes] = (-1, b"")
        #: That of a distributed service.
        self.world: messages.World | None = None
        #: That of a service whose pods a selector finds.
        self.pool: tuple[int, ...] = ()

    def update(self, pods: Sequence[PodStatus], reports: Mapping[str, PodReport]) -> bool:
        """Take these pods as members; returns whether any member changed."""
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
        return messages.Member(name, pod.ordinal, views.url(pod, reports.get(name)))


def lost_pods(
    before: Sequence[PodStatus], after: Sequence[PodStatus]
) -> dict[str, messages.Ending]:
    """The pods that could run calls before and cannot any more, with the reason of each loss."""
    now = {pod.name: pod for pod in after}
    gone = {}
    for pod in before:
        if not pod.may_run_calls:
            continue
        last = now.get(pod.name)
        if last is None or last.uid != pod.uid:  # another one may have its name by now
            gone[pod.name] = pod.ending or DELETED
        elif not last.may_run_calls:
            gone[pod.name] = last.ending or DELETED
    return gone


def idle_patience(ttl: str) -> float:
    """Seconds after which a workload with this `inactivity_ttl` is torn down."""
    return quantity.seconds(ttl) + REPORTING


class Activities:
    """The last activities of the pods of a workload.

    It is idle if all its pods report that no call runs, and have done so for the whole time. A pod
    without a session may be busy: as long as one is away, the workload is not idle.
    """

    def __init__(self) -> None:
        self._pods: Set[str] = frozenset()
        self._quiet: set[str] = set()
        #: The time of the last begin or end of a call.
        self.last = 0.0

    def keep(self, pods: Set[str]) -> None:
        self._pods = pods
        self._quiet &= pods

    def reported(self, pod: str, activity: messages.Activity | None) -> None:
        """Take over the activity of a pod; `None` when the pod is away."""
        if activity is not None:
            self.last = max(self.last, activity.last)
        if activity is None or activity.calls > 0:
            self._quiet.discard(pod)
        elif pod in self._pods:
            self._quiet.add(pod)

    def seconds_left(self, *, ttl: float, since: float, now: float) -> float | None:
        """Seconds until the workload is torn down if nothing happens; `None` when it is not idle.

        A clock that was set back makes it wait at most one `ttl` longer.
        """
        if len(self._quiet) < len(self._pods):
            return None
        last = max(since, self.last)
        return max(0.0, min(ttl, last + ttl - now))


class IdleWatch:
    def __init__(
        self,
        clock: Clock,
        *,
        seconds_left: Callable[[], float | None],
        on_idle: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._seconds_left = seconds_left
        self._on_idle = on_idle
        self._timer: Timer | None = None

    def update(self) -> None:
        self.close()
        left = self._seconds_left()
        if left is not None:
            self._timer = self._clock.call_later(left, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._seconds_left() == 0.0:
            self._on_idle()
        else:
            self.update()
