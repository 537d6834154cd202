"""Values that the descriptions of the parameters name: working_dir, shared memory, timeouts."""

import kubetorch as kt

# "Must be an absolute path (e.g. /kt)"
compute = kt.Compute(working_dir="/kt")
assert compute.pod_spec["containers"][0]["workingDir"] == "/kt"

for limit in ("512Mi", "2Gi", "1G", "1024Mi", "100M"):
    compute = kt.Compute(shared_memory_limit=limit)
    volumes = {volume["name"]: volume for volume in compute.pod_spec["volumes"]}
    assert volumes["dshm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": limit}
# "If not provided, /dev/shm will default to the pod's memory limit"
volumes = {volume["name"]: volume for volume in kt.Compute(cpus=1).pod_spec["volumes"]}
assert volumes["dshm"]["emptyDir"] == {"medium": "Memory"}

# "When set, adds the kueue.x-k8s.io/queue-name label to the pod template metadata."
compute = kt.Compute(cpus=1, queue_name="gpus")
assert compute.pod_template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
# "For training jobs (PyTorchJob, TFJob, etc.), also sets spec.runPolicy.suspend: true"
template = {"spec": {"containers": [{"name": "pytorch", "image": "x"}]}}
job = kt.Compute.from_manifest(
    {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job"},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": template}}},
    }
)
job.queue_name = "gpus"
assert job.manifest["spec"]["runPolicy"] == {"suspend": True}

# "Whether to prevent scheduling the service on a GPU, should no GPUs be requested." Default: False
affinity = kt.Compute(cpus=1, gpu_anti_affinity=True).pod_spec["affinity"]["nodeAffinity"]
required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
assert {"key": "nvidia.com/gpu", "operator": "DoesNotExist"} in required[0]["matchExpressions"]
assert "affinity" not in kt.Compute(cpus=1).pod_spec

# "Whether to freeze the compute configuration (e.g. for production)."
assert kt.Compute(cpus=1).freeze is False
