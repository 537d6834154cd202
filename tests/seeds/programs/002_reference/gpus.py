"""GPUs: a number, text, none."""

import kubetorch as kt

# --- the example
single_gpu = kt.Compute(gpus=1)  # 1 GPU
two_gpus = kt.Compute(gpus="2")  # 2 GPUs
none = kt.Compute(gpus=0)  # No GPU (same as None)

# --- what is said of it
assert single_gpu.resources["limits"] == {"nvidia.com/gpu": "1"}
assert two_gpus.resources["limits"] == {"nvidia.com/gpu": "2"}
assert none == kt.Compute()
assert none.resources == {} and none.tolerations == []
