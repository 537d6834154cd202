"""Pods as processes of this machine.

It reads the manifest that a cluster would get, and keeps one agent per replica. What a Deployment
promises holds here too: pods keep their names while they live; a changed template replaces them,
old ones first where the strategy is `Recreate`, else new ones first; an agent that ends is started
again. Pods of a StatefulSet have its name and their number, and a Pod its own. `command` and
`image` have no meaning here: an agent always runs on the interpreter of the controller, and the
user's code on the one that deployed it.

Parts of a manifest that have no effect on a machine that is no cluster are in a table of
docs/kinds.md. Warnings are said at a deploy: the service is something else than its manifest says.
Notes stand in `kt describe`: a part of the manifest has no meaning here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import shutil
import socket
import sys
import uuid
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.controller.backends.base import (
    Backend,
    Listener,
    Manifest,
    PodStatus,
    PortsWanted,
)
from kubetorch.controller.backends.process import pods, spares
from kubetorch.controller.backends.process.pods import Pod, PodHome
from kubetorch.controller.backends.process.spares import SpareAgents
from kubetorch.controller.backends.process.stores import PodAttachments, PodInputs
from kubetorch.controller.state import PodRecord, SqliteState
from kubetorch.errors import ResourceNotAvailableError, SpecError
from kubetorch.lib import processes, sockets
from kubetorch.lib.clock import Clock
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import desired_pods, kinds, knative, rendering
from kubetorch.manifests.container_checks import check_containers
from kubetorch.manifests.container_variables import PodFacts
from kubetorch.manifests.desired_pods import DesiredPods, Mounted
from kubetorch.manifests.scheduling import GPU_RESOURCE
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest
from kubetorch.specs import quantity
from kubetorch.specs.callable import APP_PORT
from kubetorch.specs.compute import ComputeSpec, thaw
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import CPU_LIMIT, MARK, MEMORY_LIMIT

#: Seconds that calls of a pod that is replaced have to end.
REPLACE_GRACE = 30.0
#: The same when the service stops.
STOP_GRACE = 5.0
#: Bytes of its own that an agent has at the least, and a worker, which shares more with others.
LEAST_OF_AGENT, LEAST_OF_WORKER = 20 * 2**20, 5 * 2**20

_log = logging.getLogger(__name__)

# What a spare says before it is a pod goes where the controller's own lines go.
_STANDARD_ERROR = 2
# Between the fingerprint of a template and that of the values of its secrets.
_AND = "+"
#: Stands in the template of pods without the GPUs that they ask for.
_PRETENDING = "-pretending"
# As Kubernetes: no vowels and nothing that looks like another one.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


class _Workload(msgspec.Struct):
    wanted: DesiredPods
    pods: list[Pod] = msgspec.field(default_factory=list)
    is_released: bool = False

    @property
    def replicas(self) -> int:
        return 0 if self.is_released else self.wanted.replicas

    def current(self) -> list[Pod]:
        """Pods of the wanted template that stay."""
        return [pod for pod in self.pods if not (pod.is_retiring or pod.is_leaving)]


class ProcessBackend(Backend):
    name = "local"

    def __init__(
        self,
        pod_home: PodHome,
        state: SqliteState,
        *,
        attachments: PodAttachments,
        clock: Clock,
        spare_command: tuple[str, ...] | None = None,
        first: spares.SpareAgent | None = None,
    ) -> None:
        self._pod_home = pod_home
        self._state = state
        self._attachments = attachments
        self.stores = attachments.stores
        self._clock = clock
        self._spare_command = spare_command
        start = None if spare_command is None else self._start_spare
        self._spares = SpareAgents(start, clock=clock, first=first)
        self._devices = Devices.of_machine(pod_home.environment)
        self._workloads: dict[tuple[str, str], _Workload] = {}
        self._ports = WorldPorts()
        self._listener: Listener = lambda namespace, name: None
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    # ------------------------------------------------------------------------------- beginning

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        for spec, *_ in specs:
            try:
                wanted = self._read(spec)
            except SpecError:  # an earlier version took it
                _log.exception(
                    "workload has no pods namespace=%s name=%s", spec.namespace, spec.name
                )
                continue
            self._workloads[wanted.namespace, wanted.name] = _Workload(wanted)
        unknown = [record for record in self._state.pods() if not self._adopt(record)]
        self._state.delete_pods((record.namespace, record.name) for record in unknown)
        for key in list(self._workloads):
            self._reconcile(key)
        self._run(self._sweep())

    def _adopt(self, record: PodRecord) -> bool:
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
        await pods.sweep(
            self._pod_home,
            marks=lambda: {pod.record.mark for pod in self._all_pods()} | self._spares.marks,
            pods=lambda: {(pod.record.namespace, pod.record.name) for pod in self._all_pods()},
        )
        await asyncio.to_thread(self._attachments.volumes.sweep)

    # ------------------------------------------------------------------------------- workloads

    async def apply(self, spec: WorkloadSpec) -> None:
        wanted = self._read(spec)
        await self._attachments.check(wanted, pod_facts(wanted, _pod_name(wanted, 0), 0))
        key = (wanted.namespace, wanted.name)
        if not wanted.pretends_gpus:
            self._devices.check(
                wanted.name,
                each=wanted.gpus,
                pods=wanted.replicas,
                taken=self._taken_devices(but=key),
            )
        workload = self._workloads.setdefault(key, _Workload(wanted))
        workload.wanted, workload.is_released = wanted, False
        for pod in workload.pods:
            pod.is_retiring = not _is_of(pod.record, wanted)
            if not pod.is_retiring:
                pod.retry()
        self._reconcile(key)

    async def release(self, namespace: str, name: str) -> None:
        workload = self._workloads.get((namespace, name))
        if workload is not None:
            workload.is_released = True
            self._reconcile((namespace, name))

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        workload = self._workloads.pop((namespace, name), None)
        self._ports.release((namespace, name))
        if workload is None:
            return []
        # First the records: should the controller die, its successor ends what is unknown.
        self._state.delete_pods((namespace, pod.record.name) for pod in workload.pods)
        await asyncio.gather(*(self._end(pod, grace) for pod in workload.pods))
        return []

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        workload = self._workloads.get((namespace, name))
        found = [] if workload is None else [pod.status() for pod in workload.pods]
        return sorted(found, key=lambda pod: (pod.ordinal, pod.is_retiring))

    def expected(self, namespace: str, name: str) -> int | None:
        workload = self._workloads.get((namespace, name))
        return None if workload is None else workload.wanted.replicas

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:
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

    def prepare(self) -> None:
        self._spares.prepare()

    def check(self, spec: WorkloadSpec) -> None:
        compute = spec.compute
        if compute.manifest is not None:
            manifest = thaw(compute.manifest)
            check_supported(manifest)
            check_containers(WorkloadManifest.parse(manifest, compute.pod_template_path))
        if compute.is_selector_only:
            labels = ", ".join(f"{name}={text}" for name, text in compute.selector or ())
            raise ResourceNotAvailableError(
                f"no pod matches the selector {labels}: pods of this machine are those that "
                "services start",
                hint="say what new pods are to have, such as kt.Compute(cpus=1)",
            )
        check_room(spec)
        check_port(spec)

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        return unsupported_warnings(compute, manifest)

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        attached = self._attachments.notes(desired_pods.read(manifest))
        return (*unsupported_notes(compute, manifest), *attached)

    def mounted(self, namespace: str, name: str, pod: str) -> Mounted:
        return Mounted()  # all of them are the user's own

    def ports(self, namespace: str, name: str, wanted: PortsWanted) -> tuple[int, ...]:
        agents = {pod.record.port for pod in self._all_pods()}
        return self._ports.choose((namespace, name), wanted, agents=agents)

    def hold_ports(self, namespace: str, name: str, ports: Sequence[int]) -> None:
        self._ports.hold((namespace, name), ports)

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        return await asyncio.to_thread(
            _read_log, self._pod_home.folder(namespace, pod) / "log", count
        )

    async def close(self, *, pods: bool) -> None:
        self._spares.close()
        self._ports.close()
        if pods:
            await asyncio.gather(*(pod.end(STOP_GRACE) for pod in self._all_pods()))
        for pod in self._all_pods():
            pod.release()
        await cancel_all(self._tasks)

    def _read(self, spec: WorkloadSpec) -> DesiredPods:
        """The pods of a spec; pods that see other values of secrets are of another template."""
        wanted = desired_pods.read(rendering.of_workload(spec))
        if spec.runtime.pretends_gpus and wanted.gpus:
            template = f"{wanted.template}{_PRETENDING}"
            wanted = replace(wanted, template=template, pretends_gpus=True)
        version = self._attachments.version(wanted.namespace, wanted.attached)
        return replace(wanted, template=f"{wanted.template}{_AND}{version}") if version else wanted

    def _give(self, wanted: DesiredPods, record: PodRecord, folder: Path) -> PodInputs:
        facts = pod_facts(wanted, record.name, record.ordinal)
        given = self._attachments.give(wanted, folder, facts)
        return given._replace(variables=given.variables | device_variables(wanted, record))

    def _reconcile(self, key: tuple[str, str]) -> None:
        """Start and end pods until there is what there should be."""
        workload = self._workloads.get(key)
        if workload is None:
            return
        wanted = workload.wanted
        for pod in workload.pods:
            is_useless = wanted.is_recreated or not pod.was_ready
            is_surplus = pod.record.ordinal >= workload.replicas
            if (pod.is_retiring and is_useless) or is_surplus:
                self._retire(pod)
        if wanted.is_recreated and any(
            pod.is_leaving and not _is_of(pod.record, wanted) for pod in workload.pods
        ):
            return  # called again when one has ended
        there = {pod.record.ordinal for pod in workload.current()}
        for ordinal in range(workload.replicas):
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
        count = wanted.gpus
        if not count or wanted.pretends_gpus:
            return ""
        # Those of pods that it replaces are free soon.
        staying = [pod.record.devices for pod in workload.current()]
        key = (wanted.namespace, wanted.name)
        return self._devices.choose(count, [*self._taken_devices(but=key), *staying])

    def _taken_devices(self, *, but: tuple[str, str]) -> list[str]:
        """GPUs of the pods of other services."""
        pods = (pod.record for pod in self._all_pods())
        return [pod.devices for pod in pods if pod.devices and (pod.namespace, pod.workload) != but]

    def _pod(self, record: PodRecord, wanted: DesiredPods) -> Pod:
        return Pod(
            record,
            pod_home=self._pod_home,
            give=functools.partial(self._give, wanted, record),
            state=self._state,
            spares=self._spares,
            clock=self._clock,
            on_change=lambda: self._listener(wanted.namespace, wanted.name),
        )

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
        self._listener(*key)
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

    def _start_spare(self) -> spares.SpareAgent:
        assert self._spare_command is not None
        mark = self._pod_home.new_mark()
        environment = {**self._pod_home.environment, MARK: mark}
        return spares.start(self._spare_command, environment, mark=mark, log=_STANDARD_ERROR)


def _read_log(folder: Path, count: int) -> list[bytes]:
    """The last lines of the segments in a folder, the oldest first."""
    lines: deque[bytes] = deque(maxlen=count)
    segments = [(path.stat().st_mtime, path) for path in folder.glob("*.jsonl")]
    for _, path in sorted(segments):
        lines.extend(path.read_bytes().splitlines())
    return list(lines)


def _pod_name(wanted: DesiredPods, ordinal: int) -> str:
    """A name as pods of the kind have: mostly workload, template, and something random."""
    if wanted.kind == "Pod":
        return wanted.name
    if wanted.kind == "StatefulSet":
        return f"{wanted.name}-{ordinal}"
    suffix = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(5))
    return f"{wanted.name}-{wanted.template[:5]}-{suffix}"


def _is_of(record: PodRecord, wanted: DesiredPods) -> bool:
    """True if a pod was made from the template, with any secrets if those are not known."""
    return wanted.template in (record.template, record.template.partition(_AND)[0])


#: Where PyTorch, JAX and TensorFlow listen, and the ports, which no agent is given. Workers of a
#: Ray that somebody else starts have 10002 to 19999.
EVERYWHERE, WORLD_PORTS = "0.0.0.0", range(20000, 25000)
#: Says to CUDA which GPUs a process sees.
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_NODES = Path("/dev")


class Devices:
    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(names)

    @classmethod
    def of_machine(
        cls, environ: Mapping[str, str], driver: Path = _DRIVER, nodes: Path = _NODES
    ) -> Devices:
        """The devices of this machine, or the part of them that the service itself may see."""
        visible = environ.get(VISIBLE)
        if visible is not None:
            return cls([name.strip() for name in visible.split(",") if name.strip()])
        # A container may have the devices and not the driver's folder.
        found = driver.iterdir() if driver.is_dir() else nodes.glob("nvidia[0-9]*")
        return cls([str(number) for number in range(len(list(found)))])

    def check(self, service: str, *, each: int, pods: int, taken: Iterable[str]) -> None:
        """Refuse a service that asks for more GPUs than there are."""
        wanted = each * pods
        if not wanted:
            return
        free = len(self._free(taken))
        if wanted <= free:
            return
        has = f"{len(self._names)} GPU{'' if len(self._names) == 1 else 's'}"
        if len(self._names) > free:
            has += f", of which other services have {len(self._names) - free}"
        raise ResourceNotAvailableError(
            f"{service} asks for {wanted} GPU{'' if wanted == 1 else 's'}, and this machine has "
            f"{has if self._names else 'none'}",
            hint="leave gpus out, deploy to a cluster, or set KT_LOCAL_GPUS=pretend to develop "
            "without GPUs"
            if not self._names
            else "kt list shows who has them",
        )

    def choose(self, count: int, taken: Iterable[str]) -> str:
        """GPUs for one pod, with commas; what others have is given again when there is no other."""
        free = self._free(taken)
        others = [name for name in self._names if name not in free]
        return ",".join([*free, *others][:count])

    def _free(self, taken: Iterable[str]) -> list[str]:
        used = {name for one in taken for name in one.split(",")}
        return [name for name in self._names if name not in used]


class WorldPorts:
    """Ports of the worlds of distributed services, which all listen on this machine.

    Those that are chosen are not bound yet, so other controllers of the machine have to know of
    them, too: see `kubetorch.lib.sockets.claim`.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], dict[int, socket.socket | None]] = {}

    def hold(self, key: tuple[str, str], ports: Sequence[int]) -> None:
        self.release(key)
        self._held[key] = {port: sockets.claim(port) for port in ports}

    def release(self, key: tuple[str, str]) -> None:
        for claim in self._held.pop(key, {}).values():
            if claim is not None:
                claim.close()

    def close(self) -> None:
        for key in list(self._held):
            self.release(key)

    def choose(
        self, key: tuple[str, str], wanted: PortsWanted, *, agents: Set[int]
    ) -> tuple[int, ...]:
        """Ports for a new world of a service: the wanted ones where they are free."""
        own = self._held.get(key, {})
        users = {port: user for user, ports in self._held.items() if user != key for port in ports}
        taken = users.keys() | agents
        self.release(key)
        chosen = self._held[key] = {}
        for number in range(wanted.first, wanted.first + wanted.count):
            # Processes of the world before, which end first, may still have what was declared.
            is_own = wanted.is_declared and number in own
            if number not in taken and (is_own or sockets.is_free(number, EVERYWHERE)):
                chosen[number] = sockets.claim(number)
            if wanted.is_declared and chosen.get(number) is None:
                raise _port_taken(key, number, users.get(number), is_agent=number in agents)
            if chosen.get(number) is None:
                chosen.pop(number, None)
                self._choose_other(chosen, taken)
        for _ in range(wanted.further):
            self._choose_other(chosen, taken)
        return tuple(chosen)

    def _choose_other(self, chosen: dict[int, socket.socket | None], taken: Set[int]) -> None:
        while True:
            try:
                number = sockets.choose(taken | chosen.keys(), EVERYWHERE, WORLD_PORTS)
            except OSError as error:
                raise ResourceNotAvailableError(str(error)) from error
            claim = sockets.claim(number)
            if claim is not None:
                chosen[number] = claim
                return


