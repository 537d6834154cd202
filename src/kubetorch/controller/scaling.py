"""The scaling of one workload by its load, where no operator of the cluster scales it.

agents ──(PodLoad)───┐
callers ─(PodWait)───┼──► Scaler (pure) ──► Backend.scale
rollout ─(served)────┘

A first deploy, and one that changes the pod template, proves its code on `initial_scale` pods, or
on as many as it replaces; from then on the scaler decides. The number of pods, the template whose
code is proven, and the keywords that were changed since the deploy are stored: a controller that
starts goes on with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence, Set
from math import inf

import msgspec
from msgspec.structs import replace

from kubetorch.controller.backends.base import Backend
from kubetorch.controller.scaler import Scaler, ScalerSettings
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import AutoScalingError, CallRefusedError
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.clock import Clock, Timer
from kubetorch.manifests import knative, rendering
from kubetorch.specs import autoscaling, quantity
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages
from kubetorch.wire.messages import PodLoad, PodWait, ScalingView

_log = logging.getLogger(__name__)


class StoredScaling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a workload's scaling that survives the controller.

    Attributes:
        size: Number of pods.
        template: Digest of the pod template whose code is proven; empty before the first.
        settings: The keywords of `autoscale()` that were changed since the deploy.
    """

    size: int = 0
    template: str = ""
    settings: dict[str, object] = msgspec.field(default_factory=dict)


