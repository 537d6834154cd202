"""Pods without GPUs stay away from nodes that have some."""

import os

import kubetorch as kt


def keys(compute: kt.Compute) -> set:
    affinity = compute.pod_spec["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return {
        expression["key"]
        for expression in terms[0]["matchExpressions"]
        if expression["operator"] == "DoesNotExist"
    }


# --- the example
compute = kt.Compute(cpus="1", gpu_anti_affinity=True)

# --- what is said of it
assert "nvidia.com/gpu" in keys(compute)
# "Can also set via KT_GPU_ANTI_AFFINITY env var."
os.environ["KT_GPU_ANTI_AFFINITY"] = "true"
assert keys(kt.Compute(cpus="1")) == keys(compute)
