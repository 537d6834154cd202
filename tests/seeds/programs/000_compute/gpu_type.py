"""`gpu_type`: a value of the label nvidia.com/gpu.product, or a full string of another."""

import kubetorch as kt

affinity = kt.Compute(gpus=1, gpu_type="L4").pod_spec["affinity"]["nodeAffinity"]
terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
assert terms[0]["matchExpressions"][0]["key"] == "nvidia.com/gpu.product"
assert {"L4", "NVIDIA-L4"} <= set(terms[0]["matchExpressions"][0]["values"])
assert kt.Compute(gpus=1, gpu_type="nvidia.com/gpu.product: L4").pod_spec["nodeSelector"] == {
    "nvidia.com/gpu.product": "L4"
}
assert kt.Compute(gpus=1, gpu_type="cloud.google.com/gke-accelerator: l4").pod_spec[
    "nodeSelector"
] == {"cloud.google.com/gke-accelerator": "l4"}
