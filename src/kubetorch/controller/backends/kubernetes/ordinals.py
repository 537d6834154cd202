"""The ordinals of the pods of a workload: what their owner counts, else the lowest that is free.

A pod keeps its ordinal for life, also under the next controller: one that nobody else counts gets
it as an annotation. Until then, another one that has the number from somewhere may displace it.
Fewer replicas are those with the lowest ordinals.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping

from kubetorch.errors import KubernetesConflictError, KubernetesNotFoundError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref, is_leaving, is_over
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import kinds, labels, raycluster

#: Label or annotation that says the number of a pod in its set, by kind of owner.
_INDEXES = (
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    labels.ORDINAL,
)
_REPLICA_TYPE = "training.kubeflow.org/replica-type"
_RAY_TYPE, _RAY_HEAD = raycluster.KIND.routing[0]
_JOBS, _JOB = "jobset.sigs.k8s.io/replicatedjob-replicas", "jobset.sigs.k8s.io/job-index"
# Annotations that are written at one time.
_AT_ONCE = 16

_log = logging.getLogger(__name__)


def index(pod: Object) -> int | None:
    """The pod's number in its workload, from its owner or an annotation."""
    metadata = pod["metadata"]
    said = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    if said.get(_RAY_TYPE) == _RAY_HEAD:
        return 0
    found = next((said[name] for name in _INDEXES if name in said), "")
    if not found.isdigit():
        return None
    number = int(found)
    if (of_type := said.get(_REPLICA_TYPE)) is not None:
        return _of_type(number, of_type, metadata)
    # Each Job of a JobSet counts its own pods.
    jobs, job = said.get(_JOBS, ""), said.get(_JOB, "")
    return number * int(jobs) + int(job) if jobs.isdigit() and job.isdigit() else number


def _of_type(number: int, of_type: str, metadata: Object) -> int | None:
    """The pod that is called goes first, workers after it; pods without an agent do not count."""
    references = metadata.get("ownerReferences") or ()
    owners = [kinds.KINDS.get((one["kind"], "kubeflow.org")) for one in references]
    called = next((dict(kind.routing).get(_REPLICA_TYPE) for kind in owners if kind), None)
    if of_type == called or (called is None and of_type != "worker"):
        return number
    return number + 1 if of_type == "worker" else None


class Ordinals:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        #: Pods of which nothing but this says the ordinal.
        self.unsaid: set[str] = set()

    def put(self, pod: Object, pods: Mapping[str, Object]) -> None:
        """Number a pod that is new among these pods, or that changed."""
        name, given = pod["metadata"]["name"], index(pod)
        if given is None:
            self.unsaid.add(name)
        else:
            self.unsaid.discard(name)
        if name not in self.numbers:
            self.numbers[name] = self._number(pod, given, pods)

    def drop(self, name: str) -> None:
        self.numbers.pop(name, None)
        self.unsaid.discard(name)

    def _number(self, pod: Object, given: int | None, pods: Mapping[str, Object]) -> int:
        """The number of a new pod: the given one, or the first that no pod has that stays."""
        staying = {
            number: name
            for name, number in self.numbers.items()
            if name in pods and not is_leaving(pods[name]) and not is_over(pods[name])
        }
        # The head of a RayCluster is the first, whenever it comes.
        is_ray_worker = given is None and _RAY_TYPE in (pod["metadata"].get("labels") or {})
        free = next(n for n in itertools.count(int(is_ray_worker)) if n not in {*staying, given})
        if given is None:
            return free
        holder = staying.get(given)
        if holder is None:
            return given
        if holder not in self.unsaid:
            return free
        self.numbers[holder] = free
        return given


class OrdinalKeeper:
    """Writes the ordinals on pods that nobody else counts."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._room = asyncio.Semaphore(_AT_ONCE)
        # By the identity of the pod.
        self._writing: dict[str, asyncio.Task[None]] = {}

    def keep(self, pod: Object, ordinal: int) -> None:
        """Write the ordinal of a pod, once; what fails is to be asked for again."""
        uid = pod["metadata"]["uid"]
        if uid not in self._writing and not is_leaving(pod) and not is_over(pod):
            task = asyncio.create_task(self._write(pod, ordinal), name=f"ordinal of {uid}")
            self._writing[uid] = task

    def gone(self, pod: Object) -> None:
        task = self._writing.pop(pod["metadata"].get("uid"), None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        await cancel_all(self._writing.values())

    async def _write(self, pod: Object, ordinal: int) -> None:
        metadata = pod["metadata"]
        ref = Ref(PODS, metadata["name"], metadata["namespace"])
        # A ReplicaSet that shrinks ends the pods first whose end costs least.
        annotations = {labels.ORDINAL: str(ordinal), labels.DELETION_COST: str(-ordinal)}
        said = {"uid": metadata["uid"], "annotations": annotations}
        try:
            async with self._room:
                await self._client.patch(ref, {"metadata": said})
        except (KubernetesNotFoundError, KubernetesConflictError):
            return  # it is another pod by now
        except KubetorchError as error:
            _log.warning("ordinal not kept pod=%s error=%s", ref.name, error)
            self._writing.pop(metadata["uid"], None)
