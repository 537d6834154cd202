"""The kinds of Kubernetes objects that run pods: where each keeps what a service needs.

One row per kind: where its pod templates lie, which of them is called, and how many pods it asks
for. Sources: the kinds' own API references, named at each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import SpecError

Path = tuple[str, ...]
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """One set of equal pods within an object.

    Attributes:
        template: Where its pod template lies.
        replicas: Where the number of its pods stands, or `None` when it has no number.
        default: Number of pods when the object does not say.
    """

    template: Path
    replicas: Path | None = None
    default: int = 1


@dataclass(frozen=True)
class Kind:
    """A kind of object that runs pods.

    Attributes:
        kind: Its name.
        group: Its API group; `""` is the core one.
        versions: Versions that were read, the newest first.
        plural: Name of the resource in URLs.
        primary: The pods that are called.
        workers: Further pods.
        container: Name that the kind demands for the container that does the work.
        routing: Labels of the pods that calls go to, beside the workload's own selector.
        suspend: Where a queue's controller holds the object back.
        is_job: Its pods end; `replicas > 1` makes it an SPMD service.
        is_autoscaled: Somebody else decides on the number of pods.
    """

    kind: str
    group: str
    versions: tuple[str, ...]
    plural: str
    primary: Group
    workers: tuple[Group, ...] = ()
    container: str = "kubetorch"
    routing: tuple[tuple[str, str], ...] = ()
    suspend: Path | None = None
    is_job: bool = False
    is_autoscaled: bool = False

    @property
    def api_version(self) -> str:
        """`apiVersion` of a new object."""
        return f"{self.group}/{self.versions[0]}" if self.group else self.versions[0]

    @property
    def groups(self) -> tuple[Group, ...]:
        """All its sets of pods, the one that is called first."""
        return (self.primary, *self.workers)


_TEMPLATE = ("spec", "template")
_REPLICAS = ("spec", "replicas")


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
        is_job=True,
    )


_KINDS = (
    # https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/
    Kind("Deployment", "apps", ("v1",), "deployments", Group(_TEMPLATE, _REPLICAS)),
    Kind("StatefulSet", "apps", ("v1",), "statefulsets", Group(_TEMPLATE, _REPLICAS)),
    Kind("ReplicaSet", "apps", ("v1",), "replicasets", Group(_TEMPLATE, _REPLICAS)),
    Kind("DaemonSet", "apps", ("v1",), "daemonsets", Group(_TEMPLATE)),
    Kind("Pod", "", ("v1",), "pods", Group(())),
    Kind(
        "Job",
        "batch",
        ("v1",),
        "jobs",
        Group(_TEMPLATE, ("spec", "parallelism")),
        suspend=("spec", "suspend"),
    ),
    Kind(
        "CronJob",
        "batch",
        ("v1",),
        "cronjobs",
        Group(
            ("spec", "jobTemplate", "spec", "template"),
            ("spec", "jobTemplate", "spec", "parallelism"),
        ),
        suspend=("spec", "suspend"),
    ),
    # https://knative.dev/docs/serving/reference/serving-api/
    Kind(
        "Service",
        "serving.knative.dev",
        ("v1",),
        "services",
        Group(_TEMPLATE),
        is_autoscaled=True,
    ),
    # https://ray-project.github.io/kuberay/reference/api/
    Kind(
        "RayCluster",
        "ray.io",
        ("v1", "v1alpha1"),
        "rayclusters",
        Group(("spec", "headGroupSpec", "template")),
        (
            Group(
                ("spec", "workerGroupSpecs", "0", "template"),
                ("spec", "workerGroupSpecs", "0", "replicas"),
                0,
            ),
        ),
        routing=(("ray.io/node-type", "head"),),
        suspend=("spec", "suspend"),
    ),
    # https://www.kubeflow.org/docs/components/trainer/legacy-v1/
    _training("PyTorchJob", "pytorchjobs", "pytorchReplicaSpecs", "Master", "pytorch"),
    _training("TFJob", "tfjobs", "tfReplicaSpecs", "Chief", "tensorflow"),
    _training("MXJob", "mxjobs", "mxReplicaSpecs", "Scheduler", "mxnet"),
    _training("XGBoostJob", "xgboostjobs", "xgbReplicaSpecs", "Master", "xgboost"),
    _training("JAXJob", "jaxjobs", "jaxReplicaSpecs", "Worker", "jax"),
    # MPIJob: the launcher only starts mpirun; user code is called in the workers.
    Kind(
        "MPIJob",
        "kubeflow.org",
        ("v1", "v2beta1"),
        "mpijobs",
        Group(
            ("spec", "mpiReplicaSpecs", "Worker", "template"),
            ("spec", "mpiReplicaSpecs", "Worker", "replicas"),
        ),
        (
            Group(
                ("spec", "mpiReplicaSpecs", "Launcher", "template"),
                ("spec", "mpiReplicaSpecs", "Launcher", "replicas"),
                0,
            ),
        ),
        container="mpi",
        routing=(("training.kubeflow.org/replica-type", "worker"),),
        suspend=("spec", "runPolicy", "suspend"),
        is_job=True,
    ),
    # https://www.kubeflow.org/docs/components/trainer/reference/: no pod template; what a
    # service needs goes into podTemplateOverrides and spec.trainer.
    Kind(
        "TrainJob",
        "trainer.kubeflow.org",
        ("v1alpha1",),
        "trainjobs",
        Group(("spec", "podTemplateOverrides", "0"), ("spec", "trainer", "numNodes")),
        container="node",
        suspend=("spec", "suspend"),
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
        suspend=("spec", "suspend"),
        is_job=True,
    ),
    # https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
    Kind(
        "LeaderWorkerSet",
        "leaderworkerset.x-k8s.io",
        ("v1",),
        "leaderworkersets",
        Group(("spec", "leaderWorkerTemplate", "workerTemplate"), _REPLICAS),
        (Group(("spec", "leaderWorkerTemplate", "leaderTemplate"), None, 0),),
    ),
)

KINDS: Mapping[tuple[str, str], Kind] = {(row.kind, row.group): row for row in _KINDS}


def find(manifest: Mapping[str, Any]) -> Kind | None:
    """The row of a manifest's kind; the API group decides between kinds of one name."""
    group, _, version = str(manifest.get("apiVersion", "")).rpartition("/")
    del version
    return KINDS.get((str(manifest.get("kind", "")), group))


