"""A typical inference service: the model is loaded once per pod, each call goes to one pod."""

import functools

import kubetorch as kt

my_inputs = [1, 2, 3]


@functools.cache
def load_model():
    import transformers

    return transformers.AutoModel.from_pretrained("bert-base")


# --- the example
def predict(inputs):
    # Model loaded once per pod, reused across requests
    model = load_model()  # Cached
    return model(inputs)


compute = kt.Compute(
    cpus="4",
    gpus="1",
    memory="16Gi",
    image=kt.Image("pytorch/pytorch:2.0.0").pip_install(["transformers"]),
).autoscale(
    min_scale=1,  # Keep at least 1 pod warm
    max_scale=10,  # Scale up to 10 pods under load
    target=5,  # Target 5 concurrent requests per pod
    concurrency=10,  # But allow up to 10 (queue the rest)
    scale_down_delay="5m",  # Wait 5 min before scaling down
)
# --- what is said of it

container = compute.pod_spec["containers"][0]
assert container["image"] == "pytorch/pytorch:2.0.0"
assert compute.manifest["spec"]["template"]["spec"]["containerConcurrency"] == 10
annotations = compute.pod_template["metadata"]["annotations"]
assert annotations["autoscaling.knative.dev/scale-down-delay"] == "5m"

try:
    # --- the example
    inference_fn = kt.fn(predict).to(compute)
    # --- what is said of it
except kt.ResourceNotAvailableError:  # this machine has no GPU
    compute.gpus = None
    inference_fn = kt.fn(predict).to(compute)

# --- the example
# Each call is routed to one pod
result = inference_fn(my_inputs)

# --- what is said of it
assert result == "bert-base says [1, 2, 3]", result
inference_fn.teardown()
