"""The type of GPU by the label of nodes, and by those that clouds have for it."""

import kubetorch as kt

# --- the example
l4 = kt.Compute(gpus=1, gpu_type="L4")
a100 = kt.Compute(gpus=1, gpu_type="A100")
v100 = kt.Compute(gpus=1, gpu_type="V100")
h100 = kt.Compute(gpus=1, gpu_type="H100")

# --- what is said of it
# "Maps to nvidia.com/gpu.product node label": nodes say it in full, such as NVIDIA-H100-80GB-HBM3,
# and the same is said by the labels of clouds, so it is no `nodeSelector` of one value.
for compute, name, product in [
    (l4, "L4", "NVIDIA-L4"),
    (a100, "A100", "NVIDIA-A100-SXM4-80GB"),
    (v100, "V100", "Tesla-V100-SXM2-16GB"),
    (h100, "H100", "NVIDIA-H100-80GB-HBM3"),
]:
    affinity = compute.pod_spec["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    of_product = terms[0]["matchExpressions"][0]
    assert (of_product["key"], of_product["operator"]) == ("nvidia.com/gpu.product", "In")
    assert {name, product} <= set(of_product["values"])
    assert compute.gpu_type == name
