"""Pods as processes of this machine.

The backend reads the manifest that a cluster would get, and keeps one agent per replica. The
promises of a Deployment hold here too: pods keep their names while they live; a changed template
replaces the pods, old pods first where the strategy is `Recreate`, else new pods first; an agent
that ends is started again. Pods of a StatefulSet have its name and their number, and a Pod has its
own name. `command` and `image` have no effect: an agent always runs on the interpreter of the
controller, and the user's code on the interpreter that deployed it.

A table in docs/kinds.md has the parts of a manifest without an effect on a single machine. Warnings
are reported at a deploy: the service differs from its manifest. Notes are in `kt describe`: a part
of the manifest has no effect here.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
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
from kubetorch.controller.backends.base import Backend, Listener, Manifest, PodStatus, PortRequest
from kubetorch.controller.backends.process import pods, spares
from kubetorch.controller.backends.process.pods import Pod, PodHome
from kubetorch.controller.backends.process.spares import SpareAgents
from kubetorch.controller.backends.process.stores import PodAttachments, PodInputs
from kubetorch.controller.state import PodRecord, SqliteState
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import ResourceNotAvailableError, SpecError
from kubetorch.lib import processes, sockets
from kubetorch.lib.clock import Clock
from kubetorch.lib.tasks import cancel_all, start_task
from kubetorch.manifests import desired_pods, kinds, knative, rendering
from kubetorch.manifests.container_variables import PodFacts
from kubetorch.manifests.desired_pods import DesiredPods, MountedNames
from kubetorch.manifests.scheduling import GPU_RESOURCE
from kubetorch.manifests.tuning import TIMING as MANIFESTS
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest, check_containers
from kubetorch.specs import quantity
from kubetorch.specs.callable import APP_PORT
from kubetorch.specs.compute import ComputeSpec, thaw
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import CPU_LIMIT, MARK, MEMORY_LIMIT

# A spare agent writes to the controller's standard error until it becomes a pod.
_STANDARD_ERROR = 2
# Separates the digest of a template from the version of its secrets.
_SECRETS_SEPARATOR = "+"
#: Suffix of the template of pods that pretend to have their GPUs.
_PRETENDING_SUFFIX = "-pretending"
# The alphabet of Kubernetes for names: without vowels and without characters that look alike.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


class _Workload(msgspec.Struct):
    pod_set: DesiredPods
    pods: list[Pod] = msgspec.field(default_factory=list)
    is_released: bool = False
    #: The number of pods that the load decides on; `None` where the manifest says it.
    size: int | None = None

    @property
    def replicas(self) -> int:
        if self.is_released:
            return 0
        return self.pod_set.replicas if self.size is None else self.size

    def current(self) -> list[Pod]:
        """The pods of the present template that stay."""
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
        self._spares = SpareAgents(
            start, clock=clock, lifetime_seconds=TIMING.spare_agent_seconds, first=first
        )
        self._devices = Devices.of_machine(pod_home.environment)
        self._workloads: dict[tuple[str, str], _Workload] = {}
        # The number of pods of each workload whose load decides on it.
        self._sizes: dict[tuple[str, str], int] = {}
        self._ports = WorldPorts()
        self._listener: Listener = lambda namespace, name: None
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    # ------------------------------------------------------------------------------- beginning

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        for spec, *_ in specs:
            pod_set = self._read(spec)
            key = (pod_set.namespace, pod_set.name)
            self._workloads[key] = _Workload(pod_set, size=self._sizes.get(key))
        unknown = [record for record in self._state.pods() if not self._adopt(record)]
        self._state.delete_pods((record.namespace, record.name) for record in unknown)
        for key in list(self._workloads):
            self._reconcile(key)
        self._run(self._sweep())

    def _adopt(self, record: PodRecord) -> bool:
        workload = self._workloads.get((record.namespace, record.workload))
        if workload is None:
            return False
        pod = self._pod(record, workload.pod_set)
        workload.pods.append(pod)
        pod.is_retiring = not _is_from_template(record, workload.pod_set)
        # The pod may have served calls before the controller stopped, so it is not thrown away.
        pod.was_ready = True
        if not pod.adopt():
            if record.is_leaving:
                workload.pods.remove(pod)
                return False
            pod.restart()
        elif record.is_leaving:
            self._retire(pod)
        return True

    async def _sweep(self) -> None:
        """Remove the processes and folders of unknown pods, and the files of deleted volumes."""
        await pods.sweep(
            self._pod_home,
            marks=lambda: {pod.record.mark for pod in self._all_pods()} | self._spares.marks,
            pods=lambda: {(pod.record.namespace, pod.record.name) for pod in self._all_pods()},
        )
        await asyncio.to_thread(self._attachments.volumes.sweep)

    # ------------------------------------------------------------------------------- workloads

    async def apply(self, spec: WorkloadSpec) -> None:
        pod_set = self._read(spec)
        await self._attachments.check(
            pod_set, pod_facts(pod_set, _pod_name(pod_set, 0), 0, sockets.LOOPBACK)
        )
        key = (pod_set.namespace, pod_set.name)
        size = self._sizes.get(key)
        if not pod_set.pretends_gpus:
            self._devices.check(
                pod_set.name,
                gpus_per_pod=pod_set.gpus,
                pods=pod_set.replicas if size is None else size,
                used_devices=self._used_devices(but=key),
            )
        workload = self._workloads.setdefault(key, _Workload(pod_set))
        workload.pod_set, workload.is_released, workload.size = pod_set, False, size
        for pod in workload.pods:
            pod.is_retiring = not _is_from_template(pod.record, pod_set)
            if not pod.is_retiring:
                pod.retry()
        self._reconcile(key)

    async def scales(self, spec: WorkloadSpec) -> bool:
        is_scaled = knative.scaling(spec.compute) is not None
        if not is_scaled:
            self._sizes.pop((spec.namespace, spec.name), None)
        return is_scaled

    def scale(self, namespace: str, name: str, size: int, leaving: Sequence[str] = ()) -> None:
        key = (namespace, name)
        self._sizes[key] = size
        workload = self._workloads.get(key)
        if workload is None or workload.size is None:
            return  # the next apply makes the pods
        workload.size = size
        current_pods = {pod.record.name: pod for pod in workload.current()}
        surplus = max(0, len(current_pods) - size)
        # Pods of an older template may be named as well, which go in any case.
        leaving_pods = [current_pods[pod] for pod in leaving if pod in current_pods]
        for pod in leaving_pods[:surplus]:
            self._retire(pod)
        self._reconcile(key)

    def most_pods(self, spec: WorkloadSpec) -> int | None:
        pod_set = self._read(spec)
        process_count = spec.compute.processes or 1
        room = _memory_bytes() // pod_bytes(process_count)
        if pod_set.gpus and not pod_set.pretends_gpus:
            room = min(room, self._devices.count // pod_set.gpus)
        return max(1, room)

    async def release(self, namespace: str, name: str) -> None:
        workload = self._workloads.get((namespace, name))
        if workload is not None:
            workload.is_released = True
            self._reconcile((namespace, name))

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        workload = self._workloads.pop((namespace, name), None)
        self._sizes.pop((namespace, name), None)
        self._ports.release((namespace, name))
        if workload is None:
            return []
        # First the records: if the controller dies here, its successor ends the unknown pods.
        self._state.delete_pods((namespace, pod.record.name) for pod in workload.pods)
        await asyncio.gather(*(self._end(pod, grace) for pod in workload.pods))
        return []

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        workload = self._workloads.get((namespace, name))
        statuses = [] if workload is None else [pod.status() for pod in workload.pods]
        return sorted(statuses, key=lambda pod: (pod.ordinal, pod.is_retiring))

    def expected(self, namespace: str, name: str) -> int | None:
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return None
        return workload.pod_set.replicas if workload.size is None else workload.size

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return
        for pod in workload.pods:
            if pod.record.name in pods:
                pod.mark_ready()
        current = workload.current()
        ready = [pod for pod in current if pod.record.name in pods]
        if len(ready) == len(current) == self.expected(namespace, name):
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

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        """The way through the controller, which is there without a pod as well; else empty."""
        if (spec.namespace, spec.name) not in self._sizes:
            return ""
        return f"{self._pod_home.controller_url()}/{spec.namespace}/{spec.name}"

    def mounted(self, namespace: str, name: str, pod: str) -> MountedNames:
        return MountedNames()  # all secrets and volumes of a machine belong to its user

    def ports(self, namespace: str, name: str, request: PortRequest) -> tuple[int, ...]:
        agents = {pod.record.port for pod in self._all_pods()}
        return self._ports.choose((namespace, name), request, agents=agents)

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
            await asyncio.gather(
                *(pod.end(TIMING.stopped_pod_grace_seconds) for pod in self._all_pods())
            )
        for pod in self._all_pods():
            pod.release()
        await cancel_all(self._tasks)

    def _read(self, spec: WorkloadSpec) -> DesiredPods:
        """The pods of a spec; their template has a version of their secrets, if they have any."""
        pod_set = desired_pods.read(rendering.of_workload(spec))
        if pod_set.grace_seconds is None and knative.scaling(spec.compute) is not None:
            pod_set = replace(pod_set, grace_seconds=MANIFESTS.scaled_pod_grace_seconds)
        if spec.runtime.pretends_gpus and pod_set.gpus:
            template_digest = f"{pod_set.template_digest}{_PRETENDING_SUFFIX}"
            pod_set = replace(pod_set, template_digest=template_digest, pretends_gpus=True)
        version = self._attachments.version(pod_set.namespace, pod_set.attached)
        if not version:
            return pod_set
        digest = f"{pod_set.template_digest}{_SECRETS_SEPARATOR}{version}"
        return replace(pod_set, template_digest=digest)

    def _pod_inputs(self, pod_set: DesiredPods, record: PodRecord, folder: Path) -> PodInputs:
        facts = pod_facts(pod_set, record.name, record.ordinal, pods.address_of(record))
        inputs = self._attachments.inputs(pod_set, folder, facts)
        return inputs._replace(variables=inputs.variables | device_variables(pod_set, record))

    def _reconcile(self, key: tuple[str, str]) -> None:
        """Start missing pods and end surplus ones; runs again whenever a pod has ended."""
        workload = self._workloads.get(key)
        if workload is None:
            return
        pod_set = workload.pod_set
        for pod in workload.pods:
            is_useless = pod_set.is_recreated or not pod.was_ready
            is_surplus = workload.size is None and pod.record.ordinal >= workload.replicas
            if (pod.is_retiring and is_useless) or is_surplus:
                self._retire(pod)
        if pod_set.is_recreated and any(
            pod.is_leaving and not _is_from_template(pod.record, pod_set) for pod in workload.pods
        ):
            return  # `Recreate`: new pods start once the old ones have ended
        if workload.size is not None:
            for pod in workload.current()[workload.replicas :]:
                self._retire(pod)
        used_ordinals = {pod.record.ordinal for pod in workload.current()}
        free_ordinals = (number for number in itertools.count() if number not in used_ordinals)
        for _ in range(workload.replicas - len(used_ordinals)):
            self._create(workload, next(free_ordinals))

    def _create(self, workload: _Workload, ordinal: int) -> None:
        pod_set = workload.pod_set
        record = PodRecord(
            namespace=pod_set.namespace,
            workload=pod_set.name,
            name=_pod_name(pod_set, ordinal),
            ordinal=ordinal,
            port=0,
            template=pod_set.template_digest,
            devices=self._choose_devices(workload),
        )
        pod = self._pod(record, pod_set)
        workload.pods.append(pod)
        pod.start()

    def _choose_devices(self, workload: _Workload) -> str:
        pod_set = workload.pod_set
        count = pod_set.gpus
        if not count or pod_set.pretends_gpus:
            return ""
        # The devices of pods that are being replaced become free soon.
        staying_devices = [pod.record.devices for pod in workload.current()]
        key = (pod_set.namespace, pod_set.name)
        return self._devices.choose(count, [*self._used_devices(but=key), *staying_devices])

    def _used_devices(self, *, but: tuple[str, str]) -> list[str]:
        """GPUs of the pods of other services."""
        pods = (pod.record for pod in self._all_pods())
        return [pod.devices for pod in pods if pod.devices and (pod.namespace, pod.workload) != but]

    def _pod(self, record: PodRecord, pod_set: DesiredPods) -> Pod:
        return Pod(
            record,
            pod_home=self._pod_home,
            read_inputs=functools.partial(self._pod_inputs, pod_set),
            state=self._state,
            spares=self._spares,
            clock=self._clock,
            on_change=lambda: self._listener(pod_set.namespace, pod_set.name),
        )

    def _retire(self, pod: Pod) -> None:
        if not pod.is_leaving:
            pod.leave()
            self._run(self._replace(pod))

    async def _replace(self, pod: Pod) -> None:
        key = (pod.record.namespace, pod.record.workload)
        workload = self._workloads.get(key)
        grace = None if workload is None else workload.pod_set.grace_seconds
        await self._end(pod, TIMING.replaced_pod_grace_seconds if grace is None else grace)
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
        start_task(work, self._tasks)

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


def _pod_name(pod_set: DesiredPods, ordinal: int) -> str:
    """The name of a new pod, as in a cluster: mostly workload, template and a random suffix."""
    if pod_set.kind == "Pod":
        return pod_set.name
    if pod_set.kind == "StatefulSet":
        return f"{pod_set.name}-{ordinal}"
    suffix = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(5))
    return f"{pod_set.name}-{pod_set.template_digest[:5]}-{suffix}"


def _is_from_template(record: PodRecord, pod_set: DesiredPods) -> bool:
    """True if a pod was made from the present template.

    The version of the secrets does not count where it is not known, as when a secret is missing.
    """
    return pod_set.template_digest in (
        record.template,
        record.template.partition(_SECRETS_SEPARATOR)[0],
    )


#: The address on which PyTorch, JAX and TensorFlow listen, and the ports for them, which no agent
#: gets. The workers of a foreign Ray use 10002 to 19999.
ANY_ADDRESS, WORLD_PORTS = "0.0.0.0", range(20000, 25000)
#: The variable from which CUDA reads which GPUs a process sees.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_NODES = Path("/dev")


class Devices:
    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(names)

    @classmethod
    def of_machine(
        cls, environ: Mapping[str, str], driver: Path = _DRIVER, nodes: Path = _NODES
    ) -> Devices:
        """The devices of this machine, or those that the local service itself may see."""
        visible = environ.get(VISIBLE_DEVICES)
        if visible is not None:
            return cls([name.strip() for name in visible.split(",") if name.strip()])
        # A container may have the devices without the driver's folder.
        device_files = driver.iterdir() if driver.is_dir() else nodes.glob("nvidia[0-9]*")
        return cls([str(number) for number in range(len(list(device_files)))])

    @property
    def count(self) -> int:
        return len(self._names)

    def check(
        self, service: str, *, gpus_per_pod: int, pods: int, used_devices: Iterable[str]
    ) -> None:
        """Refuse a service that asks for more GPUs than there are."""
        gpu_count = gpus_per_pod * pods
        if not gpu_count:
            return
        free_count = len(self._free(used_devices))
        if gpu_count <= free_count:
            return
        has = f"{len(self._names)} GPU{'' if len(self._names) == 1 else 's'}"
        if len(self._names) > free_count:
            has += f", of which other services have {len(self._names) - free_count}"
        raise ResourceNotAvailableError(
            f"{service} asks for {gpu_count} GPU{'' if gpu_count == 1 else 's'}, and this machine "
            f"has {has if self._names else 'none'}",
            hint="leave gpus out, deploy to a cluster, or set KT_LOCAL_GPUS=pretend to develop "
            "without GPUs"
            if not self._names
            else "kt list shows who has them",
        )

    def choose(self, count: int, used_devices: Iterable[str]) -> str:
        """GPUs for one pod, joined by commas: free ones first, then such as other pods use."""
        free_names = self._free(used_devices)
        used_names = [name for name in self._names if name not in free_names]
        return ",".join([*free_names, *used_names][:count])

    def _free(self, used_devices: Iterable[str]) -> list[str]:
        used_names = {name for pod_devices in used_devices for name in pod_devices.split(",")}
        return [name for name in self._names if name not in used_names]


class WorldPorts:
    """Ports of the worlds of distributed services, which all listen on this machine.

    The chosen ports are not bound yet. So the other controllers of the machine have to know of
    them: see `kubetorch.lib.sockets.claim`.
    """

    def __init__(self) -> None:
        # By workload: its ports, each with the socket that claims it for this controller.
        self._claims: dict[tuple[str, str], dict[int, socket.socket | None]] = {}

    def hold(self, key: tuple[str, str], ports: Sequence[int]) -> None:
        self.release(key)
        self._claims[key] = {port: sockets.claim(port) for port in ports}

    def release(self, key: tuple[str, str]) -> None:
        for claim in self._claims.pop(key, {}).values():
            if claim is not None:
                claim.close()

    def close(self) -> None:
        for key in list(self._claims):
            self.release(key)

    def choose(
        self, key: tuple[str, str], request: PortRequest, *, agents: Set[int]
    ) -> tuple[int, ...]:
        """Choose ports for a new world of a service: the requested ports where they are free."""
        previous_ports = tuple(self._claims.get(key, ()))
        users = {
            port: user for user, ports in self._claims.items() if user != key for port in ports
        }
        used_ports = users.keys() | agents
        self.release(key)
        chosen = self._claims[key] = {}
        try:
            for number in range(request.first, request.first + request.count):
                # The previous world's processes may still hold the declared port; they end first.
                is_previous = request.is_declared and number in previous_ports
                if number not in used_ports and (
                    is_previous or sockets.is_free(number, ANY_ADDRESS)
                ):
                    chosen[number] = sockets.claim(number)
                if request.is_declared and chosen.get(number) is None:
                    raise _port_taken(key, number, users.get(number), is_agent=number in agents)
                if chosen.get(number) is None:
                    chosen.pop(number, None)
                    self._choose_free(chosen, used_ports)
            for _ in range(request.further):
                self._choose_free(chosen, used_ports)
        except ResourceNotAvailableError:
            self.hold(key, previous_ports)  # the previous world goes on
            raise
        return tuple(chosen)

    def _choose_free(self, chosen: dict[int, socket.socket | None], used_ports: Set[int]) -> None:
        while True:
            try:
                number = sockets.choose(used_ports | chosen.keys(), ANY_ADDRESS, WORLD_PORTS)
            except OSError as error:
                raise ResourceNotAvailableError(str(error)) from error
            claim = sockets.claim(number)
            if claim is not None:
                chosen[number] = claim
                return


def _port_taken(
    key: tuple[str, str], port: int, user: tuple[str, str] | None, *, is_agent: bool
) -> ResourceNotAvailableError:
    user_text = f"the service {user[1]}" if user else "an agent" if is_agent else "another process"
    return ResourceNotAvailableError(
        f"{key[1]} is to meet on port {port}, which {user_text} has on this machine",
        hint="distribute(port=...) names another one; without it, one that is free is taken",
    )


def pod_facts(pod_set: DesiredPods, name: str, ordinal: int, address: str) -> PodFacts:
    """The facts that variables of a pod may refer to; this machine is its node."""
    labels = dict(pod_set.labels)
    if pod_set.kind == "StatefulSet":
        labels["statefulset.kubernetes.io/pod-name"] = name
        labels["apps.kubernetes.io/pod-index"] = str(ordinal)
    fields = {
        "metadata.name": name,
        "metadata.namespace": pod_set.namespace,
        "metadata.uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}.{pod_set.namespace}")),
        "spec.nodeName": socket.gethostname(),
        "spec.serviceAccountName": pod_set.service_account,
        **dict.fromkeys(("status.hostIP", "status.hostIPs"), sockets.LOOPBACK),
        **dict.fromkeys(("status.podIP", "status.podIPs"), address),
    }
    node = {
        "cpu": os.cpu_count() or 1,
        "memory": _memory_bytes(),
        "ephemeral-storage": shutil.disk_usage("/").total,
    }
    return PodFacts(fields, labels, dict(pod_set.annotations), node)


def device_variables(pod_set: DesiredPods, record: PodRecord) -> dict[str, str]:
    variables = {}
    cpus = dict(pod_set.limits).get("cpu")
    if cpus is not None:
        variables[CPU_LIMIT] = str(quantity.cores(cpus))
    limit = dict(pod_set.limits).get("memory")
    if limit is not None:
        variables[MEMORY_LIMIT] = str(quantity.size_bytes(limit, parameter="limits.memory"))
    if record.devices:
        variables[VISIBLE_DEVICES] = record.devices
    elif pod_set.pretends_gpus:
        variables[VISIBLE_DEVICES] = ",".join(map(str, range(pod_set.gpus)))
    return variables


# ------------------------------------------------------------------ parts without an effect

#: Kinds that behave here as in a cluster.
SUPPORTED_KINDS = ("Deployment", "ReplicaSet", "StatefulSet", "Job", "Pod")
_NODE_CHOICE_FIELDS = ("nodeSelector", "affinity", "priorityClassName")


def check_supported(manifest: Manifest) -> None:
    if kinds.find(manifest) is None:
        raise SpecError(
            f"the kind {manifest.get('kind')!r} of {manifest.get('apiVersion')!r} cannot be run on "
            "this machine, which has no operator for it",
            hint=f"a cluster can; {', '.join(SUPPORTED_KINDS)} run here",
        )


def check_room(spec: WorkloadSpec) -> None:
    """Refuse a spec with more processes than the memory of this machine can hold."""
    compute = spec.compute
    process_count = (
        1 if compute.distribution is None else compute.distribution.processes(compute.gpus)
    )
    needed_bytes = compute.pods * pod_bytes(process_count)
    memory_bytes = _memory_bytes()
    if needed_bytes > memory_bytes:
        raise ResourceNotAvailableError(
            f"{spec.name} asks for {compute.pods} pods with {process_count} processes each, which "
            f"need {processes.written(needed_bytes)} of memory or more; this machine has "
            f"{processes.written(memory_bytes)}",
            hint="ask for fewer, or deploy to a cluster",
        )


def pod_bytes(processes: int) -> int:
    """The least memory of a pod with so many processes."""
    return LIMITS.agent_least_bytes + processes * LIMITS.worker_least_bytes


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
    if kind is None or kind.kind in SUPPORTED_KINDS:
        return ()
    if kind.is_autoscaled:
        return tuple(knative.warnings(compute))
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
    notes = (*_resources(desired_pods.read(manifest)), *_pod(primary), *_endpoint(compute))
    return (*notes, *unsupported_warnings(compute, manifest))


def _resources(pod_set: DesiredPods) -> Iterator[str]:
    requests = [(name, amount) for name, amount in pod_set.requests if name != GPU_RESOURCE]
    if requests:
        requested = ", ".join(f"{name} {amount}" for name, amount in requests)
        yield f"the requests ({requested}) reserve nothing on this machine"
    enforced_limits = (GPU_RESOURCE, "memory") if sys.platform == "linux" else (GPU_RESOURCE,)
    limits = [(name, amount) for name, amount in pod_set.limits if name not in enforced_limits]
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
    containers = (*template.spec.get("initContainers", ()), *template.spec.get("containers", ()))
    other_containers = [str(c.get("name")) for c in containers if c is not template.container]
    if other_containers:
        yield f"the other containers ({', '.join(other_containers)}) are not run"
    ignored_fields = [key for key in _NODE_CHOICE_FIELDS if template.spec.get(key)]
    if ignored_fields:
        yield f"{', '.join(ignored_fields)} choose nothing: there is one node, this machine"
