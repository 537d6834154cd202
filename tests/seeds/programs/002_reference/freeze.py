"""Production mode: no code is sent."""

import kubetorch as kt

# --- the example
compute = kt.Compute(freeze=True)

# --- what is said of it
assert compute.freeze is True
# "disables hot reload and code syncing": pods say so, and nobody traces their processes.
assert compute.manifest["metadata"]["annotations"]["kubetorch.com/freeze"] == "true"
assert "securityContext" not in compute.pod_spec["containers"][0]
