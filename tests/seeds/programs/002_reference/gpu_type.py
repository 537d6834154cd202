"""The type of GPU as a label of nodes."""

import kubetorch as kt

# --- the example
l4 = kt.Compute(gpus=1, gpu_type="L4")
a100 = kt.Compute(gpus=1, gpu_type="A100")
v100 = kt.Compute(gpus=1, gpu_type="V100")
h100 = kt.Compute(gpus=1, gpu_type="H100")

# --- what is said of it
import yaml

assert l4.pod_spec["nodeSelector"] == yaml.safe_load("nvidia.com/gpu.product: L4")
for compute, name in [(a100, "A100"), (v100, "V100"), (h100, "H100")]:
    assert compute.pod_spec["nodeSelector"] == {"nvidia.com/gpu.product": name}
    assert compute.gpu_type == name
