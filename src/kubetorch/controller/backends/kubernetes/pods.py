"""The pods of all workloads: the watch on them, their ordinals, their `PodStatus`, and their logs.

One informer has every pod with Kubetorch's label. A workload whose pods lack the label (pods that a
user made, kinds whose operator does not pass labels on) has an informer with its own selector. A
deploy may change the selector: pods that only the earlier selector finds are dropped then.

The ordinal of a pod comes from its owner, where the owner counts its pods; else it is the lowest
free number, which is written on the pod as an annotation. A pod keeps its ordinal for life, also
under the next controller. Until the annotation is written, a pod with the same number from its
owner displaces it. When a workload gets fewer replicas, the pods with the lowest ordinals stay.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from msgspec.structs import replace

from kubetorch.controller.backends.base import Manifest, Phase, PodStatus
from kubetorch.controller.backends.kubernetes.launch_failures import lost_pods
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import KubernetesConflictError, KubernetesNotFoundError, KubetorchError
from kubetorch.k8s import pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import ADDED, DELETED, Change, Informer
from kubetorch.k8s.pod_streams import LogOptions
from kubetorch.k8s.resources import PODS, Object, Ref, Selection, is_leaving, is_over, seconds
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import kinds, labels, raycluster
from kubetorch.manifests.agent import digest_of
from kubetorch.wire import podenv
from kubetorch.wire.messages import Ending

#: Labels and annotations that have the number of a pod among the pods of its owner.
_INDEXES = (
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    labels.ORDINAL,
)
_REPLICA_TYPE = "training.kubeflow.org/replica-type"
_RAY_TYPE, _RAY_HEAD = raycluster.KIND.routing[0]
_JOBS, _JOB = "jobset.sigs.k8s.io/replicatedjob-replicas", "jobset.sigs.k8s.io/job-index"
#: Namespace and name of a workload.
Key = tuple[str, str]

_log = logging.getLogger(__name__)


def ordinal_of(pod: Object) -> int | None:
    """The number of a pod in its workload, from its owner or an annotation; `None` without one."""
    metadata = pod["metadata"]
    tags = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    if tags.get(_RAY_TYPE) == _RAY_HEAD:
        return 0
    index = next((tags[name] for name in _INDEXES if name in tags), "")
    if not index.isdigit():
        return None
    number = int(index)
    if (replica_type := tags.get(_REPLICA_TYPE)) is not None:
        return _ordinal_in_type(number, replica_type, metadata)
    # Each Job of a JobSet counts its pods from 0.
    jobs, job = tags.get(_JOBS, ""), tags.get(_JOB, "")
    return number * int(jobs) + int(job) if jobs.isdigit() and job.isdigit() else number


def _ordinal_in_type(number: int, replica_type: str, metadata: Object) -> int | None:
    """The ordinal of a Kubeflow replica: the called pod is first, workers follow.

    Pods of other replica types have no agent, and so no ordinal.
    """
    references = metadata.get("ownerReferences") or ()
    owners = [kinds.KINDS.get((reference["kind"], "kubeflow.org")) for reference in references]
    called = next((dict(kind.routing).get(_REPLICA_TYPE) for kind in owners if kind), None)
    if replica_type == called or (called is None and replica_type != "worker"):
        return number
    return number + 1 if replica_type == "worker" else None


class Ordinals:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        #: Names of the pods whose ordinal is written nowhere else.
        self.unwritten: set[str] = set()

    def put(self, pod: Object, pods: Mapping[str, Object]) -> None:
        """Number a new pod; note whether a changed pod has its ordinal written on it."""
        name, owner_ordinal = pod["metadata"]["name"], ordinal_of(pod)
        if owner_ordinal is None:
            self.unwritten.add(name)
        else:
            self.unwritten.discard(name)
        if name not in self.numbers:
            self.numbers[name] = self._number(pod, owner_ordinal, pods)

    def drop(self, name: str) -> None:
        self.numbers.pop(name, None)
        self.unwritten.discard(name)

    def _number(self, pod: Object, owner_ordinal: int | None, pods: Mapping[str, Object]) -> int:
        """The ordinal of a new pod: that of its owner, or the lowest that no staying pod has."""
        staying_pods = {
            number: name
            for name, number in self.numbers.items()
            if name in pods and not is_leaving(pods[name]) and not is_over(pods[name])
        }
        # 0 is for the head of a RayCluster, even if a worker comes earlier.
        is_ray_worker = owner_ordinal is None and _RAY_TYPE in (pod["metadata"].get("labels") or {})
        taken = {*staying_pods, owner_ordinal}
        free_ordinal = next(n for n in itertools.count(int(is_ray_worker)) if n not in taken)
        if owner_ordinal is None:
            return free_ordinal
        holder = staying_pods.get(owner_ordinal)
        if holder is None:
            return owner_ordinal
        # A pod whose ordinal is written keeps it; the ordinal of another pod can still change.
        if holder not in self.unwritten:
            return free_ordinal
        self.numbers[holder] = free_ordinal
        return owner_ordinal


class OrdinalKeeper:
    """Writes the ordinals on pods whose owners do not count them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(LIMITS.concurrent_annotations)
        # Tasks that write an ordinal, by uid of the pod; those that are done stay until it goes.
        self._writing: dict[str, asyncio.Task[None]] = {}

    def keep(self, pod: Object, ordinal: int) -> None:
        """Write the ordinal of a pod in the background, once; after a failure call this again."""
        uid = pod["metadata"]["uid"]
        if uid not in self._writing and not is_leaving(pod) and not is_over(pod):
            task = asyncio.create_task(self._write(pod, ordinal), name=f"ordinal of {uid}")
            self._writing[uid] = task

    def forget_pod(self, pod: Object) -> None:
        task = self._writing.pop(pod["metadata"].get("uid"), None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        await cancel_all(self._writing.values())

    async def _write(self, pod: Object, ordinal: int) -> None:
        metadata = pod["metadata"]
        ref = Ref(PODS, metadata["name"], metadata["namespace"])
        # A ReplicaSet that shrinks ends the pods with the lowest deletion cost first.
        annotations = {labels.ORDINAL: str(ordinal), labels.DELETION_COST: str(-ordinal)}
        metadata_patch = {"uid": metadata["uid"], "annotations": annotations}
        try:
            async with self._slots:
                await self._client.patch(ref, {"metadata": metadata_patch})
        except (KubernetesNotFoundError, KubernetesConflictError):
            return  # another pod has the name by now
        except KubetorchError as error:
            _log.warning("ordinal not kept pod=%s error=%s", ref.name, error)
            self._writing.pop(metadata["uid"], None)


def pod_status(
    pod: Object, *, ordinal: int, template: str, called_labels: Mapping[str, str] | None = None
) -> PodStatus:
    """A pod as `PodStatus`, without the verdict on it.

    `template` is the digest of the template that the pods of the workload are to have.
    `called_labels` are the labels of the pods that take calls.
    """
    container = agent_status(pod)
    digest = digest_of(pod)
    is_old = bool(template and digest and digest != template)
    return PodStatus(
        name=pod["metadata"]["name"],
        ordinal=ordinal,
        phase=_phase(pod, container),
        url=_url(pod),
        # An evicted pod stays as `Failed` beside its successor.
        is_retiring=is_old or is_leaving(pod) or (is_over(pod) and lost_pods.is_replaced(pod)),
        restarts=int(container.get("restartCount") or 0),
        reason=_reason(pod, container),
        started=seconds(((container.get("state") or {}).get("running") or {}).get("startedAt")),
        is_down=_is_down(pod, container),
        uid=pod["metadata"].get("uid") or "",
        is_called=(called_labels or {}).items() <= (pod["metadata"].get("labels") or {}).items(),
        ending=_ending(pod, container),
        is_ours=is_ours(pod),
        last_ending=_out_of_memory(container.get("lastState")),
    )


def retire_superseded(pods: Sequence[PodStatus], expected: int | None) -> list[PodStatus]:
    """Mark failed pods as retiring once as many pods live as are expected.

    A Job makes a new pod for a lost one, whose object stays.
    """
    alive = sum(not pod.is_retiring and pod.phase != "Failed" for pod in pods)
    if expected is None or alive < expected:
        return list(pods)
    return [replace(pod, is_retiring=True) if pod.phase == "Failed" else pod for pod in pods]


def agent_container(pod: Object) -> Manifest:
    """The container that the agent runs in; the first one if none is marked."""
    return dict(_marked(pod) or pod["spec"]["containers"][0])


def image_refused_as_root(pod: Object, error: KubetorchError) -> set[str]:
    """The image of a pod's agent, if this error refuses the image because it runs as root."""
    container = agent_container(pod)
    is_refused = "runAsNonRoot and image" in error.message
    if not is_refused or f"container: {container['name']})" not in error.message:
        return set()
    return {str(container["image"])}


def is_ours(pod: Object) -> bool:
    """True if Kubetorch rendered the pod; a user's selector finds other pods as well.

    The label shows it, or the agent's container: some operators pass no labels on, and some pods
    of an object have no agent.
    """
    return labels.SERVICE in (pod["metadata"].get("labels") or {}) or _marked(pod) is not None


def _marked(pod: Object) -> Manifest | None:
    containers: list[Any] = pod["spec"]["containers"]
    for container in containers:
        if any(variable["name"] == podenv.WORKLOAD for variable in container.get("env") or ()):
            return dict(container)
    return None


def agent_status(pod: Object) -> Manifest:
    """The status of the agent's container; empty before the kubelet reports it."""
    name = agent_container(pod)["name"]
    statuses: list[Any] = (pod.get("status") or {}).get("containerStatuses") or []
    return next((dict(status) for status in statuses if status["name"] == name), {})


def _phase(pod: Object, container: Manifest) -> Phase:
    if is_leaving(pod):
        return "Terminating"
    if is_over(pod):
        return "Failed"
    return "Running" if "running" in (container.get("state") or {}) else "Pending"


def _is_down(pod: Object, container: Manifest) -> bool:
    if is_over(pod):
        return True
    state = container.get("state") or {}
    has_run = bool(container.get("lastState")) or int(container.get("restartCount") or 0) > 0
    return "terminated" in state or ("waiting" in state and has_run)


def _ending(pod: Object, container: Manifest) -> Ending | None:
    """Why a pod, or its agent, ends or has ended."""
    return _out_of_memory(container.get("state")) or lost_pods.ending(pod)


def _out_of_memory(state: Manifest | None) -> Ending | None:
    terminated = (state or {}).get("terminated") or {}
    if terminated.get("reason") != "OOMKilled":
        return None
    message = f"its container ended with exit code {terminated.get('exitCode')}"
    return Ending(reason="OOMKilled", message=message, time=seconds(terminated.get("finishedAt")))


def _url(pod: Object) -> str:
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return ""
    variables = {
        variable["name"]: variable.get("value")
        for variable in agent_container(pod).get("env") or ()
    }
    port = variables.get(podenv.PORT)
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}" if port else ""


