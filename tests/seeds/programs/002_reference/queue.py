"""Queues of the KAI scheduler."""

import kubetorch as kt

# --- the example
urgent = kt.Compute(queue="high-priority")
batch = kt.Compute(queue="batch-jobs")

# --- what is said of it
# "This sets schedulerName: kai-scheduler and adds kai.scheduler/queue label."
for compute, name in [(urgent, "high-priority"), (batch, "batch-jobs")]:
    assert compute.pod_spec["schedulerName"] == "kai-scheduler"
    assert compute.pod_template["metadata"]["labels"]["kai.scheduler/queue"] == name
    assert compute.manifest["metadata"]["labels"]["kai.scheduler/queue"] == name
