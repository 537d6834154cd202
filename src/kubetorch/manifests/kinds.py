"""The kinds of Kubernetes objects that run pods: the paths of the fields that a service needs.

One row per kind: where its pod templates lie, which of them is called, and how many pods it asks
for. Sources: the kinds' own API references, named at each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue

Path = tuple[str, ...]
Manifest = dict[str, Any]


class Group(FrozenValue):
    """One set of equal pods within an object."""

    template: Path
    replicas: Path | None = None
    default: int = 1


class Kind(FrozenValue):
    """One row: a kind, and the paths of its fields.

    Attributes:
        primary: The pods that are called.
        workers: Further groups of pods.
        factor: Path of the number of equal groups, each of as many pods as `primary` says.
        container: Name of the agent's container.
        routing: Labels of the called pods, beside those of all pods of the object.
        pool: Label of all its pods whose value is the object's name.
        suspend: Path of the field that suspends the object.
        queued: Path of the object that Kueue queues, where it is not the object itself.
        is_queued_by_pods: True if Kueue queues its pods, each alone or as a group.
        has_service: True if its controller makes a Service of the object's name.
    """

    kind: str
    group: str
    versions: tuple[str, ...]
    plural: str
    primary: Group
    workers: tuple[Group, ...] = ()
    factor: Path | None = None
    container: str = "kubetorch"
    routing: tuple[tuple[str, str], ...] = ()
    pool: str | None = None
    suspend: Path | None = None
    queued: Path | None = None
    is_queued_by_pods: bool = False
    replaces_pods: bool = True
    has_service: bool = False
    has_template: bool = True
    has_selector: bool = False
    is_job: bool = False
    is_autoscaled: bool = False
    is_custom: bool = False

    @property
    def api_version(self) -> str:
        """`apiVersion` of a new object."""
        return f"{self.group}/{self.versions[0]}" if self.group else self.versions[0]


_TEMPLATE = ("spec", "template")
_REPLICAS = ("spec", "replicas")


def _replicated(kind: str, plural: str, replicas: Path | None = _REPLICAS) -> Kind:
    """A kind of the group `apps`."""
    group = Group(_TEMPLATE, replicas)
    return Kind(
        kind,
        "apps",
        ("v1",),
        plural,
        group,
        has_selector=True,
        replaces_pods=kind != "ReplicaSet",
        # Kueue takes the pods of a StatefulSet for one group itself.
        is_queued_by_pods=kind in ("Deployment", "ReplicaSet"),
    )


def _training(kind: str, plural: str, specs: str, primary: str, container: str) -> Kind:
    """A job of the Kubeflow training operator 1.x (kubeflow.org/v1)."""

    def group(name: str, default: int) -> Group:
        base = ("spec", specs, name)
        return Group((*base, "template"), (*base, "replicas"), default)

    return Kind(
        kind,
        "kubeflow.org",
        ("v1",),
        plural,
        group(primary, 1),
        () if primary == "Worker" else (group("Worker", 0),),
        container=container,
        routing=(("training.kubeflow.org/replica-type", primary.lower()),),
        suspend=("spec", "runPolicy", "suspend"),
        replaces_pods=False,
        is_job=True,
    )


_KINDS = (
    # https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/
    _replicated("Deployment", "deployments"),
    _replicated("StatefulSet", "statefulsets"),
    _replicated("ReplicaSet", "replicasets"),
    _replicated("DaemonSet", "daemonsets", None),
    Kind("Pod", "", ("v1",), "pods", Group(())),
    # Kueue suspends a Job itself.
    Kind("Job", "batch", ("v1",), "jobs", Group(_TEMPLATE, ("spec", "parallelism"))),
    Kind(
        "CronJob",
        "batch",
        ("v1",),
        "cronjobs",
        Group(
            ("spec", "jobTemplate", "spec", "template"),
            ("spec", "jobTemplate", "spec", "parallelism"),
        ),
        queued=("spec", "jobTemplate"),
        replaces_pods=False,
    ),
    # https://knative.dev/docs/serving/reference/serving-api/
    Kind(
        "Service", "serving.knative.dev", ("v1",), "services", Group(_TEMPLATE), is_autoscaled=True
    ),
    # https://ray-project.github.io/kuberay/reference/api/; Kueue suspends it itself.
    Kind(
        "RayCluster",
        "ray.io",
        ("v1", "v1alpha1"),
        "rayclusters",
        Group(("spec", "headGroupSpec", "template")),
        (
            Group(
                ("spec", "workerGroupSpecs", "*", "template"),
                ("spec", "workerGroupSpecs", "*", "replicas"),
                0,
            ),
        ),
        routing=(("ray.io/node-type", "head"),),
        replaces_pods=False,
    ),
    # https://www.kubeflow.org/docs/components/trainer/legacy-v1/
    _training("PyTorchJob", "pytorchjobs", "pytorchReplicaSpecs", "Master", "pytorch"),
    _training("TFJob", "tfjobs", "tfReplicaSpecs", "Chief", "tensorflow"),
    _training("MXJob", "mxjobs", "mxReplicaSpecs", "Scheduler", "mxnet"),
    _training("XGBoostJob", "xgboostjobs", "xgbReplicaSpecs", "Master", "xgboost"),
    _training("JAXJob", "jaxjobs", "jaxReplicaSpecs", "Worker", "jax"),
    # The launcher only starts mpirun, and stays as it is; user code is called in the workers.
    _training("MPIJob", "mpijobs", "mpiReplicaSpecs", "Worker", "mpi"),
    # https://www.kubeflow.org/docs/components/trainer/reference/
    Kind(
        "TrainJob",
        "trainer.kubeflow.org",
        ("v1alpha1",),
        "trainjobs",
        Group((), ("spec", "trainer", "numNodes")),
        container="node",
        routing=(("jobset.sigs.k8s.io/replicatedjob-name", "node"),),
        pool="jobset.sigs.k8s.io/jobset-name",
        suspend=("spec", "suspend"),
        replaces_pods=False,
        has_service=True,
        has_template=False,
        is_job=True,
    ),
    # https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
    Kind(
        "JobSet",
        "jobset.x-k8s.io",
        ("v1alpha2",),
        "jobsets",
        Group(
            ("spec", "replicatedJobs", "0", "template", "spec", "template"),
            ("spec", "replicatedJobs", "0", "template", "spec", "parallelism"),
        ),
        factor=("spec", "replicatedJobs", "0", "replicas"),
        suspend=("spec", "suspend"),
        replaces_pods=False,
        has_service=True,
        is_job=True,
    ),
    # https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/: groups of `size` pods, the leader
    # among them; without a template of its own it is as the workers.
    Kind(
        "LeaderWorkerSet",
        "leaderworkerset.x-k8s.io",
        ("v1",),
        "leaderworkersets",
        Group(
            ("spec", "leaderWorkerTemplate", "workerTemplate"),
            ("spec", "leaderWorkerTemplate", "size"),
        ),
        (Group(("spec", "leaderWorkerTemplate", "leaderTemplate"), None, 0),),
        factor=_REPLICAS,
        routing=(("leaderworkerset.sigs.k8s.io/worker-index", "0"),),
        has_service=True,
    ),
)

KINDS: Mapping[tuple[str, str], Kind] = {(row.kind, row.group): row for row in _KINDS}


def find(manifest: Mapping[str, Any]) -> Kind | None:
    """The row of a manifest's kind; the API group decides between kinds of one name."""
    return KINDS.get((str(manifest.get("kind", "")), _group(manifest)))


