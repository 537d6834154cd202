"""The basic configuration: bounds and a target."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    cpus="2",
    gpus="1",
    memory="8Gi",
).autoscale(
    min_scale=1,  # Minimum replicas (0 allows scale-to-zero)
    max_scale=10,  # Maximum replicas
    target=10,  # Target concurrent requests per pod
)
# --- what is said of it


def inference(inputs):
    return [2 * number for number in inputs]


annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/min-scale"] == "1"
assert annotations["autoscaling.knative.dev/max-scale"] == "10"
assert annotations["autoscaling.knative.dev/target"] == "10"
# "KPA (default)"
assert annotations["autoscaling.knative.dev/class"] == "kpa.autoscaling.knative.dev"
assert compute.resources["limits"] == {"nvidia.com/gpu": "1"}

# "Autoscaling and distributed computing are mutually exclusive."
try:
    compute.distribute("pytorch", workers=2)
except kt.SpecError as error:
    assert "autoscale" in str(error) and "distribute" in str(error), error
else:
    raise AssertionError("both were taken")

try:
    # --- the example
    remote_fn = kt.fn(inference).to(compute)
    # --- what is said of it
except kt.ResourceNotAvailableError as error:  # this machine has no GPU
    assert "gpus" in str(error) or "GPU" in str(error), error
    compute.gpus = None
    remote_fn = kt.fn(inference).to(compute)
assert remote_fn([1, 2]) == [2, 4]
remote_fn.teardown()
