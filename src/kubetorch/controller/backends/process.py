"""Pods as processes of this machine.

It reads the manifest that a cluster would get, and keeps one agent per replica. What a Deployment
promises holds here too: pods keep their names while they live; a changed template replaces them,
old ones first where the strategy is `Recreate`, else new ones first; an agent that ends is started
again. Pods of a StatefulSet have its name and their number, and a Pod its own. `command` and
`image` have no meaning here: an agent always runs on the interpreter of the controller, and the
user's code on the one that deployed it.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Coroutine, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kubetorch.controller.backends import container, honouring, spare, strays
from kubetorch.controller.backends.agents import Pod
from kubetorch.controller.backends.attaching import Attaching, Given
from kubetorch.controller.backends.base import Listener, Manifest, News, PodStatus, Trouble
from kubetorch.controller.backends.devices import Devices
from kubetorch.controller.backends.site import Site
from kubetorch.controller.backends.spares import Spares
from kubetorch.controller.backends.stores import Stores
from kubetorch.controller.state import PodRecord, PodState
from kubetorch.errors import ResourceNotAvailableError
from kubetorch.lib.clock import Clock
from kubetorch.manifests import deployment
from kubetorch.manifests.deployment import Wanted
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.frozen import thaw
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import MARK

#: Seconds that calls of a pod that is replaced have to end.
REPLACE_GRACE = 30.0
#: The same when the service stops.
STOP_GRACE = 5.0

# What a spare says before it is a pod goes where the controller's own lines go.
_STANDARD_ERROR = 2
# Between the fingerprint of a template and that of the values of its secrets.
_AND = "+"
# As Kubernetes: no vowels and nothing that looks like another one.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


class _Workload(msgspec.Struct):
    """What there should be, and what there is."""

    wanted: Wanted
    pods: list[Pod] = msgspec.field(default_factory=list)

    def current(self) -> list[Pod]:
        """Pods of the wanted template that stay."""
        return [pod for pod in self.pods if not (pod.is_retiring or pod.is_leaving)]


class ProcessBackend:
    """Runs workloads as processes.

    Args:
        site: Where pods live.
        state: Where their records are kept.
        attaching: Finds the secrets and volumes that they are given.
        clock: For back-off.
        spare_command: What starts a spare agent; `None` where there are to be none.
        first: A spare that waits already.
    """

    def __init__(
        self,
        site: Site,
        state: PodState,
        *,
        attaching: Attaching,
        clock: Clock,
        spare_command: tuple[str, ...] | None = None,
        first: spare.Spare | None = None,
    ) -> None:
        self._site = site
        self._state = state
        self._attaching = attaching
        self._clock = clock
        self._spare_command = spare_command
        start = None if spare_command is None else self._start_spare
        self._spares = Spares(start, clock=clock, first=first)
        self._devices = Devices.of_machine(site.environment)
        self._workloads: dict[tuple[str, str], _Workload] = {}
        self._listener: Listener = _ignore
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:  # noqa: D102  # Backend's
        return "local"

    @property
    def stores(self) -> Stores:  # noqa: D102  # Backend's
        return self._attaching.stores

    def watch(self, listener: Listener) -> None:  # noqa: D102  # Backend's
        self._listener = listener

    # ------------------------------------------------------------------------------- beginning

    async def start(  # noqa: D102  # Backend's
        self, specs: Sequence[Sequence[WorkloadSpec]]
    ) -> None:
        for spec, *_ in specs:
            wanted = self._read(deployment.of_workload(spec))
            self._workloads[wanted.namespace, wanted.name] = _Workload(wanted)
        unknown = [record for record in self._state.pods() if not self._take_up(record)]
        self._state.delete_pods((record.namespace, record.name) for record in unknown)
        for key in list(self._workloads):
            self._reconcile(key)
        self._run(self._sweep())

    def _take_up(self, record: PodRecord) -> bool:
        workload = self._workloads.get((record.namespace, record.workload))
        if workload is None:
            return False
        pod = self._pod(record, workload.wanted)
        workload.pods.append(pod)
        pod.is_retiring = not _is_of(record, workload.wanted)
        # What it served before the controller stopped is not known; so it is not thrown away.
        pod.was_ready = True
        if not pod.adopt():
            pod.restart()
        return True

    async def _sweep(self) -> None:
        """Remove what is left of pods that nobody knows, and of volumes that were deleted."""
        await strays.sweep(self._site, marks=self._known_marks, pods=self._known_pods)
        await asyncio.to_thread(self._attaching.sweep)

    def _known_marks(self) -> set[str]:
        return {pod.record.mark for pod in self._all_pods()} | self._spares.marks

    def _known_pods(self) -> set[tuple[str, str]]:
        return {(pod.record.namespace, pod.record.name) for pod in self._all_pods()}

    # ------------------------------------------------------------------------------- workloads

    async def apply(self, spec: WorkloadSpec) -> None:  # noqa: D102  # Backend's
        wanted = self._read(deployment.of_workload(spec))
        await self._attaching.check(wanted.namespace, wanted.attached)
        key = (wanted.namespace, wanted.name)
        self._devices.check(
            wanted.name,
            each=container.gpus(wanted),
            pods=wanted.replicas,
            taken=self._taken_devices(but=key),
        )
        workload = self._workloads.setdefault(key, _Workload(wanted))
        workload.wanted = wanted
        for pod in workload.pods:
            pod.is_retiring = not _is_of(pod.record, wanted)
            if not pod.is_retiring:
                pod.retry()
        self._reconcile(key)

    async def delete(self, namespace: str, name: str, *, grace: float) -> None:  # noqa: D102
        workload = self._workloads.pop((namespace, name), None)
        if workload is None:
            return
        # First the records: should the controller die, its successor ends what is unknown.
        self._state.delete_pods((namespace, pod.record.name) for pod in workload.pods)
        await asyncio.gather(*(self._end(pod, grace) for pod in workload.pods))

    def pods(self, namespace: str, name: str) -> list[PodStatus]:  # noqa: D102  # Backend's
        workload = self._workloads.get((namespace, name))
        found = [] if workload is None else [pod.status() for pod in workload.pods]
        return sorted(found, key=lambda pod: (pod.ordinal, pod.is_retiring))

    def trouble(self, namespace: str, name: str) -> Trouble:  # noqa: D102  # Backend's
        return Trouble()

    def expected(self, namespace: str, name: str) -> int | None:  # noqa: D102  # Backend's
        workload = self._workloads.get((namespace, name))
        return None if workload is None else workload.wanted.replicas

    def news(self, namespace: str, name: str) -> list[News]:  # noqa: D102  # Backend's
        return []

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:  # noqa: D102
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return
        for pod in workload.pods:
            if pod.record.name in pods:
                pod.mark_ready()
        current = workload.current()
        ready = [pod for pod in current if pod.record.name in pods]
        if len(ready) == len(current) == workload.wanted.replicas:
            for pod in workload.pods:
                if pod.is_retiring:
                    self._retire(pod)

    def prepare(self) -> None:  # noqa: D102  # Backend's
        self._spares.prepare()

    def check(self, spec: WorkloadSpec) -> None:  # noqa: D102  # Backend's
        compute = spec.compute
        if compute.manifest is not None:
            honouring.refuse(thaw(compute.manifest))
        if compute.is_selector_only:
            labels = ", ".join(f"{name}={text}" for name, text in compute.selector or ())
            raise ResourceNotAvailableError(
                f"no pod matches the selector {labels}: pods of this machine are those that "
                "services start",
                hint="say what new pods are to have, such as kt.Compute(cpus=1)",
            )

    def warnings(self, manifest: Manifest) -> tuple[str, ...]:  # noqa: D102  # Backend's
        return honouring.warnings(manifest)

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:  # noqa: D102  # Backend's
        return spec

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:  # noqa: D102  # Backend's
        return ""

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:  # noqa: D102  # Backend's
        attached = self._attaching.notes(deployment.read(manifest).attached)
        return (*honouring.notes(compute, manifest), *attached)

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:  # noqa: D102
        return await asyncio.to_thread(_read_log, self._site.folder(namespace, pod) / "log", count)

    async def close(self, *, pods: bool) -> None:  # noqa: D102  # Backend's
        self._spares.close()
        if pods:
            await asyncio.gather(*(pod.end(STOP_GRACE) for pod in self._all_pods()))
        for pod in self._all_pods():
            pod.release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------- pieces

    def _read(self, manifest: Manifest) -> Wanted:
        """What a manifest says; pods that see other values of secrets are of another template."""
        wanted = deployment.read(manifest)
        version = self._attaching.version(wanted.namespace, wanted.attached)
        return replace(wanted, template=f"{wanted.template}{_AND}{version}") if version else wanted

    def _give(self, wanted: Wanted, record: PodRecord, folder: Path) -> Given:
        given = self._attaching.give(wanted, folder)
        return given._replace(variables=given.variables | container.variables(wanted, record))

    def _reconcile(self, key: tuple[str, str]) -> None:
        """Start and end pods until there is what there should be."""
        workload = self._workloads.get(key)
        if workload is None:
            return
        wanted = workload.wanted
        for pod in workload.pods:
            is_useless = wanted.is_recreated or not pod.was_ready
            is_surplus = pod.record.ordinal >= wanted.replicas
            if (pod.is_retiring and is_useless) or is_surplus:
                self._retire(pod)
        if wanted.is_recreated and any(
            pod.is_leaving and not _is_of(pod.record, wanted) for pod in workload.pods
        ):
            return  # called again when one has ended
        there = {pod.record.ordinal for pod in workload.current()}
        for ordinal in range(wanted.replicas):
            if ordinal not in there:
                self._create(workload, ordinal)

    def _create(self, workload: _Workload, ordinal: int) -> None:
        wanted = workload.wanted
        record = PodRecord(
            namespace=wanted.namespace,
            workload=wanted.name,
            name=_pod_name(wanted, ordinal),
            ordinal=ordinal,
            port=0,
            template=wanted.template,
            devices=self._choose_devices(workload),
        )
        pod = self._pod(record, wanted)
        workload.pods.append(pod)
        pod.start()

    def _choose_devices(self, workload: _Workload) -> str:
        wanted = workload.wanted
        count = container.gpus(wanted)
        if not count:
            return ""
        # Those of pods that it replaces are free soon.
        staying = [pod.record.devices for pod in workload.current()]
        key = (wanted.namespace, wanted.name)
        return self._devices.choose(count, [*self._taken_devices(but=key), *staying])

    def _taken_devices(self, *, but: tuple[str, str]) -> list[str]:
        """GPUs of the pods of other services."""
        pods = (pod.record for pod in self._all_pods())
        return [pod.devices for pod in pods if pod.devices and (pod.namespace, pod.workload) != but]

    def _pod(self, record: PodRecord, wanted: Wanted) -> Pod:
        key = (wanted.namespace, wanted.name)
        return Pod(
            record,
            site=self._site,
            give=functools.partial(self._give, wanted, record),
            state=self._state,
            spares=self._spares,
            clock=self._clock,
            on_change=functools.partial(self._changed, key),
        )

    def _changed(self, key: tuple[str, str]) -> None:
        self._listener(*key)

    def _retire(self, pod: Pod) -> None:
        if not pod.is_leaving:
            pod.is_leaving = True
            self._run(self._replace(pod))

    async def _replace(self, pod: Pod) -> None:
        key = (pod.record.namespace, pod.record.workload)
        await self._end(pod, REPLACE_GRACE)
        workload = self._workloads.get(key)
        if workload is not None and pod in workload.pods:
            workload.pods.remove(pod)
        self._changed(key)
        self._reconcile(key)

    async def _end(self, pod: Pod, grace: float) -> None:
        await pod.end(grace)
        await pod.discard()

    def _all_pods(self) -> list[Pod]:
        return [pod for workload in self._workloads.values() for pod in workload.pods]

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_spare(self) -> spare.Spare:
        assert self._spare_command is not None
        mark = self._site.new_mark()
        environment = {**self._site.environment, MARK: mark}
        return spare.start(self._spare_command, environment, mark=mark, log=_STANDARD_ERROR)


def _read_log(folder: Path, count: int) -> list[bytes]:
    """The last lines of the segments in a folder, the oldest first."""
    lines: deque[bytes] = deque(maxlen=count)
    segments = [(path.stat().st_mtime, path) for path in folder.glob("*.jsonl")]
    for _, path in sorted(segments):
        lines.extend(path.read_bytes().splitlines())
    return list(lines)


def _pod_name(wanted: Wanted, ordinal: int) -> str:
    """A name as pods of the kind have: mostly workload, template, and something random."""
    if wanted.kind == "Pod":
        return wanted.name
    if wanted.kind == "StatefulSet":
        return f"{wanted.name}-{ordinal}"
    suffix = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(5))
    return f"{wanted.name}-{wanted.template[:5]}-{suffix}"


def _is_of(record: PodRecord, wanted: Wanted) -> bool:
    """Whether a pod was made from the template, whatever its secrets had, if that is not known."""
    return wanted.template in (record.template, record.template.partition(_AND)[0])


def _ignore(namespace: str, name: str) -> None:
    """Nobody watches."""
