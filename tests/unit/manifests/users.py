"""Manifests as users bring them, one per kind, with fields that no parameter knows."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]


def template(container: str = "app", **fields: Any) -> Manifest:
    """A pod template with a sidecar, an init container and a volume of the user's own."""
    return {
        "metadata": {"labels": {"app": "mine", "tier": "pods"}, "annotations": {"note": "pods"}},
        "spec": {
            "initContainers": [{"name": "prepare", "image": "busybox"}],
            "containers": [
                {
                    "name": container,
                    "image": "registry.example/mine:1",
                    "command": ["sleep"],
                    "args": ["inf"],
                    "ports": [{"name": "web", "containerPort": 80}],
                    "env": [
                        {"name": "MINE", "value": "1"},
                        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    ],
                    "resources": {"limits": {"memory": "1Gi"}, "requests": {"cpu": 2}},
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                },
                {"name": "sidecar", "image": "registry.example/sidecar:1"},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "tolerations": [{"key": "spot", "operator": "Exists", "effect": ""}],
            "terminationGracePeriodSeconds": 5,
            **fields,
        },
    }


def _object(api_version: str, kind: str, spec: Manifest) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": "mine",
            "labels": {"app": "mine", "owner": "me"},
            "annotations": {"note": "object"},
            "finalizers": ["example.com/keep"],
        },
        "spec": spec,
    }


def _selected(kind: str, **fields: Any) -> Manifest:
    selector = {"matchLabels": {"app": "mine"}}
    return _object("apps/v1", kind, {"selector": selector, "template": template(), **fields})


def _training(kind: str, specs: str, primary: str, container: str, **fields: Any) -> Manifest:
    group = {"replicas": 1, "restartPolicy": "Never", "template": template(container)}
    return _object("kubeflow.org/v1", kind, {specs: {primary: group}, **fields})


def manifests() -> dict[str, Manifest]:
    """By kind; new ones each time."""
    job = template(restartPolicy="Never")
    ray_group = {"groupName": "small", "replicas": 2, "minReplicas": 0, "maxReplicas": 4}
    return {
        "Deployment": _selected("Deployment", replicas=2, revisionHistoryLimit=3),
        "StatefulSet": _selected("StatefulSet", replicas=2, serviceName="mine"),
        "ReplicaSet": _selected("ReplicaSet", replicas=2),
        "DaemonSet": _selected("DaemonSet", minReadySeconds=3),
        "Pod": {"apiVersion": "v1", "kind": "Pod", **template()},
        "Job": _object("batch/v1", "Job", {"backoffLimit": 2, "template": job}),
        "CronJob": _object(
            "batch/v1",
            "CronJob",
            {"schedule": "0 * * * *", "jobTemplate": {"spec": {"template": job}}},
        ),
        "Service": _object(
            "serving.knative.dev/v1",
            "Service",
            {"template": template(), "traffic": [{"latestRevision": True, "percent": 100}]},
        ),
        "RayCluster": _object(
            "ray.io/v1",
            "RayCluster",
            {
                "rayVersion": "2.40.0",
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": template()},
                "workerGroupSpecs": [{**ray_group, "template": template()}],
            },
        ),
        "PyTorchJob": _training("PyTorchJob", "pytorchReplicaSpecs", "Master", "pytorch"),
        "TFJob": _training("TFJob", "tfReplicaSpecs", "Chief", "tensorflow"),
        "MXJob": _training("MXJob", "mxReplicaSpecs", "Scheduler", "mxnet", jobMode="MXTrain"),
        "XGBoostJob": _training("XGBoostJob", "xgbReplicaSpecs", "Master", "xgboost"),
        "MPIJob": _training("MPIJob", "mpiReplicaSpecs", "Worker", "mpi", slotsPerWorker=2),
        "JAXJob": _training("JAXJob", "jaxReplicaSpecs", "Worker", "jax"),
        "TrainJob": _object(
            "trainer.kubeflow.org/v1alpha1",
            "TrainJob",
            {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {"numNodes": 2, "numProcPerNode": 4, "env": [{"name": "MINE"}]},
                "podSpecOverrides": [
                    {"targetJobs": [{"name": "other"}], "nodeSelector": {"disk": "ssd"}}
                ],
            },
        ),
        "JobSet": _object(
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            {
                "replicatedJobs": [
                    {
                        "name": "workers",
                        "template": {"spec": {"parallelism": 2, "completions": 2, "template": job}},
                    }
                ]
            },
        ),
        "LeaderWorkerSet": _object(
            "leaderworkerset.x-k8s.io/v1",
            "LeaderWorkerSet",
            {"leaderWorkerTemplate": {"size": 2, "workerTemplate": template()}},
        ),
    }
