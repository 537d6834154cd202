"""GPUs: a number, text, none."""

import kubetorch as kt

# --- the example
one = kt.Compute(gpus=1)  # 1 GPU
two = kt.Compute(gpus="2")  # 2 GPUs
none = kt.Compute(gpus=0)  # No GPU (same as None)

# --- what is said of it
assert one.resources["limits"] == {"nvidia.com/gpu": "1"}
assert two.resources["limits"] == {"nvidia.com/gpu": "2"}
assert none == kt.Compute()
assert none.resources == {} and none.tolerations == []
