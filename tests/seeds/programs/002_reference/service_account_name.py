"""The service account of the pods."""

import kubetorch as kt

# --- the example
compute = kt.Compute(service_account_name="my-service-account")

# --- what is said of it
assert compute.pod_spec["serviceAccountName"] == "my-service-account"
# "Default: "kubetorch-service-account""
assert kt.Compute().pod_spec["serviceAccountName"] == "kubetorch-service-account"
