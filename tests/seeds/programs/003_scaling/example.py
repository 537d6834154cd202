"""Distributed PyTorch with two slips: memory without a unit, and a keyword of autoscaling."""

import os
import warnings

import kubetorch
import kubetorch as kt

os.environ.pop("ENVIRONMENT", None)

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    # --- the example
    gpus = kt.Compute(
        gpus=1,
        cpus=3,
        memory=12,
        inactivity_ttl="24h",
        launch_timeout=60,
        freeze=(os.environ.get("ENVIRONMENT", "DEV") == "PROD"),
        image=kt.Image(image_id="nvcr.io/nvidia/pytorch:23.10-py3").pip_install(["vllm"]),
    ).distribute("pytorch", workers=4, scale_to_zero_grace_period=60)
    # --- what is said of it

assert kubetorch is kt
container = gpus.pod_spec["containers"][0]
assert container["image"] == "nvcr.io/nvidia/pytorch:23.10-py3"
requests = container["resources"]["requests"]
assert requests == {"cpu": "3", "memory": "12", "nvidia.com/gpu": "1"}
assert gpus.freeze is False
assert gpus.launch_timeout == 60
assert gpus.manifest["spec"]["replicas"] == 4
assert gpus.distributed_config["distribution_type"] == "pytorch"
assert "scale_to_zero_grace_period" not in gpus.distributed_config
assert "vllm" in gpus.image.contents
# Neither slip passes in silence, and each warning is about the user's own line.
messages = [str(warning.message) for warning in warned]
assert len(messages) == 2, messages
assert "memory" in messages[0] and "12Gi" in messages[0]
assert "scale_to_zero_grace_period" in messages[1]
assert {warning.filename for warning in warned} == {__file__}

# "workers (str, optional): The number of workers to create."
assert kt.Compute(cpus=1).distribute("pytorch", workers="4").replicas == 4
