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
wanted = [
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "dedicated", "operator": "Equal", "value": "ml-workloads", "effect": "NoSchedule"},
]
assert compute.pod_spec["tolerations"] == wanted
# "GPU tolerations are added automatically when gpus > 0."
found = kt.Compute(gpus=1).pod_spec["tolerations"]
assert wanted[0] in found
# None of them is there twice.
compute.gpus = 1
assert compute.pod_spec["tolerations"].count(wanted[0]) == 1
