"""Volumes and secrets, in a namespace."""

import os
import pathlib

import kubetorch as kt

if __name__ == "__main__":  # on this machine, not where pods import the function from this file
    os.environ["HF_TOKEN"] = "hf_of_this_test"
    folder = pathlib.Path.home() / ".aws"
    folder.mkdir(exist_ok=True)
    (folder / "credentials").write_text("[default]\naws_access_key_id = A\n")
    (folder / "config").write_text("[default]\nregion = us-west-2\n")
    kt.Volume("shared-data", "1Gi", "/elsewhere", namespace="ml-workloads").create()

# --- the example
compute = kt.Compute(
    cpus="1",
    memory="4Gi",
    volumes=[
        kt.Volume.from_name("shared-data", mount_path="/data"),
        kt.Volume(name="scratch", size="50Gi", mount_path="/scratch"),
    ],
    secrets=[
        kt.Secret.from_provider("aws"),
        kt.Secret.from_provider("huggingface"),
    ],
    namespace="ml-workloads",
)


# --- what is said of it
def look(text):
    import os
    import pathlib

    for path in ("/data/note", "/scratch/note"):
        pathlib.Path(path).write_text(text)
    return [
        os.environ["HF_TOKEN"],
        pathlib.Path("~/.aws/credentials").expanduser().read_text(),
        pathlib.Path("/data/note").read_text(),
    ]


assert compute.manifest["metadata"]["namespace"] == "ml-workloads"
mounts = {mount["mountPath"] for mount in compute.volume_mounts}
assert {"/data", "/scratch", "/root/.aws"} <= mounts
remote_fn = kt.fn(look).to(compute)
token, credentials, note = remote_fn("kept")
assert (token, note) == ("hf_of_this_test", "kept")
assert "aws_access_key_id = A" in credentials
remote_fn.teardown()
for name in ("shared-data", "scratch"):
    kt.Volume.from_name(name, "ml-workloads").delete()
