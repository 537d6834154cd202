"""The pods that a workload asks for: the frozen form of `kt.Compute`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.data import DataMount
from kubetorch.specs.distribution import AGENT_PORT as AGENT_PORT
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec

#: Names and values, in the order given.
Pairs = tuple[tuple[str, str], ...]
#: Calls that may wait for a process, unless the service declares another number.
MOST_WAITING = 10_000
#: Which pods of several a call goes to.
Dispatch = Literal["all", "any"]
# Kinds of this API group are scaled by Knative.
_AUTOSCALED_GROUP = "serving.knative.dev/"


class Toleration(FrozenValue):
    """A taint of nodes that pods accept; the words are those of Kubernetes.

    Attributes:
        key: Key of the taint; `None` with `Exists` is every taint.
        operator: `Exists` or `Equal`.
        value: Value of the taint, for `Equal`.
        effect: `NoSchedule`, `PreferNoSchedule` or `NoExecute`; `None` is all of them.
        seconds: How long pods stay on a node that gets a `NoExecute` taint.
    """

    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    seconds: int | None = None


#: The words of Kubernetes for a toleration, and the fields of `Toleration` that they become.
TOLERATION_WORDS = {
    "key": "key",
    "operator": "operator",
    "value": "value",
    "effect": "effect",
    "tolerationSeconds": "seconds",
}


class ComputeSpec(FrozenValue):
    """Resources and settings of a workload's pods, validated by `kubetorch.sdk`.

    With a manifest of the user (`manifest`), the fields hold what `kubetorch.manifests.parameters`
    reads from it, with the changes that the user made since; they are laid over the manifest.

    Attributes:
        cpus: CPU request of a pod, a Kubernetes quantity such as `0.5` or `500m`.
        memory: Memory request of a pod, a Kubernetes quantity such as `2Gi`.
        env_vars: Environment of the pods; `$NAME` is expanded when a worker starts.
        replicas: Number of pods.
        working_dir: Absolute path of the pods' working directory.
        launch_timeout: Seconds until a deploy that is not ready fails.
        labels: Labels of the workload and its pods.
        allowed_serialization: Codecs that callers may use.
        logging: The part of its logs that callers see.
        inactivity_ttl: Idle time after which it is torn down, such as `30m`; `None` is never.
        disk_size: Request of ephemeral storage, a Kubernetes quantity.
        gpus: Number of GPUs of a pod.
        gpu_type: A value of the node label `nvidia.com/gpu.product`, or `key: value` of another.
        gpu_memory: Memory request of a GPU.
        priority_class_name: Priority class of the pods.
        image: Base image and steps; `None` is the default image.
        annotations: Annotations of the workload and its pods.
        pod_labels: Further labels of the pods alone.
        volumes: Storage that outlives pods.
        node_selector: Labels of the nodes that pods may run on.
        service_template: JSON object that is laid over the whole manifest.
        tolerations: Taints that pods accept, beside those that GPUs need.
        secrets: Secrets that pods see.
        freeze: Whether pods run what their image has, without live code.
        kubeconfig_path: The kubeconfig that it was declared with.
        service_account_name: Service account of the pods; `None` is Kubetorch's own.
        image_pull_policy: When a node pulls the image; `None` leaves it to Kubernetes.
        gpu_anti_affinity: Whether pods that ask for no GPU stay away from nodes that have some.
        shared_memory_limit: Limit of `/dev/shm`, a Kubernetes quantity.
        queue_name: LocalQueue of Kueue.
        queue: Queue of the KAI scheduler.
        selector: Labels of the pods that belong to the workload, when the user names them.
        endpoint: The address of calls, when the user names one.
        server_port: Port of the agent; `None` is 32300, or the port `http1` of a manifest.
        manifest: JSON object of the user's own manifest.
        pod_template_path: The path of the pod template in it, for unknown kinds.
        autoscaling: When pods are added and removed.
        distribution: How one call runs on many pods.
        concurrency: Calls that a process runs at once; further calls wait. `None` is any number.
        max_queue: Calls that may wait for a process; `None` is 10,000.
        num_proc: Processes of a pod outside of `distribute`, a number or `auto`.
        dispatch: Whether a call goes to `all` pods, or to `any` one of them.
        data: Keys of the data store that pods have at paths, in the order of the paths.
    """

    cpus: str | None = None
    memory: str | None = None
    env_vars: Pairs = ()
    replicas: int = 1
    working_dir: str | None = None
    launch_timeout: int = 900
    labels: Pairs = ()
    allowed_serialization: tuple[str, ...] = ("json",)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    inactivity_ttl: str | None = None
    disk_size: str | None = None
    gpus: str | None = None
    gpu_type: str | None = None
    gpu_memory: str | None = None
    priority_class_name: str | None = None
    image: ImageSpec | None = None
    annotations: Pairs = ()
    pod_labels: Pairs = ()
    volumes: tuple[VolumeSpec, ...] = ()
    node_selector: Pairs = ()
    service_template: str | None = None
    tolerations: tuple[Toleration, ...] = ()
    secrets: tuple[SecretRef, ...] = ()
    freeze: bool = False
    kubeconfig_path: str | None = None
    service_account_name: str | None = None
    image_pull_policy: str | None = None
    gpu_anti_affinity: bool = False
    shared_memory_limit: str | None = None
    queue_name: str | None = None
    queue: str | None = None
    selector: Pairs | None = None
    endpoint: Endpoint | None = None
    server_port: int | None = None
    manifest: str | None = None
    pod_template_path: tuple[str, ...] | None = None
    autoscaling: AutoscalingSpec | None = None
    distribution: DistributionSpec | None = None
    concurrency: int | None = None
    max_queue: int | None = None
    num_proc: int | Literal["auto"] | None = None
    dispatch: Dispatch = "all"
    data: tuple[DataMount, ...] = ()

    @property
    def is_selector_only(self) -> bool:
        """True for a selector of existing pods, without a request for pods."""
        resources = (
            self.cpus,
            self.memory,
            self.disk_size,
            self.gpus,
            self.gpu_type,
            self.gpu_memory,
        )
        return self.selector is not None and self.manifest is None and not any(resources)

    @property
    def is_pool(self) -> bool:
        """True if a call goes to all pods that the selector found at the last deploy."""
        is_elsewhere = self.distribution is not None or self.endpoint is not None
        return self.is_selector_only and not is_elsewhere

    @property
    def processes(self) -> int | None:
        """Processes of a pod outside of `distribute`; `None` if only the pod knows."""
        if self.num_proc == "auto":
            return int(self.gpus) if self.gpus is not None and self.gpus.isdecimal() else None
        return self.num_proc or 1

    def concurrency_of(self, processes: int) -> int | None:
        """Calls that each of so many processes of a pod runs at once; `None` is any number."""
        if self.concurrency is not None:
            return self.concurrency
        per_pod = None if self.autoscaling is None else self.autoscaling.concurrency
        return max(1, per_pod // processes) if per_pod else None

    @property
    def pods(self) -> int:
        """Number of pods that the spec requests: the workers of `distribute`, else the replicas.

        For an autoscaled service it is the fewest at any time, at least one.
        """
        if self.autoscaling is not None:
            return max(1, self.autoscaling.fewest_pods)
        workers = self.distribution.workers if self.distribution is not None else None
        return workers or self.replicas

    def world_pods(self, selected_pods: int) -> int:
        """Number of pods of a complete world; for a selector, the pods that it selects now."""
        workers = self.distribution.workers if self.distribution is not None else None
        return max(1, workers or (selected_pods if self.is_selector_only else self.pods))

    def quorum(self, selected_pods: int) -> int:
        """Number of pods that a world needs to form; for `selected_pods` see `world_pods`."""
        quorum = self.distribution.quorum_workers if self.distribution is not None else None
        pods = self.world_pods(selected_pods)
        return min(quorum or pods, pods)

    @property
    def quorum_timeout(self) -> int:
        """Seconds for which a world waits for the pods that it lacks."""
        timeout = self.distribution.quorum_timeout if self.distribution is not None else None
        return timeout or self.launch_timeout

    @property
    def is_balanced(self) -> bool:
        """True if each call goes to the least busy pod."""
        return self.dispatch == "any" or self.autoscaling is not None

    @property
    def is_autoscaled(self) -> bool:
        """True if the load decides how many pods there are."""
        return self.autoscaling is not None or self._is_knative_service

    @property
    def _is_knative_service(self) -> bool:
        if self.manifest is None:
            return False
        api_version = str(json.loads(self.manifest).get("apiVersion", ""))
        return api_version.startswith(_AUTOSCALED_GROUP)

    @property
    def broadcast(self) -> int | None:
        """Number of pods that each call runs on, with a result of each; `None` for a single pod.

        The requested number decides, so a service answers in the same form however many pods are
        up. A selector requests none (see `is_pool`), an autoscaler decides by itself, and the pod
        that gets a call of a distributed service passes it on.
        """
        is_elsewhere = self.is_balanced or self.endpoint is not None
        if self.pods < 2 or is_elsewhere or self.is_selector_only or self.distribution is not None:
            return None
        return None if self._is_knative_service else self.pods


def freeze(value: object, *, parameter: str) -> str:
    """The text of a dictionary; equal dictionaries have the same text.

    Dates, which YAML makes of text such as `2024-01-31`, become text again.
    """
    if not isinstance(value, Mapping):
        raise SpecError(f"{parameter} is {value!r}; it must be a dictionary")
    plain = _plain(value, parameter, depth=0, value_numbers=itertools.count(1))
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def thaw(text: str) -> dict[str, Any]:
    """A new copy of the dictionary that `freeze` made text of."""
    dictionary: dict[str, Any] = json.loads(text)
    return dictionary


#: Levels of nesting; a deeper value has a cycle.
MOST_LEVELS = 100
#: A manifest has hundreds of values, and an API server takes 1.5 MiB of it; aliases of YAML can
#: stand for any number.
MOST_VALUES = 100_000


def _plain(value: object, key_path: str, *, depth: int, value_numbers: Iterator[int]) -> object:
    if depth > MOST_LEVELS:
        raise SpecError(f"{key_path}: it is nested too deeply")
    if next(value_numbers) > MOST_VALUES:
        raise SpecError(
            f"{key_path}: there are more than {MOST_VALUES:,} values in it",
            hint="aliases of YAML may repeat them",
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(f"{key_path} has the key {key!r}; keys must be text")
        return {
            key: _plain(item, f"{key_path}.{key}", depth=depth + 1, value_numbers=value_numbers)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            _plain(item, f"{key_path}.{i}", depth=depth + 1, value_numbers=value_numbers)
            for i, item in enumerate(value)
        ]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise SpecError(f"{key_path} is {value!r}; a manifest has no such number")
    if value is None or isinstance(value, (str, int, float)):
        return value
    from datetime import date, datetime, timezone  # noqa: PLC0415  # costs 1 ms, for YAML alone

    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return moment.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    raise SpecError(f"{key_path} is {value!r}; it must be text, a number, a list or a dictionary")
