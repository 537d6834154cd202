"""Scale on concurrent requests per pod."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="2", gpus="1").autoscale(
    metric="concurrency",  # Scale on concurrent requests (default)
    target=10,  # Target 10 concurrent requests per pod
    target_utilization=70,  # Scale up at 70% of target (7 concurrent)
    min_scale=1,
    max_scale=20,
)

# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/class"] == "kpa.autoscaling.knative.dev"
assert annotations["autoscaling.knative.dev/metric"] == "concurrency"
assert annotations["autoscaling.knative.dev/target"] == "10"
assert annotations["autoscaling.knative.dev/target-utilization-percentage"] == "70"
assert annotations["autoscaling.knative.dev/min-scale"] == "1"
assert annotations["autoscaling.knative.dev/max-scale"] == "20"
