"""One workload at work: its rollout, the sessions of its pods, and who waits for it.

backend ──(pods changed)──┐
sessions ─(hello, …)──────┼──► Rollout (pure) ──► effects: Reload to sessions, records in
deploys ──(a generation)──┘                        the state, events for who waits
"""

from __future__ import annotations

import json
import logging
from collections.abc import Set

from msgspec.structs import replace

from kubetorch.controller import agentless, departures, idle, rollout, views
from kubetorch.controller.applying import Applying
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.gathering import Gathering
from kubetorch.controller.idle import Activities, IdleWatch
from kubetorch.controller.membership import Membership
from kubetorch.controller.progress import Progress
from kubetorch.controller.rollout import Effect, Event, Failure, Rollout
from kubetorch.controller.state import Generation, WorkloadRecord
from kubetorch.controller.surroundings import PodSession, Surroundings
from kubetorch.controller.telling import Telling
from kubetorch.controller.views import Heard
from kubetorch.controller.waiting import Waiting, describe
from kubetorch.errors import KubetorchError, ServiceNotFoundError
from kubetorch.lib.changes import Changes
from kubetorch.manifests import deployment, services
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages
from kubetorch.wire.messages import (
    Accepted,
    Activity,
    Failed,
    FromController,
    Hello,
    LogReport,
    Observed,
    Ready,
    Reload,
    StageReport,
    Terminate,
    WorkloadView,
)

_log = logging.getLogger(__name__)