def _port_taken(
    key: tuple[str, str], port: int, user: tuple[str, str] | None, *, is_agent: bool
) -> ResourceNotAvailableError:
    who = f"the service {user[1]}" if user else "an agent" if is_agent else "another process"
    return ResourceNotAvailableError(
        f"{key[1]} is to meet on port {port}, which {who} has on this machine",
        hint="distribute(port=...) names another one; without it, one that is free is taken",
    )


def pod_facts(wanted: DesiredPods, name: str, ordinal: int) -> PodFacts:
    """What variables of a pod may ask for; this machine stands for its node."""
    labels = dict(wanted.labels)
    if wanted.kind == "StatefulSet":
        labels["statefulset.kubernetes.io/pod-name"] = name
        labels["apps.kubernetes.io/pod-index"] = str(ordinal)
    address = sockets.LOOPBACK
    fields = {
        "metadata.name": name,
        "metadata.namespace": wanted.namespace,
        "metadata.uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}.{wanted.namespace}")),
        "spec.nodeName": socket.gethostname(),
        "spec.serviceAccountName": wanted.account,
        **dict.fromkeys(("status.hostIP", "status.hostIPs", "status.podIP"), address),
        "status.podIPs": address,
    }
    node = {
        "cpu": os.cpu_count() or 1,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "ephemeral-storage": shutil.disk_usage("/").total,
    }
    return PodFacts(fields, labels, dict(wanted.annotations), node)


