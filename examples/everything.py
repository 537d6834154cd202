"""Every parameter of a compute, for every kind of object that it can become.

`python -m tools.goldens examples/everything.py` prints what a deploy would apply, and of each
field where its meaning comes from.
"""

from __future__ import annotations

from typing import Any

import kubetorch as kt

kt.config.username = "me"

LAUNCH_TIMEOUT = 600

#: What every kind can say.
COMMON: dict[str, Any] = {
    "cpus": 2,
    "memory": "4Gi",
    "disk_size": "10Gi",
    "gpus": 2,
    "gpu_type": "NVIDIA-H200",
    "gpu_memory": "40Gi",
    "namespace": "research",
    "image": kt.Image(image_id="localhost/python:3.11").pip_install(["numpy"]),
    "labels": {"team": "ml"},
    "annotations": {"example.com/owner": "ml@example.com"},
    "volumes": [
        kt.Volume(
            name="data",
            size="10Gi",
            mount_path="/data",
            storage_class="shared",
            access_mode="ReadWriteMany",
        ),
        kt.Volume(name="models", mount_path="/models", pvc="shared-models"),
    ],
    "node_selector": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
    "tolerations": [
        {
            "key": "spot",
            "operator": "Equal",
            "value": "yes",
            "effect": "NoExecute",
            "tolerationSeconds": 60,
        }
    ],
    "env_vars": {"STAGE": "test", "TOOLS": "/opt/tools/bin", "PATH": "$TOOLS:$PATH"},
    "secrets": [
        kt.Secret(name="hf", values={"HF_TOKEN": "of an example"}),
        kt.Secret(name="aws", values={"credentials": "of an example"}, path="~/.aws"),
    ],
    "kubeconfig_path": "/home/me/.kube/config",
    "service_account_name": "trainer",
    "inactivity_ttl": "30m",
    "launch_timeout": LAUNCH_TIMEOUT,
    "shared_memory_limit": "2Gi",
    "allowed_serialization": ["json", "pickle"],
    "logging_config": kt.LoggingConfig(level="debug"),
    "queue_name": "gpus",
}
#: What a TrainJob leaves to its runtime.
OF_PODS: dict[str, Any] = {
    "priority_class_name": "high",
    "image_pull_policy": "IfNotPresent",
    "working_dir": "/app",
    "queue": "research",
    "server_port": 8080,
}
EVERYTHING = COMMON | OF_PODS


def grown(path: str) -> dict[str, Any]:
    """A service template that gives the pods at `path` more time to end."""
    template: dict[str, Any] = {"terminationGracePeriodSeconds": 60}
    for key in reversed(path.split(".")):
        template = {key: template}
    return template


def declare(compute: kt.Compute, parameters: dict[str, Any]) -> kt.Compute:
    """Set parameters on a compute that there is already."""
    for name, value in parameters.items():
        if name in ("labels", "annotations", "tolerations", "env_vars"):
            getattr(compute, f"add_{name}")(value)
        else:
            setattr(compute, name, value)
    compute.add_pod_template_labels({"example.com/tier": "training"})
    return compute


# ------------------------------------------------------------------------- made by Kubetorch alone

deployment = declare(
    kt.Compute(cpus=1),
    {**EVERYTHING, "replicas": 3, "service_template": grown("spec.template.spec")},
)

cpu_only = kt.Compute(
    cpus="500m",
    gpu_anti_affinity=True,
    freeze=True,
    concurrency=4,
    max_queue=100,
    num_proc=2,
    dispatch="any",
    data={"/models": "models/base", "/data": kt.Data("datasets/x", mode="rw")},
)

# Called are only the pods that the endpoint selects.
selected = declare(
    kt.Compute(
        cpus=1,
        selector={"app": "workers"},
        endpoint=kt.Endpoint(selector={"app": "workers", "role": "head"}),
    ),
    EVERYTHING,
)

knative = declare(
    kt.Compute(
        launch_timeout=LAUNCH_TIMEOUT,
        service_template={"spec": {"template": {"spec": {"timeoutSeconds": 600}}}},
    ),
    EVERYTHING,
).autoscale(
    target=10,
    window="60s",
    metric="concurrency",
    target_utilization=70,
    min_scale=1,
    max_scale=50,
    initial_scale=2,
    concurrency=20,
    scale_to_zero_pod_retention_period="10m",
    scale_down_delay="2m",
    progress_deadline="15m",
    activation_scale=3,
    panic_window_percentage=10,
    panic_threshold_percentage=200,
    target_burst_capacity=200,
)

raycluster = declare(
    kt.Compute(service_template=grown("spec.headGroupSpec.template.spec")).distribute(
        "ray", workers=3
    ),
    EVERYTHING,
)


# ---------------------------------------------------------------------------- manifests of users


def user(manifest: dict[str, Any], **parameters: Any) -> kt.Compute:
    """A manifest of one's own, with all that its kind can say besides."""
    return declare(kt.Compute.from_manifest(manifest), parameters)


