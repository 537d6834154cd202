"""Scale on memory utilization."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="2", memory="16Gi").autoscale(
    autoscaler_class="hpa.autoscaling.knative.dev",
    metric="memory",
    target=70,  # Scale up at 70% memory utilization
    min_scale=1,
    max_scale=10,
)

# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/class"] == "hpa.autoscaling.knative.dev"
assert annotations["autoscaling.knative.dev/metric"] == "memory"
# Knative takes MiB: 70 % of 16 Gi.
assert annotations["autoscaling.knative.dev/target"] == "11469"
assert compute.autoscaling_config.target == 70
