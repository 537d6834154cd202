"""Compute, image and module together: a model behind a class."""

import kubetorch as kt


# --- the example
class Model:
    def __init__(self, model_name):
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(model_name)

    def predict(self, text):
        return self.model(text)


# Define compute with image
compute = kt.Compute(
    cpus="4",
    gpus="1",
    image=kt.Image("pytorch/pytorch:2.0.0").pip_install(["transformers"]),
)

# --- what is said of it
assert compute.pod_spec["containers"][0]["image"] == "pytorch/pytorch:2.0.0"
try:
    # --- the example
    # Deploy and call
    remote_model = kt.cls(Model).to(compute, init_args={"model_name": "bert-base"})
    # --- what is said of it
except kt.ResourceNotAvailableError:  # this machine has no GPU
    compute.gpus = None
    remote_model = kt.cls(Model).to(compute, init_args={"model_name": "bert-base"})

# --- the example
result = remote_model.predict("Hello world")

# --- what is said of it
assert result == "bert-base says Hello world", result
# "On subsequent .to() calls, only changes are applied—no pod restarts or image rebuilds required."
before = remote_model.compute.pod_names()
remote_model = kt.cls(Model).to(compute, init_args={"model_name": "bert-large"})
assert remote_model.predict("again") == "bert-large says again"
assert remote_model.compute.pod_names() == before
remote_model.teardown()
