"""Limit how many requests each pod handles at once."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="2", gpus="1").autoscale(
    concurrency=5,  # Max 5 concurrent requests per pod
    target=5,  # Target same as limit
    min_scale=1,
    max_scale=10,
)

# --- what is said of it
assert compute.manifest["spec"]["template"]["spec"]["containerConcurrency"] == 5
assert compute.concurrency == 5
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/target"] == "5"
