"""`node_selector` constrains pods to specific nodes."""

import kubetorch as kt

compute = kt.Compute(node_selector={"node.kubernetes.io/instance-type": "g4dn.xlarge"})

assert compute.pod_spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "g4dn.xlarge"}
