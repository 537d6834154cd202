"""`service_template` is laid over the manifest."""

import kubetorch as kt

compute = kt.Compute(
    cpus="1",
    service_template={
        "spec": {
            "template": {
                "spec": {"nodeSelector": {"node.kubernetes.io/instance-type": "g4dn.xlarge"}}
            }
        }
    },
)

assert compute.pod_spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "g4dn.xlarge"}
assert compute.cpus == "1"
