"""Pods are constrained to nodes."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    node_selector={
        "node.kubernetes.io/instance-type": "g4dn.xlarge",
        "topology.kubernetes.io/zone": "us-west-2a",
    }
)

# --- what is said of it
assert compute.pod_spec["nodeSelector"] == {
    "node.kubernetes.io/instance-type": "g4dn.xlarge",
    "topology.kubernetes.io/zone": "us-west-2a",
}
