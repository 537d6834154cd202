"""A pool of pods: with resources, with all else that pods may have, by selector, by manifest."""

import kubetorch as kt

template = {"spec": {"containers": [{"name": "pytorch", "image": "pytorch/pytorch:2.0.0"}]}}
my_manifest = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "my-job"},
    "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": template}}},
}

# --- the example
# This creates a pool of pods, each with 4 CPUs, 1 GPU, and 16GB memory
compute = kt.Compute(
    cpus="4",
    gpus="1",
    memory="16Gi",
)

# --- what is said of it
assert compute.resources == {
    "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
    "limits": {"nvidia.com/gpu": "1"},
}

# --- the example
# The compute constructor supports more complex configurations
compute = kt.Compute(
    cpus="4",
    gpus="1",
    memory="16Gi",
    disk_size="100Gi",
    replicas=3,
    node_selector={"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
    secrets=[kt.Secret(name="hf-token", env_var="HF_TOKEN")],
    volumes=[kt.Volume(name="data", mount_path="/data", pvc="shared-data-pvc")],
    annotations={"prometheus.io/scrape": "true"},
    labels={"team": "ml-research"},
)

# --- what is said of it
# "By default, Kubetorch creates a Deployment with a Service."
assert compute.kind == "Deployment"
assert compute.manifest["spec"]["replicas"] == 3
metadata = compute.manifest["metadata"]
assert metadata["annotations"]["prometheus.io/scrape"] == "true"
assert metadata["labels"]["team"] == "ml-research"
assert compute.pod_template["metadata"]["labels"]["team"] == "ml-research"
pod = compute.pod_spec
container = pod["containers"][0]
assert container["resources"]["requests"]["ephemeral-storage"] == "100Gi"
assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
assert claims["data"] == {"claimName": "shared-data-pvc"}
assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
variables = {variable["name"]: variable.get("valueFrom") for variable in container["env"]}
assert variables["HF_TOKEN"]["secretKeyRef"]["key"] == "HF_TOKEN"

# --- the example
# This uses an existing pool of pods which match the selector
compute = kt.Compute(selector={"app": "my-training-jobset"})

# --- what is said of it
assert compute.selector_only
assert compute.selector == {"app": "my-training-jobset"}

# --- the example
# This uses a custom manifest (e.g. Kubeflow PyTorchJob, JobSet, etc.)
compute = kt.Compute.from_manifest(
    manifest=my_manifest,
    selector={"app": "workers"},
    endpoint=kt.Endpoint(url="my-lb.default.svc:8080"),
)

# --- what is said of it
assert compute.kind == "PyTorchJob"
assert compute.selector == {"app": "workers"}
assert compute.endpoint == "my-lb.default.svc:8080"

# "When you configure autoscaling, it creates a Knative Service instead. For Ray workloads, it
# creates a RayCluster."
assert kt.Compute(cpus=1).autoscale().api_version.startswith("serving.knative.dev/")
assert kt.Compute(cpus=1).distribute("ray", workers=2).kind == "RayCluster"