def device_variables(wanted: DesiredPods, record: PodRecord) -> dict[str, str]:
    found = {}
    cpus = dict(wanted.limits).get("cpu")
    if cpus is not None:
        found[CPU_LIMIT] = str(quantity.cores(cpus))
    limit = dict(wanted.limits).get("memory")
    if limit is not None:
        found[MEMORY_LIMIT] = str(quantity.size_bytes(limit, parameter="limits.memory"))
    if record.devices:
        found[VISIBLE] = record.devices
    elif wanted.pretends_gpus:
        found[VISIBLE] = ",".join(map(str, range(wanted.gpus)))
    return found


# ------------------------------------------------------------------ what has no effect here

#: Kinds that are here what they are in a cluster.
SUPPORTED_KINDS = ("Deployment", "ReplicaSet", "StatefulSet", "Job", "Pod")
_CHOOSING = ("nodeSelector", "affinity", "priorityClassName")


def check_supported(manifest: Manifest) -> None:
    if kinds.find(manifest) is None:
        raise SpecError(
            f"the kind {manifest.get('kind')!r} of {manifest.get('apiVersion')!r} cannot be run on "
            "this machine, which has no operator for it",
            hint=f"a cluster can; {', '.join(SUPPORTED_KINDS)} run here",
        )


def check_room(spec: WorkloadSpec) -> None:
    """Refuse so many processes that this machine has no memory for them, before they begin."""
    compute = spec.compute
    each = 1 if compute.distribution is None else compute.distribution.processes(compute.gpus)
    needed = compute.pods * (LEAST_OF_AGENT + each * LEAST_OF_WORKER)
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        raise ResourceNotAvailableError(
            f"{spec.name} asks for {compute.pods} pods with {each} processes each, which need "
            f"{processes.written(needed)} of memory or more; this machine has "
            f"{processes.written(has)}",
            hint="ask for fewer, or deploy to a cluster",
        )


