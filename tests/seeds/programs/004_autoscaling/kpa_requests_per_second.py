"""Scale on requests per second."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="2", gpus="1").autoscale(
    metric="rps",  # Scale on requests per second
    target=100,  # Target 100 RPS per pod
    target_utilization=80,  # Scale up at 80 RPS
    min_scale=2,
    max_scale=50,
)

# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/class"] == "kpa.autoscaling.knative.dev"
assert annotations["autoscaling.knative.dev/metric"] == "rps"
assert annotations["autoscaling.knative.dev/target"] == "100"
assert annotations["autoscaling.knative.dev/target-utilization-percentage"] == "80"
assert annotations["autoscaling.knative.dev/min-scale"] == "2"
assert annotations["autoscaling.knative.dev/max-scale"] == "50"
