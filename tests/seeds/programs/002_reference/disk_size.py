"""Ephemeral storage."""

import kubetorch as kt

# --- the example
compute = kt.Compute(disk_size="10Gi")

# --- what is said of it
assert compute.resources == {"requests": {"ephemeral-storage": "10Gi"}}
