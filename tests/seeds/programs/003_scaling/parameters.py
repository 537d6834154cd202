"""Parameters of autoscaling, and their defaults."""

import kubetorch as kt

PREFIX = "autoscaling.knative.dev/"


def annotations(**parameters) -> dict:
    compute = kt.Compute(cpus=1).autoscale(**parameters)
    pod_annotations = compute.pod_template["metadata"]["annotations"]
    return {key.removeprefix(PREFIX): text for key, text in pod_annotations.items()}


for window in ("30s", "1m"):
    assert annotations(window=window)["window"] == window
for metric in ("concurrency", "rps"):
    assert annotations(metric=metric)["metric"] == metric
# "E.g., if target=100 and target_utilization=70, scaling starts at 70 active requests."
pod_annotations = annotations(target=100, target_utilization=70)
assert (pod_annotations["target"], pod_annotations["target-utilization-percentage"]) == (
    "100",
    "70",
)
# "min_scale: Default: None (scale-to-zero disabled)"
assert annotations()["min-scale"] == "1"
assert annotations(min_scale=0)["min-scale"] == "0"
# "max_scale: Default: 0 (no limit)"
assert "max-scale" not in annotations()
assert annotations(max_scale=0).get("max-scale", "0") == "0"
# "scale_to_zero_grace_period: Setting this enables scale-to-zero"
pod_annotations = annotations(scale_to_zero_grace_period=300)
assert pod_annotations["scale-to-zero-pod-retention-period"] == "300s"
assert pod_annotations["min-scale"] == "0"
# What is not given is left to Knative, whose defaults are those of the document.
assert not {"target", "window", "metric", "initial-scale"} & annotations().keys()
