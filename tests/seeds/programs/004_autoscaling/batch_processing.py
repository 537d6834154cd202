"""Batches that come periodically: pods when there is work, none when there is none."""

import kubetorch as kt

batches = [[1, 2], [3], [4, 5, 6]]


def process_batch(batch):
    return sum(batch)


# --- the example
compute = kt.Compute(cpus="8", memory="32Gi").autoscale(
    min_scale=0,  # Scale to zero when idle
    max_scale=20,  # Scale up for large batches
    metric="rps",
    target=50,  # Target 50 requests/sec per pod
    scale_to_zero_pod_retention_period="2m",  # Quick scale-down
)
# --- what is said of it
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/min-scale"] == "0"
assert annotations["autoscaling.knative.dev/metric"] == "rps"
assert annotations["autoscaling.knative.dev/scale-to-zero-pod-retention-period"] == "2m"
processed = []

# --- the example
process_fn = kt.fn(process_batch).to(compute)
# Process items - pods scale up automatically
for batch in batches:
    results = process_fn(batch)
    # --- what is said of it
    processed.append(results)

# "Without Knative, services deploy as standard Kubernetes Deployments with fixed replica counts."
assert processed == [3, 3, 15]
assert len(process_fn.compute.pods()) == 1
process_fn.teardown()
