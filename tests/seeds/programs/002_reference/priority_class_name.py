"""The priority class."""

import kubetorch as kt

# --- the example
compute = kt.Compute(priority_class_name="high-priority")

# --- what is said of it
assert compute.pod_spec["priorityClassName"] == "high-priority"
