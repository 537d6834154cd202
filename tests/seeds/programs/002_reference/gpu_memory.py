"""Memory of a GPU: a whole one is still asked for."""

import kubetorch as kt

# --- the example
compute = kt.Compute(gpu_memory="4Gi", cpus="1")  # Request GPU with 4GB limit

# --- what is said of it
assert compute.resources["limits"] == {"nvidia.com/gpu": "1"}
# "Uses KAI scheduler GPU sharing annotations."
assert compute.manifest["metadata"]["annotations"]["gpu-memory"] == "4Gi"
