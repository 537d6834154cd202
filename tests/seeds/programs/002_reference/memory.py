"""Memory: binary units, decimal units, bytes."""

import kubetorch as kt

# --- the example
gibibytes = kt.Compute(memory="4Gi")  # 4 gibibytes
gigabytes = kt.Compute(memory="4G")  # 4 gigabytes (slightly less)
same = kt.Compute(memory="4096Mi")  # Same as 4Gi

# --- what is said of it
assert gibibytes.resources == {"requests": {"memory": "4Gi"}}
assert gigabytes.resources == {"requests": {"memory": "4G"}}
assert same.resources == {"requests": {"memory": "4096Mi"}}
