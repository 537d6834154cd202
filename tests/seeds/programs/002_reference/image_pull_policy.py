"""When the image is pulled."""

import kubetorch as kt

# --- the example
always = kt.Compute(image_pull_policy="Always")
absent = kt.Compute(image_pull_policy="IfNotPresent")
never = kt.Compute(image_pull_policy="Never")

# --- what is said of it
for compute, policy in [(always, "Always"), (absent, "IfNotPresent"), (never, "Never")]:
    assert compute.pod_spec["containers"][0]["imagePullPolicy"] == policy
