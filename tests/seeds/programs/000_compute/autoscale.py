"""Autoscaling: on Knative the service is one of Knative; elsewhere Kubetorch scales it."""

import kubetorch as kt


def my_fn_obj(a):
    return a + 1


def summer(a, b):
    return a + b


# --- the example
remote_fn = kt.fn(my_fn_obj).to(
    kt.Compute(
        cpus=".1",
    ).autoscale(min_replicas=1)
)

# --- what is said of it
assert remote_fn(1) == 2
# "The service will be deployed as a Knative service."
assert remote_fn.compute.kind == "Service"
assert remote_fn.compute.api_version.startswith("serving.knative.dev/")
annotations = remote_fn.compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/min-scale"] == "1"
# "Timing-related defaults are applied if not explicitly set"
assert annotations["autoscaling.knative.dev/scale-down-delay"] == "1m"
assert annotations["autoscaling.knative.dev/scale-to-zero-pod-retention-period"] == "10m"
# ""10m" or greater (... automatically adjusted based on launch_timeout)", which is 900 s
assert annotations["serving.knative.dev/progress-deadline"] == "1080s"
remote_fn.teardown()

# --- the example
remote_fn = kt.fn(summer).to(
    compute=kt.Compute(
        cpus=".01",
    ).autoscale(min_scale=3, scale_to_zero_grace_period=50),
)

# --- what is said of it
# Each call goes to one of the three pods.
assert remote_fn(1, 2) == 3
assert remote_fn.compute.replicas == 3
assert len(remote_fn.compute.pods()) == 3
annotations = remote_fn.compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/min-scale"] == "3"
assert annotations["autoscaling.knative.dev/scale-to-zero-pod-retention-period"] == "50s"
remote_fn.teardown()
