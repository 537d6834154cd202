"""A queue, a priority, nodes and their taints."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    cpus="8",
    memory="64Gi",
    gpus=4,
    queue="high-priority",
    priority_class_name="critical",
    node_selector={"node-pool": "gpu-a100"},
    tolerations=[
        {"key": "gpu-reserved", "operator": "Exists", "effect": "NoSchedule"},
    ],
)

# --- what is said of it
pod = compute.pod_spec
assert pod["schedulerName"] == "kai-scheduler"
assert compute.pod_template["metadata"]["labels"]["kai.scheduler/queue"] == "high-priority"
assert pod["priorityClassName"] == "critical"
assert pod["nodeSelector"] == {"node-pool": "gpu-a100"}
reserved = {"key": "gpu-reserved", "operator": "Exists", "effect": "NoSchedule"}
assert reserved in pod["tolerations"]
assert "nvidia.com/gpu" in {toleration["key"] for toleration in pod["tolerations"]}
assert compute.resources["limits"] == {"nvidia.com/gpu": "4"}
