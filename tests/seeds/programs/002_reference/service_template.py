"""Raw overrides of the manifest."""

import kubetorch as kt

left_out = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]
        }
    }
}

# --- the example
compute = kt.Compute(
    service_template={
        "spec": {
            "template": {
                "spec": {
                    "nodeSelector": {"custom": "value"},
                    "affinity": {**left_out},
                }
            }
        }
    }
)

# --- what is said of it
assert compute.pod_spec["nodeSelector"] == {"custom": "value"}
assert compute.pod_spec["affinity"] == left_out
assert [container["name"] for container in compute.pod_spec["containers"]] == ["kubetorch"]
