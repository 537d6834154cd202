"""Every parameter of `autoscale`, with the values that its description names."""

import kubetorch as kt

PREFIX = "autoscaling.knative.dev/"


def annotations(**parameters) -> dict:
    compute = kt.Compute(cpus=1).autoscale(**parameters)
    pod_annotations = compute.pod_template["metadata"]["annotations"]
    return {key.removeprefix(PREFIX): text for key, text in pod_annotations.items()}


assert annotations(target=10)["target"] == "10"
assert annotations(window="60s")["window"] == "60s"
assert annotations(target_utilization=70)["target-utilization-percentage"] == "70"
# "0 allows scale to zero."
assert annotations(min_scale=0)["min-scale"] == "0"
assert annotations(max_scale=5)["max-scale"] == "5"
assert annotations(initial_scale=2)["initial-scale"] == "2"
for period in ("30s", "1m5s"):
    pod_annotations = annotations(scale_to_zero_pod_retention_period=period)
    assert pod_annotations["scale-to-zero-pod-retention-period"] == period
assert annotations(scale_down_delay="15m")["scale-down-delay"] == "15m"
for metric in ("concurrency", "rps"):
    pod_annotations = annotations(metric=metric)
    assert (pod_annotations["metric"], pod_annotations["class"]) == (
        metric,
        "kpa.autoscaling.knative.dev",
    )
# ""cpu" and "memory" require autoscaler_class="hpa.autoscaling.knative.dev""
for metric in ("cpu", "memory"):
    pod_annotations = annotations(metric=metric, autoscaler_class="hpa.autoscaling.knative.dev")
    assert (pod_annotations["metric"], pod_annotations["class"]) == (
        metric,
        "hpa.autoscaling.knative.dev",
    )
# "**extra_annotations - Additional Knative autoscaling annotations."
assert annotations(activation_scale=3)["activation-scale"] == "3"

# "concurrency: Maximum concurrent requests per pod (containerConcurrency). If not set, pods accept
# unlimited concurrent requests."
compute = kt.Compute(cpus=1).autoscale(concurrency=4)
assert compute.manifest["spec"]["template"]["spec"]["containerConcurrency"] == 4
assert "containerConcurrency" not in kt.Compute(cpus=1).autoscale().pod_spec

# "progress_deadline: ... Must be longer than startup probe timeout."
assert kt.Compute(launch_timeout=300).autoscale().pod_template["metadata"]["annotations"][
    "serving.knative.dev/progress-deadline"
] == ("10m")
try:
    kt.Compute(launch_timeout=900).autoscale(progress_deadline="10m")
except kt.AutoScalingError as error:
    assert "progress_deadline" in str(error), error
else:
    raise AssertionError("the revision would fail before its pods may have started")
