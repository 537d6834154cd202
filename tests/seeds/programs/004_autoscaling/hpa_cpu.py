"""Scale on CPU utilization."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="4", memory="8Gi").autoscale(
    autoscaler_class="hpa.autoscaling.knative.dev",
    metric="cpu",
    target=80,  # Scale up at 80% CPU utilization
    min_scale=2,
    max_scale=20,
)

# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/class"] == "hpa.autoscaling.knative.dev"
assert annotations["autoscaling.knative.dev/metric"] == "cpu"
assert annotations["autoscaling.knative.dev/target"] == "80"
assert annotations["autoscaling.knative.dev/min-scale"] == "2"
assert annotations["autoscaling.knative.dev/max-scale"] == "20"
