"""An image with live setup: packages, variables, a command, files of this machine."""

import pathlib

import kubetorch as kt

if __name__ == "__main__":  # on this machine, not where pods import the function from this file
    pathlib.Path("configs").mkdir()
    pathlib.Path("configs/model.yaml").write_text("layers: 2\n")

# --- the example
image = (
    kt.Image(image_id="pytorch/pytorch:2.0.0-cuda11.7-cudnn8-runtime")
    .pip_install(["transformers", "accelerate"])
    .set_env_vars({"HF_TOKEN": "..."})
    .run_bash("apt-get update && apt-get install -y git")
    .copy("./configs", "/app/configs")
)

# --- what is said of it
compute = kt.Compute(cpus="0.1", image=image)
if __name__ == "__main__":
    # "The base image_id becomes the container image in the pod spec"
    container = compute.pod_spec["containers"][0]
    assert container["image"] == "pytorch/pytorch:2.0.0-cuda11.7-cudnn8-runtime"
    # "kt.Image compiles to a standard Dockerfile", whose lines are in the order of the steps.
    lines = image.contents.splitlines()
    assert lines[0] == "FROM pytorch/pytorch:2.0.0-cuda11.7-cudnn8-runtime"
    words = ["transformers", "accelerate", "HF_TOKEN", "apt-get install -y git", "/app/configs"]
    places = [
        next(line_number for line_number, line in enumerate(lines) if word in line)
        for word in words
    ]
    assert places == sorted(places), lines


def look():
    import os
    import pathlib

    import accelerate
    import transformers

    settings = pathlib.Path("/app/configs/model.yaml").read_text()
    return os.environ["HF_TOKEN"], accelerate.__name__, transformers.__name__, settings


# "Setup steps (pip_install, run_bash, etc.) run inside the container at startup", "Local files
# referenced by COPY commands are synced to the data store and pulled into pods"
remote_look = kt.fn(look).to(compute)
assert remote_look() == ["...", "accelerate", "transformers", "layers: 2\n"]
remote_look.teardown()
