"""No pods when idle."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="2", gpus="1").autoscale(
    min_scale=0,  # Allow scale to zero
    scale_to_zero_pod_retention_period="5m",  # Keep last pod for 5 minutes
    scale_down_delay="2m",  # Wait 2 minutes before scaling down
)

# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/min-scale"] == "0"
assert annotations["autoscaling.knative.dev/scale-to-zero-pod-retention-period"] == "5m"
assert annotations["autoscaling.knative.dev/scale-down-delay"] == "2m"
# The table of defaults: 10m and 1m.
defaults = kt.Compute(cpus="2").autoscale(min_scale=0).pod_template["metadata"]["annotations"]
assert defaults["autoscaling.knative.dev/scale-to-zero-pod-retention-period"] == "10m"
assert defaults["autoscaling.knative.dev/scale-down-delay"] == "1m"