def custom(manifest: Mapping[str, Any], template: str | Sequence[str]) -> Kind:
    """A row for a kind that is not in the table, with the user's path of its pod template.

    Raises:
        SpecError: The path is none.
    """
    path = tuple(template.split(".")) if isinstance(template, str) else tuple(map(str, template))
    if not path or not all(path):
        raise SpecError(
            f"pod_template_path is {template!r}; it must be a dotted path or a list of keys",
            hint='for example "spec.tasks.0.template"',
        )
    group, _, version = str(manifest["apiVersion"]).rpartition("/")
    kind = str(manifest["kind"])
    return Kind(kind, group, (version,), f"{kind.lower()}s", Group(path))


def get(manifest: Any, path: Path, default: Any = None) -> Any:  # noqa: ANN401  # any node of it
    """What stands at `path`; digits index lists."""
    found = manifest
    for key in path:
        if isinstance(found, list):
            if not key.isdecimal() or int(key) >= len(found):
                return default
            found = found[int(key)]
        elif isinstance(found, Mapping) and key in found:
            found = found[key]
        else:
            return default
    return found


def put(manifest: Manifest, path: Path, value: object) -> None:
    """Set what stands at `path`, making what leads there."""
    node: Any = manifest
    for key, following in itertools.pairwise(path):
        empty: Any = [] if following.isdecimal() else {}
        if isinstance(node, list):
            if int(key) == len(node):
                node.append(empty)
            node = node[int(key)]
        else:
            node = node.setdefault(key, empty)
    if isinstance(node, list) and int(path[-1]) == len(node):
        node.append(value)
    elif isinstance(node, list):
        node[int(path[-1])] = value
    else:
        node[path[-1]] = value
