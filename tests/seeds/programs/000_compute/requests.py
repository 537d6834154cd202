"""CPUs, memory and GPUs that each pod asks for."""

import kubetorch as kt


def requests(compute: kt.Compute) -> dict:
    return compute.pod_spec["containers"][0]["resources"]["requests"]


# --- the example
# Basic CPU/Memory request
compute = kt.Compute(cpus="0.5", memory="2Gi")

# --- what is said of it
assert requests(compute) == {"cpu": "0.5", "memory": "2Gi"}
assert compute.kind == "Deployment"
# "replicas: if not specified, defaults to 1 for new manifests"
assert compute.manifest["spec"]["replicas"] == 1

# --- the example
# GPU request with memory limit
compute = kt.Compute(gpu_memory="4Gi", cpus="1.0")

# --- what is said of it
# "When using gpu_memory, a whole GPU is still requested but memory is limited"
assert requests(compute) == {"cpu": "1.0", "nvidia.com/gpu": "1"}
assert compute.manifest["metadata"]["annotations"]["gpu-memory"] == "4Gi"

# --- the example
# Multiple whole GPUs
compute = kt.Compute(gpus="2", memory="16Gi")

# --- what is said of it
assert requests(compute) == {"memory": "16Gi", "nvidia.com/gpu": "2"}
assert compute.pod_spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