def custom(manifest: Mapping[str, Any], template: Path) -> Kind:
    """A row for a kind with the user's path of its pod template."""
    group, kind = _group(manifest), str(manifest["kind"])
    version = str(manifest["apiVersion"]).rpartition("/")[2]
    known_kind = KINDS.get((kind, group))
    plural = f"{kind.lower()}s" if known_kind is None else known_kind.plural
    return Kind(kind, group, (version,), plural, Group(template), is_custom=True)


def _group(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("apiVersion", "")).rpartition("/")[0]


# --------------------------------------------------------------------------------------- paths


def path(written_path: str | Sequence[str | int]) -> Path:
    """A path as users write it: dotted text, or a list of keys; digits index lists."""
    parts = written_path.split(".") if isinstance(written_path, str) else written_path
    keys = tuple(map(str, parts)) if isinstance(parts, (list, tuple)) else ()
    if not keys or not all(keys):
        raise SpecError(
            f"pod_template_path is {written_path!r}; it must be a dotted path or a list of keys",
            hint='for example "spec.tasks.0.template"',
        )
    return keys


def get(manifest: Any, path: Path, default: Any = None) -> Any:  # noqa: ANN401  # any node of it
    """The value at `path`; digits index lists."""
    node = manifest
    for key in path:
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                return default
            node = node[int(key)]
        elif isinstance(node, Mapping) and key in node:
            node = node[key]
        else:
            return default
    return node


def put(manifest: Manifest, path: Path, value: object) -> None:
    """Set the value at `path`, and make the dictionaries and lists that lead to it."""
    node: Any = manifest
    for key, following in itertools.pairwise(path):
        empty: Any = [] if following.isdecimal() else {}
        if isinstance(node, list):
            if int(key) == len(node):
                node.append(empty)
            node = node[int(key)]
        else:
            if node.get(key) is None:
                node[key] = empty
            node = node[key]
    if isinstance(node, list) and int(path[-1]) == len(node):
        node.append(value)
    elif isinstance(node, list):
        node[int(path[-1])] = value
    else:
        node[path[-1]] = value


def expand(manifest: Manifest, path: Path) -> list[Path]:
    """The paths of a manifest that a path with `*` stands for: one per group in the list there."""
    if "*" not in path:
        return [path]
    before, after = path[: path.index("*")], path[path.index("*") + 1 :]
    groups = get(manifest, before, [])
    return [(*before, str(number), *after) for number in range(len(groups))]


def dictionary_at(node: Manifest, key: str) -> dict[str, Any]:
    """The dictionary at `key`, made if there is none."""
    if node.get(key) is None:
        node[key] = {}
    dictionary: dict[str, Any] = node[key]
    return dictionary


def list_at(node: Manifest, key: str) -> list[Any]:
    """The list at `key`, made if there is none."""
    if node.get(key) is None:
        node[key] = []
    dictionaries: list[Any] = node[key]
    return dictionaries


def assign(node: Manifest, key: str, value: object) -> None:
    """Set the value at `key`; `None` and an empty dictionary or list remove the key."""
    if value is None or value == {} or value == []:
        node.pop(key, None)
    else:
        node[key] = value


def named(entries: list[Any], name: str, *, by: str = "name") -> Manifest | None:
    """The entry of a list of dictionaries that has this name."""
    return next((dictionary for dictionary in entries if dictionary.get(by) == name), None)
