"""A GPU of a type, much shared memory, a preset image."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    cpus="4",
    memory="32Gi",
    gpus=1,
    gpu_type="A100",
    shared_memory_limit="16Gi",
    image=kt.images.pytorch(),
)

# --- what is said of it
assert compute.resources["limits"] == {"nvidia.com/gpu": "1"}
affinity = compute.pod_spec["affinity"]["nodeAffinity"]
(product, *_clouds) = affinity["requiredDuringSchedulingIgnoredDuringExecution"][
    "nodeSelectorTerms"
]
assert product["matchExpressions"][0]["key"] == "nvidia.com/gpu.product"
assert "NVIDIA-A100-SXM4-80GB" in product["matchExpressions"][0]["values"]
volumes = {volume["name"]: volume for volume in compute.pod_spec["volumes"]}
assert volumes["dshm"]["emptyDir"]["sizeLimit"] == "16Gi"
image = compute.pod_spec["containers"][0]["image"]
assert image.startswith("nvcr.io/nvidia/pytorch:"), image
