"""Taints that pods accept."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    tolerations=[
        {
            "key": "nvidia.com/gpu",
            "operator": "Exists",
            "effect": "NoSchedule",
        },
        {
            "key": "dedicated",
            "operator": "Equal",
            "value": "ml-workloads",
            "effect": "NoSchedule",
        },
    ]
)

# --- what is said of it
expected_tolerations = [
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "dedicated", "operator": "Equal", "value": "ml-workloads", "effect": "NoSchedule"},
]
assert compute.pod_spec["tolerations"] == expected_tolerations
# "GPU tolerations are added automatically when gpus > 0."
gpu_tolerations = kt.Compute(gpus=1).pod_spec["tolerations"]
assert expected_tolerations[0] in gpu_tolerations
# None of them is there twice.
compute.gpus = 1
assert compute.pod_spec["tolerations"].count(expected_tolerations[0]) == 1
