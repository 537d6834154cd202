"""Secrets: of providers, and one that exists."""

import os
import pathlib

import kubetorch as kt

folder = pathlib.Path.home() / ".aws"
folder.mkdir(exist_ok=True)
(folder / "credentials").write_text("[default]\naws_access_key_id = A\n")
(folder / "config").write_text("[default]\nregion = us-west-2\n")
os.environ["HF_TOKEN"] = "hf_of_this_test"

# --- the example
compute = kt.Compute(
    secrets=[
        kt.Secret.from_provider("aws"),
        kt.Secret.from_provider("huggingface"),
        "existing-k8s-secret-name",
    ]
)

# --- what is said of it
container, pod = compute.pod_spec["containers"][0], compute.pod_spec
mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
assert mounts["/root/.aws"]["readOnly"] is True
variables = {variable["name"]: variable.get("valueFrom", {}) for variable in container["env"]}
assert variables["HF_TOKEN"]["secretKeyRef"]["key"] == "HF_TOKEN"
assert "existing-k8s-secret-name" in str(container.get("envFrom")) + str(pod["volumes"])
# No value is in the manifest, nor in what the objects say of themselves.
assert "hf_of_this_test" not in f"{compute.manifest} {compute!r}"
