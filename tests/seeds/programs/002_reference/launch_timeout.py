"""How long a service may take to become ready."""

import os

import kubetorch as kt

# --- the example
compute = kt.Compute(launch_timeout=1800)  # 30 minutes

# --- what is said of it
assert compute.launch_timeout == 1800
probe = compute.pod_spec["containers"][0]["startupProbe"]
assert probe["failureThreshold"] * probe["periodSeconds"] == 1800
# "Default: 900 seconds (15 minutes). Can also set via KT_LAUNCH_TIMEOUT env var."
assert kt.Compute().launch_timeout == 900
os.environ["KT_LAUNCH_TIMEOUT"] = "60"
assert kt.Compute().launch_timeout == 60