def check_port(spec: WorkloadSpec) -> None:
    """Refuse an app whose command says one port for all pods of this machine."""
    app, pods = spec.callable.app, spec.compute.pods
    if app is None or app.port is None or pods == 1 or APP_PORT.search(app.command):
        return
    if re.search(rf"(?<!\d){app.port}(?!\d)", app.command):
        raise SpecError(
            f"the command {app.command!r} of {spec.name} listens on port {app.port} in each of "
            f"{pods} pods, which share the ports of this machine",
            hint="write {port} there, which is a port of each pod alone, as is PORT in its "
            "environment",
        )


def unsupported_warnings(compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
    kind = kinds.find(manifest)
    if kind is None or kind.kind in SUPPORTED_KINDS or kind.is_autoscaled:
        return ()
    count = desired_pods.read(manifest).replicas
    pods = "1 pod" if count == 1 else f"{count} pods"
    if kind.kind == "RayCluster":
        distribution = compute.distribution
        if distribution is not None and distribution.distribution_type == "ray":
            return ()  # its agents start Ray
        return (f"there is no Ray operator here: it has {pods} without Ray",)
    if kind.kind == "DaemonSet":
        return ("a DaemonSet has one pod here, since this machine is one node",)
    if kind.kind == "CronJob":
        return (f"a CronJob has no schedule here: its {pods} start now, and stay",)
    return (
        f"there is no operator of {kind.kind} here: its {pods} are plain ones, without the "
        "variables that join them (RANK, MASTER_ADDR, …)",
    )


def unsupported_notes(compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
    kind = kinds.find(manifest)
    if kind is None:
        return (f"a {manifest.get('kind')} cannot be run on this machine",)
    primary = WorkloadManifest(manifest, kind).primary
    found = [*_resources(desired_pods.read(manifest)), *_pod(primary), *_endpoint(compute)]
    if kind.is_autoscaled:
        found.append(f"nothing scales on this machine: it runs on {knative.fewest(manifest)}")
    return (*found, *unsupported_warnings(compute, manifest))


def _resources(wanted: DesiredPods) -> Iterator[str]:
    requests = [(name, amount) for name, amount in wanted.requests if name != GPU_RESOURCE]
    if requests:
        asked = ", ".join(f"{name} {amount}" for name, amount in requests)
        yield f"the requests ({asked}) reserve nothing on this machine"
    kept = (GPU_RESOURCE, "memory") if sys.platform == "linux" else (GPU_RESOURCE,)
    limits = [(name, amount) for name, amount in wanted.limits if name not in kept]
    if limits:
        allowed = ", ".join(f"{name} {amount}" for name, amount in limits)
        yield f"the limits ({allowed}) are not kept on this machine"


def _endpoint(compute: ComputeSpec) -> Iterator[str]:
    endpoint = compute.endpoint
    if endpoint is not None and endpoint.selector is not None:
        labels = ", ".join(f"{name}={value}" for name, value in endpoint.selector.items())
        yield f"the endpoint's selector ({labels}) chooses nothing: calls go to any pod"


def _pod(template: PodTemplate) -> Iterator[str]:
    image = template.container.get("image")
    if image not in (None, DEFAULT_IMAGE):
        yield f"the image {image} is not run: pods have the packages of this machine's Python"
    others = [
        str(one.get("name"))
        for one in (*template.spec.get("initContainers", ()), *template.spec.get("containers", ()))
        if one is not template.container
    ]
    if others:
        yield f"the other containers ({', '.join(others)}) are not run"
    chosen = [key for key in _CHOOSING if template.spec.get(key)]
    if chosen:
        yield f"{', '.join(chosen)} choose nothing: there is one node, this machine"