def _reason(pod: Object, container: Manifest) -> str:
    """Why a pod does not run, in the words of Kubernetes."""
    if is_leaving(pod):
        return ""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed":
        return _joined(status.get("reason"), status.get("message")) or "its containers failed"
    for container_status in [*(status.get("initContainerStatuses") or ()), container]:
        waiting = (container_status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return _joined(waiting["reason"], waiting.get("message"))
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _joined(condition.get("reason"), condition.get("message"))
    return ""


def _joined(reason: str | None, message: str | None) -> str:
    return ": ".join(part for part in (reason, message) if part)


class PodWatch:
    """The pods of workloads, as they change.

    `on_change` is called with a workload whose pods, or facts around them, changed.
    `on_deleted` is called with a pod that was deleted.
    """

    def __init__(
        self,
        client: Client,
        on_change: Callable[[Key], None],
        on_deleted: Callable[[Object], None],
        *,
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._client = client
        self._on_change = on_change
        self._on_deleted = on_deleted
        self._namespaces = namespaces
        self._stack = AsyncExitStack()
        self._informers: list[Informer] = []
        self._pods: dict[Key, dict[str, Object]] = {}
        self._ordinals: dict[Key, Ordinals] = {}
        self._selected: dict[Key, tuple[str, Informer]] = {}
        self._dirty: set[Key] = set()
        # Nodes that changed; namespaces with a change that matters to pods without a node.
        self._nodes: set[str] = set()
        self._waiting: set[str | None] = set()

    async def start(self) -> None:
        for namespace in self._namespaces or (None,):
            selection = Selection(PODS, namespace, labels=labels.SERVICE)
            informer = Informer(self._client, selection, self._changed)
            self._informers.append(await self._stack.enter_async_context(informer))
        timeout = TIMING.pod_list_seconds
        await asyncio.gather(*(informer.listed(timeout=timeout) for informer in self._informers))

    async def close(self) -> None:
        for _, informer in self._selected.values():
            await informer.close()
        await self._stack.aclose()

    # ---------------------------------------------------------------------------------- questions

    def pods_of(self, key: Key) -> Mapping[str, Object]:
        return self._pods.get(key, {})

    def pod_named(self, namespace: str, name: str) -> Object | None:
        return next((self._pods[key][name] for key in self.workloads_of(namespace, name)), None)

    def workloads_of(self, namespace: str, name: str) -> list[Key]:
        """The workloads that a pod belongs to: the selectors of several may find it."""
        pods_by_key = ((key, pods) for key, pods in self._pods.items() if key[0] == namespace)
        return [key for key, pods in pods_by_key if name in pods]

    def ordinals(self, key: Key) -> Mapping[str, int]:
        ordinals = self._ordinals.get(key)
        return {} if ordinals is None else ordinals.numbers

    def unwritten_ordinals(self, key: Key) -> dict[str, int]:
        """The ordinals that are written nowhere else, by name of the pod."""
        ordinals = self._ordinals.get(key)
        if ordinals is None:
            return {}
        return {name: ordinals.numbers[name] for name in ordinals.unwritten}

    # ----------------------------------------------------------------------------- other selectors

    async def select(self, key: Key, selector: Mapping[str, str]) -> None:
        """Watch the pods with these labels as the pods of a workload."""
        text = ",".join(f"{name}={value}" for name, value in sorted(selector.items()))
        if selector == {labels.SERVICE: key[1]}:
            await self.forget(key)
            return
        previous_selection = self._selected.get(key)
        if previous_selection is not None and previous_selection[0] == text:
            return
        informer = Informer(
            self._client,
            Selection(PODS, key[0], labels=text),
            lambda change: self._put_selected(key, text, change),
        )
        await informer.__aenter__()
        try:
            await informer.listed(timeout=TIMING.pod_list_seconds)
        except BaseException:
            await informer.close()
            raise
        self._selected[key] = (text, informer)
        self._replace_pods(key, informer.objects.values())
        if previous_selection is not None:
            await previous_selection[1].close()

    async def forget(self, key: Key) -> None:
        """Drop the selector of a workload that was deleted, or whose pods have the label."""
        previous_selection = self._selected.pop(key, None)
        if previous_selection is not None:
            self._replace_pods(key, [*self._labelled(key)])
            await previous_selection[1].close()

    def _labelled(self, key: Key) -> Iterator[Object]:
        for informer in self._informers:
            for pod in informer.objects.values():
                if _labelled_key(pod) == key:
                    yield pod

    def _replace_pods(self, key: Key, pods: Iterable[Object]) -> None:
        pods_by_name = {pod["metadata"]["name"]: pod for pod in pods}
        for name, pod in [*self.pods_of(key).items()]:
            if name not in pods_by_name:
                self._drop(key, name)
                self._on_deleted(pod)
        for pod in pods_by_name.values():
            self._put(key, Change(ADDED, pod))
        self.mark(key)

    # ------------------------------------------------------------------------------------ changes

    def _changed(self, change: Change) -> None:
        key = _labelled_key(change.object)
        if key not in self._selected:
            self._put(key, change)

    def _put_selected(self, key: Key, text: str, change: Change) -> None:
        # A change counts only while this selector is in use: not before its pods are listed, and
        # not once another selector is.
        selection = self._selected.get(key)
        if selection is not None and selection[0] == text:
            self._put(key, change)

    def _put(self, key: Key, change: Change) -> None:
        name = change.object["metadata"]["name"]
        if change.kind == DELETED:
            self._drop(key, name)
            self._on_deleted(change.object)
        else:
            pods = self._pods.setdefault(key, {})
            pods[name] = change.object
            self._ordinals.setdefault(key, Ordinals()).put(change.object, pods)
        self.mark(key)

    def _drop(self, key: Key, name: str) -> None:
        pods = self._pods.get(key, {})
        if pods.pop(name, None) is not None:
            self._ordinals[key].drop(name)
        if not pods:
            self._pods.pop(key, None)
            self._ordinals.pop(key, None)

    def mark(self, key: Key) -> None:
        """Report a change of a workload, together with all other changes of this moment."""
        self._notify_soon()
        self._dirty.add(key)

    def mark_node(self, name: str) -> None:
        """Report a change of a node, which matters to pods on it and to pods without a node."""
        self._notify_soon()
        self._nodes.add(name)

    def mark_waiting(self, namespace: str | None) -> None:
        """Report a change that matters to pods without a node, maybe in one namespace."""
        self._notify_soon()
        self._waiting.add(namespace)

    def _notify_soon(self) -> None:
        if not (self._dirty or self._nodes or self._waiting):
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        dirty, self._dirty = self._dirty, set()
        nodes, self._nodes = self._nodes, set()
        waiting, self._waiting = self._waiting, set()
        if nodes or waiting:
            is_all = bool(nodes) or None in waiting
            for key, pods in self._pods.items():
                if _concerns(nodes, is_all or key[0] in waiting, pods.values()):
                    dirty.add(key)
        for key in dirty:
            self._on_change(key)


def _concerns(nodes: Set[str], waiting: bool, pods: Iterable[Object]) -> bool:
    """True if any of these pods is on one of the nodes, or waits for a node when that matters."""
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if name in nodes or (waiting and not name):
            return True
    return False


def _labelled_key(pod: Object) -> Key:
    """The workload that Kubetorch's label on a pod names."""
    metadata = pod["metadata"]
    return metadata["namespace"], metadata["labels"][labels.SERVICE]


async def log_tail(client: Client, pod: Object, count: int) -> list[bytes]:
    """The last lines of the agent's container, also from its previous run."""
    metadata = pod["metadata"]
    ref = Ref(PODS, metadata["name"], metadata["namespace"])
    container = agent_container(pod)["name"]
    status = agent_status(pod)
    has_two = int(status.get("restartCount") or 0) > 0
    lines: list[bytes] = []
    for previous in (True, False) if has_two else (False,):
        options = LogOptions(container, previous=previous, tail=count, timestamps=True)
        try:
            content = await pod_streams.read_log(client, ref, options)
        except KubetorchError as error:  # the container waits, or the kubelet forgot its run
            _log.info("log not read pod=%s previous=%s error=%s", ref.name, previous, error.message)
        else:
            lines += _parse(content)
    return lines[-count:]


def _parse(content: bytes) -> list[bytes]:
    """Parse a log as a kubelet returns it: in each line a time, a space and the text.

    A text with carriage returns, such as a progress bar, is reduced to its last state. A line
    without a time (a message of the kubelet, or a cut line) gets the time of the line before it.
    """
    lines, time = [], 0.0
    for line in content.split(b"\n"):
        if not line:
            continue
        stamp, _, text = line.partition(b" ")
        try:
            time = seconds(stamp.decode("ascii", "replace")[:19] + "Z")
        except ValueError:
            text = line
        text = next((part for part in reversed(text.split(b"\r")) if part), b"")
        lines.append(msgspec.json.encode({"time": time, "text": text.decode("utf-8", "replace")}))
    return lines
