"""Termination after inactivity."""

import kubetorch as kt

# --- the example
minutes = kt.Compute(inactivity_ttl="30m")  # 30 minutes
hour = kt.Compute(inactivity_ttl="1h")  # 1 hour
day = kt.Compute(inactivity_ttl="1d")  # 1 day

# --- what is said of it
for compute, text in [(minutes, "30m"), (hour, "1h"), (day, "1d")]:
    assert compute.inactivity_ttl == text
    annotations = compute.manifest["metadata"]["annotations"]
    assert annotations["kubetorch.com/inactivity-ttl"] == text
