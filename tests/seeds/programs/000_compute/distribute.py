"""Distributed workers: a RayCluster, and four pods for PyTorch."""

import kubetorch as kt


def simple_summer(a, b):
    return a + b


service_name = "summer"
refused = None

try:
    # --- the example
    remote_fn = kt.fn(simple_summer, service_name).to(
        kt.Compute(
            cpus="2",
            memory="4Gi",
            image=kt.Image(image_id="rayproject/ray"),
            launch_timeout=300,
        ).distribute("ray", workers=2)
    )
    # --- what is said of it
except kt.KubetorchError as error:
    refused = error

# The embedded backend has no Ray yet, and says so before anything is started.
assert refused is not None and "ray" in str(refused), refused
compute = kt.Compute(
    cpus="2",
    memory="4Gi",
    image=kt.Image(image_id="rayproject/ray"),
    launch_timeout=300,
).distribute("ray", workers=2)
assert compute.kind == "RayCluster"
head = compute.manifest["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
group = compute.manifest["spec"]["workerGroupSpecs"][0]
assert head["image"] == "rayproject/ray"
# "workers: the number of workers to create, with identical compute resources"
assert group["replicas"] == 1  # and the head is the other
worker = group["template"]["spec"]["containers"][0]
assert worker["resources"] == head["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}}
# "quorum_timeout: Defaults to launch_timeout if not provided"
assert compute.distributed_config["quorum_timeout"] == 300

# --- the example
gpus = kt.Compute(
    gpus=1,
    image=kt.Image(image_id="nvcr.io/nvidia/pytorch:23.10-py3"),
    launch_timeout=600,
    inactivity_ttl="4h",
).distribute("pytorch", workers=4)

# --- what is said of it
assert gpus.kind == "Deployment"
assert gpus.manifest["spec"]["replicas"] == 4
assert gpus.distributed_config["distribution_type"] == "pytorch"
assert gpus.distributed_config["workers"] == 4
assert gpus.distributed_config["quorum_timeout"] == 600
assert gpus.manifest["metadata"]["annotations"]["kubetorch.com/inactivity-ttl"] == "4h"

# "Options: spmd (default, if empty), "pytorch", "ray", "monarch", "jax", or "tensorflow"."
assert kt.Compute(cpus=1).distribute().distributed_config["distribution_type"] == "spmd"
for name in ("spmd", "pytorch", "ray", "monarch", "jax", "tensorflow"):
    compute = kt.Compute(cpus=1).distribute(name, workers=2, num_proc=2, port=12345)
    assert compute.distributed_config.items() >= {"num_proc": 2, "port": 12345}.items()
