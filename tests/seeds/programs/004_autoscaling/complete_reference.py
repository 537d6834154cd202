"""All parameters of autoscaling together."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="4", gpus="1", memory="16Gi").autoscale(
    # Scaling bounds
    min_scale=1,
    max_scale=50,
    initial_scale=2,
    # Metric configuration (KPA)
    metric="concurrency",  # "concurrency", "rps", "cpu", "memory"
    target=10,  # Target value per pod
    target_utilization=70,  # % of target to trigger scaling
    # Request handling
    concurrency=20,  # Max concurrent requests per pod
    # Timing
    window="60s",  # Metric averaging window
    scale_down_delay="2m",  # Delay before scale-down
    scale_to_zero_pod_retention_period="10m",  # Keep last pod this long
    progress_deadline="15m",  # Max deployment time
    # Autoscaler selection (for HPA)
    # autoscaler_class="hpa.autoscaling.knative.dev",
)

# --- what is said of it
template = compute.manifest["spec"]["template"]
assert template["spec"]["containerConcurrency"] == 20
assert template["metadata"]["annotations"] == {
    "autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev",
    "autoscaling.knative.dev/min-scale": "1",
    "autoscaling.knative.dev/max-scale": "50",
    "autoscaling.knative.dev/initial-scale": "2",
    "autoscaling.knative.dev/metric": "concurrency",
    "autoscaling.knative.dev/target": "10",
    "autoscaling.knative.dev/target-utilization-percentage": "70",
    "autoscaling.knative.dev/window": "60s",
    "autoscaling.knative.dev/scale-down-delay": "2m",
    "autoscaling.knative.dev/scale-to-zero-pod-retention-period": "10m",
    "serving.knative.dev/progress-deadline": "15m",
}
assert compute.autoscaling_config.target_utilization == 70
