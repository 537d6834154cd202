"""The working directory of the container."""

import kubetorch as kt

# --- the example
compute = kt.Compute(working_dir="/app")

# --- what is said of it
assert compute.pod_spec["containers"][0]["workingDir"] == "/app"
# "Must be absolute path."
try:
    kt.Compute(working_dir="app")
except kt.SpecError as error:
    assert "working_dir" in str(error) and "absolute" in str(error), error
else:
    raise AssertionError("a relative path was taken")