def pods(container: str = "main", **fields: Any) -> dict[str, Any]:
    """A pod template of a user's own."""
    return {
        "metadata": {"labels": {"app": "mine"}},
        "spec": {
            "initContainers": [{"name": "prepare", "image": "localhost/python:3.11"}],
            "containers": [
                {
                    "name": container,
                    "image": "localhost/python:3.11",
                    "command": ["sleep"],
                    "args": ["infinity"],
                    "env": [{"name": "MINE", "value": "1"}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                },
                {"name": "sidecar", "image": "localhost/python:3.11", "command": ["cat"]},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            **fields,
        },
    }


def manifest(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """An object of a user's own."""
    metadata = {"name": f"my-{kind.lower()}", "labels": {"app": "mine"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def training(kind: str, specs: str, primary: str, container: str, **fields: Any) -> kt.Compute:
    """A training job whose workers are as its first pod."""
    group = {"replicas": 1, "restartPolicy": "Never", "template": pods(container)}
    further = {"Launcher": {**group, "template": _LAUNCHER}} if kind == "MPIJob" else {}
    training_job = manifest("kubeflow.org/v1", kind, {specs: {primary: group, **further}, **fields})
    template = grown(f"spec.{specs}.{primary}.template.spec")
    return user(training_job, **EVERYTHING, replicas=4, service_template=template)


_LAUNCHER = {"spec": {"containers": [{"name": "mpi", "image": "x", "command": ["mpirun"]}]}}
_SELECTED = {"selector": {"matchLabels": {"app": "mine"}}, "template": pods()}
_ENDING = pods(restartPolicy="Never")

from_deployment = user(
    manifest("apps/v1", "Deployment", {**_SELECTED, "revisionHistoryLimit": 3}),
    **EVERYTHING,
    replicas=2,
)
statefulset = user(
    manifest("apps/v1", "StatefulSet", {**_SELECTED, "serviceName": "mine"}),
    **EVERYTHING,
    replicas=2,
)
daemonset = user(manifest("apps/v1", "DaemonSet", _SELECTED), **EVERYTHING)
replicaset = user(manifest("apps/v1", "ReplicaSet", _SELECTED), **EVERYTHING, replicas=2)
job = user(manifest("batch/v1", "Job", {"template": _ENDING}), **EVERYTHING, replicas=2)
cronjob = user(
    manifest(
        "batch/v1",
        "CronJob",
        {"schedule": "0 4 * * *", "jobTemplate": {"spec": {"template": _ENDING}}},
    ),
    **EVERYTHING,
)
pod = user(
    {"apiVersion": "v1", "kind": "Pod", **pods(), "metadata": {"name": "my-pod"}}, **EVERYTHING
)
from_knative = user(
    manifest("serving.knative.dev/v1", "Service", {"template": pods()}), **EVERYTHING
).autoscale(metric="cpu", target=80, min_scale=2)
from_raycluster = user(
    manifest(
        "ray.io/v1",
        "RayCluster",
        {
            "rayVersion": "2.40.0",
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": pods("ray-head")},
            "workerGroupSpecs": [
                {
                    "groupName": "small",
                    "replicas": 1,
                    "minReplicas": 0,
                    "maxReplicas": 1,
                    "rayStartParams": {},
                    "template": pods("ray-worker"),
                }
            ],
        },
    ),
    **EVERYTHING,
    replicas=3,
)
pytorchjob = training("PyTorchJob", "pytorchReplicaSpecs", "Master", "pytorch")
tfjob = training("TFJob", "tfReplicaSpecs", "Chief", "tensorflow")
mxjob = training("MXJob", "mxReplicaSpecs", "Scheduler", "mxnet", jobMode="MXTrain")
xgboostjob = training("XGBoostJob", "xgbReplicaSpecs", "Master", "xgboost")
mpijob = training("MPIJob", "mpiReplicaSpecs", "Worker", "mpi", slotsPerWorker=2)
jaxjob = training("JAXJob", "jaxReplicaSpecs", "Worker", "jax")
trainjob = user(
    manifest(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        {"runtimeRef": {"name": "python"}, "trainer": {"numProcPerNode": 2}},
    ),
    **COMMON,
    replicas=2,
)
jobset = user(
    manifest(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {
            "replicatedJobs": [
                {
                    "name": "workers",
                    "template": {"spec": {"parallelism": 1, "completions": 1, "template": _ENDING}},
                }
            ]
        },
    ),
    **EVERYTHING,
    replicas=2,
)
leaderworkerset = user(
    manifest(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": 2,
                "leaderTemplate": pods("leader"),
                "workerTemplate": pods("worker"),
            },
        },
    ),
    **EVERYTHING,
    replicas=4,
)
custom = kt.Compute.from_manifest(
    manifest("example.com/v1", "Gang", {"tasks": [{"replicas": 2, "template": pods()}]}),
    pod_template_path="spec.tasks.0.template",
)
custom.cpus = "2"
custom.queue_name = "gpus"
