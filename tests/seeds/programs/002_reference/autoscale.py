"""Autoscaling, in the spelling of this document."""

import kubetorch as kt

compute = kt.Compute(cpus=1)

# --- the example
compute.autoscale(
    min_replicas=0,
    max_replicas=10,
    target_concurrency=5,
)

# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/min-scale"] == "0"
assert annotations["autoscaling.knative.dev/max-scale"] == "10"
assert annotations["autoscaling.knative.dev/target"] == "5"
assert annotations["autoscaling.knative.dev/metric"] == "concurrency"
