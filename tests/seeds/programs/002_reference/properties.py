"""Properties of a service that is deployed."""

import kubetorch as kt


def my_function():
    return 1


compute = kt.Compute(cpus="0.5", memory="4Gi", namespace="default")
remote_fn = kt.fn(my_function).to(compute)

shown = (
    # --- the example
    compute.service_name,  # "yourname-my-function"
    compute.namespace,  # "default"
    compute.endpoint,  # Internal service URL
    compute.cpus,  # "0.5"
    compute.memory,  # "4Gi"
    compute.gpus,  # "1"
    compute.gpu_type,  # "L4"
    compute.replicas,  # 1
    compute.deployment_mode,  # "deployment" | "knative" | "raycluster"
    compute.distributed_config,  # {...} if distributed
    compute.autoscaling_config,  # {...} if autoscaling
    compute.pod_spec,  # Full pod spec dict
    compute.manifest,  # Full K8s manifest dict
    # --- what is said of it
)

assert compute.service_name == remote_fn.service_name
assert compute.service_name.endswith(("my-function", "myfunction"))
assert compute.namespace == "default"
assert compute.service_name in compute.endpoint or compute.endpoint.startswith("http://127.0.0.1:")
assert shown[3:9] == ("0.5", "4Gi", None, None, 1, "deployment")
assert shown[9:11] == (None, None)
assert compute.pod_spec == compute.manifest["spec"]["template"]["spec"]
assert compute.manifest["metadata"]["name"] == compute.service_name
remote_fn.teardown()

with_gpus = kt.Compute(gpus=1, gpu_type="L4")
assert (with_gpus.gpus, with_gpus.gpu_type) == ("1", "L4")
assert kt.Compute(cpus=1).autoscale().deployment_mode == "knative"
assert kt.Compute(cpus=1).autoscale(target=3).autoscaling_config.target == 3
ray = kt.Compute(cpus=1).distribute("ray", workers=2)
assert ray.deployment_mode == "raycluster"
assert ray.distributed_config["workers"] == 2
