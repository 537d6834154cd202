"""Small objects of users' own: one of each kind that runs pods and has an operator in the kit.

As a user would bring them: with a command that the agent takes the place of.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
IMAGE = "localhost/python:3.11"


def template(container: str = "main", labels: Object | None = None, **fields: Any) -> Object:
    """A pod template; `fields` are those of its spec."""
    main = {
        "name": container,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": "10m"}},
    }
    spec = {"terminationGracePeriodSeconds": 1, "containers": [main], **fields}
    return {"spec": spec} if labels is None else {"metadata": {"labels": labels}, "spec": spec}


def manifest(api_version: str, kind: str, spec: Object) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": f"my-{kind.lower()}"},
        "spec": spec,
    }


def pool(service: str, image: str, replicas: int) -> Object:
    """Pods that run an agent, which they started themselves, and carry `app: SERVICE`."""
    token = {"audience": "kubetorch", "expirationSeconds": 3600, "path": "token"}
    mounted = {"name": "token", "mountPath": "/var/run/secrets/kubetorch.com", "readOnly": True}
    labels = {"app": service}
    projected = {"sources": [{"serviceAccountToken": token}]}
    pod = template(labels=labels, volumes=[{"name": "token", "projected": projected}])
    pod["spec"]["containers"][0] |= {
        "image": image,
        "command": ["/kubetorch/bin/kt", "server", "start", "--workload", service],
        "volumeMounts": [mounted],
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": pod}
    return manifest("apps/v1", "Deployment", spec) | {"metadata": {"name": f"of-{service}"}}


def _selected(**fields: Any) -> Object:
    mine = {"app": "mine"}
    return {"selector": {"matchLabels": mine}, "template": template(labels=mine), **fields}


def _training(kind: str, specs: str, container: str, groups: dict[str, int], **more: Any) -> Object:
    replica_specs = {
        name: {"replicas": pods, "restartPolicy": "Never", "template": template(container)}
        for name, pods in groups.items()
    }
    return manifest("kubeflow.org/v1", kind, {specs: replica_specs, **more})


def _launched() -> Object:
    """An MPIJob, whose launcher only starts what the workers do."""
    job = _training("MPIJob", "mpiReplicaSpecs", "mpi", {"Launcher": 1, "Worker": 2})
    job["spec"]["slotsPerWorker"] = 1
    return job


def _revision() -> Object:
    """The template of a Knative Service, which has a word of its own for the time to end."""
    pod_template = template(timeoutSeconds=10)
    del pod_template["spec"]["terminationGracePeriodSeconds"]
    return pod_template


_ENDING = template(restartPolicy="Never")

#: What a TrainJob runs on, here and in the golden manifests.
TRAIN_RUNTIME: Object = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "python"},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": 1}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {
                                "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                            },
                            "spec": {"template": template("node")},
                        },
                    }
                ]
            }
        },
    },
}

#: By kind: the object, and how many of its pods a call goes to.
KINDS: dict[str, tuple[Object, int]] = {
    "Deployment": (manifest("apps/v1", "Deployment", _selected(replicas=2)), 2),
    "ReplicaSet": (manifest("apps/v1", "ReplicaSet", _selected(replicas=2)), 2),
    "StatefulSet": (manifest("apps/v1", "StatefulSet", _selected(replicas=2)), 2),
    "DaemonSet": (manifest("apps/v1", "DaemonSet", _selected()), 0),
    "Pod": ({**manifest("v1", "Pod", {}), **template()}, 1),
    "Job": (manifest("batch/v1", "Job", {"parallelism": 2, "template": _ENDING}), 2),
    "CronJob": (
        manifest(
            "batch/v1",
            "CronJob",
            {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": _ENDING}}},
        ),
        1,
    ),
    "PyTorchJob": (
        _training("PyTorchJob", "pytorchReplicaSpecs", "pytorch", {"Master": 1, "Worker": 1}),
        2,
    ),
    "TFJob": (_training("TFJob", "tfReplicaSpecs", "tensorflow", {"Chief": 1, "Worker": 1}), 2),
    "MXJob": (
        _training("MXJob", "mxReplicaSpecs", "mxnet", {"Scheduler": 1}, jobMode="MXTrain"),
        1,
    ),
    "XGBoostJob": (
        _training("XGBoostJob", "xgbReplicaSpecs", "xgboost", {"Master": 1, "Worker": 1}),
        2,
    ),
    "MPIJob": (_launched(), 2),
    "JobSet": (
        manifest(
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            {
                "replicatedJobs": [
                    {
                        "name": "workers",
                        "template": {
                            "spec": {"parallelism": 2, "completions": 2, "template": _ENDING}
                        },
                    }
                ]
            },
        ),
        2,
    ),
    "TrainJob": (
        manifest(
            "trainer.kubeflow.org/v1alpha1",
            "TrainJob",
            {"runtimeRef": {"name": "python"}, "trainer": {"numNodes": 2}},
        ),
        2,
    ),
    "RayCluster": (
        manifest(
            "ray.io/v1",
            "RayCluster",
            {
                "rayVersion": "2.40.0",
                "headGroupSpec": {"rayStartParams": {}, "template": template("ray-head")},
                "workerGroupSpecs": [],
            },
        ),
        1,
    ),
    "Service": (manifest("serving.knative.dev/v1", "Service", {"template": _revision()}), 1),
}
