"""How quickly the autoscaler responds."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="2", gpus="1").autoscale(
    window="60s",  # Time window for averaging metrics
    scale_down_delay="5m",  # Wait 5 min before scaling down
    initial_scale=3,  # Start with 3 replicas
    min_scale=1,
    max_scale=20,
)

# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/window"] == "60s"
assert annotations["autoscaling.knative.dev/scale-down-delay"] == "5m"
assert annotations["autoscaling.knative.dev/initial-scale"] == "3"
# The table of defaults: progress_deadline is 10m, or what launch_timeout needs.
defaults = kt.Compute(launch_timeout=300).autoscale().pod_template["metadata"]["annotations"]
assert defaults["serving.knative.dev/progress-deadline"] == "10m"
# "Tip: ... set progress_deadline higher than your expected startup time."
slow = kt.Compute(launch_timeout=1200).autoscale(progress_deadline="30m")
annotation = slow.pod_template["metadata"]["annotations"]["serving.knative.dev/progress-deadline"]
assert annotation == "30m"
