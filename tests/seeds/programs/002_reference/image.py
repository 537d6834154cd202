"""The image: a preset, a preset with steps, any other."""

import kubetorch as kt

# --- the example
debian = kt.Compute(image=kt.images.Debian())
torch = kt.Compute(image=kt.images.Python312().pip_install(["torch"]))
pytorch = kt.Compute(image=kt.Image().from_docker("nvcr.io/nvidia/pytorch:24.08-py3"))

# --- what is said of it
assert debian.image.name == "debian"
assert torch.pod_spec["containers"][0]["image"] == "python:3.12-slim"
assert "torch" in torch.image.contents
assert pytorch.pod_spec["containers"][0]["image"] == "nvcr.io/nvidia/pytorch:24.08-py3"