class Workload:
    """One workload.

    Args:
        record: What is kept of it.
        generations: The generations that are kept.
        surroundings: What it works with.
    """

    def __init__(
        self,
        record: WorkloadRecord,
        generations: tuple[Generation, ...],
        surroundings: Surroundings,
    ) -> None:
        self.record = record
        self.pods: list[PodStatus] = []
        self._names: frozenset[str] = frozenset()
        self._ending: frozenset[str] = frozenset()
        self._pod_failure: Failure | None = None
        self._specs = {generation.number: generation.spec for generation in generations}
        self._with = surroundings
        failure = json.loads(record.failure) if record.failure else None
        self._rollout = Rollout(wanted=record.generation, good=record.good, failure=failure)
        self._sessions: dict[str, PodSession] = {}
        self._heard: dict[str, Heard] = {}
        self._waiting = Waiting(surroundings.clock)
        self._membership = Membership()
        self._activities = Activities()
        self._reload: tuple[int, bytes] = (0, b"")
        self._gathering = Gathering(surroundings.clock, self.pods_changed)
        self._telling = Telling(self._waiting.tell)
        self._applying = Applying(surroundings.backend)
        #: Says that anything about it changed.
        self.changes = Changes()
        self.is_gone = False
        self._since = surroundings.clock.time()
        self._idle = IdleWatch(
            surroundings.clock,
            seconds_left=self._idle_left,
            on_idle=lambda: surroundings.on_idle(self),
        )

    # ------------------------------------------------------------------------------- questions

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.record.namespace, self.record.name

    @property
    def spec(self) -> WorkloadSpec:
        """The wanted generation."""
        return self._specs[self.record.generation]

    @property
    def specs(self) -> list[WorkloadSpec]:
        """All generations that are kept, with their blobs; the wanted one, the latest, first."""
        return [self._specs[number] for number in sorted(self._specs, reverse=True)]

    @property
    def pod_names(self) -> Set[str]:
        """The names of its pods; of those that are told to end, until they brought all outcomes."""
        return self._names

    def has_session(self, pod: str) -> bool:
        """Whether the agent of a pod is connected."""
        return pod in self._sessions

    def view(self, *, token: str = "", token_expires: float = 0.0) -> WorkloadView:
        """The workload, as lists and clients see it."""
        record, spec = self.record, self._with.backend.applied(self.spec)
        manifest = deployment.of_workload(spec)
        pods = views.pod_views(self.pods, self._heard, self._rollout)
        url = self._with.backend.url(spec, manifest)
        return WorkloadView(
            spec=spec,
            generation=record.generation,
            status=views.status(self.pods, self._heard, self._rollout, spec),
            pods=pods,
            url=url or next((pod.url for pod in pods if pod.is_ready), ""),
            scaler=url if services.is_scaled(spec.compute, manifest) else "",
            token=token,
            token_expires=token_expires,
            created=record.created,
            updated=record.updated,
            last_active=record.active,
            failure=self._failure(),
            notes=self._with.backend.notes(spec.compute, manifest),
            kind=manifest["kind"],
        )

    def _failure(self) -> Failure | None:
        """Why the wanted generation is not served."""
        return self._pod_failure if self._rollout.failure is None else self._rollout.failure

    # --------------------------------------------------------------------------------- deploys

    async def deploy(self, spec: WorkloadSpec) -> Progress:
        """Want this spec; what happens on the way to it, from the start."""
        running = self._waiting.find(self.record.generation)
        # An instance that is being made is a new one for everybody who waits for it.
        if running is not None and spec.is_like(self.spec):
            return running
        is_new = not self._specs or spec != self.spec or self._rollout.failure is not None
        if is_new:
            return await self._begin(spec)
        return await self._wait(Accepted(generation=self.record.generation, changed=False))

    async def _begin(self, spec: WorkloadSpec) -> Progress:
        before, now = self.record, self._with.clock.time()
        number = before.generation + 1
        keep = {number, before.generation, before.good} - {0}
        record = replace(before, generation=number, failure="", updated=now)
        generation = Generation(number, spec)
        self._with.state.put_workload(record, generation=generation, keep=sorted(keep))
        specs, since = self._specs, self._since
        # Before it is durable: a change that is kept meanwhile must not undo it.
        self.record, self._since = record, now
        self._specs = {n: kept for n, kept in specs.items() if n in keep} | {number: spec}
        try:
            await self._with.state.flush(*self.key)
        except KubetorchError:
            self._specs, self._since = specs, since
            self.record = replace(
                self.record,
                generation=before.generation,
                failure=before.failure,
                updated=before.updated,
            )
            raise
        _log.info("generation wanted workload=%s/%s generation=%s", *self.key, number)
        return await self._wait(Accepted(generation=number))

    async def _wait(self, accepted: Accepted) -> Progress:
        """Everything that happens until the wanted generation is served, or given up."""
        warned = views.warned(self._with.backend, deployment.of_workload(self.spec))
        progress = Progress(accepted.generation, accepted, *warned)
        timeout = self.spec.compute.launch_timeout
        self._waiting.add(progress, timeout, lambda: self._expire(progress, timeout))
        if self.spec.compute.is_selector_only:
            agentless.expect(self._with.clock, progress, self, self._give_up)
        if accepted.changed or not self._rollout.is_served:
            await self._applying.start(self.spec, lambda failure: self._applied(progress, failure))
        else:
            self._begin_rollout(accepted.generation)
        return progress

    def _applied(self, progress: Progress, failure: Failure | None) -> None:
        self._begin_rollout(progress.generation, failure)
        if failure is not None:
            self._waiting.end(progress, Failed(failure=failure))

    def _begin_rollout(self, generation: int, failure: Failure | None = None) -> None:
        # Only now: pods that the backend replaces are not told to load the generation.
        self.pods_changed()
        self._handle(rollout.Deployed(generation, failure))

    def _expire(self, progress: Progress, timeout: float) -> None:
        waits = views.late(self.pods, self._heard, self._rollout)
        self._give_up(progress, views.timed_out(self.record.name, timeout, waits))

    def _give_up(self, progress: Progress, error: KubetorchError) -> None:
        failure = describe(error)
        self._handle(rollout.GaveUp(progress.generation, failure))
        self._waiting.end(progress, Failed(failure=failure))

    # ------------------------------------------------------------------------------------ pods

    def pods_changed_soon(self) -> None:
        """The backend says that something about the pods is different."""
        self._gathering.changed(len(self.pods))

    def pods_changed(self) -> None:
        """Look at the pods."""
        self._gathering.close()
        if self.is_gone:
            return
        backend = self._with.backend
        before, self.pods = self.pods, backend.pods(*self.key)
        state, names = self._rollout, frozenset(pod.name for pod in self.pods)
        is_behind = not state.failure and self._applying.is_behind(self._specs, state.wanted)
        self._names = names | self._ending
        current = frozenset(p.name for p in self.pods if not (p.is_retiring or is_behind))
        self._activities.keep(self._names)
        if not self._ending and (lost := departures.between(before, self.pods)):
            self._with.on_lost(self, lost)
        failures = (pod.failure for pod in self.pods if not pod.is_retiring and pod.failure)
        self._pod_failure = next(failures, None)
        self._tell_members(is_news=self._membership.update(self.pods, self._heard))
        for pod in self.pods:
            if (session := self._sessions.get(pod.name)) is not None and pod.is_down:
                # The end of its connection may be heard of later.
                self.disconnected(pod.name, session)
                session.close("its agent ended")
            elif pod.ending is not None:
                self.send(pod.name, pod.ending)
        self._handle(rollout.PodsChanged(current, names - current, backend.expected(*self.key)))
        trouble = backend.trouble(*self.key)
        news = backend.news(*self.key) if self._waiting else []
        self._telling.tell(self.pods, trouble, news)
        for failure in filter(None, (trouble.failure, self._pod_failure)):
            self._handle(rollout.GaveUp(self.record.generation, failure))

    def connected(self, hello: Hello, session: PodSession) -> None:
        """A session of a pod began."""
        old = self._sessions.get(hello.pod)
        self._sessions[hello.pod] = session
        self._heard[hello.pod] = Heard(url=hello.url)
        if old is not None:
            old.close("another session of this pod began")
        self._activities.heard(hello.pod, None)
        session.send_text(self._membership.message(self.record.epoch))
        self._tell_members(is_news=self._membership.heard(hello.pod, self._heard))
        self._handle(rollout.Connected(hello.pod, hello.generation))

    def disconnected(self, pod: str, session: PodSession) -> None:
        """A session of a pod ended."""
        if self._sessions.get(pod) is session:
            del self._sessions[pod]
            del self._heard[pod]
            self._activities.heard(pod, None)
            self._tell_members(is_news=self._membership.heard(pod, self._heard))
            self._handle(rollout.Lost(pod))

    def silent(self, pod: str) -> None:
        """A pod has not been heard of for too long; its session is still there."""
        self._heard[pod] = replace(self._heard[pod], is_silent=True, activity=None)
        self._activities.heard(pod, None)
        self._handle(rollout.Lost(pod))

    def heard_again(self, pod: str, serving: int) -> None:
        """A pod that was silent is heard of."""
        self._heard[pod] = replace(self._heard[pod], is_silent=False)
        self._handle(rollout.Connected(pod, serving))

    def observed(self, pod: str, message: Observed) -> None:
        """A pod serves a generation, or failed to."""
        self._handle(rollout.Observed(pod, message.generation, message.serving, message.failure))
        if message.failure is None:
            self._waiting.tell(views.served(pod, self._rollout), message.generation)

    def staged(self, pod: str, message: StageReport) -> None:
        """A pod says how far it is."""
        self._heard[pod] = replace(self._heard[pod], stage=message.stage)
        self._waiting.tell(views.stage(pod, message), message.generation)

    def logged(self, pod: str, message: LogReport) -> None:
        """The user's code wrote a line while it was loaded."""
        self._waiting.tell(views.line(pod, message), message.generation)

    def active(self, pod: str, message: Activity) -> None:
        """A pod says how busy it is."""
        self._heard[pod] = replace(self._heard[pod], activity=message)
        self._activities.heard(pod, message)
        if message.last > self.record.active + idle.STEP and message.calls == 0:
            self._keep(replace(self.record, active=message.last))
        self._idle.update()

    def send(self, pod: str, message: FromController) -> bool:
        """Tell the agent of a pod; whether it has a session."""
        session = self._sessions.get(pod)
        if session is not None:
            session.send(message)
        return session is not None

    # ----------------------------------------------------------------------------------- ending

    async def delete(self, grace: float) -> None:
        """End its pods; returns when nothing of them is left."""
        error = ServiceNotFoundError(f"{self.record.name} was torn down while it was deployed")
        self._waiting.fail_all(error)
        await self._applying.stop()
        self._ending = self._names
        for session in self._sessions.values():
            session.send(Terminate(grace=grace, reason="the service is torn down"))
        await self._with.backend.delete(*self.key, grace=grace)
        self.close("the service was torn down")

    def close(self, reason: str, *, goes_on: bool = False) -> None:
        """Stop all timers, and end the sessions; it `goes_on` under another controller."""
        self._idle.close()
        self._gathering.close()
        self._applying.cancel()
        self._waiting.interrupt(self.record.name, reason, goes_on=goes_on)
        self.is_gone = True
        self.changes.notify()
        sessions, self._sessions, self._heard = self._sessions, {}, {}
        for session in sessions.values():
            session.close(reason)

    # --------------------------------------------------------------------------------- effects

    def _handle(self, event: Event) -> None:
        for effect in self._rollout.handle(event):
            self._carry_out(effect)
        self._waiting.settle(
            self._rollout.wanted,
            ready=self._ready if self._rollout.is_served else None,
            failure=self._failure(),
        )
        self._with.state.touch(*self.key)
        self._with.backend.mark_ready(*self.key, self._rollout.ready)
        self._idle.update()
        self.changes.notify()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case rollout.Reload(pod, generation):
                self._sessions[pod].send_text(self._reload_text(generation))
            case rollout.Reached(generation) | rollout.Recovered(generation):
                self._since = self._with.clock.time()
                self._keep(replace(self.record, good=generation, failure=""))
                _log.info("generation reached workload=%s/%s generation=%s", *self.key, generation)
            case rollout.NotReached(generation, failure):
                self._keep(replace(self.record, failure=json.dumps(failure)))
                _log.info("generation given up workload=%s/%s generation=%s", *self.key, generation)
            case rollout.Superseded():
                return  # its progress is ended below

    def _keep(self, record: WorkloadRecord) -> None:
        self.record = record
        try:
            self._with.state.put_workload(record)
        except KubetorchError as error:  # the next change writes all of it
            _log.warning("workload not kept workload=%s/%s error=%s", *self.key, error)

    def _ready(self) -> Ready:
        return Ready(generation=self._rollout.wanted, workload=self.view())

    def _reload_text(self, generation: int) -> bytes:
        if self._reload[0] != generation:
            message = Reload(generation=generation, spec=self._specs[generation])
            self._reload = (generation, messages.encode(message))
        return self._reload[1]

    def _tell_members(self, *, is_news: bool) -> None:
        if is_news:
            self._keep(replace(self.record, epoch=self.record.epoch + 1))
            text = self._membership.message(self.record.epoch)
            for session in self._sessions.values():
                session.send_text(text)

    def _idle_left(self) -> float | None:
        ttl = self.spec.compute.inactivity_ttl if self._specs else None
        if ttl is None or self._waiting:
            return None
        now = self._with.clock.time()
        return self._activities.seconds_left(ttl=idle.patience(ttl), since=self._since, now=now)