class Scaling:
    """The scaling of a workload, from its first deploy with `autoscale()` until `close`.

    Args:
        stored: What an earlier controller has stored of it; empty without that.
        store: Stores that text.
        on_change: Called after each change of the number of pods.
    """

    def __init__(
        self,
        spec: WorkloadSpec,
        *,
        stored: str,
        backend: Backend,
        clock: Clock,
        store: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._write = store
        self._on_change = on_change
        self._spec = spec
        self._saved = (
            msgspec.json.decode(stored.encode(), type=StoredScaling) if stored else StoredScaling()
        )
        #: The template of the deploy whose code is not proven yet; empty without one.
        self._unproven = ""
        self._loads: dict[str, PodLoad] = {}
        self._ready: Set[str] = frozenset()
        # By client: its calls without a pod, and the time until which they count.
        self._waits: dict[str, tuple[int, float]] = {}
        self._timer: Timer | None = None
        self._is_closed = False
        #: The time of the next decision, if nothing happens before.
        self._due = inf
        now = clock.time()
        self._scaler = Scaler(self._settings(), size=self._saved.size, now=now)
        #: Notified when other pods take calls than before, a pod has fewer calls, or pods fail.
        self.changes = Changes()
        #: How often pods failed to start.
        self._failures = 0
        if stored:
            self._apply_size(self._saved.size)

    # ------------------------------------------------------------------------------- questions

    @property
    def declared(self) -> AutoscalingSpec:
        """The declared settings, with those that were changed since."""
        declared = knative.scaling(self._spec.compute)
        assert declared is not None
        settings = self._saved.settings
        return autoscaling.changed(declared, settings) if settings else declared

    @property
    def pod_slots(self) -> int | None:
        """The calls that a pod runs at one time; `None` for any number."""
        compute = self._spec.compute
        per_process, declared = compute.concurrency, self.declared.concurrency
        if per_process is not None:
            return per_process * (compute.processes or 1)
        return declared or None

    def view(self) -> ScalingView:
        view = self._scaler.view(self._clock.time())
        return replace(view, engine="kubetorch", settings=dict(self._saved.settings))

    def calls_of(self, pod: str) -> int | None:
        """The number of calls that a pod has reported last; `None` before its first report."""
        load = self._loads.get(pod)
        return None if load is None else load.calls

    # ------------------------------------------------------------------------------ what happens

    def begin_deploy(self, spec: WorkloadSpec) -> str:
        """Choose the number of pods before a deploy is applied; returns a warning, or nothing."""
        now = self._clock.time()
        declared_before = _declared(self._spec)
        self._spec = spec
        is_declared_anew = _declared(spec) != declared_before
        overridden = self._saved.settings if is_declared_anew else {}
        if overridden:
            self._save(replace(self._saved, settings={}))
        self._scaler.configure(self._settings(), now)
        template = _template(spec)
        if template != self._saved.template:
            self._unproven = template
            self._scaler.begin_proof(self._proof_size(), "a deploy proves its code", now)
        else:
            self._unproven = ""
            self._scaler.end_proof(now)
        self._apply_size(self._scaler.size)
        self._decide()
        if not overridden:
            return ""
        changes = ", ".join(f"{name}={value!r}" for name, value in overridden.items())
        return f"this deploy's autoscale() replaces what was changed since the last one: {changes}"

    def served(self) -> None:
        """Let the load decide from now on: the wanted generation is served."""
        if self._unproven:
            self._save(replace(self._saved, template=self._unproven))
            self._unproven = ""
        self._scaler.end_proof(self._clock.time())
        self._decide()

    def given_up(self, *, serves_earlier: bool) -> None:
        """Let the load decide if pods serve an earlier generation than the failed one."""
        self._unproven = ""
        if serves_earlier:
            self._scaler.end_proof(self._clock.time())
            self._decide()

    def failed(self) -> None:
        """Let those that wait for a pod look why pods fail to start."""
        self._failures += 1
        self.changes.notify()

    def pods_changed(self, pods: Set[str], ready: Set[str]) -> None:
        """Note the pods that are not leaving, and those among them that take calls."""
        self._loads = {pod: load for pod, load in self._loads.items() if pod in pods}
        self._scaler.pods_changed(pods, ready, self._clock.time())
        if ready != self._ready:
            self._ready = frozenset(ready)
            self.changes.notify()
        self._decide()

    def reported(self, pod: str, load: PodLoad) -> None:
        earlier_load, self._loads[pod] = self._loads.get(pod), load
        if earlier_load is not None and load.calls < earlier_load.calls:
            self.changes.notify()
        now = self._clock.time()
        self._scaler.report(pod, load, now)
        # Not a decision for each report: a service has many pods.
        delay = self._scaler.next_decision(now)
        if delay is not None and now + delay < self._due - TIMING.scaling_rounding_seconds:
            self._set_timer(delay, now)

    def change(self, changes: dict[str, object]) -> None:
        """Change keywords of `autoscale()`; a value of `None` brings the declared one back."""
        settings = autoscaling.merge_changes(self._saved.settings, changes)
        declared = knative.scaling(self._spec.compute)
        assert declared is not None
        autoscaling.changed(declared, settings)  # refuses what is impossible
        self._save(replace(self._saved, settings=settings))
        self._scaler.configure(self._settings(), self._clock.time())
        self._decide()

    # --------------------------------------------------------------------------- waiting callers

    async def wait(self, wait: PodWait) -> None:
        """Wait until other pods are ready than the client knows, or pods fail to start.

        The client's calls are load meanwhile.
        """
        now = self._clock.time()
        failures = self._failures
        known_pods = frozenset(wait.pods)
        deadline = now + min(max(wait.seconds, 0.0), TIMING.longest_pod_wait_seconds)
        self._note_waiting(wait.client, wait.waiting, deadline + TIMING.pod_wait_gap_seconds)
        with contextlib.suppress(TimeoutError):
            while (
                self._ready == known_pods
                and self._failures == failures
                and (left := self._seconds_until(deadline)) > 0
            ):
                async with deadlines.timeout(left):
                    await self.changes.wait()

    async def hold(
        self,
        request: str,
        seconds: float,
        has_room: Callable[[], bool],
        has_failed: Callable[[], bool],
    ) -> None:
        """Hold a request of plain HTTP until a pod has room for it, for so long at most.

        Where it is known why no pod can start, it is held for `failed_start_seconds`. `request`
        names it among all requests.
        """
        if has_room():
            return
        if len(self._waits) >= LIMITS.held_requests:
            raise CallRefusedError(
                f"{len(self._waits)} requests already wait for a pod of {self._spec.name}",
                hint="call again in a while, or keep a pod with autoscale(min_scale=1)",
            )
        now = self._clock.time()
        deadline, failure_deadline = now + seconds, now + TIMING.failed_start_seconds
        try:
            self._note_waiting(request, 1, deadline)
            while not has_room():
                left = self._seconds_until(
                    min(deadline, failure_deadline) if has_failed() else deadline
                )
                if left <= 0:
                    return
                await deadlines.wait_at_most(left, self.changes.wait())
        finally:
            self._note_waiting(request, 0, 0.0)

    def _seconds_until(self, deadline: float) -> float:
        """How long a caller may still wait: nobody waits for pods of a service that is over."""
        return 0.0 if self._is_closed else deadline - self._clock.time()

    def _note_waiting(self, client: str, count: int, until: float) -> None:
        if count > 0:
            if client not in self._waits and len(self._waits) >= LIMITS.waiting_clients:
                raise CallRefusedError(
                    f"{len(self._waits)} programs already wait for a pod of {self._spec.name}",
                    hint="call again in a while",
                )
            self._waits[client] = (min(count, LIMITS.waiting_calls), until)
        else:
            self._waits.pop(client, None)
        self._decide()

    def _count_waiting(self, now: float) -> int:
        for client in [client for client, (_, until) in self._waits.items() if until < now]:
            del self._waits[client]
        return sum(count for count, _ in self._waits.values())

    # ------------------------------------------------------------------------------- decisions

    def _settings(self) -> ScalerSettings:
        compute, declared = self._spec.compute, self.declared
        if declared.concurrency:
            # A batch has one slot, and its calls are counted one by one.
            calls = declared.concurrency * self._spec.callable.largest_batch
            declared = dataclasses.replace(declared, concurrency=calls)
        settings = ScalerSettings.of(
            declared,
            cpu_cores=None if compute.cpus is None else quantity.cores(compute.cpus),
            memory_bytes=None
            if compute.memory is None
            else quantity.size_bytes(compute.memory, parameter="memory"),
        )
        most_pods = self._backend.most_pods(self._spec)
        if most_pods is None or 0 < settings.maximum <= most_pods:
            return settings
        return replace(settings, maximum=most_pods)

    def _proof_size(self) -> int:
        """The declared number of pods; no fewer than a service has whose pods they replace."""
        initial_scale = self.declared.initial_scale
        declared_size = 1 if initial_scale is None else initial_scale
        if not self._saved.template:
            return declared_size
        replaced_size, maximum = self._scaler.size, self._settings().maximum
        return max(declared_size, min(replaced_size, maximum) if maximum else replaced_size)

    def _decide(self) -> None:
        if self._is_closed:
            return
        now = self._clock.time()
        self._scaler.wait(self._count_waiting(now), now)
        size_before = self._scaler.size
        size = self._scaler.decide(now)
        if size != size_before:
            self._apply_size(size)
            self._on_change()
        delay = self._scaler.next_decision(now)
        if self._waits:
            delay = min(inf if delay is None else delay, TIMING.scaling_tick_seconds)
        self._set_timer(delay, now)

    def _set_timer(self, delay: float | None, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = inf
        if delay is not None and not self._is_closed:
            self._due = now + delay
            self._timer = self._clock.call_later(delay, self._decide)

    def _apply_size(self, size: int) -> None:
        leaving = self._scaler.leaving(size)
        self._backend.scale(self._spec.namespace, self._spec.name, size, leaving)
        if size != self._saved.size:
            self._save(replace(self._saved, size=size))
            _log.info("scaled workload=%s/%s pods=%s", self._spec.namespace, self._spec.name, size)

    def _save(self, stored: StoredScaling) -> None:
        self._saved = stored
        self._write(msgspec.json.encode(stored).decode())

    def close(self) -> None:
        """Scale the workload no more, and let the callers go that wait for its pods."""
        self._is_closed = True
        self._set_timer(None, 0.0)
        self.changes.notify()


def _template(spec: WorkloadSpec) -> str:
    """The digest of the pod template of a workload, without what the load decides."""
    manifest = rendering.of_workload(spec, has_operator=False)
    return rendering.fingerprint(manifest["spec"]["template"])


def _declared(spec: WorkloadSpec) -> AutoscalingSpec | None:
    """What a deploy says of the number of pods, without what follows its `launch_timeout`."""
    settings = knative.scaling(spec.compute)
    return None if settings is None else dataclasses.replace(settings, progress_deadline=None)


def refuse_change(name: str) -> AutoScalingError:
    """The error for a change of a service that this controller does not scale."""
    return AutoScalingError(
        f"the number of pods of {name} is not decided by Kubetorch's own scaler",
        hint="deploy it with .to(kt.Compute(...).autoscale(...))",
    )


def fixed_view(pods: Sequence[messages.PodView], wanted: int) -> ScalingView:
    """The scaling of a service that Knative scales, or that has a fixed number of pods."""
    return ScalingView(
        engine="",
        wanted=wanted,
        calls=sum(pod.calls for pod in pods),
        waiting=sum(pod.queue.waiting for pod in pods if pod.queue is not None),
    )
