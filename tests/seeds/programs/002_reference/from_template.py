"""A compute of what is deployed."""

import kubetorch as kt

k8s_manifest = kt.Compute(cpus="2", memory="4Gi", gpus=1, gpu_type="L4", replicas=3).manifest

# --- the example
# Used internally when reloading services
compute = kt.Compute.from_template({"resource": k8s_manifest})

# --- what is said of it
assert (compute.cpus, compute.memory, compute.gpus, compute.gpu_type) == ("2", "4Gi", "1", "L4")
assert compute.replicas == 3
assert compute.manifest["spec"]["template"] == k8s_manifest["spec"]["template"]
